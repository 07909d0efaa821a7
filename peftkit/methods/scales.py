"""Ranks and scales of many modules, as the fields of PEFT's config that give them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any


def peft_scales(
    ranks: Mapping[str, int], scalings: Mapping[str, float], *, rslora: bool
) -> dict[str, Any]:
    """Return the config fields that give modules their ranks and scales.

    Args:
        ranks, scalings: By the path of a module or of a stack of experts.
        rslora: scaling is alpha / sqrt(rank).
    """
    alphas = {
        path: _integer_if_whole(scaling * (math.sqrt(ranks[path]) if rslora else ranks[path]))
        for path, scaling in scalings.items()
    }
    rank, rank_pattern = _majority(ranks)
    alpha, alpha_pattern = _majority(alphas)
    patterns = {"rank_pattern": rank_pattern, "alpha_pattern": alpha_pattern, "use_rslora": rslora}
    used = {name: value for name, value in patterns.items() if value}
    return {"r": rank, "lora_alpha": alpha, **used}


def _integer_if_whole(value: float) -> int | float:
    nearest = round(value)
    return nearest if math.isclose(value, nearest, rel_tol=1e-9) else value


def _majority(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the commonest value, and the exceptions by path."""
    common = Counter(values.values()).most_common(1)[0][0]
    return common, {path: value for path, value in values.items() if value != common}
