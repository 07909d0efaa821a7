"""Labels out of rows: what a field of a row says, and which names there are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from peftkit.data.load import DataConfig, Record, iterate_records
from peftkit.data.messages import MAX_CHARACTERS
from peftkit.errors import ConfigError, DataError, did_you_mean, first_few
from peftkit.files.strict_json import shown

Problem = Literal["single_label", "multi_label", "regression"]
MAX_LABELS = 10_000
MAX_LISTED = 12


def field_of(record: Record, name: str, setting: str) -> Any:
    """Return a field of a row.

    Args:
        setting: The key of the recipe that names the field.

    Raises:
        DataError: The row has no such field, or nothing in it.
    """
    value = record.fields.get(name)
    if value is None:
        raise DataError(
            f"Cannot use {record.source}: it has no {name!r}.",
            found=f"Its fields: {', '.join(record.fields)}. "
            f"{did_you_mean(name, record.fields)}".rstrip(),
            fix=f"Name the right field with {setting}.",
        )
    return value


def text_of(record: Record, name: str, setting: str) -> str:
    """Return a field that is a text.

    Raises:
        DataError: It is missing, empty, or no text.
    """
    value = field_of(record, name, setting)
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"Cannot use {record.source}: its {name!r} is not a text.",
            found=f"It is {shown(value)}.",
            fix=f"Mend the row, or name another field with {setting}.",
        )
    if len(value) > MAX_CHARACTERS:
        raise DataError(
            f"Cannot use {record.source}: its {name!r} is too long.",
            found=f"It has {len(value):,} characters; at most {MAX_CHARACTERS:,} are read.",
            fix="Cut or remove the row.",
        )
    return value


def list_of(record: Record, name: str, setting: str) -> list[Any]:
    """Return a field that is a list.

    Raises:
        DataError: It is missing, or something else.
    """
    value = field_of(record, name, setting)
    if not isinstance(value, list):
        raise DataError(
            f"Cannot use {record.source}: its {name!r} is not a list.",
            found=f"It is {shown(value)}.",
            fix='Write it as a JSON list, ["...", "..."]; CSV has none.',
        )
    return value


def label_name(value: Any, source: str) -> str:
    """Return the name of a label: texts as they are, whole numbers and truth values written out.

    Raises:
        DataError: It is something else.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if (isinstance(value, str) and value) or isinstance(value, int):
        return str(value)
    raise DataError(
        f"Cannot use {source}: its label is no name.",
        found=f"It is {shown(value)}.",
        fix="Give texts or whole numbers as labels.",
    )


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


def number_of(label: str, numbers: Mapping[str, int], source: str) -> int:
    """Return the number of a label.

    Raises:
        DataError: The head does not know it.
    """
    if label not in numbers:
        raise DataError(
            f"Cannot use {source}: it has a label that the head does not know.",
            found=f"It is {shown(label)}; the labels are {listed(list(numbers))}. "
            f"{did_you_mean(label, numbers)}".rstrip(),
            fix="Mend the row; or name all labels with task.labels and train again.",
        )
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


def records_of(data: DataConfig) -> Iterator[Record]:
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


def value_of(value: Any, source: str) -> float:
    """Return the number of a row, whose text it may be.

    Raises:
        DataError: It is none.
    """
    found = None if isinstance(value, bool) else _as_number(value)
    if found is None:
        raise DataError(
            f"Cannot use {source}: it has no number to learn.",
            found=f"It is {shown(value)}.",
            fix="Give a number, or name the right field with task.label.",
        )
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
