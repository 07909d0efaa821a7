"""What a processor of images and text says when it is asked: no table of models is kept."""

from __future__ import annotations

import importlib.util
import inspect
import math
import warnings
from collections.abc import Sequence
from typing import Any

from peftkit.data.image_template import image_mark
from peftkit.data.images import blank_image
from peftkit.errors import BaseError, DataError


def unsuited(name: str, found: str) -> BaseError:
    """Return the error of a processor or a model that takes no conversations with images."""
    fix = "Give another base; docs/data.md lists families that are tested."
    if importlib.util.find_spec("torchvision") is None:
        fix = (
            "It may need the package torchvision: pip install torchvision. Else give another base."
        )
    return BaseError(f"Cannot use {name} for conversations with images.", found=found, fix=fix)


class Asked:
    """A processor, and what it said of itself.

    Args:
        image_id: The token that stands for what the model sees of an image.
        patch_size: Of the vision tower, for the cost of an image.

    Attributes:
        mark: Its mark of an image in a text.
        of_tokens: The inputs that it makes along with the tokens, (B, T, ...).
        is_nested: Whether images lie in rows, (B, images, ...), rather than one after the other.
        takes_suffix: Whether it wants an answer apart from its prompt.

    Raises:
        BaseError: It does not say how it marks an image.
        DataError: It cannot read one.
    """

    def __init__(self, processor: Any, *, image_id: int, patch_size: int) -> None:
        self._processor, self._image_id, self._patch_size = processor, image_id, patch_size
        self.mark = image_mark(processor)
        self.takes_suffix = "suffix" in inspect.signature(type(processor).__call__).parameters
        try:
            self.of_tokens, self.is_nested = self._asked()
        except DataError as problem:  # it is not the row's: a blank image has nothing wrong
            raise unsuited(type(processor).__name__, problem.found) from problem
        self._known: dict[tuple[tuple[int, int], ...], tuple[tuple[str, ...], int]] = {}

    def _asked(self) -> tuple[frozenset[str], bool]:
        """Ask which inputs go along with the tokens, and whether images lie in rows."""
        image, mark = blank_image(), self.mark
        short = self.made([f"{mark} a"], [[image]], "a blank image")
        long = self.made([f"{mark} a" + " b" * 40], [[image]], "a blank image")
        lengths = [made["input_ids"].shape[1] for made in (short, long)]
        of_tokens = {
            name
            for name in short
            if [made[name].shape[1] if made[name].ndim > 1 else 0 for made in (short, long)]
            == lengths
        }
        try:
            two = self.made([f"{mark} {mark} a"], [[image, image]], "two blank images")
        except DataError:  # one image a row: whatever they lie in, counts never differ
            return frozenset(of_tokens), True
        return frozenset(of_tokens), two["pixel_values"].shape[0] == 1

    def made(
        self, texts: Sequence[str], images: Sequence[Sequence[Any]], source: str, **more: Any
    ) -> Any:
        """Return what the processor makes of texts and their images, as tensors."""
        try:
            with warnings.catch_warnings():  # of what libraries mean to change: none is the row's
                warnings.simplefilter("ignore")
                return self._processor(
                    text=list(texts),
                    images=[list(row) for row in images] if any(images) else None,
                    add_special_tokens=False,
                    return_tensors="pt",
                    **more,
                )
        except Exception as problem:  # processors check in ways of their own
            raise DataError(
                f"The processor of the base cannot take {source}.",
                found=f"It says: {str(problem) or type(problem).__name__}",
                fix="Change the row or its images.",
            ) from problem

    def written(self, text: str, images: Sequence[Any], source: str) -> tuple[tuple[str, ...], int]:
        """Return what the processor writes for each image, and what they cost in patches.

        Both follow from the sizes; should they not, the batch that finds other tokens says so.
        """
        if not images:
            return (), 0
        sizes = tuple(image.size for image in images)
        if sizes not in self._known:
            made = self.made([text], [images], source, return_text_replacement_offsets=True)
            offsets = made.get("text_replacement_offsets")
            written = tuple(found["replacement"] for found in offsets[0]) if offsets else ()
            self._known[sizes] = written or (self.mark,) * len(sizes), self.num_patches(made)
        return self._known[sizes]

    def num_patches(self, made: Any) -> int:
        pixels = made.get("pixel_values")
        if pixels is None:
            return 0
        return math.ceil(pixels.numel() / (3 * self._patch_size**2))

    def tokens_in(self, written: Sequence[str]) -> tuple[int, ...]:
        """Return how many tokens of what is written for each image are the image's."""
        made = [
            self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in written
        ]
        return tuple(ids.count(self._image_id) for ids in made)
