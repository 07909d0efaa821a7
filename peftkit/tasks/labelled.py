"""Rows of a text, or a pair of texts, with a label, several, or a number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from peftkit.data.encoding import EncodedRows, RowEncoder
from peftkit.data.load import Record
from peftkit.tasks.labels import (
    Problem,
    field_of,
    label_name,
    list_of,
    number_of,
    text_of,
    value_of,
)
from peftkit.tasks.texts import Texts


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """A text and what it is.

    Args:
        input_ids, types: See `Encoded`.
        target: (Number of the label,); for each label whether it has it, 1.0 or 0.0; or (the
            number,).
        source: "train.jsonl:7".
    """

    input_ids: tuple[int, ...]
    types: tuple[int, ...]
    target: tuple[float, ...]
    source: str


class LabelledEncoder(RowEncoder):
    """Makes a row of each record with a text, or a pair of texts, and what is to be said of it.

    Args:
        fields: Names of those with the text, the second text, and the label.
    """

    kind: ClassVar[type[LabelledRow]] = LabelledRow

    def __init__(
        self,
        texts: Texts,
        fields: tuple[str, str | None, str],
        problem: Problem,
        labels: Sequence[str],
    ) -> None:
        self._texts, self._problem = texts, problem
        self._text, self._pair, self._label = self._fields = fields
        self._numbers = {label: number for number, label in enumerate(labels)}

    def key(self, where: str) -> object:
        return (*self._texts.key, *self._fields, self._problem, tuple(self._numbers))

    def read(self, records: Sequence[Record], where: str) -> Sequence[Record]:
        return records

    def rows(self, read: Sequence[Record]) -> EncodedRows:
        counts, rows = Counter[str](), list[Any]()
        for record in read:
            second = None if self._pair is None else text_of(record, self._pair, "task.pair")
            text = self._texts.encode(text_of(record, self._text, "task.text"), second)
            counts["cut"] += text.is_cut
            target = self._target(record)
            rows.append(LabelledRow(text.input_ids, text.types, target, record.source))
        return EncodedRows(rows, counts=counts)

    def _target(self, record: Record) -> tuple[float, ...]:
        name, source = self._label, record.source
        if self._problem == "regression":
            return (value_of(field_of(record, name, "task.label"), source),)
        if self._problem == "single_label":
            label = label_name(field_of(record, name, "task.label"), source)
            return (number_of(label, self._numbers, source),)
        there = [label_name(value, source) for value in list_of(record, name, "task.label")]
        found = {number_of(label, self._numbers, source) for label in there}
        return tuple(float(number in found) for number in range(len(self._numbers)))
