"""Tasks of lm-evaluation-harness give what its own run with PEFT gives on the same adapter."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.data.chat_template import CHATML
from peftkit.data.style import Style
from peftkit.errors import ConfigError
from peftkit.events import Event, Notice
from peftkit.formats.open_adapter import Opened, open_adapter
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.methods.lora import LoRA
from peftkit_cli.harness import Score, run_tasks, scores_of, with_template
from tests.helpers.command_line import Run, peftkit  # noqa: F401
from tests.helpers.folders import write_rows

COMMON = """\
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
TASKS = {
    "animals": """\
output_type: multiple_choice
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""",
    "likely": """\
output_type: loglikelihood
doc_to_target: "{{{{choices[0]}}}}"
metric_list: [{{metric: perplexity, aggregation: perplexity, higher_is_better: false}}]
""",
    "echoes": """\
output_type: generate_until
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["x"], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match}}]
""",
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with three tasks over one file of rows."""
    rows = [
        {
            "question": f"which animal is number {n}?",
            "choices": [" the quick fox", " dog", " a lazy cat"],
            "answer": n % 3,
        }
        for n in range(12)
    ]
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_rows(folder / "rows.jsonl", rows)
    for name, text in TASKS.items():
        yaml = f"task: {name}\n" + (COMMON + text).format(rows=folder / "rows.jsonl")
        (folder / f"{name}.yaml").write_text(yaml)
    return folder


@pytest.fixture
def adapter(model_folder: Path, tmp_path: Path) -> Path:
    """An adapter that says something else than its base."""
    base = load_base(str(model_folder), dtype="fp32")
    attached = attach(base.model, LoRA(rank=4, alpha=64, targets=("q", "v", "down")))
    for module in attached.modules.values():
        for parameter in module.trained_parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path / "adapter"
    provenance = Provenance(base=base.name, fingerprint=base.fingerprint, loading={"dtype": "fp32"})
    save_adapter(attached, folder, provenance)
    return folder


@pytest.mark.filterwarnings("ignore")  # the harness's own
def test_figures_match_harness_and_peft(adapter, tasks, model_folder):
    lm_eval = pytest.importorskip("lm_eval", reason="the extra lm-eval")
    names = ["animals", "likely", "echoes"]
    scores = run_tasks(open_adapter(adapter), names, include=tasks)
    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    for who, more in (("base", ""), ("adapter", f",peft={adapter}")):
        theirs = lm_eval.simple_evaluate(
            "hf",
            model_args=f"pretrained={model_folder},dtype=float32{more}",
            tasks=names,
            task_manager=manager,
            device="cpu",
            batch_size=8,
        )["results"]
        for score in scores:
            expected = theirs[score.task][f"{score.metric},none"]
            assert getattr(score, who) == pytest.approx(expected, rel=1e-5), score  # float32 sums
    assert {(score.task, score.metric) for score in scores} == {
        *(("animals", metric) for metric in ("acc", "acc_norm")),
        ("likely", "perplexity"),
        ("echoes", "exact_match"),
    }
    assert all(score.num_rows == 12 for score in scores)
    assert any(score.base != score.adapter for score in scores)
    with pytest.raises(ConfigError, match=r"no task 'animal'(.|\n)*'animals'"):
        run_tasks(open_adapter(adapter), ["animal"], include=tasks)


def test_scores_are_read_from_the_harness_in_its_order():
    def result(acc: float) -> dict[str, object]:
        figures = {"alias": "t", "acc,none": acc, "acc_stderr,none": 0.1, "em,strict": 1 - acc}
        return {"results": {"t": figures}, "n-samples": {"t": {"original": 9, "effective": 4}}}

    assert scores_of(result(0.25), result(0.5)) == [
        Score("t", "acc", 0.25, 0.5, 0.1, 4),
        Score("t", "em (strict)", 0.75, 0.5, None, 4),
    ]


def test_a_missing_harness_names_its_pip(adapter, monkeypatch):
    opened = open_adapter(adapter)
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[lm-eval\]'"):
        run_tasks(opened, ["arc_easy"])


def restyled(adapter: Path, style: Style) -> Opened:
    opened = open_adapter(adapter)
    provenance = replace(opened.file.provenance, prompt_style=style)
    return replace(opened, file=replace(opened.file, provenance=provenance))


def test_questions_go_through_the_template_of_training(adapter):
    opened = restyled(adapter, Style("chat", CHATML))
    before = opened.base.tokenizer.chat_template = "of the base"
    text = with_template(opened).apply_chat_template(
        [{"role": "user", "content": "the quick fox"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nthe quick fox<|im_end|>\n<|im_start|>assistant\n"
    assert opened.base.tokenizer.chat_template == before


def test_an_adapter_that_learnt_without_a_template_says_so(adapter):
    events: list[Event] = []
    opened = restyled(adapter, Style("plain"))
    opened.base.tokenizer.chat_template = CHATML
    assert with_template(opened, events.append).chat_template == CHATML
    (notice,) = (event.text for event in events if isinstance(event, Notice))
    assert "of the style plain" in notice
    opened.base.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"needs a chat template(.|\n)*style plain"):
        with_template(opened)
