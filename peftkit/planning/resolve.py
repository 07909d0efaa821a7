"""Where a recipe's base is kept, where it leaves that open: counted before the base is loaded.

`base.placement: auto` streams and `train.shard: auto` shards exactly when the whole base and the
smallest working step, one row of the longest length, are more than the device has free. A base of
less than a quarter of that is not counted: it stays.
"""

from __future__ import annotations

from typing import Any

from peftkit.base.shapes import read_config
from peftkit.errors import ConfigError
from peftkit.events import Listener, Notice
from peftkit.execution.environment import (
    Environment,
    default_device,
    free_now,
    used_bytes,
    world_size,
)
from peftkit.planning.memory import MemoryEstimator, Strategy
from peftkit.planning.step import plain_purpose
from peftkit.planning.step_estimator import CountError
from peftkit.run.config import Recipe
from peftkit.train.sharding import check_sharding
from peftkit.train.world import World

SMALL = 0.25
"""Of the free memory: what a base takes for whose sake nothing is counted."""


def settled(recipe: Recipe, on_event: Listener) -> Recipe:
    """Return a recipe that says where its base is kept; tells why, if it is not the whole device.

    Raises:
        PeftkitError: The base's config is of no use.
    """
    processes = world_size()
    may_shard = recipe.train.shard == "auto" and processes > 1
    may_stream = recipe.base.placement == "auto" and recipe.train.shard in ("auto", "none")
    device = default_device()
    environment = free_now(device)
    if environment.memory is not None and recipe.train.memory != "auto":
        environment = environment.at_most(int(recipe.train.memory * 1e9) - used_bytes(device))
    if environment.memory is None or not (may_shard or (may_stream and environment.on_gpu)):
        return _with(recipe, recipe.base.placement, "none")
    try:
        costs, needed = _needed(recipe, environment)
    except CountError as error:  # on all processes alike
        on_event(Notice(f"{error} So the weights alone tell whether the base fits the device."))
        return _with(recipe, recipe.base.placement, "none")
    lacks = needed is not None and not needed.fits
    if processes > 1:  # all do the same
        lacks = bool(World(device).max(int(lacks)))
    if not lacks:
        return _with(recipe, "device", "none")
    needed = needed or costs.smallest()  # another process has less memory
    found = f"It and a row of {costs.length:,} tokens take {_gb(needed.peak_bytes)}; "
    found += f"{_gb(environment.usable)} are free."
    if may_shard:
        problem = _hinders(recipe)
        if not problem:
            on_event(Notice(f"The base is spread over the processes (train.shard: auto). {found}"))
            return _with(recipe, "device", "base")
        found += f" It is not spread over the processes: {problem}"
    if not (may_stream and environment.on_gpu and costs.can_stream):
        on_event(Notice(f"The base leaves too little memory to train. {found}"))
        return _with(recipe, "device", "none")
    less = costs.smallest("stream")
    on_event(
        Notice(
            f"The base's blocks are streamed to the device (base.placement: auto). {found} "
            f"Streamed: {_gb(less.peak_bytes)}."
        )
    )
    return _with(recipe, "stream", "none")


def _needed(recipe: Recipe, environment: Environment) -> tuple[MemoryEstimator, Strategy | None]:
    """Return the smallest working step with the whole base; None where that is not in question."""
    config: Any = read_config(recipe.base.model, recipe.base.revision, plain_purpose(recipe.task))
    costs = MemoryEstimator(recipe, config, environment)
    if costs.reckoner.base.resident <= SMALL * environment.usable:
        return costs, None
    return costs, costs.smallest()


def _hinders(recipe: Recipe) -> str:
    """Return why a base cannot be sharded, or ""."""
    try:
        check_sharding(recipe.train, recipe.method.type)
    except ConfigError as error:
        return str(error)
    return ""


def _with(recipe: Recipe, placement: str, shard: str) -> Recipe:
    asked = recipe.train.shard
    base = recipe.base.model_copy(update={"placement": placement})
    train = recipe.train.model_copy(update={"shard": shard if asked == "auto" else asked})
    return recipe.model_copy(update={"base": base, "train": train})


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
