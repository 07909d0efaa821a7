"""Frozen weights in 4 and 8 bits (nf4, fp4, int8): the packed formats, and the linear layer.

All formats are weight-only: a layer dequantises its weight, then multiplies in the compute dtype.
int8 is therefore not LLM.int8(), which quantises activations too. If memory is plentiful,
dequantised copies are kept for speed (`keep_copies`).

bitsandbytes provides the packing. Its modules and its converter are not used: they silently skip
subclasses of nn.Linear and stacked experts, and on CPUs with AVX512-BF16 they repack a weight in
place at the first evaluation, after which gradients are lost.

Shapes: `...` is any leading shape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import ParametrizationList

from peftkit.kernels.block_scaled import KINDS
from peftkit.kernels.device import free_bytes
from peftkit.kernels.packed import (
    BLOCK,
    NESTED_BLOCK,
    PackedFormat,
    PackedWeight,
    pack_4bit,
    pack_absmax,
    pack_int8,
    packed_linear,
    unpack,
)


class Packing(nn.Module):
    """The format and the scales of a packed tensor. Calling it on the packed data unpacks.

    It can also be torch's parametrization of a parameter. Scales are frozen parameters, because
    buffers would be broadcast between ranks at every step. A cast of the model does not change
    scales, only `dtype`, the dtype of the unpacked tensor.

    Attributes:
        form: Kind, shape, block size.
        dtype: Compute dtype.
        unpacked: A dequantised copy for speed, a `PackedStack` while experts are streamed, or None.
    """

    def __init__(self, form: PackedFormat, dtype: torch.dtype, scales: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.form, self.dtype = form, dtype
        self.unpacked: Any = None
        # a state dict of another kind does not load, because the kind is part of the name
        names = (f"absmax_{form.kind}", "nested_absmax", "nested_code", "nested_offset")
        if form.kind in KINDS:
            names = (f"scale_{form.kind}", "second", "third", "fourth")
        for name, scale in zip(names, scales, strict=False):
            self.register_parameter(name, nn.Parameter(scale, requires_grad=False))

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """Absmax; with double quantisation also the absmax, code and offset of absmax."""
        return tuple(scale for scale in self._parameters.values() if scale is not None)

    def weight(self, packed: Tensor) -> PackedWeight:
        """Return packed data with its scales and format."""
        return PackedWeight(packed, self.scales, self.form)

    def forward(self, packed: Tensor) -> Tensor:
        """Return the tensor in the compute dtype: the copy, or a new one."""
        if self.unpacked is not None:
            return self.unpacked
        return unpack(self.weight(packed), self.dtype)

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of an unpacked copy."""
        return self.form.shape.numel() * self.dtype.itemsize

    def num_bytes(self, packed: Tensor) -> int:
        """Return the bytes of the packed data and its scales."""
        return sum(t.numel() * t.element_size() for t in (packed, *self.scales))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Packing:
        def moved(tensor: Tensor) -> Tensor:
            """Move a tensor without a cast."""
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        device = self.scales[0].device if self.scales else None  # GGUF blocks hold their scales
        dtype = fn(torch.empty(0, dtype=self.dtype, device=device)).dtype
        super()._apply(moved, recurse)
        if dtype == self.dtype:
            self.unpacked = None if self.unpacked is None else fn(self.unpacked)
        else:  # the copy was rounded to the previous dtype
            self.dtype, self.unpacked = dtype, None
        return self

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        self.unpacked = None
        super()._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        double = ", double_quant" if "nested_absmax" in self._parameters else ""
        return f"{self.form.kind}{double}, {tuple(self.form.shape)}, {self.dtype}"


def packed_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, Packing]]:
    """Yield (path, packed data, packing) of every packed weight, without duplicates."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        packing = next((m for m in module.children() if isinstance(m, Packing)), None)
        if packing is None or id(packing) in seen:  # seen: a head that is tied to the embedding
            continue
        seen.add(id(packing))
        if isinstance(module, ParametrizationList):
            yield path.replace("parametrizations.", ""), module.original, packing
        else:
            yield path, module.packed, packing


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# On some CPUs bitsandbytes warns, when it is imported, about missing kernels that peftkit does not
# use. peft and accelerate also import it, so the filter is set early.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "kernels-community" not in str(record.msg)
)


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
        dtype: Compute dtype; by default the tensor's dtype.

    Returns:
        The packed data and its packing.

    Raises:
        ValueError: A value is not finite, or the dtype has fewer than 16 bits.
    """
    if tensor.dtype not in FLOATS:
        raise ValueError(f"its dtype is {tensor.dtype}")
    if not all(torch.isfinite(extreme) for extreme in tensor.aminmax()):  # NaN propagates
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
    """Return the packed data and the packing for a tensor of this shape, without values.

    On the default device; under FakeTensorMode, to count the bytes of a packed weight.
    """
    scales: tuple[Tensor, ...]
    if kind == "int8":
        scales = (torch.empty(*shape[:-1], 1, dtype=torch.float32),)
        return torch.empty(shape, dtype=torch.int8), Packing(
            PackedFormat(kind, shape), dtype, scales
        )
    import_bitsandbytes()  # registers the operators that read the packed data
    blocks = -(-shape.numel() // BLOCK)
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

    Maps (..., in_features) to (..., out_features) like nn.Linear with the dequantised weight, also
    under autocast. Only the packed weight is saved for the backward pass.

    Attributes:
        packed, packing: The weight's bits, and their format.
        bias: Frozen bias in its original dtype, or None.
    """

    bias: Tensor | None

    def __init__(self, packed: Tensor, packing: Packing, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = packing.form.shape
        self.packed = frozen_parameter(packed)
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
        return packed_linear(x, self.bias, packing.weight(self.packed), dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def frozen_parameter(packed: Tensor) -> nn.Parameter:
    """Return packed data as a parameter; a tied parameter stays the same object."""
    if isinstance(packed, nn.Parameter):
        return packed
    return nn.Parameter(packed, requires_grad=False)


Job = tuple[str, nn.Module, str]
"""Module path, module, name of the parameter."""


COPY_SHARE = 0.25
"""Maximum share of the free memory that `keep_copies` uses."""


@contextmanager
def copies_kept(model: nn.Module, max_bytes: float) -> Iterator[Callable[[], bool]]:
    """Keep unpacked copies of weights within the context, for fast generation.

    Permanent copies stay. On a GPU, nf4 and fp4 are unpacked: an H100 generated 310 tokens/s for 8
    rows and 1,700 for 64 with an 8B in nf4, and 540 and 2,570 in bf16. Other kinds have products of
    their own for few rows.

    Args:
        max_bytes: As many weights are unpacked as fit.

    Yields:
        A function that drops the copies, and returns whether there were any.
    """
    copied: list[Packing] = []

    def drop() -> bool:
        had_copies = bool(copied)
        while copied:
            copied.pop().unpacked = None
        return had_copies

    try:
        for _, packed, packing in packed_tensors(model):
            is_slow = packed.device.type == "cpu" or packing.form.kind in ("nf4", "fp4")
            if packing.unpacked is None and is_slow:
                max_bytes -= packing.unpacked_bytes
                if max_bytes < 0:
                    break
                packing.unpacked = packing(packed)
                copied.append(packing)
        yield drop
    finally:
        drop()


def keep_copies(model: nn.Module, max_bytes: int | None = None) -> int:
    """Keep a dequantised copy of every quantised weight, or of none if not all of them fit.

    With copies a quantised base is as fast as an unquantised one.

    Args:
        max_bytes: By default a quarter (COPY_SHARE) of the free memory.

    Returns:
        Bytes of the copies.
    """
    if max_bytes is None:
        max_bytes = int(COPY_SHARE * (free_bytes() or 0))
    tensors = list(packed_tensors(model))
    total = sum(packing.unpacked_bytes for _, _, packing in tensors)
    fits = total <= max_bytes
    for _, packed, packing in tensors:
        packing.unpacked = None
        packing.unpacked = packing(packed) if fits else None
    return total if fits else 0
