"""Adapter folders that are written completely or not at all, and replaced only with `force`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from peftkit.errors import OutputError, first_few
from peftkit.files.disk import new_folder
from peftkit.formats.peft.folder import CONFIG, NOTES, TENSORS

RUN_FILES = ("checkpoints", "recipe.yaml", "metrics.jsonl")
"""Files of a training run beside its adapter, which would not fit another adapter."""
ORIGIN = "pulled.json"
"""Says where an adapter was pulled from: its recipe.yaml came with it, and is no run's."""

ADAPTER_FILES = (
    *(TENSORS, "adapters.safetensors", NOTES),
    *("README.md", "recipe.yaml", ORIGIN),
)
"""Files that belong to the adapter that is replaced, in any format."""


@contextmanager
def new_adapter_folder(out: Path, *, force: bool, sources: Sequence[Path] = ()) -> Iterator[Path]:
    """Yield an empty folder whose files become those of `out` when the block ends well.

    Args:
        force: Replace the adapter that is in `out`.
        sources: Folders that are read from, none of which may be `out`.

    Raises:
        OutputError: `out` is taken, or cannot be written to.
    """
    check_free(out, force=force, sources=sources)
    with new_folder(out, last=CONFIG, replaced=lambda name: name in ADAPTER_FILES) as folder:
        yield folder


def check_free(out: Path, *, force: bool, sources: Sequence[Path] = ()) -> None:
    """Refuse a folder that is taken; called before the work, not after it.

    Raises:
        OutputError: `out` is a file, is a source, or holds something that may not be replaced.
    """
    asked = f"cannot write an adapter to {out}"
    other = "Choose another folder."
    if any(out.resolve() == source.resolve() for source in sources):
        raise OutputError(asked, found="It is one of the source folders.", fix=other)
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise OutputError(asked, found="It is not a folder.", fix=other)
    names = sorted(path.name for path in out.iterdir())
    if not names:
        return
    if CONFIG not in names or (run := _left_by_run(names)):
        held = first_few(names, 5, ", ")
        if CONFIG in names:
            held = "a training run's " + ", ".join(run)
        raise OutputError(asked, found=f"It holds {held}.", fix=other)
    if not force:
        raise OutputError(
            asked, found="It holds an adapter.", fix="Choose another folder, or add --force."
        )


def _left_by_run(names: Sequence[str]) -> list[str]:
    pulled = ORIGIN in names
    return [n for n in RUN_FILES if n in names and not (pulled and n == "recipe.yaml")]
