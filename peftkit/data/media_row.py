"""A row of tokens with the images, sounds and videos in it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import groupby

from peftkit.data.images import Picture
from peftkit.data.media import Media
from peftkit.data.pack import IGNORE, Row
from peftkit.data.sounds import Sound
from peftkit.data.videos import Video

KINDS: tuple[type[Media], ...] = (Picture, Sound, Video)
"""All kinds of media. A new one is a file beside images.py and its class in this table."""


@dataclass(frozen=True, slots=True)
class MediaRow(Row):
    """A row of tokens, and what the processor makes its other inputs of.

    Args:
        text: As the processor takes it: one mark of its own for each image, sound or video.
        suffix: What is learnt, for a processor that wants it apart from the text.
        media: In their order.
        sizes: How large each is, for people.
        media_tokens: Tokens of each that the model replaces by what it sees or hears.
        num_patches: What all of them cost a tower, in its own tokens.
        prompt: The text up to the last answer.
    """

    text: str
    suffix: str | None
    media: tuple[Media, ...]
    sizes: tuple[str, ...]
    media_tokens: tuple[int, ...]
    num_patches: int
    prompt: str

    @property
    def documents(self) -> tuple[Row, ...]:
        """The row itself: it is one document, with its media."""
        return (self,)

    def pieces(
        self, media_ids: Collection[int], decode: Callable[[list[int]], str]
    ) -> list[tuple[str, str]]:
        """Return its text in pieces, "learnt" or "" before each, an image as its size.

        Args:
            media_ids: Tokens that stand for what the model sees or hears.
        """
        places: list[tuple[bool, int, str]] = []  # learnt, token, or the text of an image
        left = [*self.media_tokens]
        for token, label in zip(self.input_ids, self.labels, strict=True):
            number = len(self.media_tokens) - len(left)
            if token not in media_ids:
                if left and left[0] < self.media_tokens[number]:
                    continue  # a line's end, or a tile's, within an image
                places.append((label != IGNORE, token, ""))
                continue
            if left[0] == self.media_tokens[number]:
                many = "s" if left[0] > 1 else ""
                what = f"{self.media[number].kind} {self.sizes[number]}"
                places.append((False, -1, f"[{what}: {left[0]} token{many}]"))
            left[0] -= 1
            if left[0] == 0:
                left.pop(0)
        pieces = []
        for learnt, group in groupby(places, key=lambda place: place[0]):
            texts = [
                "".join(text for *_, text in part)
                if is_media
                else decode([token for _, token, _ in part])
                for is_media, part in groupby(group, key=lambda place: bool(place[2]))
            ]
            pieces.append(("learnt" if learnt else "", "".join(texts)))
        return pieces
