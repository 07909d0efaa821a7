"""Processors that turn images and audio into a model's inputs, alone or with its tokenizer.

transformers' classes for images and text also require a video processor, which needs torchvision.
Without torchvision, the processor is built without video support.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import transformers
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils.hub import PushToHubMixin, cached_file

from peftkit.base.locate import Location
from peftkit.base.pretrained import (
    Processors,
    explained,
    load_config,
    loader_arguments,
    quiet,
    with_padding,
)
from peftkit.base.purpose import Processor
from peftkit.errors import BaseError
from peftkit.events import Listener

PARTS = {
    "multimodal": (("image_processor", "feature_extractor", "audio_processor"), "media"),
    "audio": (("feature_extractor",), "audio"),
}
"""Parts of a processor besides the tokenizer, one of which is required, and their media."""


def load_processors(location: Location, kind: Processor, on_event: Listener) -> Processors:
    """Load the processors of images or audio."""
    if kind == "image_processor":
        return Processors(image_processor=load_image_processor(location))
    if kind == "feature_extractor":
        return Processors(image_processor=load_feature_extractor(location))
    both = load_multimodal(location, kind)
    return Processors(with_padding(both.tokenizer, location, on_event), multimodal=both)


def load_image_processor(location: Location) -> Any:
    """Load the image processor; a base without one gets ViT's, at the base's image size.

    It uses Pillow, so the pixels do not depend on whether torchvision is installed.

    Raises:
        BaseError: The processor cannot be used, or the base's config has no image size.
    """
    arguments = loader_arguments(location)
    with quiet(), explained(location, "the image processor of "):
        for name in ("preprocessor_config.json", "processor_config.json"):
            file = cached_file(
                location.source,
                name,
                revision=location.revision,
                _raise_exceptions_for_missing_entries=False,
            )
            if file:
                return transformers.AutoImageProcessor.from_pretrained(
                    location.source, backend="pil", **arguments
                )
        config = load_config(location)
        size, channels = config.image_size, getattr(config, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else size
        return transformers.ViTImageProcessorPil(
            size={"height": height, "width": width},
            image_mean=[0.5] * channels,
            image_std=[0.5] * channels,
        )


def load_feature_extractor(location: Location) -> Any:
    """Load the feature extractor of audio; raises BaseError if there is no usable one."""
    with quiet(), explained(location, "the feature extractor of "):
        return transformers.AutoFeatureExtractor.from_pretrained(
            location.source, **loader_arguments(location)
        )


def load_multimodal(location: Location, kind: Processor) -> Any:
    """Load the processor of a model of images, or audio, and text.

    Raises:
        BaseError: The processor is missing, cannot be read, or does not support these media.
    """
    parts, media = PARTS[kind]
    arguments = loader_arguments(location)
    what_of = "the processor of "
    with quiet(), explained(location, what_of):
        if importlib.util.find_spec("torchvision") is None:
            processor = _without_videos(location, arguments)
        else:
            processor = transformers.AutoProcessor.from_pretrained(location.source, **arguments)
    if not (hasattr(processor, "tokenizer") and any(hasattr(processor, part) for part in parts)):
        raise BaseError(
            f"cannot load {what_of}{location.name}.",
            found=f"Its {type(processor).__name__} does not process {media} and text.",
            fix="Put the base's processor_config.json and preprocessor_config.json there too.",
        )
    return processor


def _without_videos(location: Location, arguments: dict[str, object]) -> Any:
    config = load_config(location)
    kind: Any = PROCESSOR_MAPPING.get(type(config), None)
    if kind is None or "video_processor" not in getattr(kind, "get_attributes", list)():
        return transformers.AutoProcessor.from_pretrained(location.source, **arguments)
    settings, _ = kind.get_processor_dict(location.source, **arguments)
    loaders: dict[str, Any] = {
        "tokenizer": transformers.AutoTokenizer,
        "image_processor": transformers.AutoImageProcessor,
        "feature_extractor": transformers.AutoFeatureExtractor,
    }
    videos = settings.get("video_processor")
    stand_in = UnreadVideos(videos if isinstance(videos, dict) else {})
    parts = [
        loaders[name].from_pretrained(location.source, **arguments) if name in loaders else stand_in
        for name in kind.get_attributes()
    ]
    return without_video_support(kind).from_args_and_dict(parts, settings)


class UnreadVideos(PushToHubMixin):
    """Replaces the video part of a processor and keeps its settings for saving."""

    _auto_class = None

    def __init__(self, settings: dict[str, object]) -> None:
        self.settings = settings

    def to_dict(self) -> dict[str, object]:
        return dict(self.settings)


def without_video_support(kind: Any) -> Any:
    """Return a subclass of the processor class `kind` that accepts `UnreadVideos`."""

    def check(self: Any, name: str, value: object) -> object:
        if isinstance(value, UnreadVideos):
            return UnreadVideos
        return kind.check_argument_for_proper_class(self, name, value)

    names = {
        "check_argument_for_proper_class": check,
        "save_pretrained": transformers.ProcessorMixin.save_pretrained,  # ERNIE's requires a font
        "__module__": kind.__module__,
    }
    return type(kind.__name__, (kind,), names)
