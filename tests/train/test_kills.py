"""SIGKILL, anywhere: the checkpoint before is valid, and the run goes on to the same end."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from peftkit.errors import OutputError
from peftkit.events import Event
from peftkit.train import checkpoint_files
from tests.helpers.children import exit_code, start
from tests.helpers.toy import Toy, go_on, names, play, same

FAILPOINTS = [
    *("created", "weights", "optimizer", "rng", "state", "MANIFEST.json"),
    *("synced", "renamed", "latest", "deleted"),
]
SETTINGS = {"eval_every": None, "save_every": 2, "keep_checkpoints": 1}
FAST = ("weights", "MANIFEST.json", "renamed", "deleted")
"""Points before, at and after the moment that makes a checkpoint valid; the others are slow."""


def train_and_die(folder: str, where: str, which: int) -> None:
    """Train with a SIGKILL at the `which`th time that a failpoint is passed."""
    passed = 0

    def failpoint(name: str) -> None:
        nonlocal passed
        passed += name == where
        if passed == which:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint_files.failpoint = failpoint
    play(Path(folder), model=Toy(dropout=0.3), **SETTINGS)


@pytest.mark.covers("peftkit")
@pytest.mark.parametrize(
    "where",
    [pytest.param(point, marks=() if point in FAST else pytest.mark.slow) for point in FAILPOINTS],
)
def test_a_run_killed_in_a_save_ends_equal(tmp_path, whole, where):
    assert exit_code(start(train_and_die, str(tmp_path), where, 2)) == -signal.SIGKILL
    step = {"renamed": 4, "latest": 4, "deleted": 6}.get(where, 2)
    run = play(tmp_path, model=Toy(dropout=0.3), resume=True, **SETTINGS)
    assert run.error is None
    assert run.losses == whole.losses[step:]
    assert same(run.weights, whole.weights)
    assert names(tmp_path) == ["latest", "step-12"]


def train_slowly(folder: str) -> None:
    """Train with a checkpoint after every step, at a pace that leaves time to be killed."""

    def pause(event: Event) -> None:
        time.sleep(0.01)

    play(Path(folder), model=Toy(dropout=0.3), eval_every=None, on_event=pause)


def test_a_second_process_into_a_folder_is_refused_and_names_the_first(tmp_path):
    child = start(train_slowly, str(tmp_path))
    while not (tmp_path / "checkpoints" / "step-1").exists():
        assert child.is_alive()
        time.sleep(0.001)
    play(tmp_path, overwrite=True).failed(OutputError, f"Process {child.pid} on ")
    child.kill()
    exit_code(child)
    assert go_on(tmp_path).error is None  # the lock of a killed process is free


@pytest.mark.parametrize("moment", range(int(os.environ.get("PEFTKIT_KILLS", "1"))))
def test_a_run_killed_at_any_time_ends_equal(tmp_path, whole, moment):
    """PEFTKIT_KILLS=50 pytest tests/train/test_kills.py -k any_moment: for longer."""
    child = start(train_slowly, str(tmp_path))
    while not (tmp_path / "checkpoints" / "step-1").exists():
        assert child.is_alive()
        time.sleep(0.001)
    time.sleep(random.Random(moment).uniform(0, 0.5))
    child.kill()
    assert exit_code(child) in (0, -signal.SIGKILL)
    run = go_on(tmp_path)
    assert run.error is None
    assert run.losses == whole.losses[12 - len(run.losses) :]
    assert same(run.weights, whole.weights)
