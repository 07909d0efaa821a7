"""Every class of the installed transformers: roles, LoRA, gradients, files, merging, generation."""

import logging
from functools import cache
from pathlib import Path

import pytest
import transformers

from tests.helpers.deprecations import ROOT
from tests.helpers.family_laws import COLUMNS, plan, results, results_in_child
from tests.helpers.installed import installed

SAMPLE = (
    *("FalconH1ForCausalLM", "DeepseekV3ForCausalLM", "Gemma3ForConditionalGeneration"),
    *("BertForMaskedLM", "T5ForConditionalGeneration", "LlamaForSequenceClassification"),
    *("WhisperForConditionalGeneration", "Wav2Vec2ForCTC"),
)
"""Classes of the fast suite, one of each kind."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            family, id=family.name, marks=() if family.name in SAMPLE else pytest.mark.slow
        )
        for family in installed()
    ],
)
def test_a_class_of_transformers_works_or_its_failure_is_on_the_page(family):
    if family.name in SAMPLE:
        row = results(family, [column for column in COLUMNS if column is not plan])
    else:
        row = results_in_child(family)
    failed = {name: cell.text for name, cell in row.items() if cell.state == "fails"}
    assert not failed or failed.keys() <= {"build", *failing()[family.name]}, failed
    assert "build" not in failed or len(failing()[family.name]) == len(COLUMNS), failed


@cache
def failing() -> dict[str, list[str]]:
    """Return the columns of docs/models.md that fail, by class."""
    names, found = [column.__name__ for column in COLUMNS], {}
    for line in (ROOT / "docs/models.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            name, *cells = line.strip("| ").split(" | ")
            pairs = zip(names, cells, strict=True)
            found[name.strip("`")] = [column for column, cell in pairs if cell.startswith("no (")]
    return found


def test_the_page_has_a_row_for_every_class():
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}" not in text:
        pytest.skip("another version of transformers made the page")
    assert failing().keys() == {family.name for family in installed()}


@pytest.mark.parametrize(("folder", "count"), [("peftkit", 1), ("cli", 1), ("tests", 0)])
def test_a_name_that_transformers_will_remove_is_noticed_in_our_code(folder, count, deprecated):
    library = f"{Path(transformers.__file__).parent}/utils/generic.py"
    warn = compile("lambda: logger.warning('`name` is deprecated')", library, "eval")
    renamed = eval(warn, {"logger": logging.getLogger("transformers")})
    eval(compile("renamed()", f"{ROOT}/{folder}/example.py", "eval"), {"renamed": renamed})
    assert len(deprecated) == count
    deprecated.clear()
