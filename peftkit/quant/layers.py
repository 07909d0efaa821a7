"""Frozen weights in 4 and 8 bits: nf4, fp4, int8.

All are weight-only: a layer dequantises its weight, then multiplies in the compute dtype. (int8 is
thus not LLM.int8(), whose activations are in 8 bits too.)

bitsandbytes does the packing. Its modules and its converter are not used: they skip subclasses of
nn.Linear and stacked experts without a word, and on CPUs with AVX512-BF16 they repack a weight in
place at the first evaluation, after which gradients are lost.

Shapes: `...` is any leading shape.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from peftkit.errors import BaseError
from peftkit.kernels.packed import (
    BLOCK,
    NESTED_BLOCK,
    PackedFormat,
    pack_4bit,
    pack_absmax,
    pack_int8,
    packed_linear,
    unpack_rows,
)
from peftkit.kernels.packing import Packing
from peftkit.model.places import is_conv1d

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "kernels-community" not in str(record.msg)


# bitsandbytes says on some CPUs that it lacks kernels of which nothing here makes use. It does so
# when it is imported, whoever imports it first (peft and accelerate do): so it is told now.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_no_advice)


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
        dtype: In which it will be computed with; by default its own.

    Returns:
        Packed data, and how to read it.

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
    """Return what `pack` returns of a tensor of this shape, without values.

    Made on the default device, or under FakeTensorMode, it says what a packed weight takes.
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
    """A frozen linear layer whose weight is kept in 4 or 8 bits.

    Maps (..., in_features) to (..., out_features) as nn.Linear does with the dequantised weight,
    under autocast too. For the backward pass only the packed weight is kept.

    Attributes:
        packed: The weight's bits. packing: How they are read.
        bias: As it was, frozen, or None.
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
        """The dequantised weight (out, in), made at each reading; `packing.dtype` is free."""
        return self.packing(self.packed)

    def forward(self, x: Tensor) -> Tensor:
        packing, device = self.packing, x.device.type
        if packing.kept is not None:
            return functional.linear(x, packing.kept, self.bias)
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else packing.dtype
        return packed_linear(x, self.bias, self.packed, packing.scales, packing.form, dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class QuantizedEmbedding(nn.Embedding):
    """A frozen embedding whose rows are kept in 4 or 8 bits; those asked for are unpacked.

    Attributes:
        packed: The rows' bits. packing: How they are read.
    """

    def __init__(self, packed: Tensor, packing: Packing, padding_idx: int | None = None) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = packing.form.shape
        self.padding_idx, self.max_norm, self.sparse = padding_idx, None, False
        self.packed = _as_parameter(packed)
        self.packing = packing

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """All rows, unpacked at each reading."""
        return self.packing(self.packed)

    def forward(self, input: Tensor) -> Tensor:
        packing = self.packing
        if packing.kept is not None:
            return functional.embedding(input, packing.kept)
        return unpack_rows(self.packed, packing.scales, packing.form, packing.dtype, input)


def _as_parameter(packed: Tensor) -> nn.Parameter:
    """Return packed data as a parameter; one that is tied stays the same object."""
    if isinstance(packed, nn.Parameter):
        return packed
    return nn.Parameter(packed, requires_grad=False)


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight (out_features, in_features) of any linear layer, dequantised if need be.

    Raises:
        BaseError: A weight that bitsandbytes has repacked and that cannot be read any more.
    """
    if is_foreign(module):
        return adopted("", module, None).weight
    weight = cast(Tensor, module.weight)
    return weight.t() if is_conv1d(module) else weight


def frozen_weight(module: nn.Module) -> Tensor | None:
    """Return the weight (out, in) of a plain linear layer as it lies in memory, unpacked.

    None where there is none: packed without a kept copy, or a layer that may do more than multiply.
    """
    if isinstance(module, QuantizedLinear):
        return module.packing.kept
    if type(module) is nn.Linear or type(module).__name__ == "Conv1D":
        weight = weight_of(module)
        return weight.detach() if weight.is_floating_point() else None
    return None


def is_quantized(module: nn.Module) -> bool:
    """Tell whether the weight of a linear layer is kept in 4 or 8 bits."""
    packed = isinstance(module, QuantizedLinear) or parametrize.is_parametrized(module, "weight")
    return packed or is_foreign(module)


def is_foreign(module: nn.Module) -> bool:
    """Tell whether this is a layer of bitsandbytes whose weight is quantised already."""
    if not type(module).__module__.startswith("bitsandbytes."):
        return False
    weight: Any = module._parameters.get("weight")
    return getattr(weight, "quant_state", None) is not None or (
        weight is not None and weight.dtype == torch.int8
    )


def adopted(path: str, module: nn.Module, dtype: torch.dtype | None) -> QuantizedLinear:
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
