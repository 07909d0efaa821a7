"""Loaders of GGUF files, dequantised or in their blocks, and copies of them in the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer

from peftkit.base.build import forget_quantization, load_model
from peftkit.base.gguf_file import LazyTensor, blocks_of, open_gguf, parsed_once, source_of
from peftkit.base.locate import Location
from peftkit.base.pack import LoaderArguments, PackingConfig, PackingLoader
from peftkit.base.pretrained import load_tokenizer, published, quiet, without_quantization
from peftkit.base.published.codes import Codes
from peftkit.base.published.loader import CodesLoader, StoredConfig, StoredQuantizer
from peftkit.base.purpose import CAUSAL_LM
from peftkit.base.request import BaseRequest, request_of
from peftkit.base.skeleton import on_meta
from peftkit.errors import BaseError, OutputError
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
        # safetensors writes files that only their owner can read
        mode = (folder / "config.json").stat().st_mode
        for path in folder.iterdir():
            path.chmod(mode)
    on_event(Progress(doing, 4, 4))


METHOD = "peftkit_gguf_blocks"
_FLOATS = ("F64", "F32", "F16", "BF16")


class BlocksLoader(CodesLoader):
    """Keeps the blocks of a GGUF file, and casts its other tensors."""

    reads_tables: ClassVar[bool] = True

    def arguments(self) -> LoaderArguments:
        """Return the arguments with which transformers loads the file's tensors."""
        request, path = self.request, self.request.location.gguf_path
        bare = on_meta(request.config, request.purpose, torch.float32)
        self._version = path.stat()
        with parsed_once(request.location):
            source = source_of(path, bare)
            self._blocks = blocks_of(source, bare)
        tensors = {
            name: LazyTensor(self._blocks[name].read)
            if name in self._blocks
            else source.dequantised(name)
            for name in source.parts
        }
        self._others = Counter(
            tensor.tensor_type.name
            for name, parts in source.parts.items()
            for tensor in parts
            if name not in self._blocks and tensor.tensor_type.name not in _FLOATS
        )
        kwargs = loading(request, tensors)
        return type(bare), None, kwargs | {"quantization_config": BlocksConfig(self)}

    def take(self, name: str, value: Tensor) -> Tensor:
        """Return the model's parameter for a tensor of the file: blocks stay blocks."""
        if (blocks := self._blocks.pop(name, None)) is not None:
            return self.take_codes(name, Codes(value, blocks.form, ()))
        return super().take(name, value)

    def install(self, model: nn.Module) -> None:
        """Let the loaded model compute with its blocks; emit a notice about dequantised weights.

        Raises:
            BaseError: The file changed while it was read; also as `PackingLoader.install`.
        """
        path = self.request.location.gguf_path
        stat = path.stat()
        if (stat.st_size, stat.st_mtime_ns) != (self._version.st_size, self._version.st_mtime_ns):
            raise BaseError(
                f"{path} changed while it was read.",
                found=f"{self._version.st_size} bytes before, {stat.st_size} now.",
                fix="Load it again when no process writes to it.",
            )
        PackingLoader.install(self, model)
        kept = sum(self._others.values()) + len(self.dequantised)
        if kept:
            types = ", ".join(self._others) or "rows or columns in another order"
            self.on_event(Notice(f"{kept} quantised weights are kept dequantised: {types}."))


@register_quantization_config(METHOD)
class BlocksConfig(StoredConfig):
    """Carries a `BlocksLoader` through transformers' loader."""

    method = METHOD


@register_quantizer(METHOD)
class BlocksQuantizer(StoredQuantizer):
    """Hands blocks to the `BlocksLoader` as bytes."""
