"""Bases larger than their device: packed weights in main memory, two blocks on the device.

Frozen weights are copied to the device and never back. When a block is entered, its packed weights
are on the device and the next block's are being copied (transfer.py): the following block in a
forward pass, the preceding one in a backward pass with activation checkpointing. When the block is
left, its modules hold main memory again. Autograd keeps the copies that the backward pass needs;
with saved activations that would be every block, so blocks are recomputed (forward/blocks.py).

Of stacked experts only the scales are copied with their block. Experts that receive tokens are
fetched for each product, a group at a time, and again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.base.skeleton import WeightFootprint
from peftkit.base.transfer import CopyStream, DeviceBuffer, PinnedArena, Unit
from peftkit.errors import BaseError
from peftkit.kernels.device import LARGE, trim_malloc
from peftkit.kernels.stacked import Group, PackedExperts, PackedStack, has_apart
from peftkit.model.blocks import STREAMED, recomputable_blocks
from peftkit.quant.layers import Packing

AT_ONCE = 2
"""Blocks on the device: one that computes and one that is being copied."""
EXPERT_BYTES = 1 << 26
"""Bytes of packed experts that are fetched together."""

Place = tuple[nn.Module, str]


class _Stack:
    """One stack's packed experts in main memory, fetched a group at a time.

    Attributes:
        siblings: All stacks of the module, including this one. Their products follow one another
            and share one routing.
    """

    def __init__(
        self, owner: Any, packing: Packing, buffer: DeviceBuffer, arena: PinnedArena | None
    ) -> None:
        self.packing, self.buffer = packing, buffer
        self.siblings: list[_Stack] = []
        packed = owner._parameters["original"]
        self.packed = packed
        self._is_pinned = arena is not None and arena.pin([packed])
        self._by_expert = packed.detach().view(packing.form.shape[0], -1).view(torch.uint8)
        self._group = _group_size(packed, packing)
        self._was_full = False
        self._read: tuple[Tensor, list[int]] | None = None

    def enter(self) -> None:
        """Replace the unpacked stack; the scales are already on the device."""
        packing = self.packing
        packing.unpacked = PackedStack(
            PackedExperts(packing.form, packing.dtype, self, packing.scales)
        )
        if self._was_full and self.siblings[0] is self:  # all of them are likely to be needed again
            self.buffer.expect(self._units(range(len(self._by_expert)))[0])

    def leave(self) -> None:
        self.packing.unpacked = None

    def fetch(self, experts: Sequence[int], backwards: bool) -> Iterator[tuple[Group, Tensor]]:
        """Yield groups of these experts with their bytes, prefetching the next group."""
        self._was_full = len(experts) == len(self._by_expert)
        order = self.siblings[::-1] if backwards else self.siblings
        units: list[Unit] = []
        for stack in order[order.index(self) : order.index(self) + 2]:
            units += stack._units(experts)[:: -1 if backwards else 1]
        for unit, following in zip(units, [*units[1:], None], strict=True):
            if unit.key[0] == id(self):
                yield unit.key[1], self.buffer.take(unit, following)

    def ends(self, offs: Tensor) -> list[int]:
        """Return the values of a tensor, read once for all products of the module."""
        first = self.siblings[0]
        if first._read is None or first._read[0] is not offs:
            first._read = offs, offs.tolist()
        return first._read[1]

    def _units(self, experts: Sequence[int]) -> list[Unit]:
        groups = [tuple(experts[n : n + self._group]) for n in range(0, len(experts), self._group)]
        return [
            Unit((id(self), group), [self._by_expert[e] for e in group], is_pinned=self._is_pinned)
            for group in groups
        ]


class _Block:
    """A block's packed tensors in main memory, and the modules they belong to."""

    def __init__(
        self,
        number: int,
        module: nn.Module,
        places: list[Place],
        experts: DeviceBuffer,
        arena: PinnedArena | None,
    ) -> None:
        self.module = module
        self.stacks = _stacks(module, experts, arena)
        apart = {id(stack.packed) for stack in self.stacks}
        self._places = [(m, name) for m, name in places if id(m._parameters[name]) not in apart]
        self.host: list[Any] = [module._parameters[name] for module, name in self._places]
        is_pinned = arena is not None and arena.pin(self.host)
        self.unit = Unit(number, self.host, is_pinned=is_pinned)
        self._is_checked = False

    def enter(self, flat: Tensor) -> None:
        """Set the modules' tensors to views of these bytes on the device.

        The last tensor of the first copy, which arrives last, is compared with main memory.

        Raises:
            BaseError: It has other bits.
        """
        copies = self.unit.views(flat)
        if not self._is_checked and not _has_bits_of(copies[-1], self.host[-1]):
            raise BaseError(
                f"the streamed weights of block {self.unit.key} change on their way to the device.",
                found=f"torch {torch.__version__}, {copies[-1].device}.",
                fix="Install the versions of constraints.txt, or set base.placement: device.",
            )
        self._is_checked = True
        self._put([nn.Parameter(copy, requires_grad=False) for copy in copies])
        for stack in self.stacks:
            stack.enter()

    def leave(self) -> None:
        """Set the modules' tensors to main memory again."""
        for stack in self.stacks:
            stack.leave()
        self._put(self.host)

    def _put(self, tensors: list[Any]) -> None:
        for (module, name), tensor in zip(self._places, tensors, strict=True):
            module._parameters[name] = tensor


class BlockStream:
    """Streams the blocks of a model to a device when they are needed.

    Attributes:
        buffer: Blocks on the device. experts: Groups of experts on the device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        copies, arena = CopyStream(device), PinnedArena() if device.type == "cuda" else None
        self.buffer, self.experts = DeviceBuffer(copies), DeviceBuffer(copies)
        blocks = [
            _Block(number, module, places, self.experts, arena)
            for number, (module, places) in enumerate(_streamed_places(model))
        ]
        if not blocks:
            raise BaseError(
                f"{type(model).__name__} cannot be streamed.",
                found="It has no blocks with packed weights.",
                fix="Set base.quantize to nf4, fp4 or int8, or base.placement: device.",
            )
        self._blocks = blocks
        self._last, self._step = -1, 1
        self._inside: list[int] = []
        self._streamed = {
            id(t) for b in blocks for t in (*b.host, *(stack.packed for stack in b.stacks))
        }
        self.move_unstreamed(model)
        self._index = {id(block.module): index for index, block in enumerate(blocks)}
        for block in blocks:
            block.module.register_forward_pre_hook(lambda block, _: self.enter(block), prepend=True)
            block.module.register_forward_hook(
                lambda block, *_: self.leave(block), always_call=True
            )
        setattr(model, STREAMED, self)

    def move_unstreamed(self, model: nn.Module) -> None:
        """Move tensors that are not streamed, such as a new adapter's, to the device."""
        moved: dict[int, Any] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in self._streamed:
                    continue
                if parameter.device.type == self.device.type:
                    continue
                if id(parameter) not in moved:  # tied ones stay tied
                    new = parameter.detach().to(self.device)
                    moved[id(parameter)] = nn.Parameter(new, parameter.requires_grad)
                module._parameters[name] = moved[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)

    @contextmanager
    def around(self, block: nn.Module) -> Iterator[None]:
        """Keep a block's weights on the device during a forward pass that runs no hooks."""
        self.enter(block)
        try:
            yield
        finally:
            self.leave(block)

    def enter(self, block: nn.Module) -> None:
        """Put a block's copies into its modules, and prefetch the next block."""
        index = self._index.get(id(block))
        if index is None:
            return
        self._inside.append(index)
        if self._inside.count(index) > 1:  # a hook outside the recomputed function runs too
            return
        self._step = self._direction(index)
        self._last = index
        following = index + self._step
        next_unit = self._blocks[following].unit if following in range(len(self._blocks)) else None
        self._blocks[index].enter(self.buffer.take(self._blocks[index].unit, next_unit))

    def leave(self, block: nn.Module) -> None:
        index = self._index.get(id(block))
        if index is None or index not in self._inside:
            return
        self._inside.remove(index)
        if index in self._inside:
            return
        self._blocks[index].leave()
        if self.device.type == "cpu" and self._blocks[index].unit.num_bytes >= LARGE:
            trim_malloc()  # its activations leave holes too

    def _direction(self, index: int) -> int:
        """Guess the next block: 1 for the following one, -1 for the preceding one (recompute)."""
        if self._last < 0 or abs(index - self._last) > 1:
            return 1
        # the last block is recomputed, or a new pass begins after a backward pass
        if index == self._last:
            return -1 if index == len(self._blocks) - 1 else 1
        return index - self._last


def _has_bits_of(copy: Tensor, host: Tensor) -> bool:
    read = copy.detach().clone()  # as the block reads it: cpu() may wait for more
    return torch.equal(read.cpu(), host.detach().cpu())


def _stacks(block: nn.Module, buffer: DeviceBuffer, arena: PinnedArena | None) -> list[_Stack]:
    """Return a block's stacks whose experts are fetched individually, grouped by module."""
    stacked = []
    for stacks in _expert_places(block):
        siblings = [_Stack(owner, packing, buffer, arena) for owner, packing in stacks]
        for stack in siblings:
            stack.siblings = siblings
        stacked += siblings
    return stacked


def _streamed_places(model: nn.Module) -> list[tuple[nn.Module, list[Place]]]:
    """Return the blocks that can be streamed, with the modules of their packed tensors."""
    blocks = [(block, list(_packed_places(block))) for block in recomputable_blocks(model)]
    return [(block, places) for block, places in blocks if places]


def _expert_places(block: nn.Module) -> list[list[tuple[object, Packing]]]:
    """Return the places of a block's stacks whose experts are fetched individually, by module."""
    of_modules = []
    for module in block.modules():
        lists = getattr(module, "parametrizations", {}).values()
        named = [(each, next(m for m in each.children())) for each in lists]
        stacks = [(e, p) for e, p in named if isinstance(p, Packing) and has_apart(p.form)]
        if stacks:
            of_modules.append(stacks)
    return of_modules


def _group_size(packed: Tensor, packing: Packing) -> int:
    """Return the number of experts of a stack that are fetched together."""
    return int(max(1, EXPERT_BYTES * packing.form.shape[0] // packed.nbytes))


def _packed_places(block: nn.Module) -> Iterator[Place]:
    """Yield module and name of a block's packed tensors and their scales."""
    for module in block.modules():
        packing = next((m for m in module.children() if isinstance(m, Packing)), None)
        if packing is None:
            continue
        name = "original" if "original" in module._parameters else "packed"
        yield module, name
        yield from ((packing, each) for each, t in packing._parameters.items() if t is not None)


def streamed_footprint(model: nn.Module) -> WeightFootprint:
    """Return the footprint on the device of a base whose blocks are streamed.

    Each block is copied once in the forward and once in the backward pass, except the two that are
    already on the device when a pass begins. Experts are copied a group at a time, all of them in
    the forward pass, in its recompute, and in the backward pass, which starts with the two groups
    on the device.
    """
    blocks, groups = [], []
    for block, places in _streamed_places(model):
        stacks = [stack for stacks in _expert_places(block) for stack in stacks]
        groups.append([size for owner, packing in stacks for size in _groups(owner, packing)])
        packed = (module._parameters[name] for module, name in places)
        blocks.append(sum(t.nbytes for t in packed if t is not None) - sum(groups[-1]))
    on_device = max((sum(blocks[n : n + AT_ONCE]) for n in range(len(blocks))), default=0)
    on_device += AT_ONCE * max((size for each in groups for size in each), default=0)
    copied = 2 * sum(blocks) - sum(blocks[:AT_ONCE]) - sum(blocks[-AT_ONCE:])
    copied += sum(3 * sum(each) - sum(each[-AT_ONCE:]) for each in groups)
    copied -= sum(size for each in groups[:1] for size in each[:AT_ONCE])
    total = sum(blocks) + sum(map(sum, groups))
    resident = sum(p.nbytes for p in model.parameters() if not p.requires_grad) - total
    return WeightFootprint(resident, on_device, max(copied, 0), total)


def _groups(owner: Any, packing: Packing) -> list[int]:
    """Return the bytes of each group of a stack's experts."""
    packed = owner._parameters["original"]
    size, number = _group_size(packed, packing), packing.form.shape[0]
    expert_bytes = packed.nbytes // number
    return [expert_bytes * min(size, number - begin) for begin in range(0, number, size)]
