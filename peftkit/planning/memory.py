"""The memory of a recipe's step on a machine, estimated from the model's config, and named GPUs.

A run calls only `smallest_step`, if the size of its base alone does not decide the placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from peftkit.base.request import fits_device
from peftkit.base.sharding import sharded_footprint
from peftkit.base.skeleton import WeightFootprint, untraced
from peftkit.base.streaming import streamed_footprint
from peftkit.errors import TargetError
from peftkit.events import Listener, Notice
from peftkit.execution.environment import GPU_SHARE, Environment
from peftkit.execution.plan import Activations, ExecutionPlan, Placement, Shard, plan_of
from peftkit.forward.row_lengths import context_length
from peftkit.inference.budget import Footprint, cache_tokens, estimated_footprint, measured
from peftkit.inference.cache import slot_length
from peftkit.inference.cached_attention import CachedAttention, cached_attention
from peftkit.inference.open_engine import why_plain_class
from peftkit.kernels.device import PRODUCTS_REACH, busy_tokens
from peftkit.model.places import linear_shape, unwrap_adapter
from peftkit.planning.step import skeleton_of
from peftkit.planning.step_estimator import CountError, StepEstimator, steps_of
from peftkit.recipe import Recipe
from peftkit.train.optim import STATE_BYTES

PRODUCT_SHARE = 0.4
"""Share of the peak rate of a step, as in the best published LoRA runs."""
BANDWIDTH_SHARE = 0.85
LINK = 16.0
"""GB/s from main memory to a GPU, approximately PCIe 4.0 x16 in practice."""
WIRES = (25.0, 3.0)
"""GB/s between GPUs: within a machine, over PCIe; between machines, over 25 Gbit/s."""
LONGEST = 1 << 20
STEP = 64
"""Lengths of rows are rounded down to a multiple of it."""
REACH = 4
"""Maximum ratio of an extrapolated row's tokens to the counted row's: in longer rows the peak moves
to another part of the step, and layers run tile by tile."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU's published dense bf16 TFLOP/s with fp32 sums, memory bandwidth in GB/s, and GB."""

    name: str
    tflops: float
    gigabytes_per_second: float
    gigabytes: int

    @property
    def rate(self) -> float:
        """Estimated FLOP/s of a step."""
        return PRODUCT_SHARE * self.tflops * 1e12

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Return the time of a step: the maximum by its FLOPs and by the bytes that it reads."""
        return max(
            flops / self.rate, num_bytes / (BANDWIDTH_SHARE * self.gigabytes_per_second * 1e9)
        )


CARDS = (
    Card("RTX 3060", 25, 360, 12),
    Card("RTX 4060 Ti", 44, 288, 16),
    Card("RTX 4090", 165, 1008, 24),
    Card("A100", 312, 2039, 80),
    Card("H100", 989, 3350, 80),
    Card("H200", 989, 4800, 141),
)


def card_of(memory: int) -> Card:
    """Return the smallest named GPU with enough memory, or the largest one."""
    return next((card for card in CARDS if card.gigabytes * 1e9 >= 0.95 * memory), CARDS[-1])


@dataclass(frozen=True, slots=True)
class Strategy:
    """A placement of the base with an activation mode.

    Attributes:
        placement: Whether the base is on the device, or its blocks are streamed to it.
        peak_bytes: Peak of a step over one micro-batch.
        by_category: The peak by weights, adapters, gradients, optimizer and activations.
        fits: Whether the peak is within the usable memory.
        longest_row: Tokens of the longest single row that fits; 0: no row fits.
        most_rows: Rows of the requested length that fit in one batch.
        step_flops: FLOPs of the forward and backward pass of one batch.
        moved_bytes: Weights of streamed blocks that are transferred to the device in a step.
        compute_bound_tokens: Tokens per batch from which a step takes longer than the transfer;
            0: no weights are streamed, or the device is not a GPU.
        host_bytes: Main memory of weights and of blocks' inputs of a batch.
        host_bytes_per_token: Of them, inputs of blocks: bytes of each token.
        host_weights: Of them, weights.
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
    host_bytes_per_token: float = 0.0
    host_weights: int = 0

    def host_bytes_of(self, tokens: int) -> int:
        """Return the main memory of weights and of the inputs of a batch of some tokens."""
        return self.host_weights + round(self.host_bytes_per_token * tokens)


@dataclass(frozen=True, slots=True)
class DeviceEstimate:
    """The memory of each of several GPUs that share a base (train.shard: base).

    Attributes:
        longest_row: Tokens, in the activation mode that needs the least memory.
        wire_bytes: Bytes that a GPU receives in a step of one batch: blocks, and the adapter's
            gradients.
        compute_bound_tokens: By GB/s between GPUs: tokens per batch from which a step takes longer
            than the transfer.
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
    """Estimates the steps of one recipe.

    Args:
        config: The model's config.
        link: GB/s from main memory to the device.

    Attributes:
        rows, length: Rows of a micro-batch, and tokens of each of their texts.
        steps: Step estimator with the whole base on the device.
        whole: The footprint of that base.
        card: The named GPU that is most similar to the machine's.
    """

    def __init__(
        self, recipe: Recipe, config: Any, environment: Environment, *, link: float = LINK
    ) -> None:
        self.recipe, self.config, self.environment, self.link = recipe, config, environment, link
        self.card = card_of(environment.memory or 0)
        self.limit = context_length(config) or LONGEST
        self.length = min(recipe.data.max_length or self.limit, self.limit)
        rows, num_texts = recipe.train.batch_size, recipe.task.texts_per_row
        tokens = plan_of(recipe.train, environment.kind).tokens
        if tokens is not None:
            rows = max(1, min(rows, tokens // (num_texts * self.length)))
        self.rows = rows
        main_memory = None if environment.on_gpu else environment.usable
        self.steps = steps_of(recipe, config, environment.kind, main_memory)
        self.whole = WeightFootprint(self.steps.weights)

    @cached_property
    def busy_tokens(self) -> int:
        """Tokens per micro-batch below which the device waits for Python."""
        if self.environment.kind != "cuda":
            return 1
        rate = PRODUCTS_REACH * self.card.tflops * 1e12
        return busy_tokens(rate, self.steps.num_parameters, self.steps.num_blocks)

    @cached_property
    def _bare(self) -> StepEstimator:
        """Step estimator for a streamed or sharded base, which keeps no unpacked copies."""
        if not self.steps.keeps_copies:
            return self.steps
        return steps_of(self.recipe, self.config, self.environment.kind)

    @cached_property
    def _streamed(self) -> WeightFootprint:
        return streamed_footprint(self.steps.whole)

    def _sharded(self, number: int, *, offload: bool) -> WeightFootprint:
        return sharded_footprint(self.steps.whole, number, offload=offload)

    def _placed_weights(self, placement: Placement) -> WeightFootprint:
        return self._streamed if placement == "stream" else self.whole

    def activations(self, placement: Placement = "device") -> tuple[Activations, ...]:
        """Return the activation modes that the recipe allows, fastest first."""
        requested = self.recipe.train.gradient_checkpointing
        return self.steps.activation_modes(requested, streamed=placement == "stream")

    def strategies(self) -> Iterator[Strategy]:
        """Yield the strategies that base.placement allows, fastest first.

        With `auto` the base is streamed if a run would stream it (`fits_device`), here for a row of
        the requested length. Each strategy has the longest row, estimated from rows of about that
        length.
        """
        placement = self.recipe.base.placement
        if placement != "stream":
            yield from self.placed("device")
        if placement == "auto" and self.environment.on_gpu:
            free = self.environment.usable
            may_stream = not fits_device(self.steps.weights, free, lambda: self.smallest().fits)
        else:
            may_stream = placement == "stream"
        may_stream = may_stream and self.recipe.train.gradient_checkpointing is not False
        if may_stream and self._streamed.elsewhere:
            yield from self.placed("stream")

    def placed(self, placement: Placement) -> Iterator[Strategy]:
        """Yield the strategies of a placement, fastest first, with their longest rows."""
        for activations in self.activations(placement):
            strategy = self.strategy(placement, activations)
            footprint = self._placed_weights(placement)
            longest = self._longest_row(footprint, activations, strategy.longest_row)
            yield replace(strategy, longest_row=longest, most_rows=longest // self.length)

    def _longest_row(
        self, footprint: WeightFootprint, activations: Activations, longest: int
    ) -> int:
        """Return the longest row that fits, extrapolated by at most REACH.

        Counts ever longer rows, REACH times as long each time, and finally the result itself if it
        is far: the loss of a short row grows faster than a loss in chunks.

        Args:
            longest: The estimate from a row of the recipe's length.
        """
        length, is_near = self.length, False
        while longest > 2 * length and not is_near:
            is_near = longest <= REACH * length
            length = longest if is_near else REACH * length
            _, tokens, _ = self._count(footprint, activations, 1, length)
            longest = min(tokens // STEP * STEP, self.limit)
        return longest

    def smallest(self, placement: Placement = "device", shard: Shard = "none") -> Strategy:
        """Return the strategy with the lowest peak, for one row."""
        return self.strategy(placement, self.activations(placement)[-1], rows=1, shard=shard)

    def strategy(
        self,
        placement: Placement,
        activations: Activations,
        rows: int | None = None,
        shard: Shard = "none",
    ) -> Strategy:
        """Estimate a strategy.

        Args:
            rows: Rows of a batch; by default the recipe's.
        """
        footprint = self._placed_weights(placement)
        if shard != "none":
            footprint = self._sharded(self.environment.world_size, offload=shard == "offload")
        rows = rows or self.rows
        peak, longest, flops = self._count(footprint, activations, rows)
        num_bytes = sum(peak.values())
        moved, elsewhere = footprint.moved, footprint.elsewhere
        per_token = self.steps.main_bytes_per_token(rows, self.length, activations)
        host_bytes = elsewhere + round(per_token * rows * self.length)
        limit = self.environment.main_memory
        return Strategy(
            placement,
            activations,
            num_bytes,
            peak,
            fits=num_bytes <= self.environment.room and (limit is None or host_bytes <= limit),
            longest_row=min(longest // STEP * STEP, self.limit),
            most_rows=longest // self.length,
            step_flops=flops,
            moved_bytes=moved,
            compute_bound_tokens=self._compute_bound_tokens(moved, flops / rows, self.link),
            host_bytes=host_bytes,
            host_bytes_per_token=per_token,
            host_weights=elsewhere,
        )

    def share(self, cards: int) -> DeviceEstimate:
        """Estimate one GPU of several, with the first activation mode that fits."""
        offload = self.recipe.train.shard == "offload"
        footprint = self.whole if cards == 1 else self._sharded(cards, offload=offload)
        summed = 2 * (cards - 1) * sum(p.nbytes for p in self.steps.trained) // cards
        modes = self.activations()
        if cards > 1:  # the layers of a sharded block are gathered for the whole block
            modes = tuple(mode for mode in modes if mode != "selective")
        for activations in modes:
            peak, longest, flops = self._count(footprint, activations, self.rows)
            if sum(peak.values()) <= self.environment.room:
                break
        num_bytes, wire = sum(peak.values()), summed + footprint.moved
        fits = num_bytes <= self.environment.room
        if activations != modes[-1]:
            longest = self._count(footprint, modes[-1], self.rows)[1]
        longest = self._longest_row(footprint, modes[-1], min(longest // STEP * STEP, self.limit))
        flops_of_row = flops / self.rows
        compute_bound = {f"{w:g}": self._compute_bound_tokens(wire, flops_of_row, w) for w in WIRES}
        return DeviceEstimate(
            cards, activations, num_bytes, peak, fits, longest, wire, compute_bound
        )

    def _compute_bound_tokens(self, moved: int, flops_of_row: float, link: float) -> int:
        """Return the tokens whose computation takes as long as a transfer of bytes over a link."""
        seconds = moved / (link * 1e9) if self.environment.on_gpu else 0.0
        return round(seconds * self.card.rate / (flops_of_row / self.length))

    def num_completions(self, lengths: Sequence[int]) -> dict[int, int]:
        """Return the number of concurrent completions of each length, as the engine counts them.

        Empty if the config lacks the sizes.
        """
        size, environment = self._cache_size(), self.environment
        if size is None:
            return {}
        if environment.on_gpu:  # generation allocates once: it leaves less for fragments than a run
            environment = replace(environment, share=GPU_SHARE)
        tokens = cache_tokens(environment, size.token, taken=self.steps.weights)
        return {length: tokens // (slot_length(length) + size.state_tokens) for length in lengths}

    def _cache_size(self) -> Footprint | None:
        """Measure the engine's cache on a model without data, or estimate that of `PlainEngine`."""
        model = skeleton_of(self.recipe, self.config, self.steps.dtype)
        if why_plain_class(model) is None:
            try:
                return _measured_cache(model)
            except Exception:  # the class does not show whether its attention can use the cache
                pass
        return estimated_footprint(self.config.get_text_config(), self.steps.dtype)

    @cached_property
    def _quantized_bytes(self) -> int:
        """Bytes of the quantised copies of adapted weights, for train.quantize_for."""
        if self.recipe.train.quantize_for == "none":
            return 0
        model = self.steps.whole
        shapes = [
            linear_shape(unwrap_adapter(model.get_submodule(site.path)))
            for site in self.recipe.method.sites(model)
            if site.parameter is None
        ]
        return self.steps.dtype.itemsize * sum(rows * columns for rows, columns in shapes)

    def _count(
        self,
        footprint: WeightFootprint,
        activations: Activations,
        rows: int,
        length: int | None = None,
    ) -> tuple[dict[str, int], int, int]:
        """Return bytes by category, the tokens of the longest row that fits, and FLOPs.

        Args:
            length: Tokens of a row; by default the recipe's.
        """
        length = length or self.length
        tiles = footprint is self.whole  # blocks that fetch their weights cannot compute tiles
        steps = self.steps if tiles else self._bare
        count = steps.count(rows, length, activations, tiles=tiles)
        state = STATE_BYTES[self.recipe.train.optimizer] * steps.num_trained
        peak = {**count.peak, "optimizer": state, "process": self.environment.process}
        moved_out = steps.weights - footprint.at_most
        peak["weights"] = peak.get("weights", 0) + self._quantized_bytes - moved_out
        trained = sum(p.nbytes for p in steps.trained)
        # a run reserves all gradients (train/memory.py); accumulated ones are there at the peak
        peak["gradients"] = max(peak.get("gradients", 0), trained)
        slope = max(steps.bytes_per_token(rows, length, activations, tiles=tiles), 1.0)
        left = self.environment.room - sum(peak.values())
        longest = max(int(rows * length + left / slope), 0)
        if self.environment.main_memory is not None:
            per_token = steps.main_bytes_per_token(rows, length, activations)
            free = max(self.environment.main_memory - footprint.elsewhere, 0)
            longest = min(longest, int(free / per_token) if per_token else longest)
        return peak, longest, count.flops


def _measured_cache(model: Any) -> Footprint:
    attention = CachedAttention.of(model)
    for module in model.modules():
        if hasattr(module, "is_transposed"):  # experts, whose sizes depend on data
            module.forward = lambda hidden, *_: torch.zeros_like(hidden)
    with untraced(), cached_attention(model, attention):
        return measured(model, attention)


def smallest_step(
    recipe: Recipe,
    config: object,
    environment: Environment,
    plan: ExecutionPlan,
    on_event: Listener,
) -> int | None:
    """Return the bytes of a recipe's smallest step in a plan, a row of the maximum length.

    Returns:
        None, with a notice, if the model's step cannot run on tensors without data.
    """
    try:
        estimator = MemoryEstimator(recipe, config, environment)
        return estimator.smallest(plan.placement, plan.shard).peak_bytes
    except (CountError, TargetError) as error:  # TargetError: an adapter of another library
        on_event(Notice(f"{error} Only the size of the weights decides if the base fits."))
        return None
