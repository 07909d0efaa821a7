"""What is settled before the first step: how much fits into memory, and whether blocks compile.

Both follow from config, rows and memory, and are saved with the run's state: a resumed run goes on
with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from peftkit.data.lengths import num_tokens, tokens_of_each
from peftkit.errors import RunError
from peftkit.events import Event, Notice, Stage
from peftkit.execution.environment import used_bytes
from peftkit.execution.plan import ACTIVATIONS_IN_WORDS, Activations
from peftkit.execution.strategies import choose
from peftkit.kernels.device import gpu_of
from peftkit.kernels.host_memory import free_bytes
from peftkit.quant.audit import audit
from peftkit.train import rng
from peftkit.train.memory.compiled import cpp_compiler, is_compile_error, is_worth_it, told
from peftkit.train.memory.out_of_memory import is_out_of_memory, release_memory
from peftkit.train.memory.plan import ActivationBytes, saved_by
from peftkit.train.optim import STATE_BYTES
from peftkit.train.trainer import Trainer

AUTO_SHARE = 0.8
"""Of the main memory that is free, train.memory: auto takes at most this much on a CPU."""

GIVEN_SHARE = 0.92
"""Of the memory that is given, so much is planned; the rest is for what lies between tensors."""

Say = Callable[[Event], None]


LOOKED_AT = 2_000
"""Of more rows so many are looked at to plan memory."""


def plan_memory_and_compile(
    learner: Trainer, rows: Sequence[Any], num_steps: int, say: Say
) -> None:
    """Refine the plan by what rows take, and compile the blocks, unless a resumed run has done so.

    On several processes all come here, with the same rows, and come to the same plan.

    Args:
        rows: All that are trained on, the same on every process.
        num_steps: Of the whole run.
        say: Hears what the user should know.

    Raises:
        RunError: Not even one row fits, or blocks that have to be compiled cannot be.
    """
    positions = learner.task.num_positions
    by_length = sorted(_of_all_lengths(rows), key=lambda row: (positions([row]), num_tokens(row)))
    if _is_measured(learner):
        short = _saved(learner, by_length[len(by_length) // 2])
        if not learner.state.measured:
            _refine(learner, by_length, short, say)
    learner.state.measured = True
    if learner.in_step.needed:
        learner.state.plan = replace(learner.plan, compile=False)
    _compile(learner, rows, num_steps, say)


def _of_all_lengths(rows: Sequence[Any]) -> Sequence[Any]:
    """Return the rows, or of very many some, the shortest and the longest among them."""
    if len(rows) <= LOOKED_AT:
        return rows
    order = tokens_of_each(rows).sort(stable=True).indices
    places = torch.arange(LOOKED_AT) * (len(rows) - 1) // (LOOKED_AT - 1)
    return [rows[n] for n in order[places].tolist()]


def _is_measured(learner: Trainer) -> bool:
    """Tell whether there is something to plan for: not every system says how much memory it has."""
    known = learner.plan.on_gpu or free_bytes() is not None
    return known or learner.config.memory != "auto"


def _refine(
    learner: Trainer, by_length: Sequence[Any], short: ActivationBytes | None, say: Say
) -> None:
    asked, longest = learner.asked, by_length[-1]
    long = _saved(learner, longest)
    available = _available(
        learner
    )  # after the warm-up forward pass: weights and buffers are resident
    if short is None or long is None:
        return  # the first step will say so
    positions = learner.task.num_positions([longest])
    middle = learner.task.num_positions([by_length[len(by_length) // 2]])
    counted = ((short, middle), (long, positions))
    costs = [(way, max(s.needed(way) / tokens for s, tokens in counted)) for way in learner.modes]
    if learner.ranks.world_size > 1:  # whose parts of a row may differ
        costs = [(way, float(learner.ranks.max(math.ceil(each)))) for way, each in costs]
    plan = choose(asked, costs, available, positions)
    if plan is None:
        raise _too_little(learner, longest, costs, available)
    learner.use(plan)
    if learner.config.memory != "auto" or plan != asked:
        say(Notice(_sentence(learner, costs, available, longest)))


def _saved(learner: Trainer, row: Any) -> ActivationBytes | None:
    """Count what one row saves where all is kept; None if not even that fits into memory."""
    try:
        with untouched(learner.model, learner.ranks.device), learner.blocks.keeping_all():
            return saved_by(lambda: learner.loss([row]), learner.blocks.blocks)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if learner.in_step.needed:
            raise learner.in_step.out_of_memory() from None
    release_memory()
    return None


def _available(learner: Trainer) -> float:
    """Return the bytes for activations, the least that any process has."""
    config, device = learner.config, learner.ranks.device
    trained = learner.parameters.values()
    still = sum(p.numel() * (p.element_size() + STATE_BYTES[config.optimizer]) for p in trained)
    gpu = gpu_of(device)
    still += _passing(learner)
    if config.memory == "auto" and gpu is not None:
        available = GIVEN_SHARE * gpu.total(device) - gpu.used(device) - still
    elif config.memory == "auto":
        available = AUTO_SHARE * (free_bytes() or 0) / learner.ranks.world_size - still
    else:
        available = GIVEN_SHARE * config.memory * 1e9 - used_bytes(device) - still
    return -learner.ranks.max(-int(available))


def _passing(learner: Trainer) -> int:
    """Return the bytes of the two largest blocks that are gathered from other processes at once."""
    if not learner.plan.is_sharded:
        return 0
    sizes = [sum(p.nbytes for p in block.parameters()) for block in learner.blocks.blocks]
    return sum(sorted(sizes)[-2:])


def _sentence(
    learner: Trainer,
    costs: Sequence[tuple[Activations, float]],
    available: float,
    longest: Any,
) -> str:
    plan = learner.plan
    at_once = f"{plan.rows} rows" if plan.tokens is None else f"{plan.tokens:,} tokens"
    less = "" if plan == learner.asked else " Each step learns from the same rows."
    how = ACTIVATIONS_IN_WORDS[plan.activations]
    return (
        f"{_left(learner, available)} {_each(costs, longest)}. So {how}, "
        f"of at most {at_once} at once.{less}"
    )


def _left(learner: Trainer, available: float) -> str:
    memory = learner.config.memory
    whole = "what is free" if memory == "auto" else f"train.memory's {memory:g} GB"
    left = f"{available / 1e9:.3g} GB" if available > 0 else "nothing"
    return f"Weights, optimizer and all else leave {left} of {whole} for activations."


def _each(costs: Sequence[tuple[Activations, float]], longest: Any) -> str:
    each = [f"{size / 1e6:.3g} MB where {ACTIVATIONS_IN_WORDS[way]}" for way, size in costs]
    return f"A {'token' if num_tokens(longest) else 'row'} takes {', '.join(each)}"


def _too_little(
    learner: Trainer, longest: Any, costs: Sequence[tuple[Activations, float]], available: float
) -> RunError:
    way, each = min(costs, key=lambda cost: cost[1])
    fit = int(available / each)
    length, where = num_tokens(longest), getattr(longest, "source", "row")
    found = [_left(learner, available)]
    if length:
        found.append(f"The longest row, {where}, has {length:,} tokens.")
    found.append(f"{_each([(way, each)], longest)}.")
    if length and fit > 0:
        found.append(f"Rows of {fit:,} tokens would fit.")
    fixes = ["Lower data.max_length", "quantise the base (base.quantize: nf4)"]
    if way == "keep":
        fixes.append("recompute activations (train.gradient_checkpointing: auto)")
    return RunError(
        "one row alone does not fit into memory",
        found=" ".join(found),
        fix=f"{', '.join(fixes)}, or give more: train.memory: <GB>.",
    )


def _compile(learner: Trainer, rows: Sequence[Any], num_steps: int, say: Say) -> None:
    config = learner.config
    if learner.plan.compile is None:
        work = work_of(learner, rows, num_steps) / learner.blocks.num_kinds
        learner.state.plan = replace(
            learner.plan, compile=is_worth_it(config, work, learner.plan.device)
        )
    if not learner.plan.compile:
        return
    say(Stage("Compiling the model's blocks"))
    problem = _try_to_compile(learner, rows[: config.batch_size])
    if learner.ranks.max(int(problem != "")) == 0:
        return
    problem = problem or "another process could not."
    if config.compile is True:
        raise RunError(
            "train.compile: true is not possible here",
            found=problem,
            fix="Set it to auto or false: the run is the same, and slower.",
        )
    learner.stop_compiling()
    say(Notice(f"Blocks are not compiled, which only takes longer. {problem}"))


def _try_to_compile(learner: Trainer, rows: Sequence[Any]) -> str:
    """Run a forward and a backward pass with compiled blocks; return why that does not work."""
    blocks, device = learner.blocks, learner.ranks.device
    if blocks.are_streamed:
        return "Their weights are streamed (base.placement), each block's when it is entered."
    if not blocks.blocks:
        return f"{type(learner.model).__name__} has no blocks that transformers marks as such."
    if not learner.plan.on_gpu and cpp_compiler() is None:
        return "There is no C++ compiler here (CXX, c++, g++, clang++)."
    try:
        blocks.compile()
        first = learner.micro_batches(rows)[0]
        with untouched(learner.model, device):
            learner.loss(first).backward()
    except Exception as error:
        if is_out_of_memory(error) and not is_compile_error(error):
            release_memory()  # the first step will find what fits
            return ""
        return told(error)
    finally:
        learner.optimizer.zero_grad(set_to_none=True)
    return ""


def work_of(learner: Trainer, rows: Sequence[Any], num_steps: int) -> float:
    """Return the tokens of the whole run times the parameters of the model."""
    per_step = learner.config.rows_per_step(learner.ranks.world_size)
    tokens = int(tokens_of_each(rows).sum()) * num_steps * min(per_step / len(rows), 1.0)
    return tokens * audit(learner.model).num_parameters


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Leave generators and buffers, such as running means, as they were."""
    before = rng.capture(device)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        rng.restore(before, device)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
