"""Faults on disk: a checkpoint is whole and proven valid, or it is skipped with its reason."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from peftkit.errors import CheckpointError, OutputError, RunError
from peftkit.events import Event, Notice, Saved
from peftkit.train import manifest
from peftkit.train.checkpoint import Checkpoints, prepare_output
from tests.train.children import exit_code, start
from tests.train.toy import Crash, Played, Row, Toy, crash_after, play, same

FILES = ["weights.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"]
FAILPOINTS = [
    "made",
    "weights",
    "optimizer",
    "rng",
    "state",
    "MANIFEST.json",
    "synced",
    "renamed",
    "latest",
    "deleted",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The run that nothing happened to."""
    return play(tmp_path_factory.mktemp("whole"), model=Toy(dropout=0.3), eval_every=None)


def begin(folder: Path, steps: int = 6) -> None:
    """Train some steps, with checkpoints of the last two, and crash."""
    crash = crash_after(steps)
    play(folder, model=Toy(dropout=0.3), eval_every=None, on_event=crash)


def go_on(folder: Path) -> Played:
    return play(folder, model=Toy(dropout=0.3), eval_every=None, resume=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# --- being killed


def train_and_die(folder: str, where: str, which: int) -> None:
    """Train with a SIGKILL at the `which`th time that a failpoint is passed."""
    passed = 0

    def failpoint(name: str) -> None:
        nonlocal passed
        passed += name == where
        if passed == which:
            os.kill(os.getpid(), signal.SIGKILL)

    manifest.failpoint = failpoint
    play(Path(folder), model=Toy(dropout=0.3), eval_every=None, save_every=2, keep_checkpoints=1)


@pytest.mark.parametrize("where", FAILPOINTS)
def test_killed_anywhere_in_a_save_the_run_goes_on_to_the_same_end(
    tmp_path: Path, whole: Played, where: str
) -> None:
    assert exit_code(start(train_and_die, str(tmp_path), where, 2)) == -signal.SIGKILL
    step = {"renamed": 4, "latest": 4, "deleted": 6}.get(where, 2)
    run = play(
        tmp_path,
        model=Toy(dropout=0.3),
        eval_every=None,
        save_every=2,
        keep_checkpoints=1,
        resume=True,
    )
    assert run.error is None
    assert run.losses == whole.losses[step:]
    assert same(run.weights, whole.weights)
    assert names(tmp_path) == ["latest", "step-12"]


def train_slowly(folder: str) -> None:
    """Train with a checkpoint after every step, at a pace that leaves time to be killed."""

    def pause(event: Event) -> None:
        time.sleep(0.01)

    play(Path(folder), model=Toy(dropout=0.3), eval_every=None, on_event=pause)


@pytest.mark.parametrize("moment", range(int(os.environ.get("PEFTKIT_KILLS", "3"))))
def test_killed_at_any_moment_the_run_goes_on_to_the_same_end(
    tmp_path: Path, whole: Played, moment: int
) -> None:
    """PEFTKIT_KILLS=50 pytest tests/train/test_checkpoints.py -k any_moment: for longer."""
    child = start(train_slowly, str(tmp_path))
    while not (tmp_path / "checkpoints" / "step-1").exists():
        time.sleep(0.001)
    time.sleep(random.Random(moment).uniform(0, 0.5))
    child.kill()
    assert exit_code(child) in (0, -signal.SIGKILL)
    run = go_on(tmp_path)
    assert run.error is None
    assert run.losses == whole.losses[12 - len(run.losses) :]
    assert same(run.weights, whole.weights)


# --- what makes a checkpoint invalid


def delete(path: Path) -> None:
    path.unlink()


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real").name)


@pytest.mark.parametrize("harm", [delete, cut_in_half, flip_last_bit, empty, replace_by_link])
@pytest.mark.parametrize("name", FILES)
def test_a_harmed_checkpoint_is_skipped_with_its_reason(
    tmp_path: Path, whole: Played, name: str, harm: Callable[[Path], None]
) -> None:
    begin(tmp_path)
    harm(tmp_path / "checkpoints" / "step-6" / name)
    run = go_on(tmp_path)
    (notice,) = run.notices
    assert notice.startswith(f"Skipped checkpoint step-6: {name} ")
    assert run.losses == whole.losses[5:]
    assert same(run.weights, whole.weights)


def rewrite_step(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 6', '"step": 7'))


def not_json(path: Path) -> None:
    path.write_text("{")


def other_schema(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2}))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (delete, "is missing"),
        (cut_in_half, "unreadable"),
        (empty, "unreadable"),
        (not_json, "unreadable"),
        (rewrite_step, "has changed"),
        (other_schema, "schema is 2"),
    ],
)
def test_a_harmed_manifest_makes_a_checkpoint_invalid(
    tmp_path: Path, whole: Played, harm: Callable[[Path], None], reason: str
) -> None:
    begin(tmp_path)
    harm(tmp_path / "checkpoints" / "step-6" / "MANIFEST.json")
    run = go_on(tmp_path)
    assert reason in run.notices[0]
    assert run.losses == whole.losses[5:]


def test_a_checkpoint_under_another_name_is_invalid(tmp_path: Path, whole: Played) -> None:
    begin(tmp_path)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-6", folder / "step-11")
    run = go_on(tmp_path)
    assert run.notices == ["Skipped checkpoint step-11: its manifest is of step 6"]
    assert run.losses == whole.losses[6:]


def test_without_any_valid_checkpoint_all_reasons_are_listed(tmp_path: Path) -> None:
    begin(tmp_path)
    delete(tmp_path / "checkpoints" / "step-6" / "rng.safetensors")
    flip_last_bit(tmp_path / "checkpoints" / "step-5" / "optimizer.safetensors")
    error = go_on(tmp_path).error
    assert isinstance(error, CheckpointError)
    assert [line.split(":")[0] for line in error.found.splitlines()] == ["step-6", "step-5"]


def test_a_missing_or_wrong_latest_does_not_matter(tmp_path: Path, whole: Played) -> None:
    begin(tmp_path)
    (tmp_path / "checkpoints" / "latest").write_text("step-999")
    assert go_on(tmp_path).losses == whole.losses[6:]


def test_a_file_that_someone_adds_does_not_matter(tmp_path: Path, whole: Played) -> None:
    begin(tmp_path)
    (tmp_path / "checkpoints" / "step-6" / "notes.txt").write_text("the good one")
    assert go_on(tmp_path).losses == whole.losses[6:]


# --- retention


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    opposite = [Row((n, n), (-100, n), "eval") for n in range(20)]  # forgotten in training
    run = play(tmp_path, keep_checkpoints=2, eval_every=1, learning_rate=0.3, eval_rows=opposite)
    assert run.result is not None
    best = run.result.best_step
    assert best is not None
    assert best < 10, "the best one was not to be among the newest"
    assert names(tmp_path) == sorted(["latest", f"step-{best}", "step-11", "step-12"])
    assert run.result.best_checkpoint == tmp_path / "checkpoints" / f"step-{best}"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-12\n"


def test_the_best_is_saved_even_where_no_save_is_due(tmp_path: Path) -> None:
    run = play(tmp_path, eval_every=5, save_every=None)
    assert run.saved[0] == "step-5"


def test_an_invalid_checkpoint_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    begin(tmp_path)
    delete(tmp_path / "checkpoints" / "step-6" / "rng.safetensors")
    (tmp_path / "checkpoints" / "step-40").mkdir()
    run = play(
        tmp_path, model=Toy(dropout=0.3), eval_every=None, resume=True, on_event=crash_after(6)
    )
    assert isinstance(run.error, Crash)
    assert names(tmp_path) == ["latest", "step-40", "step-5", "step-6"]
    Checkpoints(tmp_path, keep=1).verified(6)  # rewritten, and valid now


def test_nothing_is_deleted_before_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[str]] = {}

    def failpoint(name: str) -> None:
        seen.setdefault(name, names(tmp_path))

    begin(tmp_path, steps=3)
    monkeypatch.setattr(manifest, "failpoint", failpoint)
    play(tmp_path, model=Toy(dropout=0.3), eval_every=None, resume=True, keep_checkpoints=1)
    assert {"step-2", "step-3"} < set(seen["MANIFEST.json"])
    assert {"step-2", "step-3", "step-4"} < set(seen["latest"])


def test_leftovers_of_dead_processes_are_swept_and_those_of_the_living_are_not(
    tmp_path: Path,
) -> None:
    dead = start(os.getpid)
    exit_code(dead)
    folder = tmp_path / "checkpoints"
    for name in (f"step-3.tmp-{dead.pid}", f"step-4.old-{dead.pid}", "step-3.tmp-1", "step-x"):
        (folder / name).mkdir(parents=True)
    play(tmp_path, max_steps=1)
    assert names(tmp_path) == ["latest", "step-1", "step-3.tmp-1", "step-x"]


def test_every_byte_is_durable_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    real = Path.rename

    def fsync(descriptor: int) -> None:
        log.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def rename(self: Path, target: Path) -> Path:
        log.append(f"rename {target.name}")
        return real(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    play(tmp_path, max_steps=1, eval_every=None, eval_rows=[])
    renamed = log.index("rename step-1")
    temporary = f"step-1.tmp-{os.getpid()}"
    assert set(FILES) | {temporary} <= set(log[:renamed])
    assert log[renamed - 1] == temporary
    assert "checkpoints" in log[renamed:]


# --- the disk


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Refuse longer files, as a full disk does; python ignores SIGXFSZ."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [500, 1500, 5000])
def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(
    tmp_path: Path, whole: Played, limit: int
) -> None:
    begin(tmp_path, steps=5)
    before = names(tmp_path)
    with largest_file(limit):
        run = go_on(tmp_path)
    assert isinstance(run.error, RunError)
    assert "disk is full" in str(run.error)
    assert " needed, " in str(run.error)
    assert names(tmp_path) == before
    assert go_on(tmp_path).losses == whole.losses[5:]


def test_a_full_disk_under_metrics_jsonl_alone_costs_only_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("\n" * 50_000)
    with largest_file(50_000):
        run = play(tmp_path)
    assert run.error is None
    (notice,) = run.notices
    assert "metrics.jsonl is no longer written" in notice


class Disk:
    """A disk whose free bytes the test decides."""

    def __init__(self, free: int) -> None:
        self.bytes = free

    def free(self, folder: Path) -> int:
        return self.bytes


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(10**9)
    monkeypatch.setattr("peftkit.train.saving.free_bytes", lambda folder: disk.free(folder))
    return disk


def test_too_little_space_for_one_checkpoint_is_refused_before_the_first_step(
    tmp_path: Path, disk: Disk
) -> None:
    disk.bytes = 1000
    run = play(tmp_path)
    assert isinstance(run.error, OutputError)
    assert "1,000 are free" in str(run.error)
    assert run.losses == []


def test_little_space_is_told_at_the_start_and_refused_before_the_save(
    tmp_path: Path, disk: Disk
) -> None:
    disk.bytes = 2_000_000

    def fill(event: Event) -> None:
        if isinstance(event, Saved) and event.path.name == "step-2":
            disk.bytes = 10_000

    run = play(tmp_path, on_event=fill)
    assert "the disk may fill up" in run.notices[0]
    assert isinstance(run.error, RunError)
    assert "10,000 free" in str(run.error)
    assert run.saved == ["step-1", "step-2"]
    assert names(tmp_path) == ["latest", "step-1", "step-2"]


def test_enough_space_is_not_worth_a_word(tmp_path: Path, disk: Disk) -> None:
    assert play(tmp_path, max_steps=1).notices == []


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_whatever_the_disk_says_in_a_save_is_one_message_and_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def failpoint(name: str) -> None:
        if name == "optimizer":
            raise OSError(code, os.strerror(code))

    begin(tmp_path, steps=3)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "failpoint", failpoint)
        error = go_on(tmp_path).error
    assert isinstance(error, RunError)
    assert os.strerror(code) in str(error)
    assert go_on(tmp_path).error is None


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    model = Toy()

    def spoil(event: Event) -> None:
        if getattr(event, "step", 0) == 4:
            with torch.no_grad():
                model.magnitude[0] = float("nan")

    run = play(tmp_path, model=model, eval_rows=[], on_event=spoil)
    assert isinstance(run.error, RunError)
    assert "magnitude" in str(run.error)
    assert names(tmp_path) == ["latest", "step-2", "step-3"]


def test_a_read_only_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the refusal is put in by hand."""

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(OutputError, match="Permission denied"):
        prepare_output(tmp_path)


def test_skipping_is_told_as_a_notice(tmp_path: Path) -> None:
    begin(tmp_path)
    delete(tmp_path / "checkpoints" / "step-6" / "state.json")
    events: list[Event] = []
    found = Checkpoints(tmp_path, keep=2).newest_valid(events.append)
    assert found.step == 5
    assert events == [Notice("Skipped checkpoint step-6: state.json is missing")]
