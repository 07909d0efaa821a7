"""A run of distillation: the teacher is asked once, a resume is bit-equal, agreement is told."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peftkit.errors import CheckpointError, ConfigError, DataError
from peftkit.events import EvalDone, Event, Notice, RolledOut, RunStarted, Stage, StepDone, Table
from peftkit.formats.open_adapter import open_adapter
from peftkit.run import run
from peftkit.tasks.distill.teacher import FILE
from tests.helpers.distill_cases import write_prompt, write_questions
from tests.helpers.finished import WEIGHTS, Finished, finished, merged, recipe, sections


def spec(folder: Path, model_folder: Path) -> dict[str, Any]:
    """Return a recipe of four steps over five questions."""
    file, teacher = write_questions(folder), {"prompt": write_prompt(folder)}
    told = sections(folder, model_folder, file, "distill", teacher=teacher, max_new_tokens=6)
    train = {"max_steps": 4, "batch_size": 2, "learning_rate": 0.05}
    train |= {"save_every": 1, "eval_every": 2}
    method = {"rank": 2, "alpha": 4, "targets": ["q", "v"], "dropout": 0.1}
    return merged(told, {"method": method, "data": {"eval": file}, "train": train})


@pytest.fixture
def told(tmp_path: Path, model_folder: Path) -> dict[str, Any]:
    return spec(tmp_path, model_folder)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Finished:
    watched = {"eval_generate": 5, "eval_before": True, "sample_every": 4}
    return finished(spec(tmp_path_factory.mktemp("distill"), model_folder), train=watched)


@pytest.mark.smoke
def test_the_teacher_answers_once_and_its_score_is_told_first(done):
    assert done.stages("The teacher answers") == ["The teacher answers 5 rows"]
    lines = [json.loads(line) for line in (done.folder / FILE).read_text().splitlines()]
    assert sorted(line["source"].rpartition(":")[2] for line in lines) == list("12345")
    (score,) = [table for table in done.of_kind(Table) if "teacher's answers" in table.title]
    rows = dict(score.rows)
    assert (rows["answers"], rows["equal to the row's answer"]) == ("5", "0 of 5")
    (started,) = done.of_kind(RunStarted)
    assert done.events.index(score) < done.events.index(started)
    assert "KL(teacher, student)" in started.paths
    assert "computed before the first step" in started.paths
    first, *_, last = done.of_kind(EvalDone)
    assert (first.step, last.step) == (0, 4)
    names = {"loss", "same_token", "agreement", "exact_match", "rouge_l"}
    assert names <= first.metrics.keys()
    assert last.metrics["loss"] < first.metrics["loss"]
    assert done.metrics["eval_tokens_saved"] > 10
    assert "agreement" in (done.folder / "metrics.jsonl").read_text()


def test_a_resumed_run_is_bit_equal_without_requests(done, tmp_path):
    found = done.resumed(tmp_path / "half", "step-4")
    assert not found.stages("The teacher answers")
    assert len(found.of_kind(StepDone)) == 1
    assert (found.folder / FILE).read_bytes() == (done.folder / FILE).read_bytes()
    assert (found.folder / WEIGHTS).read_bytes() == (done.folder / WEIGHTS).read_bytes()


def test_a_new_teacher_is_refused(told, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "teacher")
    teacher = told["task"]["teacher"] | {"model": str(folder)}
    told = {**told, "task": told["task"] | {"teacher": teacher}}
    finished(told, train={"max_steps": 1})
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] += 0.01
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="cannot resume") as refused:
        finished(told, train={"max_steps": 1}, resume=True)
    assert refused.value.found.startswith('teacher: "sha256:')
    again = recipe(told, train={"max_steps": 1})
    events: list[Event] = []
    run(again, resume=True, allow_changes=["teacher"], on_event=events.append)
    assert "The teacher answers 5 rows" in [e.text for e in events if isinstance(e, Stage)]
    anew = finished(told, train={"max_steps": 1}, overwrite=True)
    assert anew.stages("The teacher answers") == ["The teacher answers 5 rows"]


def test_missing_samples_are_made(done, told, tmp_path):
    whole = (done.folder / FILE).read_text().splitlines(keepends=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE).write_text("".join(whole[:3]) + whole[3][:20] + "\n")
    short = {"max_steps": 1}
    assert finished(told, train=short).stages("The teacher")[0] == "The teacher answers 2 rows"
    write_prompt(tmp_path, "the fox answers with cheese")
    again = finished(told, overwrite=True, train=short)
    assert again.stages("The teacher")[0] == "The teacher answers 5 rows"


def test_recomputed_and_requested_values_train_alike(told, tmp_path, monkeypatch):
    def learnt(name: str, **train: Any) -> list[float]:
        train |= {"output_dir": str(tmp_path / name), "max_steps": 2, "save_every": None}
        changes = {"method": {"dropout": 0.0}, "task": {"answers": "data"}}
        return [step.loss for step in finished(told, train=train, **changes).of_kind(StepDone)]

    wanted = learnt("kept")
    assert learnt("recomputed", gradient_checkpointing=True) == pytest.approx(wanted, rel=1e-4)
    monkeypatch.setattr("peftkit.tasks.distill.distill.SHARE", 0.0)
    assert learnt("in each step") == pytest.approx(wanted, rel=1e-4)


def test_a_teacher_that_follows_is_saved_and_resumed_exactly(told, tmp_path):
    told["task"] |= {"answers": "student", "kind": "reverse"}
    told["task"]["teacher"] = told["task"]["teacher"] | {"follow": 0.25}
    whole = finished(told, train={"keep_checkpoints": 4})
    checkpoints = [whole.folder / "checkpoints" / f"step-{n}" for n in range(1, 5)]
    averages = [load_file(folder / "task.safetensors") for folder in checkpoints]
    weights = [load_file(folder / WEIGHTS) for folder in checkpoints]
    for name, average in averages[0].items():
        saved = "base_model.model." + name + ".weight"
        if "lora_B" in name:  # it starts with zeros
            torch.testing.assert_close(average, 0.25 * weights[0][saved])
        for before, after, new in zip(averages[:-1], averages[1:], weights[1:], strict=True):
            wanted = 0.75 * before[name] + 0.25 * new[saved]
            torch.testing.assert_close(after[name], wanted, rtol=1e-5, atol=1e-7)
    half = whole.resumed(tmp_path / "half", "step-4")
    assert (half.folder / WEIGHTS).read_bytes() == (whole.folder / WEIGHTS).read_bytes()
    for run_folder in (half.folder, whole.folder):
        again = load_file(run_folder / "checkpoints" / "step-4" / "task.safetensors")
        assert all(torch.equal(again[name], value) for name, value in averages[-1].items())
    (started,) = whole.of_kind(RunStarted)
    assert "follows the student's weights at 0.25" in started.paths
    # a checkpoint of a fixed teacher has no average
    fixed = {**told, "task": {**told["task"], "teacher": {"prompt": write_prompt(tmp_path)}}}
    fixed = finished(fixed, train={"output_dir": str(tmp_path / "fixed"), "max_steps": 2})
    events: list[Event] = []
    again = recipe(told, train={"output_dir": str(fixed.folder), "max_steps": 3})
    run(again, resume=True, allow_changes=["task", "train"], on_event=events.append)
    assert [e for e in events if isinstance(e, Notice) and "no average" in e.text]


def test_a_run_shows_the_teacher_other_rows(told):
    told["task"] |= {"answers": "data", "teacher": {"answer": "other"}, "skip_tokens": 1}
    done = finished(told, train={"max_steps": 2})
    (text,) = [e.text for e in done.of_kind(Notice) if "another training row" in e.text]
    assert "tokens more on average" in text
    assert not done.stages("The teacher answers")  # it is not shown the row's own answer
    assert [step.loss > 0 for step in done.of_kind(StepDone)] == [True, True]


@pytest.mark.slow
def test_a_resumed_run_keeps_its_initial_teacher(done, told):
    told["method"] = {"type": "lora", "start_from": str(done.folder)}
    second = finished(told, train={"eval_before": True})
    before = second.of_kind(EvalDone)[0].metrics["loss"]
    assert before > 0.01  # its own answers, with the prompt in front
    assert (second.folder / FILE).read_bytes() != (done.folder / FILE).read_bytes()


def test_the_adapter_is_used_as_any_that_answers(done):
    opened = open_adapter(done.folder)
    assert opened.task.type == "causal_lm"
    assert opened.style.kind == "chat"


def test_a_student_learns_on_its_own_answers(told, tmp_path):
    task = {"answers": "student", "kind": "reverse"}
    more = {"eval_before": True, "max_steps": 10, "learning_rate": 0.02, "eval_every": None}
    found = finished(told, task=task, train={**more, "save_every": None})
    rolled = found.of_kind(RolledOut)
    assert [len(event.answers) for event in rolled][:4] == [2, 2, 1, 2]
    assert rolled[0].answers != rolled[2].answers
    steps = found.of_kind(StepDone)
    assert {"same_token", "length", "cut", "rollout_seconds"} <= steps[0].figures.keys()
    assert found.stages("The teacher answers 5 rows")  # the eval rows, to be measured by
    first, *_, last = found.of_kind(EvalDone)
    assert last.metrics["loss"] < first.metrics["loss"]
    (started,) = found.of_kind(RunStarted)
    assert "computed in each step" in started.paths


def test_two_documents_fit_into_the_context_one_by_one(told, tmp_path):
    """Student and teacher have 262 tokens of a context of 256; nothing reads both in one row."""
    prompt = write_prompt(tmp_path, "the lazy dog and pizza " * 28)
    told["task"] |= {"answers": "student", "teacher": {"prompt": prompt}}
    assert finished(told, train={"max_steps": 1}).of_kind(StepDone)


@pytest.mark.smoke
def test_initial_values_that_read_rows_are_refused(told):
    method = {"type": "lora", "rank": 2, "targets": ["q", "v"], "init": "eva"}
    with pytest.raises(ConfigError, match=r"method\.init: eva"):
        recipe({**told, "method": method})


@pytest.mark.smoke
def test_a_prompt_without_room_for_a_row_is_refused(told, tmp_path):
    write_prompt(tmp_path, "the quick brown fox " * 500)
    with pytest.raises(DataError, match="Too long after the teacher's prompt: 5"):
        run(recipe(told))


@pytest.mark.slow
def test_a_quantised_base_teaches_itself(told, tmp_path):
    base, train = {"quantize": "nf4"}, {"max_steps": 12, "output_dir": str(tmp_path / "nf4")}
    losses = [step.loss for step in finished(told, base=base, train=train).of_kind(StepDone)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("answers", ["student", "data", "teacher"])
def test_a_teacher_that_reads_the_answer_is_measured_first(told, answers):
    kind = {"answers": answers, "kind": "reverse"}
    task = {**told["task"], **kind, "teacher": {"answer": True, "min_match": 0.0}}
    done = finished({**told, "task": task}, train={"max_steps": 1})
    (text,) = [e.text for e in done.of_kind(Notice) if "answers that it is shown" in e.text]
    assert "0% exactly" in text  # a random model copies nothing
    assert done.of_kind(StepDone)
    task["teacher"] = {"answer": True}
    with pytest.raises(DataError, match="does not use the answers"):
        finished({**told, "task": task}, train={"max_steps": 1, "output_dir": "refused"})
