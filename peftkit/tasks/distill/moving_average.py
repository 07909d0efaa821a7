"""An exponential moving average of the student's weights: a teacher that follows the student.

After each optimizer step, average = (1 - rate) average + rate weights, in float32. All processes
have the same weights, and so the same average.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from peftkit.adapter import refresh_copies
from peftkit.errors import CheckpointError


class MovingAverage:
    """The average of a model's trained weights; it starts with their current values.

    Args:
        rate: Share of the new weights in each update; 1: the average equals the weights.

    Attributes:
        values: The averages in float32, by parameter name.
    """

    def __init__(self, model: nn.Module, rate: float) -> None:
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._model, self._rate = model, rate
        self._parameters: list[Tensor] = list(trained.values())
        self.values = {n: p.detach().to(torch.float32, copy=True) for n, p in trained.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights."""
        weights = [parameter.float() for parameter in self._parameters]
        torch._foreach_lerp_(list(self.values.values()), weights, self._rate)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Replace the weights by their average within the context."""
        weights = [parameter.detach().clone() for parameter in self._parameters]
        try:
            self._set(list(self.values.values()))
            yield
        finally:
            self._set(weights)

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Restore saved averages, bit for bit.

        Raises:
            CheckpointError: They do not fit the model.
        """
        shapes, found = ({n: tuple(t.shape) for n, t in s.items()} for s in (self.values, saved))
        if shapes != found:
            differing = sorted(n for n, _ in shapes.items() ^ found.items())
            raise CheckpointError(
                "the saved average of the weights does not fit this model",
                found=f"These tensors differ: {', '.join(differing[:4])}",
                fix="Continue with the recipe of the saved run, or start a new run.",
            )
        for name, value in self.values.items():
            value.copy_(saved[name])

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        # in place: compiled code and CUDA graphs read these addresses
        torch._foreach_copy_(self._parameters, values)
        refresh_copies(self._model)
