"""What a run's own rows take, measured before the first step; and the plan of a model as it is.

What a row's forward pass saves for its backward pass is counted, not estimated: hooks see each
saved tensor and keep none, so that counting itself takes no more memory than inference does. From
this follow the bytes for a token under each way of keeping activations, by which the plan is
refined. Nothing is timed. What is planned before a run (planning/) knows neither its rows nor its
model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from peftkit.execution.plan import Activations, ExecutionPlan, tokens_at_once
from peftkit.train.config import TrainConfig
from peftkit.train.memory.blocks import STREAMED
from peftkit.train.sharding import is_sharded
from peftkit.train.world import World


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


def initial_plan(model: Any, config: TrainConfig, ranks: World) -> ExecutionPlan:
    """Return how a model that is there goes through its rows, before anything is measured."""
    device, first = ranks.device.type, next(model.parameters())
    return ExecutionPlan(
        device=device,
        num_processes=ranks.world_size,
        placement="stream" if hasattr(model, STREAMED) else "device",
        shard="base" if is_sharded(model) else "none",
        context_parallel=config.context_parallel,
        rows=config.batch_size,
        tokens=tokens_at_once(config.tokens_per_batch, device),
        dtype=str(getattr(model, "dtype", first.dtype)).removeprefix("torch."),
        autocast=ranks.precision or "",
        group_layers=config.group_layers,
    )


def _unneeded(_: None) -> Tensor:
    raise AssertionError("there is no backward pass of a forward pass that is only counted")
