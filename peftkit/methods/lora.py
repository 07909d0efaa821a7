"""LoRA: y = W x + (alpha / r) B A x  (Hu et al., 2021, arXiv:2106.09685).

Also rsLoRA (alpha / sqrt(r); Kalajdzievski, 2023, arXiv:2312.03732), and other initial values of A
and B. PiSSA and OLoRA subtract their initial B0 A0 from the weight. Here the weight does not change
and B A - B0 A0 is added: the same function, exactly zero at the start, also over a 4-bit base, and
on disk an ordinary LoRA of rank 2 r. The values of EVA and LoftQ (data_init.py) are computed before
attach() and passed to it. The layer is in lora_linear.py.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from peftkit.errors import AdapterError, ConfigError, TargetError
from peftkit.files.safe_regex import is_pattern, is_simple
from peftkit.files.strict_json import shown
from peftkit.methods.base import (
    ADAPTER_DTYPES,
    LAYERS,
    TARGETS,
    AdapterModule,
    Method,
    PeftFormat,
)
from peftkit.methods.lora_linear import DATA_INITS, SUBTRACTED, Init, LoRALinear
from peftkit.model.places import is_linear, linear_shape, stacked_shape, unwrap_adapter
from peftkit.model.targets import Site
from peftkit.quant.layers import is_quantized

EXPERTS_SINCE = (0, 19)
"""The version of PEFT whose layout of stacked experts is read and written here."""
IGNORED = (
    "init_lora_weights", "loftq_config", "eva_config", "megatron_core", "qalora_group_size",
    "ensure_weight_tying",
)  # fmt: skip
"""Fields of PEFT's LoRA config that say how A and B were made, or nothing about them."""
SCALES = ("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern")


class LoRA(Method):
    """Low-rank adaptation of linear layers and of stacked experts."""

    wraps_linear_layers: ClassVar[bool] = True
    takes_token_rows: ClassVar[bool] = True
    files: ClassVar[str] = "PEFT, vLLM, GGUF, MLX"
    sits_on_stacks: ClassVar[bool] = True
    module_class: ClassVar[Callable[..., LoRALinear]] = LoRALinear

    type: Literal["lora"] = "lora"
    rank: int = Field(default=16, ge=1)
    """Rank r of the update."""
    alpha: int | float = Field(default=32, gt=0)
    """The update is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on the input of A."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead."""
    init: Init = "default"
    """Initialisation of A and B: default (Kaiming A, zero B), gaussian; pissa, olora (from the
    weight); eva (from activations on the training data); loftq (from the quantisation error)."""
    eva_rho: float = Field(default=2.0, ge=1.0)
    """With init eva: ranks go where they explain most variance, up to this multiple of `rank`."""
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Ranks of some layers, by role or end of module name: {v: 8, "layers.0.mlp.up_proj": 4}."""
    alpha_pattern: dict[str, Annotated[int | float, Field(gt=0)]] = Field(default_factory=dict)
    """Alphas of some layers, likewise."""

    @property
    def initializer(self) -> str:
        return DATA_INITS.get(self.init, "")

    @property
    def reads_rows(self) -> str:
        return "method.init: eva" if self.init == "eva" else ""

    def check_quantize(self, quantize: str) -> None:
        if self.init == "loftq" and quantize == "none":
            raise ConfigError(
                "method.init: loftq makes up for what quantising the base loses.",
                found="base.quantize is none.",
                fix="Set base.quantize to nf4, fp4 or int8, or method.init to another.",
            )

    @property
    def fresh_changes(self) -> str:
        return "it makes up for what quantising lost" if self.init == "loftq" else ""

    def sites(self, model: nn.Module) -> list[Site]:
        sites = super().sites(model)
        fitting = [site for site in sites if not self._is_left_out(model, site)]
        return fitting or sites  # where all are too small, the first one says so

    def left_out(self, model: nn.Module) -> list[Site]:
        return [site for site in super().sites(model) if self._is_left_out(model, site)]

    def _is_left_out(self, model: nn.Module, site: Site) -> bool:
        """Return whether a weight is smaller than its rank and only a group targets it."""
        module = unwrap_adapter(model.get_submodule(site.path))
        if not site.by_group or not (site.parameter or is_linear(module)):
            return False
        shape = (
            stacked_shape(module, site.parameter)[1:] if site.parameter else linear_shape(module)
        )
        return self.scale_of(site)[0] > min(shape)

    def wrap(self, base: nn.Module, site: Site) -> LoRALinear:
        rank, scaling = self.scale_of(site)
        _check_rank(rank, site.path, linear_shape(base))
        if self.init == "loftq" and not is_quantized(base):
            raise TargetError(
                f"init 'loftq' makes up for what quantising {site.path} lost",
                found="this layer is not quantised",
                fix="Load the base quantised, as in training; or leave this layer out.",
            )
        if site.rows and self.init in SUBTRACTED:
            raise TargetError(
                f"init '{self.init}' is not possible for a part of the fused layer {site.path}",
                found=f"roles {', '.join(site.roles)} of it",
                fix="Use init 'default', or target the whole layer by its module name.",
            )
        return self.module_class(
            base,
            site,
            rank=rank,
            scaling=scaling,
            dropout=self.dropout,
            init=self.init,
            dtype=ADAPTER_DTYPES[self.dtype],
        )

    def wrap_experts(self, experts: nn.Module, sites: Sequence[Site]) -> AdapterModule:
        from peftkit.methods.experts import LoRAExperts, LoRAStack

        stacks = []
        for site in sites:
            assert site.parameter is not None
            path = f"{site.path}.{site.parameter}"
            if getattr(experts, site.parameter).ndim != 3:
                raise TargetError(
                    f"{self.type} cannot sit on {path}",
                    found=f"{type(experts).__name__} is neither a linear layer nor a stack of them",
                    fix="Leave it out of the targets.",
                )
            if self.dropout or self.init in (*SUBTRACTED, *DATA_INITS):
                raise self._not_on_experts(path)
            rank, scaling = self.scale_of(site)
            _check_rank(rank, path, stacked_shape(experts, site.parameter)[1:])
            stack = LoRAStack(
                experts,
                site,
                rank=rank,
                scaling=scaling,
                dtype=ADAPTER_DTYPES[self.dtype],
                init=self.init,
            )
            stacks.append(stack)
        return LoRAExperts(experts, sites, stacks)

    def linear_sites(self, model: nn.Module) -> list[Site]:
        """Return the sites, for an initialisation that needs linear layers.

        Raises:
            TargetError: A site is a stack of experts or smaller than its rank, or a target matches
                nothing.
        """
        sites = self.for_model(model).sites(model)
        for site in sites:
            if site.parameter is not None:
                raise self._not_on_experts(f"{site.path}.{site.parameter}")
            shape = linear_shape(model.get_submodule(site.path))
            _check_rank(self.scale_of(site)[0], site.path, shape)
        return sites

    def _not_on_experts(self, path: str) -> TargetError:
        return TargetError(
            f"{self.type} on the stacked experts {path} supports neither dropout nor this init",
            found=f"dropout {self.dropout}, init '{self.init}'",
            fix="Use dropout 0 and init 'default', or leave the experts out.",
        )

    def scale_of(self, site: Site) -> tuple[int, float]:
        """Return the rank and the scaling of a site."""
        rank = self._by_pattern(site, self.rank_pattern, self.rank)
        alpha = self._by_pattern(site, self.alpha_pattern, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.rslora else rank)

    @staticmethod
    def _by_pattern(site: Site, pattern: Mapping[str, Any], default: Any) -> Any:
        """Return a site's value in a pattern: by role, then by name with PEFT's rule."""
        values = {pattern[role] for role in site.roles if role in pattern}
        if len(values) > 1 or (values and any(role not in pattern for role in site.roles)):
            raise TargetError(
                f"{site.path} holds {', '.join(site.roles)} in one fused layer",
                found="the patterns give them different ranks or alphas",
                fix="Give them the same, or target the layer by its module name.",
            )
        if values:
            return values.pop()
        paths = [f"{site.path}.{site.parameter or 'weight'}"]
        paths += [site.path] if site.parameter is None else []
        for name, value in pattern.items():
            if any(re.match(rf"(.*\.)?({name})$", path) for path in paths):
                return value
        return default

    @model_validator(mode="after")
    def _check_rho(self) -> LoRA:
        if self.init != "eva" and self.eva_rho != type(self).model_fields["eva_rho"].default:
            raise ConfigError(f"eva_rho: {self.eva_rho} is for init 'eva', not '{self.init}'.")
        return self

    @model_validator(mode="after")
    def _check_patterns(self) -> LoRA:
        for name in (*self.rank_pattern, *self.alpha_pattern):
            if not is_simple(name) or not is_pattern(name):
                raise ConfigError(
                    f"cannot use {shown(name)} in rank_pattern or alpha_pattern",
                    found="it is not a regular expression that can be matched in bounded time",
                    fix="Name roles, or the ends of module names.",
                )
        return self


def _check_rank(rank: int, path: str, shape: tuple[int, ...]) -> None:
    if rank > min(shape):
        raise TargetError(
            f"rank {rank} is larger than the matrix of {path}",
            found=f"its shape is {' x '.join(map(str, shape))}",
            fix=f"Use a rank of at most {min(shape)}, or leave this layer out of the targets.",
        )


class LoRAFormat(PeftFormat[LoRA]):
    """LoRA on linear layers and on stacked experts."""

    peft_type: ClassVar[str] = "LORA"
    method_class: type[LoRA] = LoRA
    known_fields: ClassVar[Collection[str]] = (
        *TARGETS, *LAYERS, *SCALES, *IGNORED, "fan_in_fan_out", "target_parameters",
    )  # fmt: skip

    def describes(self, fields: Mapping[str, Any]) -> bool:
        return super().describes(fields) and not (fields.get("use_dora") or trains_biases(fields))

    def method(self, fields: Mapping[str, Any]) -> LoRA:
        return self.method_class(**_settings(fields))

    def fields(
        self, method: LoRA, model: nn.Module, modules: Mapping[str, AdapterModule]
    ) -> dict[str, Any]:
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
        # a subtracted start is part of the tensors, so what is on disk is a plain LoRA
        init = "gaussian" if method.init == "gaussian" else True
        fields = {"lora_dropout": method.dropout, "init_lora_weights": init}
        if any(module.stacked for module in modules.values()):
            fields["peft_version"] = ".".join(map(str, (*EXPERTS_SINCE, 0)))
        return fields | peft_scales(ranks, scalings, rslora=method.rslora)

    def with_missing(
        self,
        fields: Mapping[str, Any],
        modules: Mapping[str, AdapterModule],
        tensors: Mapping[str, Tensor],
    ) -> Mapping[str, Tensor]:
        """Add what PEFT's PiSSA and OLoRA subtract: they make it from the base's weights."""
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


def trains_biases(fields: Mapping[str, Any]) -> bool:
    """Return whether a LoRA config trains biases too."""
    return fields.get("bias") not in (None, "none")


def _settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    check_layout(fields)
    init = fields.get("init_lora_weights", True)
    if str(init).startswith(("pissa_niter", "corda")):
        raise AdapterError(
            "the adapter's start cannot be made again",
            found=f"init_lora_weights: {shown(init)}; PEFT took a random or measured start out of "
            "the base's weights, and the file does not hold it",
            fix="Save it with PEFT's path_initial_model_for_weight_conversion.",
        )
    if init not in ("pissa", "olora"):
        # every other start is a value of A and B that the file replaces
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


def check_layout(fields: Mapping[str, Any]) -> None:
    """Refuse stacked experts in the layout of older PEFT, which shapes may not tell apart.

    Raises:
        AdapterError: `target_parameters`, and a version before `EXPERTS_SINCE` or none.
    """
    version = re.match(r"(\d+)\.(\d+)", str(fields.get("peft_version")))
    named = fields.get("target_parameters") or ()  # a linear layer's weight has one layout
    if any(not name.endswith(".weight") for name in named) and not (
        version and (int(version[1]), int(version[2])) >= EXPERTS_SINCE
    ):
        raise AdapterError(
            "cannot tell the layout of the adapter's stacked experts",
            found=f"peft_version: {shown(fields.get('peft_version'))}; before 0.19 rows and "
            "columns were swapped, which the file does not say",
            fix="Merge it with the PEFT that it was made with.",
        )


def peft_scales(
    ranks: Mapping[str, int], scalings: Mapping[str, float], *, rslora: bool
) -> dict[str, Any]:
    """Return the config fields for the ranks and alphas of modules.

    Args:
        ranks, scalings: By the path of a module or of a stack of experts.
        rslora: Whether a scaling is alpha / sqrt(rank).
    """
    alphas = {
        path: _integer_if_whole(scaling * (math.sqrt(ranks[path]) if rslora else ranks[path]))
        for path, scaling in scalings.items()
    }
    rank, rank_pattern = _majority(ranks)
    alpha, alpha_pattern = _majority(alphas)
    patterns = {"rank_pattern": rank_pattern, "alpha_pattern": alpha_pattern, "use_rslora": rslora}
    used = {name: value for name, value in patterns.items() if value}
    return {"r": rank, "lora_alpha": alpha, **used}


def _integer_if_whole(value: float) -> int | float:
    nearest = round(value)
    return nearest if math.isclose(value, nearest, rel_tol=1e-9) else value


def _majority(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the commonest value, and the exceptions by path."""
    common = Counter(values.values()).most_common(1)[0][0]
    return common, {path: value for path, value in values.items() if value != common}
