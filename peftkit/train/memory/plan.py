"""How much goes through the model at once, and what is kept of it: chosen before the first step.

What a row's forward pass saves for its backward pass is counted, not estimated: hooks see each
saved tensor and keep none, so that counting itself takes no more memory than inference does. From
this follow the bytes for a token under each way of keeping activations, and the cheapest way that
fits. Nothing is timed. Plans before a run (planning/) know neither its rows nor its model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from peftkit.execution.strategies import Activations

BUSY = {"cuda": 4096}
"""Tokens at once that a device needs to be busy. With fewer a GPU waits for Python: activations are
rather recomputed, a third more work, than rows be cut into less than this."""


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """What one forward pass saves, in bytes.

    Attributes:
        outside: Of blocks: norms, the loss.
        inside: Of each block.
        inputs: The hidden states that enter each block.
    """

    outside: int
    inside: tuple[int, ...]
    inputs: tuple[int, ...]

    def needed(self, activations: Activations) -> int:
        """Return the most that is there at once.

        While one block's backward pass runs, gradients take as much again as that block saved.
        """
        largest = max(self.inside, default=0)
        if activations == "keep":
            return self.outside + sum(self.inside) + largest
        # of the inputs that are moved away, one is in use and one on its way back
        inputs = sum(self.inputs if activations == "recompute" else sorted(self.inputs)[-2:])
        return self.outside + inputs + 2 * largest


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """At most so many rows and tokens at once, padding included, and what is kept of them."""

    activations: Activations
    rows: int
    tokens: int | None


def saved_by(run: Callable[[], Tensor], blocks: Sequence[nn.Module]) -> ActivationBytes:
    """Count what a forward pass saves; tensors that outlive it, such as weights, are none of it."""
    seen: dict[StorageWeakRef, tuple[int, int]] = {}  # bytes, and in which call of a block
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
        with saved_tensors_hooks(pack, _unneeded):
            run()
    finally:
        for handle in handles:
            handle.remove()
    sums = [0] * (len(inputs) + 1)  # the last is what was saved outside: call -1
    for storage, (num_bytes, call) in seen.items():
        sums[call] += num_bytes if storage.expired() else 0
    return ActivationBytes(sums[-1], tuple(sums[:-1]), tuple(inputs))


def choose(
    per_token: Sequence[tuple[Activations, float]],
    available: float,
    longest: int,
    rows: int,
    tokens: int | None,
    busy: int = 1,
) -> MemoryPlan | None:
    """Return the first way that fits, as it was asked for or with fewer tokens at once.

    With fewer than keep the device busy only where no other way takes more.

    Args:
        per_token: Bytes for each way, the cheapest in time first.
        available: Bytes.
        longest: Tokens of the longest row, padding included; 1 if rows have none.
        rows, tokens: What was asked for; one row alone may have more tokens.
        busy: Tokens; see BUSY. Rows without a length do not tell theirs.
    """
    most = rows * longest if tokens is None else max(min(tokens, rows * longest), longest)
    enough = max(longest, busy if longest > 1 else 1)
    for least, ways in ((enough, per_token), (longest, per_token[::-1])):
        for activations, each in ways:
            fit = int(available / each)
            if fit >= most:
                return MemoryPlan(activations, rows, tokens)
            if fit >= least:
                return (
                    MemoryPlan(activations, rows, fit)
                    if longest > 1
                    else MemoryPlan(activations, fit, None)
                )
    return None


def _unneeded(_: None) -> Tensor:
    raise AssertionError("there is no backward pass of a forward pass that is only counted")
