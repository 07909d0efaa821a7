"""The execution plan of a recipe, made before anything is loaded.

`base.placement: auto` streams and `train.shard: auto` shards exactly when the whole base and the
smallest working step, one row of the longest length, are more than the device has free. A base of
less than a quarter of that is not counted: it stays. How many rows go through the model at once,
and what is kept of them, is refined by the rows themselves (train/memory/prepare.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from peftkit.base.placement import ROOM
from peftkit.base.request import DTYPES, fast_dtype
from peftkit.events import Listener, Notice
from peftkit.execution.environment import Environment, default_device, free_now, used_bytes
from peftkit.execution.plan import ExecutionPlan
from peftkit.execution.world import World
from peftkit.planning.memory import MemoryEstimator
from peftkit.planning.step import config_of
from peftkit.planning.step_estimator import CountError
from peftkit.run.config import Recipe

SMALL = 0.25
"""Of the free memory: what a base takes for whose sake nothing is counted."""


def resolve_plan(recipe: Recipe, on_event: Listener) -> ExecutionPlan:
    """Decide how a recipe is carried out here; tell why, if the base is not whole on the device.

    To be called on all processes of a run, which come to the same plan.

    Raises:
        PeftkitError: The base's config is of no use.
    """
    device = default_device()
    here = free_now(device)
    if here.memory is not None and recipe.train.memory != "auto":
        here = here.at_most(int(recipe.train.memory * 1e9) - used_bytes(device))
    dtype = DTYPES.get(recipe.base.dtype) or fast_dtype(device)
    plan = plan_as_asked(recipe, here, str(dtype).removeprefix("torch."))
    others = list(_elsewhere(recipe, plan))
    if here.memory is None or not others:
        return plan
    config: Any = config_of(recipe.base, recipe.task)
    estimator = MemoryEstimator(recipe, config, here)
    needed = _needed(estimator, plan, on_event)
    if not _lacks(needed, here, device):
        return plan
    needed = needed or estimator.smallest().peak_bytes  # another process has less memory
    found = f"It and a row of {estimator.length:,} tokens take {_gb(needed)}; "
    found += f"{_gb(here.usable)} are free."
    if (
        here.world_size > 1
        and recipe.train.shard == "auto"
        and not recipe.method.beside_linear_layers
    ):
        found += f" It is not spread over processes: method.type {recipe.method.type}."
    for other in others:
        if other.placement == "stream" and not estimator.can_stream:
            continue
        less = estimator.smallest(other.placement, other.shard).peak_bytes
        if not _lacks(less, here, device) or other == others[-1]:
            on_event(Notice(f"{_told(other)} {found} So: {_gb(less)}."))
            return other
    on_event(Notice(f"The base leaves too little memory to train. {found}"))
    return plan


def plan_as_asked(recipe: Recipe, here: Environment, dtype: str = "") -> ExecutionPlan:
    """Return a recipe's plan where everything fits."""
    shard = recipe.train.shard
    return recipe.train.plan(
        here.kind,
        here.world_size,
        placement="stream" if recipe.base.placement == "stream" else "device",
        shard="none" if shard == "auto" else shard,
        dtype=dtype,
    )


def _elsewhere(recipe: Recipe, plan: ExecutionPlan) -> Iterator[ExecutionPlan]:
    """Yield plans with the base elsewhere, as far as the recipe leaves it open; fastest first."""
    open_shard = recipe.train.shard == "auto" and plan.placement == "device"
    if open_shard and plan.num_processes > 1 and recipe.method.beside_linear_layers:
        yield replace(plan, shard="base")
        yield replace(plan, shard="offload")
    elif recipe.base.placement == "auto" and plan.device == "cuda" and not plan.is_sharded:
        yield replace(plan, placement="stream")


def _lacks(needed: int, here: Environment, device: torch.device) -> bool:
    """Tell whether so much is more than there is, on any process: all do the same."""
    lacks = needed > here.usable
    return bool(World(device).max(int(lacks))) if here.world_size > 1 else lacks


def _needed(estimator: MemoryEstimator, plan: ExecutionPlan, on_event: Listener) -> int:
    """Return the bytes of the smallest working step with the whole base; 0 if that is small."""
    weights, usable = estimator.steps.base.resident, estimator.environment.usable
    if weights <= SMALL * usable:
        return 0
    try:
        return estimator.smallest(plan.placement, plan.shard).peak_bytes
    except CountError as error:  # on all processes alike
        on_event(Notice(f"{error} So the weights alone tell whether the base fits the device."))
        return int(weights / ROOM)


def _told(plan: ExecutionPlan) -> str:
    if plan.shard == "offload":
        return (
            "The base is spread over the processes, its parts in main memory (train.shard: auto)."
        )
    if plan.shard == "base":
        return "The base is spread over the processes (train.shard: auto)."
    return "The base's blocks are streamed to the device (base.placement: auto)."


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
