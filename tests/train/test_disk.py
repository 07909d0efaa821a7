"""A full or failing disk: what was there stays valid, and the run says what it needs."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from peftkit.errors import DiskFullError, OutputError, RunError
from peftkit.events import Event, Saved
from peftkit.train import checkpoint_files
from peftkit.train.start import prepare_output
from tests.helpers.toy import Toy, begin, go_on, names, play


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Refuse longer files, as a full disk does; python ignores SIGXFSZ."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_the_run_at_its_checkpoint(tmp_path, whole):
    begin(tmp_path, steps=5)
    before = names(tmp_path)
    with largest_file(1500):
        run = go_on(tmp_path)
    run.failed(RunError, "disk is full", " needed, ")
    assert names(tmp_path) == before
    assert go_on(tmp_path).losses == whole.losses[5:]


def test_a_full_disk_under_metrics_jsonl_alone_costs_only_the_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("\n" * 50_000)
    with largest_file(50_000):
        run = play(tmp_path)
    assert run.error is None
    (notice,) = run.notices
    assert "metrics.jsonl is no longer written" in notice


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk whose free bytes the test decides."""
    disk = SimpleNamespace(bytes=10**9)
    monkeypatch.setattr(checkpoint_files, "free_bytes", lambda folder: disk.bytes)
    return disk


def test_too_little_space_for_a_checkpoint_fails_at_startup(tmp_path, disk):
    disk.bytes = 1000
    run = play(tmp_path)
    run.failed(DiskFullError, "1,000 are free")
    assert run.losses == []


def test_little_space_is_reported_and_refused_at_saving(tmp_path, disk):
    disk.bytes = 2_000_000

    def fill(event: Event) -> None:
        if isinstance(event, Saved) and event.path.name == "step-2":
            disk.bytes = 10_000

    run = play(tmp_path, on_event=fill)
    assert "the disk may fill up" in run.notices[0]
    run.failed(RunError, "10,000 free")
    assert run.saved == ["step-1", "step-2"]
    assert names(tmp_path) == ["latest", "step-1", "step-2"]


def test_any_disk_error_is_one_message(tmp_path, monkeypatch):
    code = errno.EIO

    def failpoint(name: str) -> None:
        if name == "optimizer":
            raise OSError(code, os.strerror(code))

    begin(tmp_path, steps=3)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "failpoint", failpoint)
        error = go_on(tmp_path).error
    assert isinstance(error, RunError)
    assert os.strerror(code) in str(error)
    assert go_on(tmp_path).error is None


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    model = Toy()

    def spoil(event: Event) -> None:
        if getattr(event, "step", 0) == 4:
            with torch.no_grad():
                model.magnitude[0] = float("nan")

    run = play(tmp_path, model=model, eval_rows=[], on_event=spoil)
    run.failed(RunError, "magnitude")
    assert names(tmp_path) == ["latest", "step-2", "step-3"]


def test_a_read_only_folder_is_refused(tmp_path, monkeypatch):
    """Root may write anywhere, so the refusal is put in by hand."""

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(OutputError, match="Permission denied"):
        prepare_output(tmp_path)
