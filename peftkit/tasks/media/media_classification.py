"""Classification of images and of audio clips.

Shapes: B rows, L labels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from peftkit.base.heads import ProblemType, labels_of
from peftkit.base.purpose import Processor
from peftkit.data.media.files import Audio, Media, MediaClass, Picture
from peftkit.data.records import Part, Record, iterate_records, sources_of
from peftkit.data.rows.columns import StoredRows
from peftkit.errors import DataError
from peftkit.events import Listener, Progress, ignore
from peftkit.forward.loss import in_dtype_of, unwrapped
from peftkit.settings import DataConfig
from peftkit.tasks.base import Task
from peftkit.tasks.batches import BATCH_SIZE, equal_parts
from peftkit.tasks.classes.labels import label_of, number_of, sorted_names, values_in
from peftkit.tasks.config import Predicts
from peftkit.tasks.media.speech import Hearing, MediumEncoder, medium_in, metadata_or_self
from peftkit.tasks.metrics import class_metrics
from peftkit.tasks.texts import Classifier, ClassifierConfig

DATA_FILES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow"}


class ClassifiedEncoder(MediumEncoder):
    """Encoder of labelled media; decodes each medium once to detect damage before training.

    Args:
        config: The task's config.
        labels: Labels in the order of the head's outputs.
        row_of: Decodes a medium and returns its row, given the index of its label.
        decoding: Settings of decoding, for the cache key.
    """

    def __init__(
        self,
        kind: type[Any],
        config: ClassifiedMediaConfig,
        labels: Sequence[str],
        row_of: Callable[[Any, int], Any],
        decoding: object,
    ) -> None:
        self.kind = kind  # type: ignore[misc]
        self.what = f"{config.media.kind} and label"
        self._config, self._row_of = config, row_of
        self._numbers = {label: number for number, label in enumerate(labels)}
        self.settings = (config.field, config.label, tuple(labels), decoding)

    def _in_folders(self, where: str) -> list[Record] | None:
        return class_folders(where, self._config.field, self._config.label)

    def stamp(self, where: str) -> object | None:
        records = self._in_folders(where)
        return super().stamp(where) if records is None else [record.source for record in records]

    def parts(self, where: str) -> Iterator[Part]:
        records = self._in_folders(where)
        if records is None:
            yield from super().parts(where)
            return
        for part in equal_parts(records, self.at_once):
            yield partial(list, part)

    def parse(self, record: Record, where: str) -> tuple[tuple[Media, int], Sequence[str]]:
        label = number_of(label_of(record.fields, self._config.label), self._numbers)
        medium, name = self.medium(record, where)
        return (medium, label), (name, self._config.label)

    def row(self, example: tuple[Media, int]) -> Any:
        return self._row_of(*example)

    def summary(self, rows: StoredRows) -> list[tuple[str, str]]:
        counts = rows.values("label").bincount(minlength=len(self._numbers)).tolist()
        each = zip(self._numbers, counts, strict=True)
        return [(name, f"{count:,}") for name, count in each]

    def medium(self, record: Record, where: str) -> tuple[Media, str]:
        """Return the image or audio clip of a record, and its field."""
        config = self._config
        setting = f"task.{config.field_setting}"
        return medium_in(record, config.field, setting, config.media, where)


class ClassifiedMedia(Classifier):
    """Cross entropy over the labels of media, from class folders or data sets."""

    encoder: ClassifiedEncoder

    def build(self, model: nn.Module) -> None:
        self.config.media.require()
        super().build(model)
        self.set_labels(labels_of(unwrapped(model).config))

    @abstractmethod
    def inputs(self, media: Sequence[Any]) -> dict[str, Tensor]:
        """Return the model's inputs for media."""

    def collate(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """Return the model's inputs, and targets (B,)."""
        targets = torch.tensor([row.label for row in rows])
        return {**self.inputs([row.media for row in rows]), "targets": targets}

    def measured(self, logits: Tensor, targets: Tensor, rows: Sequence[Any]) -> dict[str, float]:
        return class_metrics(logits.argmax(-1), targets)

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != "targets"}
        return super().logits(model, in_dtype_of(model, inputs))

    @torch.no_grad()
    def predict_rows(
        self, model: nn.Module, records: Sequence[Record], on_event: Listener = ignore
    ) -> list[dict[str, object]]:
        """Return `predicted_label` and `prediction`: the probabilities, the likeliest first."""
        predictions, device = list[dict[str, object]](), next(model.parameters()).device
        for part in equal_parts(records, BATCH_SIZE):
            on_event(Progress(self.progress, len(predictions), len(records)))
            media = [self.encoder.medium(one, one.source.rpartition(":")[0])[0] for one in part]
            batch = {name: tensor.to(device) for name, tensor in self.inputs(media).items()}
            for values in self.by_label(self.logits(model, batch).softmax(-1)):
                predictions.append({"predicted_label": next(iter(values)), "prediction": values})
        return predictions


class ClassifiedMediaConfig(ClassifierConfig):
    """One label for each medium."""

    media: ClassVar[MediaClass]
    """The kind of media that is classified."""
    field_setting: ClassVar[str]
    """The setting that names the field with the medium."""
    task_type: ClassVar[None] = None
    predicts: ClassVar[frozenset[Predicts]] = frozenset({"rows"})
    data_fields: ClassVar[frozenset[str]] = frozenset()
    command: ClassVar[str] = "peftkit predict {folder} --data FILE"

    label: str = "label"
    """Field with the label in data with rows; class folders are labels by their names."""

    @field_validator("labels", mode="before")
    @classmethod
    def _null(cls, value: object) -> object:
        return () if value is None else value  # written by older versions

    @property
    def field(self) -> str:
        """The field with the medium."""
        return str(getattr(self, self.field_setting))

    def resolve(self, data: DataConfig) -> Any:
        self.media.require()
        if self.labels:
            return self
        records = (
            record
            for source in sources_of(data)
            for record in iterate_media(source.path, self.field, self.label)
        )
        names = (name for name, _ in values_in(records, partial(label_of, name=self.label)))
        return self.model_copy(update={"labels": sorted_names(names, data.train_name)})

    @property
    def problem_type(self) -> ProblemType:
        return "single_label_classification"


def class_folders(where: str, media: str, label: str) -> list[Record] | None:
    """Return a record for each file in class folders; None if `where` has no class folders.

    Args:
        media, label: Names of the records' fields.

    Raises:
        DataError: The folders are empty.
    """
    folder = Path(where).expanduser()
    entries = _visible(folder) if folder.is_dir() else []
    classes = [entry for entry in entries if entry.is_dir()]
    if not classes or any(entry.suffix.lower() in DATA_FILES for entry in entries):
        return None
    records = [
        Record({media: path, label: each.name}, str(path))
        for each in classes
        for path in _visible(each)
    ]
    if not records:
        raise DataError(
            f"Cannot use {where}.",
            found="Its folders contain no files.",
            fix="Give a folder with one folder of files for each class.",
        )
    return records


def iterate_media(where: str, media: str, label: str) -> Iterator[Record]:
    """Yield one record for each file: fields named `media` and `label`, and its source.

    Raises:
        DataError: There are no files, or the data cannot be read.
    """
    yield from class_folders(where, media, label) or iterate_records(metadata_or_self(where))


def _visible(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


# Images.


@dataclass(frozen=True, slots=True)
class ImageRow:
    """An image and the index of its label."""

    media: Picture
    label: int
    source: str


class ImageClassification(ClassifiedMedia):
    """Cross entropy over the labels of images."""

    def build(self, model: nn.Module) -> None:
        super().build(model)
        channels = getattr(unwrapped(model).config, "num_channels", 3)
        mode = self._mode = "L" if channels == 1 else "RGB"

        def row_of(media: Picture, label: int) -> ImageRow:
            media.decode(mode)
            return ImageRow(media, label, media.source)

        self.encoder = ClassifiedEncoder(ImageRow, self.config, self.labels, row_of, mode)
        self.rows.encoder = self.encoder

    def inputs(self, media: Sequence[Picture]) -> dict[str, Tensor]:
        """Return pixel_values (B, C, H, W)."""
        images = [picture.decode(self._mode) for picture in media]
        pixels: Tensor = self.processor(images, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels}

    def spans(self, row: ImageRow) -> list[tuple[str, str]]:
        """Return the size of the stored image, and its label."""
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
    """Field with the image in data with rows: a path, or bytes."""


# Audio.


@dataclass(frozen=True, slots=True)
class ClipRow:
    """An audio clip and the index of its label.

    Args:
        num_samples: Samples after decoding and resampling.
        num_encoder_tokens: Positions of the encoder for this clip.
    """

    media: Audio
    num_samples: int
    num_encoder_tokens: int
    label: int
    source: str


class AudioClassification(ClassifiedMedia):
    """Cross entropy over the labels of audio clips.

    Raises:
        BaseError: The feature extractor has no sampling rate.
    """

    def build(self, model: nn.Module) -> None:
        super().build(model)
        hearing = self.hearing = Hearing(model, self.processor, self.config.max_seconds)

        def row_of(media: Audio, label: int) -> ClipRow:
            (samples,) = hearing.decoded([media])
            number = len(samples)
            if (positions := hearing.positions(number)) < hearing.fewest:
                raise media.error(f"It is too short: {hearing.duration(number)}.", "Remove it.")
            return ClipRow(media, number, positions, label, media.source)

        self.encoder = ClassifiedEncoder(ClipRow, self.config, self.labels, row_of, hearing.key)
        self.rows.encoder = self.encoder

    def inputs(self, media: Sequence[Audio]) -> dict[str, Tensor]:
        return self.hearing.inputs(media)

    def spans(self, row: ClipRow) -> list[tuple[str, str]]:
        """Return the duration of a clip, and its label."""
        return [
            ("audio", self.hearing.duration(row.num_samples)),
            ("learnt", self.labels[row.label]),
        ]


class AudioClassificationConfig(ClassifiedMediaConfig):
    """Audio classification: one label for each clip."""

    media: ClassVar[MediaClass] = Audio
    field_setting: ClassVar[str] = "audio"
    auto_class: ClassVar[str] = "AutoModelForAudioClassification"
    task: ClassVar[Callable[..., Task]] = AudioClassification
    processor: ClassVar[Processor] = "feature_extractor"

    type: Literal["audio_classification"] = "audio_classification"
    audio: str = "audio"
    """Field with the clip in data with rows: a path, or bytes; file_name is read too."""
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """Longest clip in seconds; null: the base's chunk length, or 30."""
