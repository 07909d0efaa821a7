"""What a recipe's step takes in an environment, counted from the config of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from peftkit.base.request import DTYPES, fast_dtype
from peftkit.execution.environment import Environment
from peftkit.execution.plan import Activations, ExecutionPlan, Placement, Shard
from peftkit.planning.cards import LINK, WIRES, card_of
from peftkit.planning.footprint import WeightFootprint, spread, streamed
from peftkit.planning.step import Setup
from peftkit.planning.step_estimator import StepEstimator, steps_of
from peftkit.run.config import Recipe
from peftkit.train.optim import STATE_BYTES

LONGEST = 1 << 20
STEP = 64
"""Rows' lengths are told in multiples of it."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way of keeping the base and its activations.

    Attributes:
        placement: Whether the base is on the device, or its blocks are streamed to it.
        peak_bytes: Of a step of the rows that go through the model at once.
        by_category: The same: weights, adapters, gradients, optimizer, activations.
        fits: Whether it is within the memory that is usable.
        longest_row: Tokens of the longest single row that fits; 0: none does.
        most_rows: Rows of the asked length that fit at once.
        step_flops: Of forward and backward pass of one batch.
        moved_bytes: That reach the device meanwhile: weights of streamed blocks.
        compute_bound_tokens: Tokens at once from which computing takes longer than that; 0: none
            moves, or it is not a GPU's.
        host_bytes: That wait in main memory.
    """

    placement: Placement
    activations: Activations
    peak_bytes: int
    by_category: Mapping[str, int]
    fits: bool
    longest_row: int
    most_rows: int
    step_flops: int
    moved_bytes: int = 0
    compute_bound_tokens: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceEstimate:
    """What each of several cards has where the base is spread over them (train.shard: base).

    Attributes:
        wire_bytes: That each card gets in a step of one batch: blocks, and the adapter's gradients.
        compute_bound_tokens: GB/s between cards to the tokens at once from which computing takes
            longer.
    """

    cards: int
    activations: Activations
    peak_bytes: int
    by_category: Mapping[str, int]
    fits: bool
    longest_row: int
    wire_bytes: int
    compute_bound_tokens: Mapping[str, int]


class MemoryEstimator:
    """Counts the steps of one recipe.

    Args:
        config: The model's.
        link: GB/s from main memory to the device.

    Attributes:
        rows, length: Rows, and tokens of each of their texts, that go through the model at once.
        steps: Counts the steps of its setup.
        card: The named GPU that is like the machine's.
    """

    def __init__(
        self, recipe: Recipe, config: Any, environment: Environment, *, link: float = LINK
    ) -> None:
        self.recipe, self.config, self.environment, self.link = recipe, config, environment, link
        self.card = card_of(environment.memory or 0)
        limit = getattr(config.get_text_config(), "max_position_embeddings", None)
        self.limit: int = limit or LONGEST
        self.length = min(recipe.data.max_length or self.limit, self.limit)
        rows, num_texts = recipe.train.batch_size, recipe.task.texts_per_row
        tokens = recipe.train.tokens_at_once(environment.kind)
        if tokens is not None:
            rows = max(1, min(rows, tokens // (num_texts * self.length)))
        self.rows = rows
        setup = setup_of(recipe, config, environment)
        self.steps = steps_of(setup, None if environment.on_gpu else environment.usable)

    @cached_property
    def _bare(self) -> StepEstimator:
        """Of a base that is not all on the device, so that no unpacked weights are kept."""
        if not self.steps.setup.kept:
            return self.steps
        return steps_of(setup_of(self.recipe, self.config, self.environment))

    @cached_property
    def streams(self) -> WeightFootprint:
        """What the device has where blocks are streamed."""
        return streamed(self.steps.whole)

    @cached_property
    def can_stream(self) -> bool:
        """Whether the base has blocks that can be streamed, and its activations be recomputed."""
        wish = self.recipe.train.gradient_checkpointing
        return self.streams.elsewhere > 0 and wish is not False

    def activations(self, placement: Placement = "device") -> tuple[Activations, ...]:
        """Return what may be kept of activations, the fastest first."""
        wish, streamed = self.recipe.train.gradient_checkpointing, placement == "stream"
        return self.steps.activation_modes(wish, streamed=streamed)

    def ways(self) -> Iterator[Strategy]:
        """Yield the ways that base.placement allows, the fastest first.

        Of `auto` streamed ones come where no other lets a row of the asked length through.
        """
        asked, found = self.recipe.base.placement, False
        if asked != "stream":
            for activations in self.activations():
                way = self.way("device", activations)
                found |= way.longest_row >= self.length
                yield way
        may = asked == "stream" or (asked == "auto" and self.environment.on_gpu and not found)
        if may and self.can_stream:
            for activations in self.activations("stream"):
                yield self.way("stream", activations)

    def smallest(self, placement: Placement = "device", shard: Shard = "none") -> Strategy:
        """Return the way of one row that takes least."""
        return self.way(placement, self.activations(placement)[-1], rows=1, shard=shard)

    def way(
        self,
        placement: Placement,
        activations: Activations,
        rows: int | None = None,
        shard: Shard = "none",
    ) -> Strategy:
        """Count one way, of the recipe's rows at once or of so many."""
        held = self.streams if placement == "stream" else None
        if shard != "none":
            number = self.environment.world_size
            held = spread(self.steps.whole, number, offload=shard == "offload")
        rows = rows or self.rows
        peak, longest, flops = self._count(held, activations, rows)
        taken = sum(peak.values())
        return Strategy(
            placement,
            activations,
            taken,
            peak,
            taken <= self.environment.room,
            min(longest // STEP * STEP, self.limit),
            longest // self.length,
            flops,
            0 if held is None else held.moved,
            0 if held is None else self._hidden_from(held.moved, flops / rows, self.link),
            0 if held is None else held.elsewhere,
        )

    def share(self, cards: int) -> DeviceEstimate:
        """Count one card of several, with the first way of keeping activations that fits."""
        offload = self.recipe.train.shard == "offload"
        held = spread(self.steps.whole, cards, offload=offload) if cards > 1 else None
        summed = 2 * (cards - 1) * sum(p.nbytes for p in self.steps.trained) // cards
        for activations in self.activations():
            peak, longest, flops = self._count(held, activations, self.rows)
            if sum(peak.values()) <= self.environment.room:
                break
        taken, wire = sum(peak.values()), summed + (0 if held is None else held.moved)
        fits, longest = taken <= self.environment.room, min(longest // STEP * STEP, self.limit)
        hidden = {f"{w:g}": self._hidden_from(wire, flops / self.rows, w) for w in WIRES}
        return DeviceEstimate(cards, activations, taken, peak, fits, longest, wire, hidden)

    def _hidden_from(self, moved: int, flops_of_row: float, link: float) -> int:
        """Return the tokens whose computing takes as long as bytes take to come at GB/s."""
        seconds = moved / (link * 1e9) if self.environment.on_gpu else 0.0
        return round(seconds * self.card.rate / (flops_of_row / self.length))

    def _count(
        self, held: WeightFootprint | None, activations: Activations, rows: int
    ) -> tuple[dict[str, int], int, int]:
        """Return bytes by category, the tokens of a row that would fit, and FLOPs."""
        steps = self.steps if held is None else self._bare
        count = steps.count(rows, self.length, activations)
        state = STATE_BYTES[self.recipe.train.optimizer] * steps.num_trained
        found = {**count.peak, "optimizer": state, "process": self.environment.process}
        if held is not None:
            found["weights"] += held.at_most - steps.base.resident
        if self.recipe.train.gradient_accumulation > 1:  # a second batch beside the first's
            found["gradients"] = max(found["gradients"], sum(p.nbytes for p in steps.trained))
        slope = max(steps.bytes_per_token(rows, self.length, activations), 1.0)
        left = self.environment.room - sum(found.values())
        return found, max(int(rows * self.length + left / slope), 0), count.flops


def setup_of(recipe: Recipe, config: Any, environment: Environment) -> Setup:
    """Return what a recipe trains, and how it is held."""
    base = recipe.base
    fast = torch.bfloat16 if environment.on_gpu else fast_dtype(torch.device("cpu"))
    return Setup(
        config,
        recipe.task,
        recipe.method,
        base.quantize,
        base.double_quant,
        DTYPES.get(base.dtype) or fast,
        ExecutionPlan(device=environment.kind, group_layers=recipe.train.group_layers),
        base.quantize_towers,
        base.quantize_embeddings,
    )
