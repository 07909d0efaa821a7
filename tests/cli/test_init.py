"""`peftkit init`: every recipe that it writes is one that trains."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from peftkit.recipe import load
from peftkit_cli.init import GOALS, recipe_text
from tests.command_line import Run, turn, write_rows


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("task", GOALS)
def test_every_recipe_is_valid_and_says_what_was_asked(
    task: str, on_cpu: bool, tmp_path: Path
) -> None:
    text = recipe_text(
        task, data="my: rows.jsonl", model="org/m", on_cpu=on_cpu, num_rows=640, fields=["a"]
    )
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    recipe = load(tmp_path / "recipe.yaml")
    assert recipe.task.type == {"kto": "preference"}.get(task, task)
    assert (recipe.base.model, recipe.data.train) == ("org/m", "my: rows.jsonl")
    assert recipe.method.start_from is None
    assert recipe.train.epochs == 3
    if on_cpu:
        assert recipe.base.quantize == "none"
    if task != "kto":
        assert recipe.data.eval == 0.05
    assert text.count("  # ") >= 4


def test_options_answer_the_questions(peftkit: Run, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [turn("a", f"b {n}") for n in range(9)])
    args = ("--data", "rows.jsonl", "--model", "smollm2-135m", "--memory", "12GB")
    done = peftkit("init", *args, "--task", "causal_lm")
    assert done[:2] == (0, "recipe.yaml\n"), done.err
    commands = [line.strip().removeprefix("Next: ") for line in done.err.splitlines()]
    assert commands == [
        "peftkit check recipe.yaml",
        "peftkit plan recipe.yaml --memory 12GB",
        "peftkit train recipe.yaml",
    ]
    recipe = load(tmp_path / "recipe.yaml")
    assert (recipe.base.quantize, recipe.data.eval, recipe.train.epochs) == ("nf4", None, 5)
    again = peftkit("init", *args, "--task", "causal_lm")
    assert (again.code, again.out) == (2, "")
    assert "recipe.yaml" in again.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "rows.jsonl"), "--task"),
        ((), "--data"),
        (("--data", "rows.jsonl", "--task", "embeding"), "Did you mean 'embedding'?"),
        (("--data", "absent.jsonl"), "absent.jsonl"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    options: tuple[str, ...], message: str, peftkit: Run, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"anchor": "a", "positive": "b"}])
    done = peftkit("init", *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert not (tmp_path / "recipe.yaml").exists()


def test_the_questions_name_what_the_rows_suit_first(
    peftkit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"anchor": "a", "positive": "b"}] * 120)
    questions: list[str] = []

    def prompt(question: str, default: str | None = None, **_: object) -> str:
        questions.append(question)
        return default or "rows.jsonl"

    monkeypatch.setattr("typer.prompt", prompt)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    done = peftkit("init")
    assert done.code == 0, done.err
    assert len(questions) == 4
    assert questions[1].splitlines()[1].split()[0] == "embedding"
    recipe = load(tmp_path / "recipe.yaml")
    assert (recipe.task.type, recipe.base.model) == ("embedding", "all-minilm-l6-v2")
