"""Comparisons as tokens: two documents each, cut alike, with their common beginning known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

from peftkit.data.pack import IGNORE, Row


@dataclass(frozen=True, slots=True)
class Compared:
    """Two documents: of a pair the chosen and the rejected one.

    Of a judged answer (KTO) the second is its prompt with another prompt's answer.

    Args:
        input_ids, labels, lengths: As of a `Row` with two documents; labels count in the answers.
        common: Tokens that both begin with, none of them in an answer.
        is_cut: Whether an answer is missing its end.
        source: "train.jsonl:7".
        wanted: Of a judged answer its label. margin: Of a pair, if asked for.
    """

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    lengths: tuple[int, int]
    common: int
    is_cut: bool
    source: str
    wanted: bool | None = None
    margin: float | None = None

    @property
    def documents(self) -> tuple[Row, Row]:
        """The two, each by itself."""
        cut = self.lengths[0]
        return (
            Row(self.input_ids[:cut], self.labels[:cut], (cut,), self.source),
            Row(self.input_ids[cut:], self.labels[cut:], (self.lengths[1],), self.source),
        )

    @property
    def num_targets(self) -> int:
        """Tokens of answers."""
        return sum(label != IGNORE for label in self.labels)


def compared(first: Row, second: Row, max_length: int, **more: Any) -> Compared | None:
    """Return two documents, cut to a length; None where an answer, or their difference, is lost.

    Both have the same prompt, so that as much is left of one answer as of the other, at most.

    Args:
        more: Other fields of `Compared`.
    """
    documents = [
        Row(d.input_ids[:max_length], d.labels[:max_length], (min(d.lengths[0], max_length),), "")
        for d in (first, second)
    ]
    a, b = documents
    is_pair = more.get("wanted") is None  # another prompt's answer may be the same one
    if not (a.num_targets and b.num_targets) or (is_pair and a.input_ids == b.input_ids):
        return None
    return Compared(
        input_ids=a.input_ids + b.input_ids,
        labels=a.labels + b.labels,
        lengths=(a.lengths[0], b.lengths[0]),
        common=common_beginning(a, b),
        is_cut=max(first.lengths[0], second.lengths[0]) > max_length,
        source=first.source,
        **more,
    )


def common_beginning(a: Row, b: Row) -> int:
    """Return how many tokens both documents begin with, before any answer."""
    most = min(answer_start(a), answer_start(b))
    pairs = zip(a.input_ids[:most], b.input_ids[:most], strict=True)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), most)


def answer_start(row: Row) -> int:
    """Return where the first token of an answer is."""
    return next((n for n, label in enumerate(row.labels) if label != IGNORE), len(row.labels))


def after_common_tokens(a: Row, b: Row) -> tuple[Row, Row]:
    """Return two texts, of which only what follows their common tokens is an answer."""
    pairs = zip(a.input_ids, b.input_ids, strict=False)
    shared = next((n for n, (x, y) in enumerate(pairs) if x != y), min(*a.lengths, *b.lengths))
    labels = [(IGNORE,) * shared + row.labels[shared:] for row in (a, b)]
    return replace(a, labels=labels[0]), replace(b, labels=labels[1])


def with_other_answers(rows: Sequence[Row]) -> list[Row]:
    """Return each row's prompt with the answer of the row before it, of the first with the last's.

    What KTO measures its reference point on; TRL takes the same within each of its batches.
    """
    made = []
    for row, other in zip(rows, (rows[-1], *rows[:-1]), strict=True):
        start, at = answer_start(row), answer_start(other)
        ids = row.input_ids[:start] + other.input_ids[at:]
        labels = (IGNORE,) * start + other.labels[at:]
        made.append(Row(ids, labels, (len(ids),), row.source))
    return made


class Decoder(Protocol):
    """The part of a tokenizer that turns tokens into text."""

    def decode(self, ids: Sequence[int], **how: Any) -> Any:
        """Return their text."""


def pieces(row: Row, tokenizer: Decoder, name: str) -> list[tuple[str, str]]:
    """Return a document's text in pieces, each of an answer with a name before it."""
    found = []
    for learnt, group in groupby(
        zip(row.input_ids, row.labels, strict=True), key=lambda pair: pair[1] != IGNORE
    ):
        ids = [token for token, _ in group]
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        found.append((name if learnt else "", str(text)))
    return found
