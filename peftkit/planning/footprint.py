"""What one device has of a base's weights while it trains, where it does not have all of them.

All figures are of a packed model without data; frozen tensors alone count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from peftkit.base.placement import expert_places, group_size, streamed_places
from peftkit.kernels.packing import Packing
from peftkit.train.memory.blocks import Blocks

AT_ONCE = 2
"""Blocks that are there at once: one that computes, and one on its way."""


@dataclass(frozen=True, slots=True)
class WeightFootprint:
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


def whole(model: nn.Module) -> WeightFootprint:
    """Return what a device has that has all of a base."""
    return WeightFootprint(_sum(_frozen(model)))


def streamed(model: nn.Module) -> WeightFootprint:
    """Return what a device has of a base whose blocks are streamed (base/placement.py).

    Each block comes for the forward pass and for the backward pass, less the two that are there
    when a pass begins. Experts come a group at a time, all of them in a step: for the forward pass,
    again, and for the backward pass, which begins with the two groups that are there.
    """
    blocks, groups = [], []
    for block, places in streamed_places(model):
        stacks = [stack for stacks in expert_places(block) for stack in stacks]
        groups.append([size for owner, packing in stacks for size in _groups(owner, packing)])
        blocks.append(_sum(m._parameters[name] for m, name in places) - sum(groups[-1]))
    two = max((sum(blocks[n : n + AT_ONCE]) for n in range(len(blocks))), default=0)
    two += AT_ONCE * max((size for each in groups for size in each), default=0)
    moved = 2 * sum(blocks) - sum(blocks[:AT_ONCE]) - sum(blocks[-AT_ONCE:])
    moved += sum(3 * sum(each) - sum(each[-AT_ONCE:]) for each in groups)
    moved -= sum(size for each in groups[:1] for size in each[:AT_ONCE])
    total = sum(blocks) + sum(map(sum, groups))
    return WeightFootprint(whole(model).resident - total, two, max(moved, 0), total)


def _groups(owner: Any, packing: Packing) -> list[int]:
    """Return the bytes of each group that a stack's experts are fetched in."""
    packed = owner._parameters["original"]
    size, number = group_size(packed, packing), packing.form.shape[0]
    each = packed.nbytes // number
    return [each * min(size, number - begin) for begin in range(0, number, size)]


def spread(model: nn.Module, num_devices: int, *, offload: bool = False) -> WeightFootprint:
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
        return WeightFootprint(always, passing, moved + parts, parts)
    return WeightFootprint(always + parts, passing, moved)


def _frozen(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if not p.requires_grad]


def _sum(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
