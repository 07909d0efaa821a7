"""Processes of one run end together, and say why."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peftkit import run as run_module
from peftkit.config import schema
from peftkit.config.schema import from_dict
from peftkit.recipe import Recipe
from peftkit.tasks.tokens import CausalLM
from peftkit_cli.app import run
from tests.helpers.children import exit_code, start_ranks
from tests.helpers.sharded import Settings, settings_of

SLOW = pytest.mark.slow


def work(recipe: str, output: str, what: str, more: list[str]) -> None:
    """Run the command line on a process, the second of which does as it is told."""
    output = f"{output}-{os.environ['RANK']}"
    sys.stderr = open(output, "w", buffering=1)  # noqa: SIM115
    is_second = os.environ["RANK"] == "1"
    if is_second and what == "other learning rate":
        more = [*more, "--set", "train.learning_rate=0.01"]
    if is_second and what == "other folder":
        os.makedirs(f"{output}-elsewhere")
        os.chdir(f"{output}-elsewhere")
    if is_second and what == "other base":
        opened = run_module.open_base

        def other(*args: Any, **settings: Any) -> Any:
            return replace(opened(*args, **settings), fingerprint="sha256:another")

        run_module.open_base = other
    if is_second and what in MISHAPS:
        learn, calls = CausalLM.loss, [0]

        def sums(task: Any, model: Any, batch: Any) -> Any:
            calls[0] += model.training
            if calls[0] == 7:
                MISHAPS[what]()
            broken = what == "no number" and calls[0] >= 7
            return learn(task, model, batch) * (float("nan") if broken else 1.0)

        CausalLM.loss = sums  # type: ignore[method-assign]
    os._exit(run(["train", recipe, *more]))


def _no_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


MISHAPS: dict[str, Callable[[], object]] = {
    "out of memory": _no_memory,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminated": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "no number": lambda: None,  # the loss is not a number
}


def launch(
    folder: Path, settings: Settings, what: str, *more: str, world: int = 2
) -> tuple[list[int | None], str, float]:
    """Run processes; return their exit codes, what all said on stderr, and the seconds it took."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(schema.dump_yaml(from_dict(Recipe, settings, "test")))
    began, cache = time.monotonic(), str(folder / "cache")
    given = str(recipe), str(folder / "output"), what, [*more]
    children = start_ranks(work, *given, world=world, PEFTKIT_CACHE=cache)
    codes = [exit_code(child) for child in children]
    output = "".join((folder / f"output-{rank}").read_text() for rank in range(world))
    return codes, output, time.monotonic() - began


def errors(output: str) -> list[str]:
    """Return the lines that begin a message."""
    return [line for line in output.splitlines() if "Error: " in line or "Interrupted: " in line]


def settings(folder: Path, **train: Any) -> Settings:
    out = {"output_dir": str(folder / "run"), "shard": "base", "save_every": 1}
    return settings_of(folder, "causal_lm", train={**out, "eval_every": None, **train})


@pytest.mark.parametrize(
    ("what", "message", "code"),
    [
        ("other learning rate", "train.learning_rate is 0.005 in process 0 and 0.01", 2),
        pytest.param("other folder", "is not the same for all processes", 2, marks=SLOW),
        pytest.param("other base", "base: fingerprint is", 2, marks=SLOW),
        pytest.param("no number", "stopped before the weights were changed", 1, marks=SLOW),
        pytest.param("out of memory", "memory ran out on one process", 1, marks=SLOW),
    ],
)
def test_errors_are_reported_once(what, message, code, tmp_path):
    recipe = settings(tmp_path)
    more = []
    if what == "other folder":
        recipe["train"]["output_dir"] = "run"
        os.makedirs(tmp_path / "here", exist_ok=True)
        more = ["--out", "run"]
    codes, output, seconds = launch(tmp_path, recipe, what, *more)
    assert all(codes), output
    assert code in codes
    causes = [line for line in errors(output) if "another process terminated" not in line]
    # a number that is not finite is one on all: each tells of its own rows
    assert len(causes) == (2 if what == "no number" else 1), output
    assert message in output
    assert seconds < 60


@pytest.mark.slow
def test_a_process_that_is_gone_ends_the_others_and_more_go_on(tmp_path):
    recipe = settings(tmp_path)
    codes, output, seconds = launch(tmp_path, recipe, "killed")
    assert codes[1] == -signal.SIGKILL
    assert codes[0] == 1, output
    assert len(errors(output)) == 1, output
    assert "terminated unexpectedly" in output
    assert seconds < 60
    before = steps(tmp_path / "run")
    assert 0 < before[-1] < 4
    allowed = [part for name in ("train", "num_processes") for part in ("--allow-changes", name)]
    codes, output, _ = launch(tmp_path, recipe, "", "--resume", *allowed, world=3)
    assert codes == [0, 0, 0], output
    assert "num_processes: 2 -> 3" in output
    assert steps(tmp_path / "run")[-1] == 4


@pytest.mark.slow
def test_a_signal_to_one_process_saves_and_stops_all(tmp_path):
    codes, output, _ = launch(tmp_path, settings(tmp_path), "terminated")
    assert codes == [128 + signal.SIGTERM] * 2, output
    assert "Continue with --resume" in output
    reached = steps(tmp_path / "run")[-1]
    assert (tmp_path / "run" / "checkpoints" / f"step-{reached}").is_dir()


def steps(folder: Path) -> list[int]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["event"] == "StepDone"]
