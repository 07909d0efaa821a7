"""Statistics of a file of rows, without a model."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from peftkit.data.format import detect
from peftkit.data.load import iterate_records
from peftkit.settings import FormatName

TASKS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("chosen", "rejected"), ("preference", "reward")),
    (("prompt", "completion", "label"), ("preference (loss: kto)",)),
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
)
"""Tasks by the fields of their rows; the first that fits counts (docs/data.md)."""
OF_FORMATS: dict[FormatName | None, tuple[str, ...]] = {
    None: (),
    "text": ("causal_lm", "masked_lm"),
    "messages": ("causal_lm",),
    "sharegpt": ("causal_lm",),
}


@dataclass(frozen=True, slots=True)
class FieldFacts:
    """A field: how many rows have it, how many of these are empty, and its mean length.

    Attributes:
        mean_chars: Of texts; of other values as JSON.
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
    """

    where: str
    num_rows: int
    format: FormatName | None
    tasks: tuple[str, ...]
    fields: list[FieldFacts]
    num_duplicates: int
    mixed: str = ""


def survey(where: str) -> Survey:
    """Read every row of a file or data set once.

    Raises:
        DataError: Rows cannot be read.
    """
    seen = array("q")  # a number for each row, equal for equal ones
    number, format_name, tasks, mixed = 0, None, tuple[str, ...](), ""
    counts: dict[str, list[int]] = {}  # of each field: rows, empty ones, characters
    for record in iterate_records(where):
        if number == 0:
            format_name = detect(record.fields)
            tasks = _tasks_of(record.fields, format_name)
        elif not mixed and (other := detect(record.fields)) != format_name:
            mixed = f"{record.source} has the format {other or 'of none known'}"
        whole = json.dumps(record.fields, sort_keys=True, default=str)
        digest = hashlib.blake2b(whole.encode("utf-8", "replace"), digest_size=8).digest()
        seen.append(int.from_bytes(digest, "little", signed=True))
        for name, value in record.fields.items():
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            count = counts.setdefault(name, [0, 0, 0])
            count[0] += 1
            count[1] += value in (None, [], {}) or not text.strip()
            count[2] += len(text)
        number += 1
    fields = [
        FieldFacts(name, rows, empty, chars / rows) for name, (rows, empty, chars) in counts.items()
    ]
    duplicates = number - len(torch.tensor(seen).unique())
    return Survey(where, number, format_name, tasks, fields, duplicates, mixed)


def _tasks_of(fields: Mapping[str, Any], name: FormatName | None) -> tuple[str, ...]:
    named = (tasks for names, tasks in TASKS if fields.keys() >= set(names))
    return next(named, OF_FORMATS.get(name, ("causal_lm", "seq2seq")))
