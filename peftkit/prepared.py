"""All that comes before the first step: base, initial values, adapter, task and rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from peftkit.adapter import Adapter, attach, check_fits
from peftkit.base.load import Base, load_base, open_base
from peftkit.base.new_tokens import add_tokens, token_rows
from peftkit.base.sharding import local_bytes, shard_base
from peftkit.base.skeleton import skeleton
from peftkit.events import Listener, Notice, ignore
from peftkit.execution.environment import default_device, free_now
from peftkit.execution.plan import ExecutionPlan
from peftkit.execution.world import World
from peftkit.formats.card import (
    adapter_table,
    small_reach,
)
from peftkit.formats.continued import Continued, continue_adapter, read_side_adapter
from peftkit.formats.peft.folder import read_adapter
from peftkit.methods.base import InitValues, Method
from peftkit.methods.data_init import as_on_main, init_from_rows, loftq_starts, with_saved_ranks
from peftkit.methods.lora import LoRA
from peftkit.model.blocks import STREAMED
from peftkit.planning.resolve import plan_as_requested, resolve_plan
from peftkit.recipe import Recipe
from peftkit.tasks.base import Task
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.token_task import DocumentTask, Reference
from peftkit.train.checkpoints.checkpoint import Checkpoints
from peftkit.train.checkpoints.identity import fingerprint


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that comes before the first step: the adapter on its base, and the encoded rows.

    Attributes:
        recipe: With its defaults as they are used here.
        plan: How it is carried out here, before its rows are measured.
        task: On this base. settings: What makes it again, labels and all.
        continued: What the adapter was, if it goes on from another.
    """

    recipe: Recipe
    plan: ExecutionPlan
    base: Base
    adapter: Adapter
    task: Task
    settings: TaskConfig
    train: Sequence[Any]
    eval: Sequence[Any]
    continued: Continued | None = None


def prepare(
    recipe: Recipe,
    *,
    base: Base | None = None,
    plan: ExecutionPlan | None = None,
    resume: bool = False,
    ranks: World | None = None,
    on_event: Listener = ignore,
) -> Prepared:
    """Do everything that comes before the first step.

    Args:
        base: The recipe's base, loaded already, without an adapter.
        plan: How the recipe is carried out; by default as `resolve_plan` decides.
        resume: A checkpoint is loaded next: the adapter has no values of its own until then.
        ranks: The processes that do this together.

    Raises:
        PeftkitError: The base, a target or the data is not as the recipe says.
    """
    settings = recipe.task.resolve(recipe.data)
    if base is None:
        if not recipe.method.start_from:  # before an hour of loading, not after it
            known = recipe.base.model_dump(include={"model", "revision"})
            check_fits(skeleton(**known, purpose=settings.purpose), recipe.method)
        plan = plan or resolve_plan(recipe, on_event)
        if ranks is not None:
            ranks.check_equal_across_ranks(plan=plan.as_dict())
        base = open_base(recipe.base, settings.purpose, plan, world=ranks, on_event=on_event)
        if ranks is not None:
            ranks.check_equal_across_ranks(base={"fingerprint": base.fingerprint})
    plan = plan or _plan_over(recipe, base)
    continued = None
    if recipe.method.start_from:
        continued = continue_adapter(
            base,
            recipe.method,
            recipe.base.quantize,
            auto_class=settings.auto_class,
            on_event=on_event,
        )
        adapter = continued.adapter
    else:
        method = _with_head_and_tokens(recipe, base)
        method, starts = _initial_values(recipe, method, settings, base, resume, on_event)
        seed = recipe.train.seed
        adapter = attach(base.model, method, starts=starts, fresh=not resume, seed=seed)
    on_event(adapter_table(adapter))
    if plan.is_sharded:
        base = _sharded(plan, base, on_event)
    if told := small_reach(adapter, base.audit):
        on_event(Notice(told))
    if why := _why_unpacked(recipe, adapter):
        recipe = recipe.model_copy(update={"data": recipe.data.without_packing()})
        on_event(Notice(f"Rows are not packed: {why}."))
    task = settings.on(base.model, base.processor, recipe.data, on_event=on_event)
    if isinstance(task, DocumentTask):
        task.reference = Reference(*_reference(recipe, base, adapter, continued))
        for folder in task.other_adapters:
            task.add_adapter(folder, read_side_adapter(folder, base))
    recipe = recipe.model_copy(update={"data": task.data})
    train, evaluation = task.load_splits(recipe.data)
    if ranks is not None:
        ranks.check_equal_across_ranks(
            rows={"train": _known_by(train), "eval": _known_by(evaluation)}
        )
    return Prepared(recipe, plan, base, adapter, task, settings, train, evaluation, continued)


def _plan_over(recipe: Recipe, base: Base) -> ExecutionPlan:
    """Return the plan of a recipe whose base is loaded."""
    dtype = str(base.model.dtype).removeprefix("torch.")
    plan = plan_as_requested(recipe, free_now(base.device), dtype)
    return replace(plan, placement="stream" if hasattr(base.model, STREAMED) else "device")


def _why_unpacked(recipe: Recipe, adapter: Adapter) -> str:
    """Return why rows may not be packed although nobody said so; "" if they may."""
    if recipe.model_copy(update={"method": adapter.method}).packs_beside_virtual_tokens:
        return f"with {adapter.method.type} each has its own virtual tokens"
    if recipe.train.context_parallel > 1 and recipe.data.packing:
        return "each lies on several processes, for itself"
    return ""


def _known_by(rows: Sequence[Any]) -> str:
    """Return the number of rows, and what the first and the last one say."""
    return f"{len(rows)} rows, {fingerprint([rows[n] for n in (0, -1) if len(rows)])}"


def _with_head_and_tokens(recipe: Recipe, base: Base) -> Method:
    """Return the method with all that is trained beside it; the base takes the new tokens in."""
    whole = tuple(dict.fromkeys((*recipe.method.train_fully, *base.head)))
    beside: dict[str, Any] = {"train_fully": whole}
    if recipe.base.new_tokens:
        ids = add_tokens(base, recipe.base.new_tokens)
        beside["token_rows"] = token_rows(base.model, ids)
    return recipe.method.model_copy(update=beside)


def _initial_values(
    recipe: Recipe,
    method: Method,
    settings: TaskConfig,
    base: Base,
    resume: bool,
    on_event: Listener,
) -> tuple[Method, dict[str, InitValues] | None]:
    """Return the method, its ranks known, and initial values that need more than a layer, if any.

    This stage lies between loading the base and attaching the adapter: EVA reads training rows,
    LoftQ the weights before they were quantised. A resumed run loads its values, and has the ranks
    of its checkpoint.
    """
    if not isinstance(method, LoRA) or not method.initializer:
        return method, None
    if resume:
        newest = Checkpoints(recipe.train.output_dir, keep=1).newest_valid(ignore)
        return with_saved_ranks(base.model, method, read_adapter(newest.folder).method), None
    if method.init == "loftq":
        known = recipe.base.model_dump(include={"model", "revision", "dtype"})
        original = load_base(**known, purpose=settings.purpose, device="cpu", on_event=on_event)
        return method, loftq_starts(base.model, method, original.model)
    task = settings.on(base.model, base.processor, recipe.data)
    rows, _ = task.load_splits(recipe.data.model_copy(update={"eval": None}))
    found, starts = init_from_rows(base.model, method, task, rows, seed=recipe.train.seed)
    return as_on_main(base.model, method, found, starts, World(base.device))


def _sharded(plan: ExecutionPlan, base: Base, on_event: Listener) -> Base:
    """Spread the base over the processes; return it as it is then, on this process's device."""
    device = default_device()
    whole = local_bytes(base.model)["base"]
    shard_base(base.model, device, offload=plan.shard == "offload")
    own = local_bytes(base.model)["base"]
    on_event(Notice(f"The base is spread over processes: {own / 1e9:.2f} of {whole / 1e9:.2f} GB."))
    return replace(base, device=device)


def _reference(
    recipe: Recipe, base: Base, adapter: Adapter, continued: Continued | None
) -> tuple[Callable[[], AbstractContextManager[None]], str]:
    """Return what makes the model what it is before training, and what tells that from others."""
    precision = f"{base.model.dtype} {recipe.base.quantize} {recipe.base.double_quant}"
    key = f"{base.fingerprint} {precision}"
    if continued is None:
        return adapter.disabled, key
    return partial(adapter.swapped_state, continued.start), f"{key} {continued.digest}"
