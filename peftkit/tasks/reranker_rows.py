"""Rows of a query and texts, each with how well it answers the query."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from peftkit.data.encoding import EncodedRows, RowEncoder
from peftkit.data.format import read_each
from peftkit.data.load import Record
from peftkit.data.messages import WrongField, full_text, texts_of
from peftkit.errors import DataError
from peftkit.tasks.texts import Encoded, Texts, TextsRow, joined_texts

QUERY, TEXT = "{query}", "{text}"
"""Where in a template the two stand."""


class Names(Protocol):
    """Of the fields that are read, as `RerankerConfig` has them."""

    query: str
    positive: str
    negatives: str
    text: str
    score: str
    template: str | None
    loss: Any


@dataclass(frozen=True, slots=True)
class RerankRow(TextsRow):
    """A query with each of its texts.

    Args:
        relevance: Of each text, from 0 to 1.
        query: A number that is the same for the same query.
        source: "train.jsonl:7".
    """

    relevance: tuple[float, ...]
    query: int
    source: str


@dataclass(frozen=True, slots=True)
class Ranking:
    """A query, and texts with their relevances."""

    query: str
    texts: tuple[str, ...]
    relevance: tuple[float, ...]
    source: str


class RerankEncoder(RowEncoder):
    """Makes a row of each query and its texts."""

    kind: ClassVar[type[RerankRow]] = RerankRow

    def __init__(self, texts: Texts, config: Names) -> None:
        self._texts, self._config = texts, config
        before, _, rest = (config.template or "").partition(TEXT)
        self._before, self._after = before, rest

    def key(self, where: str) -> object:
        own = self._config
        names = (own.query, own.positive, own.negatives, own.text, own.score)
        return (*self._texts.key, *names, own.loss, self._before, self._after)

    def read(self, records: Sequence[Record], where: str) -> tuple[list[Ranking], tuple[str, ...]]:
        return read_each(records, self._ranking, "a query and its texts", where)

    def rows(self, read: tuple[list[Ranking], tuple[str, ...]]) -> EncodedRows:
        rankings, unused = read
        rows, counts = list[Any](), Counter[str]()
        for ranking in rankings:
            encoded = [self.encode(ranking.query, text) for text in ranking.texts]
            counts.update(cut=sum(text.is_cut for text in encoded), texts=len(encoded))
            digest = hashlib.sha256(ranking.query.strip().encode("utf-8", "replace")).digest()
            rows.append(
                RerankRow(
                    **joined_texts(encoded),
                    relevance=ranking.relevance,
                    query=int.from_bytes(digest[:8], "big") >> 1,
                    source=ranking.source,
                )
            )
        return EncodedRows(rows, counts=counts, unused=unused)

    def encode(self, query: str, text: str) -> Encoded:
        """Return the tokens of a query and a text; where they are too long the text is cut."""
        if not self._config.template:
            return self._texts.encode(query, text)
        before = self._texts.bare(self._before.replace(QUERY, query))
        after = self._texts.bare(self._after.replace(QUERY, query))
        ids, room = self._texts.bare(text), self._texts.max_length - len(before) - len(after)
        if room < 1:
            raise DataError(
                f"Cannot use data.max_length: {self._texts.max_length}.",
                found=f"The template and a query have {len(before) + len(after)} tokens already.",
                fix="Raise data.max_length, or shorten task.template.",
            )
        return Encoded((*before, *ids[:room], *after), (), len(ids) > room)

    def _ranking(self, record: Record) -> tuple[Ranking, set[str]]:
        config, fields = self._config, record.fields
        query = full_text(fields, config.query)
        if config.positive in fields:
            positives = texts_of(fields, config.positive)
            negatives = texts_of(fields, config.negatives) if fields.get(config.negatives) else []
            if both := set(positives) & set(negatives):
                raise WrongField(config.negatives, f"holds a positive: {min(both)!r:.60}")
            used = {config.query, config.positive, config.negatives}
            relevance = [1.0] * len(positives) + [0.0] * len(negatives)
            return self._made(query, [*positives, *negatives], relevance, record), used
        texts = texts_of(fields, config.text)
        scores = fields.get(config.score)
        listed = [_number(value) for value in (scores if isinstance(scores, list) else [scores])]
        if None in listed:
            raise WrongField(config.score, f"expected numbers from 0 to 1, found {scores!r:.40}")
        if len(listed) != len(texts):
            raise WrongField(config.score, f"{len(listed)} scores of {len(texts)} texts")
        used = {config.query, config.text, config.score}
        return self._made(query, texts, [value or 0.0 for value in listed], record), used

    def _made(
        self, query: str, texts: Sequence[str], relevance: Sequence[float], record: Record
    ) -> Ranking:
        if self._config.loss != "pointwise" and not max(relevance) > min(relevance):
            raise WrongField(
                "", f"all texts are as relevant, and the loss {self._config.loss} compares them"
            )
        return Ranking(query, tuple(texts), tuple(relevance), record.source)


def _number(value: object) -> float | None:
    """Return a number from 0 to 1, which a text may hold, as in CSV; None where it is none."""
    try:
        found = None if isinstance(value, bool) else float(str(value))
    except ValueError:
        return None
    return found if found is not None and 0 <= found <= 1 else None
