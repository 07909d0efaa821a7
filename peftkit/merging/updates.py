"""Measures an adapter's updates by role, without its base.

Norms are Frobenius norms of the updates s B A over all layers of a role. The effective rank of a
layer is exp(entropy of its singular values as shares) (Roy and Vetterli, 2007): r where all r
directions weigh the same, near 1 where one does nearly all. All come from the factors: no matrix of
a layer's own size is formed. Of DoRA this is the part under its magnitudes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.peft.low_rank import LowRank, read_low_rank
from peftkit.kernels import svd
from peftkit.model.roles import linear_role


@dataclass(frozen=True, slots=True)
class RoleUpdate:
    """An adapter's updates of the layers of one role.

    Attributes:
        num_layers: How many it adapts. norm: Of their updates together.
        rank: The largest of a layer. effective_rank: The mean over the layers.
    """

    role: str
    num_layers: int
    norm: float
    rank: int
    effective_rank: float


def role_updates(folder: str | Path) -> list[RoleUpdate]:
    """Measure an adapter's updates by role.

    Raises:
        AdapterError: It is not a LoRA or DoRA, or is damaged.
    """
    _, updates = read_low_rank(adapter_folder(folder))
    roles: dict[str, list[LowRank]] = {}
    for path, update in updates.items():
        roles.setdefault(linear_role(path), []).append(update)
    found = []
    for role, layers in roles.items():
        values = [abs(u.scaling) * svd.singular_values(u.a, u.b) for u in layers]
        norm = math.sqrt(sum(float(one.square().sum()) for one in values))
        effective = sum(map(svd.effective_rank, values)) / len(values)
        found.append(RoleUpdate(role, len(layers), norm, max(u.rank for u in layers), effective))
    return found
