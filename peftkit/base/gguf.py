"""GGUF files that are dequantised while loading, and their copies in the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from peftkit.base.build import forget_quantization, load_model
from peftkit.base.gguf_file import LazyTensor, open_gguf, parsed_once
from peftkit.base.locate import Location
from peftkit.base.pack import LoaderArguments, PackingConfig, PackingLoader
from peftkit.base.pretrained import load_tokenizer, published, quiet, without_quantization
from peftkit.base.purpose import CAUSAL_LM
from peftkit.base.request import BaseRequest, request_of
from peftkit.base.skeleton import on_meta
from peftkit.errors import OutputError
from peftkit.events import Listener, Notice, Progress, Stage, ignore
from peftkit.files.disk import alone, new_folder
from peftkit.settings import BaseConfig


class GGUFLoader(PackingLoader):
    """Packs, casts or keeps each parameter of a GGUF file, dequantised."""

    def arguments(self) -> LoaderArguments:
        """Return the arguments with which transformers loads the file's tensors."""
        request = self.request
        if (checkpoint := published(request.config)) is not None:
            self.on_event(
                Notice(
                    f"The weights are rounded twice: {checkpoint.description}, then "
                    f"{request.settings.quantize}. Set base.quantize: none to train over the "
                    "file's own blocks."
                )
            )
        bare = on_meta(request.config, request.purpose, torch.float32)
        with parsed_once(request.location):
            tensors, conversions = open_gguf(request.location.gguf_path, bare)
        kwargs = loading(request, tensors)
        return type(bare), None, kwargs | {"quantization_config": PackingConfig(self, conversions)}


def loading(request: BaseRequest, tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """Return the arguments to load a file's tensors without a cast; the loader casts them."""
    config = without_quantization(request.config)
    return {"state_dict": tensors, "config": config, "dtype": torch.float32}


def convert(location: Location, on_event: Listener) -> Location:
    """Convert a package's GGUF file into a folder in the cache; return its location.

    Raises:
        BaseError: The file cannot be read.
        OutputError: The cache cannot be written.
    """
    target = location.convert_to
    assert target is not None
    waiting = Notice(f"Another process is writing {target}; this one waits for it.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with alone(target, lambda: on_event(waiting)):
            if not target.exists():
                _convert_into(target, location, on_event)
    except OSError as error:
        raise OutputError(
            f"cannot write {target}.", found=str(error), fix="Set PEFTKIT_CACHE to another folder."
        ) from error
    return replace(location, source=str(target), gguf=None, convert_to=None)


def _convert_into(target: Path, location: Location, on_event: Listener) -> None:
    on_event(Stage(f"Converting {location.gguf} into {target} (once)"))
    doing = f"Converting {location.gguf}"
    settings = BaseConfig(model=location.name, dtype="fp32")
    with parsed_once(location):
        tokenizer = load_tokenizer(location, on_event)
        on_event(Progress(doing, 2, 4))
        request = request_of(settings, CAUSAL_LM, location, torch.device("cpu"))
        model, _ = load_model(request, GGUFLoader(request, on_event=ignore), on_event)
    on_event(Progress(doing, 3, 4))
    forget_quantization(model)
    with new_folder(target, last="config.json", replaced=lambda name: False) as folder:
        with quiet():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        mode = (
            (folder / "config.json").stat().st_mode
        )  # safetensors writes files that only their owner can read
        for path in folder.iterdir():
            path.chmod(mode)
    on_event(Progress(doing, 4, 4))
