"""The execution plan of a recipe, made before anything is loaded.

`base.placement: auto` streams and `train.shard: auto` shards where `fits_device`
(base/request.py) finds that one device cannot hold the base. How many rows go through the model
at once, and their activation mode, follow from the rows themselves (train/memory.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from peftkit.base.pretrained import is_packed
from peftkit.base.request import ROOM, STREAMED, compute_dtype, fits_device, in_words
from peftkit.base.skeleton import on_meta, read_config, weight_bytes
from peftkit.events import Listener, Notice
from peftkit.execution.environment import Environment, default_device, free_now, used_bytes
from peftkit.execution.plan import ExecutionPlan
from peftkit.execution.world import World
from peftkit.model.blocks import recomputable_blocks
from peftkit.recipe import Recipe


def resolve_plan(recipe: Recipe, on_event: Listener) -> ExecutionPlan:
    """Decide how a recipe is carried out here, with a notice if the base leaves the device.

    To be called on all processes of a run, which come to the same plan.

    Raises:
        PeftkitError: The base's config, or the adapter that is continued, is of no use.
    """
    recipe = as_continued(recipe)
    device = default_device()
    here = free_now(device)
    if here.memory is not None and recipe.train.memory != "auto":
        here = here.at_most(int(recipe.train.memory * 1e9) - used_bytes(device))
    dtype = compute_dtype(recipe.base, device)
    plan = plan_as_requested(recipe, here, str(dtype).removeprefix("torch."))
    if here.memory is None or not (_may_shard(recipe, plan) or _may_stream(recipe, plan)):
        return plan
    config = config_of(recipe)
    weights = weight_bytes(config, recipe.base, recipe.task.plain_purpose, dtype)

    def step_fits(plan: ExecutionPlan, weights: int) -> bool:
        from peftkit.planning.memory import smallest_step  # rarely needed, and slow to import

        needed = smallest_step(recipe, config, here, plan, on_event)
        return (weights / ROOM if needed is None else needed) <= here.usable

    if _on_all(fits_device(weights, here.usable, lambda: step_fits(plan, weights)), here, device):
        return plan
    sizes = in_words(weights, here.usable)
    if weights <= here.usable:
        sizes += " A training step of one row does not fit with it."
    if _may_shard(recipe, plan):
        plan, mode = replace(plan, shard="base"), "(train.shard: auto)"
        part = weights // plan.num_processes
        if not _on_all(step_fits(plan, part), here, device):
            plan, mode = replace(plan, shard="offload"), f", its parts in main memory {mode}"
        on_event(Notice(f"The base is sharded over the processes {mode}. {sizes}"))
        return plan
    if here.world_size > 1 and recipe.train.shard == "auto":
        sizes += f" It is not sharded: method.type {recipe.method.type}."
    if _may_stream(recipe, plan) and _can_stream(recipe, config):
        on_event(Notice(f"{STREAMED} {sizes}"))
        return replace(plan, placement="stream")
    on_event(Notice(f"The base leaves too little memory to train. {sizes}"))
    return plan


def as_continued(recipe: Recipe) -> Recipe:
    """Return a recipe with the method of the adapter that it continues, if it does.

    Without rows of new tokens, which are few, and which a plain base has no place for.

    Raises:
        AdapterError: There is no such adapter; one on the hub is fetched first.
    """
    if not recipe.method.start_from:
        return recipe
    from peftkit.formats.find_adapter import adapter_folder
    from peftkit.formats.peft.load import read_adapter

    method = read_adapter(adapter_folder(recipe.method.start_from)).method
    update: dict[str, Any] = {"start_from": None, "token_rows": ()}
    if "dropout" in recipe.method.model_fields_set and hasattr(method, "dropout"):
        update["dropout"] = getattr(recipe.method, "dropout", None)
    return recipe.model_copy(update={"method": method.model_copy(update=update)})


def plan_as_requested(recipe: Recipe, here: Environment, dtype: str = "") -> ExecutionPlan:
    """Return a recipe's plan where everything fits."""
    shard = recipe.train.shard
    return recipe.train.plan(
        here.kind,
        here.world_size,
        placement="stream" if recipe.base.placement == "stream" else "device",
        shard="none" if shard == "auto" else shard,
        dtype=dtype,
    )


def config_of(recipe: Recipe) -> Any:
    """Read the config of the model that a recipe names, as it will be loaded."""
    base = recipe.base
    purpose = replace(recipe.task.plain_purpose, rope_scaling=base.rope_scaling)
    return read_config(base.model, base.revision, purpose)


def _may_shard(recipe: Recipe, plan: ExecutionPlan) -> bool:
    """Tell whether the recipe leaves it open to shard the base over the processes."""
    is_open = recipe.train.shard == "auto" and plan.placement == "device"
    return is_open and plan.num_processes > 1 and recipe.method.wraps_linear_layers


def _may_stream(recipe: Recipe, plan: ExecutionPlan) -> bool:
    """Tell whether the recipe leaves it open to stream the base to the device."""
    return recipe.base.placement == "auto" and plan.device == "cuda" and not plan.is_sharded


def _can_stream(recipe: Recipe, config: Any) -> bool:
    """Tell whether the base has packed blocks, and whether activations may be recomputed."""
    if not is_packed(config, recipe.base) or recipe.train.gradient_checkpointing is False:
        return False
    return bool(recomputable_blocks(on_meta(config, recipe.task.plain_purpose)))


def _on_all(holds: bool, here: Environment, device: torch.device) -> bool:
    """Tell whether something holds on every process: all do the same."""
    return not World(device).max(int(not holds)) if here.world_size > 1 else holds
