"""Two processes on gloo learn what one does: preferences, rewards, and what a teacher says."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from peftkit.errors import EndedTogetherError, is_silent
from peftkit.events import StepDone
from peftkit.tasks.distill.teacher import FILE as ANSWERS
from peftkit.tasks.documents import Rollout
from peftkit.tasks.pairs.preference_rows import FILE as LOG_PROBS
from peftkit.tasks.rewards.grpo import GRPO
from peftkit.train import memory
from tests.helpers.children import exit_code, start_ranks
from tests.helpers.distill_cases import write_prompt
from tests.helpers.finished import Finished, finished, sections
from tests.helpers.pair_cases import write_verdicts

TASKS: dict[str, dict[str, Any]] = {
    "kto": {"task": "preference", "loss": "kto", "beta": 0.5},
    "grpo": {
        "task": "grpo",
        "rewards": [{"use": "regex", "pattern": "[aeiou].*[aeiou]"}],
        "answers": 6,
        "max_new_tokens": 8,
        "mask_cut": False,
    },
    "teacher": {"task": "distill", "teacher": {"prompt": "prompt.md"}, "max_new_tokens": 6},
    "follow": {
        "task": "distill",
        "teacher": {"prompt": "prompt.md", "follow": 0.5},
        "answers": "data",
    },
}
OF_A_PROCESS = ("rollout_seconds", "learn_seconds", "reward_std")
"""Of its own answers, and of each group of its own spread."""


def trained(model: str, name: str, **train: Any) -> Finished:
    told = sections(Path(), Path(model), "rows.jsonl", **TASKS[name])
    told["method"] |= {"rank": 2, "targets": ["q", "v"]}
    return finished(told, train={"batch_size": 2, **train})


def learn(folder: str, model: str, out: str, accumulation: int, names: Sequence[str]) -> None:
    """Run each task for a step (a teacher that follows: three), and write what they told."""
    os.chdir(folder)
    for name in names:
        done = trained(
            model,
            name,
            output_dir=f"{out}/{name}",
            max_steps=3 if name == "follow" else 1,
            gradient_accumulation=accumulation,
            learning_rate=0.01,
        )
        if os.environ.get("RANK", "0") == "0":
            figures = [(step.loss, dict(step.figures)) for step in done.of_kind(StepDone)]
            Path(out, name, "told.json").write_text(json.dumps(figures))


@pytest.mark.parametrize(
    "names",
    [("kto",), *(pytest.param((name,), marks=pytest.mark.slow) for name in [*TASKS][1:])],
)
def test_two_processes_learn_what_one_does(names, tmp_path, model_folder, monkeypatch):
    write_verdicts(tmp_path / "rows.jsonl")
    write_prompt(tmp_path)
    here, model = str(tmp_path), str(model_folder)
    children = start_ranks(learn, here, model, "two", 1, names)
    monkeypatch.chdir(tmp_path)
    learn(here, model, "one", 2, names)
    assert [exit_code(each, 240) for each in children] == [0, 0]
    for name in names:
        one, two = (json.loads(Path(out, name, "told.json").read_text()) for out in ("one", "two"))
        for (loss, figures), (other, others) in zip(one, two, strict=True):
            assert other == pytest.approx(loss, rel=1e-3, abs=1e-4), name
            for each in OF_A_PROCESS:
                figures.pop(each, None), others.pop(each, None)
            # AdamW magnifies rounding
            assert others == pytest.approx(figures, rel=1e-2, abs=1e-3), name
    if "kto" in names:
        assert Path("two/kto", LOG_PROBS).is_file()
    if "teacher" not in names:
        return
    answers = [Path(out, "teacher", ANSWERS).read_text().split("\n") for out in ("one", "two")]
    assert sorted(answers[0]) == sorted(answers[1])


def run_out(folder: str, model: str) -> None:
    """Learn from rewards; in the second step memory runs out in the second process alone."""
    os.chdir(folder)
    rank, step = os.environ["RANK"], GRPO.roll_out
    calls: list[int] = []

    def roll_out(self: GRPO, *args: Any) -> Rollout:
        calls.append(len(calls))
        if rank == "1" and len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return step(self, *args)

    GRPO.roll_out = roll_out  # type: ignore[method-assign]
    try:
        trained(model, "grpo", output_dir="out", max_steps=3)
    except EndedTogetherError as error:
        Path(f"told-{rank}").write_text(f"{error}\n{is_silent(error)}")


@pytest.mark.covers("peftkit")
def test_out_of_memory_in_one_process_saves_all(tmp_path, model_folder):
    write_verdicts(tmp_path / "rows.jsonl")
    children = start_ranks(run_out, str(tmp_path), str(model_folder))
    assert [exit_code(each, 120) for each in children] == [0, 0]
    for rank, is_left_to_another in (("0", False), ("1", True)):
        told = (tmp_path / f"told-{rank}").read_text()
        assert told.startswith("memory ran out\n  In process 1 of 2. OutOfMemoryError")
        assert told.endswith(str(is_left_to_another))
    assert [*(tmp_path / "out" / "checkpoints").glob("step-1/*")], "the first step is saved"


def measure_short(folder: str, model: str) -> None:
    """Learn; while rows are measured, memory runs out in the second process alone."""
    os.chdir(folder)
    rank, saved_by, calls = os.environ["RANK"], memory.saved_by, list[int]()

    def measured(*args: Any) -> Any:
        calls.append(len(calls))
        if rank == "1" and len(calls) == 2:  # of the longest row
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return saved_by(*args)

    memory.saved_by = measured
    steps = trained(model, "kto", output_dir="out", max_steps=1).of_kind(StepDone)
    assert (rank == "1") == (not steps)
    assert len(calls) == 2


def test_a_process_without_memory_to_measure_rows_is_in_step(tmp_path, model_folder):
    """Neither process has the other's bytes; the first step finds what fits into both."""
    write_verdicts(tmp_path / "rows.jsonl")
    children = start_ranks(measure_short, str(tmp_path), str(model_folder))
    assert [exit_code(each, 60) for each in children] == [0, 0]
