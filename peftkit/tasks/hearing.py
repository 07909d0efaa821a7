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

from peftkit.data.sounds import Sound
from peftkit.errors import BaseError
from peftkit.tasks.loss import unwrapped

INPUTS = ("input_values", "input_features")
"""What transformers calls what a model hears."""
MAX_SECONDS = 30.0
"""Of a sound, where neither the task nor the feature extractor says."""
PER_SECOND = 50
"""Positions of most encoders in a second of sound."""


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
        self._positions = self._known_positions()

    @property
    def is_exact(self) -> bool:
        """Whether positions are known to the last sample, as CTC needs them."""
        return self._positions is not None

    def fits(self, labels: Sequence[int], positions: int) -> bool:
        """Tell whether a text can be said in so many positions, and these be trained on.

        What stands twice in a row needs a blank between. Where spans of positions are masked in
        training, one has to fit.
        """
        twice = sum(a == b for a, b in pairwise(labels))
        return max(len(labels) + twice, self.fewest) <= positions

    @property
    def fewest(self) -> int:
        """How many positions a sound needs."""
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

    def decoded(self, sounds: Sequence[Sound]) -> list[Any]:
        """Return sounds as arrays of samples."""
        return [sound.decode(self.rate, self.max_seconds) for sound in sounds]

    def features(self, heard: Sequence[Any]) -> dict[str, Tensor]:
        """Return what the model hears of arrays of samples, padded as its extractor does."""
        takes = inspect.signature(type(self.extractor).__call__).parameters
        more: dict[str, Any] = {}
        if "padding" in takes:  # Whisper's pads to 30 s by default, others not at all
            own = takes["padding"].default
            more["padding"] = own if isinstance(own, str) else True
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
        if self._positions is not None:
            return max(int(self._positions[num_samples]), 0)
        fixed = getattr(self._model.config, "max_source_positions", None)
        if getattr(self.extractor, "chunk_length", None) and fixed:
            return int(fixed)
        return num_samples * PER_SECOND // self.rate

    def _known_positions(self) -> Any:
        """Return the positions of sounds of 0, 1, 2, ... samples, if the model knows them.

        Asked once: processes that encode rows compute nothing with torch.
        """
        asked = getattr(self._model, "_get_feat_extract_output_lengths", None)
        if asked is None or self._model.main_input_name != "input_values":
            return None
        samples = torch.arange(int(self.max_seconds * self.rate) + self.rate)
        try:
            return asked(samples).numpy()
        except ValueError:  # Moonshine's takes one number
            return None
