"""Folders appear whole or not at all; a lock has one holder at a time."""

import threading
from functools import partial
from pathlib import Path

import pytest

from peftkit.errors import OutputError
from peftkit.files.disk import alone, new_folder

new = partial(new_folder, last="config", replaced=lambda name: name == "old")


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_new_folder_appears_when_all_of_it_is_written(tmp_path):
    out = tmp_path / "deep" / "out"
    with new(out) as folder:
        (folder / "a").write_text("a")
        assert not out.exists()
    assert names(tmp_path) == ["deep", "deep/out", "deep/out/a"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_block_that_fails_leaves_nothing_behind(tmp_path, is_there):
    out = tmp_path / "out"
    if is_there:
        out.mkdir()
        (out / "old").write_text("old")
    before = names(tmp_path)

    def breaks_off() -> None:
        with new(out) as folder:
            (folder / "a").write_text("a")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        breaks_off()
    assert names(tmp_path) == before


def test_what_was_there_goes_unless_it_is_to_stay(tmp_path):
    for name in ("config", "old", "kept"):
        (tmp_path / name).write_text("before")
    with new(tmp_path) as folder:
        (folder / "new").write_text("after")
        (folder / "config").write_text("after")
    assert names(tmp_path) == ["config", "kept", "new"]
    assert (tmp_path / "config").read_text() == "after"


def test_a_folder_that_is_no_earlier_version_keeps_all_of_its_files(tmp_path):
    (tmp_path / "old").write_text("of someone else")
    with new(tmp_path) as folder:
        (folder / "config").write_text("ours")
    (tmp_path / "config").unlink()
    (tmp_path / "a").write_text("of someone else")

    def fill() -> None:
        with new(tmp_path) as folder:
            (folder / "a").write_text("ours")
            (folder / "config").write_text("ours")

    with pytest.raises(OutputError, match="another origin: a"):
        fill()
    assert names(tmp_path) == ["a", "old"]
    assert {path.read_text() for path in tmp_path.iterdir()} == {"of someone else"}


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(OutputError, match="file of that name"), new(tmp_path / "out"):
        pass


class Waits(Exception):
    pass


def waits() -> None:
    raise Waits


def test_a_lock_that_was_waited_for_is_held_by_one_alone(tmp_path):
    """The holder took the lock's file away: whoever waited for it held a file without a name."""
    path = tmp_path / "folder"
    waiting, is_held, end = (threading.Event() for _ in range(3))

    def second() -> None:
        with alone(path, waiting.set):
            is_held.set()
            end.wait(10)

    other = threading.Thread(target=second)
    with alone(path):
        other.start()
        assert waiting.wait(10)
    assert is_held.wait(10)
    try:
        with pytest.raises(Waits), alone(path, waits):
            pass
    finally:
        end.set()
        other.join()
    with alone(path, waits):
        pass
