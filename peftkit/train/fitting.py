"""Micro-batches that fit into memory, planned by counted bytes and retried with smaller plans.

Training runs (step.py, memory.py) and the server of Tinker's API share this loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from peftkit.data.pack import num_tokens
from peftkit.execution.plan import Activations, ExecutionPlan, choose, smaller
from peftkit.train.optim import LossScale

T = TypeVar("T")

AUTO_SHARE = 0.8
"""Share of the free main memory to plan for."""

Costs = Sequence[tuple[Activations, float]]
"""Bytes per token (per row if rows have no tokens) of each activation mode, fastest first."""


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Bytes that one forward pass saves for the backward pass.

    Attributes:
        outside: Saved outside of blocks, by norms and the loss.
        inside: Saved in each block.
        inputs: Size of each block's hidden states.
    """

    outside: int
    inside: tuple[int, ...]
    inputs: tuple[int, ...]

    def needed(self, activations: Activations) -> int:
        """Return the peak bytes in an activation mode.

        A block's backward pass also needs gradients as large as the tensors that the block saved.
        """
        largest = max(self.inside, default=0)
        if activations == "keep":
            return self.outside + sum(self.inside) + largest
        # two offloaded inputs are on the device: one in use, one in transfer
        inputs = sum(self.inputs if activations == "recompute" else sorted(self.inputs)[-2:])
        return self.outside + inputs + 2 * largest


def saved_by(run: Callable[[], Tensor], blocks: Sequence[nn.Module]) -> ActivationBytes:
    """Count the bytes that a forward pass saves, without weights and others that outlive it.

    Hooks see each saved tensor and keep none, so counting needs no more memory than inference.
    """
    seen: dict[StorageWeakRef, tuple[int, int]] = {}  # (bytes, block call)
    inputs: list[int] = []
    within: list[int] = []

    def pack(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        call = within[-1] if within else -1
        seen.setdefault(StorageWeakRef(storage), (storage.nbytes(), call))

    def enter(block: nn.Module, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        hidden = next((x for x in (*args, *more.values()) if isinstance(x, Tensor)), None)
        within.append(len(inputs))
        inputs.append(0 if hidden is None else hidden.numel() * hidden.element_size())

    def leave(block: nn.Module, args: Any, output: Any) -> None:
        within.pop()

    handles = [b.register_forward_pre_hook(enter, with_kwargs=True) for b in blocks]
    handles += [b.register_forward_hook(leave, always_call=True) for b in blocks]
    try:
        with saved_tensors_hooks(pack, lambda packed: packed):  # there is no backward pass
            run()
    finally:
        for handle in handles:
            handle.remove()
    sums = [0] * (len(inputs) + 1)  # the last, of call -1, is outside of blocks
    for storage, (num_bytes, call) in seen.items():
        sums[call] += num_bytes if storage.expired() else 0
    return ActivationBytes(sums[-1], tuple(sums[:-1]), tuple(inputs))


class Fitting:
    """The fallback order of a training loop, and its loss scale.

    Args:
        plan: The plan that the settings request.
        modes: Activation modes to try, fastest first.
        num_positions: Tokens of rows in one batch, padding included.
        needs_scale: Whether gradients are in fp16.

    Attributes:
        requested: `plan` with the fastest activation mode.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        modes: tuple[Activations, ...],
        num_positions: Callable[[Sequence[Any]], int],
        *,
        needs_scale: bool,
    ) -> None:
        self.requested, self.modes = replace(plan, activations=modes[0]), modes
        self.num_positions, self.scale = num_positions, LossScale(needs_scale)

    def costs(self, *measured: tuple[ActivationBytes, Sequence[Any]]) -> Costs:
        """Return the costs of each activation mode, the maximum over measured batches of rows."""
        counts = [(saved, self.num_positions(rows)) for saved, rows in measured]
        return [
            (mode, max(1.0, *(saved.needed(mode) / number for saved, number in counts)))
            for mode in self.modes
        ]

    def planned(
        self, costs: Costs, available: float, longest: Any, requested: ExecutionPlan | None = None
    ) -> ExecutionPlan | None:
        """Return the first plan in the fallback order that fits; None if the longest row does not.

        Args:
            available: Bytes for activations.
        """
        return choose(requested or self.requested, costs, available, self.num_positions([longest]))

    def smaller(
        self,
        plan: ExecutionPlan,
        parts: Sequence[Sequence[Any]],
        agree: Callable[[list[int]], list[int]] = list,
    ) -> ExecutionPlan | None:
        """Return the next plan in the fallback order; None: there is none.

        Args:
            parts: The micro-batches for which memory ran out.
            agree: Returns the maximum of each size over all processes.
        """
        rows, tokens, has_tokens = agree(
            [
                max(map(len, parts), default=0),
                max(map(self.num_positions, parts), default=0),
                int(any(num_tokens(row) for part in parts for row in part)),
            ]
        )
        return smaller(
            plan,
            self.requested,
            self.modes,
            rows=rows,
            tokens=tokens,
            counts_tokens=bool(has_tokens),
        )

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
            overflows: Whether gradients are infinite. The result is returned nevertheless if the
                loss scale cannot decrease.
            step_down: Switches to a smaller plan, or raises if there is none.
            undo: Restores the state before a failed attempt.
        """
        while (result := compute()) is None or (overflows(result) and self.scale.overflowed()):
            if result is None:
                step_down()
            undo()
        return result
