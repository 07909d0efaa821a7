"""A step of the whole model, reckoned from steps of a few of its blocks.

Blocks of one kind take the same: what the second of two models with one block more takes beyond
the first is what each further block does. Weights and adapters are counted of all blocks.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from peftkit.base.skeleton import with_depth
from peftkit.errors import PeftkitError
from peftkit.execution.plan import Activations
from peftkit.execution.strategies import activation_modes
from peftkit.kernels.packing import COPY_SHARE, packed_tensors
from peftkit.planning.counter import Counter
from peftkit.planning.footprint import WeightFootprint, whole
from peftkit.planning.step import (
    DatalessStep,
    Setup,
    StepCount,
    packed_model,
    skeleton_of,
    with_method,
)
from peftkit.train.memory.blocks import Blocks

CATEGORIES = ("weights", "adapters", "gradients", "activations")
FEW, MOST = 2, 8
"""Blocks that are built: at least, so that inner ones are among them; at most, if kinds differ."""
ON_DEVICE = 4
"""Inputs of blocks that are on a GPU where they are offloaded: the first, two more, the output."""


class CountError(PeftkitError):
    """A model's step cannot be run on tensors without data."""


_made: deque[StepEstimator] = deque(maxlen=4)


def steps_of(setup: Setup, free: int | None = None) -> StepEstimator:
    """Return what counts a setup's steps: what was made already, of what is the same.

    Args:
        free: As of `StepEstimator`.
    """
    for known in _made:
        if known.setup == replace(setup, kept=known.keeps_copies(free)):
            return known
    _made.append(StepEstimator(setup, free))
    return _made[-1]


class StepEstimator:
    """Counts steps of one setup; models are built once, and each step is counted once.

    Attributes:
        num_parameters, num_blocks: Of the base.
        whole: The whole model without data, packed.
        trained: The adapter's tensors.

    Args:
        free: Main memory of a CPU in bytes, from which follows whether packed weights are kept
            unpacked as well; None: they are not.
    """

    def __init__(self, setup: Setup, free: int | None = None) -> None:
        self._steps: dict[int, DatalessStep] = {}
        self._known: dict[tuple[int, int, int, Activations], StepCount] = {}
        bare = skeleton_of(setup)
        blocks = Blocks(bare, setup.plan)
        self.num_parameters = sum(p.numel() for p in bare.parameters())
        self.num_blocks = len(blocks.blocks)
        self._can_recompute = blocks.ways("auto") != ("keep",)
        self._depth = _depth_with_all_kinds(blocks.blocks)
        with FakeTensorMode(allow_non_fake_inputs=True), Counter():
            self.whole = packed_model(setup)
        with_method(bare, setup)  # not on the packed one: some methods read a weight
        self.trained = [p for p in bare.parameters() if p.requires_grad]
        self.setup = replace(setup, kept=self.keeps_copies(free))

    def activation_modes(
        self, wish: bool | Literal["auto"] = "auto", *, streamed: bool = False
    ) -> tuple[Activations, ...]:
        """Return what may be kept of activations, the fastest first."""
        if not self._can_recompute:
            return ("keep",)
        return activation_modes(wish, on_gpu=self.setup.plan.on_gpu, streamed=streamed)

    @property
    def num_trained(self) -> int:
        """Parameters of the adapter."""
        return sum(p.numel() for p in self.trained)

    @cached_property
    def base(self) -> WeightFootprint:
        """What a device has that has all of the base."""
        return whole(self.whole)

    def keeps_copies(self, free: int | None) -> bool:
        """Tell whether packed weights are kept unpacked as well, with so much main memory."""
        sizes = [p.form.shape.numel() * p.dtype.itemsize for _, _, p in packed_tensors(self.whole)]
        return bool(sizes) and sum(sizes) <= COPY_SHARE * max((free or 0) - self.base.resident, 0)

    def count(self, rows: int, length: int, way: Activations) -> StepCount:
        """Return what a step of the whole model takes."""
        first, second, more = self._both(rows, length, way)
        peak = {
            name: max(0, round(_reckoned(first.peak, second.peak, name, more)))
            for name in CATEGORIES
        }
        peak["activations"] -= self._away(first, way)
        flops = round(first.flops + more * (second.flops - first.flops))
        return StepCount(peak, flops, first.block_input)

    def bytes_per_token(self, rows: int, length: int, way: Activations) -> float:
        """Return what each further token takes, from two lengths."""
        first, second, more = self._both(rows, length, way)
        tokens, other = rows * length, length // 4 if length >= 512 else 4 * length
        other += length * (other == tokens)  # a slope needs two lengths
        elsewhere = self._counted(self._depth, 1, other, way)
        slope = (elsewhere.beside_weights - first.beside_weights) / (other - tokens)
        each = more * (second.beside_weights - first.beside_weights) - self._away(first, way)
        return slope + each / tokens

    def _both(self, rows: int, length: int, way: Activations) -> tuple[StepCount, StepCount, float]:
        """Return a step of few blocks, of one more, and how often the difference is to be added."""
        first = self._counted(self._depth, rows, length, way)
        small = self._steps[self._depth].num_blocks
        if small == self.num_blocks:
            return first, first, 0.0
        second = self._counted(self._depth + 1, rows, length, way)
        large = self._steps[self._depth + 1].num_blocks
        return first, second, (self.num_blocks - small) / (large - small)

    def _counted(self, depth: int, rows: int, length: int, way: Activations) -> StepCount:
        """Return a step of so many blocks; each is counted once.

        Raises:
            CountError: It cannot be run without data.
        """
        key = depth, rows, length, way
        if key not in self._known:
            try:
                if depth not in self._steps:
                    config = with_depth(self.setup.config, depth)
                    self._steps[depth] = DatalessStep(replace(self.setup, config=config))
                self._known[key] = self._steps[depth].count(rows, length, way)
            except PeftkitError:
                raise
            except Exception as error:  # of any model's code, on tensors that it was not made for
                raise CountError(
                    f"a step of {type(self.whole).__name__} cannot be counted without data.",
                    found=f"{type(error).__name__}: {error}",
                ) from error
        return self._known[key]

    def _away(self, count: StepCount, way: Activations) -> int:
        """Return the bytes of blocks' inputs that wait in main memory."""
        moves = way == "offload" and self.setup.plan.on_gpu
        return count.block_input * max(self.num_blocks - ON_DEVICE, 0) if moves else 0


def _reckoned(first: Mapping[str, int], second: Mapping[str, int], name: str, more: float) -> float:
    return first.get(name, 0) + more * (second.get(name, 0) - first.get(name, 0))


def _depth_with_all_kinds(blocks: list[nn.Module]) -> int:
    """Return how many blocks of each stack have to be built to have one of each kind."""
    kinds: list[Any] = [
        tuple(
            (name, type(m), tuple(p.shape for p in m._parameters.values() if p is not None))
            for name, m in block.named_modules()
        )
        for block in blocks
    ]
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    late = [first for first in firsts if first < MOST]  # a second stack's begins far behind
    return max(FEW, *(first + 1 for first in late)) if late else FEW
