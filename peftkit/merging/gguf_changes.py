"""Which tensors of a GGUF file an adapter changes, and in which types they can be stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.adapter import Adapter
from peftkit.base.new_tokens import FILE
from peftkit.errors import AdapterError, MergeError, first_few
from peftkit.files.strict_json import shown
from peftkit.formats.gguf.header import GGUFHeader
from peftkit.formats.gguf.names import GGUFWeight, architecture_of, find_weights
from peftkit.formats.gguf.tensors import PACKED, all_kinds
from peftkit.formats.model_files import ModelFiles
from peftkit.formats.peft.folder import AdapterFile, load_adapter
from peftkit.merging.fold import check_all
from peftkit.methods.protocol import AdapterModule
from peftkit.methods.table import method_from_peft
from peftkit.model.places import is_conv1d

FLOATS = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
"""Types that have another name in recipes."""
TABLE = "token_embd.weight"
SAME = 0.8
"""How far quantising may take a weight from the original, relative to its size: a twelfth in 4
bits, a third in 2. Another model's, or rows in another order, are off by more than 1."""


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of one tensor of the file; `part` counts the tensors of the same weight."""

    module: AdapterModule
    parameter: str
    weight: GGUFWeight
    part: int


def find_changes(
    file: AdapterFile, base: str, model: Any, into: Path, header: GGUFHeader
) -> dict[str, Change]:
    """Return the tensors of the file that the adapter changes.

    Args:
        base: Its name. model: The base without weights; it is filled with zeros here.

    Raises:
        AdapterError: It does not fit; lists every weight concerned.
        BaseError: The base's architecture is not supported.
        MergeError: The method, or one of its weights, cannot be merged.
    """
    _check_needs_no_base(file)
    architecture = architecture_of(model, base)
    said = header.keys.get("general.architecture")
    if said != architecture.name:
        raise AdapterError(
            f"{into} is of another architecture than {base}",
            found=f"The file says {shown(said)}; {base} is {architecture.name!r}.",
            fix="Give the GGUF of the base that the adapter was trained on.",
        )
    if (count := header.keys.get("split.count", 1)) != 1:
        raise AdapterError(
            f"cannot merge into {into}",
            found=f"It is one of {shown(count)} files of a split model.",
            fix="Join them first: llama-gguf-split --merge FIRST.gguf WHOLE.gguf",
        )
    weights = find_weights(model, architecture)
    adapter = load_adapter(_hollow(model), file.folder)
    check_all(adapter)
    changes, problems = {}, []
    for path, parameter, module, expected in _adapted(adapter):
        weight = weights.get(f"{path}.{parameter}")
        if weight is None or weight.refusal:
            why = weight.refusal if weight else "llama.cpp's file has no such weight to merge into"
            problems.append(f"{path}.{parameter}: {why}")
        elif problem := _misfit(weight, expected, header):
            problems.append(f"{path}.{parameter}: {problem}")
        else:
            for part, name in enumerate(weight.names):
                changes[name] = Change(module, parameter, weight, part)
    if TABLE in changes and model.config.tie_word_embeddings and "output.weight" in header.tensors:
        problems.append(f"{TABLE}: the base ties it to its head, and the file has both")
    if problems:
        raise AdapterError(
            f"cannot merge {file.folder} into {into}",
            found=first_few(problems, 10),
            fix="Merge into the original base, and convert that: peftkit merge ADAPTER --out DIR",
        )
    return changes


def _hollow(model: nn.Module) -> nn.Module:
    """Give a model on the meta device weights on the CPU, all of them zero, that take no memory.

    An adapter loads onto it as onto any model. Tied weights stay tied.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is not None and own not in made:
                zeros = torch.zeros((), dtype=own.dtype).expand(own.shape)
                made[own] = nn.Parameter(zeros, requires_grad=False)
            module._parameters[name] = None if own is None else made[own]
    return model


def _adapted(adapter: Adapter) -> Iterator[tuple[str, str, AdapterModule, tuple[int, ...]]]:
    """Yield path, parameter and module of each weight that changes, and its shape."""
    for path, module in adapter.modules.items():
        for parameter, weight in module.weights(module.base).items():
            yield path, parameter, module, tuple(weight.shape)


def _misfit(weight: GGUFWeight, expected: tuple[int, ...], header: GGUFHeader) -> str:
    """Say why tensors of a file are not a weight of this shape, "" if they are."""
    if missing := [name for name in weight.names if name not in header.tensors]:
        return f"the file has no {missing[0]}"
    shapes = [header.tensors[name].shape for name in weight.names]
    rows = max(0, len(expected) - 2)
    found = list(shapes[0])
    found[rows] = sum(shape[rows] for shape in shapes if len(shape) == len(shapes[0]))
    return "" if tuple(found) == expected else f"is {expected}; the file's is {tuple(found)}"


def types_of(
    changes: Mapping[str, Change], into: Path, header: GGUFHeader, asked: str | None
) -> dict[str, str]:
    """Return the type in which each changed tensor is stored.

    Raises:
        MergeError: Some of them cannot be packed in their own.
    """
    kinds, types = all_kinds(), {}
    for name in changes:
        entry = header.tensors[name]
        types[name] = kinds[entry.kind][0]
        if asked is not None and len(entry.shape) > 1:  # a bias is float32 in every file
            numbers = {kind: per_block for kind, per_block, _ in kinds.values()}
            types[name] = "F16" if entry.shape[-1] % numbers[asked] else asked
    strange = Counter(kind for kind in types.values() if kind not in PACKED)
    if strange:
        found = ", ".join(f"{count} in {kind}" for kind, count in strange.most_common())
        raise MergeError(
            f"cannot store merged tensors in the types of {into}",
            found=f"{found}; the package gguf reads these and does not write them",
            fix="Name a type for the merged tensors, by which the file grows: --dtype q8_0",
        )
    return types


def type_named(dtype: str) -> str:
    """Return ggml's name of a type; MergeError if there is none such."""
    name = FLOATS.get(dtype, dtype.upper())
    if name not in PACKED or dtype in ("f32", "f16"):
        known = ", ".join((*FLOATS, *(each.lower() for each in PACKED if each[0] == "Q")))
        raise MergeError(f"there is no type {dtype!r} for tensors", fix=f"One of: {known}.")
    return name


def _check_needs_no_base(file: AdapterFile) -> None:
    """Refuse what is computed from the base's weights, and tokens that its file does not have."""
    if file.made_here and (file.folder / FILE).exists():
        raise AdapterError(
            f"{file.folder} cannot be merged into a GGUF file",
            found=f"it has tokens of its own ({FILE}), which the file's vocabulary lacks",
            fix="Merge it into the original base, and convert that: "
            "peftkit merge ADAPTER --out DIR",
        )
    init = getattr(method_from_peft(file.fields), "init", "")
    if init in ("pissa", "olora"):
        raise AdapterError(
            f"{file.folder} cannot be merged into a GGUF file",
            found=f"init_lora_weights: {init}; its initial value is computed from the base",
            fix="Load it with --base and save it again: that writes a plain LoRA.",
        )


class Originals:
    """Compares weights with those of the base, one at a time.

    Args:
        base: Its name, for messages. files: Its weights; None where they are not on this machine.
        force: Accept others.

    Attributes:
        largest: The largest relative difference so far; None before the first.
    """

    def __init__(self, base: str, files: ModelFiles | None, force: bool) -> None:
        self.base, self.files, self.force = base, files, force
        self.largest: float | None = None

    def compare(self, module: AdapterModule, parameter: str, weight: Tensor) -> None:
        """Compare a weight as its module multiplies, (out, in), in float32.

        Raises:
            MergeError: It is another one.
        """
        name = f"{module.site.path}.{parameter}"
        if self.files is None or name not in self.files.where:
            return
        original = self.files.tensor(name).float()
        if is_conv1d(module.base) and original.ndim == 2:
            original = original.t()
        if original.shape != weight.shape:
            return
        size = float(torch.linalg.vector_norm(original))
        difference = float(torch.linalg.vector_norm(weight - original)) / size if size else 0.0
        self.largest = max(difference, self.largest or 0.0)
        if not difference <= SAME and not self.force:
            raise MergeError(
                f"the file does not hold the weights of {self.base}",
                found=f"{name} differs by {difference:.2f} of its size",
                fix="Give the GGUF of the base that the adapter was trained on, or accept this one "
                "with --force.",
            )
