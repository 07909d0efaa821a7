"""LoRA in PEFT's files: fields of adapter_config.json, and tensors."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from peftkit.errors import AdapterError
from peftkit.files.strict_json import Json, JsonMap, shown
from peftkit.methods.base import Modules
from peftkit.methods.lora import LoRA
from peftkit.methods.lora_init import SUBTRACTED
from peftkit.methods.lora_linear import LoRALinear
from peftkit.methods.peft_format import LAYERS, TARGETS, PeftFormat

EXPERTS_SINCE = (0, 19)
"""The first version of PEFT with the layout of stacked experts that peftkit reads and writes."""
IGNORED = (
    "init_lora_weights", "loftq_config", "eva_config", "megatron_core", "qalora_group_size",
    "ensure_weight_tying",
)  # fmt: skip
"""Fields of PEFT's LoRA config that do not change the output of the trained adapter."""
SCALES = ("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern")


class LoRAFormat(PeftFormat[LoRA]):
    """LoRA on linear layers and on stacked experts."""

    peft_type = "LORA"
    method_class: type[LoRA] = LoRA
    known_fields: ClassVar[Collection[str]] = (
        *TARGETS, *LAYERS, *SCALES, *IGNORED, "fan_in_fan_out", "target_parameters",
    )  # fmt: skip

    def describes(self, fields: Mapping[str, object]) -> bool:
        return super().describes(fields) and not (fields.get("use_dora") or trains_biases(fields))

    def method(self, fields: JsonMap) -> LoRA:
        return self.method_class(**_settings(fields))

    def fields(self, method: LoRA, model: nn.Module, modules: Modules) -> Json:
        from peftkit.methods.experts import LoRAExperts

        ranks, scalings = {}, {}
        for path, module in modules.items():
            if isinstance(module, LoRAExperts):
                for name, stack in module.parts().items():
                    ranks[f"{path}.{name}"] = stack.lora_A.shape[1]
                    scalings[f"{path}.{name}"] = stack.scaling
                continue
            assert isinstance(module, LoRALinear)
            ranks[path] = module.state_shapes()["lora_A.weight"][0]
            scalings[path] = module.scaling
        # subtracted initial values are part of the tensors: on disk this is a plain LoRA
        init = "gaussian" if method.init == "gaussian" else True
        fields = {"lora_dropout": method.dropout, "init_lora_weights": init}
        if any(module.stacked for module in modules.values()):
            fields["peft_version"] = ".".join(map(str, (*EXPERTS_SINCE, 0)))
        return fields | peft_scales(ranks, scalings, rslora=method.rslora)

    def with_missing(
        self, fields: Mapping[str, object], modules: Modules, tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Add the initial values that PEFT's PiSSA and OLoRA subtract, computed from the base."""
        if fields.get("init_lora_weights") not in SUBTRACTED:
            return tensors
        complete = dict(tensors)
        for path, module in modules.items():
            names = f"{path}.lora_A.weight", f"{path}.lora_B.weight"
            if not isinstance(module, LoRALinear) or not complete.keys() >= {*names}:
                continue
            a, b = (complete[name] for name in names)
            start_a, start_b = module.subtracted_values(exact=True)
            complete[names[0]] = torch.cat([a, start_a.to(a)])
            complete[names[1]] = torch.cat([b, -start_b.to(b)], dim=1)
        return complete


def trains_biases(fields: Mapping[str, object]) -> bool:
    """Return whether a LoRA config trains biases too."""
    return fields.get("bias") not in (None, "none")


def _settings(fields: Mapping[str, object]) -> Json:
    check_layout(fields)
    init = fields.get("init_lora_weights", True)
    if str(init).startswith(("pissa_niter", "corda")):
        raise AdapterError(
            "the adapter's initial values cannot be restored",
            found=f"init_lora_weights: {shown(init)}; PEFT subtracted random or measured values "
            "from the base's weights, and the file does not hold them",
            fix="Save it with PEFT's path_initial_model_for_weight_conversion.",
        )
    if init not in ("pissa", "olora"):
        # other initial values of A and B are replaced by the file's tensors
        init = "gaussian" if init == "gaussian" else "default"
    return {
        "rank": fields.get("r", 8),
        "alpha": fields.get("lora_alpha", 8),
        "dropout": fields.get("lora_dropout", 0.0),
        "rslora": fields.get("use_rslora", False),
        "init": init,
        "rank_pattern": fields.get("rank_pattern") or {},
        "alpha_pattern": fields.get("alpha_pattern") or {},
    }


def check_layout(fields: JsonMap) -> None:
    """Refuse stacked experts in the layout of older PEFT, because shapes can be ambiguous.

    Raises:
        AdapterError: There are `target_parameters`, and the version is missing or before
            `EXPERTS_SINCE`.
    """
    version = re.match(r"(\d+)\.(\d+)", str(fields.get("peft_version")))
    parameters = fields.get("target_parameters") or ()  # linear weights have only one layout
    if any(not name.endswith(".weight") for name in parameters) and not (
        version and (int(version[1]), int(version[2])) >= EXPERTS_SINCE
    ):
        raise AdapterError(
            "the layout of the adapter's stacked experts is unknown",
            found=f"peft_version: {shown(fields.get('peft_version'))}; before 0.19 rows and "
            "columns were swapped",
            fix="Merge it with the version of PEFT that saved it.",
        )


def peft_scales(ranks: Mapping[str, int], scalings: Mapping[str, float], *, rslora: bool) -> Json:
    """Return the config fields for the ranks and alphas of modules.

    Args:
        ranks, scalings: Values by the path of a module or a stack of experts.
        rslora: Whether a scaling is alpha / sqrt(rank).
    """
    alphas = {
        path: _exact_integer(scaling * (math.sqrt(ranks[path]) if rslora else ranks[path]))
        for path, scaling in scalings.items()
    }
    rank, rank_pattern = _majority(ranks)
    alpha, alpha_pattern = _majority(alphas)
    patterns = {"rank_pattern": rank_pattern, "alpha_pattern": alpha_pattern, "use_rslora": rslora}
    used = {name: value for name, value in patterns.items() if value}
    return {"r": rank, "lora_alpha": alpha, **used}


def _exact_integer(value: float) -> int | float:
    nearest = round(value)
    return nearest if math.isclose(value, nearest, rel_tol=1e-9) else value


def _majority(values: Mapping[str, object]) -> tuple[object, Json]:
    """Return the most common value, and the exceptions by path."""
    common = Counter(values.values()).most_common(1)[0][0]
    return common, {path: value for path, value in values.items() if value != common}
