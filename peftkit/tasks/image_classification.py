"""Image classification: which of several labels an image has.

Shapes: B images, C channels, H and W pixels as the image processor makes them, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import field_validator
from torch import Tensor, nn

from peftkit.base.purpose import ProblemType, Processor, labels_of
from peftkit.data.encoding import EncodedRows, RowEncoder
from peftkit.data.format import read_each
from peftkit.data.images import Picture, picture, require_pillow
from peftkit.data.lazy_rows import StoredRows
from peftkit.data.load import DataConfig, Part, Record, iterate_records
from peftkit.data.messages import WrongField
from peftkit.errors import DataError
from peftkit.files.strict_json import shown
from peftkit.tasks.labels import FIX, field_of, label_of, number_of, said_in, sorted_names
from peftkit.tasks.loss import unwrapped
from peftkit.tasks.metrics import class_metrics
from peftkit.tasks.protocol import Task
from peftkit.tasks.texts import Classifier, ClassifierConfig

DATA_FILES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow"}


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
        read = partial(self._labelled, where=where)
        return read_each(records, read, "an image and its label", where, FIX)[0]

    def rows(self, read: list[ImageRow]) -> EncodedRows:
        for row in read:
            row.image.decode(self._mode)
        return EncodedRows(read)

    def _labelled(self, record: Record, where: str) -> tuple[ImageRow, Sequence[str]]:
        name, fields = self._config.image, record.fields
        label = number_of(label_of(fields, self._config.label), self._numbers)
        value = field_of(fields, name, "task.image")
        found = picture(value, record, where)
        if found is None:
            words = f"expected a path or encoded bytes of an image, found {shown(value)}"
            raise WrongField(name, words)
        return ImageRow(found, label, record.source), ()


class ImageClassification(Classifier):
    """Rows from class folders or data sets, pixels from rows, a loss over the labels.

    Args:
        processor: The base's image processor.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        config: ImageClassificationConfig,
        data: DataConfig | None = None,
        **more: Any,
    ) -> None:
        super().__init__(model, processor, config, data or DataConfig(train=""), **more)
        settings = unwrapped(model).config
        self.labels = labels_of(settings)
        self._mode = "L" if getattr(settings, "num_channels", 3) == 1 else "RGB"
        self.row_encoder = ClassifiedEncoder(config, self.labels, self._mode)

    def counts(self, rows: StoredRows) -> list[tuple[str, str]]:
        counts = rows.values("label").bincount(minlength=len(self.labels)).tolist()
        each = zip(self.labels, counts, strict=True)
        return [(name, f"{count:,}") for name, count in each]

    def collate(self, rows: Sequence[ImageRow]) -> dict[str, Tensor]:
        """Return pixel_values (B, C, H, W) and targets (B,)."""
        images = [row.image.decode(self._mode) for row in rows]
        pixels: Tensor = self.processor(images, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "targets": torch.tensor([row.label for row in rows])}

    def spans(self, row: ImageRow) -> list[tuple[str, str]]:
        """Return an image's size as it is stored, and its label."""
        width, height = row.image.decode(self._mode).size
        return [("image", f"{width} x {height} pixels"), ("learnt", self.labels[row.label])]

    def measured(self, logits: Tensor, targets: Tensor, rows: Sequence[Any]) -> dict[str, float]:
        return class_metrics(logits.argmax(-1), targets)

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return logits (B, L) in fp32; the pixels go in as the weights are."""
        pixels = batch["pixel_values"].to(unwrapped(model).dtype)
        return super().logits(model, {"pixel_values": pixels})


class ImageClassificationConfig(ClassifierConfig):
    """Image classification: one label for each image."""

    task_type: ClassVar[None] = None
    auto_class: ClassVar[str] = "AutoModelForImageClassification"
    task: ClassVar[Callable[..., Task]] = ImageClassification
    processor: ClassVar[Processor] = "image_processor"
    data_fields: ClassVar[frozenset[str]] = frozenset()

    type: Literal["image_classification"] = "image_classification"
    image: str = "image"
    """Field with the image, where data comes in rows: a path, or bytes."""
    label: str = "label"
    """Field with the label, where data comes in rows; of class folders the names are the labels."""

    @field_validator("labels", mode="before")
    @classmethod
    def _null(cls, value: object) -> object:
        return () if value is None else value  # as it was written before

    def resolve(self, data: DataConfig) -> ImageClassificationConfig:
        require_pillow()
        if self.labels:
            return self
        records = (
            record
            for source in data.sources
            for record in iterate_images(source.path, self.image, self.label)
        )
        names = (name for name, _ in said_in(records, partial(label_of, name=self.label)))
        return self.model_copy(update={"labels": sorted_names(names, data.train_name)})

    @property
    def problem_type(self) -> ProblemType:
        return "single_label_classification"


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
