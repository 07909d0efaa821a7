"""The best matrix of a lower rank (Eckart and Young, 1936) and its error; principal components.

A product b a has the singular values of a small matrix: b = Qb Rb and a^T = Qa Ra give b a = Qb (Rb
Ra^T) Qa^T, without a matrix of size (out, in). For a large full matrix they come from a random
projection with power iterations (Halko et al., 2011, arXiv:0909.4061).

Shapes: r rank, k rank of the result; out, in sides of the matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from peftkit.kernels.device import in_float64

EXACT_SIDE = 256
"""Largest smaller side of matrices that are decomposed exactly, in milliseconds."""
OVERSAMPLING = 10
POWER_ITERATIONS = 4

BLOCK = 1024
"""Vectors per update of an incremental PCA; smaller decompositions cost about the same."""
CONVERGED = 0.99
"""Minimum share of the old components in the new ones for convergence."""
SPARE = 8
"""Extra components that an incremental PCA tracks, because small components may grow."""


@dataclass(frozen=True, slots=True)
class Truncated:
    """An approximation b a of rank k.

    Attributes:
        a: (k, in), b: (out, k), float32; each carries the square roots of the singular values.
        kept: Sum of the squares of the k singular values.
        total: Sum of the squares of all entries of the approximated matrix.
    """

    a: Tensor
    b: Tensor
    kept: float
    total: float

    @property
    def lost(self) -> float:
        """Squared norm of the error, clamped to zero against rounding."""
        return max(self.total - self.kept, 0.0)


def of_product(
    a: Tensor, b: Tensor, rank: int | None = None, *, negligible: float = 0.0
) -> Truncated:
    """Return the best rank-k matrix for b a, computed in float64.

    Args:
        a: (r, in). b: (out, r).
        rank: The maximum of k.
        negligible: Drop singular values up to this, but keep at least one.
    """
    u, s, vh = _svd_of_product(a, b)
    s = s.where(s > negligible, 0.0)
    k = min(max(1, int(s.count_nonzero())), len(s) if rank is None else rank)
    return _truncated(u, s, vh, k, float(s.square().sum()))


def is_zero(a: Tensor, b: Tensor) -> bool:
    """Return whether b a is zero, up to the rounding of float32 numbers that cancel."""
    return float(singular_values(a, b)[0]) <= 1e-6 * float(a.norm() * b.norm())


def singular_values(a: Tensor, b: Tensor) -> Tensor:
    """Return the singular values of b a, largest first, in float64."""
    return _svd_of_product(a, b)[1]


def _svd_of_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    left, core_left = torch.linalg.qr(in_float64(b))  # (out, r), (r, r)
    right, core_right = torch.linalg.qr(in_float64(a).t())  # (in, r), (r, r)
    u, s, vh = torch.linalg.svd(core_left @ core_right.t(), full_matrices=False)
    return left @ u, s, vh @ right.t()


def of_matrix(
    matrix: Tensor, rank: int, *, seed: int = 0, iterations: int = POWER_ITERATIONS
) -> Truncated:
    """Return the best, or nearly best, rank-k matrix for a full one; k = min(rank, out, in).

    Args:
        matrix: (out, in) float32.
        seed, iterations: Settings of the random projection for large matrices.
    """
    total = float(in_float64(matrix).square().sum())
    k = min(rank, *matrix.shape)
    width = k + OVERSAMPLING
    if min(matrix.shape) <= max(EXACT_SIDE, 2 * width):
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        return _truncated(u, s, vh, k, total)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(matrix.shape[1], width, generator=generator)
    basis = matrix @ drawn.to(matrix.device)  # (out, width)
    for _ in range(iterations):
        # orthonormalise each time: rounding would swamp the small singular values
        basis = torch.linalg.qr(basis)[0]
        basis = matrix @ torch.linalg.qr(matrix.t() @ basis)[0]
    basis = torch.linalg.qr(basis)[0]
    u, s, vh = torch.linalg.svd(basis.t() @ matrix, full_matrices=False)
    return _truncated(basis @ u, s, vh, k, total)


def _truncated(u: Tensor, s: Tensor, vh: Tensor, k: int, total: float) -> Truncated:
    root = s[:k].sqrt()
    b, a = u[:, :k] * root, root[:, None] * vh[:k]
    return Truncated(
        a.float().contiguous(),
        b.float().contiguous(),
        float(in_float64(s[:k]).square().sum()),
        total,
    )


def effective_rank(values: Tensor) -> float:
    """Return exp(entropy of the singular values as shares) (Roy and Vetterli, 2007); 0 of zero."""
    shares = values[values > 0] / values.sum()
    return math.exp(-float((shares * shares.log()).sum())) if len(shares) else 0.0


class Directions:
    """The principal components of a stream of vectors, by incremental PCA (Ross et al., 2008).

    They are updated block by block until they converge.

    Args:
        rank: Number of components whose convergence sets `converged`.
        max_rank: Maximum number of components in `shares` and `basis`.

    Attributes:
        scaled: (k, in): components times singular values, largest first.
        variance: Sum of squared distances of all vectors from their mean.
    """

    def __init__(self, rank: int, max_rank: int) -> None:
        self.rank, self.max_rank = rank, max_rank
        self.num_seen, self.variance, self.converged = 0, 0.0, False
        self.scaled, self.mean = torch.empty(0, 0), torch.empty(0)
        self._waiting: list[Tensor] = []

    def take(self, x: Tensor) -> None:
        """Add inputs (..., in); they are processed in blocks of BLOCK."""
        self._waiting.append(x.detach().flatten(0, -2))
        if sum(map(len, self._waiting)) >= BLOCK:
            self.flush()

    def flush(self) -> None:
        """Process the waiting inputs."""
        if self._waiting:
            self._add(torch.cat(self._waiting).float())
            self._waiting = []

    def _add(self, x: Tensor) -> None:
        mean, old_basis = x.mean(0), self.basis(self.rank) if self.num_seen else None
        x = x - mean
        self.variance += _sum_of_squares(x)
        if self.num_seen:
            # the means of old and new vectors differ: their distance is one more vector
            gap, total = mean - self.mean, self.num_seen + len(x)
            between = math.sqrt(self.num_seen * len(x) / total) * gap
            self.variance += _sum_of_squares(between)
            mean = self.mean + gap * (len(x) / total)
            rows = torch.cat([self.scaled, x, between[None]])
        else:
            rows = x
        # one iteration takes half the time, and later blocks correct its error
        best = of_matrix(rows, self.max_rank + SPARE, iterations=1)
        self.scaled = best.a * best.a.norm(dim=1, keepdim=True)  # a has the singular values' roots
        self.mean, self.num_seen = mean, self.num_seen + len(x)
        if old_basis is not None and len(old_basis) == self.rank:
            overlap = (old_basis @ self.basis(self.rank).t()).square().sum() / self.rank
            self.converged = bool(overlap >= CONVERGED)

    def basis(self, rank: int) -> Tensor:
        """Return the first directions (rank, in), orthonormal even if the variance is zero."""
        return torch.linalg.qr(self.scaled[:rank].t())[0].t()

    def shares(self) -> list[float]:
        """Return the share of the variance that each component explains, largest first."""
        squares = in_float64(self.scaled[: self.max_rank]).square().sum(1)
        return (squares / (self.variance or 1.0)).tolist()


def _sum_of_squares(x: Tensor) -> float:
    wide = torch.float32 if x.device.type == "mps" else torch.float64  # which it has not
    return float(x.square().sum(dtype=wide))
