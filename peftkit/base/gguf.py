"""The tensors of a GGUF file, each dequantised when it is read.

transformers dequantises the whole file in float32 before it puts anything into a model. Here its
loader is handed a mapping of names to tensors that are made when it reads them, by its own maps of
names and its own turning of tensors: the values are those that it would have loaded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import modeling_gguf_pytorch_utils as transformers_gguf

from peftkit.base.locate import Location

CHUNK = 1 << 22
"""Values that are dequantised at a time: their scratch takes several times their own memory."""


class LazyTensor:
    """A tensor that is made when it is indexed, `tensor[...]`, as transformers' loader does."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make

    def __getitem__(self, index: Any) -> Tensor:
        return self._make()[index]


def open_gguf(path: Path, model: nn.Module) -> tuple[dict[str, LazyTensor], list[Any] | None]:
    """Return the tensors of a GGUF file, in float32, none of them read yet.

    Args:
        model: What they are for, without data.

    Returns:
        Name to tensor, and what transformers is to make of them; None where the names are the
        model's own and it is to make of them what it makes of any checkpoint of this model.

    Raises:
        ValueError, KeyError, NotImplementedError: The file is damaged, or of an architecture or a
            kind of numbers that transformers or the package gguf do not know.
    """
    import gguf

    reader: Any = gguf.GGUFReader(path)
    field = reader.get_field("general.architecture")
    architecture = str(field.contents())
    config: Any = model.config
    if (conversions := _conversions(architecture, config)) is not None:
        return {t.name: LazyTensor(partial(_dequantised, t)) for t in reader.tensors}, conversions
    kind = transformers_gguf.TENSOR_PROCESSORS.get(architecture, transformers_gguf.TensorProcessor)
    processor = kind(config=config.to_dict())
    names = transformers_gguf.get_gguf_hf_weights_map(model, processor)
    parts: dict[str, list[Any]] = {}  # halves of stacked experts are tensors of their own
    for tensor in reader.tensors:
        name = names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight"))
        if name is not None:
            parts.setdefault(name, []).append(tensor)
    return {
        name: LazyTensor(partial(_processed, name, tensors, processor, names))
        for name, tensors in parts.items()
    }, None


@contextmanager
def parsed_once(location: Location) -> Iterator[None]:
    """Parse a base's GGUF file once for all its readers in this context.

    It takes seconds, and transformers parses the file for the config and again for the tokenizer.
    """
    if importlib.util.find_spec("gguf") is None:
        yield
        return
    import gguf

    module: Any = gguf
    plain, parsed = module.GGUFReader, {}

    def reader(path: Any, *more: Any) -> Any:
        if str(path) not in parsed:
            parsed[str(path)] = plain(path, *more)
        return parsed[str(path)]

    module.GGUFReader = reader
    try:
        yield
    finally:
        module.GGUFReader = plain


def _conversions(architecture: str, config: Any) -> list[Any] | None:
    """Return the conversions of an architecture that transformers loads tensor by tensor itself."""
    if importlib.util.find_spec("transformers.integrations.gguf") is None:  # before 5.2
        return None
    from transformers.integrations.gguf.utils import (
        get_gguf_conversion_mapping,
        is_gguf_arch_supported,
    )

    if not is_gguf_arch_supported(architecture):
        return None
    return list(get_gguf_conversion_mapping(architecture, config))


def _dequantised(tensor: Any) -> Tensor:
    """Return a reader's tensor in float32, in memory of its own."""
    from gguf.quants import dequantize

    shape = tuple(int(number) for number in reversed(tensor.shape))
    values = torch.empty(shape, dtype=torch.float32)
    rows, out = tensor.data.reshape(-1, tensor.data.shape[-1]), values.view(-1, shape[-1]).numpy()
    step = max(CHUNK // shape[-1], 1)
    for start in range(0, len(rows), step):
        out[start : start + step] = dequantize(rows[start : start + step], tensor.tensor_type)
    return values


def _processed(name: str, tensors: list[Any], processor: Any, names: dict[str, str]) -> Tensor:
    """Return the parameter that transformers' processor makes of a file's tensors."""
    parameters: dict[str, Tensor] = {}
    for tensor in tensors:
        result = processor.process(
            weights=_dequantised(tensor).numpy(),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": parameters},
        )
        if result.name in names:  # else it has put it there itself
            parameters[names[result.name]] = torch.from_numpy(result.weights).contiguous()
    return parameters[name]
