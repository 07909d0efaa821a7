"""RMSNorms of a model, by one kernel each while it is used on a GPU.

No list of models says which modules are RMSNorms: the module is asked. What it gives for random
numbers has to be what the kernel's formula gives, in float32. All others stay as they are, as do
norms that are trained, and all of them where torch.compile or autocast is at work: the first makes
such kernels itself, the second has rules of its own for dtypes.

In 16 bits transformers rounds before it multiplies with the weight and after it; a kernel rounds
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from peftkit.kernels.norm import RMSNorm

EPS = ("variance_epsilon", "eps", "epsilon")
"""Where norms keep what they add to the mean square."""


@contextmanager
def fused_norms(model: nn.Module) -> Iterator[None]:
    """Have RMSNorms computed by one kernel within the context.

    Norms are of another class meanwhile, which is a subclass of their own.
    """
    asked: dict[Any, bool] = {}  # norms of one class are alike
    before = []
    for norm in model.modules():
        if (shape := _could_be_fused(norm)) is not None:
            key = type(norm), shape
            if key not in asked:
                asked[key] = _is_rms_norm(norm, *shape)
            if asked[key]:
                before.append((norm, type(norm)))
    fused: dict[Any, Any] = {kind: _fused(kind) for kind in {kind for _, kind in before}}
    for norm, kind in before:
        norm.__class__ = fused[kind]
    try:
        yield
    finally:
        for norm, kind in before:
            norm.__class__ = kind


def num_fused(model: nn.Module) -> int:
    """Return how many norms are computed by one kernel now."""
    return sum(hasattr(type(module), "computed_by") for module in model.modules())


def _could_be_fused(module: nn.Module) -> tuple[int, float] | None:
    """Return size and eps of what may be a norm: a frozen vector is all it has."""
    weight, eps = module._parameters.get("weight"), _eps(module)
    if weight is None or len(module._parameters) > 1 or module._modules or module._buffers:
        return None
    if weight.dim() != 1 or weight.requires_grad:
        return None
    if eps is None or "forward" in module.__dict__ or hasattr(module, "computed_by"):
        return None
    return len(weight), eps


def _eps(module: nn.Module) -> float | None:
    found = (getattr(module, name, None) for name in EPS)
    return next((eps for eps in found if isinstance(eps, float)), None)


def _is_rms_norm(module: nn.Module, size: int, eps: float) -> bool:
    """Ask a module: on the CPU, another weight, a row for which eps matters and one without."""
    with (
        _disable_current_modes(),
        torch.no_grad(),
    ):  # real numbers, where steps are only counted too
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, size, generator=generator) * torch.tensor([[1.0], [eps**0.5]])
        weight = torch.rand(size, generator=generator)
        try:
            found = functional_call(module, {"weight": weight}, x)
            half = functional_call(module, {"weight": weight.bfloat16()}, x.bfloat16())
        except (AttributeError, RuntimeError, TypeError, ValueError):  # called in another way
            return False
        expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        same = isinstance(found, Tensor) and torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
        return same and half.dtype == torch.bfloat16


def _fused(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a norm's class with another forward pass; one for all, so that blocks stay alike."""

    def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight, eps = cast(Tensor, self.weight), _eps(self)
        plain = (
            torch.compiler.is_compiling()
            or torch.is_autocast_enabled(x.device.type)
            or (args or kwargs or eps is None)
            or x.dtype != weight.dtype
        )
        if plain:
            return cast(Tensor, kind.forward(self, x, *args, **kwargs))
        return cast(Tensor, RMSNorm.apply(x, weight, eps))

    body = {"forward": forward, "computed_by": RMSNorm, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), body)
