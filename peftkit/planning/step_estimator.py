"""A step of the whole model, extrapolated from steps of a few of its blocks.

Blocks of one kind take the same: what the second of two models with one block more takes beyond
the first is what each further block does. Weights and adapters are counted of all blocks.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from peftkit.base.request import DTYPES, fast_dtype
from peftkit.base.skeleton import with_depth
from peftkit.errors import PeftkitError
from peftkit.execution.plan import Activations, activation_modes, plan_of
from peftkit.forward.blocks import Blocks
from peftkit.planning.counter import Counter
from peftkit.planning.step import (
    DatalessStep,
    StepCount,
    packed_model,
    skeleton_of,
    with_method,
)
from peftkit.quant.copies import COPY_SHARE
from peftkit.quant.layers import packed_tensors
from peftkit.recipe import Recipe

CATEGORIES = ("weights", "adapters", "gradients", "activations")
FEW, MOST = 2, 8
"""Blocks that are built: at least, to have inner ones among them; at most, if kinds differ."""
ON_DEVICE = 4
"""Offloaded inputs of blocks that are on the GPU at once: the first, two more, the output."""


class CountError(PeftkitError):
    """A model's step cannot be run on tensors without data."""


_recent: deque[StepEstimator] = deque(maxlen=4)


def steps_of(
    recipe: Recipe, config: Any, device: str, main_memory: int | None = None
) -> StepEstimator:
    """Return an estimator of these arguments: a recent one, if it counts the same steps."""
    key = _key(recipe, config, device)
    for recent in _recent:
        copies = recent.fits_copies(main_memory)
        if recent.key == key and recent.keeps_copies == copies:
            return recent
    _recent.append(StepEstimator(recipe, config, device, main_memory))
    return _recent[-1]


def _key(recipe: Recipe, config: Any, device: str) -> tuple[Any, ...]:
    """Return all settings that the steps of a recipe depend on."""
    base = recipe.base.model_copy(update={"placement": "auto", "store": "auto"})
    return base, recipe.task, recipe.method, recipe.train.group_layers, config, device


class StepEstimator:
    """Counts steps of one recipe; models are built once, and each step is counted once.

    Args:
        config: The model's.
        device: The kind of device: cpu, cuda or mps.
        main_memory: Bytes that are free. A CPU with enough of it keeps packed weights unpacked as
            well; None: it does not.

    Attributes:
        key: What its steps depend on.
        dtype: The dtype of computation.
        num_parameters, num_blocks: Of the base.
        whole: The complete model without data, packed.
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
        dtype = str(self.dtype).removeprefix("torch.")
        self._plan = plan_of(recipe.train, device, shard="none", dtype=dtype)
        self._steps: dict[int, DatalessStep] = {}
        self._counts: dict[tuple[int, int, int, Activations], StepCount] = {}
        bare = skeleton_of(recipe, config, self.dtype)
        blocks = Blocks(bare, self._plan)
        self.num_parameters = sum(p.numel() for p in bare.parameters())
        self.num_blocks = len(blocks.blocks)
        self._can_recompute = blocks.activation_modes("auto") != ("keep",)
        self._depth = _depth_with_all_kinds(blocks.blocks)
        with FakeTensorMode(allow_non_fake_inputs=True), Counter():
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
        return activation_modes(requested, on_gpu=self._plan.on_gpu, streamed=streamed)

    @property
    def num_trained(self) -> int:
        """Parameters of the adapter."""
        return sum(p.numel() for p in self.trained)

    def fits_copies(self, main_memory: int | None) -> bool:
        """Tell whether main memory has room for dequantised copies of packed weights."""
        sizes = [p.form.shape.numel() * p.dtype.itemsize for _, _, p in packed_tensors(self.whole)]
        return bool(sizes) and sum(sizes) <= COPY_SHARE * max((main_memory or 0) - self.weights, 0)

    def count(self, rows: int, length: int, mode: Activations) -> StepCount:
        """Return the memory and the FLOPs of a step of the whole model."""
        first, second, more = self._both(rows, length, mode)
        peak = {
            name: max(0, round(_extrapolated(first.peak, second.peak, name, more)))
            for name in CATEGORIES
        }
        peak["activations"] -= self._away(first, mode)
        flops = round(first.flops + more * (second.flops - first.flops))
        return StepCount(peak, flops, first.block_input)

    def bytes_per_token(self, rows: int, length: int, mode: Activations) -> float:
        """Return the bytes of each further token, from two lengths."""
        first, second, more = self._both(rows, length, mode)
        tokens, other = rows * length, length // 4 if length >= 512 else 4 * length
        other += length * (other == tokens)  # a slope needs two lengths
        elsewhere = self._counted(self._depth, 1, other, mode)
        slope = (elsewhere.without_weights - first.without_weights) / (other - tokens)
        each = more * (second.without_weights - first.without_weights) - self._away(first, mode)
        return slope + each / tokens

    def _both(
        self, rows: int, length: int, mode: Activations
    ) -> tuple[StepCount, StepCount, float]:
        """Return a step of few blocks, one of a block more, and how many more blocks there are."""
        first = self._counted(self._depth, rows, length, mode)
        small = self._steps[self._depth].num_blocks
        if small == self.num_blocks:
            return first, first, 0.0
        second = self._counted(self._depth + 1, rows, length, mode)
        large = self._steps[self._depth + 1].num_blocks
        return first, second, (self.num_blocks - small) / (large - small)

    def _counted(self, depth: int, rows: int, length: int, mode: Activations) -> StepCount:
        """Return a step of so many blocks; each is counted once.

        Raises:
            CountError: It cannot be run without data.
        """
        key = depth, rows, length, mode
        if key not in self._counts:
            try:
                if depth not in self._steps:
                    self._steps[depth] = DatalessStep(
                        self._recipe,
                        with_depth(self._config, depth),
                        self._plan,
                        self.dtype,
                        keeps_copies=self.keeps_copies,
                    )
                self._counts[key] = self._steps[depth].count(rows, length, mode)
            except PeftkitError:
                raise
            except Exception as error:  # from any model's code, on tensors without data
                raise CountError(
                    f"a step of {type(self.whole).__name__} cannot be counted without data.",
                    found=f"{type(error).__name__}: {error}",
                ) from error
        return self._counts[key]

    def _away(self, count: StepCount, mode: Activations) -> int:
        """Return the bytes of blocks' inputs that wait in main memory."""
        moves = mode == "offload" and self._plan.on_gpu
        return count.block_input * max(self.num_blocks - ON_DEVICE, 0) if moves else 0


def _extrapolated(
    first: Mapping[str, int], second: Mapping[str, int], name: str, more: float
) -> float:
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
