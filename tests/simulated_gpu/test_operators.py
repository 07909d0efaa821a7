"""Every operator of ours has a fake kernel: a compiler, and a simulation of shapes, ask for it."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest

from peftkit import kernels


def operators() -> dict[str, Any]:
    """Return all operators of ours, by name."""
    import torch._library.custom_ops as custom_ops

    for module in pkgutil.iter_modules(kernels.__path__):
        if "triton" not in module.name:  # which need not be there
            importlib.import_module(f"peftkit.kernels.{module.name}")
    return {n: op for n, op in custom_ops.OPDEFS.items() if n.startswith("peftkit")}


def lacking(found: dict[str, Any]) -> list[str]:
    """Return those that give a tensor and do not say its shape, with file and line."""
    return [
        f"{name} at {op._init_fn.__code__.co_filename}:{op._init_fn.__code__.co_firstlineno}"
        for name, op in found.items()
        if op._opoverload._schema.returns and op._abstract_fn is None
    ]


def test_every_operator_says_the_shape_of_what_it_gives() -> None:
    found = operators()
    assert len(found) >= 4
    assert lacking(found) == []


def test_one_that_does_not_is_named_with_file_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    name, op = next((n, op) for n, op in operators().items() if op._abstract_fn is not None)
    monkeypatch.setattr(op, "_abstract_fn", None)
    (told,) = lacking({name: op})
    assert told.startswith(f"{name} at ")
    assert ".py:" in told
