"""Statistics of a data file, without a model."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from peftkit.data.examples import ANSWERS, TURNS, first_of
from peftkit.data.format import detect, parse, with_usual_names
from peftkit.data.preferences import (
    LABEL,
    OPENAI_SIDES,
    SIDES,
    is_useless,
    read_pairs_of,
    read_verdicts,
)
from peftkit.data.prompts import read_prompts
from peftkit.data.readers import READERS
from peftkit.data.records import Record, files_of, iterate_records
from peftkit.errors import DataError
from peftkit.settings import FormatName

PAIRS, VERDICTS, PROMPTS = (
    ("preference", "reward"),
    ("preference (loss: kto)",),
    ("distill", "grpo"),
)
"""Tasks for preference pairs, for labelled answers, and for prompts without answers."""
TASKS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("prompt", "completion"), ("causal_lm", "seq2seq", "distill", "grpo")),
    (("prompt", "answer"), ("causal_lm", "grpo", "distill")),
    (("anchor", "positive"), ("embedding",)),
    (("query", "positive"), ("reranker",)),
    (("query", "text", "score"), ("reranker",)),
    (("words", "tags"), ("token_classification",)),
    (("image", "label"), ("image_classification",)),
    (("text", "label"), ("sequence_classification", "masked_lm", "causal_lm")),
    (("audio", "text"), ("transcription", "ctc")),
    (("audio", "label"), ("audio_classification",)),
    (("images",), ("image_text",)),
    (("image",), ("image_text",)),
    (("audios",), ("audio_text",)),
    (("audio",), ("audio_text",)),
    (("videos",), ("image_text",)),
    (("video",), ("image_text",)),
    (("document", "summary"), ("seq2seq",)),
)
"""Tasks by the fields of their rows; the first match counts (docs/data.md)."""
OF_FORMATS: dict[FormatName | None, tuple[str, ...]] = {
    None: (),
    "text": ("causal_lm", "masked_lm"),
    "messages": ("causal_lm", "distill", "grpo"),
    "sharegpt": ("causal_lm", "distill", "grpo"),
}
_MEDIA = ("images", "image", "audios", "audio", "videos", "video")
LABELS = ("role", "from", "type")
"""Keys of a turn that contain no text."""


@dataclass(frozen=True, slots=True)
class FieldFacts:
    """Statistics of a field.

    Attributes:
        num_rows: Rows that have the field.
        num_empty: Rows in which it is empty.
        mean_chars: Mean number of characters, including texts inside lists and objects.
    """

    name: str
    num_rows: int
    num_empty: int
    mean_chars: float


@dataclass(slots=True)
class Survey:
    """Statistics of a data file.

    Attributes:
        format: Format of the first row for causal_lm; None if there is none.
        tasks: Tasks that accept the fields of the first row.
        num_duplicates: Rows equal to an earlier row.
        mixed: The first row of another format, and this format; "" if there is none.
        num_wrong: Rows that the first of `tasks` cannot read.
        wrong: The first of these rows, and the reason; "" if there is none.
        num_useless: Pairs with an empty answer or two equal answers; training drops them.
        first_useless: The first of these pairs, or "".
        has_tools: Whether conversations have tools or tool calls.
        plain: Names of the prompt and the completion of the first row, if both are texts.
    """

    where: str
    num_rows: int = 0
    format: FormatName | None = None
    tasks: tuple[str, ...] = ()
    fields: list[FieldFacts] = field(default_factory=list)
    num_duplicates: int = 0
    mixed: str = ""
    num_wrong: int = 0
    wrong: str = ""
    num_useless: int = 0
    first_useless: str = ""
    has_tools: bool = False
    plain: tuple[str, ...] = ()

    @property
    def num_chars(self) -> int:
        """Number of characters of all texts."""
        return round(sum(field.mean_chars * field.num_rows for field in self.fields))


def survey(where: str) -> Survey:
    """Read all rows of a file, a pattern of files or a data set.

    Raises:
        DataError: Rows cannot be read.
    """
    found, seen = Survey(where), array("q")  # a hash of each row
    counts: dict[str, list[int]] = {}  # by field: rows, empty rows, characters
    for raw in (raw for file in files_of(where) for raw in iterate_records(file)):
        record = with_usual_names(raw)
        if found.num_rows == 0:
            found.format = detect(record.fields)
            found.tasks = _tasks_of(record, found.format)
            found.plain = _plain(raw, found.format)
        elif not found.mixed and (other := detect(record.fields)) != found.format:
            found.mixed = f"{record.source} has the format {other or 'unknown'}"
        if not found.mixed and (problem := _problem(record, found.format, found.tasks)):
            found.num_wrong, found.wrong = found.num_wrong + 1, found.wrong or problem
        if is_useless(record):
            found.num_useless += 1
            found.first_useless = found.first_useless or record.source
        found.has_tools = found.has_tools or _has_tools(record)
        content = json.dumps(record.fields, sort_keys=True, default=str).encode("utf-8", "replace")
        digest = hashlib.blake2b(content, digest_size=8).digest()
        seen.append(int.from_bytes(digest, "little", signed=True))
        for name, value in record.fields.items():
            count = counts.setdefault(name, [0, 0, 0])
            count[0] += 1
            count[1] += value in (None, [], {}) or not str(value).strip()
            count[2] += _num_chars(value)
        found.num_rows += 1
    found.fields = [
        FieldFacts(name, rows, empty, chars / rows) for name, (rows, empty, chars) in counts.items()
    ]
    found.num_duplicates = found.num_rows - len(torch.tensor(seen).unique())
    if found.num_wrong == found.num_rows:
        found.tasks = ()
    return found


def _problem(record: Record, format_name: FormatName | None, tasks: tuple[str, ...]) -> str:
    """Return why the first task of a file cannot read a row; "" if it can."""
    if not record.fields.keys().isdisjoint(_MEDIA) or is_useless(record):
        return ""
    try:
        if tasks == PAIRS:
            read_pairs_of([record], record.source)
        elif tasks == VERDICTS:
            read_verdicts([record], record.source)
        elif tasks == PROMPTS:
            read_prompts([record], where=record.source)
        elif format_name:
            parse([record], format_name, where=record.source)
    except DataError as error:
        return error.found
    return ""


def _has_tools(record: Record) -> bool:
    """Return whether a conversation has tools or tool calls."""
    turns = record.fields.get(first_of(record.fields, TURNS) or "")
    roles = {"tool", "function_call", "observation"}
    calls = (
        "tool_calls" in turn or turn.get("role", turn.get("from")) in roles
        for turn in (turns if isinstance(turns, list) else ())
        if isinstance(turn, Mapping)
    )
    return bool(record.fields.get("tools")) or any(calls)


def _plain(record: Record, format_name: FormatName | None) -> tuple[str, ...]:
    """Return the names of a prompt and its completion if both are texts; else ()."""
    names = {name.strip().lower(): name for name in record.fields}
    answer = first_of(names, ("completion", *ANSWERS))
    if format_name != "prompt_completion" or not answer:
        return ()
    is_text = isinstance(record.fields[names["prompt"]], str)
    return (names["prompt"], names[answer]) if is_text else ()


SPLITS = {
    "train": ("train",),
    "eval": ("valid", "validation", "val", "dev", "eval", "evaluation", "test"),
}
SHARD = r"-\d+-of-\d+(-\w+)?"
NO_ROWS = ("_results", "_state")
"""Suffixes of files that trainers write next to data files."""


def data_files(folder: Path) -> list[Path]:
    """Return the data files of a folder, sorted."""
    files = [file for file in sorted(folder.iterdir()) if file.suffix.lower() in READERS]
    return [file for file in files if not file.stem.lower().endswith(NO_ROWS)]


def only_data_file(folder: Path) -> str | None:
    """Return the data file of a folder that has exactly one."""
    files = data_files(folder)
    return str(files[0]) if len(files) == 1 else None


def splits_of(folder: Path) -> dict[str, str]:
    """Return the training file and the evaluation file of a folder, from their names.

    A file name matches exactly, or with a shard suffix (train-00000-of-00002), or as the only file
    with the prefix. Only the first shard of evaluation data is used: `data.eval` takes no pattern.
    """
    files = data_files(folder)
    splits: dict[str, str] = {}
    for split, names in SPLITS.items():
        tails = [(name, tail) for name in names for tail in (r"", SHARD)]
        for name, tail in (*tails, *((name, r".*") for name in names)):
            matches = [f for f in files if re.fullmatch(name + tail, f.stem.lower())]
            if len(matches) == 1 or (matches and tail == SHARD and split == "eval"):
                splits.setdefault(split, str(matches[0]))
            elif matches and tail == SHARD:
                stem, kind = matches[0].stem[: len(name)], matches[0].suffix
                splits.setdefault(split, str(folder / f"{stem}-*-of-*{kind}"))
    return splits


def _num_chars(value: object) -> int:
    """Return the number of characters of a text, or of the texts in a list or an object."""
    if isinstance(value, Mapping):
        return sum(_num_chars(inner) for key, inner in value.items() if key not in LABELS)
    if isinstance(value, list):
        return sum(map(_num_chars, value))
    return 0 if value is None else len(str(value))


def _tasks_of(record: Record, name: FormatName | None) -> tuple[str, ...]:
    fields = record.fields
    if any(fields.keys() >= set(sides) for sides in (SIDES, OPENAI_SIDES)):
        return PAIRS
    if fields.keys() == {"prompt"} or _is_prompt_only(fields.get(first_of(fields, TURNS) or "")):
        return PROMPTS
    if isinstance(fields.get(LABEL), bool) and name not in (None, "text"):
        return VERDICTS
    named = (tasks for names, tasks in TASKS if fields.keys() >= set(names))
    return next(named, OF_FORMATS.get(name, ("causal_lm", "seq2seq")))


def _is_prompt_only(turns: object) -> bool:
    """Return whether a conversation ends with a user turn and has no assistant turn."""
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        return False
    roles = [turn.get("role", turn.get("from")) for turn in turns]
    return roles[-1:] in (["user"], ["human"]) and set(roles) <= {"system", "user", "human"}
