"""Decisions before the first step: micro-batches that fit into memory, and compilation.

Both follow from config, rows and memory, without timing, and are saved with the run's state. One
forward pass gives the bytes per token of each activation mode (fitting.py). Plans made before a run
(planning/) know neither its rows nor its loaded model.

Compiling takes ten to twenty seconds for each kind of block. It saves more time per token in larger
models, so blocks are compiled if tokens times parameters reach MIN_WORK for each kind (most
decoders have one, T5 has four). Compilation uses the first rows of the data and symbolic sizes:
the code does not depend on the first step of a resumed run. Evaluations run eagerly, since they
would need other code. Before the first step they are compared with eager blocks (compiled.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from peftkit.adapter import refresh_copies
from peftkit.data.rows.lazy import num_tokens, tokens_of_each
from peftkit.errors import RunError
from peftkit.events import Notice, Stage
from peftkit.execution import rng
from peftkit.execution.environment import AUTO_SHARE, free_for_training
from peftkit.execution.out_of_memory import attempt
from peftkit.execution.plan import ACTIVATIONS_IN_WORDS, ExecutionPlan
from peftkit.execution.world import World
from peftkit.figures import size
from peftkit.forward.compiler import uncompiled
from peftkit.kernels.device import free_bytes
from peftkit.quant.audit import audit
from peftkit.quant.layers import keep_copies
from peftkit.tasks.run_hooks import Run
from peftkit.train.fitting import ActivationBytes, Costs, choose, saved_by
from peftkit.train.optim import STATE_BYTES
from peftkit.train.step import Step

SAMPLE = 2_000
"""Maximum number of rows whose lengths are measured."""

UNLIMITED = 1 << 62
"""Tokens, if main memory does not limit them."""

MIN_WORK = {"cpu": 1.2e13, "cuda": 4e16}
"""Minimum of tokens of the run times parameters of the model, per kind of block, to compile."""


def plan_memory_and_compile(run: Run, step: Step) -> None:
    """Refine the plan by measured rows, unless the run is resumed, and compile the blocks.

    All processes call it, with the same rows, and get the same plan.

    Raises:
        RunError: A single row does not fit, or `train.compile: true` fails.
    """
    if step.plan.records_passes:
        _record_passes(run, step)
    sample, positions = run.rows, run.task.num_positions
    if len(sample) > SAMPLE:  # evenly by length, with the shortest and the longest row
        by_tokens = tokens_of_each(sample).sort(stable=True).indices
        chosen = by_tokens[torch.arange(SAMPLE) * (len(sample) - 1) // (SAMPLE - 1)]
        sample = [sample[n] for n in chosen.tolist()]
    by_length = sorted(sample, key=lambda row: (positions([row]), num_tokens(row)))
    if step.plan.on_gpu or free_bytes() is not None or run.config.memory != "auto":
        median = by_length[len(by_length) // 2]
        saved = _saved(run, step, median)  # also in a resumed run: it warms up the model
        step.fitting.most_offloaded = _most_offloaded(run, step, saved, median)
        if not run.state.measured:
            _refine(run, step, median, saved, by_length[-1])
        if saved is not None:
            per_token = saved.needed(step.plan.activations) / positions([median])
            _keep_copies(run, step, per_token, positions([by_length[-1]]))
    run.state.measured = True
    if run.parallel.in_lockstep:
        step.use(replace(step.plan, compile=False))
    compile_blocks(run, step)


def _record_passes(run: Run, step: Step) -> None:
    """Record passes as CUDA graphs; emit the reason if that is not possible."""
    from peftkit.forward.recorded import RecordedPasses, unrecorded, why_not_recorded  # a leaf

    task, model = run.task, run.model
    layout, head = getattr(task, "layout", None), getattr(task, "head", None)
    ignored = vars(type(task)).get("ignored_targets")
    cause = why_not_recorded(model, layout, head, ignored)
    if run.config.quantize_for != "none":
        cause = "train.quantize_for changes the adapted layers during the run."
    if cause or ignored is None or layout is None:
        run.say(unrecorded(cause).notice)
        step.fitting.requested = replace(step.fitting.requested, record=False)
        step.use(replace(step.plan, record=False))
        return
    step.passes = RecordedPasses(
        step.run_pass,
        partial(refresh_copies, model),
        model,
        step.blocks.blocks,
        step.parameters,
        layout,
        ignored,
        run.world.device,
    )


def _saved(run: Run, step: Step, row: object) -> ActivationBytes | None:
    """Count the bytes that one row saves in mode "keep"; None if a process runs out of memory."""
    blocks = step.blocks
    with rng.untouched(run.model, run.world.device), blocks.keeping_all():
        saved = attempt(
            lambda: saved_by(lambda: step.loss([row]), blocks.blocks, blocks.feed_forward),
            run.parallel.ran_out,
        )
    return None if run.world.max(int(saved is None)) else saved


def _most_offloaded(run: Run, step: Step, saved: ActivationBytes | None, row: object) -> int | None:
    """Return the tokens (rows if they have none) whose blocks' inputs fit into main memory.

    The minimum over all processes, which share it. None: unknown, or nothing can be offloaded.
    """
    most, free, world = UNLIMITED, free_bytes(), run.world
    if saved is not None and free is not None and "offload" in step.fitting.modes:
        per_token = sum(saved.inputs) / step.fitting.num_positions([row])
        most = int(AUTO_SHARE * free / world.world_size / max(per_token, 1.0))
    most = -world.max(-most)
    return None if most == UNLIMITED else most


def _refine(
    run: Run, step: Step, median: object, saved: ActivationBytes | None, longest: object
) -> None:
    """Use the first plan in the fallback order that fits by measured bytes.

    Raises:
        RunError: The longest row does not fit.
    """
    saved_by_longest = _saved(run, step, longest)
    available = _available(run, step)  # after the forward passes: weights and buffers are resident
    if saved is None or saved_by_longest is None:
        return  # the first step finds a plan that fits
    fitting, memory = step.fitting, run.config.memory
    measured = (saved, [median]), (saved_by_longest, [longest])
    length = fitting.num_positions([longest])
    can_tile = step.blocks.can_tile
    tile = replace(step.plan, tiles=True).tile(length) / length if can_tile else 1
    costs, tiled = (_agreed(run.world, fitting.costs(*measured, tile=share)) for share in (1, tile))

    def chosen(available: float) -> ExecutionPlan | None:
        most = fitting.most_offloaded
        return choose(
            fitting.requested,
            costs,
            available,
            length,
            tiled=tiled,
            most_offloaded=most,
            num_blocks=len(step.blocks.blocks),
        )

    plan = chosen(available)
    # graphs keep the memory of a pass, and passes of other shapes run beside them
    if plan is not None and plan.records_passes and chosen(available / 2) != plan:
        plan = replace(plan, record=False)
    budget = "free memory" if memory == "auto" else f"train.memory's {memory:g} GB"
    left = size(available, 2) if available > 0 else "nothing"
    problem = f"Weights, optimizer and buffers leave {left} of {budget} for activations."
    if plan is None:
        raise _too_little(run, step, longest, tiled, available, problem)
    step.use(plan)
    if memory == "auto" and plan == fitting.requested:
        return
    at_once = f"{plan.rows} rows" if plan.tokens is None else f"{plan.tokens:,} tokens"
    less = "" if plan == fitting.requested else " The rows of a step stay the same."
    text = f"So {plan.activations_in_words}, of at most {at_once} at a time.{less}"
    if plan.record != fitting.requested.record:
        text += " Passes are not recorded as CUDA graphs, which need as much memory again."
    if plan.activations == "offload" and fitting.most_offloaded is not None:
        unit = "tokens" if num_tokens(longest) else "rows"
        text += f" Main memory has room for the inputs of {fitting.most_offloaded:,} {unit}."
    run.say(Notice(f"{problem} {_in_words(costs, longest)} {text}"))


def _keep_copies(run: Run, step: Step, per_token: float, longest: int) -> None:
    """Keep copies of packed weights on a GPU if the plan leaves memory for all of them."""
    plan = step.plan
    is_full = plan.num_recomputed is not None  # as few blocks are recomputed as fit
    if plan.device != "cuda" or plan.placement == "stream" or plan.is_sharded or is_full:
        return
    activations = per_token * max(plan.tokens or plan.rows * longest, longest)
    if plan.records_passes:  # see _refine
        activations *= 2
    room = int(_available(run, step) - activations)
    step.use(replace(plan, keeps_copies=True))
    kept = attempt(lambda: keep_copies(run.model, room))
    if run.world.max(int(not kept)):
        step.use(plan)


def _available(run: Run, step: Step) -> float:
    """Return the bytes for activations, the minimum over all processes."""
    config = run.config
    state_bytes = STATE_BYTES[config.optimizer]
    pending = sum(p.numel() * (p.element_size() + state_bytes) for p in step.parameters.values())
    if step.plan.is_sharded:  # two blocks are gathered from other processes at the same time
        sizes = [sum(p.nbytes for p in block.parameters()) for block in step.blocks.blocks]
        pending += sum(sorted(sizes)[-2:])
    limit = None if config.memory == "auto" else config.memory * 1e9
    free = free_for_training(run.world.device, limit).memory or 0
    return -run.world.max(-int(free - pending))


def _agreed(world: World, costs: Costs) -> Costs:
    """Return the maximum of each cost over all processes."""
    if world.world_size == 1:
        return costs
    return [(mode, float(world.max(math.ceil(cost)))) for mode, cost in costs]


def _in_words(costs: Costs, row: object) -> str:
    texts = [f"{size(cost, 2)} if {ACTIVATIONS_IN_WORDS[mode]}" for mode, cost in costs]
    return f"A {'token' if num_tokens(row) else 'row'} takes {', '.join(texts)}."


def _too_little(
    run: Run, step: Step, longest: object, costs: Costs, available: float, problem: str
) -> RunError:
    mode, cost = min(costs, key=lambda mode_and_cost: mode_and_cost[1])
    fit, length = int(available / cost), num_tokens(longest)
    most_offloaded = step.fitting.most_offloaded
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
    if audit(run.model).quantized_as == "none":
        fixes.insert(0, "quantise the base (base.quantize: nf4)")
    elif step.plan.device == "cuda" and step.plan.placement == "device":
        fixes.insert(0, "stream the base (add the line `placement: stream` to the section `base:`)")
    fix = f"{fixes[0][0].upper()}{fixes[0][1:]}, {', '.join(fixes[1:-1])} or {fixes[-1]}."
    return RunError("one row alone does not fit into memory", found=problem, fix=fix)


def compile_blocks(run: Run, step: Step) -> None:
    """Compile the blocks if the plan requires it, or if the run is long enough.

    Raises:
        RunError: `train.compile: true` fails.
    """
    if step.plan.compile is None:
        work = work_of(run) / step.blocks.num_kinds
        # compiled blocks compute neither tiles nor a part of a block again, which rows need to fit
        is_eager = step.plan.tiles or step.plan.is_selective
        pays = work >= MIN_WORK.get(step.plan.device, math.inf) and not is_eager
        step.use(replace(step.plan, compile=pays))
    if step.plan.compile:
        _compile(run, step)


def _compile(run: Run, step: Step) -> None:
    from peftkit.train.compiled import why_refused

    run.say(Stage("Compiling the model's blocks (without it: --set train.compile=false)"))
    problem = step.blocks.why_not_compiled() or why_refused(run, step)
    if run.world.max(int(problem != "")) == 0:
        return
    problem = problem or "another process could not."
    if run.config.compile is True:
        raise RunError(
            "train.compile: true is not possible here",
            found=problem,
            fix="Set it to auto or false: the run has the same result but is slower.",
        )
    step.use(replace(step.plan, compile=False))
    run.say(uncompiled(problem).notice)


def work_of(run: Run) -> float:
    """Return the tokens of the whole run times the parameters of the model."""
    all_tokens, num_rows = int(tokens_of_each(run.rows).sum()), len(run.rows)
    per_step = run.config.rows_per_step(run.world.world_size)
    tokens = all_tokens * run.num_steps * min(per_step / num_rows, 1.0)
    return tokens * audit(run.model).num_parameters
