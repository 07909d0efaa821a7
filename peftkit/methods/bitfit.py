"""BitFit: the biases are trained, nothing else (Ben Zaken et al., 2021, arXiv:2106.10199).

PEFT has no such method, but a LoRA that trains biases beside it (`bias: all`). An adapter is saved
as one of rank 1 on one layer, whose A and B are zero, and the biases: PEFT loads that, and computes
the same. Such a file is read back here; one whose A and B are not zero is more than BitFit.

Shapes: in, out features of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from peftkit.errors import AdapterError, TargetError
from peftkit.methods.ln_tuning import has_name, is_norm
from peftkit.methods.modules_to_save import TunedModule
from peftkit.methods.protocol import (
    ADAPTER_DTYPES,
    AdapterModule,
    Method,
    Removable,
    refuse_unknown,
)
from peftkit.model.places import find_places, is_conv1d, is_linear, linear_shape, walk
from peftkit.model.targets import Site, resolve

ALL = "all"
_BIAS, _INNER = ".bias", ".base_layer.bias"


class Carrier(NamedTuple):
    """A linear layer of the model; it need not have a bias."""

    path: str
    in_features: int
    out_features: int
    transposed: bool


class TunedBias(TunedModule):
    """A frozen linear or normalisation layer with a trained bias.

    Attributes:
        carrier: The layer that has the empty LoRA in a file.
    """

    carrier: Carrier


class BitFit(Method):
    """Training of the biases of linear and normalisation layers."""

    peft_type: ClassVar[str] = "LORA"
    changes_bias: ClassVar[bool] = True

    type: Literal["bitfit"] = "bitfit"
    targets: tuple[str, ...] | str = ALL
    """all: every linear and normalisation layer that has a bias, but no head of words or classes;
    or roles, groups, norms, the ends of module names."""

    def sites(self, model: nn.Module) -> list[Site]:
        biased = self.candidates(model)
        asked = [self.targets] if isinstance(self.targets, str) else list(self.targets)
        chosen: set[str] = set()
        for target in asked:
            chosen |= _targeted(model, target, biased)
        if not chosen:
            raise TargetError(
                f"there is no bias to train in {type(model).__name__}",
                found=f"targets: {', '.join(asked) or 'none'}; {len(biased)} layers have a bias",
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

    def wrap(self, base: nn.Module, site: Site) -> TunedBias:
        return TunedBias(base, site, names=("bias",), dtype=ADAPTER_DTYPES[self.dtype])

    def connect(
        self, model: nn.Module, modules: Mapping[str, AdapterModule]
    ) -> Sequence[Removable]:
        linears = {p.path: p.module for p in find_places(model) if is_linear(p.module)}
        path = next((path for path in modules if path in linears), next(iter(linears)))
        for module in modules.values():
            assert isinstance(module, TunedBias)
            transposed = is_conv1d(linears[path])
            module.carrier = Carrier(path, *linear_shape(linears[path]), transposed)
        return []

    def to_peft(self, modules: Mapping[str, AdapterModule]) -> dict[str, Any]:
        carrier = _carrier(modules)
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
        self, state: Mapping[str, Tensor], modules: Mapping[str, AdapterModule]
    ) -> Mapping[str, Tensor]:
        path, num_in, num_out, _ = _carrier(modules)
        inner = {path + _BIAS: path + _INNER}
        return {inner.get(name, name): tensor for name, tensor in state.items()} | {
            f"{path}.lora_A.weight": torch.zeros(1, num_in),
            f"{path}.lora_B.weight": torch.zeros(num_out, 1),
        }

    def from_file(
        self, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        pairs = [name for name in tensors if name.endswith((".lora_A.weight", ".lora_B.weight"))]
        if any(tensors[name].count_nonzero() for name in pairs if ".lora_B." in name):
            raise AdapterError(
                "this LORA adapter uses features that peftkit does not read",
                found=f"bias: {fields.get('bias')}; biases are trained beside a LoRA",
                fix="Merge it with the tool that made it.",
            )
        plain = {
            name.removesuffix(_INNER) + _BIAS if name.endswith(_INNER) else name: tensor
            for name, tensor in tensors.items()
            if name not in pairs
        }
        # its targets are those of the empty LoRA
        return {**fields, "target_modules": None}, plain

    @classmethod
    def from_peft(cls, fields: Mapping[str, Any]) -> Method:
        refuse_unknown(fields, _READ_FIELDS, cls.peft_type)
        return cls()


def _carrier(modules: Mapping[str, AdapterModule]) -> Carrier:
    first = next(iter(modules.values()))
    assert isinstance(first, TunedBias)
    return first.carrier


def _targeted(model: nn.Module, target: str, biased: Mapping[str, Any]) -> set[str]:
    """Return the paths, among those that have a bias, that a target means.

    Raises:
        TargetError: It means nothing, or a part of a fused layer.
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
                f"the bias of {site.path} is trained as a whole",
                found=f"'{target}' is a part of this fused layer",
                fix="Name the layer by its module name, or use targets: all.",
            )
    return norms | (biased.keys() & {site.path for site in sites})


_READ_FIELDS: dict[str, Any] = dict.fromkeys(
    (
        "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path",
        "revision", "inference_mode", "runtime_config", "r", "lora_alpha", "lora_dropout",
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
        "fan_in_fan_out", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights",
        "loftq_config", "eva_config", "megatron_core", "qalora_group_size",
        "ensure_weight_tying", "bias",
    ),
    ...,
)  # fmt: skip
"""Fields of PEFT's LoRA config that say nothing about an empty one, and that of the biases."""
