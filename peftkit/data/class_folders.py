"""Images with a label each: of the rows of a data set, or in a folder of class folders.

`cats/1.jpg` has the label "cats"; whatever is not hidden is taken to be an image.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from peftkit.data.load import Record, iterate_records
from peftkit.errors import DataError

DATA_FILES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow"}


def class_folders(where: str, image: str, label: str) -> list[Record] | None:
    """Return a record for each image in folders of classes; None where there are no such folders.

    Args:
        image, label: Names that the records' fields are given.

    Raises:
        DataError: The folders are empty.
    """
    folder = Path(where).expanduser()
    if not _has_class_folders(folder):
        return None
    found = [
        Record({image: path, label: kind.name}, str(path))
        for kind in _shown(folder)
        if kind.is_dir()
        for path in _shown(kind)
    ]
    if not found:
        raise DataError(
            f"Cannot use {where}.",
            found="It holds folders, and no files in them.",
            fix="Give a folder with one folder of images for each class.",
        )
    return found


def iterate_images(where: str, image: str, label: str) -> Iterator[Record]:
    """Yield one record per image: fields named `image` and `label`, and its source.

    Raises:
        DataError: There are none, or they cannot be read.
    """
    yield from class_folders(where, image, label) or iterate_records(where)


def _has_class_folders(folder: Path) -> bool:
    """Tell whether a folder holds folders, and no files that a data set is made of."""
    if not folder.is_dir():
        return False
    entries = _shown(folder)
    return any(entry.is_dir() for entry in entries) and not any(
        entry.suffix.lower() in DATA_FILES for entry in entries
    )


def _shown(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
