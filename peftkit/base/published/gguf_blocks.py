"""The loader of GGUF files whose weights stay in their blocks (base/gguf_file.py)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer

from peftkit.base.gguf import loading
from peftkit.base.gguf_file import LazyTensor, blocks_of, parsed_once, source_of
from peftkit.base.pack import (
    LoaderArguments,
    PackingConfig,
    PackingLoader,
    PackingQuantizer,
    as_tied,
)
from peftkit.base.published.codes import Codes
from peftkit.base.published.loader import CodesLoader
from peftkit.base.skeleton import on_meta
from peftkit.errors import BaseError
from peftkit.events import Notice
from peftkit.quant.quantize import weights_to_pack

METHOD = "peftkit_gguf_blocks"
_FLOATS = ("F64", "F32", "F16", "BF16")


class BlocksLoader(CodesLoader):
    """Keeps the blocks of a GGUF file, and casts its other tensors."""

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

    def _find_jobs(self, model: Any) -> None:
        with as_tied(model):
            jobs = weights_to_pack(self.request.settings, model, self._head, tables=True)
        self._jobs = {f"{job[0]}.{job[2]}": (job, kind) for job, kind in jobs.items()}

    def take(self, name: str, value: Tensor) -> Tensor:
        """Return the model's parameter for a tensor of the file: blocks stay blocks."""
        if (blocks := self._blocks.pop(name, None)) is not None:
            return self.take_codes(name, Codes(value, blocks.form, ()))
        return super().take(name, value)

    def install(self, model: nn.Module) -> None:
        """Let the loaded model compute with its blocks; tell which weights were dequantised.

        Raises:
            BaseError: The file changed while it was read; or as `PackingLoader.install`.
        """
        path = self.request.location.gguf_path
        stat = path.stat()
        if (stat.st_size, stat.st_mtime_ns) != (self._version.st_size, self._version.st_mtime_ns):
            raise BaseError(
                f"{path} changed while it was read.",
                found=f"{self._version.st_size} bytes before, {stat.st_size} now.",
                fix="Load it again when nothing writes to it.",
            )
        PackingLoader.install(self, model)
        kept = sum(self._others.values()) + len(self.dequantised)
        if kept:
            types = ", ".join(self._others) or "rows or columns in another order"
            self.on_event(Notice(f"{kept} quantised weights are kept dequantised: {types}."))


@register_quantization_config(METHOD)
class BlocksConfig(PackingConfig):
    """Carries a `BlocksLoader` through transformers' loader."""

    method = METHOD
    dequantize = True
    """To transformers: nothing of the files' quantisation is left in the model."""


@register_quantizer(METHOD)
class BlocksQuantizer(PackingQuantizer):
    """Hands blocks to the `BlocksLoader` as bytes, which transformers would cast otherwise."""

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = True

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> None:
        """Read tensors as they are, and hand them to the loader.

        transformers calls this, and not `param_needs_quantization`, for files that are quantised.
        """
        converter.quantization_operation = self.get_quantize_ops()
