"""Audio classification: which of several labels a sound has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from peftkit.base.purpose import Processor
from peftkit.data.media import Audio, MediaClass
from peftkit.tasks.base import Task
from peftkit.tasks.classified_media import (
    ClassifiedEncoder,
    ClassifiedMedia,
    ClassifiedMediaConfig,
)
from peftkit.tasks.hearing import Hearing


@dataclass(frozen=True, slots=True)
class SoundRow:
    """A sound and the number of its label.

    Args:
        num_samples: As it is heard. num_encoder_tokens: Positions that the encoder takes of it.
    """

    media: Audio
    num_samples: int
    num_encoder_tokens: int
    label: int
    source: str


class AudioClassification(ClassifiedMedia):
    """Rows from class folders or data sets, what is heard from rows, a loss over the labels.

    Args:
        processor: The base's feature extractor.

    Raises:
        BaseError: It is none.
    """

    def build(self, model: nn.Module) -> None:
        super().build(model)
        hearing = self.hearing = Hearing(model, self.processor, self.config.max_seconds)

        def made(media: Audio, label: int) -> SoundRow:
            (heard,) = hearing.decoded([media])
            number = len(heard)
            if (positions := hearing.positions(number)) < hearing.fewest:
                raise media.error(f"It is short: {hearing.told(number)}.", "Remove it.")
            return SoundRow(media, number, positions, label, media.source)

        self.row_encoder = ClassifiedEncoder(SoundRow, self.config, self.labels, made, hearing.key)

    def inputs(self, media: Sequence[Audio]) -> dict[str, Tensor]:
        """Return what the model hears."""
        return self.hearing.features(self.hearing.decoded(media))

    def cast(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.hearing.given(inputs)

    def spans(self, row: SoundRow) -> list[tuple[str, str]]:
        """Return how long a sound lasts, and its label."""
        return [("sound", self.hearing.told(row.num_samples)), ("learnt", self.labels[row.label])]


class AudioClassificationConfig(ClassifiedMediaConfig):
    """Audio classification: one label for each sound."""

    media: ClassVar[MediaClass] = Audio
    field_setting: ClassVar[str] = "audio"
    auto_class: ClassVar[str] = "AutoModelForAudioClassification"
    task: ClassVar[Callable[..., Task]] = AudioClassification
    processor: ClassVar[Processor] = "feature_extractor"

    type: Literal["audio_classification"] = "audio_classification"
    audio: str = "audio"
    """Field with the sound, where data comes in rows: a path, or bytes; file_name is read too."""
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """Longest sound; null: what the base hears at once, or 30."""
