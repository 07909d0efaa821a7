"""Names of an adapter's files and of repositories on a hub; new folders, written atomically."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from peftkit.errors import AdapterError, OutputError, first_few
from peftkit.files.disk import fsync_dir, new_folder

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
NOTES = "peftkit.json"
CARD = "README.md"
RECIPE = "recipe.yaml"
SWEEP = "sweep.json"
"""Members of a sweep and what became of them, in its folder."""
RUN_FILES = ("checkpoints", RECIPE, "metrics.jsonl")
"""Files of a training run that would not fit another adapter."""
ORIGIN = "pulled.json"
"""Records where an adapter was pulled from: its recipe.yaml came with it, and is no run's."""

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja"),
)
"""Saved with an adapter that has new tokens."""
START = "start.safetensors"
"""The tensors that an adapter began with, for losses that compare it with its start."""
ADAPTER_FILES = (
    *(TENSORS, "adapters.safetensors", START, NOTES),
    *(CARD, RECIPE, ORIGIN, *TOKENIZER_FILES),
)
"""Files of an adapter in any format, which a new one replaces."""
RECORDS = (
    *("run.json", "metrics.jsonl", "samples.jsonl", "answers.jsonl", "tasks.json"),
    *("report.html", "diagnosis.json", "teacher_answers.jsonl"),
)
"""What a run writes before its adapter, and what is measured of it later."""
OVERWRITTEN = "overwritten"
"""A folder in that of a run, with the adapter that it replaces, until its own is saved."""


_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?")
_MAX_LENGTH = 96


class HubId(NamedTuple):
    """A repository, and its branch, tag or commit; None is the main branch."""

    repo: str
    revision: str | None = None


def parse_hub_id(text: str) -> HubId:
    """Read USER/NAME or USER/NAME@REVISION.

    Raises:
        AdapterError: It is neither.
    """
    match = _ID.fullmatch(text)
    if not match or ".." in text or "--" in match["repo"] or len(match["repo"]) > _MAX_LENGTH:
        raise AdapterError(
            f"{text!r} is not the name of a repository on the hub",
            found="A name is USER/NAME of letters, digits and single - _ . between them.",
            fix="Write it as on its page: USER/NAME, or USER/NAME@REVISION.",
        )
    return HubId(match["repo"], match["revision"])


def is_hub_id(text: str) -> bool:
    """True if this names a hub repository rather than a path.

    An existing path is a path; so is one whose first folder exists, which is then misspelt.
    """
    if not _ID.fullmatch(text) or ".." in text:
        return False
    return not Path(text).exists() and not Path(text.partition("/")[0]).exists()


@contextmanager
def new_adapter_folder(out: Path, *, force: bool, sources: Sequence[Path] = ()) -> Iterator[Path]:
    """Yield an empty folder; its files move to `out` when the block succeeds.

    Args:
        force: Replace the adapter in `out`.
        sources: Folders to read from; none of them may be `out`.

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
    message = f"cannot write an adapter to {out}"
    other = "Choose another folder."
    if any(out.resolve() == source.resolve() for source in sources):
        raise OutputError(message, found="It is one of the source folders.", fix=other)
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise OutputError(message, found="It is not a folder.", fix=other)
    names = sorted(path.name for path in out.iterdir())
    if not names:
        return
    if CONFIG not in names or (run := _left_by_run(names)):
        held = first_few(names, 5, ", ")
        if CONFIG in names:
            held = "a training run's " + ", ".join(run)
        raise OutputError(message, found=f"It holds {held}.", fix=other)
    if not force:
        raise OutputError(
            message, found="It holds an adapter.", fix="Choose another folder, or add --force."
        )


def _left_by_run(names: Sequence[str]) -> list[str]:
    pulled = ORIGIN in names
    return [n for n in RUN_FILES if n in names and not (pulled and n == RECIPE)]


def set_aside(folder: Path) -> Path | None:
    """Move the adapter of an earlier run, and its records, to `overwritten`; return that folder.

    None: there is no adapter, and the records of the run that did not finish are deleted. What an
    earlier call has set aside stays then, so that the last adapter is kept until there is another.

    Raises:
        OutputError: A file cannot be moved.
    """
    aside = folder / OVERWRITTEN
    try:
        if not (folder / CONFIG).exists():
            for name in RECORDS:
                (folder / name).unlink(missing_ok=True)
            return None
        if (folder / TENSORS).exists():  # else an earlier call was cut short, and goes on
            shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(exist_ok=True)
        # the tensors first: without them the folder is refused by every command
        for name in (TENSORS, NOTES, START, *TOKENIZER_FILES, CARD, ORIGIN, *RECORDS):
            _move(folder / name, aside)
        # a copy: `peftkit distill` has written it anew
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(folder / RECIPE, aside / RECIPE)
        _move(folder / CONFIG, aside)
        fsync_dir(aside)
        fsync_dir(folder)
    except OSError as problem:
        raise OutputError(
            f"cannot move the adapter in {folder} aside",
            found=str(problem),
            fix="Move it by hand, or train into another folder (--out DIR).",
        ) from problem
    return aside


def _move(path: Path, folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.replace(path, folder / path.name)


def forget_overwritten(folder: Path) -> None:
    """Delete what `set_aside` kept, once the new adapter is saved."""
    shutil.rmtree(folder / OVERWRITTEN, ignore_errors=True)
