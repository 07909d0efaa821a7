"""Every class of the installed transformers: roles, LoRA, gradients, files, merging, generation."""

import pytest
from transformers.modeling_outputs import BaseModelOutputWithPast

from tests.helpers.deprecations import ROOT
from tests.helpers.family_laws import COLUMNS, DEFECTS, plan, results, results_in_child
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
def test_a_class_of_transformers_works_or_its_defect_is_listed(family):
    if family.name in SAMPLE:
        row = results(family, [column for column in COLUMNS if column is not plan])
    else:
        row = results_in_child(family)
    failed = {name: cell.text for name, cell in row.items() if cell.state == "fails"}
    listed = DEFECTS.get(family.name, ())
    assert failed.keys() <= {*listed}, failed


@pytest.mark.parametrize(("folder", "count"), [("peftkit", 1), ("cli", 1), ("tests", 0)])
def test_a_name_that_transformers_will_remove_is_noticed_in_our_code(folder, count, deprecated):
    code = compile("output.past_key_values", f"{ROOT}/{folder}/example.py", "eval")
    eval(code, {"output": BaseModelOutputWithPast()})
    assert len(deprecated) == count
    deprecated.clear()
