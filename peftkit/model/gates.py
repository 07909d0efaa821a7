"""Gated feed-forward layers of a model, their activation by one kernel while it is used on a GPU.

As with norms (norms.py), no list of models says which modules these are: a module of three linear
layers and an activation is asked, with small layers in the place of its own, whether it computes
W_down (f(W_gate x) * W_up x).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from peftkit.kernels.gated import ACTIVATIONS, Gated
from peftkit.model.places import is_linear, unwrap_adapter
from peftkit.model.roles import FFN_LEAVES


class Gate(NamedTuple):
    """The names of a module's three layers, and of its activation among ACTIVATIONS."""

    gate: str
    up: str
    down: str
    activation: str


@contextmanager
def fused_gates(model: nn.Module) -> Iterator[None]:
    """Have gated activations computed by one kernel within the context.

    The modules are of another class meanwhile, which is a subclass of their own.
    """
    asked: dict[Any, Gate | None] = {}
    before: list[tuple[nn.Module, type[nn.Module]]] = []
    made: dict[Any, Any] = {}
    for module in model.modules():
        names = _layers(module)
        if names is None or hasattr(type(module), "gate_of"):
            continue
        kind = type(module)
        others = [child for name, child in module.named_children() if name not in names.values()]
        key = kind, tuple(map(type, others))
        if key not in asked:
            asked[key] = _gate_of(module, names)
        if (gate := asked[key]) is not None:
            before.append((module, kind))
            made.setdefault(key, _fused(kind, gate))
            module.__class__ = made[key]
    try:
        yield
    finally:
        for module, kind in before:
            module.__class__ = kind


def num_gates(model: nn.Module) -> int:
    """Return how many gated activations are computed by one kernel now."""
    return sum(hasattr(type(module), "gate_of") for module in model.modules())


def _layers(module: nn.Module) -> dict[str, str] | None:
    """Return role to name of a module's layers: gate, up, down, and an activation beside them."""
    children = dict(module.named_children())
    linear = {name for name, child in children.items() if is_linear(unwrap_adapter(child))}
    roles = {FFN_LEAVES.get(name, ""): name for name in linear}
    others = [child for name, child in children.items() if name not in linear]
    plain = all(not any(True for _ in child.parameters()) for child in others)
    if roles.keys() != {"gate", "up", "down"} or len(linear) != 3 or len(others) != 1 or not plain:
        return None
    return roles


def _gate_of(module: nn.Module, names: dict[str, str]) -> Gate | None:
    """Ask a module: on the CPU, with small layers in the place of its own."""
    with _disable_current_modes(), torch.no_grad():  # real numbers, where steps are only counted
        generator = torch.Generator().manual_seed(0)
        small = {
            role: nn.Linear(*((4, 6) if role == "down" else (6, 4)), bias=False) for role in names
        }
        for layer in small.values():
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
        twin = module.__class__.__new__(module.__class__)
        twin.__dict__ = {
            name: value for name, value in module.__dict__.items() if name != "forward"
        }
        replaced = {name: small[role] for role, name in names.items()}
        twin.__dict__["_modules"] = {**module._modules, **replaced}
        x = torch.randn(5, 6, generator=generator)
        try:
            found = twin(x)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return None
        for activation, function in ACTIVATIONS.items():
            expected = small["down"](function(small["gate"](x)) * small["up"](x))
            same = isinstance(found, Tensor) and found.shape == expected.shape
            if same and torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
                return Gate(names["gate"], names["up"], names["down"], activation)
    return None


def _fused(kind: type[nn.Module], gate: Gate) -> type[nn.Module]:
    """Return a module's class with another forward pass; one for all, so that blocks stay alike."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or args or kwargs:
            return cast(Tensor, cast(Any, kind).forward(self, x, *args, **kwargs))
        parts = getattr(self, gate.gate)(x), getattr(self, gate.up)(x)
        return cast(Tensor, getattr(self, gate.down)(Gated.apply(*parts, gate.activation)))

    body = {"forward": forward, "gate_of": gate, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), body)
