"""Norms, gated layers and rotations of a model, by one kernel each while it is used on a GPU.

No list of models says which modules these are: the module is asked. What a norm gives for random
numbers has to be what the kernel's formula gives, in float32; a module of three linear layers and
an activation is asked, with small layers in the place of its own, whether it computes
W_down (f(W_gate x) * W_up x). Of an attention module, the function of that name in its own source
is asked whether it is the rotation, and its forward pass is given ours instead. All others stay,
as do norms that are trained, and all of them where torch.compile is at work, which makes such
kernels itself. Norms stay under autocast too, which has rules of its own for dtypes.

In 16 bits transformers rounds a norm before it multiplies with the weight and after it; a kernel
rounds once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from peftkit.kernels.fused import ACTIVATIONS, Gated, RMSNorm, Rotary
from peftkit.model.places import is_linear, unwrap_adapter
from peftkit.model.roles import FFN_LEAVES

EPS = ("variance_epsilon", "eps", "epsilon")
"""Where norms keep what they add to the mean square."""
ROTATION = "apply_rotary_pos_emb"
"""Name of the function in transformers' modules that rotates queries and keys."""
_OTHERS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""What a module says that is called in another way."""


@contextmanager
def fused_modules(model: nn.Module) -> Iterator[None]:
    """Have norms, gated layers and rotations computed by one kernel each within the context.

    They are of another class meanwhile, which is a subclass of their own: one for all that are
    alike, so that blocks stay alike.
    """
    made: dict[Any, Any] = {}
    before: list[tuple[nn.Module, type[nn.Module]]] = []
    for module in model.modules():
        kind = type(module)
        for candidate, forward_of in KINDS:
            found = None if hasattr(kind, "peftkit_fused") else candidate(module)
            if found is None:
                continue
            if (key := (kind, *found)) not in made:
                with (
                    _disable_current_modes(),
                    torch.no_grad(),
                ):  # real numbers
                    made[key] = _subclass(kind, forward_of(module, *found))
            if made[key] is not None:
                before.append((module, kind))
                module.__class__ = made[key]
    try:
        yield
    finally:
        for module, kind in before:
            module.__class__ = kind


def num_fused(model: nn.Module) -> int:
    return sum(hasattr(type(module), "peftkit_fused") for module in model.modules())


def _subclass(kind: type[nn.Module], forward: Callable[..., Tensor] | None) -> Any:
    """Return a module's class with another forward pass; None without one."""
    body = {"forward": forward, "peftkit_fused": True, "__module__": kind.__module__}
    return None if forward is None else type(kind.__name__, (kind,), body)


def _norm(module: nn.Module) -> tuple[int, float] | None:
    """Return size and eps of what may be a norm: a frozen vector is all it has."""
    weight, eps = module._parameters.get("weight"), _eps(module)
    if weight is None or len(module._parameters) > 1 or module._modules or module._buffers:
        return None
    if weight.dim() != 1 or weight.requires_grad or eps is None or "forward" in module.__dict__:
        return None
    return len(weight), eps


def _eps(module: nn.Module) -> float | None:
    found = (getattr(module, name, None) for name in EPS)
    return next((eps for eps in found if isinstance(eps, float)), None)


def _fused_norm(module: nn.Module, size: int, eps: float) -> Callable[..., Tensor] | None:
    """Ask a module: on the CPU, another weight, a row for which eps matters and one without."""
    kind: Any = type(module)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, size, generator=generator) * torch.tensor([[1.0], [eps**0.5]])
    weight = torch.rand(size, generator=generator)
    try:
        found = functional_call(module, {"weight": weight}, x)
        half = functional_call(module, {"weight": weight.bfloat16()}, x.bfloat16())
    except _OTHERS:
        return None
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    if half.dtype != torch.bfloat16 or not _is_same(found, expected):
        return None

    def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight = cast(Tensor, self.weight)
        autocast = torch.is_autocast_enabled(x.device.type)
        if torch.compiler.is_compiling() or autocast or args or kwargs or x.dtype != weight.dtype:
            return cast(Tensor, kind.forward(self, x, *args, **kwargs))
        return cast(Tensor, RMSNorm.apply(x, weight, _eps(self)))

    return forward


class Gate(NamedTuple):
    """The names of a module's three layers, and the classes of what is beside them."""

    gate: str
    up: str
    down: str
    others: tuple[type[nn.Module], ...]


def _gated_layers(module: nn.Module) -> Gate | None:
    """Return what may be a gated layer: gate, up, down, and an activation beside them."""
    children = dict(module.named_children())
    linear = {name for name, child in children.items() if is_linear(unwrap_adapter(child))}
    roles = {FFN_LEAVES.get(name, ""): name for name in linear}
    others = [child for name, child in children.items() if name not in linear]
    plain = all(not any(True for _ in child.parameters()) for child in others)
    if roles.keys() != {"gate", "up", "down"} or len(linear) != 3 or len(others) != 1 or not plain:
        return None
    return Gate(roles["gate"], roles["up"], roles["down"], tuple(map(type, others)))


def _fused_gate(module: nn.Module, *found: Any) -> Callable[..., Tensor] | None:
    """Ask a module: on the CPU, with small layers in the place of its own."""
    kind: Any = type(module)
    names = gate, up, down = found[:3]
    generator = torch.Generator().manual_seed(0)
    small = {name: nn.Linear(*((4, 6) if name == down else (6, 4)), bias=False) for name in names}
    for layer in small.values():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__ = {name: value for name, value in module.__dict__.items() if name != "forward"}
    twin.__dict__["_modules"] = {**module._modules, **small}
    x = torch.randn(5, 6, generator=generator)
    try:
        given = twin(x)
    except _OTHERS:
        return None
    parts = small[gate](x), small[up](x)
    same = (
        name
        for name, function in ACTIVATIONS.items()
        if _is_same(given, small[down](function(parts[0]) * parts[1]))
    )
    if (activation := next(same, None)) is None:
        return None

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or args or kwargs:
            return cast(Tensor, kind.forward(self, x, *args, **kwargs))
        parts = getattr(self, gate)(x), getattr(self, up)(x)
        return cast(Tensor, getattr(self, down)(Gated.apply(*parts, activation)))

    return forward


def _rotation(module: nn.Module) -> tuple[str] | None:
    """Return the name of the function that rotates, where the forward pass calls one."""
    forward = getattr(type(module), "forward", None)
    known = isinstance(forward, FunctionType) and ROTATION in forward.__code__.co_names
    return (ROTATION,) if known and "forward" not in module.__dict__ else None


def _fused_rotation(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """Ask the function: on the CPU, with cosines and sines that are none."""
    kind: Any = type(module)
    plain = kind.forward.__globals__.get(name)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 3, 8, generator=generator) for heads in (4, 2))
    cos, sin = torch.randn(2, 2, 3, 8, generator=generator)
    try:
        found = plain(query, key, cos, sin)
    except _OTHERS:
        return None
    expected = Rotary.apply(query, cos, sin), Rotary.apply(key, cos, sin)
    if len(found) != 2 or not all(map(_is_same, found, expected)):
        return None

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **how: Any) -> Any:
        alike = query.dtype == key.dtype == cos.dtype and cos.dim() == 3
        if args or how or not alike or not query.shape[-1] == key.shape[-1] == cos.shape[-1]:
            return plain(query, key, cos, sin, *args, **how)
        return Rotary.apply(query, cos, sin), Rotary.apply(key, cos, sin)

    own: Any = kind.forward
    known = {**own.__globals__, name: rotate}
    rotating = FunctionType(own.__code__, known, name, own.__defaults__, own.__closure__)
    rotating.__kwdefaults__ = own.__kwdefaults__

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = kind.forward if torch.compiler.is_compiling() else rotating
        return run(self, *args, **kwargs)

    return forward


KINDS: tuple[tuple[Any, Any], ...] = (
    (_norm, _fused_norm),
    (_gated_layers, _fused_gate),
    (_rotation, _fused_rotation),
)
"""What says of a module what it may be; and what makes its forward pass, if it is that."""


def _is_same(found: Any, expected: Tensor) -> bool:
    same = isinstance(found, Tensor) and found.shape == expected.shape
    return same and torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
