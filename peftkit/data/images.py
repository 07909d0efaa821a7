"""Images as rows name them, and the one place where they are read: bounded in bytes and pixels.

An image is a path (beside the data file that names it), a data URL, encoded bytes, or {"bytes":
..., "path": ...} as data sets have it. Nothing is ever fetched.

Pillow is imported when an image is read: it is the optional extra `images`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import math
import re
import warnings
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from peftkit.data.load import Record
from peftkit.errors import DataError
from peftkit.files.strict_json import shown

DEEP = ("I", "F")
"""First letters of Pillow's modes of more than 8 bits, which a conversion would cut off."""
MAX_BYTES = 100 * 2**20
"""Of an encoded image."""
MAX_PIXELS = 100_000_000
"""Of an image; looked up in its header, before anything is allocated for them."""
STAMP = ("path", "num_bytes", "changed")
STORED_PICTURE = {
    "path": "large_string",
    "num_bytes": "int64",
    "changed": "int64",
    "data": "large_binary",
    "digest": "string",
    "which": "string",
}
"""How a picture lies in an Arrow file: the path of its own, with its size and time, or bytes."""
_URL = re.compile(r"(?i)[a-z][a-z0-9+.-]*://")
_DATA_URL = re.compile(r"(?i)data:[^,;]*(;[^,;]*)*;base64,")


class Picture:
    """An image as it is stored: the path of a file, its bytes (mapped, maybe), or a data URL.

    Once decoded, its repr is a hash of its bytes: wherever it lies, the same image reads the same.

    Args:
        source: The row that names it. which: Which of the row's images it is, for messages.
    """

    __slots__ = ("_digest", "data", "source", "which")

    def __init__(
        self,
        data: Path | bytes | memoryview | str,
        source: str,
        which: str = "the image",
        digest: str = "",
    ) -> None:
        self.data, self.source, self.which, self._digest = data, source, which, digest

    def __repr__(self) -> str:
        return f"image {self._digest or self.source}"

    def stored(self) -> dict[str, Any]:
        """Return what an Arrow file keeps of it; see STORED_PICTURE."""
        known = {"digest": self._digest, "which": self.which}
        if isinstance(self.data, Path):
            there = self.data.stat()
            stamp = (str(self.data.absolute()), there.st_size, there.st_mtime_ns)
            return known | dict(zip(STAMP, stamp, strict=True))
        return known | {"data": self._stored()}

    @classmethod
    def opened_all(cls, scalar: Any, source: str) -> tuple[Picture, ...]:
        """Return the pictures of a row that Arrow has; bytes stay where they are."""
        found = []
        for one in scalar.values:
            path = one["path"].as_py()
            data = memoryview(one["data"].as_buffer()) if path is None else Path(path)
            found.append(cls(data, source, one["which"].as_py(), one["digest"].as_py()))
        return tuple(found)

    @classmethod
    def opened(cls, scalar: Any, source: str) -> Picture:
        """Return the one picture of a row that Arrow has."""
        (found,) = cls.opened_all(scalar, source)
        return found

    def decode(self, mode: str = "RGB", max_pixels: int | None = None) -> Any:
        """Return it as Pillow has it, upright.

        Args:
            mode: Pillow's: "RGB", or "L" for one channel.
            max_pixels: Larger ones are scaled down to so many, sides in proportion.

        Raises:
            DataError: It is not there, is too large, is animated, or does not decode; names it.
        """
        require_pillow()
        from PIL import Image, ImageOps

        try:
            stored = self._stored()
            self._digest = self._digest or hashlib.sha256(stored).hexdigest()[:32]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # see MAX_PIXELS
                opened = Image.open(BytesIO(stored))
            if (problem := _unusable(opened)) is not None:
                raise self._error(*problem)
            image = ImageOps.exif_transpose(opened).convert(mode)
        except DataError:
            raise
        except Image.DecompressionBombError:
            raise self._error(*_TOO_MANY) from None
        except Exception as problem:  # a damaged image can raise anything
            raise self._error(_short(problem), "Mend or remove it.") from problem
        if max_pixels is None or image.width * image.height <= max_pixels:
            return image
        scale = math.sqrt(max_pixels / (image.width * image.height))
        size = max(1, int(image.width * scale)), max(1, int(image.height * scale))
        return image.resize(size, Image.Resampling.BICUBIC)

    def _stored(self) -> bytes:
        """Return the encoded bytes."""
        if isinstance(self.data, Path):
            if self.data.exists() and not self.data.is_file():  # such as a device without an end
                raise self._error("It is no file.", "Name the file of an image.")
            if (size := self.data.stat().st_size) > MAX_BYTES:
                raise self._too_long(size)
            stored = self.data.read_bytes()
        elif isinstance(self.data, str):
            if len(self.data) > MAX_BYTES * 4 // 3:
                raise self._too_long(len(self.data) * 3 // 4)
            try:
                stored = base64.b64decode(self.data.partition(",")[2], validate=True)
            except binascii.Error as problem:
                raise self._error(f"Its data URL: {problem}", "Encode it as base64.") from None
        else:
            stored = bytes(self.data)
        if len(stored) > MAX_BYTES:
            raise self._too_long(len(stored))
        if re.match(rb"\s*(<\?xml|<svg|<!DOCTYPE svg)", stored[:256], re.IGNORECASE):
            raise self._error("It is an SVG: a drawing, not pixels.", "Render it to a PNG first.")
        return stored

    def _too_long(self, size: int) -> DataError:
        return self._error(f"It has {size:,} bytes, more than {MAX_BYTES:,}.", "Make it smaller.")

    def _error(self, found: str, fix: str) -> DataError:
        place = f"{self.data}: " if isinstance(self.data, Path) else ""
        return DataError(
            f"Cannot decode {self.which} of {self.source}.", found=f"{place}{found}", fix=fix
        )


_TOO_MANY = f"It has more than {MAX_PIXELS:,} pixels.", "Scale it down first, or remove it."


def _unusable(image: Any) -> tuple[str, str] | None:
    """Return what is wrong with an image by its header, and what to do; None if nothing is."""
    width, height = image.size
    if not width or not height:
        return f"It has no pixels: {width} x {height}.", "Remove it."
    if width * height > MAX_PIXELS:
        return f"{_TOO_MANY[0][:-1]}: {width:,} x {height:,}.", _TOO_MANY[1]
    # an MPO is a photo with a preview or a second view after it
    if getattr(image, "is_animated", False) and image.format != "MPO":
        return f"It has several frames ({image.format}).", "Keep one of them."
    if image.mode.startswith(DEEP):
        bits = f"Its pixels have more than 8 bits (Pillow's mode {image.mode})."
        return bits, "Scale it to 8 bits first."
    if image.mode in ("CMYK", "LAB"):
        return (
            f"Its colours are for print ({image.mode}), which have no one meaning on a screen.",
            "Convert it to RGB first.",
        )
    return None


def blank_image(side: int = 64) -> Any:
    """Return a white square, as Pillow has it, to ask a processor with.

    Raises:
        DataError: Pillow is not installed.
    """
    require_pillow()
    from PIL import Image

    return Image.new("RGB", (side, side), "white")


def is_as_stored(stamp: Mapping[str, Any]) -> bool:
    """Tell whether the file of a stored picture, if it has one, is as it was."""
    if stamp["path"] is None:
        return True
    try:
        there = Path(stamp["path"]).stat()
    except OSError:
        return False
    return (there.st_size, there.st_mtime_ns) == (stamp["num_bytes"], stamp["changed"])


def picture(value: object, record: Record, where: str, which: str = "the image") -> Picture | None:
    """Return what a field holds as a picture; None where that is none.

    Raises:
        DataError: It is the address of an image elsewhere.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | Path):
        return Picture(value, record.source, which)
    if not isinstance(value, str) or not value:
        return None
    if _DATA_URL.match(value[:256]):
        return Picture(value, record.source, which)
    if _URL.match(value):
        raise DataError(
            f"Cannot use {which} of {record.source}.",
            found=f"It is an address, {shown(value)}, and nothing is fetched.",
            fix="Download it, and name the file.",
        )
    path = Path(value).expanduser()
    beside = Path(where).expanduser().parent
    return Picture(path if path.is_absolute() else beside / path, record.source, which)


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
