"""LoRA and DoRA adapters as matrices, read and written without a base model.

To convert, combine and compare adapters, A, B and the scale of each layer suffice.
Shapes: r rank; out, in features of the layer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from peftkit.errors import AdapterError
from peftkit.files.strict_json import shown
from peftkit.formats.peft.folder import where_fields, write_folder
from peftkit.formats.peft.load import AdapterFile, named_tensors, read_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.formats.peft.targets import LAYERS, missing_targets, shortest_endings
from peftkit.kernels import svd
from peftkit.methods.dora import DoRA
from peftkit.methods.lora import LoRA
from peftkit.methods.lora_format import peft_scales
from peftkit.methods.peft_format import MAGNITUDE
from peftkit.methods.table import SHARED_FIELDS, format_of, method_from_peft
from peftkit.model.places import is_linear, linear_shape, walk
from peftkit.model.roles import linear_role
from peftkit.model.targets import Site

A, B = "lora_A.weight", "lora_B.weight"


@dataclass(frozen=True, slots=True)
class LowRank:
    """A layer's update, scaling * B A.

    Attributes:
        a: (r, in). b: (out, r). magnitude: (out,) for DoRA, or None.
    """

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """Columns of B."""
        return self.a.shape[0]

    def delta(self) -> Tensor:
        """Return the full update (out, in), float32, without DoRA's magnitude."""
        return self.scaling * (self.b.float() @ self.a.float())


def read_low_rank(
    folder: str | Path, *, with_head: bool = False
) -> tuple[AdapterFile, dict[str, LowRank]]:
    """Read a LoRA or DoRA adapter folder: module path to update, in the file's order.

    Args:
        with_head: Accept other trained modules, such as a head; they are not read.

    Raises:
        AdapterError: The adapter has another method; its tensors are missing, unexpected or
            misshapen (all are listed); or its tensors depend on the base's weights.
    """
    file = read_adapter(folder)
    method = method_from_peft(file.fields)
    if not isinstance(method, LoRA):
        raise AdapterError(f"{file.folder} is not a LoRA", found=f"its method is {method.type}")
    others = [name for name in SHARED_FIELDS.values() if file.fields.get(name)]
    if others and not with_head:
        raise AdapterError(
            f"{file.folder} is not only a LoRA",
            found=f"{others[0]}: {shown(file.fields[others[0]])}; these weights are trained too.",
            fix="Load it on its base, or merge it: peftkit merge ADAPTER",
        )
    if method.init in ("pissa", "olora"):
        raise AdapterError(
            f"cannot read {file.folder} without its base",
            found=f"init_lora_weights: {method.init}; its initial value is computed from the base.",
            fix="Load it with --base and save it again, which writes a plain LoRA.",
        )
    if file.fields.get("target_parameters"):
        raise AdapterError(
            f"{file.folder} is not only a LoRA of linear layers",
            found=f"target_parameters: {shown(file.fields['target_parameters'])}",
            fix="Load it on its base, or merge it.",
        )
    names = {A, B, MAGNITUDE} if isinstance(method, DoRA) else {A, B}
    tensors = named_tensors(file.folder)
    frozen = {f"{name.removesuffix(A)}base_layer.weight" for name in tensors if name.endswith(A)}
    tensors = {name: t for name, t in tensors.items() if name not in frozen}  # PEFT saves heads
    if with_head:
        tensors = {name: t for name, t in tensors.items() if name.endswith((*names,))}
    tables = [n for n in tensors if n.endswith(".weight") and ".lora_" not in n]
    if tables:
        raise AdapterError(
            f"{file.folder} is not only a LoRA",
            found=f"It has {tables[0]} {tuple(tensors[tables[0]].shape)}, a weight of its base.",
            fix="Load it on its base, or merge it: peftkit merge ADAPTER",
        )
    modules, problems = by_module(tensors, names)
    updates = {}
    for path, tensors_of in modules.items():
        rank, scaling = method.scale_of(Site(path=path, roles=()))
        problems += _misshapen(path, tensors_of, rank)
        updates[path] = LowRank(tensors_of[A], tensors_of[B], scaling, tensors_of.get(MAGNITUDE))
    if problems or not updates:
        raise AdapterError(
            f"the tensors of {file.folder} do not match its config",
            found="\n".join(problems) or "it has none",
            fix="Download the adapter again.",
        )
    return file, updates


def by_module(
    tensors: Mapping[str, Tensor], names: Collection[str]
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Return tensors by module and name in the module, and the unexpected and missing ones.

    Args:
        names: Names of each module's tensors; modules that lack one are left out.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    problems = []
    for full_name, tensor in tensors.items():
        name = next((name for name in names if full_name.endswith(f".{name}")), None)
        if name is None:
            problems.append(f"unexpected: {full_name}")
        else:
            parts.setdefault(full_name.removesuffix(f".{name}"), {})[name] = tensor
    for path, part in parts.items():
        problems += [f"missing: {path}.{name}" for name in sorted(set(names) - part.keys())]
    return {path: part for path, part in parts.items() if len(part) == len(names)}, problems


def _misshapen(path: str, part: Mapping[str, Tensor], rank: int) -> list[str]:
    a, b = part[A], part[B]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        return [f"misshapen: {path} has A {tuple(a.shape)}, B {tuple(b.shape)}, but rank {rank}"]
    magnitude = part.get(MAGNITUDE)
    if magnitude is not None and magnitude.shape != b.shape[:1]:
        return [f"misshapen: {path} has a magnitude {tuple(magnitude.shape)}"]
    return []


def save_low_rank(
    modules: Mapping[str, LowRank],
    folder: str | Path,
    provenance: Provenance,
    *,
    targets: list[str] | None = None,
    transposed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write updates as an adapter folder that peftkit and PEFT load.

    Args:
        targets: The config's targets, endings that match no other layer of the base; None means
            the shortest endings that distinguish the layers.
        transposed: Whether the base's layers are Conv1D.
        dtype: Dtype of the tensors.

    Raises:
        AdapterError: There is nothing to write, a tensor is not finite, or only some layers have a
            magnitude.
    """
    with_magnitude = {path for path, m in modules.items() if m.magnitude is not None}
    if not modules or (with_magnitude and len(with_magnitude) < len(modules)):
        raise AdapterError(
            f"cannot write an adapter to {folder}",
            found="some layers are DoRA and some are not" if modules else "it has no layers",
        )
    scales = peft_scales(
        {path: m.rank for path, m in modules.items()},
        {path: m.scaling for path, m in modules.items()},
        rslora=False,
    )
    method = (DoRA if with_magnitude else LoRA)(
        rank=scales["r"],
        alpha=scales["lora_alpha"],
        targets=tuple(modules),
        rank_pattern=scales.get("rank_pattern", {}),
        alpha_pattern=scales.get("alpha_pattern", {}),
    )
    named = shortest_endings(modules, ()) if targets is None else targets
    fields = where_fields(format_of(method), provenance, named) | scales
    fields |= {"lora_dropout": 0.0, "init_lora_weights": True, "fan_in_fan_out": transposed}
    if with_magnitude:
        fields["use_dora"] = True
    state: dict[str, Tensor] = {}
    for path, module in modules.items():
        state |= {f"{path}.{A}": module.a, f"{path}.{B}": module.b}
        if module.magnitude is not None:
            state[f"{path}.{MAGNITUDE}"] = module.magnitude
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    return write_folder(Path(folder), state, fields, method, provenance)


def rewritten_targets(file: AdapterFile, modules: Mapping[str, LowRank]) -> list[str]:
    """Return the targets for a rewritten config: the file's endings, which fit its base.

    If the file's targets are not all endings, return the full paths.
    """
    targets = file.fields.get("target_modules")
    if isinstance(targets, list) and not any(file.fields.get(key) for key in LAYERS):
        return sorted(targets)
    return sorted(modules)


def layers_of(
    file: AdapterFile, modules: Mapping[str, LowRank], model: nn.Module
) -> dict[str, nn.Module]:
    """Return the bare linear layers of an adapter's updates, by path.

    Raises:
        AdapterError: Layers are missing or have another shape, or targets have no tensors; lists
            all of them.
    """
    linears = {path: module for path, module, _ in walk(model) if is_linear(module)}
    problems = misfits(modules, linears)
    missing = missing_targets(file.fields, linears, modules)
    problems += [f"no tensors for the target: {target}" for target in missing]
    if problems:
        raise AdapterError(
            f"the adapter in {file.folder} does not fit {type(model).__name__}",
            found="\n".join(sorted(problems)),
            fix="Use the base it was trained on: peftkit inspect ADAPTER",
        )
    return {path: linears[path] for path in modules}


def misfits(modules: Mapping[str, LowRank], linears: Mapping[str, nn.Module]) -> list[str]:
    """Return the mismatches between updates and a model's linear layers; [] if they fit."""
    problems = [f"no such layer: {path}" for path in modules if path not in linears]
    for path in [path for path in modules if path in linears]:
        update_shape = (modules[path].a.shape[1], modules[path].b.shape[0])
        if update_shape != (layer_shape := linear_shape(linears[path])):
            update, layer = (f"{size[0]} -> {size[1]}" for size in (update_shape, layer_shape))
            problems.append(f"misshapen: {path} is {update}, not {layer}")
    return problems


def uniform(modules: Mapping[str, LowRank]) -> tuple[dict[str, LowRank], int, float]:
    """Give all layers one rank and one scale, without changing their output.

    Lower ranks are padded with zeros; scales other than the most common are multiplied into B.

    Returns:
        The layers, their rank, their scale.
    """
    rank = max(module.rank for module in modules.values())
    scaling = Counter(module.scaling for module in modules.values()).most_common(1)[0][0]
    even = {}
    for path, module in modules.items():
        b, missing = module.b, rank - module.rank
        if module.scaling != scaling:  # in float64, to round only once
            b = (b.double() * (module.scaling / scaling)).to(b.dtype)
        a, b = pad(module.a, (0, 0, 0, missing)), pad(b, (0, missing))
        even[path] = replace(module, a=a, b=b, scaling=scaling)
    return even, rank, scaling


@dataclass(frozen=True, slots=True)
class RoleUpdate:
    """An adapter's updates of the layers of one role.

    Attributes:
        num_layers: Number of adapted layers.
        norm: Frobenius norm of all their updates s B A; for DoRA without the magnitudes.
        rank: Largest rank of a layer.
        effective_rank: Mean over the layers of exp(entropy of the singular values as shares) (Roy
            and Vetterli, 2007): r if all r directions have equal weight, near 1 if one dominates.
    """

    role: str
    num_layers: int
    norm: float
    rank: int
    effective_rank: float


def role_updates(updates: Mapping[str, LowRank]) -> list[RoleUpdate]:
    """Measure updates by role from their factors, without forming a matrix of a layer's size."""
    roles: dict[str, list[LowRank]] = {}
    for path, update in updates.items():
        roles.setdefault(linear_role(path), []).append(update)
    measured = []
    for role, layers in roles.items():
        values = [abs(u.scaling) * svd.singular_values(u.a, u.b) for u in layers]
        norm = math.sqrt(sum(float(one.square().sum()) for one in values))
        effective = sum(map(svd.effective_rank, values)) / len(values)
        measured.append(RoleUpdate(role, len(layers), norm, max(u.rank for u in layers), effective))
    return measured
