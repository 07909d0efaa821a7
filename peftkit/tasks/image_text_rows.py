"""Rows of conversations with images: tokens, and where the images are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from peftkit.data.cache import tokenizer_key
from peftkit.data.columns import Dropped
from peftkit.data.encoding import EncodedRows, RowEncoder
from peftkit.data.format import ParsedRow
from peftkit.data.image_row import ImageRow
from peftkit.data.image_rows import parse_with_images
from peftkit.data.image_text import ImageEncoder
from peftkit.data.images import Picture
from peftkit.data.load import Record
from peftkit.data.pack import cut_document
from peftkit.tasks.rows import agreed_style

NOTHING, TOO_LONG = 0, 1
"""Why a row is dropped: nothing to learn; an image or the answer lies beyond the cut."""
Read = tuple[ParsedRow, list[tuple[Picture, ...]]]


class ImageTextEncoder(RowEncoder):
    """Makes a row of each conversation and its images; no pixels are kept.

    Each image is decoded once, so that a damaged one shows now. A processor computes with torch,
    which no process that is forked can.

    Args:
        processor: The base's. encoder: Made of it. form: data.format. told: What `encoder` was
            made with besides. image_id: The token that stands for an image.
    """

    kind: ClassVar[type[ImageRow]] = ImageRow
    in_processes: ClassVar[bool] = False
    at_once: ClassVar[int] = 100
    drops: Mapping[str, str] = {
        "nothing to learn": "give these rows an answer",
        "an image or the answer beyond the cut": "raise data.max_length or lower data.max_pixels",
    }

    def __init__(
        self,
        processor: Any,
        encoder: ImageEncoder,
        form: Any,
        told: tuple[object, ...],
        *,
        image_id: int,
        max_length: int,
    ) -> None:
        self._processor, self._encoder, self._form = processor, encoder, form
        self._told, self._image_id, self._max_length = told, image_id, max_length

    def key(self, where: str) -> object:
        folder, processor = str(Path(where).absolute().parent), self._processor
        known = (type(processor).__name__, processor.to_json_string(), processor.chat_template)
        words = tokenizer_key(processor.tokenizer)
        return (folder, *words, *known, *self._told, self._form, self._max_length)

    def read(self, records: Sequence[Record], where: str) -> Read:
        return parse_with_images(records, self._form, where=where)

    def rows(self, read: Read) -> EncodedRows:
        parsed, pictures = read
        encoder, counts = self._encoder, Counter[str]()
        before, style = encoder.num_off_prompt, encoder.style(parsed.examples[0])
        rows: list[ImageRow | Dropped] = []
        for example, images in zip(parsed.examples, pictures, strict=True):
            agreed_style(style, encoder.style(example), example.source)
            row = self._cut(encoder.encode(example, images), counts)
            rows.append(row)
            if isinstance(row, ImageRow):
                counts.update(
                    {
                        "without images": not row.images,
                        "images": len(row.images),
                        "tokens of images": sum(row.image_tokens),
                        "targets": row.num_targets,
                    }
                )
        counts["off_prompt"] = encoder.num_off_prompt - before
        agreed = {"format": str(parsed.format), "style": str(style.kind)}
        return EncodedRows(rows, agreed, counts, parsed.unused)

    def _cut(self, row: ImageRow, counts: Counter[str]) -> ImageRow | Dropped:
        """Return a row of at most max_length tokens; none where it would be cut in an image."""
        if row.num_targets == 0:
            return Dropped(row.source, NOTHING)
        if len(row.input_ids) <= self._max_length:
            return row
        cut = cut_document(row, self._max_length)
        if cut.num_targets == 0 or self._image_id in row.input_ids[self._max_length :]:
            return Dropped(row.source, TOO_LONG)
        counts["cut"] += 1
        return cut
