"""Tensor-like objects for the stacked weights of experts, which are never materialised.

Models with experts multiply by their stacked weights in several ways (a loop over experts, one
gathered product, a grouped one). These objects replace such a weight: torch dispatches every
product with them to `__torch_function__`.

- `AdaptedStack`: W + B A. The two low-rank products are added to the base's.
- `PackedStack`: packed matrices in main memory. For a grouped product, or one expert's matrix, it
  fetches the experts that have tokens and unpacks them; the backward pass fetches them again. Any
  other operation gets the unpacked tensor.

Shapes: E experts, R rank, S rows, sorted by expert; `...` is any leading shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from peftkit.kernels.block_scaled import KINDS
from peftkit.kernels.packed import BLOCK, PackedFormat, PackedWeight, absmax_of, unpack

Group = tuple[int, ...]
"""Experts that are fetched together, in ascending order."""
# the bf16 default "_grouped_mm" cannot be overridden under torch.compile: the graph breaks
GROUPED_MM = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
_ALIGNED = 8
"""Alignment of rows for grouped_mm on GPUs: multiples of 16 bytes."""


class NoProductError(Exception):
    """Raised for an operation that adapted experts do not support."""


class AdaptedStack:
    """Represents the tensor W + B A of one or many experts.

    Attributes:
        weight: The model's weight (..., out, in), or (..., in, out) if `flipped`.
        a, b: (..., R, in), (..., out, R), scaled, in the weight's dtype.
    """

    def __init__(self, weight: Tensor, a: Tensor, b: Tensor, *, flipped: bool) -> None:
        self.weight, self.a, self.b, self.flipped = weight, a, b, flipped
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device

    def data_ptr(self) -> int:
        """Return the weight's address, whose alignment transformers checks."""
        return self.weight.data_ptr()

    def __getitem__(self, index: Any) -> AdaptedStack:
        weight, a, b = self.weight[index], self.a[index], self.b[index]
        return AdaptedStack(weight, a, b, flipped=self.flipped)

    def transpose(self, first: int, second: int) -> AdaptedStack:
        """Swap in and out, the last two dimensions."""
        ndim = self.weight.ndim
        if {first % ndim, second % ndim} != {ndim - 2, ndim - 1}:
            raise NoProductError(f"transpose({first}, {second}) of adapted experts")
        return AdaptedStack(self.weight.mT, self.a, self.b, flipped=not self.flipped)

    @property
    def T(self) -> AdaptedStack:
        """One expert's matrix, transposed."""
        return self.transpose(-2, -1)

    @property
    def mT(self) -> AdaptedStack:
        """Every expert's matrix, transposed."""
        return self.transpose(-2, -1)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), dict(kwargs or {})
        is_stack = [isinstance(argument, cls) for argument in args]
        if is_stack.count(True) != 1 or len(args) < 2:
            raise NoProductError(f"torch.{name} of adapted experts")
        place = is_stack.index(True)
        stack, x = args[place], args[1 - place]
        plain = [stack.weight if argument is stack else argument for argument in args]
        if name == "linear" and place == 1 and not stack.flipped:
            first = stack.a.mT
        elif name in ("matmul", "__matmul__", "mm", "bmm") and len(args) == 2:
            if place == 0:  # W x, by columns
                if stack.flipped:
                    raise NoProductError(f"torch.{name} of adapted experts from the left")
                return torch.add(func(*plain, **kwargs), func(stack.b, func(stack.a, x)))
            if not stack.flipped:
                raise NoProductError(f"torch.{name} by adapted experts' weights as stored")
            first = stack.a.mT
        elif name in GROUPED_MM and place == 1 and stack.flipped:
            return cls._grouped(func, plain, kwargs, stack, x)
        else:
            raise NoProductError(f"torch.{name} of adapted experts")
        return torch.add(func(*plain, **kwargs), (x.to(stack.dtype) @ first) @ stack.b.mT)

    @staticmethod
    def _grouped(
        func: Any, plain: list[Any], kwargs: dict[str, Any], stack: AdaptedStack, x: Tensor
    ) -> Tensor:
        out = cast(Tensor, func(*plain, **kwargs))
        missing = -stack.a.shape[-2] % _ALIGNED
        # some GPUs' kernels give experts without tokens a gradient (pytorch issue 172439)
        offs = kwargs["offs"]
        has_tokens = torch.diff(offs, prepend=offs.new_zeros(1))[:, None, None] > 0
        a, b = (part.where(has_tokens, part.detach()) for part in (stack.a, stack.b))
        a = torch.cat([a, a.new_zeros(len(a), missing, a.shape[2])], 1)
        b = torch.cat([b, b.new_zeros(*b.shape[:2], missing)], 2)
        return out + func(func(x, a.mT, **kwargs), b.mT, **kwargs)


class ExpertSource(Protocol):
    """A store of packed experts."""

    def fetch(self, experts: Sequence[int], backwards: bool) -> Iterator[tuple[Group, Tensor]]:
        """Yield groups of experts and their packed bytes, in reverse order if backwards."""

    def ends(self, offs: Tensor) -> list[int]:
        """Return the values of `offs` (E,), the end of each expert's rows, from the device."""


def has_apart(form: PackedFormat) -> bool:
    """Return whether the packed matrix of an expert and its scales are contiguous."""
    if form.kind in KINDS:
        return False
    return len(form.shape) == 3 and math.prod(form.shape[1:]) % BLOCK == 0 and form.block == BLOCK


class PackedExperts:
    """The matrices of a stack and of its transposed view.

    Args:
        form, dtype, scales: Format, compute dtype and scales of all experts.
        source: Provider of their packed data.
    """

    def __init__(
        self,
        form: PackedFormat,
        dtype: torch.dtype,
        source: ExpertSource,
        scales: tuple[Tensor, ...],
    ) -> None:
        self.form, self.dtype, self.source, self.scales = form, dtype, source, scales
        self._absmax: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Device of the unpacked matrices."""
        return self.scales[0].device

    def unpacked(
        self, experts: Sequence[int], *, flipped: bool, backwards: bool = False
    ) -> Iterator[tuple[Group, Tensor]]:
        """Yield groups of experts, and their matrices (experts, out, in) or (experts, in, out)."""
        for group, packed in self.source.fetch(experts, backwards):
            matrices = self._matrices(group, packed)
            del packed  # free them before the next ones are fetched
            yield group, matrices.mT if flipped else matrices
            del matrices

    def _matrices(self, group: Group, packed: Tensor) -> Tensor:
        if self._absmax is None:
            self._absmax = absmax_of(self.scales).reshape(self.form.shape[0], -1)
        form = self.form._replace(shape=torch.Size([len(group), *self.form.shape[1:]]))
        scales = torch.cat([self._absmax[expert] for expert in group])
        if form.kind == "int8":
            scales = scales.view(*form.shape[:-1], 1)
            packed = packed.view(torch.int8).view(form.shape)
        else:
            packed = packed.view(-1, 1)
        return unpack(PackedWeight(packed, (scales,), form), self.dtype)


class PackedStack:
    """Represents the experts' matrices (E, out, in), or (E, in, out) if `flipped`."""

    ndim = 3

    def __init__(self, experts: PackedExperts, *, flipped: bool = False) -> None:
        self.experts, self.flipped = experts, flipped
        number, *sides = experts.form.shape
        self.shape = torch.Size([number, *(reversed(sides) if flipped else sides)])
        self.dtype, self.device = experts.dtype, experts.device

    def data_ptr(self) -> int:
        """Return an aligned address, because unpacked matrices are aligned."""
        return 0

    def transpose(self, first: int, second: int) -> Any:
        """Swap two dimensions: of the last two as a view."""
        return (
            self.mT if {first % 3, second % 3} == {1, 2} else self.whole().transpose(first, second)
        )

    @property
    def mT(self) -> PackedStack:
        """Every expert's matrix, transposed."""
        return PackedStack(self.experts, flipped=not self.flipped)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64):
            numbers = index.flatten().tolist()
            hit = sorted(set(numbers))
            stacked = torch.cat([matrices for _, matrices in self._unpacked(hit)])
            matrices = [stacked[hit.index(number)] for number in numbers]
            return torch.stack(matrices).view(*index.shape, *self.shape[1:])
        if isinstance(index, int):
            return next(self._unpacked([index % len(self)]))[1][0]
        return self.whole()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def whole(self) -> Tensor:
        """Return all matrices, unpacked."""
        return torch.cat([matrices for _, matrices in self._unpacked(range(len(self)))])

    def grouped(
        self, product: Any, x: Tensor, offs: Tensor, ends: Sequence[int], backwards: bool
    ) -> Tensor:
        """Return x_e W_e for rows sorted by expert, (S, columns of W_e).

        Args:
            product: torch's or transformers' grouped product.
            x: (S, rows of W_e). offs, ends: (E,), the end of each expert's rows.
            backwards: Begin with the last experts, which are still on the device.
        """
        starts = [0, *ends[:-1]]
        hit = [expert for expert, end in enumerate(ends) if end > starts[expert]]
        out = x.new_zeros(len(x), self.shape[2])
        for group, matrices in self._unpacked(hit, backwards):
            first, last = starts[group[0]], ends[group[-1]]
            group_ends = torch.stack([offs[expert] for expert in group]) - first
            out[first:last] = product(x[first:last], matrices, offs=group_ends)
            del matrices  # free them before the next ones are unpacked
        return out

    def _unpacked(
        self, experts: Sequence[int], backwards: bool = False
    ) -> Iterator[tuple[Group, Tensor]]:
        return self.experts.unpacked(experts, flipped=self.flipped, backwards=backwards)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if name in GROUPED_MM and len(args) == 2 and isinstance(args[1], cls) and "offs" in kwargs:
            return _Grouped.apply(args[0], args[1], func, kwargs["offs"])
        plain = [arg.whole() if isinstance(arg, cls) else arg for arg in args]
        for key, arg in kwargs.items():
            kwargs[key] = arg.whole() if isinstance(arg, cls) else arg
        return func(*plain, **kwargs)


class _Grouped(torch.autograd.Function):
    """A grouped product that saves no matrix for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: PackedStack, product: Any, offs: Tensor) -> Tensor:
        """Return (S, columns)."""
        experts = stack.experts
        ctx.save_for_backward(offs, *experts.scales)
        # ctx holds no tensors, because it outlives the first forward pass of a recomputed block
        ctx.storage, ctx.flipped = (experts.form, experts.dtype, experts.source), stack.flipped
        ctx.product, ctx.ends = product, experts.source.ends(offs)
        return stack.grouped(product, x, offs, ctx.ends, backwards=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Return dx; nothing else has a gradient."""
        offs, *scales = ctx.saved_tensors
        form, dtype, source = ctx.storage
        experts = PackedExperts(form, dtype, source, tuple(scales))
        transposed = PackedStack(experts, flipped=not ctx.flipped)
        grad_x = transposed.grouped(ctx.product, grad, offs, ctx.ends, backwards=True)
        return grad_x, None, None, None
