"""Packed weights: quantise, dequantise, multiply, and keep nothing else for the backward pass.

nf4, fp4: 64 consecutive values of the flattened tensor share one absmax (Dettmers et al., 2023,
arXiv:2305.14314); double quantisation keeps these in 8 bits, 256 to a scale. int8: one absmax for
each row. The 4-bit operators are bitsandbytes', which quant.py imports; the bits are the same as
those of its modules. A row that is given to them is always one block: its CPU kernel (0.50) reads
tensors wrongly whose rows are an odd multiple of 32, and compiles itself for odd ones.

Shapes: n values, padded to whole blocks; `...` is any leading shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from peftkit.kernels.block_scaled import KINDS, unpack_blocks

BLOCK = 64
NESTED_BLOCK = 256
PIECE = 1 << 26
"""Values of a head that are unpacked at once."""
_CHUNK = 1 << 24  # values quantised at a time: bitsandbytes takes 12 bytes of scratch for each


class PackedFormat(NamedTuple):
    """How packed data is read.

    kind: "nf4", "fp4", "int8", or one of `block_scaled.KINDS`. shape: Of the tensor. block: Values
    to a scale, along a row unless they are of bitsandbytes. rows: Rows to a scale. turned: The
    tensor is that of the codes with its last two dimensions swapped.
    """

    kind: str
    shape: torch.Size
    block: int = BLOCK
    rows: int = 1
    turned: bool = False


def pack_int8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 values and fp32 scales (..., 1), whose product is the tensor (..., in)."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    pieces = []
    for chunk in flat.split(max(_CHUNK // flat.shape[-1], 1)):
        rows = chunk.float()
        scales = rows.abs().amax(-1, keepdim=True)
        scales = scales.clamp_min_(torch.finfo(torch.float32).tiny) / 127
        pieces.append(((rows / scales).round_().to(torch.int8), scales))
    values, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return values.view(tensor.shape), scales.view(*tensor.shape[:-1], 1)


def pack_4bit(tensor: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return packed values, uint8 (n / 2, 1), and their absmax, fp32 (n / 64,)."""
    flat = tensor.reshape(-1)
    if len(flat) % BLOCK:
        flat = functional.pad(flat, (0, -len(flat) % BLOCK))
    pieces = [
        torch.ops.bitsandbytes.quantize_4bit(chunk.view(-1, BLOCK), BLOCK, kind, torch.uint8)
        for chunk in flat.split(_CHUNK)
    ]
    packed, absmax = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return packed, absmax


def pack_absmax(absmax: Tensor, code: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return absmax quantised to 8 bits, and what that takes: its own absmax, code and offset."""
    offset = absmax.mean()
    packed, nested = torch.ops.bitsandbytes.quantize_blockwise(absmax - offset, code, NESTED_BLOCK)
    return packed, nested, code, offset


def unpack(
    packed: Tensor, scales: tuple[Tensor, ...], form: PackedFormat, dtype: torch.dtype
) -> Tensor:
    """Return the tensor that was packed, as new memory."""
    if form.kind in KINDS:
        return unpack_blocks(packed, scales, *form, dtype)
    if form.kind == "int8":
        if torch.compiler.is_compiling():
            return torch.mul(packed, scales[0]).to(dtype)
        # rounded once, as by way of float32, but that is never written
        made = torch.empty(packed.shape, dtype=dtype, device=packed.device)
        return torch.mul(packed, scales[0], out=made)
    absmax = absmax_of(scales)
    rows = (absmax.numel(), form.block)
    known = torch.float32 if dtype == torch.float64 else dtype  # of others it leaves noise
    values = torch.ops.bitsandbytes.dequantize_4bit(
        packed, absmax, form.block, form.kind, rows, known
    ).to(dtype)
    return values.view(-1)[: math.prod(form.shape)].view(form.shape)


def unpack_rows(
    packed: Tensor,
    scales: tuple[Tensor, ...],
    form: PackedFormat,
    dtype: torch.dtype,
    rows: Tensor,
) -> Tensor:
    """Return some rows (..., in) of a packed matrix, (...) of them, each as `unpack` has it."""
    width = form.shape[-1]
    if form.kind == "int8":
        return torch.mul(packed[rows], scales[0][rows]).to(dtype)
    if width % form.block or form.kind in KINDS:
        return unpack(packed, scales, form, dtype)[rows]
    flat, blocks = rows.reshape(-1), width // form.block
    index = (flat[:, None] * blocks + torch.arange(blocks, device=flat.device)).flatten()
    absmax = scales[0][index]
    if len(scales) > 1:
        _, nested, code, offset = scales
        absmax = code[absmax.long()] * nested[index // NESTED_BLOCK] + offset
    some = packed.view(-1, width // 2)[flat].view(-1, 1)
    found = unpack(some, (absmax,), PackedFormat(form.kind, torch.Size((len(flat), width))), dtype)
    return found.view(*rows.shape, width)


def pieces_of(
    packed: Tensor, scales: tuple[Tensor, ...], form: PackedFormat
) -> Iterator[tuple[Tensor, tuple[Tensor, ...], PackedFormat]]:
    """Yield a packed matrix (out, in) in pieces of so many rows that scales are not cut."""
    out, width = form.shape
    size = BLOCK * NESTED_BLOCK
    aligned = size // math.gcd(width, size)
    step = max(PIECE // width // aligned, 1) * aligned
    for start in range(0, out, step):
        rows = min(step, out - start)
        part = form._replace(shape=torch.Size((rows, width)))
        if form.kind == "int8":
            yield packed[start : start + rows], (scales[0][start : start + rows],), part
            continue
        first, stop = start * width, (start + rows) * width
        own = [scales[0][first // BLOCK : -(-stop // BLOCK)]]
        if len(scales) > 1:
            own += [scales[1][first // size : -(-stop // size)], *scales[2:]]
        yield packed[first // 2 : -(-stop // (2 * BLOCK)) * BLOCK], tuple(own), part


def _is_tall(form: PackedFormat) -> bool:
    """Tell whether a matrix is a head's: many times as many rows as columns, and large."""
    out, width = form.shape[-2:]
    return form.kind not in KINDS and out >= 8 * width and out * width > PIECE


def absmax_of(scales: tuple[Tensor, ...]) -> Tensor:
    """Return the scales in fp32, of which some are quantised themselves."""
    if len(scales) == 1:
        return scales[0]
    absmax, nested, code, offset = scales
    made: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
        absmax, nested, code, NESTED_BLOCK, torch.float32
    )
    return made.add_(offset)


@torch.library.custom_op("peftkit::times_packed", mutates_args=())
def times_packed(
    x: Tensor,
    packed: Tensor,
    scales: Sequence[Tensor],
    kind: str,
    shape: Sequence[int],
    block: int,
    rows: int = 1,
    turned: bool = False,
    total: Tensor | None = None,
) -> Tensor:
    """Return x W, (..., in), of a packed W (out, in); added to a total (M, in) where one is given.

    An operator, so that torch.compile does not see W: it would make one of this W and that of the
    forward pass, and hold it in between.
    """
    form = PackedFormat(kind, torch.Size(shape), block, rows, turned)
    weight = unpack(packed, tuple(scales), form, x.dtype)
    return x @ weight if total is None else torch.addmm(total, x, weight)


@times_packed.register_fake
def _like_product(
    x: Tensor,
    packed: Tensor,
    scales: Sequence[Tensor],
    kind: str,
    shape: Sequence[int],
    block: int,
    rows: int = 1,
    turned: bool = False,
    total: Tensor | None = None,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], shape[-1])


_again = False  # no threading.local: torch.compile would not notice that it changes


@contextmanager
def recomputing() -> Iterator[None]:
    """Have what runs here save weights unpacked, as it runs anew right before its backward pass.

    Of the first run nothing is saved, so that only one run's weights are held. Saved as they are
    packed, they would be unpacked a third time.
    """
    global _again
    before, _again = _again, True
    try:
        yield
    finally:
        _again = before


def packed_linear(
    x: Tensor,
    bias: Tensor | None,
    packed: Tensor,
    scales: tuple[Tensor, ...],
    form: PackedFormat,
    dtype: torch.dtype,
) -> Tensor:
    """Return x W^T + b, (..., out), of a packed W (out, in) that is unpacked to `dtype`."""
    if not (torch.is_grad_enabled() and x.requires_grad) and _has_gemm(x, form, dtype):
        return _gemm_4bit(x, packed, scales, form, bias)
    if _is_tall(form):
        pieces = list(pieces_of(packed, scales, form))
        sizes = [part.shape[0] for _, _, part in pieces]
        biases = [None] * len(pieces) if bias is None else bias.split(sizes)
        both = zip(pieces, biases, strict=True)
        return torch.cat([_product(x, own, *piece, dtype) for piece, own in both], -1)
    return _product(x, bias, packed, scales, form, dtype)


def _product(
    x: Tensor,
    bias: Tensor | None,
    packed: Tensor,
    scales: tuple[Tensor, ...],
    form: PackedFormat,
    dtype: torch.dtype,
) -> Tensor:
    if _again:
        return functional.linear(x, unpack(packed, scales, form, dtype), bias)
    return PackedLinear.apply(x, bias, form, dtype, packed, *scales)


GEMM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of bitsandbytes' product with a packed weight; the weight comes out in the input's."""


def _has_gemm(x: Tensor, form: PackedFormat, dtype: torch.dtype) -> bool:
    """Tell whether there is a product that reads the packed weight as it lies.

    It is a GPU's, and pays where no gradient is wanted: a token's product reads half a byte of each
    weight instead of writing two and reading them again. It knows itself from how many rows on
    unpacking is faster.
    """
    return (
        x.device.type == "cuda"
        and form.kind in ("nf4", "fp4")
        and form.shape[-1] % form.block == 0
        and x.dtype == dtype
        and dtype in GEMM_DTYPES
        and hasattr(torch.ops.bitsandbytes, "gemm_4bit")  # since 0.50
    )


def _gemm_4bit(
    x: Tensor, packed: Tensor, scales: tuple[Tensor, ...], form: PackedFormat, bias: Tensor | None
) -> Tensor:
    """Return x W^T + b, by bitsandbytes' operator."""
    absmax, nested = scales[0], scales[1:]
    own = None if bias is None else bias.to(x.dtype)
    shape = (x, packed, form.shape)
    rest = (form.block, form.kind, own)
    gemm: Callable[..., Tensor] = torch.ops.bitsandbytes.gemm_4bit
    if not nested:
        return gemm(*shape, absmax, *rest)
    return gemm(*shape, nested[0], *rest, absmax, *nested[1:])


class PackedLinear(torch.autograd.Function):
    """y = x W^T + b of a packed W: saved packed, unpacked again for dx = dy W."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        form: PackedFormat,
        dtype: torch.dtype,
        packed: Tensor,
        *scales: Tensor,
    ) -> Tensor:
        """Return (..., out); W is unpacked to `dtype`."""
        ctx.save_for_backward(packed, *scales)
        ctx.form = form
        flat, weight = x.reshape(-1, x.shape[-1]), unpack(packed, scales, form, dtype)
        out = functional.linear(flat, weight, bias)
        # no view, as which torch would forbid a model to change it in place (DeBERTa does)
        return torch.ops.aten._unsafe_view(out, (*x.shape[:-1], out.shape[-1]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx and db; nothing else has a gradient."""
        packed, *scales = ctx.saved_tensors
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = times_packed(grad, packed, scales, *ctx.form)
        if ctx.needs_input_grad[1]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return grad_x, grad_bias, None, None, None, *(None for _ in scales)
