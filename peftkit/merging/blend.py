"""Combines the weighted updates of one layer into one.

D_i = s_i B_i A_i is the update of adapter i and w_i its weight; a weight scales the update, not A
and B each. The methods:

- cat: sum w_i D_i, exactly, by stacking the factors; the ranks add up.
- linear: sum w_i D_i, exactly, at the lowest rank that holds it. (The method of this name that
  adds up the A and the B of adapters makes products of one's B with another's A.)
- svd: the best rank-R matrix for sum w_i D_i.
- magnitude_prune: sum w_i trim(D_i), where trim keeps the largest `density` of the entries.
- ties (Yadav et al., 2023, arXiv:2306.01708): trim(w_i D_i); the sign of each entry's sum is
  elected; the mean of the entries that have it, over those that are not zero.
- dare_linear, dare_ties (Yu et al., 2023, arXiv:2311.03099): drop(D_i) in the place of trim(D_i),
  which keeps each entry with probability `density` and divides it by that. What is dropped depends
  on the seed, the layer and the adapter's own tensors: one given twice loses the same twice.

The last four work on whole matrices and are made rank R again at the end.
Shapes: r rank; out, in features of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from peftkit.formats.peft.low_rank import LowRank
from peftkit.kernels import svd

EXACT = ("linear", "cat")
SUMS = (*EXACT, "svd")

ROUNDING = 1e-7
"""Of float32, in which adapters are stored: smaller singular values, relative to the largest norm
that went in, are none."""

Weighted = tuple[LowRank, float]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a combination is made by; see the module.

    Attributes:
        rank: R; None: the largest rank that the layer has in any of the adapters.
        density: Share of entries kept. seed: Of random drops, and of large decompositions.
    """

    rule: str
    rank: int | None = None
    density: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Blended:
    """The combined update of a layer.

    Attributes:
        lost: Squared norm of what was cut off by the rank. total: That of the exact combination.
    """

    update: LowRank
    lost: float = 0.0
    total: float = 0.0


def blend(path: str, layers: Sequence[Weighted], settings: Settings) -> Blended:
    """Combine the updates of one layer; an adapter without it counts as zero and is left out.

    Args:
        path: Of the layer; chooses what DARE drops.
        layers: Plain updates of one shape, at least one.
    """
    first = layers[0][0]
    counted = [(update, weight) for update, weight in layers if weight != 0.0]
    if not counted:
        zero = LowRank(torch.zeros(1, first.a.shape[1]), torch.zeros(first.b.shape[0], 1), 1.0)
        return Blended(zero)
    rank = settings.rank or max(update.rank for update, _ in layers)
    pruned = settings.rule in PRUNING and settings.density < 1.0
    if len(counted) == 1 and not pruned and (settings.rule in EXACT or counted[0][0].rank <= rank):
        return Blended(_scaled(*counted[0]))
    if settings.rule in PRUNING:
        best = svd.of_matrix(_pruned(path, counted, settings), rank, seed=settings.seed)
    else:
        best = _summed(counted, settings.rule, rank)
    return Blended(LowRank(best.a, best.b, 1.0), best.lost, best.total)


def _summed(counted: Sequence[Weighted], rule: str, rank: int) -> svd.Truncated:
    a = torch.cat([update.a.double() for update, _ in counted])  # (sum of r, in)
    b = torch.cat([w * u.scaling * u.b.double() for u, w in counted], dim=1)  # (out, sum of r)
    smallest = min(a.shape[1], b.shape[0])
    # a rank above the layer's own smaller side says nothing more, and is refused on loading
    if rule == "cat" and len(a) <= smallest:
        return svd.Truncated(a.float(), b.float(), 0.0, 0.0)
    parts = (abs(w * u.scaling) * float(svd.singular_values(u.a, u.b)[0]) for u, w in counted)
    most = min(rank, smallest) if rule == "svd" else None
    return svd.of_product(a, b, most, negligible=ROUNDING * sum(parts))


def _scaled(update: LowRank, weight: float) -> LowRank:
    """Weight an update; weight 1 leaves it unchanged to the bit."""
    if weight == 1.0:
        return update
    return LowRank(update.a, (weight * update.scaling * update.b.double()).float(), 1.0)


def _pruned(path: str, counted: Sequence[Weighted], settings: Settings) -> Tensor:
    """Return the full matrix (out, in) of a pruning method, before it is cut to a rank."""
    prune, merge = PRUNING[settings.rule]
    kept = []
    for update, weight in counted:
        seed = crc32(f"{settings.seed} {path} {update.scaling}".encode())
        for tensor in (update.a, update.b):
            seed = crc32(tensor.float().contiguous().numpy().data, seed)
        kept.append(weight * prune(update.delta(), settings.density, seed))
    return merge(kept)


def trim(delta: Tensor, density: float, seed: int = 0) -> Tensor:
    """Keep the largest entries by magnitude, that share of them, and zero the others."""
    number = max(1, round(density * delta.numel()))
    flat = delta.flatten()
    largest = flat.abs().topk(number, sorted=False).indices
    return torch.zeros_like(flat).index_copy(0, largest, flat[largest]).view_as(delta)


def drop(delta: Tensor, density: float, seed: int) -> Tensor:
    """Keep each entry with probability `density`, divided by it; zero the others."""
    generator = torch.Generator().manual_seed(seed)
    return delta * (torch.rand(delta.shape, generator=generator) < density) / density


def _sum(deltas: Sequence[Tensor]) -> Tensor:
    return sum(deltas[1:], deltas[0])


def elected_mean(deltas: Sequence[Tensor]) -> Tensor:
    """Return the mean of the entries that have the sign of their sum; zero where that is zero."""
    sign = _sum(deltas).sign()
    agreeing = [(delta.sign() == sign) & (delta != 0) for delta in deltas]
    total = _sum([delta * agrees for delta, agrees in zip(deltas, agreeing, strict=True)])
    return total / _sum([agrees.float() for agrees in agreeing]).clamp(min=1.0)


Prune = Callable[[Tensor, float, int], Tensor]
Merge = Callable[[Sequence[Tensor]], Tensor]
PRUNING: Mapping[str, tuple[Prune, Merge]] = {
    "ties": (trim, elected_mean),
    "dare_linear": (drop, _sum),
    "dare_ties": (drop, elected_mean),
    "magnitude_prune": (trim, _sum),
}
RULES = (*SUMS, *PRUNING)
