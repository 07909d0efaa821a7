"""Micro-batches that fit into memory, planned by counted bytes and retried with smaller plans.

The fallback order, from fastest to least memory: keep unpacked copies of weights and all
activations; recompute the feed-forward layers; recompute the blocks; offload their inputs to main
memory. Each mode first tries smaller micro-batches. On a GPU, the next mode comes before
micro-batches too small to keep it busy. Before the first step, `choose` picks the first plan that
fits by counted bytes, in which the last blocks may be in the faster of two modes. If memory runs
out later, `Fitting.smaller` returns the next.

Training runs (step.py, memory.py) and the server for Tinker's API use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from peftkit.data.rows.lazy import num_tokens
from peftkit.execution.plan import Activations, ExecutionPlan
from peftkit.execution.world import Rows
from peftkit.forward.blocks import input_bytes
from peftkit.kernels.fused import observing_recipes
from peftkit.train.optim import LossScale

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
        around: Saved outside the feed-forward module of each block; part of `inside`.
    """

    outside: int
    inside: tuple[int, ...]
    inputs: tuple[int, ...]
    tiled: tuple[int, ...] = ()
    computed: tuple[int, ...] = ()
    around: tuple[int, ...] = ()

    def needed(self, activations: Activations, tile: float = 1.0) -> int:
        """Return the peak bytes in an activation mode.

        A block's backward pass also needs gradients as large as the tensors that the block saved.

        Args:
            tile: A tile's share of a row's tokens, if blocks are recomputed; 1: no tiles.
        """
        if activations == "selective":
            both = 2 * max(self.tiled, default=0), *self.around  # one or the other's gradients
            return self.outside + sum(self.around) + max(both)
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
    run: Callable[[], Tensor], blocks: Sequence[nn.Module], feed_forward: Sequence[nn.Module] = ()
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
    fed: dict[StorageWeakRef, Place] = {}
    in_feed_forward: list[int] = []  # storages of inputs that every mode saves

    def add(places: dict[StorageWeakRef, Place], tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        call = within[-1] if within else -1
        is_inside = bool(in_feed_forward) and storage._cdata != in_feed_forward[-1]
        places.setdefault(StorageWeakRef(storage), (storage.nbytes(), call, is_inside))

    def enter(block: nn.Module, args: tuple[object, ...], more: dict[str, object]) -> None:
        within.append(len(inputs))
        inputs.append(input_bytes(args, more))

    def enter_feed_forward(_: nn.Module, args: tuple[object, ...]) -> None:
        x = args[0] if args and not hasattr(args[0], "recipe") else None
        in_feed_forward.append(x.untyped_storage()._cdata if isinstance(x, Tensor) else 0)
        if isinstance(x, Tensor):
            add(fed, x)

    def leave_feed_forward(*_: object) -> None:
        in_feed_forward.pop()

    def leave(*_: object) -> None:
        within.pop()

    handles = [b.register_forward_pre_hook(enter, with_kwargs=True) for b in blocks]
    handles += [b.register_forward_hook(leave, always_call=True) for b in blocks]
    for module in feed_forward:
        handles += [
            module.register_forward_pre_hook(enter_feed_forward),
            module.register_forward_hook(leave_feed_forward, always_call=True),
        ]
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
    tiled, computed, around = sums.copy(), sums.copy(), sums.copy()
    for storage, (num_bytes, call, is_tiled) in {**fed, **seen}.items():
        around[call] += num_bytes if storage.expired() and not is_tiled else 0
    for storage, (num_bytes, call, is_tiled) in {**with_recipe, **seen}.items():
        if storage.expired():
            sums[call] += num_bytes
            tiled[call] += num_bytes if is_tiled else 0
            computed[call] += num_bytes if storage not in seen else 0
    outside = sums.pop() - computed.pop()
    in_blocks = (tuple(each[: len(inputs)]) for each in (tiled, computed, around))
    return ActivationBytes(outside, tuple(sums), tuple(inputs), *in_blocks)


T = TypeVar("T")

Costs = Sequence[tuple[Activations, float]]
"""Bytes per token (per row if rows have no tokens) of each activation mode, fastest first."""


def choose(
    requested: ExecutionPlan,
    costs: Costs,
    available: float,
    longest: int,
    *,
    tiled: Costs = (),
    most_offloaded: int | None = None,
    num_blocks: int = 0,
) -> ExecutionPlan | None:
    """Return the plan with the first activation mode that fits; None if no row fits.

    It has at most the requested rows and tokens. Micro-batches too small to keep the device
    busy, and then tiles, are the last resort.

    Args:
        available: Bytes.
        longest: Tokens of the longest row, padding included; 1 if rows have none.
        tiled: The costs if the longest row is computed in tiles.
        most_offloaded: Tokens (rows if they have none) whose inputs fit into main memory.
        num_blocks: Blocks of the model. With a selective mode in `costs`, each of them can change
            to the next mode by itself.
    """
    rows, tokens = requested.rows, requested.tokens
    limit = rows * longest if tokens is None else max(min(tokens, rows * longest), longest)
    enough = max(longest, requested.busy_tokens if longest > 1 else 1)
    whole = [(mode, None, cost) for mode, cost in costs]
    in_tiles = [(mode, None, cost) for mode, cost in tiled]
    by_block = list(_by_block(costs, num_blocks))
    for least, modes in ((enough, by_block), (longest, whole[::-1]), (longest, in_tiles)):
        for activations, num_recomputed, per_token in modes:
            fit = int(available / per_token)
            if activations == "offload" and most_offloaded is not None:
                fit = min(fit, most_offloaded)
            plan = replace(requested, activations=activations, num_recomputed=num_recomputed)
            plan = replace(plan, tiles=modes is in_tiles)
            if fit >= limit:
                return plan
            if fit >= least and longest > 1:
                return replace(plan, tokens=fit)
            if fit >= least:
                return replace(plan, rows=fit, tokens=None)
    return None


def _by_block(costs: Costs, num_blocks: int) -> Iterator[tuple[Activations, int | None, float]]:
    """Yield each mode, its number of blocks and its cost, from fastest to least memory.

    The last blocks stay in the faster mode: their memory is free before the first are recomputed.
    """
    has_selective = any(mode == "selective" for mode, _ in costs)
    for n, (mode, cost) in enumerate(costs):
        if n > 0 and has_selective and mode != "offload":
            faster = costs[n - 1][1]
            for count in range(1, num_blocks):
                yield mode, count, faster + (cost - faster) * count / num_blocks
        yield mode, None, cost


def _halved(limit: int, size: int) -> int:
    """Halve a limit until it is below the current size."""
    while limit >= size:
        limit //= 2
    return max(limit, 1)


class Fitting:
    """The fallback order of a training loop, and its loss scale.

    Args:
        plan: The plan that the settings request.
        modes: Activation modes to try, fastest first.
        num_positions: Tokens of rows in one batch, padding included.
        needs_scale: Whether gradients are in fp16.

    Attributes:
        requested: `plan` with the fastest activation mode.
        most_offloaded: Tokens (rows if they have none) whose inputs fit into main memory; None:
            unknown.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        modes: tuple[Activations, ...],
        num_positions: Callable[[Rows], int],
        *,
        needs_scale: bool,
    ) -> None:
        self.requested, self.modes = replace(plan, activations=modes[0]), modes
        self.num_positions, self.scale = num_positions, LossScale(needs_scale)
        self.most_offloaded: int | None = None

    def costs(self, *measured: tuple[ActivationBytes, Rows], tile: float = 1.0) -> Costs:
        """Return the costs of each activation mode, the maximum over measured batches of rows.

        Args:
            tile: A tile's share of a row's tokens; 1: no tiles.
        """
        counts = [(saved, self.num_positions(rows)) for saved, rows in measured]
        return [
            (mode, max(1.0, *(saved.needed(mode, tile) / number for saved, number in counts)))
            for mode in self.modes
        ]

    def smaller(
        self,
        plan: ExecutionPlan,
        parts: Sequence[Rows],
        agree: Callable[[list[int]], list[int]] = list,
    ) -> ExecutionPlan | None:
        """Return the next plan in the fallback order; None: there is none.

        Args:
            parts: The micro-batches for which memory ran out.
            agree: Returns the maximum of each size over all processes.
        """
        if plan.keeps_copies:
            return replace(plan, keeps_copies=False)
        sizes = [
            max(map(len, parts), default=0),
            max(map(self.num_positions, parts), default=0),
            int(any(num_tokens(row) for part in parts for row in part)),
        ]
        rows, tokens, have_length = agree(sizes)
        has_later_blocks = plan.num_recomputed is not None
        later = self.modes[self.modes.index(plan.activations) + (not has_later_blocks) :]
        if plan.compile:  # compiled blocks are recomputed as a whole
            later = tuple(mode for mode in later if mode != "selective")
        busy = plan.busy_tokens if have_length else 0
        has_tiles, plan = plan.tiles, replace(plan, tiles=True)
        if rows > 1 and (tokens / 2 >= busy or not later):
            if plan.tokens is None:
                return replace(plan, rows=_halved(plan.rows, rows))
            # a single row may have more tokens than the limit
            return replace(plan, tokens=_halved(plan.tokens, min(tokens, plan.tokens)))
        if later:  # a new mode starts with the requested rows and tokens
            mode, most, requested = later[0], self.most_offloaded, self.requested
            plan = replace(plan, activations=mode, rows=requested.rows, tokens=requested.tokens)
            plan = replace(plan, num_recomputed=None)
            if mode == "offload" and most is not None and have_length:
                return replace(plan, tokens=min(plan.tokens or most, most))
            if mode == "offload" and most is not None:
                return replace(plan, rows=max(min(plan.rows, most), 1))
            return plan
        return None if has_tiles or plan.activations == "keep" else plan

    def retry(
        self,
        compute: Callable[[], T | None],
        *,
        overflows: Callable[[T], bool],
        step_down: Callable[[], object],
        undo: Callable[[], object],
    ) -> T:
        """Repeat a computation until it fits into memory and its gradients do not overflow.

        Args:
            compute: Computes loss and gradients; returns None if memory ran out on a process.
            overflows: Whether gradients are infinite. If the loss scale cannot decrease, the result
                is returned anyway.
            step_down: Switches to a smaller plan, or raises if there is none.
            undo: Restores the state before a failed attempt.
        """
        while (result := compute()) is None or (overflows(result) and self.scale.overflowed()):
            if result is None:
                step_down()
            undo()
        return result
