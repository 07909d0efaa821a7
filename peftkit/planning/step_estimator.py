"""A step of the whole model, extrapolated from steps of a few of its blocks.

Blocks of one kind have equal costs: the difference between two models, of which the second has one
block more, is the cost of each further block. If kinds alternate, as in hybrids, the second model
has a whole period more. Weights and adapters are counted for all blocks.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from peftkit.base.request import DTYPES, fast_dtype
from peftkit.base.skeleton import with_depth
from peftkit.errors import PeftkitError
from peftkit.execution.plan import Activations, activation_modes, plan_of
from peftkit.figures import dtype_name
from peftkit.forward.blocks import Blocks
from peftkit.forward.row_lengths import context_length
from peftkit.planning.counter import Counter
from peftkit.planning.step import DatalessStep, StepCount, packed_model, skeleton_of, with_method
from peftkit.quant.layers import COPY_SHARE, packed_tensors
from peftkit.recipe import Recipe

CATEGORIES = ("weights", "adapters", "gradients", "activations")
FEW, MOST = 2, 8
"""Minimum number of blocks to build, which includes an inner one; maximum, if kinds differ."""
LONGEST_PERIOD = 10
"""Maximum number of further blocks to build; in Granite 4 H, one of ten blocks has attention."""


class CountError(PeftkitError):
    """A model's step cannot run on tensors without data."""


@contextmanager
def _as_count_error(model: nn.Module) -> Iterator[None]:
    """Raise errors of a model's code on tensors without data as `CountError`."""
    try:
        yield
    except PeftkitError:
        raise
    except Exception as error:
        raise CountError(
            f"A step of {type(model).__name__} cannot be counted without data.",
            found=f"{type(error).__name__}: {error}",
        ) from error


_recent: deque[StepEstimator] = deque(maxlen=4)


def steps_of(
    recipe: Recipe, config: object, device: str, main_memory: int | None = None
) -> StepEstimator:
    """Return an estimator for these arguments: a recent one, if its steps are equal."""
    key = _key(recipe, config, device)
    for recent in _recent:
        copies = recent.fits_copies(main_memory)
        if recent.key == key and recent.keeps_copies == copies:
            return recent
    _recent.append(StepEstimator(recipe, config, device, main_memory))
    return _recent[-1]


def _key(recipe: Recipe, config: object, device: str) -> tuple[Any, ...]:
    """Return all settings that determine the steps of a recipe."""
    base = recipe.base.model_copy(update={"placement": "auto", "store": "auto"})
    return base, recipe.task, recipe.method, recipe.train.group_layers, config, device


class StepEstimator:
    """Estimates steps of one recipe; each model is built once, and each step is counted once.

    Args:
        config: The model's config.
        device: Kind of device: cpu, cuda or mps.
        main_memory: Free bytes. A CPU with enough of it keeps unpacked copies of packed weights;
            None: it keeps none.

    Attributes:
        key: All settings that determine its steps.
        dtype: The compute dtype.
        num_parameters, num_blocks: Counts of the base.
        whole: The complete packed model, without data.
        weights: Bytes of its weights.
        trained: The adapter's tensors.
        keeps_copies: Whether dequantised copies of packed weights are kept.
    """

    def __init__(
        self, recipe: Recipe, config: Any, device: str, main_memory: int | None = None
    ) -> None:
        self.key = _key(recipe, config, device)
        self._recipe, self._config = recipe, config
        fast = fast_dtype(torch.device("cpu")) if device == "cpu" else torch.bfloat16
        self.dtype = DTYPES.get(recipe.base.dtype) or fast
        dtype = dtype_name(self.dtype)
        self._plan = plan_of(recipe.train, device, shard="none", dtype=dtype)
        self._steps: dict[int, DatalessStep] = {}
        self._counts: dict[tuple[int, int, int, Activations, bool], StepCount] = {}
        bare = skeleton_of(recipe, config, self.dtype)
        blocks = Blocks(bare, self._plan)
        self.num_parameters = sum(p.numel() for p in bare.parameters())
        self.num_blocks = len(blocks.blocks)
        self._can_recompute = blocks.activation_modes("auto") != ("keep",)
        self._can_select = "selective" in blocks.activation_modes("auto")
        self._depth = _depth_with_all_kinds(blocks.blocks)
        self._period = _period_after(self._depth, _stacks_of(bare, blocks.blocks))
        with _as_count_error(bare), FakeTensorMode(allow_non_fake_inputs=True), Counter():
            self.whole = packed_model(recipe, config, self.dtype)
        self.weights = sum(p.nbytes for p in self.whole.parameters())
        with_method(bare, recipe)  # not on the packed one: some methods read a weight
        self.trained = [p for p in bare.parameters() if p.requires_grad]
        self.keeps_copies = self.fits_copies(main_memory)

    def activation_modes(
        self, requested: bool | Literal["auto"] = "auto", *, streamed: bool = False
    ) -> tuple[Activations, ...]:
        """Return the activation modes that `train.gradient_checkpointing` allows, fastest first."""
        if not self._can_recompute:
            return ("keep",)
        return activation_modes(
            requested,
            on_gpu=self._plan.on_gpu,
            streamed=streamed,
            selective=self._can_select and not streamed,
        )

    @property
    def num_trained(self) -> int:
        """Number of the adapter's parameters."""
        return sum(p.numel() for p in self.trained)

    def fits_copies(self, main_memory: int | None) -> bool:
        """Return whether dequantised copies of packed weights fit into main memory."""
        sizes = [p.form.shape.numel() * p.dtype.itemsize for _, _, p in packed_tensors(self.whole)]
        return bool(sizes) and sum(sizes) <= COPY_SHARE * max((main_memory or 0) - self.weights, 0)

    def count(self, rows: int, length: int, mode: Activations, *, tiles: bool = True) -> StepCount:
        """Return the memory and the FLOPs of a step of the whole model.

        Args:
            tiles: Whether the model can compute long rows in tiles.
        """
        first, second, more = self._two_counts(rows, length, mode, tiles)
        peak = {}
        for name in CATEGORIES:
            start = first.peak.get(name, 0)
            peak[name] = max(0, round(start + more * (second.peak.get(name, 0) - start)))
        peak["activations"] -= self._offloaded(first, mode)
        flops = round(first.flops + more * (second.flops - first.flops))
        return StepCount(peak, flops, first.block_input)

    def main_bytes_per_token(self, rows: int, length: int, mode: Activations) -> float:
        """Return the bytes of a token's inputs of blocks in main memory."""
        if mode != "offload" or not self._plan.on_gpu:
            return 0.0
        first, _, _ = self._two_counts(rows, length, mode, False)
        return first.block_input * self.num_blocks / (rows * length)

    def bytes_per_token(
        self, rows: int, length: int, mode: Activations, *, tiles: bool = True
    ) -> float:
        """Return the bytes of each further token, from two lengths."""
        first, second, more = self._two_counts(rows, length, mode, tiles)
        tokens, other = rows * length, (5 if rows == 4 else 4) * length  # a slope needs two lengths
        if length >= 512 or other > (context_length(self._config) or other):
            other = max(length // 4, 1)
        other_count = self._counted(self._depth, 1, other, mode, tiles)
        slope = (other_count.without_weights - first.without_weights) / (other - tokens)
        further = more * (second.without_weights - first.without_weights)
        return slope + (further - self._offloaded(first, mode)) / tokens

    def _two_counts(
        self, rows: int, length: int, mode: Activations, tiles: bool
    ) -> tuple[StepCount, StepCount, float]:
        """Return steps of few blocks and of a period more, and the number of remaining periods."""
        first = self._counted(self._depth, rows, length, mode, tiles)
        small = self._steps[self._depth].num_blocks
        if small == self.num_blocks:
            return first, first, 0.0
        second = self._counted(self._depth + self._period, rows, length, mode, tiles)
        large = self._steps[self._depth + self._period].num_blocks
        return first, second, (self.num_blocks - small) / (large - small)

    def _counted(
        self, depth: int, rows: int, length: int, mode: Activations, tiles: bool
    ) -> StepCount:
        """Return a step of a model with `depth` blocks per stack; cached.

        Raises:
            CountError: It cannot run without data.
        """
        tiles = tiles and replace(self._plan, tiles=True).tile(length) < length
        key = depth, rows, length, mode, tiles
        if key not in self._counts:
            with _as_count_error(self.whole):
                if depth not in self._steps:
                    self._steps[depth] = DatalessStep(
                        self._recipe,
                        with_depth(self._config, depth),
                        self._plan,
                        self.dtype,
                        keeps_copies=self.keeps_copies,
                    )
                self._counts[key] = self._steps[depth].count(rows, length, mode, tiles=tiles)
        return self._counts[key]

    def _offloaded(self, count: StepCount, mode: Activations) -> int:
        """Return the bytes of blocks' inputs in main memory, which the count has in addition.

        It also has the two that are fetched, which are on the GPU.
        """
        moves = mode == "offload" and self._plan.on_gpu
        return count.block_input * self.num_blocks if moves else 0


def _kind_of(block: nn.Module) -> Any:
    """Return the modules of a block and the shapes of their tensors, which determine its cost."""
    return tuple(
        (name, type(m), tuple(p.shape for p in m._parameters.values() if p is not None))
        for name, m in block.named_modules()
    )


def _depth_with_all_kinds(blocks: list[nn.Module]) -> int:
    """Return the number of blocks per stack that include one of each kind."""
    kinds = [_kind_of(block) for block in blocks]
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    # the blocks of a second stack have larger indices
    return max([FEW, *(first + 1 for first in firsts if first < MOST)])


def _stacks_of(model: nn.Module, blocks: list[nn.Module]) -> list[list[object]]:
    """Return the kinds of blocks of each stack, such as an encoder."""
    paths = {module: path for path, module in model.named_modules()}
    stacks: dict[str, list[Any]] = {}
    for block in blocks:
        stacks.setdefault(paths[block].rpartition(".")[0], []).append(_kind_of(block))
    return list(stacks.values())


def _period_after(depth: int, stacks: list[list[object]]) -> int:
    """Return the number of blocks after `depth` whose mix of kinds is closest to all the rest's."""
    period = 1
    for rest in (stack[depth:] for stack in stacks):
        shares = {kind: rest.count(kind) / len(rest) for kind in dict.fromkeys(rest)}
        differences = [
            sum(abs(rest[:size].count(kind) / size - share) for kind, share in shares.items())
            for size in range(1, min(len(rest), LONGEST_PERIOD) + 1)
        ]
        if differences:
            period = max(period, 1 + differences.index(min(differences)))
    return period
