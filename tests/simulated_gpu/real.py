"""The suite of the simulated card on a real one: PEFTKIT_REAL_CARD=1 pytest tests/simulated_gpu.

Tests of what only a simulation has are skipped. Their names follow from the simulation's classes:
the attributes that `RealCard` and torch's streams, events and graphs lack, cards with other
properties than the one that is here, and kernels that count. A test that only a simulation can
pass for another reason has the mark `needs_simulation`.
"""

import ast
import gc
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

REAL = os.environ.get("PEFTKIT_REAL_CARD") == "1"


class RealCard:
    """What tests ask a card, answered by torch."""

    @property
    def memory(self) -> int:
        """Bytes in all."""
        return int(torch.cuda.get_device_properties(0).total_memory)

    @property
    def allocated(self) -> int:
        """Bytes now."""
        return torch.cuda.memory_allocated()

    @property
    def peak(self) -> int:
        """Bytes at most since `reset`."""
        return torch.cuda.max_memory_allocated()

    def reset(self) -> None:
        """Begin to count anew."""
        torch.cuda.reset_peak_memory_stats()

    def settle(self) -> None:
        """Wait for what was launched."""
        torch.cuda.synchronize()


@contextmanager
def real_card() -> Iterator[RealCard]:
    """Give the first card that is here; leave its memory as it was."""
    card = RealCard()
    card.reset()
    try:
        yield card
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def needs_simulation(item: Any) -> bool:
    """Return whether a test is marked, or uses what only a simulation has."""
    if item.get_closest_marker("needs_simulation") is not None:
        return True
    return item.function.__name__ in only_simulated(inspect.getsource(item.module))


def only_simulated(source: str) -> set[str]:
    """Return the functions and classes of a module that use what only a simulation has.

    They use it themselves, or by another function, class or fixture of the module.
    """
    kinds = ast.FunctionDef | ast.ClassDef
    nodes = {node.name: node for node in ast.parse(source).body if isinstance(node, kinds)}
    found = {name for name, node in nodes.items() if _uses_a_simulation(node)}
    size = -1
    while size < len(found):
        size = len(found)
        found |= {name for name, node in nodes.items() if found & _names_in(node)}
    return found


def _uses_a_simulation(function: ast.AST) -> bool:
    on_cards, of_torch = simulated_names()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and _is_card(node.value):
            if node.attr in on_cards or isinstance(node.ctx, ast.Store):
                return True
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            words = {argument.arg for argument in node.keywords}
            if name == "Card" and (node.args or words):
                return True  # another card than the one that is here
            if name == "simulated" and "kernels" in words:
                return True
            is_patch = isinstance(node.func, ast.Attribute) and node.func.attr == "setattr"
            if is_patch and of_torch & {getattr(value, "value", None) for value in node.args}:
                return True
    return False


def _is_card(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name == "card"


def _names_in(function: ast.AST) -> set[str]:
    """Return the names that a function uses, its fixtures among them."""
    nodes = [*ast.walk(function)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.arg for node in nodes if isinstance(node, ast.arg)}


def simulated_names() -> tuple[set[str], set[str]]:
    """Return the attributes of the simulated card alone, and of simulated classes of torch."""
    from tests.simulated_gpu import simulation  # which imports this module

    pairs = [
        (simulation.Stream, torch.cuda.Stream),
        (simulation.Event, torch.cuda.Event),
        (simulation.Graph, torch.cuda.CUDAGraph),
    ]
    of_torch = {name for ours, theirs in pairs for name in _public(ours) - _public(theirs)}
    return _public(simulation.Card) - _public(RealCard), of_torch


def _public(kind: type) -> set[str]:
    names = {*dir(kind), *inspect.get_annotations(kind)}
    return {name for name in names if not name.startswith("_")}
