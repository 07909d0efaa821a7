"""Tiled feed-forward layers, computed for a tile of tokens at a time.

Only the input is saved. The backward pass recomputes a tile of tokens and backpropagates through it
before the next tile. The wide intermediate arrays (five in a gated feed-forward layer, each 3 to 4
times as wide as its input) exist for one tile only (Rajbhandari et al., 2025, arXiv:2506.13996).

A separate node saves the input before any computation: the recompute of a block stops there, and
these layers run twice in all, as without tiles.

Shapes: B rows, T tokens, H width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from peftkit.kernels.device import forked_generators, gpu_of
from peftkit.kernels.lora import Saved

NUM_TRIED = 8
"""Tokens for which tiles are compared with the whole layer, in two tiles."""
TOLERANCE = 0.5
"""Largest error relative to a norm, in square roots of the dtype's eps: 4 % in bfloat16 and 0.02 %
in float32, above the rounding of any chain of products; a layer that mixes tokens is off by its
whole output at the border of the tiles."""
Run = Callable[[Tensor], Tensor]
"""(B, t, H) to (B, t, H'), independently for each token."""


def tiled(run: Run, x: Tensor, trained: Sequence[Tensor], size: int, *, draws: bool) -> Tensor:
    """Return run(x), (B, T, H'), with gradients of x and of trained tensors inside.

    Args:
        x: (B, T, H).
        trained: Parameters that `run` uses.
        size: Tokens per tile, in each row.
        draws: Whether `run` draws random numbers, as dropout does.
    """
    saved: list[Any] = []
    through = Saved.apply(saved, trained[0] if trained else x, x)
    inputs = (x, through, *trained[1:]) if trained else (through,)
    out: Tensor = _Tiled.apply(saved, run, tuple(trained), size, draws, *inputs)
    return out


def why_not_tiled(run: Run, x: Tensor, trained: Sequence[Tensor]) -> str:
    """Return what of a layer differs in tiles, for a few tokens of a row; "" if nothing.

    A layer that mixes tokens, such as one with a convolution, cannot be tiled.

    Args:
        run: Without random numbers.
        x: (B, T, H) with at least NUM_TRIED tokens.
    """
    from peftkit.kernels.checked import relative_difference  # few runs compute tiles

    part = x[:1, :NUM_TRIED].detach().clone().requires_grad_()
    inputs = [part, *trained]
    with torch.enable_grad(), saved_tensors_hooks(_same, _same):
        whole = run(part)
        tiles = tiled(run, part, trained, NUM_TRIED // 2, draws=False)
        grads = [
            torch.autograd.grad(out, inputs, whole.detach(), allow_unused=True)
            for out in (tiles, whole)
        ]
    names = ["the output", "the gradient of the input", *("a trained gradient" for _ in trained)]
    limit = TOLERANCE * torch.finfo(whole.dtype).eps ** 0.5
    for name, found, expected in zip(names, (tiles, *grads[0]), (whole, *grads[1]), strict=True):
        if found is None or expected is None:
            if found is not expected:
                return name
        elif not relative_difference(found, expected) <= limit:
            return name
    return ""


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        saved: list[Any],
        run: Run,
        trained: tuple[Tensor, ...],
        size: int,
        draws: bool,
        x: Tensor,
        *_: Tensor,
    ) -> Tensor:
        ctx.saved, ctx.run, ctx.trained, ctx.size = saved, run, trained, size
        kind = x.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        gpu = gpu_of(x.device) if draws else None
        ctx.generators = [torch.get_rng_state()] if draws else []
        ctx.generators += [] if gpu is None else [gpu.get_rng(x.device)]
        out = None
        # these short-lived graphs bypass hooks that count or offload saved tensors
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            for start in range(0, x.shape[1], size):
                part = run(x[:, start : start + size].detach().contiguous()).detach()
                if out is None:
                    out = part.new_empty(*x.shape[:2], part.shape[-1])
                out[:, start : start + size] = part
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved[0].saved_tensors
        (grad,), wants_x = grads, ctx.needs_input_grad[5]
        grad_x = torch.empty_like(x) if wants_x else None
        totals: list[Tensor | None] = [None] * len(ctx.trained)
        with (
            torch.enable_grad(),
            saved_tensors_hooks(_same, _same),
            torch.autocast(*ctx.autocast),
            _generators_at(ctx.generators, x.device),
        ):
            for start in range(0, x.shape[1], ctx.size):
                span = slice(start, start + ctx.size)
                part = x[:, span].detach().contiguous().requires_grad_(wants_x)
                inputs = (part, *ctx.trained) if wants_x else ctx.trained
                gradients = torch.autograd.grad(
                    ctx.run(part), inputs, grad[:, span], allow_unused=True
                )
                if grad_x is not None:
                    grad_x[:, span] = gradients[0]
                of_trained = gradients[1:] if wants_x else gradients
                totals = [_sum(*pair) for pair in zip(totals, of_trained, strict=True)]
        return None, None, None, None, None, grad_x, *totals


def _sum(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    return part if total is None else total if part is None else total.add_(part)


@contextmanager
def _generators_at(states: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Set the generators to these states within the context."""
    gpu = gpu_of(device)
    with forked_generators(device, enabled=bool(states)):
        if states:
            torch.set_rng_state(states[0])
        if states and gpu is not None:
            gpu.set_rng(states[1], device)
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor
