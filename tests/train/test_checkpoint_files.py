"""Faults on disk: a checkpoint is whole and proven valid, or it is skipped with its reason."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from peftkit.errors import CheckpointError
from peftkit.train import checkpoint_files
from peftkit.train.checkpoint_files import Checkpoints
from tests.helpers.toy import Crash, Row, Toy, begin, crash_after, go_on, names, play, same

FILES = ["weights.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"]


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


def rewrite_step(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 6', '"step": 7'))


def not_json(path: Path) -> None:
    path.write_text("{")


def other_schema(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2}))


@pytest.mark.parametrize(
    ("name", "harm", "reason"),
    [
        ("weights.safetensors", flip_last_bit, "weights.safetensors has changed"),
        ("optimizer.safetensors", cut_in_half, "optimizer.safetensors has "),
        ("rng.safetensors", replace_by_link, "rng.safetensors is missing"),
        ("state.json", empty, "state.json has 0 bytes"),
        ("state.json", delete, "state.json is missing"),
        ("MANIFEST.json", delete, "MANIFEST.json is missing"),
        ("MANIFEST.json", not_json, "MANIFEST.json is unreadable"),
        ("MANIFEST.json", rewrite_step, "MANIFEST.json has changed"),
        ("MANIFEST.json", other_schema, "its schema is 2"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_its_reason(tmp_path, whole, name, harm, reason):
    begin(tmp_path)
    harm(tmp_path / "checkpoints" / "step-6" / name)
    run = go_on(tmp_path)
    (notice,) = run.notices
    assert notice.startswith(f"Skipped checkpoint step-6: {reason}")
    assert run.losses == whole.losses[5:]
    assert same(run.weights, whole.weights)


def test_a_checkpoint_under_another_name_is_invalid(tmp_path, whole):
    begin(tmp_path)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-6", folder / "step-11")
    run = go_on(tmp_path)
    assert run.notices == ["Skipped checkpoint step-11: its manifest is of step 6"]
    assert run.losses == whole.losses[6:]


def test_without_any_valid_checkpoint_all_reasons_are_listed(tmp_path):
    begin(tmp_path)
    delete(tmp_path / "checkpoints" / "step-6" / "rng.safetensors")
    flip_last_bit(tmp_path / "checkpoints" / "step-5" / "optimizer.safetensors")
    error = go_on(tmp_path).failed(CheckpointError)
    assert [line.split(":")[0] for line in error.found.splitlines()] == ["step-6", "step-5"]


def test_a_wrong_latest_or_foreign_file_does_no_harm(tmp_path, whole):
    begin(tmp_path)
    (tmp_path / "checkpoints" / "latest").write_text("step-999")
    (tmp_path / "checkpoints" / "step-6" / "notes.txt").write_text("the good one")
    assert go_on(tmp_path).losses == whole.losses[6:]


# --- retention


def test_the_newest_and_the_best_are_kept(tmp_path):
    opposite = [Row((n, n), (-100, n), "eval") for n in range(20)]  # forgotten in training
    run = play(tmp_path, keep_checkpoints=2, eval_every=1, learning_rate=0.3, eval_rows=opposite)
    best = run.result.best_step
    assert best < 10, "the best one was not to be among the newest"
    assert names(tmp_path) == sorted(["latest", f"step-{best}", "step-11", "step-12"])
    assert run.result.best_checkpoint == tmp_path / "checkpoints" / f"step-{best}"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-12\n"


def test_the_best_is_saved_even_where_no_save_is_due(tmp_path):
    run = play(tmp_path, eval_every=5, save_every=None)
    assert run.saved[0] == "step-5"


def test_an_invalid_checkpoint_is_neither_counted_nor_deleted(tmp_path):
    begin(tmp_path)
    delete(tmp_path / "checkpoints" / "step-6" / "rng.safetensors")
    (tmp_path / "checkpoints" / "step-40").mkdir()
    run = play(
        tmp_path, model=Toy(dropout=0.3), eval_every=None, resume=True, on_event=crash_after(6)
    )
    run.failed(Crash)
    assert names(tmp_path) == ["latest", "step-40", "step-5", "step-6"]
    Checkpoints(tmp_path, keep=1).verified(6)  # rewritten, and valid now


def test_saving_precedes_deletion(tmp_path, monkeypatch):
    seen: dict[str, list[str]] = {}

    def failpoint(name: str) -> None:
        seen.setdefault(name, names(tmp_path))

    begin(tmp_path, steps=3)
    monkeypatch.setattr(checkpoint_files, "failpoint", failpoint)
    play(tmp_path, model=Toy(dropout=0.3), eval_every=None, resume=True, keep_checkpoints=1)
    assert {"step-2", "step-3"} < set(seen["MANIFEST.json"])
    assert {"step-2", "step-3", "step-4"} < set(seen["latest"])


def test_leftovers_only_of_dead_processes_are_swept(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    folder = tmp_path / "checkpoints"
    for name in (f"step-3.tmp-{dead.pid}", f"step-4.old-{dead.pid}", "step-3.tmp-1", "step-x"):
        (folder / name).mkdir(parents=True)
    play(tmp_path, max_steps=1)
    assert names(tmp_path) == ["latest", "step-1", "step-3.tmp-1", "step-x"]


def test_bytes_are_synced_before_rename(tmp_path, monkeypatch):
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
