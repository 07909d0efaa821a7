"""Comparisons as tokens: two documents each, cut alike, with their common beginning known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from peftkit.data.encode import Encoder
from peftkit.data.format import Example
from peftkit.data.pack import IGNORE, Labels, Row, cut_document
from peftkit.data.preferences import NOTHING_TO_COMPARE
from peftkit.data.rows import RowEncoder, tokenizer_key


@dataclass(frozen=True, slots=True)
class Compared(Row):
    """Two documents, one after the other: of a pair the chosen and the rejected one.

    Of a judged answer (KTO) the second is its prompt with another prompt's answer. Labels count in
    the answers.

    Args:
        common: Tokens that both begin with, none of them in an answer.
        is_cut: Whether an answer is missing its end.
        wanted: Of a judged answer its label.
    """

    common: int
    is_cut: bool
    wanted: bool | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer that is wanted or not, after its prompt.

    Args:
        input_ids, labels: As of a `Row`; labels count in the answer.
        start: Where the answer begins. is_cut: Whether its end is missing.
        source: "train.jsonl:7".
    """

    input_ids: tuple[int, ...]
    labels: Labels
    start: int
    is_cut: bool
    wanted: bool
    source: str

    def beside(self, other: Judged, max_length: int) -> Compared:
        """Return it, and its prompt with the answer of another."""
        ids = self.input_ids[: self.start] + other.input_ids[other.start :]
        labels = (IGNORE,) * self.start + other.labels[other.start :]
        own = Row(self.input_ids, self.labels, (len(self.input_ids),), self.source)
        mixed = Row(ids, labels, (len(ids),), self.source)
        found = compared(own, mixed, max_length, wanted=self.wanted)
        assert found is not None, self.source
        return replace(found, is_cut=self.is_cut or other.is_cut or found.is_cut)


class AnswerEncoder(RowEncoder):
    """Makes rows of answers after their prompts, of at most `max_length` tokens."""

    drops: Mapping[str, str] = {
        **NOTHING_TO_COMPARE,
        "no answer, or no difference, before the cut": "raise data.max_length",
    }

    def __init__(self, tokenizer: Any, template: str | None, max_length: int) -> None:
        self._tokenizer, self._template, self.max_length = tokenizer, template, max_length
        self._encoder = Encoder(tokenizer, template)

    def key(self, where: str) -> object:
        return (*tokenizer_key(self._tokenizer), self._template, self.max_length)

    def encode(self, example: Example) -> Row:
        """Return an example as tokens, uncut."""
        return self._encoder.encode(example)

    def agreed(self, example: Example) -> dict[str, str]:
        """Return what all rows have in common with this one."""
        return {"style": self._encoder.style(example).kind}


def compared(first: Row, second: Row, max_length: int, **more: Any) -> Compared | None:
    """Return two documents, cut to a length; None where an answer, or their difference, is lost.

    Both have the same prompt, so that as much is left of one answer as of the other, at most.

    Args:
        more: Other fields of `Compared`.
    """
    a, b = (cut_document(document, max_length) for document in (first, second))
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
