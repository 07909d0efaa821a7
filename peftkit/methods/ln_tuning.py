"""LayerNorm tuning: the scales (and shifts) of normalisation layers are trained, nothing else
(Zhao et al., 2023, arXiv:2312.11420).
"""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

from torch import nn

from peftkit.errors import TargetError, did_you_mean
from peftkit.methods.modules_to_save import TunedModule
from peftkit.methods.peft_format import LAYERS, TARGETS, PeftFormat
from peftkit.methods.protocol import ADAPTER_DTYPES, Method
from peftkit.model.places import walk
from peftkit.model.targets import Site

ALL = "norms"


class LNTuning(Method):
    """Training of the normalisation layers alone."""

    changes_bias: ClassVar[bool] = True

    type: Literal["ln_tuning"] = "ln_tuning"
    targets: tuple[str, ...] | str = ALL
    """norms: every normalisation layer; or the ends of module names, with shell wildcards."""

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


class LNTuningFormat(PeftFormat[LNTuning]):
    """LayerNorm tuning in PEFT's files."""

    peft_type: ClassVar[str] = "LN_TUNING"
    method_class = LNTuning
    known_fields: ClassVar[Collection[str]] = TARGETS
    absent_fields: ClassVar[Collection[str]] = ("bias", "fan_in_fan_out", *LAYERS)


def is_norm(module: nn.Module) -> bool:
    """True for a normalisation layer with a trainable scale, judged by its class name."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 1 and "norm" in type(module).__name__.lower()


def has_name(path: str, target: str) -> bool:
    """True if a target names the norm at a path."""
    return target == ALL or fnmatchcase(path, target) or fnmatchcase(path, f"*.{target}")
