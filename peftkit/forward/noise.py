"""How far rounding moves a model's outputs: the tolerance by which trials of a fast path decide.

Two correct computations of the same outputs differ in where they round: in other kernels, other
batch sizes and another order of sums. How much that moves the outputs depends on the dtype, the
depth and the weights, so a trial measures it on the model: it repeats a computation with the first
output of each module moved at random by up to a unit in the last place (`rounded`). A difference is
rounding if it is at most `FACTOR` times the resulting change. Rounding once more after each module
moves the outputs of 40 architectures by 1.5 to 5 times as much as products summed in other parts
(bfloat16, a CPU); a lost key, a hidden token or a position off by one moves them further.

Gradients are compared in the same manner (`difference_of`). There the noise multiplies each block's
output by 1 + eps u, with random u in [-1, 1] and the eps of the compute dtype: another last bit, as
another order of the same operations gives it (Parker, Monte Carlo arithmetic, 1997). Its effect on
a gradient is what rounding does to this gradient, with this model, dtype and data; it includes
tokens that change their experts. A gradient may differ by MARGIN times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from peftkit.execution.plan import compute_dtype
from peftkit.kernels.checked import relative_difference
from peftkit.model.modes import eager

FACTOR = 2.0
"""Largest difference that counts as rounding, in units of the noise."""
DRAWS = 3
"""Computations with random roundings. In a mixture of experts some reach other experts."""
MIN_STEP = 2.0**-14
"""Smallest relative change by a rounding, many units in the last place of float32 and float64:
other algorithms (a scan in chunks, TF32 in a convolution) then count as rounding, too."""

Result = TypeVar("Result")


def step_of(dtype: torch.dtype) -> float:
    """Return the largest relative change by one rounding."""
    return max(torch.finfo(dtype).eps, MIN_STEP)


class Trial:
    """Outputs of a model and their noise, to decide whether other outputs differ by rounding alone.

    Args:
        model: The modules whose roundings are repeated.
        compute: Returns the outputs, deterministically.
        expected: The outputs, if they are computed already.
    """

    def __init__(
        self,
        model: nn.Module,
        compute: Callable[[], Sequence[Tensor]],
        expected: Sequence[Tensor] | None = None,
    ) -> None:
        self._model, self._compute = model, compute
        self.expected = compute() if expected is None else expected

    @cached_property
    def noise(self) -> tuple[float, float]:
        """See `noise_of`."""
        return noise_of(rounded(self._model, self._compute), self.expected)

    def accepts(
        self, found: Sequence[Tensor], expected: Sequence[Tensor] | None = None, share: float = 1.0
    ) -> bool:
        """Return whether outputs differ from the expected ones by rounding alone; NaN: no.

        Args:
            share: Share of the noise that two computations of the same shapes may have.
        """
        sizes = sizes_of(found, self.expected if expected is None else expected)
        return sizes == (0.0, 0.0) or is_noise(sizes, self.noise, share)


def sizes_of(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float]:
    """Return the root mean square of the differences, and the median of each vector's.

    In a mixture of experts rounding may send a few tokens to other experts: they dominate the
    first, an error that moves all tokens also shows in the second. Outputs of other shapes are
    skipped: an expert may have received other tokens.
    """
    pairs = zip(outputs, expected, strict=True)
    squares = [(a - b).square().mean(-1).flatten() for a, b in pairs if a.shape == b.shape]
    if not squares:
        return 0.0, 0.0
    size = torch.cat(squares)
    return size.mean().sqrt().item(), size.median().sqrt().item()


def noise_of(draws: Iterable[Sequence[Tensor]], expected: Sequence[Tensor]) -> tuple[float, float]:
    """Return `sizes_of` the outputs of all draws."""
    outputs = list(draws)
    return sizes_of([one for draw in outputs for one in draw], [*expected] * len(outputs))


def is_noise(sizes: tuple[float, float], noise: tuple[float, float], share: float = 1.0) -> bool:
    """Return whether differences are at most FACTOR times as large as (a share of) the noise."""
    return all(size <= share * FACTOR * one for size, one in zip(sizes, noise, strict=True))


def is_last_rounding(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two results of one product differ by their rounding to a dtype alone."""
    return relative_difference(found, expected) <= FACTOR * step_of(dtype) * 3**-0.5


def rounded(model: nn.Module, compute: Callable[[], Result]) -> Iterator[Result]:
    """Yield the results of a computation with different random roundings in a model's modules."""
    for draw in range(DRAWS):
        with eager(model), rounding(model.modules(), draw):  # compiled code has no hooks
            result = compute()
        yield result


def moved(values: Tensor, size: float, random: Tensor) -> Tensor:
    """Return values of which each has moved by up to a relative size, by numbers in [0, 1)."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return (wide * (1 + size * (2 * random.to(values.device) - 1))).to(values.dtype)


@contextmanager
def rounding(modules: Iterable[nn.Module], draw: int, step: float | None = None) -> Iterator[None]:
    """Move the first output of each module at random within the context.

    Args:
        draw: The seed.
        step: Largest relative change; by default a rounding to the output's dtype. Under autocast
            it is a rounding to autocast's dtype.
    """
    generator = torch.Generator().manual_seed(draw)

    def move(_: nn.Module, __: object, output: Any) -> Any:
        if type(output) in (tuple, list) and output:
            return type(output)([move(_, __, output[0]), *output[1:]])
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        kind = output.device.type
        if torch.is_autocast_enabled(kind):
            size = step_of(torch.get_autocast_dtype(kind))
        else:
            size = step_of(output.dtype) if step is None else step
        return moved(output, size, torch.rand(output.shape, generator=generator))

    handles = [module.register_forward_hook(move) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


MARGIN = 8.0
"""Difference of gradients, in units of the noise: compiled code rounds the results of about 30
operations of a block differently, in both passes, the noise only one of them, and errors of n
independent roundings grow with sqrt(n)."""

LOSS = "the loss"
Figures = dict[str, Tensor]
"""The loss, and the gradient of each trained tensor, by name."""


def difference_of(found: Figures, expected: Figures, noisy: Figures) -> str:
    """Return how figures differ from the expected ones; "" within the noise.

    Args:
        noisy: The expected figures, computed within `blocks_rounded`.
    """
    noise, distances = _distances(noisy, expected), _distances(found, expected)
    # of tensors of a few values, the noise of one pass may be small by chance
    typical = median(noise.values())
    allowed = {name: MARGIN * max(noise[name], typical) for name in noise}
    wrong = [
        name
        for name in expected
        if not distances[name] <= allowed[name]
        or bool(found[name].any()) != bool(expected[name].any())
    ]
    if not wrong:
        return ""
    worst = max(wrong, key=lambda name: distances[name] / max(allowed[name], 1e-30))
    others = f" {len(wrong) - 1} more differ, too." if len(wrong) > 1 else ""
    return (
        f"{worst if worst == LOSS else f'the gradient of {worst}'} differs by "
        f"{distances[worst]:.2g} of its norm, where rounding explains {allowed[worst]:.2g}.{others}"
    )


def _distances(figures: Figures, reference: Figures) -> dict[str, float]:
    return {name: relative_difference(figures[name], reference[name]) for name in reference}


def blocks_rounded(model: nn.Module, blocks: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Return a context in which the output of each block is multiplied by 1 + eps u."""
    return rounding(blocks, 0, torch.finfo(compute_dtype(model)).eps)
