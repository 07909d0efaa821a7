"""What one device has of a base's weights while it trains, where it does not have all of them.

All figures are of a packed model on the meta device, adapter and all; frozen tensors alone count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from peftkit.base.placement import streamed_places
from peftkit.train.memory.blocks import Blocks

AT_ONCE = 2
"""Blocks that are there at once: one that computes, and one on its way."""


@dataclass(frozen=True, slots=True)
class Held:
    """A base as one device has it.

    Attributes:
        resident: Bytes that are always there.
        passing: Bytes of what is there for a while, at their most.
        moved: Bytes that reach the device in a forward and backward pass that recomputes.
        elsewhere: Bytes that wait in main memory.
    """

    resident: int
    passing: int = 0
    moved: int = 0
    elsewhere: int = 0

    @property
    def at_most(self) -> int:
        """Bytes on the device."""
        return self.resident + self.passing


def whole(model: nn.Module) -> Held:
    """Return what a device has that has all of a base."""
    return Held(_sum(_frozen(model)))


def streamed(model: nn.Module) -> Held:
    """Return what a device has of a base whose blocks are streamed (base/placement.py).

    Each block comes for the forward pass and for the backward pass; the last one stays in between,
    and the first one until the next step's.
    """
    sizes = [_sum(module._parameters[n] for module, n in p) for _, p in streamed_places(model)]
    total = sum(sizes)
    two = max((sum(sizes[n : n + AT_ONCE]) for n in range(len(sizes))), default=0)
    moved = 2 * total - sum(sizes[:1]) - sum(sizes[-1:])
    return Held(whole(model).resident - total, two, max(moved, 0), total)


def spread(model: nn.Module, num_devices: int, *, offload: bool = False) -> Held:
    """Return what each of several devices has of a base that is sharded (train/sharding.py).

    A tensor is cut along its first dimension, into parts of one size. What is in no block, such as
    embeddings and head, is gathered for all of a step; blocks are gathered for the forward pass and
    for the backward pass.
    """
    frozen = {id(tensor): tensor for tensor in _frozen(model)}
    blocks = []
    for block in Blocks(model).blocks:
        found = [id(p) for p in block.parameters() if id(p) in frozen and p.dim()]
        blocks.append([frozen.pop(key) for key in found])
    scalars = [tensor for tensor in frozen.values() if not tensor.dim()]
    rest = [tensor for tensor in frozen.values() if tensor.dim()]
    parts = sum(
        -(-tensor.shape[0] // num_devices) * (tensor.nbytes // max(tensor.shape[0], 1))
        for tensor in (*rest, *(tensor for block in blocks for tensor in block))
    )
    outside, sizes = _sum(rest), [_sum(block) for block in blocks]
    moved = (2 * sum(sizes) + outside) * (num_devices - 1) // num_devices
    passing = outside + AT_ONCE * max(sizes, default=0)
    always = _sum(scalars)
    if offload:
        return Held(always, passing, moved + parts, parts)
    return Held(always + parts, passing, moved)


def _frozen(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if not p.requires_grad]


def _sum(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
