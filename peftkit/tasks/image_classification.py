"""Image classification: which of several labels an image has.

Shapes: B images, C channels, H and W pixels as the image processor makes them, L labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peftkit.base.purpose import ClassHead, Processor, Purpose, labels_of
from peftkit.data.class_folders import class_folders, iterate_images
from peftkit.data.encode import Style
from peftkit.data.encoding import EncodedRows, RowEncoder
from peftkit.data.images import Picture, picture, require_pillow
from peftkit.data.load import DataConfig, Part, Record
from peftkit.data.stored import StoredRows
from peftkit.errors import DataError
from peftkit.events import Listener, ignore
from peftkit.files.strict_json import shown
from peftkit.tasks.labels import field_of, label_name, number_of, sorted_names
from peftkit.tasks.loss import unwrapped
from peftkit.tasks.measure import over_batches
from peftkit.tasks.metrics import class_metrics
from peftkit.tasks.protocol import Task, TaskConfig


@dataclass(frozen=True, slots=True)
class ImageRow:
    """An image and the number of its label."""

    image: Picture
    label: int
    source: str


class ClassifiedEncoder(RowEncoder):
    """Makes a row of each image with a label; each is decoded once, so that damage shows now."""

    kind: ClassVar[type[ImageRow]] = ImageRow
    at_once: ClassVar[int] = 100

    def __init__(self, config: ImageClassificationConfig, labels: Sequence[str], mode: str) -> None:
        self._config, self._mode = config, mode
        self._numbers = {label: number for number, label in enumerate(labels)}

    def key(self, where: str) -> object:
        fields = (self._config.image, self._config.label)
        return (str(Path(where).absolute().parent), *fields, tuple(self._numbers), self._mode)

    def _in_folders(self, where: str) -> list[Record] | None:
        return class_folders(where, self._config.image, self._config.label)

    def stamp(self, where: str) -> object | None:
        records = self._in_folders(where)
        return super().stamp(where) if records is None else [record.source for record in records]

    def parts(self, where: str) -> Iterator[Part]:
        records = self._in_folders(where)
        if records is None:
            yield from super().parts(where)
            return
        for start in range(0, len(records), self.at_once):
            yield partial(list, records[start : start + self.at_once])

    def read(self, records: Sequence[Record], where: str) -> list[ImageRow]:
        rows = []
        for record in records:
            name = label_name(field_of(record, self._config.label, "task.label"), record.source)
            label = number_of(name, self._numbers, record.source)
            rows.append(ImageRow(self._picture(record, where), label, record.source))
        return rows

    def rows(self, read: list[ImageRow]) -> EncodedRows:
        for row in read:
            row.image.decode(self._mode)
        return EncodedRows(read)

    def _picture(self, record: Record, where: str) -> Picture:
        value = field_of(record, self._config.image, "task.image")
        found = picture(value, record, where)
        if found is None:
            raise DataError(
                f"Cannot use {record.source}: its '{self._config.image}' is no image.",
                found=f"It is {shown(value)}.",
                fix="Give a path or encoded bytes, or name another field with task.image.",
            )
        return found


class ImageClassification(Task):
    """Rows from class folders or data sets, pixels from rows, a loss over the labels.

    Args:
        processor: The base's image processor.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        config: ImageClassificationConfig,
        *,
        on_event: Listener = ignore,
    ) -> None:
        self._processor, self._on_event = processor, on_event
        settings = unwrapped(model).config
        self.labels = labels_of(settings)
        self._mode = "L" if getattr(settings, "num_channels", 3) == 1 else "RGB"
        self.row_encoder = ClassifiedEncoder(config, self.labels, self._mode)

    def counts(self, rows: StoredRows) -> list[tuple[str, str]]:
        counts = rows.values("label").bincount(minlength=len(self.labels)).tolist()
        each = zip(self.labels, counts, strict=True)
        return [("images", f"{len(rows):,}"), *((name, f"{count:,}") for name, count in each)]

    def collate(self, rows: Sequence[ImageRow]) -> dict[str, Tensor]:
        """Return pixel_values (B, C, H, W) and labels (B,)."""
        images = [row.image.decode(self._mode) for row in rows]
        pixels: Tensor = self._processor(images, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "labels": torch.tensor([row.label for row in rows])}

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return how many images there are."""
        return len(batch["labels"])

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross entropy summed over the images of a batch, in fp32."""
        return F.cross_entropy(self._logits(model, batch), batch["labels"], reduction="sum")

    def spans(self, row: ImageRow) -> list[tuple[str, str]]:
        """Return an image's size as it is stored, and its label."""
        width, height = row.image.decode(self._mode).size
        return [("image", f"{width} x {height} pixels"), ("learnt", self.labels[row.label])]

    @torch.no_grad()
    def metrics(
        self, model: nn.Module, rows: Sequence[ImageRow], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return loss, accuracy and F1 (see `peftkit.tasks.metrics.class_metrics`)."""
        loss, predicted, true = 0.0, [], []
        logits_of = partial(self._logits, model)
        for batch, logits in over_batches(self, model, rows, "Classifying", on_event, logits_of):
            loss += float(F.cross_entropy(logits, batch["labels"], reduction="sum"))
            predicted.append(logits.argmax(-1).cpu())
            true.append(batch["labels"].cpu())
        return {"loss": loss / len(rows), **class_metrics(torch.cat(predicted), torch.cat(true))}

    def _logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return logits (B, L) in fp32; the pixels go in as the weights are."""
        pixels = batch["pixel_values"].to(unwrapped(model).dtype)
        logits: Tensor = model(pixel_values=pixels).logits
        return logits.float()


class ImageClassificationConfig(TaskConfig):
    """Image classification: one label for each image."""

    task_type: ClassVar[None] = None
    auto_class: ClassVar[str] = "AutoModelForImageClassification"
    processor: ClassVar[Processor] = "image_processor"

    type: Literal["image_classification"] = "image_classification"
    image: str = "image"
    """Field with the image, where data comes in rows: a path, or bytes."""
    label: str = "label"
    """Field with the label, where data comes in rows; of class folders the names are the labels."""
    labels: tuple[str, ...] | None = None
    """All labels there are, in the order of the head's outputs; null: those of the data."""
    fresh_head: bool = False
    """Train a new head even where the base has one."""

    def resolve(self, data: DataConfig) -> ImageClassificationConfig:
        require_pillow()
        if self.labels is not None:
            return self
        records = (
            record
            for source in data.sources
            for record in iterate_images(source.path, self.image, self.label)
        )
        names = (label_name(field_of(r, self.label, "task.label"), r.source) for r in records)
        return self.model_copy(update={"labels": sorted_names(names, data.train_name)})

    @property
    def purpose(self) -> Purpose:
        assert self.labels is not None, "resolve comes first"
        head = ClassHead(self.labels, "single_label_classification", self.fresh_head)
        return Purpose(self.type, self.auto_class, self.processor, head)

    def on(
        self,
        model: nn.Module,
        processor: Any,
        data: DataConfig,
        *,
        style: Style | None = None,
        on_event: Listener = ignore,
    ) -> ImageClassification:
        return ImageClassification(model, processor, self, on_event=on_event)
