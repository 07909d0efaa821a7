"""The tensors of a GGUF file, by the names of a model's parameters.

transformers dequantises the whole file to float32 before it fills a model. Here its loader gets a
mapping from names to tensors that are dequantised one by one when they are read, or that stay in
the file's blocks. transformers' code converts names and layouts, so the values are the same.

Blocks run along a row, so permutations of whole rows, such as llama.cpp's order of the rows of q
and k, are applied to bytes. To find the permutation, transformers' conversion runs on the row
numbers instead of the weight. Weights whose columns move are dequantised, as are unsupported block
types.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import transformers
from torch import Tensor, nn
from transformers import modeling_gguf_pytorch_utils as transformers_gguf

from peftkit.base.locate import Location
from peftkit.files.strict_json import Json
from peftkit.kernels.gguf_blocks import TYPES
from peftkit.kernels.packed import PackedFormat
from peftkit.model.places import is_conv1d

CHUNK = 1 << 22
"""Values dequantised at a time: scratch memory is several times the size of the values."""
_KINDS = {block.number: kind for kind, block in TYPES.items()}


class LazyTensor:
    """A tensor that is computed when transformers' loader indexes it (`tensor[...]`)."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make

    def __getitem__(self, index: Any) -> Tensor:
        return self._make()[index]


@dataclass(frozen=True, slots=True)
class Source:
    """Assignment of a GGUF file's tensors to the parameters of a model.

    Attributes:
        parts: Parameter name to tensors in the file; gate and up of stacked experts are two.
        processor: transformers' converter of a tensor's layout.
        names: Tensor name to parameter name.
        conversions: transformers' conversions by names in the file; if set, `parts` has these names
            and there is no processor.
    """

    parts: dict[str, list[Any]]
    processor: Any
    names: dict[str, str]
    conversions: list[Any] | None = None

    def dequantised(self, name: str) -> LazyTensor:
        """Return a parameter in float32, computed when it is read."""
        if self.conversions is not None:
            return LazyTensor(partial(_dequantised, *self.parts[name]))
        more = (self.parts[name], self.processor, self.names)
        return LazyTensor(partial(_processed, name, *more))


def open_gguf(path: Path, model: nn.Module) -> tuple[dict[str, LazyTensor], list[object] | None]:
    """Return the lazy float32 tensors of a GGUF file.

    Args:
        model: The model without data.

    Returns:
        The tensors by name, and their conversions. The conversions are None if names are the
        model's and transformers applies its usual conversions.

    Raises:
        ValueError, KeyError, NotImplementedError: The file is damaged, or transformers or the
            package gguf does not support its architecture or its types.
    """
    source = source_of(path, model)
    return {name: source.dequantised(name) for name in source.parts}, source.conversions


def source_of(path: Path, model: nn.Module) -> Source:
    """Return the assignment of a GGUF file's tensors to parameters; see `open_gguf`."""
    import gguf

    reader: Any = gguf.GGUFReader(path)
    field = reader.get_field("general.architecture")
    architecture = str(field.contents())
    config: Any = model.config
    if (conversions := _conversions(architecture, config)) is not None:
        return Source({t.name: [t] for t in reader.tensors}, None, {}, conversions)
    kind = transformers_gguf.TENSOR_PROCESSORS.get(architecture, transformers_gguf.TensorProcessor)
    processor = kind(config=config.to_dict())
    names = transformers_gguf.get_gguf_hf_weights_map(model, processor)
    parts: dict[str, list[Any]] = {}
    for tensor in reader.tensors:
        name = names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight"))
        if name is not None:
            parts.setdefault(name, []).append(tensor)
    return Source(parts, processor, names)


class Blocks(NamedTuple):
    """A weight of a GGUF file in blocks.

    Attributes:
        form: Packed format with the shape (..., out, in).
        tensors: Tensors of the file; gate and up of stacked experts are two.
        order: Permutation of the file's rows in the model; None if it is the identity.
    """

    form: PackedFormat
    tensors: tuple[Any, ...]
    order: Tensor | None

    def read(self) -> Tensor:
        """Return the bytes (..., out, bytes of a row): pages of the file, or a permuted copy.

        The model never writes to the pages, so all processes that map the file share them.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            parts = [torch.from_numpy(t.data.view(numpy.ndarray)) for t in self.tensors]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return rows if self.order is None else rows[self.order]

    def parts_of(self, weight: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Yield each tensor of the file with its rows (n, in) of the weight (..., out, in)."""
        rows = weight
        if self.order is not None:
            rows = torch.empty_like(weight).index_copy_(0, self.order, weight)
        at = 0
        for tensor in self.tensors:
            size = int(tensor.data.shape[-2])
            yield tensor, rows.narrow(-2, at, size).reshape(-1, rows.shape[-1])
            at += size

    @property
    def can_be_written(self) -> bool:
        """Whether the package gguf can quantise to the type (it can dequantise all of them)."""
        try:
            quantized(torch.zeros(1, TYPES[self.form.kind].values), self.tensors[0])
        except NotImplementedError:
            return False
        return True


def settings_of(location: Location, config: object, auto_class: str) -> Json | None:
    """Return the `quantization_config` of a GGUF file, or None if it has no blocks.

    Its entry `types` maps the names of parameters that stay in blocks to their kinds.

    Raises:
        ValueError, KeyError, NotImplementedError: As `open_gguf`.
    """
    path = location.gguf_path
    with parsed_once(location), torch.device("meta"):
        model = getattr(transformers, auto_class).from_config(copy.deepcopy(config))
        stat = path.stat()
        types = _types(path, (stat.st_size, stat.st_mtime_ns), _Shapes(model))
    return {"quant_method": "gguf", "types": types} if types else None


class _Shapes:
    """A model without weights, compared by the names and shapes of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._key = tuple((name, tuple(p.shape)) for name, p in model.named_parameters())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shapes) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=4)
def _types(path: Path, version: tuple[int, int], shapes: _Shapes) -> dict[str, str]:
    """Return the kinds of a file's weights that stay in blocks; `version` is (size, mtime)."""
    blocks = blocks_of(source_of(path, shapes.model), shapes.model)
    return {name: weight.form.kind for name, weight in blocks.items()}


def blocks_of(source: Source, model: nn.Module) -> dict[str, Blocks]:
    """Return the parameters of a model that can stay in the blocks of a GGUF file."""
    if source.conversions is not None:  # they apply to float tensors only
        return {}
    packable = nn.Linear, nn.Embedding
    parameters = dict(model.named_parameters(remove_duplicate=False))
    blocks = {}
    for name, tensors in source.parts.items():
        parameter = parameters.get(name)
        owner = model.get_submodule(name.rpartition(".")[0])
        is_stack = parameter is not None and parameter.dim() == 3
        stores_columns = is_conv1d(owner)  # (in, out)
        is_matrix = isinstance(owner, packable) or stores_columns
        if parameter is None or not (is_stack or is_matrix):
            continue
        kinds = {_KINDS.get(int(tensor.tensor_type)) for tensor in tensors}
        kind = kinds.pop()
        if kind is None or kinds:  # floats, an unsupported type, or two types
            continue
        if is_stack:
            weight = _stack(kind, tensors, source, parameter.shape)
        else:
            shape = parameter.shape[::-1] if stores_columns else parameter.shape
            weight = _matrix(kind, tensors, source, shape, stores_columns)
        if weight is not None:
            blocks[name] = weight
    return blocks


def _stack(kind: str, tensors: list[Any], source: Source, shape: torch.Size) -> Blocks | None:
    """Return stacked experts (E, out, in), gate before up; None for any other row order."""
    if not isinstance(source.processor, transformers_gguf.Qwen2MoeTensorProcessor):
        return None
    rows, width = sum(t.data.shape[-2] for t in tensors), int(tensors[0].shape[0])
    if any(t.data.ndim != 3 for t in tensors) or (len(tensors[0].data), rows, width) != shape:
        return None
    ordered = sorted(tensors, key=lambda tensor: "_up_" in tensor.name)
    return Blocks(PackedFormat(kind, torch.Size(shape), TYPES[kind].values), tuple(ordered), None)


def _matrix(
    kind: str, tensors: list[Any], source: Source, shape: tuple[int, ...], stores_columns: bool
) -> Blocks | None:
    """Return a matrix (out, in) whose rows are a permutation of the file's; else None."""
    if len(tensors) > 1 or len(shape) != 2 or tensors[0].data.ndim != 2:
        return None
    (tensor,) = tensors
    rows, width = len(tensor.data), int(tensor.shape[0])
    numbers = numpy.arange(rows, dtype=numpy.int64)[:, None]
    try:
        moved = source.processor.process(
            weights=numbers, name=tensor.name, tensor_key_mapping=source.names, parsed_parameters={}
        ).weights
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    if stores_columns:
        moved = moved.T
    if moved.shape != numbers.shape or (rows, width) != tuple(shape):
        return None
    order = None if (moved == numbers).all() else torch.from_numpy(moved[:, 0].copy())
    form = PackedFormat(kind, torch.Size((rows, width)), TYPES[kind].values)
    return Blocks(form, (tensor,), order)


@contextmanager
def parsed_once(location: Location) -> Iterator[None]:
    """Cache the parsed GGUF file of a base and its map of names within the context.

    transformers parses the file for the config and again for the tokenizer, and builds the map of
    names for each module. Within the context it uses peftkit's reader of arrays (gguf_reader.py).

    Raises:
        BaseError: The file is truncated, or its header does not match its data.
    """
    if importlib.util.find_spec("gguf") is None or not location.gguf:
        yield
        return
    import gguf

    from peftkit.base.gguf_reader import fast_reading

    if hasattr(gguf.get_tensor_name_map, "cache_clear"):  # within another context
        yield
        return
    with fast_reading() as open_reader:
        open_reader(location.gguf_path)
        yield


def _conversions(architecture: str, config: object) -> list[object] | None:
    """Return transformers' conversions of an architecture that it loads tensor by tensor."""
    if importlib.util.find_spec("transformers.integrations.gguf") is None:  # before 5.2
        return None
    from transformers.integrations.gguf.utils import (
        get_gguf_conversion_mapping,
        is_gguf_arch_supported,
    )

    if not is_gguf_arch_supported(architecture):
        return None
    return list(get_gguf_conversion_mapping(architecture, config))


def quantized(rows: Tensor, tensor: Any) -> Tensor:
    """Quantise rows (n, in) to the type of a reader's tensor: (n, bytes of a row)."""
    from gguf.quants import quantize

    step = max(CHUNK // rows.shape[-1], 1)
    kind = tensor.tensor_type
    return torch.cat([torch.from_numpy(quantize(some.numpy(), kind)) for some in rows.split(step)])


def _dequantised(tensor: Any) -> Tensor:
    """Return a reader's tensor in float32, in new memory."""
    from gguf.quants import dequantize

    shape = tuple(int(number) for number in reversed(tensor.shape))
    values = torch.empty(shape, dtype=torch.float32)
    rows, out = tensor.data.reshape(-1, tensor.data.shape[-1]), values.view(-1, shape[-1]).numpy()
    step = max(CHUNK // shape[-1], 1)
    for start in range(0, len(rows), step):
        out[start : start + step] = dequantize(rows[start : start + step], tensor.tensor_type)
    return values


def _processed(name: str, tensors: list[Any], processor: Any, names: dict[str, str]) -> Tensor:
    """Return the parameter that transformers' processor builds from a file's tensors."""
    parameters: dict[str, Tensor] = {}
    for tensor in tensors:
        result = processor.process(
            weights=_dequantised(tensor).numpy(),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": parameters},
        )
        if result.name in names:  # otherwise the processor has stored the parameter itself
            parameters[names[result.name]] = torch.from_numpy(result.weights).contiguous()
    return parameters[name]
