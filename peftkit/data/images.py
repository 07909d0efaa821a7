"""Images, read in one place: bounded in bytes and pixels.

Pillow is imported when an image is read: it is the optional extra `images`.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from peftkit.data.media import Limits, Media
from peftkit.errors import DataError

DEEP = ("I", "F")
"""First letters of Pillow's modes of more than 8 bits, which a conversion would cut off."""
MAX_PIXELS = 100_000_000
"""Of an image; looked up in its header, before anything is allocated for them."""


class Picture(Media):
    """An image as it is stored."""

    __slots__ = ()
    kind = "image"
    name = "image"
    argument = "images"
    fields = ("images", "image")
    parts = ("image", "image_url", "input_image")
    mark = "\N{OBJECT REPLACEMENT CHARACTER}"
    readers = ("image_processor",)
    packages = ("PIL",)
    extra = "images"

    def read(self, limits: Limits) -> Any:
        return self.decode("RGB", limits.max_pixels)

    @classmethod
    def size(cls, read: Any) -> object:
        return read.size

    @classmethod
    def told(cls, read: Any, limits: Limits) -> str:
        return f"{read.width}x{read.height}"

    @classmethod
    def blank(cls, limits: Limits) -> Any:
        """Return a white square, as Pillow has it."""
        from PIL import Image

        return Image.new("RGB", (64, 64), "white")

    @classmethod
    def given(cls, rows: Sequence[Sequence[Any]], limits: Limits) -> dict[str, Any]:
        return {"images": [list(row) for row in rows]}

    def decode(self, mode: str = "RGB", max_pixels: int | None = None) -> Any:
        """Return it as Pillow has it, upright.

        Args:
            mode: Pillow's: "RGB", or "L" for one channel.
            max_pixels: Larger ones are scaled down to so many, sides in proportion.

        Raises:
            DataError: It is not there, is too large, is animated, or does not decode; names it.
        """
        self.require()
        from PIL import Image, ImageOps

        try:
            stored = self.encoded()
            if re.match(rb"\s*(<\?xml|<svg|<!DOCTYPE svg)", stored[:256], re.IGNORECASE):
                raise self.error("It is an SVG: a drawing, not pixels.", "Render it to a PNG.")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # see MAX_PIXELS
                opened = Image.open(BytesIO(stored))
            if (problem := _unusable(opened)) is not None:
                raise self.error(*problem)
            image = ImageOps.exif_transpose(opened).convert(mode)
        except DataError:
            raise
        except Image.DecompressionBombError:
            raise self.error(*_TOO_MANY) from None
        except Exception as problem:  # a damaged image can raise anything
            raise self.error(_short(problem), "Mend or remove it.") from problem
        if max_pixels is None or image.width * image.height <= max_pixels:
            return image
        scale = math.sqrt(max_pixels / (image.width * image.height))
        size = max(1, int(image.width * scale)), max(1, int(image.height * scale))
        return image.resize(size, Image.Resampling.BICUBIC)


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


def _short(problem: Exception) -> str:
    if type(problem).__name__ == "UnidentifiedImageError":  # its text names our buffer
        return "It is in no image format that Pillow knows."
    return (str(problem) or type(problem).__name__).splitlines()[0][:200]
