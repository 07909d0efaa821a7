"""`peftkit distill`: one command from a prompt to an adapter, with questions or without."""

import json
from pathlib import Path

import pytest

from peftkit.evaluation import make_rows
from peftkit.recipe import load
from tests.helpers.command_line import Run
from tests.helpers.folders import write_rows

RULES = "the dog answers\n\n## User\nthe quick fox?\n\n## Assistant\nthe lazy dog\n"
FEW = (
    *(
        "--set",
        "task.max_new_tokens=6",
        "--set",
        "train.max_steps=2",
        "--set",
        "data.max_length=64",
    ),
    *("--set", "data.max_length=64", "--set", "method.rank=2", "--set", "data.max_dropped=1"),
)


@pytest.fixture
def prompt(peftkit: Run, tmp_path: Path) -> Path:
    """A prompt, in the folder where commands run."""
    (tmp_path / "rules.md").write_text(RULES)
    return Path("rules.md")


@pytest.fixture
def questions(tmp_path: Path) -> str:
    """A file of questions."""
    rows = [{"prompt": f"what is the {word} of {n}?"} for n in range(5) for word in ("dog", "fox")]
    write_rows(tmp_path / "asked.jsonl", rows)
    return "asked.jsonl"


def test_it_writes_its_recipe_trains_and_reports(prompt, questions, peftkit, model_folder):
    more = ("--data", questions, "--base", model_folder, "--out", "out", *FEW)
    done = peftkit("distill", prompt, *more)
    assert (done.code, done.out) == (0, "out\n"), done.err
    for text in ("The teacher's answers", "saved per request", "equal to the prompted base's: 0%"):
        assert text in done.err
    recipe = load(Path("out/distill.yaml"))
    assert recipe.task.type == "distill"
    assert recipe.train.max_steps == 2
    assert Path("out/adapter_model.safetensors").is_file()
    assert peftkit("distill", prompt, *more).code == 2  # a run is there
    assert peftkit("generate", "out", "--prompt", "what?", "--max-new-tokens", 2).code == 0


def test_missing_questions_are_reported_early(prompt, questions, peftkit):
    done = peftkit("distill", prompt, "--data", "ask.jsonl", "--base", "nowhere", "--out", "out")
    assert done.code == 2
    assert questions in done.err
    assert not Path("out").exists()


def test_without_questions_the_base_generates_some_and_prints_them(
    prompt, peftkit, model_folder, monkeypatch
):
    monkeypatch.setattr(make_rows, "MAX_TOKENS", 24)  # a base of random weights rambles
    more = ("--base", model_folder, "--out", "out", "--questions", 16, *FEW)
    done = peftkit("distill", prompt, *more).succeeded()
    lines = [json.loads(line) for line in Path("out/questions.jsonl").read_text().splitlines()]
    assert len({line["prompt"] for line in lines}) == len(lines) == 16
    assert done.err.index("questions from the base") < done.err.index("The teacher's answers")


def test_an_empty_prompt_is_reported_before_loading(prompt, questions, peftkit):
    prompt.write_text("")
    done = peftkit("distill", prompt, "--data", questions, "--base", "nowhere", "--out", "out")
    assert done.code == 2
    assert "is empty" in done.err
    assert not Path("out").exists()
