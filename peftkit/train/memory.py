"""Decisions before the first step: micro-batches that fit into memory, and compilation.

Both follow from config, rows and memory, without timing, and are saved with the run's state. One
forward pass gives the bytes per token of each activation mode (fitting.py). Plans made before a run
(planning/) know neither its rows nor its loaded model.

Compiling takes ten to twenty seconds for each kind of block. It saves more time per token in larger
models, so blocks are compiled if tokens times parameters reach MIN_WORK for each kind (most
decoders have one, T5 has four). Compilation uses the first rows of the data and symbolic sizes:
the code does not depend on the first step of a resumed run. Evaluations run eagerly, since they
would need other code.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from peftkit.data.rows.lazy import num_tokens, tokens_of_each
from peftkit.errors import RunError
from peftkit.events import Notice, Stage
from peftkit.execution import rng
from peftkit.execution.environment import AUTO_SHARE, free_for_training
from peftkit.execution.out_of_memory import attempt
from peftkit.execution.plan import ACTIVATIONS_IN_WORDS
from peftkit.figures import size
from peftkit.forward.compiler import uncompiled
from peftkit.kernels.device import free_bytes
from peftkit.quant.audit import audit
from peftkit.settings import TrainConfig
from peftkit.train.fitting import Costs, choose
from peftkit.train.optim import STATE_BYTES
from peftkit.train.step import Trainer

if TYPE_CHECKING:
    from peftkit.train.saved_bytes import ActivationBytes

SAMPLE = 2_000
"""Maximum number of rows whose lengths are measured."""

UNLIMITED = 1 << 62
"""Tokens, if main memory does not limit them."""

MIN_WORK = {"cpu": 1.2e13, "cuda": 4e16}
"""Minimum of tokens of the run times parameters of the model, per kind of block, to compile."""


def plan_memory_and_compile(trainer: Trainer, num_steps: int) -> None:
    """Refine the plan by measured rows, unless the run is resumed, and compile the blocks.

    All processes call it, with the same rows, and get the same plan.

    Args:
        num_steps: Steps of the whole run.

    Raises:
        RunError: A single row does not fit, or `train.compile: true` fails.
    """
    run, positions = trainer.run, trainer.task.num_positions
    sample = run.rows
    if len(sample) > SAMPLE:  # evenly by length, with the shortest and the longest row
        by_tokens = tokens_of_each(sample).sort(stable=True).indices
        chosen = by_tokens[torch.arange(SAMPLE) * (len(sample) - 1) // (SAMPLE - 1)]
        sample = [sample[n] for n in chosen.tolist()]
    by_length = sorted(sample, key=lambda row: (positions([row]), num_tokens(row)))
    if trainer.plan.on_gpu or free_bytes() is not None or run.config.memory != "auto":
        median = by_length[len(by_length) // 2]
        saved = _saved(trainer, median)  # also in a resumed run: it warms up the model
        trainer.fitting.most_offloaded = _most_offloaded(trainer, saved, median)
        if not run.state.measured:
            _refine(trainer, median, saved, by_length[-1])
    run.state.measured = True
    if run.parallel.in_lockstep:
        trainer.use(replace(trainer.plan, compile=False))
    compile_blocks(trainer, num_steps)


def _saved(trainer: Trainer, row: Any) -> ActivationBytes | None:
    """Count the bytes that one row saves in mode "keep"; None if memory runs out."""
    from peftkit.train.saved_bytes import saved_by

    def count() -> ActivationBytes:
        with rng.untouched(trainer.model, trainer.world.device), trainer.blocks.keeping_all():
            blocks = trainer.blocks
            return saved_by(lambda: trainer.loss([row]), blocks.blocks, blocks.feed_forward)

    return attempt(count, trainer.run.parallel.ran_out)


def _most_offloaded(trainer: Trainer, saved: ActivationBytes | None, row: Any) -> int | None:
    """Return the tokens (rows if they have none) whose blocks' inputs fit into main memory.

    The minimum over all processes, which share it. None: unknown, or nothing can be offloaded.
    """
    most, free, world = UNLIMITED, free_bytes(), trainer.world
    if saved is not None and free is not None and "offload" in trainer.fitting.modes:
        per_token = sum(saved.inputs) / trainer.fitting.num_positions([row])
        most = int(AUTO_SHARE * free / world.world_size / max(per_token, 1.0))
    most = -world.max(-most)
    return None if most == UNLIMITED else most


def _refine(trainer: Trainer, median: Any, saved: ActivationBytes | None, longest: Any) -> None:
    """Use the first plan in the fallback order that fits by measured bytes.

    Raises:
        RunError: The longest row does not fit.
    """
    saved_by_longest = _saved(trainer, longest)
    available = _available(trainer)  # after the forward passes: weights and buffers are resident
    if saved is None or saved_by_longest is None:
        return  # the first step finds a plan that fits
    fitting, memory = trainer.fitting, trainer.run.config.memory
    measured = (saved, [median]), (saved_by_longest, [longest])
    length = fitting.num_positions([longest])
    can_tile = trainer.blocks.can_tile
    tile = replace(trainer.plan, tiles=True).tile(length) / length if can_tile else 1
    costs, tiled = (_agreed(trainer, fitting.costs(*measured, tile=share)) for share in (1, tile))
    plan = choose(
        fitting.requested,
        costs,
        available,
        length,
        tiled=tiled,
        most_offloaded=fitting.most_offloaded,
    )
    budget = "free memory" if memory == "auto" else f"train.memory's {memory:g} GB"
    left = size(available, 2) if available > 0 else "nothing"
    problem = f"Weights, optimizer and buffers leave {left} of {budget} for activations."
    if plan is None:
        raise _too_little(trainer, longest, tiled, available, problem)
    trainer.use(plan)
    if memory == "auto" and plan == fitting.requested:
        return
    at_once = f"{plan.rows} rows" if plan.tokens is None else f"{plan.tokens:,} tokens"
    less = "" if plan == fitting.requested else " The rows of a step stay the same."
    text = f"So {ACTIVATIONS_IN_WORDS[plan.activations]}, of at most {at_once} at a time.{less}"
    if plan.activations == "offload" and fitting.most_offloaded is not None:
        unit = "tokens" if num_tokens(longest) else "rows"
        text += f" Main memory has room for the inputs of {fitting.most_offloaded:,} {unit}."
    trainer.run.say(Notice(f"{problem} {_in_words(costs, longest)} {text}"))


def _available(trainer: Trainer) -> float:
    """Return the bytes for activations, the minimum over all processes."""
    config, device = trainer.run.config, trainer.world.device
    state_bytes = STATE_BYTES[config.optimizer]
    pending = sum(p.numel() * (p.element_size() + state_bytes) for p in trainer.parameters.values())
    if trainer.plan.is_sharded:  # two blocks are gathered from other processes at the same time
        sizes = [sum(p.nbytes for p in block.parameters()) for block in trainer.blocks.blocks]
        pending += sum(sorted(sizes)[-2:])
    limit = None if config.memory == "auto" else config.memory * 1e9
    free = free_for_training(device, limit).memory or 0
    return -trainer.world.max(-int(free - pending))


def _agreed(trainer: Trainer, costs: Costs) -> Costs:
    """Return the maximum of each cost over all processes."""
    if trainer.world.world_size == 1:
        return costs
    return [(mode, float(trainer.world.max(math.ceil(cost)))) for mode, cost in costs]


def _in_words(costs: Costs, row: Any) -> str:
    texts = [f"{size(cost, 2)} if {ACTIVATIONS_IN_WORDS[mode]}" for mode, cost in costs]
    return f"A {'token' if num_tokens(row) else 'row'} takes {', '.join(texts)}."


def _too_little(
    trainer: Trainer, longest: Any, costs: Costs, available: float, problem: str
) -> RunError:
    mode, cost = min(costs, key=lambda mode_and_cost: mode_and_cost[1])
    fit, length = int(available / cost), num_tokens(longest)
    most_offloaded = trainer.fitting.most_offloaded
    if mode == "offload" and most_offloaded is not None and most_offloaded < fit:
        fit = most_offloaded
        problem += " Main memory has no room for the longest row's offloaded activations."
    if length:
        source = getattr(longest, "source", "row")
        problem += f" The longest row, {source}, has {length:,} tokens."
    problem += f" {_in_words([(mode, cost)], longest)}"
    if length and fit > 0:
        problem += f" Rows of {fit:,} tokens would fit."
    fixes = ["lower data.max_length", "raise train.memory"]
    if mode == "keep":
        fixes.insert(0, "recompute activations (train.gradient_checkpointing: auto)")
    if audit(trainer.model).quantized_as == "none":
        fixes.insert(0, "quantise the base (base.quantize: nf4)")
    elif trainer.plan.device == "cuda" and trainer.plan.placement == "device":
        fixes.insert(0, "stream the base (add the line `placement: stream` to the section `base:`)")
    fix = f"{fixes[0][0].upper()}{fixes[0][1:]}, {', '.join(fixes[1:-1])} or {fixes[-1]}."
    return RunError("one row alone does not fit into memory", found=problem, fix=fix)


def compile_blocks(trainer: Trainer, num_steps: int) -> None:
    """Compile the blocks if the plan requires it, or if the run is long enough.

    Raises:
        RunError: `train.compile: true` fails.
    """
    run, config = trainer.run, trainer.run.config
    if trainer.plan.compile is None:
        work = work_of(trainer, num_steps) / trainer.blocks.num_kinds
        # compiled blocks cannot compute the tiles that rows need to fit
        pays = is_worth_it(config, work, trainer.plan.device) and not trainer.plan.tiles
        trainer.use(replace(trainer.plan, compile=pays))
    if not trainer.plan.compile:
        return
    run.say(Stage("Compiling the model's blocks"))
    from peftkit.train.compiled_check import why_refused

    problem = trainer.blocks.why_not_compiled() or why_refused(trainer)
    if trainer.world.max(int(problem != "")) == 0:
        return
    problem = problem or "another process could not."
    if config.compile is True:
        raise RunError(
            "train.compile: true is not possible here",
            found=problem,
            fix="Set it to auto or false: the run has the same result but is slower.",
        )
    trainer.use(replace(trainer.plan, compile=False))
    run.say(uncompiled(problem).notice)


def is_worth_it(config: TrainConfig, work: float, device: str) -> bool:
    """Return whether to compile: train.compile; auto: whether the run is long enough.

    Args:
        work: Tokens of the run times parameters of the model, per kind of block.
        device: Kind of device.
    """
    if config.compile != "auto":
        return config.compile
    return work >= MIN_WORK.get(device, float("inf"))


def work_of(trainer: Trainer, num_steps: int) -> float:
    """Return the tokens of the whole run times the parameters of the model."""
    rows = trainer.run.rows
    per_step = trainer.run.config.rows_per_step(trainer.world.world_size)
    tokens = int(tokens_of_each(rows).sum()) * num_steps * min(per_step / len(rows), 1.0)
    return tokens * audit(trainer.model).num_parameters
