"""What is decided before the first step: how much fits into memory, and whether blocks compile.

Both follow from config, rows and memory, and are saved with the run's state: a resumed run goes on
with them. What a row's forward pass saves for its backward pass is counted, not estimated: hooks
see each saved tensor and keep none, so that counting itself takes no more memory than inference
does. From this follow the bytes for a token under each way of keeping activations. Nothing is
timed. What is planned before a run (planning/) knows neither its rows nor its model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from peftkit.data.pack import num_tokens, tokens_of_each
from peftkit.errors import RunError
from peftkit.events import Notice
from peftkit.execution import rng
from peftkit.execution.environment import used_bytes
from peftkit.execution.out_of_memory import release_memory
from peftkit.execution.plan import ACTIVATIONS_IN_WORDS, Activations
from peftkit.execution.strategies import choose
from peftkit.kernels.device import free_bytes, gpu_of
from peftkit.train.memory.compiled import compile_blocks
from peftkit.train.optim import STATE_BYTES
from peftkit.train.step import Trainer


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


def _unneeded(_: None) -> Tensor:
    raise AssertionError("there is no backward pass of a forward pass that is only counted")


AUTO_SHARE = 0.8
"""Of the main memory that is free, train.memory: auto takes at most this much on a CPU."""

GIVEN_SHARE = 0.92
"""Of the memory that is given, so much is planned; the rest is for what lies between tensors."""

LOOKED_AT = 2_000
"""Of more rows so many are looked at to plan memory."""


def plan_memory_and_compile(trainer: Trainer, num_steps: int) -> None:
    """Refine the plan by what rows take, and compile the blocks, unless a resumed run has done so.

    On several processes all come here, with the same rows, and come to the same plan.

    Args:
        num_steps: Of the whole run.

    Raises:
        RunError: Not even one row fits, or blocks that have to be compiled cannot be.
    """
    rows, positions = trainer.run.rows, trainer.task.num_positions
    by_length = sorted(_of_all_lengths(rows), key=lambda row: (positions([row]), num_tokens(row)))
    if _is_measured(trainer):
        short = _saved(trainer, by_length[len(by_length) // 2])
        if not trainer.run.state.measured:
            _refine(trainer, by_length, short)
    trainer.run.state.measured = True
    if trainer.run.parallel.in_lockstep:
        trainer.run.state.plan = replace(trainer.plan, compile=False)
    compile_blocks(trainer, num_steps)


def _of_all_lengths(rows: Sequence[Any]) -> Sequence[Any]:
    """Return the rows, or of very many some, the shortest and the longest among them."""
    if len(rows) <= LOOKED_AT:
        return rows
    order = tokens_of_each(rows).sort(stable=True).indices
    places = torch.arange(LOOKED_AT) * (len(rows) - 1) // (LOOKED_AT - 1)
    return [rows[n] for n in order[places].tolist()]


def _is_measured(trainer: Trainer) -> bool:
    """Tell whether there is something to plan for: not every system says how much memory it has."""
    known = trainer.plan.on_gpu or free_bytes() is not None
    return known or trainer.run.config.memory != "auto"


def _refine(trainer: Trainer, by_length: Sequence[Any], short: ActivationBytes | None) -> None:
    asked, longest = trainer.requested, by_length[-1]
    long = _saved(trainer, longest)
    available = _available(
        trainer
    )  # after the warm-up forward pass: weights and buffers are resident
    if short is None or long is None:
        return  # the first step will say so
    positions = trainer.task.num_positions([longest])
    middle = trainer.task.num_positions([by_length[len(by_length) // 2]])
    counted = ((short, middle), (long, positions))
    costs = [(way, max(s.needed(way) / tokens for s, tokens in counted)) for way in trainer.modes]
    if trainer.world.world_size > 1:  # whose parts of a row may differ
        costs = [(way, float(trainer.world.max(math.ceil(each)))) for way, each in costs]
    plan = choose(asked, costs, available, positions)
    if plan is None:
        raise _too_little(trainer, longest, costs, available)
    trainer.use(plan)
    if trainer.run.config.memory != "auto" or plan != asked:
        trainer.run.say(Notice(_sentence(trainer, costs, available, longest)))


def _saved(trainer: Trainer, row: Any) -> ActivationBytes | None:
    """Count what one row saves where all is kept; None if not even that fits into memory."""
    try:
        with rng.untouched(trainer.model, trainer.world.device), trainer.blocks.keeping_all():
            return saved_by(lambda: trainer.loss([row]), trainer.blocks.blocks)
    except Exception as error:
        if not trainer.run.parallel.ran_out(error):
            raise
    release_memory()
    return None


def _available(trainer: Trainer) -> float:
    """Return the bytes for activations, the least that any process has."""
    config, device = trainer.run.config, trainer.world.device
    trained = trainer.parameters.values()
    still = sum(p.numel() * (p.element_size() + STATE_BYTES[config.optimizer]) for p in trained)
    gpu = gpu_of(device)
    still += _passing(trainer)
    if config.memory == "auto" and gpu is not None:
        available = GIVEN_SHARE * gpu.total(device) - gpu.used(device) - still
    elif config.memory == "auto":
        available = AUTO_SHARE * (free_bytes() or 0) / trainer.world.world_size - still
    else:
        available = GIVEN_SHARE * config.memory * 1e9 - used_bytes(device) - still
    return -trainer.world.max(-int(available))


def _passing(trainer: Trainer) -> int:
    """Return the bytes of the two largest blocks that are gathered from other processes at once."""
    if not trainer.plan.is_sharded:
        return 0
    sizes = [sum(p.nbytes for p in block.parameters()) for block in trainer.blocks.blocks]
    return sum(sorted(sizes)[-2:])


def _sentence(
    trainer: Trainer,
    costs: Sequence[tuple[Activations, float]],
    available: float,
    longest: Any,
) -> str:
    plan = trainer.plan
    at_once = f"{plan.rows} rows" if plan.tokens is None else f"{plan.tokens:,} tokens"
    less = "" if plan == trainer.requested else " Each step learns from the same rows."
    how = ACTIVATIONS_IN_WORDS[plan.activations]
    return (
        f"{_left(trainer, available)} {_each(costs, longest)}. So {how}, "
        f"of at most {at_once} at once.{less}"
    )


def _left(trainer: Trainer, available: float) -> str:
    memory = trainer.run.config.memory
    whole = "what is free" if memory == "auto" else f"train.memory's {memory:g} GB"
    left = f"{available / 1e9:.3g} GB" if available > 0 else "nothing"
    return f"Weights, optimizer and all else leave {left} of {whole} for activations."


def _each(costs: Sequence[tuple[Activations, float]], longest: Any) -> str:
    each = [f"{size / 1e6:.3g} MB where {ACTIVATIONS_IN_WORDS[way]}" for way, size in costs]
    return f"A {'token' if num_tokens(longest) else 'row'} takes {', '.join(each)}"


def _too_little(
    trainer: Trainer, longest: Any, costs: Sequence[tuple[Activations, float]], available: float
) -> RunError:
    way, each = min(costs, key=lambda cost: cost[1])
    fit = int(available / each)
    length, where = num_tokens(longest), getattr(longest, "source", "row")
    found = [_left(trainer, available)]
    if length:
        found.append(f"The longest row, {where}, has {length:,} tokens.")
    found.append(f"{_each([(way, each)], longest)}.")
    if length and fit > 0:
        found.append(f"Rows of {fit:,} tokens would fit.")
    fixes = ["Lower data.max_length", "quantise the base (base.quantize: nf4)"]
    if way == "keep":
        fixes.append("recompute activations (train.gradient_checkpointing: auto)")
    if trainer.plan.device == "cuda" and trainer.plan.placement == "device":
        fixes.append("stream a quantised base (base.placement: stream)")
    return RunError(
        "one row alone does not fit into memory",
        found=" ".join(found),
        fix=f"{', '.join(fixes)}, or give more: train.memory: <GB>.",
    )
