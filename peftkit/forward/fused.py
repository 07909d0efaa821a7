"""Fused GPU kernels for norms, gated layers and rotary embeddings of a model.

There is no list of models: each module is tested. A norm must match the kernel's formula for random
numbers in float32. A module of three linear layers and an activation, run with small layers in
their place, must compute W_down (f(W_gate x) * W_up x). The rotation function that an attention
module calls must compute the kernel's rotation; the module's forward pass then calls the kernel.
Other modules do not change, nor do trained norms, norms under autocast (which has special rules for
dtypes), and modules inside torch.compile, which generates such kernels itself.

In 16 bits transformers rounds a norm before and after the product with the weight; the kernel
rounds once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from peftkit.forward.compat import CACHE_NAMES, with_global, without_renaming
from peftkit.kernels.fused import ACTIVATIONS, Rotary, gated_product, rms_norm
from peftkit.model.places import is_linear, unwrap_adapter
from peftkit.model.roles import FFN_LEAVES

EPS = ("variance_epsilon", "eps", "epsilon")
"""Attributes of norms that hold the eps added to the mean square."""
ROTATION = "apply_rotary_pos_emb"
"""The function in transformers' modules that rotates queries and keys."""
_CALL_ERRORS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""Errors of modules with another signature."""


@contextmanager
def fused_modules(model: nn.Module) -> Iterator[None]:
    """Compute norms, gated layers and rotary embeddings with fused kernels within the context.

    A subclass replaces a module's class. Equal modules share one subclass, so all blocks of a model
    still have the same classes.
    """
    classes: dict[Any, Any] = {}
    before: list[tuple[nn.Module, type[nn.Module]]] = []
    for module in model.modules():
        kind = type(module)
        for name, candidate, forward_of in KINDS:
            facts = None if hasattr(kind, "peftkit_fused") else candidate(module)
            if facts is None:
                continue
            if (key := (kind, *facts)) not in classes:
                with _disable_current_modes(), torch.no_grad():  # on real tensors
                    classes[key] = _subclass(kind, name, forward_of(module, *facts))
            if classes[key] is not None:
                before.append((module, kind))
                module.__class__ = classes[key]
    try:
        yield
    finally:
        for module, kind in before:
            module.__class__ = kind


def why_unfused(model: nn.Module) -> str:
    """Return which modules of a prepared model no fused kernel computes; "" if there are none."""
    fused = {getattr(type(module), "peftkit_fused", "") for module in model.modules()}
    missing = {
        name: type(module).__name__
        for module in model.modules()
        for name, is_candidate in CANDIDATES.items()
        if name not in fused and is_candidate(module)
    }
    named = ", ".join(f"{name} of {kind}" for name, kind in missing.items())
    return f"Other formulas than the kernels': {named}." if named else ""


def num_fused(model: nn.Module) -> int:
    return sum(hasattr(type(module), "peftkit_fused") for module in model.modules())


def _subclass(kind: type[nn.Module], name: str, forward: Callable[..., Tensor] | None) -> Any:
    """Return a subclass with this forward pass, or None without a forward pass."""
    body = {"forward": forward, "peftkit_fused": name, "__module__": kind.__module__}
    return None if forward is None else type(kind.__name__, (kind,), body)


def _norm(module: nn.Module) -> tuple[int, float] | None:
    """Return size and eps of a possible norm, whose only tensor is a frozen vector."""
    weight, eps = module._parameters.get("weight"), _eps(module)
    if weight is None or len(module._parameters) > 1 or module._modules or module._buffers:
        return None
    if weight.dim() != 1 or weight.requires_grad or eps is None or "forward" in module.__dict__:
        return None
    return len(weight), eps


def _eps(module: nn.Module) -> float | None:
    values = (getattr(module, name, None) for name in EPS)
    return next((eps for eps in values if isinstance(eps, float)), None)


def _fused_norm(module: nn.Module, size: int, eps: float) -> Callable[..., Tensor] | None:
    """Test a norm on the CPU, with a row of normal size and a row so small that eps matters."""
    kind: Any = type(module)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, size, generator=generator) * torch.tensor([[1.0], [eps**0.5]])
    weight = torch.rand(size, generator=generator)
    try:
        output = functional_call(module, {"weight": weight}, x)
        half = functional_call(module, {"weight": weight.bfloat16()}, x.bfloat16())
    except _CALL_ERRORS:
        return None
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    if half.dtype != torch.bfloat16 or not _is_same(output, expected):
        return None

    def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight = cast(Tensor, self.weight)
        autocast = torch.is_autocast_enabled(x.device.type)
        if torch.compiler.is_compiling() or autocast or args or kwargs or x.dtype != weight.dtype:
            return cast(Tensor, kind.forward(self, x, *args, **kwargs))
        return rms_norm(x, weight, cast(float, _eps(self)))

    return forward


class Gate(NamedTuple):
    """The names of a module's three linear layers, and the classes of its other children."""

    gate: str
    up: str
    down: str
    others: tuple[type[nn.Module], ...]


def _gated_layers(module: nn.Module) -> Gate | None:
    """Return the layers of a possible gated layer: gate, up, down and an activation."""
    children = dict(module.named_children())
    linear = {name for name, child in children.items() if is_linear(unwrap_adapter(child))}
    roles = {FFN_LEAVES.get(name, ""): name for name in linear}
    others = [child for name, child in children.items() if name not in linear]
    plain = all(not any(True for _ in child.parameters()) for child in others)
    if roles.keys() != {"gate", "up", "down"} or len(linear) != 3 or len(others) != 1 or not plain:
        return None
    return Gate(roles["gate"], roles["up"], roles["down"], tuple(map(type, others)))


def _fused_gate(module: nn.Module, *layers: Any) -> Callable[..., Tensor] | None:
    """Test a gated layer on the CPU, with small linear layers in place of its layers."""
    kind: Any = type(module)
    names = gate, up, down = layers[:3]
    generator = torch.Generator().manual_seed(0)
    small = {name: nn.Linear(*((4, 6) if name == down else (6, 4)), bias=False) for name in names}
    for layer in small.values():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__ = {name: value for name, value in module.__dict__.items() if name != "forward"}
    twin.__dict__["_modules"] = {**module._modules, **small}
    x = torch.randn(5, 6, generator=generator)
    try:
        output = twin(x)
    except _CALL_ERRORS:
        return None
    gate_out, up_out = small[gate](x), small[up](x)
    matching = (
        name
        for name, function in ACTIVATIONS.items()
        if _is_same(output, small[down](function(gate_out) * up_out))
    )
    if (activation := next(matching, None)) is None:
        return None

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or args or kwargs:
            return cast(Tensor, kind.forward(self, x, *args, **kwargs))
        hidden = gated_product(getattr(self, gate)(x), getattr(self, up)(x), activation)
        return cast(Tensor, getattr(self, down)(hidden))

    return forward


def _rotation(module: nn.Module) -> tuple[str] | None:
    """Return the name of the rotation function if the forward pass calls one."""
    forward = without_renaming(type(module).forward)
    calls_it = isinstance(forward, FunctionType) and ROTATION in forward.__code__.co_names
    return (ROTATION,) if calls_it and "forward" not in module.__dict__ else None


def _fused_rotation(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """Test the rotation function on the CPU, with random numbers for cosines and sines."""
    kind: Any = type(module)
    unfused = without_renaming(kind.forward)
    plain = unfused.__globals__.get(name)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 3, 8, generator=generator) for heads in (4, 2))
    cos, sin = torch.randn(2, 2, 3, 8, generator=generator)
    try:
        rotated = plain(query, key, cos, sin)
    except _CALL_ERRORS:
        return None
    expected = Rotary.apply(query, cos, sin), Rotary.apply(key, cos, sin)
    if len(rotated) != 2 or not all(map(_is_same, rotated, expected)):
        return None

    def rotate(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: object, **kwargs: object
    ) -> Any:
        alike = query.dtype == key.dtype == cos.dtype and cos.dim() == 3
        if args or kwargs or not alike or not query.shape[-1] == key.shape[-1] == cos.shape[-1]:
            return plain(query, key, cos, sin, *args, **kwargs)
        return Rotary.apply(query, cos, sin), Rotary.apply(key, cos, sin)

    rotating = with_global(unfused, name, rotate)
    renamed = set(CACHE_NAMES).difference(signature(unfused).parameters)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_other = torch.compiler.is_compiling() or not renamed.isdisjoint(kwargs)
        return (kind.forward if is_other else rotating)(self, *args, **kwargs)

    return forward


KINDS: tuple[tuple[str, Any, Any], ...] = (
    ("norms", _norm, _fused_norm),
    ("gated layers", _gated_layers, _fused_gate),
    ("rotations", _rotation, _fused_rotation),
)
"""Each kind's name, a function that recognises candidates, and a function that tests a candidate
and returns its fused forward pass, or None."""

CANDIDATES: dict[str, Callable[[nn.Module], bool]] = {
    "norms": lambda module: _norm(module) is not None,
    "gated layers": lambda module: _gated_layers(module) is not None,
    "rotations": lambda module: (
        "attention" in type(module).__name__.lower()
        and hasattr(sys.modules.get(type(module).__module__), ROTATION)
    ),
}
"""Modules of each kind for `why_unfused`. A file with a rotation has attention that calls it."""


def _is_same(output: Any, expected: Tensor) -> bool:
    same = isinstance(output, Tensor) and output.shape == expected.shape
    return same and torch.allclose(output, expected, rtol=1e-5, atol=1e-6)
