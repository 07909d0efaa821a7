"""LoRAs of single experts, as saved with transformers 4, converted to stacked experts.

transformers 4 had a linear layer for each matrix of each expert, "experts.3.gate_proj" or, in
Mixtral, "block_sparse_moe.experts.3.w1". Their pairs are stacked here as methods/experts.py has
them on disk: A of gate and of up one below the other, and B zero outside the rows of its role.

Shapes: E experts, r rank, R = r times the roles that are adapted in a stack.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from peftkit.adapter import attach
from peftkit.errors import AdapterError, first_few
from peftkit.files.disk import write_json, write_tensors
from peftkit.formats.guard import read_json, read_tensors
from peftkit.formats.peft.config_fields import written_fields
from peftkit.formats.peft.folder import (
    CONFIG,
    PREFIX,
    TENSORS,
    AdapterFile,
    Provenance,
    load_adapter,
    named_tensors,
    read_adapter,
    where_fields,
    write_folder,
)
from peftkit.methods.dora import DoRA
from peftkit.methods.lora import LoRA
from peftkit.methods.lora_format import EXPERTS_SINCE, peft_scales
from peftkit.model.places import ModelWeight, find_places, is_linear, stacked_shape
from peftkit.model.roles import FFN_LEAVES
from peftkit.model.targets import Site

_NAME = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.(lora_[AB])\.weight")
_RENAMED = {"block_sparse_moe": "mlp"}
"""Modules that were renamed in transformers 5."""

_Part = tuple[str, int, str]  # path of the experts in the model, the expert, its role
_Pairs = dict[_Part, dict[str, Tensor]]
_Scales = dict[_Part, tuple[int, float]]  # rank and scaling


def per_expert(names: Iterable[str]) -> bool:
    """True if an adapter's tensors include LoRAs of single experts."""
    return any(_NAME.fullmatch(name) for name in names)


def stack_experts(source: Path, scratch: Path, model: nn.Module) -> Path:
    """Write the adapter in `source` with stacked experts, as today's PEFT would; return where.

    Experts that the model does not stack are left as they are.

    Raises:
        AdapterError: It is no plain LoRA, an expert of a layer is missing, or those of one stack
            differ in rank or scale: all of them are listed.
    """
    file = read_adapter(source)
    method = _plain_lora(file)
    places = [p for p in find_places(model) if p.is_stack]
    pairs, scales, others = _sorted(source, method, {place.path for place in places})
    state, stacked = _stacks(source, places, pairs, scales)
    if not state:
        return source
    rest = {name.rpartition(".lora_")[0] for name in others}
    linears = {path for path, module in model.named_modules() if is_linear(module)}
    whole = stacked | {path: method.scale_of(Site(path, ())) for path in rest & linears}
    ranks = {path: rank for path, (rank, _) in whole.items()}
    scalings = {path: scaling for path, (_, scaling) in whole.items()}
    fields = {key: value for key, value in file.fields.items() if key not in _REPLACED}
    fields |= peft_scales(ranks, scalings, rslora=False)
    fields |= {
        "target_modules": sorted(rest),
        "target_parameters": list(stacked),
        "peft_version": ".".join(map(str, (*EXPERTS_SINCE, 0))),
        "lora_dropout": 0.0,  # of training, and there is none on stacks
    }
    named = {PREFIX + name: tensor for name, tensor in (others | state).items()}
    scratch.mkdir(parents=True, exist_ok=True)
    write_tensors(named, scratch / TENSORS, {"format": "pt"})
    write_json(fields, scratch / CONFIG)
    return scratch


_SUBTRACTED = ("pissa", "olora")
_REPLACED = (
    *("rank_pattern", "alpha_pattern", "use_rslora", "exclude_modules"),
    *("layers_to_transform", "layers_pattern"),
)


def _plain_lora(file: AdapterFile) -> LoRA:
    """Return the adapter's method; refuse anything beyond pairs of A and B."""
    method = file.method
    beside = method.train_fully or method.token_rows
    if (
        not isinstance(method, LoRA)
        or isinstance(method, DoRA)
        or method.init in _SUBTRACTED
        or beside
    ):
        raise AdapterError(
            f"cannot stack the experts of {file.folder}",
            found=f"its method is {method.type}, or its initial value is computed from the base, "
            "or other weights are trained too",
            fix="Merge it with the versions that it was made with.",
        )
    return method


def _sorted(
    source: Path, method: LoRA, known: Container[str]
) -> tuple[_Pairs, _Scales, dict[str, Tensor]]:
    """Return the pairs of single experts, their scales, and all other tensors.

    Args:
        known: Paths of what the model stacks.
    """
    pairs: _Pairs = {}
    scales: _Scales = {}
    others: dict[str, Tensor] = {}
    for name, tensor in named_tensors(source).items():
        found = _NAME.fullmatch(name)
        path = ".".join(_RENAMED.get(s, s) for s in found[1].split(".")) if found else ""
        if not found or path not in known or found[3] not in FFN_LEAVES:
            others[name] = tensor
            continue
        part = (path, int(found[2]), f"expert_{FFN_LEAVES[found[3]]}")
        if found[4] in pairs.setdefault(part, {}):
            raise AdapterError(f"{source} holds a tensor twice", found=name)
        pairs[part][found[4]] = tensor
        scales[part] = method.scale_of(Site(f"{found[1]}.{found[2]}.{found[3]}", ()))
    return pairs, scales, others


def _stacks(
    source: Path, places: Sequence[ModelWeight], pairs: _Pairs, scales: _Scales
) -> tuple[dict[str, Tensor], dict[str, tuple[int, float]]]:
    """Return the tensors of the stacks; and for each stack its rank and scaling."""
    problems: list[str] = []
    state: dict[str, Tensor] = {}
    stacked: dict[str, tuple[int, float]] = {}
    for path in dict.fromkeys(part[0] for part in pairs):
        stacks = [place for place in places if place.path == path]
        adapted = [s for s in stacks if any(p[0] == path and p[2] in s.roles for p in pairs)]
        strays = {p[2] for p in pairs if p[0] == path} - {r for s in stacks for r in s.roles}
        problems += [f"unexpected: {path} has no role {role}" for role in sorted(strays)]
        for index, place in enumerate(adapted):
            wrong, rank, scaling = _check(place, pairs, scales)
            problems += wrong
            if wrong:
                continue
            roles = [r for r in place.roles if (path, 0, r) in pairs]
            a, b = _stacked(place, roles, pairs)
            inner = f"{path}." + "base_layer." * (len(adapted) - 1 - index)
            state |= {f"{inner}lora_A.weight": a, f"{inner}lora_B.weight": b}
            stacked[f"{path}.{place.parameter}"] = rank * len(roles), scaling
    if problems:
        raise AdapterError(
            f"cannot stack the experts of {source}",
            found=first_few(problems, 20),
            fix="Every expert of a layer needs a LoRA, all of the same rank and scale.",
        )
    return state, stacked


def _check(place: ModelWeight, pairs: _Pairs, scales: _Scales) -> tuple[list[str], int, float]:
    """Return what is wrong with the pairs of one stack; their rank and scaling."""
    num_experts, num_in, num_out = stacked_shape(place.module, str(place.parameter))
    num_out = num_out // len(place.roles)
    parts = [p for p in pairs if p[0] == place.path and p[2] in place.roles]
    problems = [
        f"unexpected: {place.path} has no expert {p[1]}, of {num_experts}"
        for p in parts
        if p[1] >= num_experts
    ]
    rank, scaling = scales[parts[0]]
    for role in dict.fromkeys(p[2] for p in parts):
        for expert in range(num_experts):
            part = (place.path, expert, role)
            own, label = pairs.get(part, {}), f"{role} of expert {expert} in {place.path}"
            missing = [name for name in ("lora_A", "lora_B") if name not in own]
            if missing:
                problems.append(f"missing: {' and '.join(missing)} of {label}")
                continue
            shapes = tuple(own["lora_A"].shape), tuple(own["lora_B"].shape)
            if scales[part] != (rank, scaling):
                found = "rank {}, scaling {:g}".format(*scales[part])
                problems.append(f"{label} has {found}; others {rank}, {scaling:g}")
            elif shapes != ((rank, num_in), (num_out, rank)):
                asked = f"A {(rank, num_in)}, B {(num_out, rank)}"
                problems.append(f"misshapen: {label} has A {shapes[0]}, B {shapes[1]}, not {asked}")
    return problems, rank, scaling


def _stacked(place: ModelWeight, roles: list[str], pairs: _Pairs) -> tuple[Tensor, Tensor]:
    """Return A (E R, in), expert by expert, and B (out, R E), the experts varying fastest."""
    num_experts, _, num_out = stacked_shape(place.module, str(place.parameter))
    owned = place.rows(place.roles) or {roles[0]: torch.arange(num_out)}
    blocks_a, blocks_b = [], []
    for expert in range(num_experts):
        own = [pairs[place.path, expert, role] for role in roles]
        blocks_a += [pair["lora_A"].float() for pair in own]
        rank = own[0]["lora_A"].shape[0]
        full = torch.zeros(num_out, rank * len(roles))
        for index, (role, pair) in enumerate(zip(roles, own, strict=True)):
            full[owned[role], index * rank : (index + 1) * rank] = pair["lora_B"].float()
        blocks_b.append(full)
    return torch.cat(blocks_a), torch.stack(blocks_b, dim=2).flatten(1)


def save_stacked(
    source: Path, folder: Path, model: nn.Module, origin: Provenance, scratch: Path
) -> None:
    """Write a PEFT adapter with stacked experts as an adapter folder.

    Args:
        model: The base's skeleton; the adapter is attached to it temporarily.
        scratch: A temporary folder.

    Raises:
        AdapterError: It does not fit the model.
    """
    fields = read_json(source / CONFIG)
    bare = scratch / "bare"  # without our notes: what they say of roles needs no values
    bare.mkdir()
    write_tensors(read_tensors(source / TENSORS), bare / TENSORS, {"format": "pt"})
    write_json(fields, bare / CONFIG)
    adapter = load_adapter(model, bare)
    targets = [
        f"{path}.{name}" if name else path
        for path, module in adapter.own.items()
        for name in module.stacked or ("",)
    ]
    method = adapter.method.model_copy(update={"targets": tuple(targets)})
    adapter.method = method
    written = written_fields(adapter)
    where = where_fields(method, origin, written["target_modules"])
    if "fan_in_fan_out" in where:
        where["fan_in_fan_out"] = bool(fields.get("fan_in_fan_out"))
    state = {name: tensor.float() for name, tensor in named_tensors(bare).items()}
    adapter.detach()
    adapter = attach(model, method)  # as it will be loaded: the targets mean the same places
    shapes = {
        f"{path}.{name}": shape
        for path, module in adapter.modules.items()
        for name, shape in module.state_shapes().items()
    }
    adapter.detach()
    if shapes != {name: tuple(tensor.shape) for name, tensor in state.items()}:
        raise AdapterError(
            f"{source} has tensors that its config does not describe",
            found=first_few(sorted(state.keys() ^ shapes.keys()), 20) or "of other shapes",
        )
    write_folder(folder, state, where | written, method, origin)
