"""The purpose that a base is loaded for: model class, processor, head, RoPE scaling.

The task determines it before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from peftkit.files.strict_json import JsonMap

if TYPE_CHECKING:
    from peftkit.base.heads import ClassHead

Processor = Literal["tokenizer", "image_processor", "feature_extractor", "multimodal", "audio"]
"""multimodal: a processor of images and text, with a tokenizer; audio: a processor of audio and
text; feature_extractor: of audio alone."""
RopeScaling = JsonMap
"""Fields of a config's `rope_parameters`: rope_type, factor, ..."""


@dataclass(frozen=True, slots=True)
class Purpose:
    """The task's requirements of a model.

    Attributes:
        task: Name of the task, for messages.
        auto_class: The class of transformers that selects the model's class.
        processor: What converts raw inputs to tensors.
        head: The classification head; None: the output layer of the model's class.
        rope_scaling: RoPE scaling in place of the config's.
    """

    task: str = "causal_lm"
    auto_class: str = "AutoModelForCausalLM"
    processor: Processor = "tokenizer"
    head: ClassHead | None = None
    rope_scaling: RopeScaling | None = None


CAUSAL_LM = Purpose()
