"""Results that are compared with torch's, and products of a library at their first uses.

On some GPUs a library computes wrong results without an error, as bitsandbytes' gemm_4bit on
gfx1100 (bitsandbytes issue 2087).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from peftkit.events import Fallback

TOLERANCE = 0.03
"""Relative error of a right product; results in 16 bits are rounded by up to 0.4 %."""
_LOG = logging.getLogger(__name__)


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return the norm of a difference, relative to the norm of the expected tensor.

    It is 0 for equal tensors, and not finite if a value is not or if only `expected` is zero.
    """
    wide = torch.promote_types(expected.dtype, torch.float32)
    found, expected = found.detach().to(wide), expected.detach().to(wide)
    error, size = float((found - expected).norm()), float(expected.norm())
    return error / size if size else error and math.inf


class CheckedProduct:
    """A product that is compared once for each key, with a synchronization.

    Args:
        name: What computes the product.
        fix: What to do if it is wrong.

    Attributes:
        problem: The first wrong product, in words, or "".
    """

    def __init__(
        self, name: str = "bitsandbytes' gemm_4bit", fix: str = "Update bitsandbytes."
    ) -> None:
        self.problem, self._name, self._fix = "", name, fix
        self._is_right: dict[Hashable, bool] = {}

    def product(
        self, key: Hashable, compute: Callable[[], Tensor | None], expected: Callable[[], Tensor]
    ) -> Tensor | None:
        """Return compute(); None if it is None or wrong, or cannot be compared during a capture.

        Args:
            key: All properties that may select another kernel.
            expected: Computes the same by torch.
        """
        is_right = self._is_right.get(key)
        if is_right is False or (is_right is None and _is_capturing()):
            return None
        found = compute()
        if is_right or found is None:
            return found
        right = expected().float()
        if not 0 < float(right.norm()) < math.inf:  # says nothing about the product
            return found
        error = relative_difference(found, right)
        self._is_right[key] = error <= TOLERANCE
        if self._is_right[key]:
            return found
        self.problem = self.problem or f"a result is off by {error:.0%}."
        _LOG.warning("%s", self.fallback.text if self.fallback else self.problem)
        return None

    @property
    def fallback(self) -> Fallback | None:
        """The fallback, if a product was wrong."""
        if not self.problem:
            return None
        return Fallback(
            path="Generation unpacks each packed weight for each token",
            cause=f"{self._name} is wrong on this GPU: {self.problem}",
            cost="A token takes several times longer.",
            fix=self._fix,
        )


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


GEMM = CheckedProduct()
"""bitsandbytes' product with packed weights, in this process."""
