"""How a packed tensor of a model is read, and copies of it that are kept unpacked for speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from peftkit.kernels.block_scaled import KINDS
from peftkit.kernels.device import free_bytes
from peftkit.kernels.packed import PackedFormat, unpack

COPY_SHARE = 0.25
"""`keep_copies` takes at most this share of the memory that is free."""


class Packing(nn.Module):
    """How a packed tensor is read: its form and scales. Calling it on the packed data unpacks.

    It also serves as torch's parametrization of a parameter. Scales are parameters that never
    train: as buffers they would be sent between ranks at every step. They stay as they are when
    the model is cast; a cast changes `dtype`, in which the tensor comes out.

    Attributes:
        form: Kind, shape, block size.
        dtype: Compute dtype.
        kept: The unpacked tensor where it is kept for speed, or what stands for it while experts
            are streamed (`PackedStack`), or None.
    """

    def __init__(self, form: PackedFormat, dtype: torch.dtype, scales: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.form, self.dtype = form, dtype
        self.kept: Any = None
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
        """Return the tensor in the compute dtype: the kept one, or a new one."""
        if self.kept is not None:
            return self.kept
        return unpack(packed, self.scales, self.form, self.dtype)

    def num_bytes(self, packed: Tensor) -> int:
        """Return the bytes of the packed data and its scales."""
        return sum(t.numel() * t.element_size() for t in (packed, *self.scales))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Packing:
        asked = fn(torch.empty(0, dtype=self.dtype, device=self.scales[0].device)).dtype
        super()._apply(lambda tensor: _moved(tensor, fn(tensor)), recurse)
        if asked == self.dtype:
            self.kept = None if self.kept is None else fn(self.kept)
        else:  # the kept one was rounded to the former dtype
            self.dtype, self.kept = asked, None
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.kept = None
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
    """Keep weights of a CPU unpacked for a while, as many as fit into a share of the free memory.

    For token after token they would be unpacked anew. Those that are kept for good stay.
    """
    found = [
        (packed, packing)
        for _, packed, packing in packed_tensors(model)
        if packing.kept is None and packed.device.type == "cpu"
    ]
    left, kept = share * (free_bytes() or 0) if found else 0.0, []
    try:
        for packed, packing in found:
            left -= packing.form.shape.numel() * packing.dtype.itemsize
            if left < 0:
                break
            packing.kept = packing(packed)
            kept.append(packing)
        yield
    finally:
        for packing in kept:
            packing.kept = None


def keep_copies(model: nn.Module, max_bytes: int | None = None) -> int:
    """Dequantise every quantised weight once and keep it, if all of them fit; else keep none.

    Where memory is plentiful this makes a quantised base as fast as one that is not.

    Args:
        max_bytes: By default a quarter (COPY_SHARE) of the memory that is free.

    Returns:
        Bytes that the copies take.
    """
    if max_bytes is None:
        max_bytes = int(COPY_SHARE * (free_bytes() or 0))
    found = list(packed_tensors(model))
    total = sum(p.form.shape.numel() * p.dtype.itemsize for _, _, p in found)
    fits = total <= max_bytes
    for _, packed, packing in found:
        packing.kept = None
        packing.kept = packing(packed) if fits else None
    return total if fits else 0
