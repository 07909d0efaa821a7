"""Images with a label each, from a folder of class folders or from the rows of a data set.

A folder: `cats/1.jpg` has the label "cats"; whatever is not hidden is taken to be an image. Rows:
one field holds the image (a path, beside the file that names it; encoded bytes, or {"bytes": ...,
"path": ...} as data sets have it), another the label.

Pillow is imported when an image is read: it is the optional extra `images`.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from peftkit.data.load import Record, read_records
from peftkit.errors import DataError

DATA_FILES = {".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".arrow"}
DEEP = ("I", "F")
"""First letters of Pillow's modes of more than 8 bits, which a conversion would cut off."""


class Picture:
    """An image as it is stored: the path of a file, or its bytes.

    Once decoded, its repr is a hash of its bytes: wherever it lies, the same image reads the same.
    """

    __slots__ = ("_digest", "data", "source")

    def __init__(self, data: Path | bytes, source: str) -> None:
        self.data, self.source, self._digest = data, source, ""

    def __repr__(self) -> str:
        return f"image {self._digest or self.source}"

    def decode(self, mode: str = "RGB") -> Any:
        """Return it as Pillow has it, upright.

        Args:
            mode: Pillow's: "RGB", or "L" for one channel.

        Raises:
            DataError: It is not there, or does not decode; names it.
        """
        require_pillow()
        from PIL import Image, ImageOps

        asked = f"Cannot decode the image of {self.source}."
        try:
            stored = self.data if isinstance(self.data, bytes) else self.data.read_bytes()
            self._digest = self._digest or hashlib.sha256(stored).hexdigest()[:32]
            image = ImageOps.exif_transpose(Image.open(BytesIO(stored)))
            if image.mode.startswith(DEEP):
                raise DataError(
                    asked,
                    found=f"Its pixels have more than 8 bits (Pillow's mode {image.mode}).",
                    fix="Scale it to 8 bits first.",
                )
            return image.convert(mode)
        except DataError:
            raise
        except Exception as problem:  # a damaged image can raise anything
            place = f"{self.data}: " if isinstance(self.data, Path) else ""
            raise DataError(
                asked, found=f"{place}{_short(problem)}", fix="Mend or remove it."
            ) from problem


def read_images(where: str, image: str, label: str) -> list[Record]:
    """Return one record per image: fields named `image` and `label`, and its source.

    Raises:
        DataError: There are none, or they cannot be read.
    """
    folder = Path(where).expanduser()
    if not _has_class_folders(folder):
        return read_records(where)
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


def picture(value: object, record: Record, where: str) -> Picture | None:
    """Return what a field holds as a picture; None where that is none."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | Path):
        return Picture(value, record.source)
    if isinstance(value, str) and value:
        path = Path(value).expanduser()
        beside = Path(where).expanduser().parent
        return Picture(path if path.is_absolute() else beside / path, record.source)
    return None


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


def require_pillow() -> None:
    """See that images can be read.

    Raises:
        DataError: Pillow is not installed.
    """
    if importlib.util.find_spec("PIL") is None:
        raise DataError(
            "Cannot read images.",
            found="They need the package Pillow, which is not installed.",
            fix='pip install "peftkit[images]", or pip install "pillow>=10"',
        )


def _short(problem: Exception) -> str:
    if type(problem).__name__ == "UnidentifiedImageError":  # its text names our buffer
        return "It is in no image format that Pillow knows."
    return (str(problem) or type(problem).__name__).splitlines()[0][:200]
