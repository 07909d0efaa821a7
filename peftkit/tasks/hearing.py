"""What a model hears of sounds: its own feature extractor is asked, for each batch.

What is heard is not kept: 30 s of Whisper's are a megabyte, ten times the sound as it is stored.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.data.media import Audio
from peftkit.errors import BaseError, DataError
from peftkit.tasks.loss import unwrapped

INPUTS = ("input_values", "input_features")
"""What transformers calls what a model hears."""
LENGTHS = ("_get_feat_extract_output_lengths", "_get_subsampling_output_length")
"""What transformers' models call their own count of positions, given samples or frames."""
MAX_SECONDS = 30.0
"""Of a sound, where neither the task nor the feature extractor says."""
PER_SECOND = 50
"""Positions of most encoders in a second of sound."""


class ShortSound(DataError):
    """The encoder has no position for it."""


class Hearing:
    """The feature extractor of a base, and how many positions its encoder takes of a sound.

    Args:
        processor: The base's, with or without a tokenizer.
        max_seconds: Of a sound; None: what the feature extractor takes at once, or MAX_SECONDS.

    Attributes:
        rate: Samples a second.
        max_seconds: Longer sounds are not heard.

    Raises:
        BaseError: There is no feature extractor.
    """

    def __init__(self, model: nn.Module, processor: Any, max_seconds: float | None) -> None:
        found = getattr(processor, "feature_extractor", processor)
        if not hasattr(found, "sampling_rate"):
            raise BaseError(
                f"{type(processor).__name__} reads no sounds.",
                found="It has no feature extractor with a sampling rate.",
                fix="Give a base such as Whisper or wav2vec2, with its preprocessor_config.json.",
            )
        self.extractor, self.rate = found, int(found.sampling_rate)
        at_once = getattr(found, "chunk_length", None) or max_seconds or MAX_SECONDS
        self.max_seconds = min(float(at_once), max_seconds or float("inf"))
        self._model: Any = unwrapped(model)
        names = [name for name in LENGTHS if hasattr(self._model, name)]
        self._asked: Any = getattr(self._model, names[0]) if names else None
        self._of_samples = self._positions_of_samples()
        self._of_frames = dict[int, int]()

    @property
    def is_exact(self) -> bool:
        """Whether positions are known to the last sample, as CTC needs them."""
        return self._of_samples is not None or self._has_masks

    def fits(self, labels: Sequence[int], positions: int) -> bool:
        """Tell whether a text can be said in so many positions.

        What stands twice in a row needs a blank between.
        """
        twice = sum(a == b for a, b in pairwise(labels))
        return len(labels) + twice <= positions

    @property
    def fewest(self) -> int:
        """How many positions a sound needs to be trained on: a span of them may be masked."""
        config = self._model.config
        masks = getattr(config, "apply_spec_augment", False) and config.mask_time_prob > 0
        return int(config.mask_time_length) + 1 if masks else 1

    @property
    def key(self) -> object:
        """What rows depend on that are made with it."""
        return (self.rate, self.max_seconds, self.positions(self.rate))

    def told(self, num_samples: int) -> str:
        """Return how long a sound lasts, for people."""
        return f"{num_samples / self.rate:.2f} s at {self.rate:,} Hz"

    def decoded(self, sounds: Sequence[Audio]) -> list[Any]:
        """Return sounds as arrays of samples.

        Raises:
            ShortSound: One is too short to be heard.
            DataError: See `Audio.decode`.
        """
        found = [sound.decode(self.rate, self.max_seconds) for sound in sounds]
        for sound, heard in zip(sounds, found, strict=True):
            if len(heard) < self.rate // 2 and not self.positions(len(heard)):
                raise ShortSound(
                    f"Cannot use {sound.which} of {sound.source}.",
                    found=f"It is too short: {self.told(len(heard))}.",
                    fix="Give a longer one, or remove it.",
                )
        return found

    def features(self, heard: Sequence[Any]) -> dict[str, Tensor]:
        """Return what the model hears of arrays of samples, padded as its extractor does."""
        takes = inspect.signature(type(self.extractor).__call__).parameters
        more: dict[str, Any] = {}
        if "padding" in takes:  # Whisper's pads to 30 s by default, others not at all
            own = takes["padding"].default
            more["padding"] = own if isinstance(own, str) else True
        if self._has_masks:
            more["return_attention_mask"] = True
        made = self.extractor(list(heard), sampling_rate=self.rate, return_tensors="pt", **more)
        return dict(made)

    def given(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return inputs with floats as the model's weights are."""
        dtype = self._model.dtype
        return {n: t.to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}

    def example(self, seed: int = 0) -> dict[str, Tensor]:
        """Return what the model hears of half a second of noise."""
        noise = torch.randn(self.rate // 2, generator=torch.Generator().manual_seed(seed))
        made = self.given(self.features([noise.numpy() / 10]))
        return {name: value.to(self._model.device) for name, value in made.items()}

    def positions(self, num_samples: int) -> int:
        """Return how many positions of the encoder a sound takes."""
        if self._of_samples is not None:
            return max(int(self._of_samples[num_samples]), 0)
        if self._has_masks:
            if num_samples not in self._of_frames:
                self._of_frames[num_samples] = self._positions_of_frames(num_samples)
            return self._of_frames[num_samples]
        fixed = getattr(self._model.config, "max_source_positions", None)
        if getattr(self.extractor, "chunk_length", None) and fixed:
            return int(fixed)
        return num_samples * PER_SECOND // self.rate

    @property
    def _has_masks(self) -> bool:
        """Whether the model counts positions of frames, and the extractor says which are heard."""
        names = getattr(self.extractor, "model_input_names", ())
        frames = self._model.main_input_name == "input_features"
        return frames and self._asked is not None and "attention_mask" in names

    def _positions_of_samples(self) -> Any:
        """Return the positions of sounds of 0, 1, 2, ... samples, where the model hears samples."""
        if self._asked is None or self._model.main_input_name != "input_values":
            return None
        samples = torch.arange(int(self.max_seconds * self.rate) + self.rate)
        try:
            return self._asked(samples).numpy()
        except ValueError:  # Moonshine's takes one number
            return None

    def _positions_of_frames(self, num_samples: int) -> int:
        """Return the positions of a sound of which the model hears frames: mel bins, for example.

        0 of one that is too short for its extractor: it raises, or divides by nothing.
        """
        noise = torch.randn(num_samples, generator=torch.Generator().manual_seed(0)).numpy()
        try:
            made = self.features([noise])
        except (RuntimeError, ValueError, IndexError):
            return 0
        if not made["input_features"].isfinite().all():
            return 0
        return max(int(self._asked(made["attention_mask"].sum(-1))), 0)
