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
from collections.abc import Collection, Iterator
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from peftkit.anatomy import find_places, is_linear
from peftkit.audit import Audit, audit, exempt
from peftkit.errors import BaseError
from peftkit.events import Listener, Progress, ignore
from peftkit.kernels.packed import (
    NESTED_BLOCK,
    Form,
    Packing,
    pack_4bit,
    pack_absmax,
    pack_int8,
    packed_linear,
)

KINDS = ("nf4", "fp4", "int8")
MAX_LISTED = 10
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@cache
def _bitsandbytes() -> ModuleType:
    """Import bitsandbytes, which registers its operators, without its advice to get others."""
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import bitsandbytes
    finally:
        logger.setLevel(level)
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
        code = _bitsandbytes().functional.create_dynamic_map()
        packed, absmax = pack_4bit(source, kind)
        scales = pack_absmax(absmax, code.to(absmax.device)) if double_quant else (absmax,)
    return packed, Packing(Form(kind, tensor.shape), dtype or tensor.dtype, scales)


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
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.packing = packing
        frozen = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", frozen)

    @property
    def kind(self) -> str:
        """How the weight is kept: "nf4", "fp4" or "int8"."""
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
        return packed_linear(x, self.bias, self.packed, packing, dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight (out_features, in_features) of any linear layer, dequantised if need be.

    Raises:
        BaseError: A weight that bitsandbytes has repacked and that cannot be read any more.
    """
    if _is_foreign(module):
        return _adopted("", module, None).weight
    weight = cast(Tensor, module.weight)
    return weight.t() if _is_transposed(module) else weight


def frozen_weight(module: nn.Module) -> Tensor | None:
    """Return the weight (out, in) of a plain linear layer as it lies in memory, unpacked.

    None where there is none: packed without a kept copy, or a layer that may do more than multiply.
    """
    if isinstance(module, QuantizedLinear):
        return module.packing.kept
    if type(module) is nn.Linear or _is_transposed(module):
        weight = weight_of(module)
        return weight.detach() if weight.is_floating_point() else None
    return None


def set_frozen_weight(module: nn.Module, weight: Tensor) -> None:
    """Let a layer that `frozen_weight` reads keep an equal weight in other memory."""
    if isinstance(module, QuantizedLinear):
        module.packing.kept = weight
    else:
        cast(Tensor, module.weight).data = weight.t() if _is_transposed(module) else weight


def is_quantized(module: nn.Module) -> bool:
    """Tell whether the weight of a linear layer is kept in 4 or 8 bits."""
    packed = isinstance(module, QuantizedLinear) or parametrize.is_parametrized(module, "weight")
    return packed or _is_foreign(module)


def _is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


# ------------------------------------------------------------------- whole models


def quantize_model(
    model: nn.Module,
    kind: str,
    *,
    double_quant: bool = True,
    compute_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    keep: Collection[str] = (),
    on_event: Listener = ignore,
) -> Audit:
    """Quantise every linear layer and stack of experts of a model, in place, one at a time.

    Left as they are: the output layer, whatever shares its weight with an embedding, heads of
    classes, and routers. Linear layers become QuantizedLinear; one that computes something else
    than x W^T + b keeps its class and reads a dequantised weight, as stacked experts do. (These
    hold that weight from forward to backward, unless the block is recomputed.)

    Args:
        kind: "nf4", "fp4" or "int8".
        double_quant: Quantise the scales of the 4-bit kinds as well.
        compute_dtype: By default each weight's own.
        device: Where weights are quantised and stay; the rest of the model is not moved.
        keep: Paths of modules that are left as they are too, with all that is in them.

    Returns:
        The audit of the model as it is then.

    Raises:
        BaseError: A linear layer could not be quantised, or there is none; lists them.
    """
    if kind not in KINDS:
        raise BaseError(f"cannot quantise to {kind!r}.", fix=f"Use one of {', '.join(KINDS)}.")
    adopt_bitsandbytes(model, compute_dtype)
    kept = set(exempt(model)) | {
        id(m) for path in keep for m in model.get_submodule(path).modules()
    }
    work = [job for job in _quantizable(model) if id(job[1]) not in kept]
    made: dict[nn.Module, QuantizedLinear] = {}
    problems = []
    for done, (path, module, name) in enumerate(work, start=1):
        try:
            if isinstance(module, QuantizedLinear):
                if module.kind != kind:
                    raise ValueError(f"it is in {module.kind} already")
                continue
            settings = {"double_quant": double_quant, "dtype": compute_dtype}
            if module in made or (name == "weight" and _is_plain(module)):
                if module not in made:
                    made[module] = _quantized(module, kind, device, settings)
                _replace(model, path, made[module])
            else:
                _pack_parameter(module, name, kind, device, settings)
        except ValueError as error:
            problems.append(f"{path}.{name} of {type(module).__name__}: {error}")
        on_event(Progress("Quantising the base", done, len(work)))
    if problems or not work:
        raise BaseError(
            f"cannot quantise {type(model).__name__} to {kind}.",
            found=_listed(problems) or "It has no linear layers.",
            fix="Load it with quantize: none, or give a model in 16 or 32 bits.",
        )
    return audit(model)


def _listed(problems: list[str]) -> str:
    more = [f"... and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
    return "\n".join(problems[:MAX_LISTED] + more)


def _quantizable(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (path, module, parameter): linear layers under each of their paths, stacks once."""
    for path, module in model.named_modules(remove_duplicate=False):
        if is_linear(module) and not parametrize.is_parametrized(module, "weight"):
            yield path, module, "weight"
    for place in find_places(model):
        name = place.parameter if place.roles[0].startswith("expert") else None
        if name is not None and name in place.module._parameters:
            yield place.path, place.module, name


def _is_plain(module: nn.Module) -> bool:
    """Tell whether a layer computes x W^T + b: by its class, or for others by trying."""
    if _is_transposed(module) or type(module).forward is nn.Linear.forward:
        return True
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    if weight is None or weight.dtype not in FLOATS or weight.ndim != 2:
        return False
    x = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype, device=weight.device)[None]
    with torch.no_grad():
        try:
            expected, found = functional.linear(x, weight, bias), module(x)
        except Exception:  # whatever its own code makes of such an input: it is not plain
            return False
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    # its sums may round in another order
    return bool((found - expected).abs().max() <= 0.02 * expected.abs().max())


def _quantized(
    module: nn.Module, kind: str, device: torch.device | None, settings: dict[str, Any]
) -> QuantizedLinear:
    weight, bias = weight_of(module).to(device), cast("Tensor | None", module.bias)
    new = QuantizedLinear(
        *pack(weight, kind, **settings), None if bias is None else bias.to(device)
    )
    module._parameters.pop("weight", None)  # frees it now, whoever still holds the layer
    return new.train(module.training)


def _pack_parameter(
    module: nn.Module, name: str, kind: str, device: torch.device | None, settings: dict[str, Any]
) -> None:
    """Replace a parameter by its packed form, which is dequantised whenever it is read."""
    weight = module._parameters.get(name)
    if weight is None:
        raise ValueError("its weight is no parameter")
    packed, packing = pack(weight.to(device), kind, **settings)
    setattr(module, name, nn.Parameter(packed, requires_grad=False))
    parametrize.register_parametrization(module, name, packing, unsafe=True)


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    if not name:
        raise ValueError("it is the whole model; give the model that it is a part of")
    setattr(model.get_submodule(parent), name, module)


# ------------------------------------------------------------------- checkpoints of bitsandbytes


def adopt_bitsandbytes(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Replace bitsandbytes' linear layers by ours over the same packed data; return how many.

    Args:
        dtype: Compute dtype; by default the one the weight had.

    Raises:
        BaseError: bitsandbytes has repacked a weight, which cannot be read any more.
    """
    found = [(path, m) for path, m in model.named_modules(remove_duplicate=False) if _is_foreign(m)]
    made = {module: _adopted(path, module, dtype) for path, module in found}
    for path, module in found:
        _replace(model, path, made[module])
    return len(made)


def _is_foreign(module: nn.Module) -> bool:
    """Tell whether this is a layer of bitsandbytes whose weight is quantised already."""
    if not type(module).__module__.startswith("bitsandbytes."):
        return False
    weight: Any = module._parameters.get("weight")
    return getattr(weight, "quant_state", None) is not None or (
        weight is not None and weight.dtype == torch.int8
    )


def _adopted(path: str, module: nn.Module, dtype: torch.dtype | None) -> QuantizedLinear:
    weight: Any = module.weight
    state: Any = getattr(weight, "quant_state", None)
    bias = cast("Tensor | None", module.bias)
    if state is None:  # Linear8bitLt keeps its scales here before the first forward, there after it
        later: Any = module.state
        scale = weight.SCB if weight.SCB is not None else later.SCB
        values = weight.data if weight.CB is None else weight.CB
        form = Form("int8", values.shape)
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
    form = Form(state.quant_type, torch.Size(state.shape), state.blocksize)
    packing = Packing(form, dtype or state.dtype, (state.absmax, *nested))
    return QuantizedLinear(weight.data.reshape(-1, 1).view(torch.uint8), packing, bias)
