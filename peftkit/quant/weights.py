"""The weights of linear layers, plain or packed, and the packed layers of bitsandbytes."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from peftkit.errors import BaseError
from peftkit.kernels.packed import NESTED_BLOCK, PackedFormat
from peftkit.model.places import is_conv1d
from peftkit.quant.layers import Packing, QuantizedLinear


def adopted(path: str, module: nn.Module, dtype: torch.dtype | None) -> QuantizedLinear:
    """Convert a layer of bitsandbytes to a QuantizedLinear over the same packed data.

    Raises:
        BaseError: bitsandbytes has repacked the weight, which can no longer be read.
    """
    weight: Any = module.weight
    state: Any = getattr(weight, "quant_state", None)
    bias = cast("Tensor | None", module.bias)
    if state is None:  # Linear8bitLt moves its scales at the first forward pass
        layer_state: Any = module.state
        scale = weight.SCB if weight.SCB is not None else layer_state.SCB
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


def adopt_bitsandbytes(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Replace bitsandbytes' linear layers by QuantizedLinear; return how many.

    Args:
        dtype: Compute dtype; by default the weight's compute dtype.

    Raises:
        BaseError: bitsandbytes has repacked a weight, which can no longer be read.
    """
    foreign = [
        (path, m) for path, m in model.named_modules(remove_duplicate=False) if is_foreign(m)
    ]
    layers = {module: adopted(path, module, dtype) for path, module in foreign}
    for path, module in foreign:
        model.set_submodule(path, layers[module])
    return len(layers)


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight (out_features, in_features) of any linear layer, dequantised if packed.

    Raises:
        BaseError: bitsandbytes has repacked the weight, which can no longer be read.
    """
    if is_foreign(module):
        return adopted("", module, None).weight
    weight = cast(Tensor, module.weight)
    return weight.t() if is_conv1d(module) else weight


def frozen_weight(module: nn.Module) -> Tensor | None:
    """Return the unpacked weight (out, in) of a plain linear layer, without copying it.

    None for packed weights without a dequantised copy, and for layers that may do more than
    multiply.
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
