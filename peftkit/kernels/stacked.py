"""Stacks of W + B A that are multiplied with; the sum is never formed.

Models with experts multiply by their stacked weights in several ways (a loop over experts, one
gathered product, a grouped one). An `AdaptedStack` replaces such a weight: torch dispatches every
product with it to `__torch_function__`, which adds the two low-rank products to the base's.

Shapes: E experts, R rank; `...` is any leading shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

# the default in bf16 is "_grouped_mm", which torch.compile lets nobody override: its graph breaks
GROUPED_MM = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
_ALIGNED = 8
"""grouped_mm on GPUs takes matrices whose rows are multiples of 16 bytes."""


class NoProductError(Exception):
    """An operation that adapted experts do not support, by name."""


class AdaptedStack:
    """Stands for the tensor W + B A, of one expert or of many.

    Attributes:
        weight: As the model stores it: (..., out, in), or (..., in, out) if `flipped`.
        a, b: (..., R, in), (..., out, R); scaled, and in the weight's dtype.
    """

    def __init__(self, weight: Tensor, a: Tensor, b: Tensor, *, flipped: bool) -> None:
        self.weight, self.a, self.b, self.flipped = weight, a, b, flipped

    @property
    def shape(self) -> torch.Size:
        """Of the weight; its dtype, device and address likewise."""
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        """Of the weight."""
        return self.weight.device

    def data_ptr(self) -> int:
        """Return the weight's address, whose alignment transformers checks."""
        return self.weight.data_ptr()

    def __getitem__(self, index: Any) -> AdaptedStack:
        return self._like(self.weight[index], self.a[index], self.b[index], self.flipped)

    def _like(self, weight: Tensor, a: Tensor, b: Tensor, flipped: bool) -> AdaptedStack:
        return AdaptedStack(weight, a, b, flipped=flipped)

    def transpose(self, first: int, second: int) -> AdaptedStack:
        """Swap in and out: of the last two dimensions only."""
        if {first % self.weight.ndim, second % self.weight.ndim} != {
            self.weight.ndim - 2,
            self.weight.ndim - 1,
        }:
            raise NoProductError(f"transpose({first}, {second}) of adapted experts")
        return self._like(self.weight.mT, self.a, self.b, not self.flipped)

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
        kwargs: Mapping[str, Any] | None = None,
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
        used = torch.diff(kwargs["offs"], prepend=kwargs["offs"].new_zeros(1))[:, None, None] > 0
        a, b = (part.where(used, part.detach()) for part in (stack.a, stack.b))
        a = torch.cat([a, a.new_zeros(len(a), missing, a.shape[2])], 1)
        b = torch.cat([b, b.new_zeros(*b.shape[:2], missing)], 2)
        return out + func(func(x, a.mT, **kwargs), b.mT, **kwargs)
