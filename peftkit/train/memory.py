"""Decisions before the first step: micro-batches that fit into memory, and compilation.

Both follow from config, rows and memory, and are saved with the run's state for a resumed run. The
bytes that a row's forward pass saves are counted: hooks see each saved tensor and hold none, so
that counting takes no more memory than inference. This gives the bytes per token of each activation
mode. Nothing is timed. Plans made before a run (planning/) know neither its rows nor its model.

Compiling takes ten to twenty seconds for each kind of block. What it saves per token grows with the
model, so blocks are compiled if tokens times parameters are at least WORTH for each kind (most
decoders have one, T5 four). They are compiled on the first rows of the data, with symbolic sizes:
the code does not depend on the step at which a run starts. Evaluations run eagerly: they would need
other code.
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

from peftkit.data.rows.lazy import num_tokens, tokens_of_each
from peftkit.errors import RunError
from peftkit.events import Notice, Stage
from peftkit.execution import rng
from peftkit.execution.environment import used_bytes
from peftkit.execution.out_of_memory import (
    is_compile_error,
    is_out_of_memory,
    one_line,
    release_memory,
)
from peftkit.execution.plan import ACTIVATIONS_IN_WORDS, Activations, choose
from peftkit.kernels.device import free_bytes, gpu_of
from peftkit.quant.audit import audit
from peftkit.settings import TrainConfig
from peftkit.train.optim import STATE_BYTES
from peftkit.train.step import Trainer

AUTO_SHARE = 0.8
"""Share of the free main memory for train.memory: auto on a CPU."""

BUDGET_SHARE = 0.92
"""Share of the memory budget to plan for; the rest is for fragmentation."""

SAMPLE = 2_000
"""Maximum number of rows whose lengths are measured."""

WORTH = {"cpu": 1.2e13, "cuda": 4e16}
"""Minimum of tokens of the run times parameters of the model, per kind of block, to compile."""

Costs = Sequence[tuple[Activations, float]]
"""Bytes per token (per row where rows have no tokens) of each activation mode, fastest first."""


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Bytes that one forward pass saves for the backward pass.

    Attributes:
        outside: Outside of blocks: norms, the loss.
        inside: In each block.
        inputs: Of each block's hidden states.
    """

    outside: int
    inside: tuple[int, ...]
    inputs: tuple[int, ...]

    def needed(self, activations: Activations) -> int:
        """Return the peak in an activation mode.

        While one block's backward pass runs, gradients take as much again as that block saved.
        """
        largest = max(self.inside, default=0)
        if activations == "keep":
            return self.outside + sum(self.inside) + largest
        # of offloaded inputs, one is in use and one in transfer
        inputs = sum(self.inputs if activations == "recompute" else sorted(self.inputs)[-2:])
        return self.outside + inputs + 2 * largest


def saved_by(run: Callable[[], Tensor], blocks: Sequence[nn.Module]) -> ActivationBytes:
    """Count the bytes that a forward pass saves, without weights and others that outlive it."""
    seen: dict[StorageWeakRef, tuple[int, int]] = {}  # bytes, call of a block
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


def plan_memory_and_compile(trainer: Trainer, num_steps: int) -> None:
    """Refine the plan by measured rows, unless the run is resumed, and compile the blocks.

    All processes call it, with the same rows, and get the same plan.

    Args:
        num_steps: Of the whole run.

    Raises:
        RunError: Not even one row fits, or blocks that have to be compiled cannot be.
    """
    run, positions = trainer.run, trainer.task.num_positions
    sample = _sample(run.rows)
    by_length = sorted(sample, key=lambda row: (positions([row]), num_tokens(row)))
    if trainer.plan.on_gpu or free_bytes() is not None or run.config.memory != "auto":
        median = by_length[len(by_length) // 2]
        saved = _saved(trainer, median)  # a resumed run does this, too: it warms up the model
        if not run.state.measured:
            _refine(trainer, median, saved, by_length[-1])
    run.state.measured = True
    if run.parallel.in_lockstep:
        trainer.use(replace(trainer.plan, compile=False))
    compile_blocks(trainer, num_steps)


def _sample(rows: Sequence[Any]) -> Sequence[Any]:
    """Return at most SAMPLE rows, evenly by length, with the shortest and the longest."""
    if len(rows) <= SAMPLE:
        return rows
    by_length = tokens_of_each(rows).sort(stable=True).indices
    chosen = by_length[torch.arange(SAMPLE) * (len(rows) - 1) // (SAMPLE - 1)]
    return [rows[n] for n in chosen.tolist()]


def _refine(trainer: Trainer, median: Any, saved: ActivationBytes | None, longest: Any) -> None:
    """Use the first plan in the fallback order that fits by measured bytes."""
    most = _saved(trainer, longest)
    available = _available(trainer)  # after the forward passes: weights and buffers are resident
    if saved is None or most is None:
        return  # the first step will find what fits
    positions = trainer.task.num_positions
    tokens = positions([longest])
    measured = ((saved, positions([median])), (most, tokens))
    costs = [
        (mode, max(each.needed(mode) / size for each, size in measured)) for mode in trainer.modes
    ]
    if trainer.world.world_size > 1:  # with context parallelism, shares of a row differ
        costs = [(mode, float(trainer.world.max(math.ceil(cost)))) for mode, cost in costs]
    plan = choose(trainer.requested, costs, available, tokens)
    if plan is None:
        raise _too_little(trainer, longest, costs, available)
    trainer.use(plan)
    if trainer.run.config.memory != "auto" or plan != trainer.requested:
        trainer.run.say(Notice(_in_words(trainer, costs, available, longest)))


def _saved(trainer: Trainer, row: Any) -> ActivationBytes | None:
    """Count what one row saves in mode "keep"; None if not even that fits into memory."""
    try:
        with rng.untouched(trainer.model, trainer.world.device), trainer.blocks.keeping_all():
            return saved_by(lambda: trainer.loss([row]), trainer.blocks.blocks)
    except Exception as error:
        if not trainer.run.parallel.ran_out(error):
            raise
    release_memory()
    return None


def _available(trainer: Trainer) -> float:
    """Return the bytes for activations, the minimum over all processes."""
    config, device = trainer.run.config, trainer.world.device
    per_value = STATE_BYTES[config.optimizer]
    to_come = sum(p.numel() * (p.element_size() + per_value) for p in trainer.parameters.values())
    if trainer.plan.is_sharded:  # two blocks are gathered from other processes at once
        sizes = [sum(p.nbytes for p in block.parameters()) for block in trainer.blocks.blocks]
        to_come += sum(sorted(sizes)[-2:])
    gpu = gpu_of(device)
    if config.memory != "auto":
        free = BUDGET_SHARE * config.memory * 1e9 - used_bytes(device)
    elif gpu is not None:
        free = BUDGET_SHARE * gpu.total(device) - gpu.used(device)
    else:
        free = AUTO_SHARE * (free_bytes() or 0) / trainer.world.world_size
    return -trainer.world.max(-int(free - to_come))


def _in_words(trainer: Trainer, costs: Costs, available: float, longest: Any) -> str:
    plan = trainer.plan
    at_once = f"{plan.rows} rows" if plan.tokens is None else f"{plan.tokens:,} tokens"
    less = "" if plan == trainer.requested else " Each step learns from the same rows."
    return (
        f"{_available_in_words(trainer, available)} {_costs_in_words(costs, longest)}. "
        f"So {ACTIVATIONS_IN_WORDS[plan.activations]}, of at most {at_once} at once.{less}"
    )


def _available_in_words(trainer: Trainer, available: float) -> str:
    memory = trainer.run.config.memory
    whole = "what is free" if memory == "auto" else f"train.memory's {memory:g} GB"
    left = f"{available / 1e9:.3g} GB" if available > 0 else "nothing"
    return f"Weights, optimizer and all else leave {left} of {whole} for activations."


def _costs_in_words(costs: Costs, longest: Any) -> str:
    each = [f"{cost / 1e6:.3g} MB where {ACTIVATIONS_IN_WORDS[mode]}" for mode, cost in costs]
    return f"A {'token' if num_tokens(longest) else 'row'} takes {', '.join(each)}"


def _too_little(trainer: Trainer, longest: Any, costs: Costs, available: float) -> RunError:
    mode, cost = min(costs, key=lambda each: each[1])
    fit = int(available / cost)
    length, source = num_tokens(longest), getattr(longest, "source", "row")
    problem = [_available_in_words(trainer, available)]
    if length:
        problem.append(f"The longest row, {source}, has {length:,} tokens.")
    problem.append(f"{_costs_in_words([(mode, cost)], longest)}.")
    if length and fit > 0:
        problem.append(f"Rows of {fit:,} tokens would fit.")
    fixes = ["Lower data.max_length", "quantise the base (base.quantize: nf4)"]
    if mode == "keep":
        fixes.append("recompute activations (train.gradient_checkpointing: auto)")
    if trainer.plan.device == "cuda" and trainer.plan.placement == "device":
        fixes.append("stream a quantised base (base.placement: stream)")
    return RunError(
        "one row alone does not fit into memory",
        found=" ".join(problem),
        fix=f"{', '.join(fixes)}, or give more: train.memory: <GB>.",
    )


def compile_blocks(trainer: Trainer, num_steps: int) -> None:
    """Compile the blocks if the plan says so, or leaves it open and the run is long enough.

    Raises:
        RunError: Blocks that have to be compiled cannot be.
    """
    run, config = trainer.run, trainer.run.config
    if trainer.plan.compile is None:
        work = work_of(trainer, num_steps) / trainer.blocks.num_kinds
        pays = is_worth_it(config, work, trainer.plan.device)
        trainer.use(replace(trainer.plan, compile=pays))
    if not trainer.plan.compile:
        return
    run.say(Stage("Compiling the model's blocks"))
    problem = trainer.blocks.why_not_compiled() or _try_to_compile(trainer)
    if trainer.world.max(int(problem != "")) == 0:
        return
    problem = problem or "another process could not."
    if config.compile is True:
        raise RunError(
            "train.compile: true is not possible here",
            found=problem,
            fix="Set it to auto or false: the run is the same, and slower.",
        )
    trainer.use(replace(trainer.plan, compile=False))
    run.say(Notice(f"Blocks are not compiled, which only takes longer. {problem}"))


def is_worth_it(config: TrainConfig, work: float, device: str) -> bool:
    """Return whether to compile: as the config says, or if the run is long enough.

    Args:
        work: Tokens of the run times parameters of the model, per kind of block.
        device: Kind of device.
    """
    if config.compile != "auto":
        return config.compile
    return work >= WORTH.get(device, float("inf"))


def work_of(trainer: Trainer, num_steps: int) -> float:
    """Return the tokens of the whole run times the parameters of the model."""
    rows = trainer.run.rows
    per_step = trainer.run.config.rows_per_step(trainer.world.world_size)
    tokens = int(tokens_of_each(rows).sum()) * num_steps * min(per_step / len(rows), 1.0)
    return tokens * audit(trainer.model).num_parameters


def _try_to_compile(trainer: Trainer) -> str:
    """Run one forward and backward pass with compiled blocks; return why it failed, or ""."""
    run = trainer.run
    try:
        trainer.blocks.compile()
        first = run.micro_batches(run.rows[: run.config.batch_size])[0]
        with rng.untouched(trainer.model, trainer.world.device):
            trainer.loss(first).backward()
    except Exception as error:
        if is_out_of_memory(error) and not is_compile_error(error):
            release_memory()  # the first step will find what fits
            return ""
        return one_line(error)
    finally:
        trainer.optimizer.zero_grad(set_to_none=True)
    return ""
