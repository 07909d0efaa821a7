"""Image classification: which of several labels an image has.

Shapes: B images, C channels, H and W pixels as the image processor makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from peftkit.base.purpose import Processor
from peftkit.data.media import MediaClass, Picture
from peftkit.tasks.base import Task
from peftkit.tasks.classified_media import (
    ClassifiedEncoder,
    ClassifiedMedia,
    ClassifiedMediaConfig,
)
from peftkit.tasks.loss import unwrapped


@dataclass(frozen=True, slots=True)
class ImageRow:
    """An image and the number of its label."""

    media: Picture
    label: int
    source: str


class ImageClassification(ClassifiedMedia):
    """Rows from class folders or data sets, pixels from rows, a loss over the labels.

    Args:
        processor: The base's image processor.
    """

    def build(self, model: nn.Module) -> None:
        super().build(model)
        channels = getattr(unwrapped(model).config, "num_channels", 3)
        mode = self._mode = "L" if channels == 1 else "RGB"

        def made(media: Picture, label: int) -> ImageRow:
            media.decode(mode)
            return ImageRow(media, label, media.source)

        self.row_encoder = ClassifiedEncoder(ImageRow, self.config, self.labels, made, mode)

    def inputs(self, media: Sequence[Picture]) -> dict[str, Tensor]:
        """Return pixel_values (B, C, H, W)."""
        images = [picture.decode(self._mode) for picture in media]
        pixels: Tensor = self.processor(images, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels}

    def cast(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(unwrapped(model).dtype) for name, tensor in inputs.items()}

    def spans(self, row: ImageRow) -> list[tuple[str, str]]:
        """Return an image's size as it is stored, and its label."""
        width, height = row.media.decode(self._mode).size
        return [("image", f"{width} x {height} pixels"), ("learnt", self.labels[row.label])]


class ImageClassificationConfig(ClassifiedMediaConfig):
    """Image classification: one label for each image."""

    media: ClassVar[MediaClass] = Picture
    field_setting: ClassVar[str] = "image"
    auto_class: ClassVar[str] = "AutoModelForImageClassification"
    task: ClassVar[Callable[..., Task]] = ImageClassification
    processor: ClassVar[Processor] = "image_processor"

    type: Literal["image_classification"] = "image_classification"
    image: str = "image"
    """Field with the image, where data comes in rows: a path, or bytes."""
