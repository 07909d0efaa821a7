"""Timed trials of cuDNN's attention of packed rows, against torch's flash kernel.

From 2.15 on, torch's varlen computes by either. Which one is faster depends on the card, cuDNN and
the shapes. cuDNN also builds a plan for each set of shapes, so shapes are tried that recur. A trial
computes one layer's attention with the gradients by both, and cuDNN is used if it is faster and its
results differ from the flash kernel's by rounding alone. Results are rounding if they differ by no
more than the flash kernel's do when each of its inputs moves by up to a unit in the last place.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from peftkit.execution import rng
from peftkit.execution.out_of_memory import is_out_of_memory, one_line
from peftkit.forward.noise import DRAWS, is_noise, moved, noise_of, sizes_of, step_of

Attend = Callable[[Sequence[Tensor], bool], Tensor]
"""Returns the attention of query, key and value, by cuDNN or by the flash kernel."""
MIN_CALLS, MAX_TRIALS = 3, 64
"""Calls of a layer with the same shapes before these are tried; trials of a process."""
MIN_GAIN = 1.05
"""Smallest ratio of times for which cuDNN is used."""
NUM_TIMED = 3


class Trials:
    """The trials of a process.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._calls = clock, Counter[Hashable]()
        self._gains: dict[Hashable, float] = {}
        self._problem, self._num_reported = "", 0

    def prefers_cudnn(
        self, layer: Any, arrays: Sequence[Tensor], shapes: Hashable, attend: Attend
    ) -> bool:
        """Return whether cuDNN computes a layer's attention; tries it if its shapes recur.

        Args:
            arrays: Query, key and value.
            shapes: All that may select another kernel, in addition to the shapes of the arrays.
        """
        key = shapes, arrays[0].dtype, arrays[0].device, *(tuple(x.shape) for x in arrays)
        gain = self._gains.get(key)
        if gain is not None:
            return gain >= MIN_GAIN
        if is_fake(arrays[0]) or not layer.training or len(self._gains) >= MAX_TRIALS:
            return False
        self._calls[key, id(layer)] += 1
        if self._calls[key, id(layer)] < MIN_CALLS or torch.cuda.is_current_stream_capturing():
            return False
        self._gains[key] = self._gain(arrays, attend)
        return self._gains[key] >= MIN_GAIN

    def _gain(self, arrays: Sequence[Tensor], attend: Attend) -> float:
        """Return how many times faster cuDNN is; 0 if it fails or is wrong."""
        start = rng.capture(arrays[0].device)  # dropout draws what it draws without a trial
        try:
            expected = _with_gradients(arrays, attend, False)
            others = (_with_gradients(_moved(arrays), attend, False) for _ in range(DRAWS))
            noise = noise_of(others, expected)
            if not is_noise(sizes_of(_with_gradients(arrays, attend, True), expected), noise):
                self._problem = "It computed another result than the flash kernel."
                return 0.0
            flash, cudnn = (self._seconds(arrays, attend, by_cudnn) for by_cudnn in (False, True))
        except RuntimeError as error:  # cuDNN lacks the shapes, or there is no memory for a trial
            if not is_out_of_memory(error):
                self._problem = one_line(error)
            return 0.0
        finally:
            rng.restore(start, arrays[0].device)
        return flash / cudnn

    def _seconds(self, arrays: Sequence[Tensor], attend: Attend, by_cudnn: bool) -> float:
        times = []
        for _ in range(NUM_TIMED):
            torch.cuda.synchronize(arrays[0].device)
            began = self._clock()
            _with_gradients(arrays, attend, by_cudnn)
            torch.cuda.synchronize(arrays[0].device)
            times.append(self._clock() - began)
        return min(times)

    def report(self) -> str:
        """Return the result of the trials since the last report; "" if there were none."""
        gains = [*self._gains.values()][self._num_reported :]
        self._num_reported += len(gains)
        if not gains:
            return ""
        chosen = [gain for gain in gains if gain >= MIN_GAIN]
        best = f", up to {max(chosen):.1f} times as fast as the flash kernel" if chosen else ""
        why = f" {self._problem}" if self._problem and len(chosen) < len(gains) else ""
        return (
            f"cuDNN computes attention for {len(chosen)} of {len(gains)} sets of shapes{best}.{why}"
        )


TRIALS = Trials()
"""The trials of this process."""


def _with_gradients(arrays: Sequence[Tensor], attend: Attend, by_cudnn: bool) -> list[Tensor]:
    """Return the attention, and the gradients of query, key and value."""
    # hooks of recomputation or offloading must not see these tensors
    keep = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.enable_grad(), keep:
        leaves = [array.detach().requires_grad_() for array in arrays]
        out = attend(leaves, by_cudnn)
        gradients = torch.autograd.grad(out, leaves, out.detach())
    return [out.detach(), *gradients]


def _moved(arrays: Sequence[Tensor]) -> list[Tensor]:
    arrays = [array.detach() for array in arrays]
    return [moved(x, step_of(x.dtype), torch.rand(x.shape, device=x.device)) for x in arrays]
