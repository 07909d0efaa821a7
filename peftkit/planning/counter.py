"""Count the memory and the FLOPs of a step on tensors without data.

Under FakeTensorMode every operation of the real step runs on shapes alone. `Counter` receives each
operation: it adds its FLOPs, and tracks live storages by the phase of the step that allocated them.
All tensors are on the CPU; for a GPU's step the caller selects the code paths of the device.
"""

from __future__ import annotations

import weakref
from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

GPU_ROUNDING = 512
"""CUDA's caching allocator allocates multiples of it."""
_DEVICE = torch.ops.prim.device.default


class Counter(TorchDispatchMode):
    """The peak of live bytes, by phase, and the FLOPs.

    Args:
        rounding: Sizes of storages are rounded up to a multiple of it.

    Attributes:
        phase: The phase of new storages.
        live, peak: Current bytes, and their maximum since `restart`.
        at_peak: Bytes by phase at the peak.
        flops: FLOPs since `restart`.
    """

    def __init__(self, rounding: int = 1) -> None:
        super().__init__()
        self.rounding, self.phase = rounding, "weights"
        self.live = self.peak = self.flops = 0
        self.at_peak: Mapping[str, int] = {}
        self._by: Tally[str] = Tally()
        self._storages: dict[int, tuple[int, str, Any]] = {}

    def restart(self) -> None:
        """Reset the peak and the FLOPs."""
        self.peak, self.flops, self.at_peak = self.live, 0, dict(self._by)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count new storages in the context to a phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def move(self, tensor: Tensor, phase: str) -> None:
        """Count a live tensor to another phase."""
        key = id(tensor.untyped_storage())
        if key in self._storages:
            num_bytes, old, reference = self._storages[key]
            self._by[old] -= num_bytes
            self._by[phase] += num_bytes
            self._storages[key] = (num_bytes, phase, reference)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Disable torch's guard against compilation, which takes as long as the counting."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:  # two of three calls: torch reads the device of each tensor
            return args[0].device
        kwargs = kwargs or {}
        inside = _written_in_python(func)
        if inside is not None:  # intermediates of peftkit's operators are counted too
            with self:
                return inside(*args, **kwargs)
        if _is_composed(func):  # called within an operator of peftkit
            with self:
                return func.decompose(*args, **kwargs)
        name = func._overloadpacket.__name__
        if name in ("_local_scalar_dense", "is_nonzero", "equal"):
            return _answer(args[0])
        # a kernel of its own, which is written out where there is no data
        out = torch.empty_like(args[0]) if name == "silu_backward" else func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        self.flops += _flops(func, name, args, kwargs, out)
        return out

    def _see(self, storage: Any) -> None:
        key = id(storage)
        if key in self._storages:
            return
        num_bytes = -(-storage.nbytes() // self.rounding) * self.rounding
        if not num_bytes:
            return
        reference = weakref.ref(storage, lambda _: self._gone(key))
        self._storages[key] = (num_bytes, self.phase, reference)
        self.live += num_bytes
        self._by[self.phase] += num_bytes
        if self.live > self.peak:
            self.peak, self.at_peak = self.live, dict(self._by)

    def _gone(self, key: int) -> None:
        num_bytes, phase, _ = self._storages.pop(key)
        self.live -= num_bytes
        self._by[phase] -= num_bytes


def _flops(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of an operation; a causal attention computes half of the products."""
    if name.endswith("_for_cpu"):
        return _flops_of_attention(name, args, kwargs)
    count = flops_of(func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def flops_of(operator: Any) -> Any:
    """Return torch's formula of an operator's FLOPs, which it has not for `addmm_`; or None."""
    in_place = operator is torch.ops.aten.addmm_
    return flop_registry.get(torch.ops.aten.addmm if in_place else operator)


def _flops_of_attention(name: str, args: Any, kwargs: Any) -> int:
    is_backward = "backward" in name
    query, key = args[1:3] if is_backward else args[:2]
    products = 5 if is_backward else 2  # the backward pass recomputes the scores
    pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    is_causal = kwargs.get("is_causal", any(a is True for a in args))
    return int(2 * products * pairs * query.shape[3] // (2 if is_causal else 1))


@cache
def _is_composed(func: Any) -> bool:
    """Return whether an operator is composed of others, which are counted separately."""
    key = "CompositeImplicitAutograd"
    return func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), key
    )


def _answer(tensor: Tensor) -> bool | int | float:
    """Return a placeholder for `.item()`-like reads of a tensor without data: True, or 1.

    transformers checks whether documents begin at the start of a row, and whether a mask is needed.
    """
    return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1


def _written_in_python(func: Any) -> Any:
    """Return the Python function of a peftkit operator; None for other operators."""
    if func.namespace != "peftkit":
        return None
    definition = torch._library.custom_ops.OPDEFS.get(f"peftkit::{func._overloadpacket.__name__}")
    return getattr(definition, "_init_fn", None)
