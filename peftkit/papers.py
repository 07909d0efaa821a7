"""What is said of an adapter: where it sits, before it is trained; and its card, after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peftkit.adapter import Adapter
from peftkit.base import Base
from peftkit.events import Table
from peftkit.formats.card import Card


def adapter_table(adapter: Adapter) -> Table:
    """Return one row per kind of adapted layer: its roles, its name, how many, trained values."""
    kinds: dict[tuple[str, str], tuple[int, int]] = {}
    for path, module in adapter.modules.items():
        kind = (", ".join(module.site.roles) or "-", path.rpartition(".")[2])
        number, values = kinds.get(kind, (0, 0))
        own = sum(p.numel() for p in module.parameters() if p.requires_grad)
        kinds[kind] = (number + 1, values + own)
    rows = [(*kind, str(n), f"{values:,}") for kind, (n, values) in kinds.items()]
    total = ("all", "", str(len(adapter.modules)), f"{adapter.num_trainable:,}")
    columns = ("role", "module", "layers", "trained values")
    return Table(f"Adapter: {adapter.method.type}", columns, (*rows, total))


def training_card(
    base: Base,
    adapter: Adapter,
    *,
    data: str,
    steps: int,
    metrics: Mapping[str, float],
    recipe: str,
    usage: Sequence[tuple[str, str, str]],
) -> Card:
    """Return the card of an adapter that was trained.

    Args:
        data: What it learnt from, in words. usage: Code that uses it, by the tool.
        recipe: As YAML.
    """
    share = adapter.num_trainable / base.audit.num_parameters
    return Card(
        title=f"{adapter.method.type} adapter for {base.name}",
        base=base.name,
        facts={
            "base": base.name + (f" @ {base.revision}" if base.revision else ""),
            "base weights": base.fingerprint,
            "method": adapter.method.type,
            "trained values": f"{adapter.num_trainable:,} ({share:.2%} of the base)",
            "data": data,
            "steps": str(steps),
        },
        metrics=metrics,
        recipe=recipe,
        usage=usage,
    )
