"""Pre-quantised checkpoints, as described by their configs.

transformers loads bitsandbytes checkpoints, which keep their bits. peftkit reads the other
supported formats and keeps their codes (codes.py); 8-bit checkpoints and gpt-oss can also be packed
in 4 bits. Any other format is an error that names it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peftkit.errors import BaseError
from peftkit.files.strict_json import JsonMap
from peftkit.kernels.block_scaled import PAIRED
from peftkit.kernels.gguf_blocks import TYPES, row_bytes
from peftkit.kernels.packed import PackedFormat
from peftkit.quant.layers import Packing

READ = (
    "compressed-tensors (w4a16, w8a16, w8a8, fp8, nvfp4, mxfp4), AWQ (gemm), GPTQ in 4 or 8 bits, "
    "auto-round, FP8, ModelOpt NVFP4, torchao int8 and float8, bitsandbytes"
)
ROUNDED = "inputs rounded when served"
SERVER_ROUNDS = "A server of this format quantises the inputs of layers too; training does not."


@dataclass(frozen=True, slots=True)
class Scheme:
    """The storage scheme of a layer's tensors.

    Attributes:
        layout: Name of the reader: "gptq", "awq", "packed", "int8", "fp8", "mxfp4", "nvfp4",
            "modelopt", "gguf", or "gpt_oss", which quantises only stacks of experts, in mxfp4.
        bits: Bits per code. group: Columns per scale; -1 for a whole row.
        block: Rows and columns per scale of FP8; None for a scale per row or per tensor.
        is_v2: Whether GPTQ stores the zeros themselves; version 1 stores zeros minus one.
        has_zeros: Whether zero points are stored; otherwise the middle code is zero.
        rounds_inputs: Whether servers of this format also quantise activations.
        type: Block type of a weight in a GGUF file.
    """

    layout: str
    bits: int
    group: int = -1
    block: tuple[int, int] | None = None
    is_v2: bool = False
    has_zeros: bool = False
    rounds_inputs: bool = False
    type: str = ""

    @property
    def kind(self) -> str:
        """The kind of the packed format."""
        if self.type:
            return self.type
        integers = {4: "int4", 8: "uint8"}[self.bits]
        if self.layout in ("gptq", "awq", "packed") or (self.layout == "int8" and self.group > 0):
            return integers
        return {"modelopt": "nvfp4", "gpt_oss": "mxfp4"}.get(self.layout, self.layout)


class UnreadableError(ValueError):
    """Raised for an unsupported format or an unreadable layer; the message names it."""


def scheme_of(settings: JsonMap, path: str = "") -> Scheme:
    """Return the scheme of a layer, from a checkpoint's `quantization_config`.

    Raises:
        UnreadableError: The layer's format is not supported.
    """
    method = str(settings.get("quant_method"))
    if method == "auto-round":
        return _auto_round(settings, path)
    if method == "gptq":
        return _gptq(settings)
    if method == "awq":
        return _awq(settings)
    if method == "compressed-tensors":
        return _compressed(settings, path)
    if method == "fp8":
        block = settings.get("weight_block_size")
        return Scheme("fp8", 8, block=_pair(block) if block else None, rounds_inputs=True)
    if method == "modelopt" and settings.get("quant_algo") == "NVFP4":
        return Scheme("modelopt", 4, 16, rounds_inputs=True)
    if method == "mxfp4":
        return Scheme("gpt_oss", 4, 32)
    if method == "torchao":
        return _torchao(settings)
    if method == "gguf":
        types = settings["types"]
        return Scheme("gguf", 0, type=types.get(path) or next(iter(types.values())))
    raise UnreadableError(method)


def _pair(sides: Sequence[Any]) -> tuple[int, int]:
    return int(sides[0]), int(sides[1])


def _gptq(settings: JsonMap) -> Scheme:
    bits, form = settings.get("bits"), settings.get("checkpoint_format") or settings.get("format")
    if bits not in (4, 8) or form not in (None, "gptq", "gptq_v2"):
        raise UnreadableError(f"gptq in {bits} bits, layout {form or 'gptq'}")
    if settings.get("dynamic"):
        raise UnreadableError("gptq with other settings for some layers (dynamic)")
    group, has_zeros = int(settings.get("group_size", -1)), not settings.get("sym", True)
    return Scheme("gptq", bits, group, is_v2=form == "gptq_v2", has_zeros=has_zeros)


def _awq(settings: JsonMap) -> Scheme:
    bits = settings.get("bits", settings.get("w_bit"))
    form = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if bits != 4 or form != "gemm":
        raise UnreadableError(f"awq in {bits} bits, layout {form}")
    group = int(settings.get("group_size", settings.get("q_group_size", 128)))
    return Scheme("awq", 4, group, has_zeros=bool(settings.get("zero_point", True)))


def _auto_round(settings: JsonMap, path: str) -> Scheme:
    form = str(settings.get("packing_format", "auto_round:auto_gptq"))
    overrides: JsonMap = (settings.get("extra_config") or {}).get(path) or {}
    of_layer = {**settings, **overrides, "checkpoint_format": None, "format": None, "version": None}
    if form.endswith("gptq"):
        return _gptq(of_layer)
    if form.endswith("awq"):
        return _awq(of_layer)
    raise UnreadableError(f"auto-round, layout {form}")


def _torchao(settings: Mapping[str, object]) -> Scheme:
    kind = str(settings.get("quant_type"))
    if "Int8" in kind and "Int4" not in kind:
        group = re.search(r"group_size\W+(\d+)", kind)  # a granularity may be nested at any depth
        size = int(group[1]) if group else -1
        return Scheme("int8", 8, size, rounds_inputs="DynamicActivation" in kind)
    if "Float8" in kind and "Int4" not in kind:
        return Scheme("fp8", 8, rounds_inputs="DynamicActivation" in kind)
    raise UnreadableError("torchao in another type than int8 and float8")


def _compressed(settings: JsonMap, path: str) -> Scheme:
    for name in ("transform_config", "sparsity_config"):
        section = settings.get(name) or {}
        if (
            any(section.get(key) for key in ("config_groups", "sparsity_structure"))
            and section.get("format") != "dense"
        ):
            raise UnreadableError(f"compressed-tensors with a {name}")
    group = _group(settings.get("config_groups") or {}, path)
    weights = group.get("weights") or {}
    form, bits = str(group.get("format") or settings.get("format")), weights.get("num_bits")
    size = weights.get("group_size") or -1
    rounds = group.get("input_activations") is not None
    if form == "pack-quantized" and bits in (4, 8):
        has_zeros = not weights.get("symmetric", True)
        return Scheme("packed", bits, size, has_zeros=has_zeros, rounds_inputs=rounds)
    if form in ("int-quantized", "naive-quantized") and weights.get("type") == "int" and bits == 8:
        return Scheme("int8", 8, rounds_inputs=rounds)
    if form in ("float-quantized", "naive-quantized") and bits == 8:
        block = weights.get("block_structure") if weights.get("strategy") == "block" else None
        if isinstance(block, str):
            block = block.split("x")
        return Scheme("fp8", 8, block=_pair(block) if block else None, rounds_inputs=rounds)
    if form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        kind = form[:5]
        return Scheme(kind, 4, 16 if kind == "nvfp4" else 32, rounds_inputs=rounds)
    raise UnreadableError(f"compressed-tensors, {form} in {bits} bits")


def _group(groups: JsonMap, path: str) -> JsonMap:
    """Return the settings of a layer; its name or a pattern takes precedence over its class."""
    for group in groups.values():
        for target in group["targets"]:
            if path and (
                path == target or (target.startswith("re:") and re.match(target[3:], path))
            ):
                return dict(group)
    by_class = [g for g in groups.values() if any(t.isidentifier() for t in g["targets"])]
    return dict((by_class or list(groups.values()) or [{}])[0])


def schemes_of(settings: JsonMap) -> list[Scheme]:
    """Return the distinct schemes of a checkpoint's layers, the default one first.

    Raises:
        UnreadableError: The format of a layer is not supported.
    """
    schemes = [scheme_of(settings)]
    if settings.get("quant_method") == "compressed-tensors":
        for name, group in (settings.get("config_groups") or {}).items():
            if group.get("weights"):  # other groups quantise activations only
                schemes.append(scheme_of({**settings, "config_groups": {name: group}}))
    if settings.get("quant_method") == "auto-round":
        for path, overrides in (settings.get("extra_config") or {}).items():
            # layers with more bits are not quantised
            if overrides.get("bits", settings.get("bits")) <= 8:
                schemes.append(scheme_of(settings, path))
    return list(dict.fromkeys(schemes))


def described(settings: JsonMap) -> str:
    """Return a description of a checkpoint's format: "awq, 4 bits, groups of 128"."""
    schemes, method = schemes_of(settings), str(settings["quant_method"])
    if method == "gguf":
        counts = Counter(settings["types"].values()).most_common()
        return f"gguf, {', '.join(f'{number} x {kind}' for kind, number in counts)}"
    forms = [_form(scheme) for scheme in schemes]
    form = forms[0] if len(set(forms)) == 1 else f"some layers {' and others '.join(forms)}"
    zeros = "with zeros" * any(scheme.has_zeros for scheme in schemes)
    rounded = ROUNDED * any(scheme.rounds_inputs for scheme in schemes)
    return ", ".join(filter(None, (method, form, zeros, rounded)))


def _form(scheme: Scheme) -> str:
    """Return a description of bits and blocks: "4 bits, groups of 128"."""
    parts = f"a scale for {scheme.block[0]} x {scheme.block[1]}" if scheme.block else ""
    if scheme.group > 0:
        parts = f"groups of {scheme.group}"
    return ", ".join(filter(None, (f"{scheme.bits} bits", parts)))


@dataclass(frozen=True, slots=True)
class PublishedCheckpoint:
    """A checkpoint that its publisher has quantised.

    Attributes:
        settings: The `quantization_config` of its config.json.
    """

    settings: JsonMap

    @property
    def is_bitsandbytes(self) -> bool:
        """Whether transformers loads the checkpoint, into layers of bitsandbytes."""
        fields = self.settings
        is_named = fields.get("quant_method") == "bitsandbytes"
        return bool(is_named or fields.get("load_in_4bit") or fields.get("load_in_8bit"))

    @property
    def has_codes(self) -> bool:
        """Whether peftkit reads the checkpoint's codes."""
        if self.is_bitsandbytes:
            return False
        try:
            schemes_of(self.settings)
        except UnreadableError:
            return False
        return True

    @property
    def description(self) -> str:
        """Description of the format: "awq, 4 bits, groups of 128"."""
        return described(self.settings)

    @property
    def notice(self) -> str:
        """Notice for a base that keeps the bits of its files."""
        notice = f"The base keeps the bits of its files: {self.description}."
        rounds = any(scheme.rounds_inputs for scheme in schemes_of(self.settings))
        return f"{notice} {SERVER_ROUNDS}" if rounds else notice

    def check(self, name: str, quantize: str = "none") -> None:
        """Check that the checkpoint can be read.

        Args:
            name: The base's name, for messages. quantize: The requested packing.

        Raises:
            BaseError: The format is not supported, or 4-bit weights would be packed again.
        """
        if self.is_bitsandbytes:
            return
        try:
            schemes = schemes_of(self.settings)
        except UnreadableError as problem:
            raise BaseError(
                f"cannot read the weights of {name}.",
                found=f"They are quantised by {problem}.",
                fix="Use the same model in 16 bits (quantize: nf4 packs it while loading), or in a "
                f"supported format: {READ}.",
            ) from None
        in_4_bits = [s for s in schemes if s.bits == 4 and s.layout != "gpt_oss"]
        if quantize != "none" and in_4_bits:
            some = "" if len(in_4_bits) == len(schemes) else "some of "
            raise BaseError(
                f"{some}the weights of {name} are in 4 bits already.",
                found=f"base.quantize is {quantize}, which would round them a second time.",
                fix="Set base.quantize: none, which keeps these bits; or use the model in 16 bits.",
            )

    @property
    def is_gguf(self) -> bool:
        """Whether the checkpoint is a GGUF file, whose embeddings may be quantised too."""
        return self.settings.get("quant_method") == "gguf"

    def quantizes(self, name: str, weight: Tensor) -> bool:
        """Return whether the named weight of a linear layer, embedding or stack is in codes."""
        if self.is_gguf:
            return name in self.settings["types"]
        return scheme_of(self.settings).layout != "gpt_oss" or weight.dim() == 3

    def empty_packed(
        self, shape: torch.Size, path: str, leaf: str, dtype: torch.dtype
    ) -> tuple[Tensor, Packing]:
        """Return the uninitialised packed data and the packing of a weight.

        They are on the default device, as with `quant.layers.empty_packed`.

        Args:
            shape: Shape (..., out, in) of the weight.
            path: Path of its layer. leaf: Name of the weight in the layer.
            dtype: Compute dtype.
        """
        name = f"{path}.{leaf}" if self.is_gguf else path
        return empty_packed(shape, scheme_of(self.settings, name), dtype)


def empty_packed(
    shape: Sequence[int], scheme: Scheme, dtype: torch.dtype
) -> tuple[Tensor, Packing]:
    """Return the uninitialised packed data and the packing of a weight (..., out, in)."""
    *lead, rows, width = shape
    if scheme.layout == "gguf":
        packed = torch.empty(*lead, rows, row_bytes(scheme.kind, width), dtype=torch.uint8)
        form = PackedFormat(scheme.kind, torch.Size(shape), TYPES[scheme.kind].values)
        return packed, Packing(form, dtype, ())
    transposed = scheme.layout == "gpt_oss"
    if transposed:
        rows, width = width, rows
    kind, (height, block) = scheme.kind, scheme.block or (1, width)
    block = min(block if scheme.group < 0 else scheme.group, width)
    form = PackedFormat(kind, torch.Size(shape), block, height, transposed)
    grid = (*lead, -(-rows // height), -(-width // block))
    code_dtype = torch.int8 if kind == "int8" else torch.uint8
    packed = torch.empty(*lead, rows, width // 2 if kind in PAIRED else width, dtype=code_dtype)
    scale_dtype = {
        "int4": torch.float16,
        "uint8": torch.float16,
        "mxfp4": torch.uint8,
        "nvfp4": torch.uint8,
    }.get(kind, torch.float32)
    scales = [torch.empty(grid, dtype=scale_dtype)]
    if scheme.has_zeros:
        scales.append(torch.empty(grid, dtype=torch.uint8))
    if kind == "nvfp4":
        scales.append(torch.empty(1, dtype=torch.float32))
    return packed, Packing(form, dtype, tuple(scales))
