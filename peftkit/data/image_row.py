"""A row of tokens with the images in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from peftkit.data.images import Picture
from peftkit.data.pack import IGNORE, Row


@dataclass(frozen=True, slots=True)
class ImageRow(Row):
    """A row of tokens, and what the processor makes its other inputs of.

    Args:
        text: As the processor takes it: one mark of its own for each image.
        suffix: What is learnt, for a processor that wants it apart from the text.
        images: In their order.
        sizes: Width and height of each.
        image_tokens: Tokens of each that the model replaces by what it sees.
        num_patches: What all of them cost a vision tower, in its own tokens.
        prompt: The text up to the last answer.
    """

    text: str
    suffix: str | None
    images: tuple[Picture, ...]
    sizes: tuple[tuple[int, int], ...]
    image_tokens: tuple[int, ...]
    num_patches: int
    prompt: str

    def pieces(self, image_id: int, decode: Callable[[list[int]], str]) -> list[tuple[str, str]]:
        """Return its text in pieces, "learnt" or "" before each, an image as its size.

        Args:
            image_id: The token that stands for what the model sees of an image.
        """
        places: list[tuple[bool, int, str]] = []  # learnt, token, or the text of an image
        left = [*self.image_tokens]
        for token, label in zip(self.input_ids, self.labels, strict=True):
            number = len(self.image_tokens) - len(left)
            if token != image_id:
                if left and left[0] < self.image_tokens[number]:
                    continue  # a line's end, or a tile's, within an image
                places.append((label != IGNORE, token, ""))
                continue
            if left[0] == self.image_tokens[number]:
                width, height = self.sizes[number]
                many = "s" if left[0] > 1 else ""
                shown = f"[image {width}x{height}: {left[0]} token{many}]"
                places.append((False, -1, shown))
            left[0] -= 1
            if left[0] == 0:
                left.pop(0)
        pieces = []
        for learnt, group in groupby(places, key=lambda place: place[0]):
            texts = [
                "".join(text for *_, text in part)
                if is_image
                else decode([token for _, token, _ in part])
                for is_image, part in groupby(group, key=lambda place: bool(place[2]))
            ]
            pieces.append(("learnt" if learnt else "", "".join(texts)))
        return pieces
