"""Frozen weights in 4 and 8 bits, and the audit of what really is quantised.

4 bits are bitsandbytes' NF4 and FP4 in blocks of 64 (Dettmers et al., 2023, arXiv:2305.14314), with
the block scales quantised once more if asked; 8 bits are plain rounding by row. The layers are our
own: bitsandbytes' Linear4bit converts plain nn.Linear alone, without a word about the others, and
on CPUs with AVX512-BF16 rewrites its weight at the first evaluation, after which gradients vanish.

Shapes: out, in features; n = out * in values; `...` any leading shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from bitsandbytes import functional as bnb
from torch import Tensor, nn
from torch.nn import functional

from peftkit.anatomy import Place, find_places
from peftkit.errors import BaseError
from peftkit.events import Table

Kind = Literal["nf4", "fp4", "int8"]
BLOCK_SIZE = 64


class QuantizedLinear(nn.Module):
    """A frozen y = W x + b whose W is kept in 4 or 8 bits.

    The product is taken with the dequantised weight, which no graph keeps: backward makes it again.

    Args:
        weight: (out, in), any float dtype; quantised where it lies.
        bias: (out,) or None.
        kind: nf4, fp4, or int8 (weights only, one scale a row).
        double_quant: Quantise the scales of 4-bit blocks too: 4.13 bits a value, not 4.5.
        compute_dtype: Of the dequantised weight.
    """

    packed: Tensor
    absmax: Tensor

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kind: Kind,
        *,
        double_quant: bool,
        compute_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.kind, self.compute_dtype = kind, compute_dtype
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._copy: Tensor | None = None
        weight = weight.detach().contiguous()
        if kind == "int8":
            scale = weight.float().abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
            self.register_buffer("packed", (weight.float() / scale[:, None]).round().to(torch.int8))
            self.register_buffer("absmax", scale)
        else:
            self._take(
                *bnb.quantize_4bit(
                    weight, blocksize=BLOCK_SIZE, quant_type=kind, compress_statistics=double_quant
                )
            )

    def _take(self, packed: Tensor, state: bnb.QuantState) -> None:
        """Keep what bitsandbytes made as buffers, so that they move and are saved with the module."""
        self.block_size, self.original_dtype = state.blocksize, state.dtype
        self.register_buffer("packed", packed)
        self.register_buffer("absmax", state.absmax)
        self.register_buffer("code", state.code)
        self.is_nested = bool(state.nested)
        if self.is_nested:
            self.nested_block_size = state.state2.blocksize
            self.register_buffer("offset", state.offset)
            self.register_buffer("nested_absmax", state.state2.absmax)
            self.register_buffer("nested_code", state.state2.code)

    @classmethod
    def from_bitsandbytes(cls, module: nn.Module, compute_dtype: torch.dtype) -> QuantizedLinear:
        """Take over a Linear4bit's packed weight, without quantising anew."""
        state = module.weight.quant_state
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.out_features, self.in_features = state.shape
        self.kind, self.compute_dtype, self._copy = state.quant_type, compute_dtype, None
        self.bias = module.bias  # type: ignore[assignment]
        self._take(module.weight.data, state)
        return self

    def dequantize(self) -> Tensor:
        """Return W, (out, in), in the compute dtype."""
        if self._copy is not None:
            return self._copy
        if self.kind == "int8":
            return (self.packed.float() * self.absmax[:, None]).to(self.compute_dtype)
        return bnb.dequantize_4bit(self.packed, self._state()).to(self.compute_dtype)

    def _state(self) -> bnb.QuantState:
        nested = None
        if self.is_nested:
            nested = bnb.QuantState(
                absmax=self.nested_absmax,
                code=self.nested_code,
                blocksize=self.nested_block_size,
                dtype=torch.float32,
            )
        return bnb.QuantState(
            absmax=self.absmax,
            shape=torch.Size((self.out_features, self.in_features)),
            code=self.code,
            blocksize=self.block_size,
            quant_type=self.kind,
            dtype=self.original_dtype,
            offset=self.offset if self.is_nested else None,
            state2=nested,
        )

    @property
    def weight(self) -> Tensor:
        """What the packed values stand for, (out, in), for code that looks at its layers' weights."""
        return self.dequantize()

    def keep_copy(self) -> None:
        """Dequantise once and keep the result: as fast as no quantisation, for its memory."""
        self._copy = self.dequantize()

    @property
    def num_bytes(self) -> int:
        """Bytes of the quantised weight, its scales and tables."""
        return sum(t.numel() * t.element_size() for t in self.buffers())

    def forward(self, x: Tensor) -> Tensor:
        return _FrozenProduct.apply(x, self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        # .to(dtype) and .half() are about computing; the packed values and scales are not numbers
        kept = {name: tensor.dtype for name, tensor in self._buffers.items() if tensor is not None}
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, dtype in kept.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != dtype:
                original = before[name]
                assert original is not None
                self._buffers[name] = original.to(moved.device)
        probe = fn(torch.empty(0, dtype=self.compute_dtype, device=self.packed.device))
        if probe.is_floating_point():
            self.compute_dtype = probe.dtype
        if self._copy is not None:
            self._copy = fn(self._copy)
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"


class _FrozenProduct(torch.autograd.Function):
    """x W^T + b whose backward dequantises W again, and computes dx alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.dequantize().to(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        grad = grads[0]
        return grad @ ctx.layer.dequantize().to(grad.dtype), None


def weight_of(module: nn.Module) -> Tensor:
    """Return any linear layer's weight as (out, in): dequantised, and Conv1D's turned."""
    if type(module).__name__ == "Conv1D":
        return module.weight.t()
    return module.weight


@dataclass(frozen=True, slots=True)
class AuditRow:
    """Weights of one kind: how they are kept, why, how many values in how many bytes."""

    kept: str
    what: str
    num_tensors: int
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Audit:
    """What a base's weights really are."""

    rows: tuple[AuditRow, ...]

    @property
    def num_parameters(self) -> int:
        """Values in all."""
        return sum(row.num_parameters for row in self.rows)

    @property
    def num_bytes(self) -> int:
        """Bytes in all."""
        return sum(row.num_bytes for row in self.rows)

    @property
    def is_quantized(self) -> bool:
        """Whether any weight is."""
        return any(row.kept in ("nf4", "fp4", "int8") for row in self.rows)

    def table(self) -> Table:
        """Return the audit for a reader."""
        lines = [
            (r.kept, r.what, f"{r.num_tensors:,}", f"{r.num_parameters:,}", _megabytes(r.num_bytes))
            for r in self.rows
        ]
        bits = 8 * self.num_bytes / max(self.num_parameters, 1)
        total = ("all", f"{bits:.2f} bits a value", "", f"{self.num_parameters:,}")
        columns = ("kept as", "what", "tensors", "values", "size")
        return Table("Base weights", columns, (*lines, (*total, _megabytes(self.num_bytes))))


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def quantize_model(
    model: nn.Module,
    kind: Kind,
    *,
    double_quant: bool = True,
    compute_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Audit:
    """Replace the linear layers of a model, in place, by quantised ones, one after the other.

    Left as they are: output heads and what is tied to them, classification heads, routers.

    Args:
        device: Move each layer there first, so that the 16-bit model never lies there whole.

    Raises:
        BaseError: A layer that was to be quantised could not be.
    """
    failed = []
    for place in find_places(model):
        if _why_kept(model, place) is not None:
            continue
        module = place.module
        if hasattr(module.weight, "quant_state"):
            dtype = compute_dtype or torch.get_default_dtype()
            quantized = QuantizedLinear.from_bitsandbytes(module, dtype)
        else:
            weight = weight_of(module).to(device)
            if not weight.is_floating_point():
                failed.append(f"{place.path} ({weight.dtype})")
                continue
            bias = getattr(module, "bias", None)
            quantized = QuantizedLinear(
                weight,
                None if bias is None else bias.to(device),
                kind,
                double_quant=double_quant,
                compute_dtype=compute_dtype or weight.dtype,
            )
        quantized.train(module.training)
        parent, _, name = place.path.rpartition(".")
        setattr(model.get_submodule(parent), name, quantized)
    if failed:
        raise BaseError(
            f"cannot quantise {len(failed)} layers of {type(model).__name__} to {kind}",
            found=", ".join(failed[:5]),
            fix="Load a base in 16 or 32 bits, or set base.quantize: none.",
        )
    return audit(model)


def keep_copies(model: nn.Module, budget_bytes: int) -> bool:
    """Keep a dequantised copy of every quantised layer if all fit the budget; say whether."""
    layers = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    needed = sum(m.in_features * m.out_features * m.compute_dtype.itemsize for m in layers)
    if not layers or needed > budget_bytes:
        return False
    for layer in layers:
        layer.keep_copy()
    return True


def audit(model: nn.Module) -> Audit:
    """Count a model's weights by how they are kept and why."""
    places = {id(place.module): place for place in find_places(model)}
    rows: dict[tuple[str, str], list[int]] = {}

    def count(kept: str, what: str, parameters: int, num_bytes: int) -> None:
        row = rows.setdefault((kept, what), [0, 0, 0])
        row[0] += 1
        row[1] += parameters
        row[2] += num_bytes

    seen: set[int] = set()
    for module in model.modules():
        place = places.get(id(module))
        if isinstance(module, QuantizedLinear):
            size = module.in_features * module.out_features
            count(module.kind, "linear layers", size, module.num_bytes)
        for tensor in _new(module.parameters(recurse=False), seen):
            what = _describe(model, module, place, tensor)
            count(str(tensor.dtype).removeprefix("torch."), what, tensor.numel(), tensor.nbytes)
    return Audit(tuple(AuditRow(*key, *values) for key, values in rows.items()))


def _new(tensors: Iterable[Tensor], seen: set[int]) -> list[Tensor]:
    """Return the tensors that have not been counted; tied ones are counted once."""
    fresh = [tensor for tensor in tensors if id(tensor) not in seen]
    seen.update(id(tensor) for tensor in fresh)
    return fresh


def _describe(model: nn.Module, module: nn.Module, place: Place | None, tensor: Tensor) -> str:
    if tensor.ndim == 3:
        return "stacked experts"
    if place is None or tensor.ndim < 2:
        return "norms and biases" if tensor.ndim < 2 else "others"
    return _why_kept(model, place) or "linear layers"


def _why_kept(model: nn.Module, place: Place) -> str | None:
    """Return why a weight is not quantised, or None for those that are to be."""
    role = place.roles[0]
    if isinstance(place.module, QuantizedLinear):
        return "quantised already"
    if place.is_embedding:
        return "embeddings"
    if place.parameter is not None:
        return "router" if role.endswith("router") else "stacked experts"
    if role == "head":
        return "head"
    if role.endswith("router"):
        return "router"
    if place.module.weight.ndim != 2:
        return "convolutions"
    return None
