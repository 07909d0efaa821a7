"""Rows of Parquet files, and of data sets of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from peftkit.data.strict_rows import Fields, named_for_what_it_is
from peftkit.errors import DataError

AT_ONCE = 1_000
"""Rows of a Parquet file that are in memory."""


def read_parquet(path: Path) -> Iterator[tuple[int, Fields]]:
    import datasets  # slow to import, and most runs read JSON Lines

    with open(path, "rb") as file:
        head = file.read(64)
    if not head.startswith(b"PAR1"):
        found, fix = named_for_what_it_is(head) or ("It does not begin as Parquet does.", "")
        raise DataError(f"Cannot read {path} as Parquet.", found=found, fix=fix)
    try:
        # streaming: the file is read where it lies, not copied into a cache
        rows = datasets.load_dataset(
            "parquet",
            data_files=str(path.resolve()),
            split="train",
            streaming=True,
            batch_size=AT_ONCE,
        )
        yield from _rows(rows)
    except Exception as problem:  # pyarrow and datasets raise a dozen unrelated kinds
        raise DataError(f"Cannot read {path} as Parquet.", found=_first_lines(problem)) from problem


def read_data_set(where: str) -> Iterator[tuple[int, Fields]]:
    rows = open_data_set(where)
    try:
        yield from _rows(rows)
    except Exception as problem:  # see below
        raise _no_data_set(where, problem) from problem


def open_data_set(where: str) -> Any:
    """Return a data set, its rows mapped from the cache, where they are put the first time."""
    import datasets

    place, *parts = where.split(":")
    name, _, revision = place.partition("@") if not Path(place).is_dir() else (place, "", "")
    split = parts[-1] if parts else "train"
    config = parts[0] if len(parts) == 2 else None
    try:
        return datasets.load_dataset(name, config, split=split, revision=revision or None)
    except Exception as problem:  # network, hub, arrow and format errors share no base class
        raise _no_data_set(where, problem) from problem


def _no_data_set(where: str, problem: Exception) -> DataError:
    if Path(where.partition(":")[0]).is_dir():
        return DataError(
            f"Cannot load the data set '{where}'.",
            found=_first_lines(problem),
            fix="Mend the folder's files, or name one of them, which tells the line.",
        )
    return DataError(
        f"Cannot load the data set '{where}'.",
        found=f"There is no such file here, and as a data set: {_first_lines(problem)}",
        fix='A data set is named "org/name", "org/name:split" or "org/name:config:split".',
    )


def _rows(rows: Any) -> Iterator[tuple[int, Fields]]:
    """Yield the rows of a data set: images as they are stored, classes by their names."""
    import datasets

    features = dict(rows.features or {})
    for name, feature in features.items():
        if isinstance(feature, datasets.Image | datasets.Audio):
            # decoded later, where an error can name the row
            rows = rows.cast_column(name, type(feature)(decode=False))
    for number, row in enumerate(rows, start=1):
        yield number, _named(_without_filling(row), features)


def _without_filling(row: Fields) -> Fields:
    """Drop nulls inside nested fields: columns give each struct the union of all rows' keys."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cleaned(item) for key, item in value.items() if item is not None}
        return [cleaned(item) for item in value] if isinstance(value, list) else value

    return {key: cleaned(value) for key, value in row.items()}


def _named(row: Fields, features: Mapping[str, Any]) -> Fields:
    """Give classes that a data set numbers their names; a number outside of them stays."""

    def name(value: Any, feature: Any) -> Any:
        if isinstance(value, list):
            return [name(item, getattr(feature, "feature", None)) for item in value]
        names = getattr(feature, "names", ())
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else value

    return {key: name(value, features.get(key)) for key, value in row.items()}


def _first_lines(problem: BaseException) -> str:
    while problem.__cause__ is not None:  # "An error occurred while generating the dataset"
        problem = problem.__cause__
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400] or type(problem).__name__
