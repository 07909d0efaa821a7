"""File names of adapters, names of repositories on a hub, and atomically written folders."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from peftkit.errors import AdapterError, OutputError, first_few
from peftkit.files.disk import fsync_dir, new_folder

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
NOTES = "peftkit.json"
PROOF = "proof.json"
"""Log-probabilities of the adapter on a few prompts (peftkit.proof)."""
CARD = "README.md"
RECIPE = "recipe.yaml"
SWEEP = "sweep.json"
"""Members of a sweep and their states, in the sweep's folder."""
RUN_FILES = ("checkpoints", RECIPE, "metrics.jsonl")
"""Files of a training run that do not belong to any other adapter."""
ORIGIN = "pulled.json"
"""Record of a pulled adapter's source; its recipe.yaml was pulled too, not written by a run."""

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja"),
)
"""Saved with an adapter that has new tokens."""
START = "start.safetensors"
"""Initial tensors of an adapter, for losses that compare it with its start."""
ADAPTER_FILES = (
    *(TENSORS, "adapters.safetensors", START, NOTES),
    *(CARD, PROOF, RECIPE, ORIGIN, *TOKENIZER_FILES),
)
"""Files of an adapter in any format, which a new adapter replaces."""
MARKS = ("run.json", "metrics.jsonl")
"""Files that every recipe's run writes when it starts."""
FINISHED, TRACKERS = "finished.json", "trackers.json"
"""Of a run: the result, written when nothing is left to do; the ids of its runs in trackers."""
TEACHER_ANSWERS = "teacher_answers.jsonl"
"""A teacher's completions for the rows of a run."""
RECORDS = (
    *(*MARKS, "samples.jsonl", "answers.jsonl", "tasks.json", "report.html", "diagnosis.json"),
    *(TEACHER_ANSWERS, FINISHED, TRACKERS),
)
"""Files of a run besides the adapter: logs, samples, reports and later evaluations."""
OVERWRITTEN = "overwritten"
"""Subfolder of a run with the previous adapter, until the run saves its adapter."""


_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?")
_MAX_LENGTH = 96


class HubId(NamedTuple):
    """A repository, and its branch, tag or commit; None means the main branch."""

    repo: str
    revision: str | None = None


def parse_hub_id(text: str) -> HubId:
    """Read USER/NAME or USER/NAME@REVISION.

    Raises:
        AdapterError: The text has neither form.
    """
    match = _ID.fullmatch(text)
    if not match or ".." in text or "--" in match["repo"] or len(match["repo"]) > _MAX_LENGTH:
        raise AdapterError(
            f"{text!r} is not the name of a repository on the hub",
            found="A name is USER/NAME of letters, digits and single - _ . between them.",
            fix="Copy it from its page: USER/NAME, or USER/NAME@REVISION.",
        )
    return HubId(match["repo"], match["revision"])


def is_hub_id(text: str) -> bool:
    """Return whether a text names a hub repository rather than a path.

    An existing path is a path. If only its first folder exists, it is a misspelt path.
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
        OutputError: `out` exists and may not be replaced, or cannot be written.
    """
    check_free(out, force=force, sources=sources)
    with new_folder(out, last=CONFIG, replaced=ADAPTER_FILES.__contains__) as folder:
        yield folder


def check_free(out: Path, *, force: bool, sources: Sequence[Path] = ()) -> None:
    """Check, before any work, that an adapter may be written to a folder.

    Raises:
        OutputError: `out` is a file, is a source, or holds files that may not be replaced.
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
    run = [n for n in RUN_FILES if n in names and not (ORIGIN in names and n == RECIPE)]
    if CONFIG not in names or run:
        files = first_few(names, 5, ", ")
        if CONFIG in names:
            files = "a training run's " + ", ".join(run)
        raise OutputError(message, found=f"It holds {files}.", fix=other)
    if not force:
        raise OutputError(
            message, found="It holds an adapter.", fix="Choose another folder, or add --force."
        )


def set_aside(folder: Path) -> Path | None:
    """Move the adapter and the records of an earlier run to `overwritten`; return that folder.

    Without an adapter, delete the records of the unfinished run and return None. Files that an
    earlier call moved stay: the last adapter is kept until there is a new one.

    Raises:
        OutputError: A file cannot be moved.
    """
    aside = folder / OVERWRITTEN
    try:
        if not (folder / CONFIG).exists():
            for name in RECORDS:
                (folder / name).unlink(missing_ok=True)
            return None
        if (folder / TENSORS).exists():  # otherwise continue an interrupted call
            shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(exist_ok=True)
        # tensors first: every command refuses a folder without them
        for name in (TENSORS, NOTES, START, *TOKENIZER_FILES, CARD, PROOF, ORIGIN, *RECORDS):
            _move(folder / name, aside)
        # a copy: `peftkit distill` has already written the new recipe
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(folder / RECIPE, aside / RECIPE)
        _move(folder / CONFIG, aside)
        fsync_dir(aside)
        fsync_dir(folder)
    except OSError as problem:
        raise OutputError(
            f"cannot move the adapter in {folder}",
            found=str(problem),
            fix="Move it manually, or train into another folder (--out DIR).",
        ) from problem
    return aside


def copy_files(source: Path, folder: Path, names: Iterable[str] = TOKENIZER_FILES) -> None:
    """Copy those of the files that exist; links are followed."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _move(path: Path, folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.replace(path, folder / path.name)
