"""LayerNorm tuning: the scales (and shifts) of normalisation layers are trained, nothing else
(Zhao et al., 2023, arXiv:2312.11420).
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

from torch import nn

from peftkit.errors import TargetError, did_you_mean
from peftkit.methods.modules_to_save import TunedModule
from peftkit.methods.protocol import ADAPTER_DTYPES, AdapterModule, Method, refuse_unknown
from peftkit.model.places import walk
from peftkit.model.targets import Site

ALL = "norms"


class LNTuning(Method):
    """Training of the normalisation layers alone."""

    peft_type: ClassVar[str] = "LN_TUNING"
    changes_bias: ClassVar[bool] = True
    foreign_fields: ClassVar[frozenset[str]] = frozenset(
        {"bias", "fan_in_fan_out", "layers_pattern", "layers_to_transform"}
    )

    type: Literal["ln_tuning"] = "ln_tuning"
    targets: tuple[str, ...] | str = ALL
    """norms: every normalisation layer; or the ends of module names, with a shell's wildcards."""

    def sites(self, model: nn.Module) -> list[Site]:
        norms = self.candidates(model)
        asked = [self.targets] if isinstance(self.targets, str) else list(self.targets)
        found = {name: [path for path in norms if has_name(path, name)] for name in asked}
        failed = [name for name, paths in found.items() if not paths]
        if failed or not asked:
            leaves = sorted({path.rpartition(".")[2] for path in norms})
            raise TargetError(
                f"no normalisation layer matches {', '.join(map(repr, failed)) or 'no target'} "
                f"in {type(model).__name__}.",
                found=f"There are: {', '.join(leaves)}. "
                + did_you_mean(failed[0] if failed else "", [ALL, *leaves])
                if leaves
                else "There is none in it with a scale that could be trained.",
                fix=f"Use '{ALL}' for all of them." if leaves else "Use another method: lora.",
            )
        chosen = {path for paths in found.values() for path in paths}
        return [Site(path=path, roles=()) for path in norms if path in chosen]

    def candidates(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        return {path: () for path, module, _ in walk(model) if is_norm(module)}

    def wrap(self, base: nn.Module, site: Site) -> TunedModule:
        names = [name for name, _ in base.named_parameters(recurse=False)]
        dtype = ADAPTER_DTYPES[self.dtype]
        return TunedModule(base, site, names=names, dtype=dtype, prefix="ln_tuning_layers.")

    def to_peft(self, modules: Mapping[str, AdapterModule]) -> dict[str, Any]:
        return {}

    @classmethod
    def from_peft(cls, fields: Mapping[str, Any]) -> Method:
        refuse_unknown(fields, _READ_FIELDS, cls.peft_type)
        return cls()


_READ_FIELDS: dict[str, Any] = dict.fromkeys(
    (
        "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path",
        "revision", "inference_mode", "runtime_config", "target_modules", "exclude_modules",
    ),
    ...,
)  # fmt: skip
"""Fields of PEFT's config that are acted on, or that say nothing about the tensors."""


def is_norm(module: nn.Module) -> bool:
    """Tell whether a module is a normalisation with a trainable scale: by its class's name."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 1 and "norm" in type(module).__name__.lower()


def has_name(path: str, target: str) -> bool:
    """Tell whether a target means the norm at a path."""
    return target == ALL or fnmatchcase(path, target) or fnmatchcase(path, f"*.{target}")
