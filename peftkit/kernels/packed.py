"""Packed weights: quantise, dequantise, and multiply; only packed data is saved for backward.

nf4, fp4: 64 consecutive values of the flattened tensor share one absmax (Dettmers et al., 2023,
arXiv:2305.14314); double quantisation stores these in 8 bits, 256 per scale. int8: one absmax per
row. The 4-bit operators are bitsandbytes' (imported by quant/layers.py), with the same bits as its
modules. They always get rows of one block: the CPU kernel of 0.50 misreads tensors whose rows are
an odd multiple of 32, and compiles for odd ones.

Shapes: n values, padded to whole blocks; `...` is any leading shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional

from peftkit.kernels.block_scaled import KINDS, MAX_VALUES, PART_VALUES, unpack_blocks
from peftkit.kernels.gguf_blocks import TYPES, unpack_gguf

BLOCK = 64
NESTED_BLOCK = 256
SLICE_SIZE = 1 << 26
"""Values of an LM head that are unpacked at a time."""
_CHUNK = 1 << 24  # values quantised at a time: bitsandbytes takes 12 bytes of scratch for each


class PackedFormat(NamedTuple):
    """The format of packed data.

    Attributes:
        kind: "nf4", "fp4", "int8", one of `block_scaled.KINDS` or of `gguf_blocks.TYPES`.
        shape: Shape of the unpacked tensor.
        block: Values per scale: along a row, or of the flattened tensor for bitsandbytes' kinds.
        rows: Rows per scale.
        transposed: The codes are stored with the last two dimensions swapped.
    """

    kind: str
    shape: torch.Size
    block: int = BLOCK
    rows: int = 1
    transposed: bool = False


class PackedWeight(NamedTuple):
    """Packed data with its scales and format: absmax, and with double quantisation its own."""

    data: Tensor
    scales: tuple[Tensor, ...]
    form: PackedFormat


def pack_int8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 values and fp32 scales (..., 1), whose product is the tensor (..., in)."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    slices = []
    for chunk in flat.split(max(_CHUNK // flat.shape[-1], 1)):
        rows = chunk.float()
        scales = rows.abs().amax(-1, keepdim=True)
        scales = scales.clamp_min_(torch.finfo(torch.float32).tiny) / 127
        slices.append(((rows / scales).round_().to(torch.int8), scales))
    values, scales = (torch.cat(parts) for parts in zip(*slices, strict=True))
    return values.view(tensor.shape), scales.view(*tensor.shape[:-1], 1)


def pack_4bit(tensor: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return packed values, uint8 (n / 2, 1), and their absmax, fp32 (n / 64,)."""
    flat = tensor.reshape(-1)
    if len(flat) % BLOCK:
        flat = functional.pad(flat, (0, -len(flat) % BLOCK))
    slices = [
        torch.ops.bitsandbytes.quantize_4bit(chunk.view(-1, BLOCK), BLOCK, kind, torch.uint8)
        for chunk in flat.split(_CHUNK)
    ]
    packed, absmax = (torch.cat(parts) for parts in zip(*slices, strict=True))
    return packed, absmax


def pack_absmax(absmax: Tensor, code: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise absmax to 8 bits; return it with the absmax, code and offset of the quantisation."""
    offset = absmax.mean()
    packed, nested = torch.ops.bitsandbytes.quantize_blockwise(absmax - offset, code, NESTED_BLOCK)
    return packed, nested, code, offset


def unpack(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the unpacked tensor, in new memory."""
    packed, scales, form = weight
    if form.kind in TYPES:
        return unpack_gguf(packed, form.kind, form.shape, dtype)
    if form.kind in KINDS:
        return unpack_blocks(packed, scales, *form, dtype)
    if form.kind == "int8":
        if torch.compiler.is_compiling():
            return torch.mul(packed, scales[0]).to(dtype)
        # rounded once, as through float32, which is never stored
        out = torch.empty(packed.shape, dtype=dtype, device=packed.device)
        return torch.mul(packed, scales[0], out=out)
    computed_in = torch.float32 if dtype == torch.float64 else dtype  # of others it leaves noise
    values = None
    if packed.is_cuda and not (torch.compiler.is_compiling() or is_fake(packed)):
        values = _by_one_kernel(weight, computed_in)
    if values is None:
        values = _unpack_4bit(packed, absmax_of(scales), form, computed_in)
    return values.to(dtype).view(-1)[: math.prod(form.shape)].view(form.shape)


def _by_one_kernel(weight: PackedWeight, dtype: torch.dtype) -> Tensor | None:
    """Return the values of all blocks (blocks, values), by one launch; None without the kernel.

    Three operators would unpack absmax, add its offset and unpack the values.
    """
    from peftkit.kernels.fused import TRITON  # fused.py's launcher; other bases do not need it

    if TRITON.missing is not None:
        return None
    packed, scales, form = weight
    out = torch.empty((scales[0].numel(), form.block), dtype=dtype, device=packed.device)
    num_compared = min(len(out), NESTED_BLOCK)

    def first() -> Tensor:
        absmax = absmax_of((scales[0][:num_compared], *scales[1:]))
        codes = packed[: num_compared * form.block // 2]
        return _unpack_4bit(codes, absmax, form, dtype)

    levels = _levels(form.kind, packed.device)
    args = packed, scales, levels, NESTED_BLOCK, form.kind + " nested" * (len(scales) > 1)
    result: Tensor | None = TRITON.launch("unpack_4bit", out, *args, expected=first)
    return result


@cache
def _levels(kind: str, device: torch.device) -> Tensor:
    """Return the values of the 16 codes, float32, for an absmax of 1."""
    codes = torch.arange(0, 256, 16).repeat(2).to(device, torch.uint8).view(-1, 1)
    form = PackedFormat(kind, torch.Size((BLOCK,)))
    return _unpack_4bit(codes, torch.ones(1, device=device), form, torch.float32)[0, :32:2].clone()


def _unpack_4bit(packed: Tensor, absmax: Tensor, form: PackedFormat, dtype: torch.dtype) -> Tensor:
    """Return the values of all blocks (blocks, values), at most `MAX_VALUES` in a call."""

    def unpacked(codes: Tensor, absmax: Tensor) -> Tensor:
        rows = (absmax.numel(), form.block)
        values: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            codes, absmax, form.block, form.kind, rows, dtype
        )
        return values

    num_blocks, step = absmax.numel(), PART_VALUES // form.block
    if num_blocks * form.block <= MAX_VALUES:
        return unpacked(packed, absmax)
    values = torch.empty((num_blocks, form.block), dtype=dtype, device=packed.device)
    codes = packed.view(num_blocks, form.block // 2)
    for start in range(0, num_blocks, step):
        part = slice(start, start + step)
        values[part] = unpacked(codes[part].reshape(-1, 1), absmax[part])
    return values


def unpack_rows(weight: PackedWeight, dtype: torch.dtype, rows: Tensor) -> Tensor:
    """Return the rows (..., in) of a packed matrix at indices (...), equal to those of `unpack`."""
    packed, scales, form = weight
    width = form.shape[-1]
    if form.kind in TYPES:
        return unpack_gguf(packed[rows], form.kind, (*rows.shape, width), dtype)
    if form.kind == "int8":
        return torch.mul(packed[rows], scales[0][rows]).to(dtype)
    if width % form.block or form.kind in KINDS:
        return unpack(weight, dtype)[rows]
    flat, blocks = rows.reshape(-1), width // form.block
    index = (flat[:, None] * blocks + torch.arange(blocks, device=flat.device)).flatten()
    absmax = scales[0][index]
    if len(scales) > 1:
        _, nested, code, offset = scales
        absmax = code[absmax.long()] * nested[index // NESTED_BLOCK] + offset
    some = packed.view(-1, width // 2)[flat].view(-1, 1)
    some_form = PackedFormat(form.kind, torch.Size((len(flat), width)))
    values = unpack(PackedWeight(some, (absmax,), some_form), dtype)
    return values.view(*rows.shape, width)


def slices_of(weight: PackedWeight) -> Iterator[PackedWeight]:
    """Yield a packed matrix (out, in) in slices of rows that cut no block of scales."""
    packed, scales, form = weight
    out, width = form.shape
    size = BLOCK * NESTED_BLOCK
    aligned = size // math.gcd(width, size)
    step = max(SLICE_SIZE // width // aligned, 1) * aligned
    for start in range(0, out, step):
        rows = min(step, out - start)
        part = form._replace(shape=torch.Size((rows, width)))
        if form.kind in TYPES:
            yield PackedWeight(packed[start : start + rows], (), part)
            continue
        if form.kind == "int8":
            of_rows = (scales[0][start : start + rows],)
            yield PackedWeight(packed[start : start + rows], of_rows, part)
            continue
        first, stop = start * width, (start + rows) * width
        own_scales = [scales[0][first // BLOCK : -(-stop // BLOCK)]]
        if len(scales) > 1:
            own_scales += [scales[1][first // size : -(-stop // size)], *scales[2:]]
        data = packed[first // 2 : -(-stop // (2 * BLOCK)) * BLOCK]
        yield PackedWeight(data, tuple(own_scales), part)


def absmax_of(scales: tuple[Tensor, ...]) -> Tensor:
    """Return the absmax in fp32, dequantised if necessary."""
    if len(scales) == 1:
        return scales[0]
    absmax, nested, code, offset = scales
    scales_fp32: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
        absmax, nested, code, NESTED_BLOCK, torch.float32
    )
    return scales_fp32.add_(offset)


@torch.library.custom_op("peftkit::times_packed", mutates_args=())
def times_packed(
    x: Tensor,
    packed: Tensor,
    scales: Sequence[Tensor],
    kind: str,
    shape: Sequence[int],
    block: int,
    rows: int = 1,
    transposed: bool = False,
    total: Tensor | None = None,
) -> Tensor:
    """Return x W, (..., in), for a packed W (out, in), plus `total` (M, in) if given.

    It is a custom operator to hide W from torch.compile, which would reuse the unpacked W of the
    forward pass and hold it in between.
    """
    form = PackedFormat(kind, torch.Size(shape), block, rows, transposed)
    weight = unpack(PackedWeight(packed, tuple(scales), form), x.dtype)
    return x @ weight if total is None else torch.addmm(total, x, weight)


@times_packed.register_fake
def _like_product(
    x: Tensor,
    packed: Tensor,
    scales: Sequence[Tensor],
    kind: str,
    shape: Sequence[int],
    *_: object,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], shape[-1])


_save_unpacked = False  # no threading.local: torch.compile would not notice that it changes


@contextmanager
def recomputing() -> Iterator[None]:
    """Save weights unpacked within the context, for a forward pass right before its backward pass.

    A recomputed block saves nothing in its first forward pass, so only one block's weights are
    held. Packed weights would have to be unpacked a third time.
    """
    global _save_unpacked
    before, _save_unpacked = _save_unpacked, True
    try:
        yield
    finally:
        _save_unpacked = before


def packed_linear(
    x: Tensor, bias: Tensor | None, weight: PackedWeight, dtype: torch.dtype
) -> Tensor:
    """Return x W^T + b, (..., out), for a packed W (out, in), unpacked to `dtype`."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        from peftkit.kernels.packed_product import product

        if _has_gemm(x, weight.form, dtype):
            found = _checked_gemm(x, bias, weight)
        else:
            found = product(x, bias, weight, dtype, partial(_product, x, bias, weight, dtype))
        if found is not None:
            return found
    return _product(x, bias, weight, dtype)


def _product(x: Tensor, bias: Tensor | None, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    out, width = weight.form.shape[-2:]
    is_head = out >= 8 * width and out * width > SLICE_SIZE
    if weight.form.kind not in KINDS and is_head:
        slices = list(slices_of(weight))
        sizes = [part.form.shape[0] for part in slices]
        biases = [None] * len(slices) if bias is None else bias.split(sizes)
        pairs = zip(biases, slices, strict=True)
        return torch.cat([_unpacked_product(x, *pair, dtype) for pair in pairs], -1)
    return _unpacked_product(x, bias, weight, dtype)


def _unpacked_product(
    x: Tensor, bias: Tensor | None, weight: PackedWeight, dtype: torch.dtype
) -> Tensor:
    if _save_unpacked:
        return functional.linear(x, unpack(weight, dtype), bias)
    packed, scales, form = weight
    return PackedLinear.apply(x, bias, form, dtype, packed, *scales)


GEMM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of bitsandbytes' product with a packed weight, in which it also unpacks."""
MOST_GEMM_ROWS = 64
"""Rows from which all its products are alike."""


def _has_gemm(x: Tensor, form: PackedFormat, dtype: torch.dtype) -> bool:
    """Return whether bitsandbytes' product that reads the packed weight applies.

    It is used on GPUs without gradients: a token's product reads half a byte per weight, instead of
    writing and reading two bytes. For many rows the operator unpacks the weight.
    """
    return (
        x.device.type == "cuda"
        and torch.version.hip is None  # wrong results on gfx1100 (bitsandbytes issue 2087)
        and form.kind in ("nf4", "fp4")
        and form.shape[-1] % form.block == 0
        and x.dtype == dtype
        and dtype in GEMM_DTYPES
    )


def _gemm_4bit(x: Tensor, bias: Tensor | None, weight: PackedWeight) -> Tensor:
    """Return x W^T + b, by bitsandbytes' operator."""
    packed, (absmax, *nested), form = weight
    bias_ = None if bias is None else bias.to(x.dtype)
    shape, rest = (x, packed, form.shape), (form.block, form.kind, bias_)
    gemm: Callable[..., Tensor] = torch.ops.bitsandbytes.gemm_4bit
    if not nested:
        return gemm(*shape, absmax, *rest)
    return gemm(*shape, nested[0], *rest, absmax, *nested[1:])


def _checked_gemm(x: Tensor, bias: Tensor | None, weight: PackedWeight) -> Tensor | None:
    """Return bitsandbytes' product; None if it is wrong."""
    from peftkit.kernels import checked

    form = weight.form
    if form.shape.numel() > SLICE_SIZE:  # an LM head: too large to unpack for a comparison
        return _gemm_4bit(x, bias, weight)
    # another kernel for another number of rows
    rows = min(x.numel() // x.shape[-1], MOST_GEMM_ROWS).bit_length()
    return checked.GEMM.product(
        (form.kind, form.block, len(weight.scales), x.dtype, x.device, rows),
        lambda: _gemm_4bit(x, bias, weight),
        lambda: functional.linear(x, unpack(weight, x.dtype), bias),
    )


class PackedLinear(torch.autograd.Function):
    """y = x W^T + b for a packed W, which is saved packed and unpacked again for dx = dy W."""

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
        weight = unpack(PackedWeight(packed, scales, form), dtype)
        out = functional.linear(x.reshape(-1, x.shape[-1]), weight, bias)
        # not a view: torch would forbid models to change it in place, as DeBERTa does
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
