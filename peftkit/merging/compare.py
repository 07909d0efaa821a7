"""Measures an adapter's updates by role, and how two adapters differ; without their base.

Norms are Frobenius norms of the updates s B A over all layers of a role. The effective rank of a
layer is exp(entropy of its singular values as shares) (Roy and Vetterli, 2007): r where all r
directions weigh the same, near 1 where one does nearly all. All come from the factors: no matrix of
a layer's own size is formed. Of DoRA this is the part under its magnitudes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.peft.folder import AdapterFile
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


@dataclass(frozen=True, slots=True)
class RoleDifference:
    """Two adapters on the layers of one role.

    Attributes:
        num_layers, norm: Of each adapter; zero where it does not adapt the role.
        cosine: Of both updates as vectors over the layers; None where one of them is zero, or
            where shapes differ. 1: the same direction; 0: nothing in common.
    """

    role: str
    num_layers: tuple[int, int]
    norm: tuple[float, float]
    cosine: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two adapters differ.

    Attributes:
        facts: Name -> value of each adapter, in words; equal ones too.
        roles: In the order of the first one's layers.
        all: Every role together.
        same: Whether all updates are the same numbers.
    """

    facts: Mapping[str, tuple[str, str]]
    roles: tuple[RoleDifference, ...]
    all: RoleDifference
    same: bool


def role_updates(folder: str | Path) -> list[RoleUpdate]:
    """Measure an adapter's updates by role.

    Raises:
        AdapterError: It is not a LoRA or DoRA, or is damaged.
    """
    _, updates = read_low_rank(adapter_folder(folder))
    found = []
    for role, paths in _by_role(updates).items():
        values = [_values(updates[path]) for path in paths]
        ranks = [svd.effective_rank(one) for one in values]
        norm = math.sqrt(sum(float(one.square().sum()) for one in values))
        rank = max(updates[path].rank for path in paths)
        found.append(RoleUpdate(role, len(paths), norm, rank, sum(ranks) / len(ranks)))
    return found


def compare(one: str | Path, other: str | Path) -> Comparison:
    """Compare two adapters, of the same base or not.

    Raises:
        AdapterError: One of them is not a LoRA or DoRA, or is damaged.
    """
    (file, first), (other_file, second) = (
        read_low_rank(adapter_folder(folder)) for folder in (one, other)
    )
    both = {**first, **second}
    roles = tuple(_difference(role, first, second, paths) for role, paths in _by_role(both).items())
    facts, other_facts = _facts(file, first), _facts(other_file, second)
    return Comparison(
        {name: (facts[name], other_facts[name]) for name in facts},
        roles,
        _difference("all", first, second, list(both)),
        first.keys() == second.keys() and all(_equal(first[p], second[p]) for p in first),
    )


def _by_role(updates: Mapping[str, LowRank]) -> dict[str, list[str]]:
    roles: dict[str, list[str]] = {}
    for path in updates:
        roles.setdefault(linear_role(path), []).append(path)
    return roles


def _values(update: LowRank) -> torch.Tensor:
    return abs(update.scaling) * svd.singular_values(update.a, update.b)


def _difference(
    role: str, first: Mapping[str, LowRank], second: Mapping[str, LowRank], paths: list[str]
) -> RoleDifference:
    sides = [[side[path] for path in paths if path in side] for side in (first, second)]
    lengths = [math.sqrt(sum(_inner(u, u) for u in side)) for side in sides]
    shared = [(first[path], second[path]) for path in paths if path in first and path in second]
    fits = all(_shape(one) == _shape(other) for one, other in shared)
    cosine = None
    if fits and all(lengths):
        inner = sum(_inner(*pair) for pair in shared)
        cosine = max(-1.0, min(1.0, inner / (lengths[0] * lengths[1])))
    counts = (len(sides[0]), len(sides[1]))
    return RoleDifference(role, counts, (lengths[0], lengths[1]), cosine)


def _shape(update: LowRank) -> tuple[int, int]:
    return update.b.shape[0], update.a.shape[1]


def _inner(one: LowRank, other: LowRank) -> float:
    """Return the sum over all entries of one's update times the other's, from r x r matrices."""
    outputs = one.b.double().t() @ other.b.double()
    inputs = one.a.double() @ other.a.double().t()
    # rounding must not make the square of a length negative
    inner = one.scaling * other.scaling * float((outputs * inputs).sum())
    return max(inner, 0.0) if one is other else inner


def _equal(one: LowRank, other: LowRank) -> bool:
    pairs = ((one.a, other.a), (one.b, other.b))
    if one.scaling != other.scaling or not all(torch.equal(*pair) for pair in pairs):
        return False
    if one.magnitude is None or other.magnitude is None:
        return one.magnitude is other.magnitude
    return torch.equal(one.magnitude, other.magnitude)


def _facts(file: AdapterFile, updates: Mapping[str, LowRank]) -> dict[str, str]:
    origin = file.provenance
    style = origin.prompt_style
    return {
        "base": str(origin.base or origin.hub_id or "not named"),
        "revision": origin.revision or "not recorded",
        "fingerprint": origin.fingerprint or "not recorded",
        "task": str(origin.task_type),
        "prompts": style.kind if style else "not recorded",
        "method": file.method.type,
        "rank": _listed({update.rank for update in updates.values()}),
        "scaling": _listed({update.scaling for update in updates.values()}),
        "roles": ", ".join(_by_role(updates)),
        "layers": str(len(updates)),
        "parameters": f"{sum(u.a.numel() + u.b.numel() for u in updates.values()):,}",
    }


def _listed(values: set[int] | set[float]) -> str:
    shown = [f"{value:.4g}" for value in sorted(values)]
    return ", ".join(shown) if len(shown) < 5 else f"{shown[0]} to {shown[-1]}"
