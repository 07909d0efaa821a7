"""What is in a file of rows, before any model is loaded."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from peftkit.data.format import detect
from peftkit.data.load import FormatName, iterate_records

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
"""What rows with these fields are for, the first that fits; see docs/data.md."""
OF_FORMATS: dict[FormatName | None, tuple[str, ...]] = {
    None: (),
    "text": ("causal_lm", "masked_lm"),
    "messages": ("causal_lm",),
    "sharegpt": ("causal_lm",),
}


@dataclass(frozen=True, slots=True)
class FieldFacts:
    """A field of rows: in how many it is, how many of these are empty, and how long it is.

    Attributes:
        mean_chars: Of texts; of others as JSON.
    """

    name: str
    num_rows: int
    num_empty: int
    mean_chars: float


@dataclass(frozen=True, slots=True)
class Survey:
    """What is in a file of rows.

    Attributes:
        format: As causal_lm reads them, by the first row; None where it does not.
        tasks: That the first row's fields are for.
        mixed: The first row whose fields make another format, and which; "" if there is none.
        num_duplicates: Rows that are equal to one before.
    """

    where: str
    num_rows: int
    format: FormatName | None
    tasks: tuple[str, ...]
    fields: list[FieldFacts]
    num_duplicates: int
    mixed: str = ""


def survey(where: str) -> Survey:
    """Look at every row of a file or data set.

    Raises:
        DataError: Rows cannot be read.
    """
    seen = array("q")  # a number for each row, equal for equal ones
    number, found, tasks, mixed = 0, None, tuple[str, ...](), ""
    counts: dict[str, list[int]] = {}  # of each field: rows, empty ones, characters
    for record in iterate_records(where):
        if number == 0:
            found = detect(record.fields)
            tasks = _tasks_of(record.fields, found)
        elif not mixed and (own := detect(record.fields)) != found:
            mixed = f"{record.source} has the format {own or 'of none known'}"
        whole = json.dumps(record.fields, sort_keys=True, default=str)
        digest = hashlib.blake2b(whole.encode("utf-8", "replace"), digest_size=8).digest()
        seen.append(int.from_bytes(digest, "little", signed=True))
        for name, value in record.fields.items():
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            known = counts.setdefault(name, [0, 0, 0])
            known[0] += 1
            known[1] += value in (None, [], {}) or not text.strip()
            known[2] += len(text)
        number += 1
    fields = [
        FieldFacts(name, rows, empty, chars / rows) for name, (rows, empty, chars) in counts.items()
    ]
    duplicates = number - len(torch.tensor(seen).unique())
    return Survey(where, number, found, tasks, fields, duplicates, mixed)


def _tasks_of(fields: Mapping[str, Any], name: FormatName | None) -> tuple[str, ...]:
    """Return the tasks that rows with these fields are for."""
    named = (tasks for names, tasks in TASKS if fields.keys() >= set(names))
    return next(named, OF_FORMATS.get(name, ("causal_lm", "seq2seq")))
