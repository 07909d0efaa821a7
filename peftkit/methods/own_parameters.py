"""Methods that train copies of the base's own parameters.

LayerNorm tuning: the scales (and shifts) of normalisation layers (Zhao et al., 2023,
arXiv:2312.11420). BitFit: the biases (Ben Zaken et al., 2021, arXiv:2106.10199).

PEFT has no method for BitFit, but its LoRA can train biases too (`bias: all`). An adapter is saved
as a rank-1 LoRA on one layer, with A and B zero, plus the biases: PEFT loads it and computes the
same. Only such files are read; a file with nonzero A and B is more than BitFit.

Shapes: in, out features of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from peftkit.errors import AdapterError, TargetError, did_you_mean
from peftkit.files.strict_json import Json, JsonMap
from peftkit.methods.base import ADAPTER_DTYPES, Method, Modules
from peftkit.methods.lora_format import IGNORED, SCALES, trains_biases
from peftkit.methods.modules_to_save import TunedModule
from peftkit.methods.peft_format import LAYERS, TARGETS, PeftFormat
from peftkit.model.places import find_places, is_conv1d, is_linear, linear_shape, walk
from peftkit.model.roles import matches
from peftkit.model.targets import Site, resolve

NORMS = "norms"


class LNTuning(Method):
    """Training of normalisation layers only."""

    type: Literal["ln_tuning"] = "ln_tuning"
    targets: tuple[str, ...] | str = NORMS
    """norms: every normalisation layer; or endings of module names, with shell wildcards."""

    def sites(self, model: nn.Module) -> list[Site]:
        norms = self.candidates(model)
        paths_of = {
            name: [path for path in norms if has_name(path, name)] for name in self.target_names
        }
        failed = [name for name, paths in paths_of.items() if not paths]
        if failed or not paths_of:
            leaves = sorted({path.rpartition(".")[2] for path in norms})
            raise TargetError(
                f"no normalisation layer matches {', '.join(map(repr, failed)) or 'no target'} "
                f"in {type(model).__name__}.",
                found=f"There are: {', '.join(leaves)}. "
                + did_you_mean(failed[0] if failed else "", [NORMS, *leaves])
                if leaves
                else "No normalisation layer of the model has a trainable scale.",
                fix=f"Use '{NORMS}' for all of them." if leaves else "Use another method: lora.",
            )
        chosen = {path for paths in paths_of.values() for path in paths}
        return [Site(path=path, roles=()) for path in norms if path in chosen]

    def candidates(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        return {path: () for path, module, _ in walk(model) if is_norm(module)}

    def wrap(self, base: nn.Module, site: Site) -> TunedModule:
        names = [name for name, _ in base.named_parameters(recurse=False)]
        dtype = ADAPTER_DTYPES[self.dtype]
        return TunedModule(base, site, names=names, dtype=dtype, prefix="ln_tuning_layers.")


class LNTuningFormat(PeftFormat[LNTuning]):
    """LayerNorm tuning in PEFT's files."""

    peft_type = "LN_TUNING"
    method_class = LNTuning
    known_fields = TARGETS
    absent_fields = ("bias", "fan_in_fan_out", *LAYERS)


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalisation layer with a scale, by its class name."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 1 and "norm" in type(module).__name__.lower()


def has_name(path: str, target: str) -> bool:
    """Return whether a target matches the norm at a path."""
    return target == NORMS or matches(path, target)


ALL = "all"
_BIAS, _INNER = ".bias", ".base_layer.bias"


class BitFit(Method):
    """Training of the biases of linear and normalisation layers."""

    takes_token_rows: ClassVar[bool] = True

    type: Literal["bitfit"] = "bitfit"
    targets: tuple[str, ...] | str = ALL
    """all: the bias of every linear and normalisation layer, except output heads; or roles, groups,
    norms, or endings of module names."""

    def sites(self, model: nn.Module) -> list[Site]:
        biased = self.candidates(model)
        chosen: set[str] = set()
        for target in self.target_names:
            chosen |= _targeted(model, target, biased)
        if not chosen:
            raise TargetError(
                f"there is no bias to train in {type(model).__name__}",
                found=f"targets: {', '.join(self.target_names) or 'none'}; "
                f"{len(biased)} layers have a bias",
                fix="Use another method: lora, or ln_tuning for the scales of the norms.",
            )
        return [Site(path=path, roles=()) for path in biased if path in chosen]

    def candidates(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        linears = {place.path for place in find_places(model) if is_linear(place.module)}
        return {
            path: ()
            for path, module, _ in walk(model)
            if (path in linears or is_norm(module)) and module._parameters.get("bias") is not None
        }

    def wrap(self, base: nn.Module, site: Site) -> TunedModule:
        return TunedModule(base, site, names=("bias",), dtype=ADAPTER_DTYPES[self.dtype])


def _targeted(model: nn.Module, target: str, biased: Mapping[str, object]) -> set[str]:
    """Return the layers with a bias that match a target.

    Raises:
        TargetError: The target matches nothing, or one role of a fused layer.
    """
    if target == ALL:
        heads = {place.path for place in find_places(model) if place.roles == ("head",)}
        return biased.keys() - heads
    norms = {p for p in biased if is_norm(model.get_submodule(p)) and has_name(p, target)}
    try:
        sites = resolve(model, target)
    except TargetError:
        if norms:
            return norms
        raise
    for site in sites:
        if site.rows is not None and site.path in biased:
            raise TargetError(
                f"the bias of {site.path} can only be trained as a whole",
                found=f"'{target}' is one role of this fused layer.",
                fix="Target the layer by its module name, or use targets: all.",
            )
    return norms | (biased.keys() & {site.path for site in sites})


class Carrier(NamedTuple):
    """The linear layer that carries the empty LoRA in the file; its bias is optional."""

    path: str
    in_features: int
    out_features: int
    transposed: bool


class BitFitFormat(PeftFormat[BitFit]):
    """BitFit as a LoRA of zeros on one layer, with `bias: all`."""

    peft_type = "LORA"
    method_class = BitFit
    known_fields = (
        *TARGETS, *LAYERS, *SCALES, *IGNORED, "fan_in_fan_out", "bias",
    )  # fmt: skip

    def describes(self, fields: Mapping[str, object]) -> bool:
        return super().describes(fields) and trains_biases(fields)

    def fields(self, method: BitFit, model: nn.Module, modules: Modules) -> Json:
        carrier = _carrier(model, modules)
        return {
            "r": 1,
            "lora_alpha": 1,
            "lora_dropout": 0.0,
            "init_lora_weights": True,
            "fan_in_fan_out": carrier.transposed,
            "bias": "all",
            "target_modules": [carrier.path],
        }

    def to_file(
        self, state: Mapping[str, Tensor], model: nn.Module, modules: Modules
    ) -> Mapping[str, Tensor]:
        path, num_in, num_out, _ = _carrier(model, modules)
        inner = {path + _BIAS: path + _INNER}
        return {inner.get(name, name): tensor for name, tensor in state.items()} | {
            f"{path}.lora_A.weight": torch.zeros(1, num_in),
            f"{path}.lora_B.weight": torch.zeros(num_out, 1),
        }

    def from_file(
        self, fields: Mapping[str, object], tensors: Mapping[str, Tensor]
    ) -> tuple[JsonMap, Mapping[str, Tensor]]:
        pairs = [name for name in tensors if name.endswith((".lora_A.weight", ".lora_B.weight"))]
        if any(tensors[name].count_nonzero() for name in pairs if ".lora_B." in name):
            raise AdapterError(
                "this LORA adapter uses features that peftkit does not read",
                found=f"bias: {fields.get('bias')}; biases are trained too, next to a LoRA",
                fix="Merge it with the tool that wrote it.",
            )
        plain = {
            name.removesuffix(_INNER) + _BIAS if name.endswith(_INNER) else name: tensor
            for name, tensor in tensors.items()
            if name not in pairs
        }
        # its targets belong to the empty LoRA
        return {**fields, "target_modules": None}, plain


def _carrier(model: nn.Module, modules: Modules) -> Carrier:
    """Return the carrier: the first adapted linear layer, else the model's first."""
    linears = {p.path: p.module for p in find_places(model) if is_linear(p.module)}
    path = next((path for path in modules if path in linears), next(iter(linears)))
    return Carrier(path, *linear_shape(linears[path]), is_conv1d(linears[path]))
