"""Encoders with one row per record, and the fields and labels of records."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from peftkit.data.format import ParsedRow, read_each
from peftkit.data.messages import WrongField, full_text
from peftkit.data.records import Record, iterate_records, sources_of
from peftkit.data.rows.encoder import RowEncoder
from peftkit.errors import ConfigError, DataError, did_you_mean, first_few
from peftkit.files.strict_json import shown
from peftkit.settings import DataConfig

Problem = Literal["single_label", "multi_label", "regression"]
MAX_LABELS = 10_000
MAX_LISTED = 12
FIX = "Fix the rows, or name the right fields in the recipe's task."
Read = TypeVar("Read")


class RecordEncoder(RowEncoder):
    """Encoder that makes one row of each record.

    Attributes:
        what: Description of the records' format.
    """

    what: str

    def read(self, records: Sequence[Record], where: str) -> ParsedRow[object]:
        return read_each(records, partial(self.parse, where=where), self.what, where, FIX)

    @abstractmethod
    def parse(self, record: Record, where: str) -> tuple[object, Iterable[str]]:
        """Return the content of a row, and the fields of the record that were read.

        Raises:
            WrongField: A field is missing or has a value of the wrong type.
        """

    def row(self, example: Any) -> Any:
        """Return the row of a result of `parse`, or `Dropped`."""
        return example


def field_of(fields: Mapping[str, object], name: str, setting: str) -> Any:
    """Return a field of a row.

    Args:
        setting: The recipe's setting that names the field.

    Raises:
        WrongField: The field is missing or null.
    """
    value = fields.get(name)
    if value is None:
        hint = f"{', '.join(fields)}. {did_you_mean(name, fields)}".rstrip()
        raise WrongField(name, f"missing ({setting}); the row has {hint}")
    return value


def text_of(fields: Mapping[str, object], name: str, setting: str) -> str:
    """Return a field that is a text; see `field_of`."""
    field_of(fields, name, setting)
    return full_text(fields, name)


def list_of(fields: Mapping[str, object], name: str, setting: str) -> list[object]:
    """Return a field that is a list; see `field_of`."""
    value = field_of(fields, name, setting)
    if not isinstance(value, list):
        raise WrongField(name, f"expected a JSON list, found {shown(value)}")
    return value


def label_name(value: object) -> str:
    """Return a label's name: a string unchanged, an integer or boolean as JSON text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if (isinstance(value, str) and value) or isinstance(value, int):
        return str(value)
    raise WrongField("", f"expected a text or a whole number as label, found {shown(value)}")


def label_of(fields: Mapping[str, object], name: str) -> str:
    """Return the name of a row's label."""
    return label_name(field_of(fields, name, "task.label"))


def label_names(values: Iterable[object]) -> list[str]:
    """Return the names of several labels."""
    return [label_name(value) for value in values]


def sorted_names(names: Iterable[str], where: str) -> tuple[str, ...]:
    """Return sorted label names: numerically if all are integers, otherwise as text.

    Raises:
        DataError: There are fewer than 2 labels or more than MAX_LABELS, or two that read alike.
    """
    labels = set(names)
    number_of_alike = Counter(label.strip().casefold() for label in labels)
    alike = sorted(label for label in labels if number_of_alike[label.strip().casefold()] > 1)
    if alike or not 2 <= len(labels) <= MAX_LABELS:
        few = first_few(map(shown, alike or sorted(labels)), MAX_LISTED, ", ")
        differ = f"Some differ in capitals or spaces alone: {few}"
        raise DataError(
            f"Cannot train a classifier on the labels of {where}.",
            found=differ if alike else f"There are {len(labels):,} different ones: {few}",
            fix="Correct the rows, list all labels in task.labels, or name the right field.",
        )
    numbers = all(name.removeprefix("-").isdigit() for name in labels)
    return tuple(sorted(labels, key=int) if numbers else sorted(labels))


def number_of(label: str, numbers: Mapping[str, int]) -> int:
    """Return the index of a label in the head."""
    if label not in numbers:
        hint = did_you_mean(label, numbers)
        labels = f"{listed(list(numbers))}. {hint}".rstrip()
        raise WrongField("", f"the head does not know the label {shown(label)}; it knows {labels}")
    return numbers[label]


def check_names(labels: Sequence[str]) -> None:
    """Check the labels of a recipe.

    Raises:
        ConfigError: There is only one label, or a label is repeated.
    """
    repeated = [label for label in labels if labels.count(label) > 1]
    if len(labels) == 1 or repeated:
        raise ConfigError(
            f"cannot use these labels: {listed(labels)}.",
            found=f"{shown(repeated[0])} is repeated." if repeated else "There is only one.",
            fix="List each label once, in the order of the head's outputs.",
        )


def values_in(
    records: Iterable[Record], read: Callable[[Mapping[str, object]], Read]
) -> Iterator[tuple[Read, str]]:
    """Yield `read` of each record and its source; raises DataError for a WrongField of `read`."""
    for record in records:
        try:
            value = read(record.fields)
        except WrongField as problem:
            raise DataError(f"Cannot use {record.source}: {problem}.", fix=FIX) from None
        yield value, record.source


def names_in(
    data: DataConfig, read: Callable[[Mapping[str, object]], Iterable[str]]
) -> tuple[str, ...]:
    """Return the sorted names of all labels that `read` returns for training rows."""
    lists = values_in(training_records(data), read)
    return sorted_names((name for names, _ in lists for name in names), data.train_name)


def training_records(data: DataConfig, file_of: Callable[[str], str] = str) -> Iterator[Record]:
    """Yield all training records, with few in memory; see `RowEncoder.file_of`."""
    for source in sources_of(data):
        yield from iterate_records(file_of(source.path))


def problem_of(values: Iterable[tuple[object, str]]) -> Problem:
    """Infer the problem from the values of the label field.

    Args:
        values: Values with their sources.

    Raises:
        DataError: The values have several kinds; the message has the first row of each.
    """
    first: dict[str, str] = {}
    numbers = whole = True
    for value, source in values:
        first.setdefault(_kind(value), source)
        number = as_number(value) if numbers else None
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
        "Cannot infer the kind of labels.",
        found="\n".join(f"{source}: a {kind}" for kind, source in first.items()),
        fix="Fix the rows, or set task.problem.",
    )


def value_of(value: object) -> float:
    """Return a number, which may be given as text."""
    number = as_number(value)
    if number is None:
        raise WrongField("", f"expected a number, found {shown(value)}")
    return number


def _kind(value: object) -> str:
    names = {str: "text", bool: "truth value", int: "whole number", float: "number", list: "list"}
    return names.get(type(value), type(value).__name__)


def as_number(value: Any) -> float | None:
    """Return a finite number, given as text in CSV files; None for other values."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def listed(labels: Sequence[str]) -> str:
    """Return up to MAX_LISTED labels as text for a message."""
    return first_few(map(shown, labels), MAX_LISTED, ", ")
