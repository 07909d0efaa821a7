"""`--resume auto`: one command that starts, continues and ends a run, however often it dies."""

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from peftkit.config.schema import from_dict
from peftkit.errors import CheckpointError, OutputError, PeftkitError
from peftkit.events import Notice, ignore
from peftkit.recipe import Recipe, load
from peftkit.run import run as run_recipe
from peftkit.train.resume import FREE, finished_or_resume
from tests.helpers import command_line
from tests.helpers.children import exit_code, start

TENSORS = "adapter_model.safetensors"
PREEMPTED = 128 + signal.SIGTERM


def train_slowly(path: str) -> None:
    """Run a recipe under `auto`, at a pace that leaves time to be killed."""
    from peftkit.execution.signals import Interrupted

    try:
        run_recipe(load(Path(path)), resume="auto", on_event=lambda event: time.sleep(0.01))
    except Interrupted as error:
        raise SystemExit(error.exit_code) from None


def undisturbed(recipe, folder: Path) -> bytes:
    train = recipe.train.model_copy(update={"output_dir": folder})
    run_recipe(recipe.model_copy(update={"train": train}))
    return (folder / TENSORS).read_bytes()


@pytest.mark.covers("peftkit/train", "peftkit/files", "peftkit/run.py", "cli/peftkit_cli/train.py")
def test_a_run_killed_twice_is_finished_by_the_same_call(asked, recipe_file, tmp_path):
    run = tmp_path / "run"
    for number, step in ((signal.SIGTERM, 1), (signal.SIGKILL, 3)):
        child = start(train_slowly, str(recipe_file))
        while not any((run / "checkpoints").glob(f"step-{step}")):
            assert child.is_alive()
            time.sleep(0.001)
        getattr(child, "terminate" if number == signal.SIGTERM else "kill")()
        assert exit_code(child) == (PREEMPTED if number == signal.SIGTERM else -number)
    assert not (run / TENSORS).exists()
    result = run_recipe(asked, resume="auto")
    assert result.step == 6
    assert (run / TENSORS).read_bytes() == undisturbed(asked, tmp_path / "whole")
    starts = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    begun = [event["start_step"] for event in starts if event["event"] == "RunStarted"]
    assert begun[0] == 0
    assert begun[1] >= 1
    assert begun[2] >= 3

    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    events = []
    again = run_recipe(asked, resume="auto", on_event=events.append)
    assert replace(again, seconds=0) == replace(result, seconds=0)
    assert [type(event) for event in events] == [Notice]
    assert "finished, after 6 steps" in events[0].text
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.covers("peftkit")
def test_what_is_not_this_finished_run_is_resumed_or_refused(asked, tmp_path):
    run_recipe(asked, resume="auto")
    longer = asked.model_copy(
        update={"train": asked.train.model_copy(update={"max_steps": 7, "schedule": "constant"})}
    )
    with pytest.raises(CheckpointError, match=r"train\.max_steps: 6 -> 7"):
        run_recipe(longer, resume="auto")
    result = run_recipe(longer, resume="auto", allow_changes=["train.max_steps", "train.schedule"])
    assert result.step == 7
    (tmp_path / "run" / TENSORS).unlink()  # a lost adapter is saved again
    assert run_recipe(longer, resume="auto").step == 7
    assert (tmp_path / "run" / TENSORS).exists()
    with pytest.raises(CheckpointError, match="either resumed or overwritten"):
        run_recipe(longer, resume="auto", overwrite=True)


DEPENDENT = {
    *("base.quantize_embeddings", "data.max_pixels", "data.video_frames", "method.eva_rho"),
    *("method.type", "task.completion", "task.prompt", "task.type", "train.drift"),
    *("train.early_stopping", "train.eval_before", "train.eval_generate", "train.keep_best"),
    *("train.log_to", "train.sample_every", "train.trackers"),
}
"""Fields that are valid only with other fields, or with another kind of section."""
CANDIDATES = (True, False, 1, 2, 3, 0.5, 0.25, "x", "x.py:f", ["x"], [1], {"x": 1}, None)


def other_values(schema: dict[str, Any], value: Any) -> Iterator[Any]:
    """Yield values of a field that differ from its own, the likely ones first."""
    for option in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from option.get("enum", ())
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from (value + 1, value * 2, value / 2, max(value - 1, 0))
    yield from CANDIDATES


def other_recipes(recipe: Recipe) -> Iterator[tuple[str, str, Recipe | None]]:
    """Yield section, field and a valid recipe that differs in it; None if none was found."""
    whole = recipe.model_dump(mode="json")
    for section in Recipe.model_fields:
        config = getattr(recipe, section)
        fields = type(config).model_json_schema()["properties"]
        for name, schema in fields.items():
            other = None
            for value in other_values(schema, whole[section][name]):
                values = {**whole, section: {**whole[section], name: value}}
                try:
                    other = from_dict(Recipe, values, "x")
                except PeftkitError:
                    continue
                if other != recipe:
                    break
                other = None
            yield section, name, other


def test_a_finished_run_is_not_that_of_a_recipe_that_differs_in_any_field(asked):
    """Each field is free by a list, or `auto` resumes, which compares the identities."""
    run_recipe(asked, resume="auto")
    without = set()
    for section, name, other in other_recipes(asked):
        if other is None:
            without.add(f"{section}.{name}")
        elif name not in ("output_dir", "upload"):  # another run; uploads again
            result, resumes, _ = finished_or_resume(other, (), False, ignore)
            assert (result is not None) == (name in FREE.get(section, ())), f"{section}.{name}"
            assert result is not None or resumes
    assert without == DEPENDENT


@pytest.mark.parametrize(
    ("key", "value"),
    [("task.anchor", 1.0), ("data.packing", True), ("rows", "the cat")],
)
def test_what_differs_from_a_finished_run_is_listed(key, value, asked, tmp_path, recipe_file):
    run_recipe(asked, resume="auto")
    if key == "rows":
        text = (tmp_path / "train.jsonl").read_text()
        (tmp_path / "train.jsonl").write_text(text.replace("the fox", value))
        key, other = "rows.train", asked
    else:
        section, name = key.split(".")
        whole = asked.model_dump(mode="json")
        other = from_dict(Recipe, {**whole, section: {**whole[section], name: value}}, "x")
    with pytest.raises(CheckpointError, match=re.escape(key)):
        run_recipe(other, resume="auto")


CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir"}
"""Audit events of changes in a folder, besides files that are opened to be written."""


def train_until_killed(path: str, number: int, options: dict[str, Any]) -> None:
    """Run a recipe, and die at a change of its folder."""
    recipe, changes = load(Path(path)), count()
    folder = str(recipe.train.output_dir)

    def die(event: str, args: tuple[Any, ...]) -> None:
        if event not in CHANGES and not (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        if str(args[0]).startswith(folder) and next(changes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    run_recipe(recipe, **options)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [{}, {"overwrite": True}], ids=["new", "over another run"])
def test_a_run_killed_at_any_change_of_its_folder_starts_again(options, asked, recipe_file):
    folder = asked.train.output_dir
    if options:
        run_recipe(asked)
    before = shutil.copytree(folder, folder.with_name("before")) if options else None
    expected = undisturbed(asked, folder.with_name("whole"))
    for number in count(0, 3):
        shutil.rmtree(folder, ignore_errors=True)
        if before is not None:
            shutil.copytree(before, folder)
        code = exit_code(start(train_until_killed, str(recipe_file), number, options))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        left = folder.with_name(f"left-{number}")
        if folder.exists():
            shutil.copytree(folder, left)
        for again in ({"overwrite": True}, {"resume": "auto"}):
            shutil.rmtree(folder, ignore_errors=True)
            if left.exists():
                shutil.copytree(left, folder)
            run_recipe(asked, **again)  # type: ignore[arg-type]
            assert (folder / TENSORS).read_bytes() == expected, (number, again)
    assert number > 60


def test_an_adapter_of_unknown_origin_is_not_overwritten(asked, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / TENSORS).write_bytes(b"of another program")
    with pytest.raises(OutputError, match="No run wrote them"):
        run_recipe(asked, resume="auto")


def test_the_command_starts_and_reports_a_finished_run(peftkit, recipe_file, tmp_path):
    first = peftkit("train", recipe_file, "--resume", "auto")
    assert first.code == 0, first.err
    assert (tmp_path / "run" / TENSORS).exists()
    second = peftkit("train", "--resume", "auto", recipe_file)
    assert second.code == 0, second.err
    assert second.out == first.out
    assert "is finished, after 6 steps. Nothing is left to do." in second.err
    plain = peftkit("train", recipe_file)
    assert plain.code == 2
    assert "already holds a run" in plain.err
    wrong = peftkit("train", recipe_file, "--resume=later")
    assert wrong.code == 2
    assert "'later' is not one of" in wrong.err


@pytest.mark.slow
def test_a_command_killed_at_ten_random_moments_ends_equal(asked, recipe_file, tmp_path):
    """Each moment is between the start of the process and some seconds after it."""
    chance, codes = random.Random(58), []
    for kill in [signal.SIGTERM, signal.SIGKILL] * 5:
        settings = ("--set", "train.max_steps=120")
        process = command_line.start(
            "train", recipe_file, "--resume", "auto", *settings, cwd=tmp_path
        )
        time.sleep(chance.uniform(6, 14))
        process.send_signal(kill)
        _, text = process.communicate(timeout=100)
        codes.append(process.returncode)
        assert process.returncode in (0, PREEMPTED, -signal.SIGTERM, -signal.SIGKILL), text
    assert PREEMPTED in codes
    assert -signal.SIGKILL in codes
    longer = asked.model_copy(update={"train": asked.train.model_copy(update={"max_steps": 120})})
    assert run_recipe(longer, resume="auto").step == 120
    whole = undisturbed(longer, tmp_path / "whole")
    assert (tmp_path / "run" / TENSORS).read_bytes() == whole
