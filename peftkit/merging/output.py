"""Model folders that are written completely or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from peftkit.errors import OutputError, first_few
from peftkit.files import disk


@contextlib.contextmanager
def new_folder(out: Path, overwrite: bool, sources: Sequence[Path]) -> Iterator[Path]:
    """Yield an empty folder whose files become those of `out` when the block ends well.

    Raises:
        OutputError: `out` is not empty, is what is read from, or cannot be written.
    """
    asked = f"cannot write the merged model to {out}"
    if any(out.resolve() == source.resolve() for source in sources if str(source) not in ("", ".")):
        raise OutputError(
            asked, found="it is one of the source folders", fix="Choose another folder."
        )
    existed = out.exists()
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        names = first_few(sorted(path.name for path in out.iterdir()), 5, ", ")
        raise OutputError(asked, found=f"it holds {names}", fix="Choose a new or an empty folder.")
    disk.writable_folder(out)
    folder = out / f".merging-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):  # somebody else has put something there
                out.rmdir()
        raise
    _publish(folder, out)


def _publish(folder: Path, out: Path) -> None:
    """Move the files up; weights of an earlier model go, and config.json comes last."""
    for path in folder.rglob("*"):  # those that transformers wrote are not on the disk yet
        if path.is_file():
            disk.fsync_file(path)
    config = out / "config.json"
    config.unlink(missing_ok=True)
    for path in out.iterdir():
        if path.name.endswith((".safetensors", ".safetensors.index.json", ".bin")):
            path.unlink()
    for path in sorted(folder.iterdir(), key=lambda path: path.name == config.name):
        if path.is_dir():
            shutil.rmtree(out / path.name, ignore_errors=True)
        os.replace(path, out / path.name)
    folder.rmdir()
    disk.fsync_dir(out)
