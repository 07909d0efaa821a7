"""The bytes that a forward pass saves for its backward pass, by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from peftkit.execution.plan import Activations
from peftkit.kernels.fused import observing_recipes

Place = tuple[int, int, bool]
"""Bytes of a storage, the call of a block, and whether a feed-forward module saves it."""


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Bytes that one forward pass saves for the backward pass.

    Attributes:
        outside: Saved outside of blocks, by norms and the loss.
        inside: Saved in each block while it is recomputed.
        inputs: Size of each block's hidden states.
        tiled: Saved in the feed-forward module of each block; part of `inside`.
        computed: Part of `inside` that a kept block computes again (`Recipe` in kernels/fused.py).
    """

    outside: int
    inside: tuple[int, ...]
    inputs: tuple[int, ...]
    tiled: tuple[int, ...] = ()
    computed: tuple[int, ...] = ()

    def needed(self, activations: Activations, tile: float = 1.0) -> int:
        """Return the peak bytes in an activation mode.

        A block's backward pass also needs gradients as large as the tensors that the block saved.

        Args:
            tile: A tile's share of a row's tokens, if blocks are recomputed; 1: no tiles.
        """
        if activations != "keep" and self.tiled:
            spared = (round((1 - tile) * num_bytes) for num_bytes in self.tiled)
            largest = max(map(int.__sub__, self.inside, spared), default=0)
        else:
            largest = max(self.inside, default=0)
        if activations == "keep":
            return self.outside + sum(self.inside) - sum(self.computed) + largest
        # two offloaded inputs are on the device: one in use, one in transfer
        inputs = sum(self.inputs if activations == "recompute" else sorted(self.inputs)[-2:])
        return self.outside + inputs + 2 * largest


def saved_by(
    run: Callable[[], Tensor],
    blocks: Sequence[nn.Module],
    feed_forward: Sequence[nn.Module] = (),
) -> ActivationBytes:
    """Count the bytes that a forward pass saves, without weights and other persistent tensors.

    Hooks see each saved tensor and keep none, so counting needs no more memory than inference.

    Args:
        feed_forward: Modules of blocks that can be computed in tiles.
    """
    seen: dict[StorageWeakRef, Place] = {}
    with_recipe: dict[StorageWeakRef, Place] = {}
    inputs: list[int] = []
    within: list[int] = []
    in_feed_forward: list[nn.Module] = []

    def add(places: dict[StorageWeakRef, Place], tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        call = within[-1] if within else -1
        place = (storage.nbytes(), call, bool(in_feed_forward))
        places.setdefault(StorageWeakRef(storage), place)

    def enter(block: nn.Module, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        hidden = next((x for x in (*args, *more.values()) if isinstance(x, Tensor)), None)
        within.append(len(inputs))
        inputs.append(0 if hidden is None else hidden.numel() * hidden.element_size())

    def leave(block: nn.Module, args: Any, output: Any) -> None:
        within.pop()

    def enter_tiled(module: nn.Module, args: Any) -> None:
        in_feed_forward.append(module)

    def leave_tiled(module: nn.Module, args: Any, output: Any) -> None:
        in_feed_forward.pop()

    handles = [b.register_forward_pre_hook(enter, with_kwargs=True) for b in blocks]
    handles += [b.register_forward_hook(leave, always_call=True) for b in blocks]
    handles += [m.register_forward_pre_hook(enter_tiled) for m in feed_forward]
    handles += [m.register_forward_hook(leave_tiled, always_call=True) for m in feed_forward]
    try:
        with (
            observing_recipes(partial(add, with_recipe)),
            saved_tensors_hooks(partial(add, seen), lambda packed: packed),  # no backward pass
        ):
            run()
    finally:
        for handle in handles:
            handle.remove()
    sums = [0] * (len(inputs) + 1)  # the last, of call -1, is outside of blocks
    tiled, computed = sums.copy(), sums.copy()
    for storage, (num_bytes, call, is_tiled) in {**with_recipe, **seen}.items():
        if storage.expired():
            sums[call] += num_bytes
            tiled[call] += num_bytes if is_tiled else 0
            computed[call] += num_bytes if storage not in seen else 0
    outside = sums.pop() - computed.pop()
    return ActivationBytes(outside, tuple(sums), tuple(inputs), tuple(tiled[:-1]), tuple(computed))
