"""Rows of single records: the fields of a record, and the labels in them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from peftkit.data.format import WrongField, full_text, read_each
from peftkit.data.load import Record, iterate_records
from peftkit.data.rows import EncodedRows, RowEncoder
from peftkit.errors import ConfigError, DataError, did_you_mean, first_few
from peftkit.files.strict_json import shown
from peftkit.settings import DataConfig

Problem = Literal["single_label", "multi_label", "regression"]
MAX_LABELS = 10_000
MAX_LISTED = 12
FIX = "Mend the rows, or name the right fields in the recipe's task."
Read = TypeVar("Read")


class RecordEncoder(RowEncoder):
    """Encoder that makes one row of each record.

    Attributes:
        what: The format of the records, in words.
        counts: Counts by name, summed over the records at hand.
    """

    what: str

    def read(self, records: Sequence[Record], where: str) -> tuple[list[Any], tuple[str, ...]]:
        self.counts = Counter[str]()
        return read_each(records, partial(self.parse, where=where), self.what, where, FIX)

    def rows(self, read: tuple[list[Any], tuple[str, ...]]) -> EncodedRows:
        parsed, unused = read
        return EncodedRows([*map(self.row, parsed)], counts=self.counts, unused=unused)

    @abstractmethod
    def parse(self, record: Record, where: str) -> tuple[Any, Iterable[str]]:
        """Return what a row is made of, and the fields of the record that were read.

        Raises:
            WrongField: A field is missing, or has another kind of value.
        """

    def row(self, parsed: Any) -> Any:
        """Return the row, or `Dropped`, of what `parse` returned."""
        return parsed


def field_of(fields: Mapping[str, Any], name: str, setting: str) -> Any:
    """Return a field of a row that is there and not null; `setting` is what names it in a recipe.

    Raises:
        WrongField: It is not.
    """
    value = fields.get(name)
    if value is None:
        hint = f"{', '.join(fields)}. {did_you_mean(name, fields)}".rstrip()
        raise WrongField(name, f"missing ({setting}); the row has {hint}")
    return value


def text_of(fields: Mapping[str, Any], name: str, setting: str) -> str:
    """Return a field that is a text; see `field_of`."""
    field_of(fields, name, setting)
    return full_text(fields, name)


def list_of(fields: Mapping[str, Any], name: str, setting: str) -> list[Any]:
    """Return a field that is a list; see `field_of`."""
    value = field_of(fields, name, setting)
    if not isinstance(value, list):
        raise WrongField(name, f"expected a JSON list, found {shown(value)}")
    return value


def label_name(value: Any) -> str:
    """Return the name of a label: texts as they are, whole numbers and truth values written out."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if (isinstance(value, str) and value) or isinstance(value, int):
        return str(value)
    raise WrongField("", f"expected a text or a whole number as label, found {shown(value)}")


def label_of(fields: Mapping[str, Any], name: str) -> str:
    """Return the name of a row's label."""
    return label_name(field_of(fields, name, "task.label"))


def label_names(values: Iterable[Any]) -> list[str]:
    """Return the names of several labels."""
    return [label_name(value) for value in values]


def sorted_names(names: Iterable[str], where: str) -> tuple[str, ...]:
    """Return the names of labels in their order: whole numbers by size, others as texts.

    Raises:
        DataError: There is but one, or there are too many.
    """
    found = set(names)
    if not 2 <= len(found) <= MAX_LABELS:
        few = first_few(sorted(found), MAX_LISTED, ", ")
        raise DataError(
            f"Cannot learn to tell the labels of {where} apart.",
            found=f"There are {len(found):,} different ones: {few}",
            fix="Name all labels that there are with task.labels, or name the right field.",
        )
    numbers = all(name.removeprefix("-").isdigit() for name in found)
    return tuple(sorted(found, key=int) if numbers else sorted(found))


def number_of(label: str, numbers: Mapping[str, int]) -> int:
    """Return the number of a label that the head knows."""
    if label not in numbers:
        hint = did_you_mean(label, numbers)
        known = f"{listed(list(numbers))}. {hint}".rstrip()
        raise WrongField("", f"the head does not know the label {shown(label)}; it knows {known}")
    return numbers[label]


def check_names(labels: Sequence[str]) -> None:
    """Refuse names of labels, given in a recipe, that name too few or one twice.

    Raises:
        ConfigError: They do.
    """
    twice = [label for label in labels if labels.count(label) > 1]
    if len(labels) == 1 or twice:
        raise ConfigError(
            f"cannot use these labels: {listed(labels)}.",
            found=f"{shown(twice[0])} is there twice." if twice else "There is but one.",
            fix="Name each label once, in the order of the head's outputs.",
        )


def said_in(
    records: Iterable[Record], read: Callable[[Mapping[str, Any]], Read]
) -> Iterator[tuple[Read, str]]:
    """Yield what `read` returns of each row, and where the row is.

    Raises:
        DataError: It raised WrongField.
    """
    for record in records:
        try:
            said = read(record.fields)
        except WrongField as problem:
            raise DataError(f"Cannot use {record.source}: {problem}.", fix=FIX) from None
        yield said, record.source


def names_in(
    data: DataConfig, read: Callable[[Mapping[str, Any]], Iterable[str]]
) -> tuple[str, ...]:
    """Return the names of all labels that `read` finds in the training rows; see `sorted_names`."""
    found = said_in(trained_on(data), read)
    return sorted_names((name for names, _ in found for name in names), data.train_name)


def trained_on(data: DataConfig) -> Iterator[Record]:
    """Yield all training rows, few of them in memory."""
    for source in data.sources:
        yield from iterate_records(source.path)


def problem_of(values: Iterable[tuple[Any, str]]) -> Problem:
    """Return the problem that the values of a field make: several labels, one, or a number.

    Args:
        values: Each with the row it comes from.

    Raises:
        DataError: They are of several kinds; names the first row of each.
    """
    first: dict[str, str] = {}
    numbers = whole = True
    for value, source in values:
        first.setdefault(_kind(value), source)
        number = _as_number(value) if numbers else None
        numbers = numbers and number is not None
        whole = whole and number is not None and number.is_integer()
    kinds = set(first)
    if kinds == {"list"}:
        return "multi_label"
    if kinds == {"text"}:
        return "regression" if numbers and not whole else "single_label"
    if kinds == {"truth value"} or kinds == {"whole number"}:
        return "single_label"
    if kinds <= {"whole number", "number"}:
        return "regression"
    raise DataError(
        "Cannot tell what the labels are.",
        found="\n".join(f"{source}: a {kind}" for kind, source in first.items()),
        fix="Mend the rows, or say it with task.problem.",
    )


def value_of(value: Any) -> float:
    """Return the number of a row, whose text it may be."""
    found = None if isinstance(value, bool) else _as_number(value)
    if found is None:
        raise WrongField("", f"expected a number to learn, found {shown(value)}")
    return found


def _kind(value: Any) -> str:
    names = {str: "text", bool: "truth value", int: "whole number", float: "number", list: "list"}
    return names.get(type(value), type(value).__name__)


def _as_number(value: Any) -> float | None:
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def listed(labels: Sequence[str]) -> str:
    """Return labels for a message, not too many."""
    return first_few(map(shown, labels), MAX_LISTED, ", ")
