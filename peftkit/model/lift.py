"""Remove the wrappers around a model's frozen modules temporarily, and restore them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from peftkit.model.places import FrozenWrapper

Wrapped = list[tuple[nn.Module, str, FrozenWrapper]]
"""Parent, name in the parent, and wrapper; the outer ones first."""


def take_off(model: nn.Module) -> Wrapped:
    """Replace all wrappers (adapter modules, a bank's layers) by their frozen modules.

    Adapters that act through hooks, such as prompts, stay active.
    """
    removed: Wrapped = []
    while wrappers := list(_outermost(model)):
        for parent, name, wrapper in wrappers:
            setattr(parent, name, wrapper.base)
        removed += wrappers
    return removed


@contextmanager
def lifted(model: nn.Module) -> Iterator[None]:
    """Remove a model's wrappers within the context, which may install others."""
    removed = take_off(model)
    try:
        yield
    finally:
        take_off(model)
        for parent, name, wrapper in reversed(removed):
            setattr(parent, name, wrapper)


def _outermost(module: nn.Module) -> Iterator[tuple[nn.Module, str, FrozenWrapper]]:
    """Yield the outermost wrappers; a shared module is yielded at each of its places."""
    visited, waiting = {module}, [module]
    while waiting:
        parent = waiting.pop()
        for name, child in parent.named_children():
            if isinstance(child, FrozenWrapper):
                yield parent, name, child
            elif child not in visited:
                visited.add(child)
                waiting.append(child)
