"""Gated activations y = f(g) u by one kernel each way, of which g and u alone are saved.

Written out in torch, f(g) is saved as well; the forward pass moves five arrays of the size of g and
the backward pass nine, where here it is three and five. In 16 bits torch rounds f(g) before it
multiplies; a kernel rounds once.

Without Triton the same is computed by torch: as exact, with as little kept, not faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
"""f, by name."""

try:
    from peftkit.kernels import gated_triton as _triton
except ImportError:  # no Triton: Windows, Macs, torch for CPUs
    _kernels: Any = None
else:
    _kernels = _triton if torch.version.cuda is not None else None


class Gated(torch.autograd.Function):
    """f(g) u of two tensors of one shape and dtype, with both gradients."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.name = name
        return gated(gate, up, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_gate, grad_up = gated_backward(grads[0], *ctx.saved_tensors, ctx.name)
        return grad_gate, grad_up, None


# a namespace of their own: a plan counts each of these as the one kernel that it is on a GPU


@torch.library.custom_op("peftkit_kernels::gated", mutates_args=())
def gated(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """Return f(g) u."""
    if _kernels is not None and gate.is_cuda:
        return _kernels.forward(gate.contiguous(), up.contiguous(), name)
    return ACTIVATIONS[name](gate) * up


@torch.library.custom_op("peftkit_kernels::gated_backward", mutates_args=())
def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of g and u."""
    if _kernels is not None and gate.is_cuda:
        made = _kernels.backward(grad.contiguous(), gate.contiguous(), up.contiguous(), name)
        return made
    if name == "silu":
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
    else:
        how = "tanh" if name == "gelu_tanh" else "none"
        grad_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate=how)
    return grad_gate, grad * ACTIVATIONS[name](gate)


@gated.register_fake
def _like_product(gate: Tensor, up: Tensor, name: str) -> Tensor:
    return torch.empty_like(gate)


@gated_backward.register_fake
def _like_gradients(grad: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)
