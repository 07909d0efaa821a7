"""Statistics of a file of rows, without a model."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from peftkit.data.format import detect, parse, with_usual_names
from peftkit.data.load import Record, iterate_records
from peftkit.data.preferences import is_useless
from peftkit.errors import DataError
from peftkit.settings import FormatName

TASKS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("chosen", "rejected"), ("preference", "reward")),
    (("input", "preferred_output", "non_preferred_output"), ("preference", "reward")),
    (("prompt", "completion", "label"), ("preference (loss: kto)",)),
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
"""Tasks by the fields of their rows; the first that fits counts (docs/data.md)."""
OF_FORMATS: dict[FormatName | None, tuple[str, ...]] = {
    None: (),
    "text": ("causal_lm", "masked_lm"),
    "messages": ("causal_lm", "distill", "grpo"),
    "sharegpt": ("causal_lm", "distill", "grpo"),
}
PROMPTS = ("distill", "grpo")
"""Tasks of rows that are prompts alone."""
_MEDIA = ("images", "image", "audios", "audio", "videos", "video")
LABELS = ("role", "from", "type")
"""Keys of a turn that hold no text."""


@dataclass(frozen=True, slots=True)
class FieldFacts:
    """A field: how many rows have it, how many of these are empty, and its mean length.

    Attributes:
        mean_chars: Of texts, those inside lists and objects too.
    """

    name: str
    num_rows: int
    num_empty: int
    mean_chars: float


@dataclass(frozen=True, slots=True)
class Survey:
    """Statistics of a file of rows.

    Attributes:
        format: Of the first row, as causal_lm reads it; None if it does not.
        tasks: That take the first row's fields.
        num_duplicates: Rows equal to an earlier one.
        mixed: The first row of another format, and which; "" if there is none.
        num_wrong: Rows that cannot be read in that format.
        wrong: The first of these, and why; "" if there is none.
        num_useless: Pairs with an empty answer, or with two equal ones; training drops them.
        first_useless: The first of these, or "".
    """

    where: str
    num_rows: int
    format: FormatName | None
    tasks: tuple[str, ...]
    fields: list[FieldFacts]
    num_duplicates: int
    mixed: str = ""
    num_wrong: int = 0
    wrong: str = ""
    num_useless: int = 0
    first_useless: str = ""

    @property
    def num_chars(self) -> int:
        """Characters of all texts."""
        return round(sum(field.mean_chars * field.num_rows for field in self.fields))


def survey(where: str) -> Survey:
    """Read every row of a file or data set once.

    Raises:
        DataError: Rows cannot be read.
    """
    seen = array("q")  # a number for each row, equal for equal ones
    number, format_name, tasks, mixed = 0, None, tuple[str, ...](), ""
    num_wrong, wrong = 0, ""
    num_useless, first_useless = 0, ""
    counts: dict[str, list[int]] = {}  # of each field: rows, empty ones, characters
    for record in map(with_usual_names, iterate_records(where)):
        if number == 0:
            format_name = detect(record.fields)
            tasks = _tasks_of(record.fields, format_name)
        elif not mixed and (other := detect(record.fields)) != format_name:
            mixed = f"{record.source} has the format {other or 'of none known'}"
        if not mixed and (problem := _problem(record, format_name)):
            num_wrong, wrong = num_wrong + 1, wrong or problem
        if is_useless(record):
            num_useless += 1
            first_useless = first_useless or record.source
        whole = json.dumps(record.fields, sort_keys=True, default=str)
        digest = hashlib.blake2b(whole.encode("utf-8", "replace"), digest_size=8).digest()
        seen.append(int.from_bytes(digest, "little", signed=True))
        for name, value in record.fields.items():
            count = counts.setdefault(name, [0, 0, 0])
            count[0] += 1
            count[1] += value in (None, [], {}) or not str(value).strip()
            count[2] += _num_chars(value)
        number += 1
    fields = [
        FieldFacts(name, rows, empty, chars / rows) for name, (rows, empty, chars) in counts.items()
    ]
    duplicates = number - len(torch.tensor(seen).unique())
    tasks = () if num_wrong == number else tasks
    return Survey(
        where,
        number,
        format_name,
        tasks,
        fields,
        duplicates,
        mixed,
        num_wrong,
        wrong,
        num_useless,
        first_useless,
    )


def _problem(record: Record, format_name: FormatName | None) -> str:
    """Return why a row of turns cannot be read as causal_lm reads it; "" if it can."""
    if format_name not in ("messages", "sharegpt") or not record.fields.keys().isdisjoint(_MEDIA):
        return ""
    try:
        parse([record], format_name, where=record.source)
    except DataError as error:
        return error.found
    return ""


def _num_chars(value: Any) -> int:
    """Return the characters of a text, or of the texts in a list or an object."""
    if isinstance(value, Mapping):
        return sum(_num_chars(inner) for key, inner in value.items() if key not in LABELS)
    if isinstance(value, list):
        return sum(map(_num_chars, value))
    return 0 if value is None else len(str(value))


def _tasks_of(fields: Mapping[str, Any], name: FormatName | None) -> tuple[str, ...]:
    if fields.keys() == {"prompt"}:
        return PROMPTS
    named = (tasks for names, tasks in TASKS if fields.keys() >= set(names))
    return next(named, OF_FORMATS.get(name, ("causal_lm", "seq2seq")))
