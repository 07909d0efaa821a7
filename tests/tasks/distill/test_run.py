"""A run of distillation: the teacher is asked once, a resume is bit-equal, agreement is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peftkit.config import schema
from peftkit.errors import ConfigError, DataError
from peftkit.events import EvalDone, Event, RolledOut, RunStarted, Stage, StepDone, Table
from peftkit.formats.open_adapter import open_adapter
from peftkit.recipe import run
from peftkit.run.config import Recipe
from peftkit.sweeps.members import Member, check_members
from peftkit.tasks.distill.answers import FILE
from tests.tasks.distill.cases import write_prompt, write_rows

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def told(tmp_path: Path, model_folder: Path) -> dict[str, Any]:
    """A recipe of four steps over five questions."""
    file = write_rows(tmp_path)
    return {
        "task": {
            "type": "distill",
            "teacher": {"prompt": write_prompt(tmp_path)},
            "max_new_tokens": 6,
        },
        "base": {"model": str(model_folder), "dtype": "fp32"},
        "method": {"type": "lora", "rank": 2, "alpha": 4, "targets": ["q", "v"], "dropout": 0.1},
        "data": {"train": file, "eval": file, "max_length": 64},
        "train": {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 4,
            "batch_size": 2,
            "learning_rate": 0.05,
            "save_every": 1,
            "eval_every": 2,
        },
    }


def recipe(told: dict[str, Any], **changes: dict[str, Any]) -> Recipe:
    spec = {name: {**section, **changes.get(name, {})} for name, section in told.items()}
    return schema.from_dict(Recipe, spec, "the test")


def of_kind(events: list[Event], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def stages(events: list[Event], text: str) -> int:
    return sum(text in event.text for event in of_kind(events, Stage))


def test_the_teacher_answers_once_and_its_score_is_told_first(
    told: dict[str, Any], tmp_path: Path
) -> None:
    events: list[Event] = []
    watched = {"eval_generate": 5, "eval_before": True, "sample_every": 4}
    result = run(recipe(told, train=watched), on_event=events.append)
    assert stages(events, "The teacher answers 5 rows") == 1
    lines = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    assert sorted(line["source"] for line in lines) == sorted(
        f"{tmp_path}/rows.jsonl:{n}" for n in range(1, 6)
    )
    (score,) = [table for table in of_kind(events, Table) if "teacher's answers" in table.title]
    rows = dict(score.rows)
    assert rows["answers"] == "5"
    assert rows["exactly the row's own"] == "0 of 5"
    (started,) = of_kind(events, RunStarted)
    assert events.index(score) < events.index(started)
    assert "KL(teacher, student)" in started.paths
    assert "asked before the first step" in started.paths
    first, *_, last = of_kind(events, EvalDone)
    assert (first.step, last.step) == (0, 4)
    for name in ("loss", "same_token", "agreement", "exact_match", "rouge_l"):
        assert name in first.metrics
    assert last.metrics["loss"] < first.metrics["loss"]
    assert result.metrics["eval_tokens_saved"] > 10
    kept = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert any("agreement" in json.dumps(row) for row in kept)


def test_a_resumed_run_ends_bit_equal_and_asks_for_no_answer(
    told: dict[str, Any], tmp_path: Path
) -> None:
    run(recipe(told, train={"output_dir": str(tmp_path / "whole")}))

    class Stop(Exception):
        pass

    def stop(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            raise Stop

    with pytest.raises(Stop):
        run(recipe(told), on_event=stop)
    before = (tmp_path / "run" / FILE).read_bytes()
    events: list[Event] = []
    run(recipe(told), resume=True, on_event=events.append)
    assert stages(events, "The teacher answers") == 0
    assert (tmp_path / "run" / FILE).read_bytes() == before
    assert (tmp_path / "run" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


def test_answers_that_were_made_before_a_kill_are_not_made_again(
    told: dict[str, Any], tmp_path: Path
) -> None:
    run(recipe(told))
    file = tmp_path / "run" / FILE
    whole = file.read_text().splitlines(keepends=True)
    file.write_text("".join(whole[:3]) + whole[3][:20] + "\n")
    events: list[Event] = []
    run(recipe(told), overwrite=True, on_event=events.append)
    assert stages(events, "The teacher answers 2 rows") == 1


def test_another_prompt_is_answered_anew(told: dict[str, Any], tmp_path: Path) -> None:
    run(recipe(told))
    write_prompt(tmp_path, "the fox answers with cheese")
    events: list[Event] = []
    run(recipe(told), overwrite=True, on_event=events.append)
    assert stages(events, "The teacher answers 5 rows") == 1


def learnt(told: dict[str, Any], folder: Path, **changes: dict[str, Any]) -> list[float]:
    events: list[Event] = []
    train = {**changes.pop("train", {}), "output_dir": str(folder)}
    run(recipe(told, train=train, **changes), on_event=events.append)
    return [event.loss for event in of_kind(events, StepDone)]


def test_what_is_recomputed_or_asked_in_each_step_is_learnt_alike(
    told: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_dropout = {"method": {"dropout": 0.0}, "task": {"answers": "data"}}
    wanted = learnt(told, tmp_path / "kept", **no_dropout)
    recomputed = {"gradient_checkpointing": True}
    found = learnt(told, tmp_path / "recomputed", train=recomputed, **no_dropout)
    assert found == pytest.approx(wanted, rel=1e-4)
    monkeypatch.setattr("peftkit.tasks.distill.task.SHARE", 0.0)
    found = learnt(told, tmp_path / "in each step", **no_dropout)
    assert found == pytest.approx(wanted, rel=1e-4)


def test_a_quantised_base_teaches_itself(told: dict[str, Any], tmp_path: Path) -> None:
    losses = learnt(told, tmp_path / "nf4", base={"quantize": "nf4"}, train={"max_steps": 12})
    assert losses[-1] < losses[0]


def test_a_run_that_goes_on_learns_from_the_adapter_that_it_began_with(
    told: dict[str, Any], tmp_path: Path
) -> None:
    first = tmp_path / "first"
    learnt(told, first)
    again = {"type": "lora", "start_from": str(first)}
    spec = {**told, "method": again}
    monitored: list[Event] = []
    run(
        recipe(spec, train={"output_dir": str(tmp_path / "second"), "eval_before": True}),
        on_event=monitored.append,
    )
    before = of_kind(monitored, EvalDone)[0].metrics["loss"]
    assert before > 0.01  # its own answers, with the prompt in front
    assert (tmp_path / "second" / FILE).read_bytes() != (first / FILE).read_bytes()


def test_the_adapter_is_used_as_any_that_answers(told: dict[str, Any], tmp_path: Path) -> None:
    run(recipe(told))
    opened = open_adapter(tmp_path / "run")
    assert opened.task.type == "causal_lm"
    assert opened.style.kind == "chat"


def test_a_student_learns_on_its_own_answers(told: dict[str, Any], tmp_path: Path) -> None:
    events: list[Event] = []
    task = {"answers": "student", "kind": "reverse"}
    more = {"eval_before": True, "max_steps": 10, "learning_rate": 0.02, "eval_every": None}
    run(recipe(told, task=task, train=more), on_event=events.append)
    rolled = of_kind(events, RolledOut)
    assert [len(event.answers) for event in rolled][:4] == [2, 2, 1, 2]
    assert rolled[0].answers != rolled[2].answers
    steps = of_kind(events, StepDone)
    assert {"same_token", "length", "cut", "rollout_seconds"} <= steps[0].figures.keys()
    assert stages(events, "The teacher answers 5 rows") == 1  # the eval rows, to be measured by
    first, *_, last = of_kind(events, EvalDone)
    assert last.metrics["loss"] < first.metrics["loss"]
    (started,) = of_kind(events, RunStarted)
    assert "asked in each step" in started.paths


def test_a_sweep_refuses_it_by_name(told: dict[str, Any]) -> None:
    one = recipe(told)
    with pytest.raises(ConfigError, match="distill"):
        check_members([Member("a", one, {}), Member("b", one, {})])


def test_initial_values_that_read_rows_are_refused(told: dict[str, Any]) -> None:
    method = {"type": "lora", "rank": 2, "targets": ["q", "v"], "init": "eva"}
    with pytest.raises(ConfigError, match=r"method\.init: eva"):
        recipe({**told, "method": method})


def test_a_prompt_without_room_for_a_row_is_refused(told: dict[str, Any], tmp_path: Path) -> None:
    write_prompt(tmp_path, "the quick brown fox " * 500)
    with pytest.raises(DataError, match="Too long after the teacher's prompt: 5"):
        run(recipe(told))
