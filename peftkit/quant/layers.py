"""Frozen weights in 4 and 8 bits (nf4, fp4, int8): how they are packed, and layers that use them.

All are weight-only: a layer dequantises its weight, then multiplies in the compute dtype. (int8 is
thus not LLM.int8(), whose activations are in 8 bits too.) Where memory is plentiful, dequantised
copies are kept for speed.

bitsandbytes does the packing. Its modules and its converter are not used: they skip subclasses of
nn.Linear and stacked experts without a word, and on CPUs with AVX512-BF16 they repack a weight in
place at the first evaluation, after which gradients are lost.

Shapes: `...` is any leading shape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList

from peftkit.errors import BaseError
from peftkit.kernels.block_scaled import KINDS
from peftkit.kernels.device import free_bytes
from peftkit.kernels.packed import (
    BLOCK,
    NESTED_BLOCK,
    PackedFormat,
    pack_4bit,
    pack_absmax,
    pack_int8,
    packed_linear,
    unpack,
    unpack_rows,
)
from peftkit.model.places import is_conv1d

COPY_SHARE = 0.25
"""`keep_copies` takes at most this share of the memory that is free."""


class Packing(nn.Module):
    """The format and the scales of a packed tensor. Calling it on the packed data unpacks.

    It also serves as torch's parametrization of a parameter. Scales are parameters that never
    train: as buffers they would be sent between ranks at every step. A cast of the model leaves
    them alone and changes `dtype`, in which the tensor comes out.

    Attributes:
        form: Kind, shape, block size.
        dtype: Compute dtype.
        unpacked: A dequantised copy kept for speed, or a `PackedStack` while experts are streamed,
            or None.
    """

    def __init__(self, form: PackedFormat, dtype: torch.dtype, scales: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.form, self.dtype = form, dtype
        self.unpacked: Any = None
        # the kind is in the name, so that a state dict of another kind does not load
        names = (f"absmax_{form.kind}", "nested_absmax", "nested_code", "nested_offset")
        if form.kind in KINDS:
            names = (f"scale_{form.kind}", "second", "third", "fourth")
        for name, scale in zip(names, scales, strict=False):
            self.register_parameter(name, nn.Parameter(scale, requires_grad=False))

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """Absmax; where that is itself quantised, also its absmax, code and offset."""
        return tuple(scale for scale in self._parameters.values() if scale is not None)

    def forward(self, packed: Tensor) -> Tensor:
        """Return the tensor in the compute dtype: the copy, or a new one."""
        if self.unpacked is not None:
            return self.unpacked
        return unpack(packed, self.scales, self.form, self.dtype)

    def num_bytes(self, packed: Tensor) -> int:
        """Return the bytes of the packed data and its scales."""
        return sum(t.numel() * t.element_size() for t in (packed, *self.scales))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Packing:
        device = self.scales[0].device if self.scales else None  # a block of GGUF has its own
        dtype = fn(torch.empty(0, dtype=self.dtype, device=device)).dtype
        super()._apply(lambda tensor: _moved(tensor, fn(tensor)), recurse)
        if dtype == self.dtype:
            self.unpacked = None if self.unpacked is None else fn(self.unpacked)
        else:  # the copy was rounded to the former dtype
            self.dtype, self.unpacked = dtype, None
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.unpacked = None
        super()._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        """Say the kind, the shape and the dtype."""
        double = ", double_quant" if "nested_absmax" in self._parameters else ""
        return f"{self.form.kind}{double}, {tuple(self.form.shape)}, {self.dtype}"


def _moved(before: Tensor, after: Tensor) -> Tensor:
    return after if after.dtype == before.dtype else before.to(after.device)


def packed_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, Packing]]:
    """Yield (path, packed data, packing) of every packed weight once."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        packing = next((m for m in module.children() if isinstance(m, Packing)), None)
        if packing is None or id(packing) in seen:  # of a head that is tied to the embedding
            continue
        seen.add(id(packing))
        if isinstance(module, ParametrizationList):
            yield path.replace("parametrizations.", ""), module.original, packing
        else:
            yield path, module.packed, packing


@contextmanager
def copies_kept(model: nn.Module, share: float) -> Iterator[None]:
    """Keep weights on a CPU unpacked within the context, which saves unpacking them for each token.

    Permanent copies stay.

    Args:
        share: Of the free memory; as many weights are unpacked as fit.
    """
    candidates = [
        (packed, packing)
        for _, packed, packing in packed_tensors(model)
        if packing.unpacked is None and packed.device.type == "cpu"
    ]
    bytes_left = share * (free_bytes() or 0) if candidates else 0.0
    copied: list[Packing] = []
    try:
        for packed, packing in candidates:
            bytes_left -= packing.form.shape.numel() * packing.dtype.itemsize
            if bytes_left < 0:
                break
            packing.unpacked = packing(packed)
            copied.append(packing)
        yield
    finally:
        for packing in copied:
            packing.unpacked = None


def keep_copies(model: nn.Module, max_bytes: int | None = None) -> int:
    """Keep a dequantised copy of every quantised weight if all of them fit; else of none.

    Where memory is plentiful a quantised base is then as fast as an unquantised one.

    Args:
        max_bytes: By default a quarter (COPY_SHARE) of the free memory.

    Returns:
        Bytes of the copies.
    """
    if max_bytes is None:
        max_bytes = int(COPY_SHARE * (free_bytes() or 0))
    tensors = list(packed_tensors(model))
    total = sum(p.form.shape.numel() * p.dtype.itemsize for _, _, p in tensors)
    fits = total <= max_bytes
    for _, packed, packing in tensors:
        packing.unpacked = None
        packing.unpacked = packing(packed) if fits else None
    return total if fits else 0


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _is_relevant(record: logging.LogRecord) -> bool:
    return "kernels-community" not in str(record.msg)


# On some CPUs bitsandbytes warns about missing kernels that are not used here. It does so when it
# is imported, whoever imports it first (peft and accelerate do), so the filter is set now.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_relevant)


@cache
def import_bitsandbytes() -> ModuleType:
    """Import bitsandbytes, which registers its operators."""
    import bitsandbytes

    return bitsandbytes


def pack(
    tensor: Tensor, kind: str, *, double_quant: bool = True, dtype: torch.dtype | None = None
) -> tuple[Tensor, Packing]:
    """Quantise a tensor of two or more dimensions.

    Args:
        tensor: Finite, 16 to 64 bits.
        kind: "nf4", "fp4" or "int8".
        double_quant: Quantise the scales of the 4-bit kinds as well.
        dtype: Compute dtype; by default the tensor's own.

    Returns:
        The packed data and its packing.

    Raises:
        ValueError: A value is not finite, or the dtype is of fewer bits.
    """
    if tensor.dtype not in FLOATS:
        raise ValueError(f"its dtype is {tensor.dtype}")
    if not all(torch.isfinite(extreme) for extreme in tensor.aminmax()):  # NaN is both
        raise ValueError("it holds NaN or Infinity")
    source = tensor.detach().float() if tensor.dtype == torch.float64 else tensor.detach()
    scales: tuple[Tensor, ...]
    if kind == "int8":
        packed, scale = pack_int8(source)
        scales = (scale,)
    else:
        code = import_bitsandbytes().functional.create_dynamic_map()
        packed, absmax = pack_4bit(source, kind)
        scales = pack_absmax(absmax, code.to(absmax.device)) if double_quant else (absmax,)
    return packed, Packing(PackedFormat(kind, tensor.shape), dtype or tensor.dtype, scales)


def empty_packed(
    shape: torch.Size, kind: str, dtype: torch.dtype, *, double_quant: bool = True
) -> tuple[Tensor, Packing]:
    """Return what `pack` returns for a tensor of this shape, without values.

    On the default device; under FakeTensorMode, to count the bytes of a packed weight.
    """
    number = shape.numel()
    scales: tuple[Tensor, ...]
    if kind == "int8":
        scales = (torch.empty(*shape[:-1], 1, dtype=torch.float32),)
        return torch.empty(shape, dtype=torch.int8), Packing(
            PackedFormat(kind, shape), dtype, scales
        )
    import_bitsandbytes()  # its operators, which read it
    blocks = -(-number // BLOCK)
    packed = torch.empty(blocks * BLOCK // 2, 1, dtype=torch.uint8)
    if not double_quant:
        scales = (torch.empty(blocks, dtype=torch.float32),)
    else:
        nested = torch.empty(-(-blocks // NESTED_BLOCK), dtype=torch.float32)
        code, offset = torch.empty(256, dtype=torch.float32), torch.empty((), dtype=torch.float32)
        scales = (torch.empty(blocks, dtype=torch.uint8), nested, code, offset)
    return packed, Packing(PackedFormat(kind, shape), dtype, scales)


class QuantizedLinear(nn.Module):
    """A frozen linear layer with its weight in 4 or 8 bits.

    Maps (..., in_features) to (..., out_features) as nn.Linear does with the dequantised weight,
    under autocast too. For the backward pass only the packed weight is kept.

    Attributes:
        packed, packing: The weight's bits, and their format.
        bias: Frozen, in its original dtype; or None.
    """

    bias: Tensor | None

    def __init__(self, packed: Tensor, packing: Packing, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = packing.form.shape
        self.packed = _as_parameter(packed)
        self.packing = packing
        frozen = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", frozen)

    @property
    def kind(self) -> str:
        return self.packing.form.kind

    @property
    def weight(self) -> Tensor:
        """The weight (out, in), dequantised at each access unless a copy is kept."""
        return self.packing(self.packed)

    def forward(self, x: Tensor) -> Tensor:
        packing, device = self.packing, x.device.type
        if packing.unpacked is not None:
            return functional.linear(x, packing.unpacked, self.bias)
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else packing.dtype
        return packed_linear(x, self.bias, self.packed, packing.scales, packing.form, dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class QuantizedEmbedding(nn.Embedding):
    """A frozen embedding with its rows in 4 or 8 bits; only the looked-up rows are unpacked.

    Attributes:
        packed, packing: The rows' bits, and their format.
        scale: Factor of the rows that are looked up.
    """

    def __init__(
        self, packed: Tensor, packing: Packing, padding_idx: int | None = None, scale: float = 1.0
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = packing.form.shape
        self.padding_idx, self.max_norm, self.sparse = padding_idx, None, False
        self.packed = _as_parameter(packed)
        self.packing, self.scale = packing, scale

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """All rows, dequantised at each access; without the factor."""
        return self.packing(self.packed)

    def forward(self, input: Tensor) -> Tensor:
        packing = self.packing
        if packing.unpacked is not None:
            rows = functional.embedding(input, packing.unpacked)
        else:
            rows = unpack_rows(self.packed, packing.scales, packing.form, packing.dtype, input)
        return rows if self.scale == 1.0 else rows * self.scale


def _as_parameter(packed: Tensor) -> nn.Parameter:
    """Return packed data as a parameter; a tied parameter stays the same object."""
    if isinstance(packed, nn.Parameter):
        return packed
    return nn.Parameter(packed, requires_grad=False)


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight (out_features, in_features) of any linear layer, dequantised if need be.

    Raises:
        BaseError: bitsandbytes has repacked the weight, which can no longer be read.
    """
    if is_foreign(module):
        return adopted("", module, None).weight
    weight = cast(Tensor, module.weight)
    return weight.t() if is_conv1d(module) else weight


def frozen_weight(module: nn.Module) -> Tensor | None:
    """Return the unpacked weight (out, in) of a plain linear layer, without making a copy.

    None for a weight that is packed without a copy, and for a layer that may do more than multiply.
    """
    if isinstance(module, QuantizedLinear):
        return module.packing.unpacked
    if type(module) is nn.Linear or type(module).__name__ == "Conv1D":
        weight = weight_of(module)
        return weight.detach() if weight.is_floating_point() else None
    return None


def is_quantized(module: nn.Module) -> bool:
    """Return whether the weight of a linear layer is in 4 or 8 bits."""
    packed = isinstance(module, QuantizedLinear) or parametrize.is_parametrized(module, "weight")
    return packed or is_foreign(module)


def is_foreign(module: nn.Module) -> bool:
    """Return whether this is a layer of bitsandbytes with a quantised weight."""
    if not type(module).__module__.startswith("bitsandbytes."):
        return False
    weight: Any = module._parameters.get("weight")
    return getattr(weight, "quant_state", None) is not None or (
        weight is not None and weight.dtype == torch.int8
    )


def adopted(path: str, module: nn.Module, dtype: torch.dtype | None) -> QuantizedLinear:
    """Return our layer over the packed data of a layer of bitsandbytes.

    Raises:
        BaseError: bitsandbytes has repacked the weight, which can no longer be read.
    """
    weight: Any = module.weight
    state: Any = getattr(weight, "quant_state", None)
    bias = cast("Tensor | None", module.bias)
    if state is None:  # Linear8bitLt keeps its scales here before the first forward, there after it
        later: Any = module.state
        scale = weight.SCB if weight.SCB is not None else later.SCB
        values = weight.data if weight.CB is None else weight.CB
        form = PackedFormat("int8", values.shape)
        packing = Packing(form, dtype or torch.float16, (scale.float()[:, None] / 127,))
        return QuantizedLinear(values, packing, bias)
    nested = (state.state2.absmax, state.state2.code, state.offset) if state.nested else ()
    if getattr(state, "packing_format_for_cpu", False) or (
        state.nested and state.state2.blocksize != NESTED_BLOCK
    ):
        raise BaseError(
            f"cannot read the 4-bit weight of {path or type(module).__name__}.",
            found="bitsandbytes has repacked it in place for its CPU kernel.",
            fix="Load the model again, and quantise it before it is used.",
        )
    form = PackedFormat(state.quant_type, torch.Size(state.shape), state.blocksize)
    packing = Packing(form, dtype or state.dtype, (state.absmax, *nested))
    return QuantizedLinear(weight.data.reshape(-1).view(torch.uint8)[:, None], packing, bias)
