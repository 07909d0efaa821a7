"""The processor of a model that reads images and text: a tokenizer and an image processor in one.

transformers' classes for it also want a processor of videos, which needs torchvision. Where that
is missing, images do without: the class is made with no videos.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import transformers
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils.hub import PushToHubMixin

from peftkit.base.locate import Location
from peftkit.base.pretrained import explained, load_config, loader_arguments, quiet
from peftkit.errors import BaseError


def load_multimodal(location: Location, revision: str | None) -> Any:
    """Load the processor of a model of images and text.

    Raises:
        BaseError: There is none, it cannot be read, or it reads no images.
    """
    where = loader_arguments(location, revision)
    asked = "the processor of "
    with quiet(), explained(location, asked):
        if importlib.util.find_spec("torchvision") is None:
            made = _without_videos(location, where)
        else:
            made = transformers.AutoProcessor.from_pretrained(location.source, **where)
    if not (hasattr(made, "tokenizer") and hasattr(made, "image_processor")):
        raise BaseError(
            f"cannot load {asked}{location.name}.",
            found=f"What is there, {type(made).__name__}, is not one of images and text.",
            fix="Put the base's processor_config.json and preprocessor_config.json beside it.",
        )
    return made


def _without_videos(location: Location, where: dict[str, Any]) -> Any:
    config = load_config(location, where.get("revision"))
    kind: Any = PROCESSOR_MAPPING.get(type(config), None)
    if kind is None or "video_processor" not in getattr(kind, "get_attributes", list)():
        return transformers.AutoProcessor.from_pretrained(location.source, **where)
    told, _ = kind.get_processor_dict(location.source, **where)
    loaders: dict[str, Any] = {
        "tokenizer": transformers.AutoTokenizer,
        "image_processor": transformers.AutoImageProcessor,
        "feature_extractor": transformers.AutoFeatureExtractor,
    }
    videos = told.get("video_processor")
    stand_in = UnreadVideos(videos if isinstance(videos, dict) else {})
    parts = [
        loaders[name].from_pretrained(location.source, **where) if name in loaders else stand_in
        for name in kind.get_attributes()
    ]
    return blind_to_videos(kind).from_args_and_dict(parts, told)


class UnreadVideos(PushToHubMixin):
    """Stands in a processor for the part that reads videos; keeps its settings to save again."""

    _auto_class = None

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as they were found."""
        return dict(self.settings)


def blind_to_videos(kind: Any) -> Any:
    """Return a class of processors like `kind` that takes `UnreadVideos`."""

    def check(self: Any, name: str, part: object) -> object:
        if isinstance(part, UnreadVideos):
            return UnreadVideos
        return kind.check_argument_for_proper_class(self, name, part)

    names = {
        "check_argument_for_proper_class": check,
        "save_pretrained": transformers.ProcessorMixin.save_pretrained,  # ERNIE's asks for a font
        "__module__": kind.__module__,
    }
    return type(kind.__name__, (kind,), names)
