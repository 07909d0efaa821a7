"""The part of `peftkit inspect` that reads tensors: how large an update is, how two differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from peftkit.errors import AdapterError

if TYPE_CHECKING:
    from peftkit.merging.compare import RoleUpdate


def measure(folder: Path) -> tuple[list[RoleUpdate], str]:
    """Return an adapter's updates by role, or none and the reason why they cannot be measured."""
    from peftkit.merging.compare import role_updates

    try:
        return role_updates(folder), ""
    except AdapterError as error:
        return [], f"No norms of its updates: {error}"


def show_updates(updates: Sequence[RoleUpdate]) -> None:
    """Print a table of an adapter's updates, on stdout."""
    if not updates:
        return
    from peftkit_cli.render import print_table

    columns = ("role", "layers", "norm of the update", "rank", "effective rank")
    rows = [
        (u.role, str(u.num_layers), f"{u.norm:.4g}", str(u.rank), f"{u.effective_rank:.1f}")
        for u in updates
    ]
    print_table("", columns, rows)


def show_comparison(one: Path, other: Path, *, as_json: bool) -> None:
    """Print how two adapters differ, on stdout: what they are, then their updates by role."""
    from peftkit.merging.compare import compare
    from peftkit_cli.render import print_table

    found = compare(one, other)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    facts = [(name, first, second) for name, (first, second) in found.facts.items()]
    print_table("", ("", str(one), str(other)), facts)
    rows = [
        (
            role.role,
            *(str(count) if count else "-" for count in role.num_layers),
            *(f"{norm:.4g}" if norm else "-" for norm in role.norm),
            "-" if role.cosine is None else f"{role.cosine:.3f}",
        )
        for role in (*found.roles, found.all)
    ]
    columns = ("role", "layers A", "layers B", "norm A", "norm B", "cosine")
    print_table("The updates of A and B", columns, rows)
    if found.same:
        typer.echo("Both hold the same numbers.")
