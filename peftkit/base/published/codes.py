"""The tensors of a quantised weight, read into codes, scales and zeros (kernels/block_scaled.py).

A reader for each format repacks its tensors without loss. The tensors in the files determine
whether a layer is quantised, the config determines its scheme (checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from peftkit.base.published.checkpoint import Scheme, UnreadableError
from peftkit.kernels.block_scaled import exponents
from peftkit.kernels.packed import PackedFormat, PackedWeight, unpack
from peftkit.quant.layers import import_bitsandbytes

STACKS = {name: [f"{name}_blocks", f"{name}_scales"] for name in ("gate_up_proj", "down_proj")}
"""Parameter of gpt-oss -> its tensors in the files."""
LEAVES = (
    *("weight", "qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    *("weight_global_scale", "weight_scale_2", "weight_scale_inv"),
    *("input_global_scale", "input_scale", "activation_scale"),
    *("_weight_qdata", "_weight_scale", "_weight_zero_point"),
)
"""Names of a quantised layer's tensors in any format; scales of activations are unused."""
AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of the k-th of eight columns in a word."""


class Codes(NamedTuple):
    """The codes of a weight, their format and their scales."""

    packed: Tensor
    form: PackedFormat
    scales: tuple[Tensor, ...]


def read_codes(tensors: Mapping[str, Tensor], scheme: Scheme) -> Codes:
    """Return a layer's weight as codes.

    Args:
        tensors: The layer's tensors by the last segment of their names.

    Raises:
        UnreadableError: Tensors are missing, or their shapes do not fit together.
    """
    try:
        codes = _READERS[scheme.layout](tensors, scheme)
    except KeyError as missing:
        raise UnreadableError(f"it has no {missing}") from None
    _check(codes)
    return codes


def _check(codes: Codes) -> None:
    """Raise UnreadableError if scales are not finite or do not match the blocks in number."""
    if codes.form.transposed:
        return
    rows, columns = codes.form.shape
    if codes.form.kind == "int8":
        columns = codes.form.block
    grid = -(-rows // codes.form.rows), -(-columns // codes.form.block)
    for scale in codes.scales:
        if scale.dim() == 2 and tuple(scale.shape) != grid:
            raise UnreadableError(
                f"{scale.shape[0]} x {scale.shape[1]} scales for {grid[0]} x {grid[1]} blocks of a "
                f"weight of {rows} x {columns}"
            )
        if scale.dtype.itemsize > 1 and scale.is_floating_point() and not scale.isfinite().all():
            raise UnreadableError("a scale is not finite")
    if codes.form.kind == "fp8" and ((codes.packed & 127) == 127).any():
        raise UnreadableError("a value is NaN")


def _fields(words: Tensor, bits: int) -> Tensor:
    """Return the fields of 32-bit words (..., n) as uint8, lowest bits first."""
    low = words.contiguous().view(torch.uint8)
    return low if bits == 8 else torch.stack([low & 15, low >> 4], -1).flatten(-2)


def _integers(
    codes: Tensor, bits: int, scale: Tensor, zero: Tensor | None, group: int, *more: Tensor
) -> Codes:
    """Return integers (out, in) as codes; zeros are dropped if all are the middle code."""
    shape = torch.Size(codes.shape)
    if zero is not None and (zero == 1 << bits - 1).all():
        zero = None
    packed = codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else codes.contiguous()
    form = PackedFormat("int4" if bits == 4 else "uint8", shape, shape[1] if group < 0 else group)
    zeros = () if zero is None else (zero.contiguous(),)
    return Codes(packed, form, (scale.contiguous(), *zeros, *more))


def _sorted_by(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the column order that makes groups contiguous, and each column's new position."""
    order = torch.argsort(index.long(), stable=True)
    plain = torch.arange(len(index), device=index.device) // size
    if not torch.equal(index[order].long(), plain):
        raise UnreadableError("groups of different sizes (g_idx)")
    return order, torch.argsort(order).int()


def _read_gptq(tensors: Mapping[str, Tensor], scheme: Scheme) -> Codes:
    """Read GPTQ: words pack codes along in and zeros along out; version 1 stores zeros minus one.

    The one is added to the packed word, because it was subtracted there: a zero of 0 borrowed from
    its neighbour.
    """
    bits, scale = scheme.bits, tensors["scales"].t()
    codes = _fields(tensors["qweight"].t(), bits)
    words = tensors["qzeros"]
    if not scheme.is_v2:
        ones = sum(1 << at for at in range(0, 32, bits))
        words = words + (ones - (1 << 32) if ones >> 31 else ones)
    zero = _fields(words, bits).t()[: scale.shape[0]]
    size = codes.shape[1] if scheme.group < 0 else scheme.group
    index = tensors.get("g_idx")
    plain = torch.arange(codes.shape[1], device=codes.device) // size
    if index is None or torch.equal(index.long(), plain):
        return _integers(codes, bits, scale, zero, size)
    order, places = _sorted_by(index, size)
    return _integers(codes[:, order], bits, scale, zero, size, places)


def _read_awq(tensors: Mapping[str, Tensor], scheme: Scheme) -> Codes:
    def columns(words: Tensor) -> Tensor:
        place = torch.tensor(AWQ_COLUMNS, device=words.device)
        return _fields(words, 4).unflatten(-1, (-1, 8))[..., place].flatten(-2).t()

    codes, zero = columns(tensors["qweight"]), columns(tensors["qzeros"])
    return _integers(codes, 4, tensors["scales"].t(), zero, scheme.group)


def _read_packed(tensors: Mapping[str, Tensor], scheme: Scheme) -> Codes:
    rows, width = tensors["weight_shape"].tolist()
    bits, scale = scheme.bits, tensors["weight_scale"].reshape(rows, -1)
    codes = _fields(tensors["weight_packed"], bits)[:, :width]
    zero = tensors.get("weight_zero_point")
    if zero is not None:
        zero = _fields(zero.t(), bits).t()[:rows]
    size = width if scheme.group < 0 else scheme.group
    index = tensors.get("weight_g_idx")
    if index is None or bool((index < 0).all()):
        return _integers(codes, bits, scale, zero, size)
    order, places = _sorted_by(index, size)
    return _integers(codes[:, order], bits, scale, zero, size, places)


def _read_int8(tensors: Mapping[str, Tensor], scheme: Scheme) -> Codes:
    codes = tensors["_weight_qdata"] if "_weight_qdata" in tensors else tensors["weight"]
    scale = tensors["_weight_scale"] if "_weight_scale" in tensors else tensors["weight_scale"]
    zero = tensors.get("_weight_zero_point", tensors.get("weight_zero_point"))
    rows, width = codes.shape
    if scale.numel() not in (1, rows) and scheme.group < 0:
        raise UnreadableError(f"{scale.numel()} scales for {rows} rows, and no group_size")
    num_groups = 1 if scheme.group < 0 else -(-width // scheme.group)
    scale = _by_group(scale, rows, num_groups).float()
    has_zeros = zero is not None and bool(zero.any())
    if num_groups == 1 and not has_zeros:
        return Codes(codes, PackedFormat("int8", codes.shape), (scale,))
    moved = (codes.int() + 128).to(torch.uint8)
    if zero is not None:
        zero = (_by_group(zero, rows, num_groups).int() + 128).to(torch.uint8)
    return _integers(moved, 8, scale, zero, scheme.group)


def _by_group(numbers: Tensor, rows: int, num_groups: int) -> Tensor:
    """Expand numbers per tensor, row or group to (rows, groups); raises UnreadableError."""
    if numbers.numel() not in (1, rows, rows * num_groups):
        raise UnreadableError(f"{numbers.numel()} scales for {rows} x {num_groups} groups")
    grid = numbers.reshape(rows, -1) if numbers.numel() > 1 else numbers.reshape(1, 1)
    return grid.expand(rows, num_groups).contiguous()


def _read_fp8(tensors: Mapping[str, Tensor], scheme: Scheme) -> Codes:
    weight = tensors["_weight_qdata"] if "_weight_qdata" in tensors else tensors["weight"]
    names = ("_weight_scale", "weight_scale", "weight_scale_inv")
    scale = tensors[next((name for name in names if name in tensors), names[1])]
    rows, width = weight.shape
    if weight.dtype == torch.int8:  # experts of DeepSeek-V4
        form = PackedFormat("mxfp4", torch.Size([rows, 2 * width]), 32)
        return Codes(weight.view(torch.uint8), form, (scale.view(torch.uint8),))
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scale = exponents(scale)
    height, block = scheme.block or (1, width)
    if scheme.block is None:
        scale = scale.reshape(-1, 1)
        height = 1 if len(scale) == rows else rows
    if weight.dtype != torch.float8_e4m3fn:
        raise UnreadableError(f"FP8 values of {weight.dtype}")
    form = PackedFormat("fp8", weight.shape, min(block, width), height)
    return Codes(weight.view(torch.uint8), form, (scale.float(),))


def _read_fp4(tensors: Mapping[str, Tensor], scheme: Scheme) -> Codes:
    packed = tensors["weight_packed"] if "weight_packed" in tensors else tensors["weight"]
    shape = torch.Size([packed.shape[0], 2 * packed.shape[1]])
    scales: tuple[Tensor, ...] = (tensors["weight_scale"].view(torch.uint8),)
    if scheme.layout == "nvfp4":  # this scale divides
        scales += (tensors["weight_global_scale"].float().reshape(1),)
    elif scheme.layout == "modelopt":
        scales += (tensors["weight_scale_2"].float().reshape(()),)
    kind = "mxfp4" if scheme.layout == "mxfp4" else "nvfp4"
    return Codes(packed, PackedFormat(kind, shape, scheme.group), scales)


def _read_gpt_oss(tensors: Mapping[str, Tensor], scheme: Scheme) -> Codes:
    """Read blocks (E, out, in / 32, 16) and exponents (E, out, in / 32) of a stack (E, in, out)."""
    (stem,) = {name.removesuffix("_blocks").removesuffix("_scales") for name in tensors}
    packed, scale = tensors[f"{stem}_blocks"].flatten(-2), tensors[f"{stem}_scales"]
    number, rows, half = packed.shape
    form = PackedFormat(
        "mxfp4", torch.Size([number, 2 * half, rows]), scheme.group, transposed=True
    )
    return Codes(packed, form, (scale,))


_READERS = {
    "gpt_oss": _read_gpt_oss,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "packed": _read_packed,
    "int8": _read_int8,
    "fp8": _read_fp8,
    "mxfp4": _read_fp4,
    "nvfp4": _read_fp4,
    "modelopt": _read_fp4,
}


def unpacked(codes: Codes, dtype: torch.dtype) -> Tensor:
    """Return a weight as a tensor of floats."""
    if codes.scales:  # blocks of GGUF files have none; bitsandbytes unpacks int8
        import_bitsandbytes()  # takes a second, for it also imports torch's compiler
    return unpack(PackedWeight(codes.packed, codes.scales, codes.form), dtype)


def some_values(codes: Codes, positions: Tensor) -> Tensor:
    """Return the values at positions of the flattened weight, in float32."""
    rows, width = codes.form.shape[-2:]
    if codes.form.transposed:  # positions in the stored order of the codes
        rows, width = width, rows
        stack, place = positions // (rows * width), positions % (rows * width)
        positions = stack * rows * width + place % rows * width + place // rows
    at = positions // width
    scales: list[Tensor] = []
    if codes.scales:  # blocks of GGUF files hold their scales in the rows
        grid = codes.scales[0].shape
        row = at // rows * grid[-2] + at % rows // codes.form.rows
        scales = [s.flatten(0, -2)[row] if s.dim() > 1 else s for s in codes.scales]
    form = codes.form._replace(shape=torch.Size([len(at), width]), rows=1, transposed=False)
    sampled = Codes(codes.packed.flatten(0, -2)[at], form, tuple(scales))
    return unpacked(sampled, torch.float32)[torch.arange(len(at)), positions % width]


def stacked_codes(
    experts: Mapping[str, Sequence[Codes]],
    combined: Callable[[dict[str, object]], Tensor],
    expected: torch.Size,
) -> Codes | None:
    """Return experts' weights as one stack of codes; None if they must be dequantised.

    Args:
        experts: The weights of all experts, by projection of the stack (gate, up).
        combined: Builds the model's stack from such lists of tensors.
        expected: The shape of the stack.
    """
    first = next(iter(experts.values()))[0]
    every = [codes for part in experts.values() for codes in part]
    rows, width = first.form.shape
    same = all(codes.form == first.form for codes in every)
    plain = len({len(codes.scales) for codes in every}) == 1 and all(
        scale.dim() == 2 for codes in every for scale in codes.scales
    )
    if not (same and plain) or (first.form.rows > 1 and rows % first.form.rows):
        return None
    if tuple(expected) != (len(next(iter(experts.values()))), rows * len(experts), width):
        return None

    def stacked(pick: Callable[[Codes], Tensor]) -> Tensor:
        return combined(
            {f"{path}.weight": [pick(c) for c in part] for path, part in experts.items()}
        )

    packed = stacked(lambda codes: codes.packed)
    scales = [
        stacked(lambda codes, number=number: codes.scales[number])  # type: ignore[misc]
        for number in range(len(first.scales))
    ]
    return Codes(packed, first.form._replace(shape=torch.Size(expected)), tuple(scales))
