"""The loader of GGUF files whose weights stay in their blocks (base/gguf_file.py)."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer

from peftkit.base.gguf import loading
from peftkit.base.gguf_file import LazyTensor, blocks_of, parsed_once, source_of
from peftkit.base.pack import LoaderArguments, PackingLoader
from peftkit.base.published.codes import Codes
from peftkit.base.published.loader import CodesLoader, StoredConfig, StoredQuantizer
from peftkit.base.skeleton import on_meta
from peftkit.errors import BaseError
from peftkit.events import Notice

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
