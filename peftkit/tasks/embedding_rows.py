"""Rows of an anchor, what means the same, and what does not."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from peftkit.data.encoding import EncodedRows, RowEncoder
from peftkit.data.load import Record
from peftkit.errors import DataError
from peftkit.tasks.texts import Texts, TextsRow, joined_texts

BITS = 23
"""Of a number that float32 holds exactly: texts are told apart by two of them."""


@dataclass(frozen=True, slots=True)
class EmbeddingRow(TextsRow):
    """An anchor, what means the same, and what does not.

    Args:
        names: Two numbers for each text, the same for the same text alone.
        source: "train.jsonl:7".
    """

    names: tuple[tuple[int, int], ...]
    source: str


class EmbeddingEncoder(RowEncoder):
    """Makes a row of each record with an anchor, a positive and maybe negatives.

    Args:
        fields: The names of these three.
    """

    kind: ClassVar[type[EmbeddingRow]] = EmbeddingRow

    def __init__(self, texts: Texts, fields: tuple[str, str, str]) -> None:
        self._encode, self._key = texts.encode, texts.key
        self._anchor, self._positive, self._negatives = self._fields = fields

    def key(self, where: str) -> object:
        return (*self._key, *self._fields)

    def read(self, records: Sequence[Record], where: str) -> list[tuple[list[str], str]]:
        found = [(self._texts(record), record.source) for record in records]
        first, where_first = found[0]
        for texts, source in found:
            if len(texts) != len(first):
                raise DataError(
                    f"Cannot use {where}: rows have other numbers of negatives.",
                    found=f"{where_first} has {len(first) - 2}, {source} has {len(texts) - 2}.",
                    fix="Give every row as many.",
                )
        return found

    def rows(self, read: list[tuple[list[str], str]]) -> EncodedRows:
        counts, rows = Counter[str](), list[Any]()
        for texts, source in read:
            encoded = [self._encode(text) for text in texts]
            counts["cut"] += any(text.is_cut for text in encoded)
            names = tuple(map(_name, texts))
            rows.append(EmbeddingRow(**joined_texts(encoded), names=names, source=source))
        return EncodedRows(rows, {"number of negatives": str(len(read[0][0]) - 2)}, counts)

    def _texts(self, record: Record) -> list[str]:
        """Return anchor, positive and negatives of a row."""
        fields = record.fields
        negatives: Any = fields.get(self._negatives, ())
        listed = [negatives] if isinstance(negatives, str) else list(negatives or ())
        named = [(name, fields.get(name)) for name in (self._anchor, self._positive)]
        named += [(self._negatives, text) for text in listed]
        for name, text in named:
            if not isinstance(text, str) or not text.strip():
                found = "missing" if text is None else f"found {text!r:.40}"
                raise DataError(
                    f"Cannot use {record.source}: {name}: expected a text, {found}.",
                    fix="Mend the row, or name its fields: task.anchor, task.positive, "
                    "task.negatives.",
                )
        texts = [str(text) for _, text in named]
        if texts[1] in texts[2:]:
            raise DataError(f"Cannot use {record.source}: a negative is equal to {self._positive}.")
        return texts


def _name(text: str) -> tuple[int, int]:
    number = int.from_bytes(hashlib.sha256(text.strip().encode()).digest()[:6], "big")
    return number % (1 << BITS), (number >> BITS) % (1 << BITS)
