"""What is in a file of rows, before any model is loaded: its fields, and how long rows are."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peftkit.data.cache import encoded
from peftkit.data.documents import BEYOND, NOTHING, DocumentEncoder
from peftkit.data.format import detect
from peftkit.data.load import FormatName, iterate_records
from peftkit.errors import DataError
from peftkit.events import Listener, ignore

LOOKED_AT = 2_000
"""Rows whose texts are looked at for their script."""
SCRIPTS = ("LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "DEVANAGARI", "CJK", "HIRAGANA",
           "KATAKANA", "HANGUL", "THAI", "BENGALI", "TAMIL", "GEORGIAN", "ARMENIAN")  # fmt: skip


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
    """A field of rows: in how many it is, how many of these are empty, and what it holds.

    Attributes:
        mean_chars: Of texts; of others as JSON. scripts: Shares of its letters by script.
    """

    name: str
    num_rows: int
    num_empty: int
    mean_chars: float
    scripts: dict[str, float]


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """Rows as one tokenizer has them.

    Attributes:
        lengths: Tokens of each row that is kept. dropped: Sources of rows with nothing to learn.
    """

    lengths: Sequence[int]
    num_targets: int
    num_cut: int
    num_duplicates: int
    dropped: list[str]


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
    tokens: TokenFacts | None
    mixed: str = ""


def survey(
    where: str,
    tokenizer: Any = None,
    *,
    template: str | None = None,
    max_length: int = 1024,
    on_event: Listener = ignore,
) -> Survey:
    """Look at every row of a file or data set.

    Args:
        tokenizer: Makes tokens of them; without one only fields are counted.

    Raises:
        DataError: Rows cannot be read; or, with a tokenizer, cannot be learnt from.
    """
    seen = array("q")  # a number for each row, equal for equal ones
    number, found, tasks, mixed = 0, None, tuple[str, ...](), ""
    counts: dict[str, list[int]] = {}  # of each field: rows, empty ones, characters
    letters: dict[str, Counter[str]] = {}
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
            if number < LOOKED_AT:
                letters.setdefault(name, Counter()).update(_scripts(text))
        number += 1
    fields = [
        FieldFacts(name, rows, empty, chars / rows, _shares(letters.get(name, Counter())))
        for name, (rows, empty, chars) in counts.items()
    ]
    tokens = None
    if tokenizer is not None:
        if found is None:
            told = f" Such rows are for: {', '.join(tasks)}." if tasks else ""
            raise DataError(
                f"Cannot count the tokens of {where}.",
                found=f"Its fields are none that causal_lm reads: {', '.join(counts)}.{told}",
                fix="Leave --model out; peftkit check RECIPE counts the tokens of any task's rows.",
            )
        encoder = DocumentEncoder(tokenizer, template, "auto", max_length)
        rows = encoded(where, encoder, on_event=on_event)
        tokens = TokenFacts(
            lengths=rows.num_tokens.tolist(),
            num_targets=rows.counts["targets"],
            num_cut=rows.counts["cut"],
            num_duplicates=rows.num_duplicates,
            dropped=[*rows.dropped(NOTHING), *rows.dropped(BEYOND)],
        )
    duplicates = number - len(torch.tensor(seen).unique())
    return Survey(where, number, found, tasks, fields, duplicates, tokens, mixed)


def _tasks_of(fields: Mapping[str, Any], name: FormatName | None) -> tuple[str, ...]:
    """Return the tasks that rows with these fields are for."""
    named = (tasks for names, tasks in TASKS if fields.keys() >= set(names))
    return next(named, OF_FORMATS.get(name, ("causal_lm", "seq2seq")))


def _scripts(text: str) -> Counter[str]:
    """Return how many letters are of which script, of the first few hundred characters."""
    found: Counter[str] = Counter()
    for letter in text[:400]:
        if letter.isascii():
            found["LATIN"] += letter.isalpha()
        elif letter.isalpha():
            name = unicodedata.name(letter, "").split(" ")[0]
            found[name if name in SCRIPTS else "other"] += 1
    return found


def _shares(letters: Counter[str]) -> dict[str, float]:
    total = sum(letters.values())
    return {
        name.capitalize() if name != "CJK" else name: count / total
        for name, count in letters.most_common(3)
        if count >= 0.01 * total > 0
    }
