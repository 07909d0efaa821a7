"""Adapters with one rank and one scale for all layers, and adapters reduced to a lower rank.

Shapes: r rank; out, in features of a layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from torch.nn.functional import pad

from peftkit.formats.peft.low_rank import LowRank
from peftkit.kernels.svd import of_product


def uniform(modules: Mapping[str, LowRank]) -> tuple[dict[str, LowRank], int, float]:
    """Give all layers one rank and one scale, without changing what they compute.

    Lower ranks are padded with zeros; scales other than the most common are multiplied into B.

    Returns:
        The layers, their rank, their scale.
    """
    rank = max(module.rank for module in modules.values())
    scaling = Counter(module.scaling for module in modules.values()).most_common(1)[0][0]
    return (
        {path: _as(module, rank, scaling) for path, module in modules.items()},
        rank,
        scaling,
    )


def _as(module: LowRank, rank: int, scaling: float) -> LowRank:
    missing = rank - module.rank
    b = module.b
    if module.scaling != scaling:  # in float64, so that there is one rounding only
        b = (b.double() * (module.scaling / scaling)).to(b.dtype)
    return replace(
        module, a=pad(module.a, (0, 0, 0, missing)), b=pad(b, (0, missing)), scaling=scaling
    )


def without_padding(module: LowRank) -> LowRank:
    """Drop ranks in which both A and B are zero; at least one stays."""
    used = module.a.any(dim=1) | module.b.any(dim=0)
    keep = max(int(used.nonzero().max()) + 1 if used.any() else 0, 1)
    return replace(module, a=module.a[:keep], b=module.b[:, :keep])


def compress(
    modules: Mapping[str, LowRank], rank: int
) -> tuple[dict[str, LowRank], dict[str, float]]:
    """Return the best approximation of each update with at most `rank` ranks.

    The magnitude of DoRA stays.

    Returns:
        The layers; and the relative error (Frobenius norm) of each that was compressed.
    """
    smaller, errors = dict(modules), {}
    for path, module in modules.items():
        if module.rank > rank:
            cut = of_product(module.a, module.b, rank)
            smaller[path] = replace(module, a=cut.a, b=cut.b)
            errors[path] = (cut.lost / cut.total) ** 0.5 if cut.total else 0.0
    return smaller, errors
