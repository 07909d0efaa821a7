"""Bases larger than their device: packed weights wait in main memory, two blocks are on the device.

Frozen weights only travel one way. When a block is entered, its packed weights are on the device
and the next block's are on their way, on a stream of their own: the block above in a forward pass,
the one below in a backward pass that computes blocks again. When it is left, the module holds main
memory again; what the block's backward pass needs of the copies lives as long as its graph. Where
activations are kept that would be every block: so they are recomputed (`Blocks.ways`).

On a CPU the copies are memory like any other; that they are two is counted all the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.base.form import Form
from peftkit.base.mapped import packed_skeleton
from peftkit.base.purpose import Purpose
from peftkit.errors import BaseError
from peftkit.kernels.packing import Packing
from peftkit.model.blocks import blocks

ATTRIBUTE = "block_stream"
"""Of a model whose blocks are streamed."""
MARK = "GradientCheckpointingLayer"
"""The class of transformers that blocks are of which can be computed again."""
ROOM = 0.8
"""Of a GPU's free memory a base may take before it is streamed; the rest is for the step."""

Place = tuple[nn.Module, str]


def must_stream(placement: str, config: Any, purpose: Purpose, form: Form) -> bool:
    """Tell whether a base is streamed, as it was asked for or as a GPU's memory says.

    Raises:
        BaseError: It does not fit the GPU and may not be streamed, or has no packed weights.
    """
    if placement == "stream" and form.quantize == "none":
        raise BaseError(
            "a base that is not packed cannot be streamed.",
            found="base.quantize is none.",
            fix="Set base.quantize to nf4, fp4 or int8, or base.placement: device.",
        )
    if placement == "stream" or form.device.type != "cuda":
        return placement == "stream"
    needed = sum(p.nbytes for p in packed_skeleton(config, purpose, form).parameters())
    free, _ = torch.cuda.mem_get_info(form.device)
    if needed <= (ROOM if placement == "auto" else 1.0) * free:
        return False
    if placement == "auto" and form.quantize != "none":
        return True
    raise BaseError(
        "the base does not fit the GPU.",
        found=f"It takes {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free.",
        fix="Set base.quantize: nf4 and base.placement: auto; see what fits: peftkit plan MODEL",
    )


class _Block:
    """One block's packed tensors in main memory, and where they belong."""

    def __init__(self, module: nn.Module, places: list[Place]) -> None:
        self.module, self.places = module, places
        self.host: list[Any] = [module._parameters[name] for module, name in self.places]

    def put(self, tensors: list[Any]) -> None:
        for (module, name), tensor in zip(self.places, tensors, strict=True):
            module._parameters[name] = tensor


class BlockStream:
    """The blocks of a model, streamed to a device as they are needed.

    Attributes:
        resident: Blocks that have copies on the device now. most_resident: At most, so far.
        bytes_moved: To the device, so far.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.resident = self.most_resident = self.bytes_moved = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._blocks = [_Block(*found) for found in streamed_places(model)]
        self._fetched: dict[int, list[nn.Parameter]] = {}
        self._events: dict[int, Any] = {}
        self._last, self._step = -1, 1
        self._inside: list[int] = []
        if not self._blocks:
            raise BaseError(
                f"{type(model).__name__} cannot be streamed.",
                found="It has no blocks with packed weights.",
                fix="Set base.quantize to nf4, fp4 or int8, or base.placement: device.",
            )
        streamed = {id(tensor) for block in self._blocks for tensor in block.host}
        _move_all_but(model, streamed, device)
        self._index = {id(block.module): index for index, block in enumerate(self._blocks)}
        for block in self._blocks:
            if self._stream is not None:
                _pin(block.host)
            block.module.register_forward_pre_hook(lambda block, _: self.enter(block), prepend=True)
            block.module.register_forward_hook(
                lambda block, *_: self.leave(block), always_call=True
            )
        setattr(model, ATTRIBUTE, self)

    @contextmanager
    def around(self, block: nn.Module) -> Iterator[None]:
        """Have a block's weights on the device: for a forward pass that no hook sees."""
        self.enter(block)
        try:
            yield
        finally:
            self.leave(block)

    def enter(self, block: nn.Module) -> None:
        """Put a block's copies into its modules, and begin to fetch the next block."""
        index = self._index.get(id(block))
        if index is None:
            return
        self._inside.append(index)
        if self._inside.count(index) > 1:  # a hook outside of what is recomputed
            return
        self._step = self._direction(index)
        self._last = index
        for other in self._fetched.keys() - {index, index + self._step}:
            del self._fetched[other]  # of a pass that was broken off, for one
        self._fetch(index)
        self._blocks[index].put(self._taken(index))
        if index + self._step in range(len(self._blocks)):
            self._fetch(index + self._step)

    def leave(self, block: nn.Module) -> None:
        """Put main memory back into a block's modules."""
        index = self._index.get(id(block))
        if index is None or index not in self._inside:
            return
        self._inside.remove(index)
        if index in self._inside:
            return
        self._blocks[index].put(self._blocks[index].host)
        is_last = index == len(self._blocks) - 1
        again = is_last and self._step == 1 and torch.is_grad_enabled()  # it is computed again
        if not (again or (index == 0 and self._step == -1)):  # or begins the next pass
            self._fetched.pop(index, None)

    def _direction(self, index: int) -> int:
        """Return where the pass goes on from here: up, or down where blocks are computed again."""
        if self._last < 0 or abs(index - self._last) > 1:
            return 1
        if index == self._last:  # the last one, computed again; or a pass after a backward pass
            return -1 if index == len(self._blocks) - 1 else 1
        return index - self._last

    def _fetch(self, index: int) -> None:
        """Begin to copy a block to the device, if that has not begun."""
        if index in self._fetched:
            return
        host = self._blocks[index].host
        if self._stream is None:
            copies = [tensor.detach().clone() for tensor in host]
        else:
            with torch.cuda.stream(self._stream):
                copies = [tensor.detach().to(self.device, non_blocking=True) for tensor in host]
                self._events[index] = self._stream.record_event()
        self.bytes_moved += sum(copy.nbytes for copy in copies)
        self._count(copies)
        self._fetched[index] = [nn.Parameter(copy, requires_grad=False) for copy in copies]

    def _taken(self, index: int) -> list[nn.Parameter]:
        """Return a block's copies, ready to be used on the current stream."""
        copies = self._fetched[index]
        if self._stream is not None and index in self._events:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self._events.pop(index))
            for copy in copies:
                copy.record_stream(current)
        return copies

    def _count(self, copies: list[Tensor]) -> None:
        """Count a block as resident until the last of its copies is gone."""
        left = len(copies)
        self.resident += 1
        self.most_resident = max(self.most_resident, self.resident)

        def gone() -> None:
            nonlocal left
            left -= 1
            self.resident -= left == 0

        for copy in copies:
            weakref.finalize(copy.untyped_storage(), gone)


def streamed_places(model: nn.Module) -> list[tuple[nn.Module, list[Place]]]:
    """Return the blocks of a model that can be streamed, and where their packed tensors belong."""
    marked = [block for _, block in blocks(model) if _is_marked(block)]
    found = [(block, list(_packed_places(block))) for block in marked]
    return [(block, places) for block, places in found if places]


def _is_marked(block: nn.Module) -> bool:
    """Tell whether transformers lets a block be computed again."""
    return any(kind.__name__ == MARK for kind in type(block).__mro__)


def _packed_places(block: nn.Module) -> Iterator[Place]:
    """Yield where a block's packed tensors and their scales belong."""
    for module in block.modules():
        packing = next((m for m in module.children() if isinstance(m, Packing)), None)
        if packing is None:
            continue
        name = "original" if "original" in module._parameters else "packed"
        yield module, name
        yield from ((packing, each) for each, t in packing._parameters.items() if t is not None)


def _move_all_but(model: nn.Module, streamed: set[int], device: torch.device) -> None:
    moved: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in streamed or parameter.device == device:
                continue
            if id(parameter) not in moved:  # tied ones stay tied
                new = nn.Parameter(parameter.detach().to(device), requires_grad=False)
                moved[id(parameter)] = new
            module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _pin(tensors: list[Any]) -> None:
    """Pin main memory, so that copies run beside the computing; where that is refused, they wait.

    Pages of a mapped file are left as they are: pinned, they would be copied into main memory.
    """
    for tensor in tensors:
        if tensor.untyped_storage().nbytes() == tensor.nbytes:  # of a file it is a part
            try:
                tensor.data = tensor.data.pin_memory()
            except RuntimeError:
                return
