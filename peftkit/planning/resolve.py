"""The execution plan of a recipe, before its base and rows are loaded.

`place_weights` (base/request.py) resolves `base.placement: auto` and `train.shard: auto`. The
activation mode and the size of micro-batches follow from the rows (train/memory.py).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch

from peftkit.base.load import processors_of
from peftkit.base.pretrained import is_packed
from peftkit.base.request import ROOM, compute_dtype, place_weights
from peftkit.base.skeleton import (
    find_config,
    hollow,
    on_meta,
    read_config,
    weight_bytes,
    with_depth,
)
from peftkit.data.records import Dropped, sources_of
from peftkit.data.rows.lazy import num_tokens
from peftkit.events import Listener, Notice, ignore
from peftkit.execution.environment import Environment, free_for_training, select_device
from peftkit.execution.plan import ExecutionPlan, Shard, plan_of
from peftkit.execution.world import World
from peftkit.figures import dtype_name
from peftkit.model.blocks import recomputable_blocks
from peftkit.recipe import Recipe


def encode_first(
    recipe: Recipe, number: int, on_event: Listener = ignore
) -> tuple[object, list[object]]:
    """Return a recipe's task without weights, and the first rows of its training data.

    The task is created for a model of one block without weights: rows depend on the tokenizer and
    the config alone.

    Raises:
        PeftkitError: The base, its tokenizer or the rows cannot be read.
    """
    data = recipe.data.without_packing()
    config = recipe.task.resolve(data)
    location, base = find_config(recipe.base.model, recipe.base.revision, config.purpose)
    model = hollow(on_meta(with_depth(base, 1), config.purpose, torch.float32))
    processors = processors_of(location, config.purpose, ignore)
    processor = next(filter(None, reversed(processors)))
    task = config.on(model, processor, data, on_event=on_event)
    encoder = task.rows.encoder
    encoder.drops_invalid = data.drop_invalid
    where = encoder.file_of(sources_of(data)[0].path)
    records = chain.from_iterable(part() for part in encoder.parts(where))
    return task, encoder.encode_records(list(islice(records, number)), where).rows


def tokens_of_first(recipe: Recipe, number: int) -> list[int]:
    """Return the tokens of each of a recipe's first rows, 0 for dropped ones; [] if unknown."""
    try:
        rows = encode_first(recipe, number)[1]
        return [0 if isinstance(row, Dropped) else num_tokens(row) for row in rows]
    except Exception:  # a run reports the reason
        return []


def resolve_plan(recipe: Recipe, on_event: Listener) -> ExecutionPlan:
    """Return a recipe's plan on this machine; emit a notice if the base leaves the device.

    All processes of a run call it and get the same plan.

    Raises:
        PeftkitError: The config of the base, or the adapter to continue, cannot be used.
    """
    if folder := recipe.method.start_from:
        recipe = as_continued(recipe, folder)
    base, train = recipe.base, recipe.train
    device = select_device()
    here = free_for_training(device, None if train.memory == "auto" else train.memory * 1e9)
    dtype = compute_dtype(base, device)
    plan = plan_of(
        train,
        here.kind,
        here.world_size,
        placement="stream" if base.placement == "stream" else "device",
        dtype=dtype_name(dtype),
    )
    may_shard = train.shard == "auto" and plan.placement == "device" and here.world_size > 1
    may_stream = base.placement == "auto" and here.kind == "cuda" and not plan.is_sharded
    can_shard = may_shard and recipe.method.wraps_linear_layers
    if here.memory is None or not (can_shard or may_stream):
        return plan
    return _placed(recipe, plan, here, may_shard, may_stream, on_event)


def _placed(
    recipe: Recipe,
    plan: ExecutionPlan,
    here: Environment,
    may_shard: bool,
    may_stream: bool,
    on_event: Listener,
) -> ExecutionPlan:
    """Return a plan with the placement and the sharding with which the base and a step fit."""
    base, train, purpose = recipe.base, recipe.train, recipe.task.plain_purpose
    device = select_device()
    can_shard = may_shard and recipe.method.wraps_linear_layers
    config = config_of(recipe)
    weights = weight_bytes(config, base, purpose, compute_dtype(base, device))

    def can_stream() -> bool:
        if not (may_stream and is_packed(config, base)) or train.gradient_checkpointing is False:
            return False
        return bool(recomputable_blocks(on_meta(config, purpose)))

    def step_fits(shard: Shard) -> bool:
        from peftkit.planning.memory import smallest_step  # rarely needed, and slow to import

        # without a count, weights on the device may take a share of its memory
        part = weights if shard == "none" else weights // here.world_size
        counted = smallest_step(recipe, config, here, replace(plan, shard=shard), on_event)
        return (part / ROOM + here.process if counted is None else counted) <= here.room

    def agree(holds: bool) -> bool:
        return not World(device).max(int(not holds)) if here.world_size > 1 else holds

    place = place_weights(
        weights,
        here.usable,
        can_stream=can_stream,
        can_shard=can_shard,
        step_fits=step_fits,
        agree=agree,
    )
    notice = place.notice
    if not place.fits:
        notice = f"The base leaves too little memory to train. {notice}"
    if notice and may_shard and not can_shard:
        notice += f" It is not sharded: method.type {recipe.method.type}."
    if notice:
        on_event(Notice(notice))
    return replace(plan, placement=place.placement, shard=place.shard)


def as_continued(recipe: Recipe, folder: str) -> Recipe:
    """Return a recipe with the method of the adapter in a folder, which it continues.

    The few rows of new tokens are omitted, since a plain base lacks them. An adapter on the hub is
    downloaded.

    Raises:
        AdapterError: There is no such adapter.
    """
    from peftkit.formats.find_adapter import adapter_folder
    from peftkit.formats.peft.load import read_adapter

    method = read_adapter(adapter_folder(folder)).method
    update: dict[str, Any] = {"start_from": None, "token_rows": ()}
    if "dropout" in recipe.method.model_fields_set and hasattr(method, "dropout"):
        update["dropout"] = getattr(recipe.method, "dropout", None)
    return recipe.model_copy(update={"method": method.model_copy(update=update)})


def config_of(recipe: Recipe) -> Any:
    """Read the config of a recipe's base, with its rope_scaling."""
    base = recipe.base
    purpose = replace(recipe.task.plain_purpose, rope_scaling=base.rope_scaling)
    return read_config(base.model, base.revision, purpose)
