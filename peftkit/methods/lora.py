"""LoRA: y = W x + (alpha / r) B A x  (Hu et al., 2021, arXiv:2106.09685).

Also rsLoRA (alpha / sqrt(r); Kalajdzievski, 2023, arXiv:2312.03732), and other initial values of A
and B. PiSSA and OLoRA subtract their initial B0 A0 from the weight. Here the weight does not change
and B A - B0 A0 is added: the same function, exactly zero at the start, also for a 4-bit base, and
on disk an ordinary LoRA of rank 2 r. The values of EVA and LoftQ (data_init.py) are computed before
attach() and passed to it. The layer is in lora_linear.py, the file format in lora_format.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import nn

from peftkit.errors import ConfigError, TargetError
from peftkit.files.safe_regex import is_pattern, is_simple
from peftkit.files.strict_json import shown
from peftkit.methods.base import ADAPTER_DTYPES, AdapterModule, Method
from peftkit.methods.lora_init import DATA_INITS, SUBTRACTED, Init, Options
from peftkit.methods.lora_linear import LoRALinear
from peftkit.model.places import is_linear, linear_shape, stacked_shape, unwrap_adapter
from peftkit.model.targets import Site
from peftkit.quant.weights import is_quantized


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

    constant_in: int | None = Field(default=None, ge=2)
    """Make A constant in blocks of this many columns (QA-LoRA, arXiv:2309.14717): with 32, a merge
    into a GGUF file in Q4_1 or Q5_1 keeps the update. The files are those of an ordinary LoRA."""

    @property
    def initializer(self) -> str:
        return DATA_INITS.get(self.init, "")

    @property
    def reads_rows(self) -> str:
        return "method.init: eva" if self.init == "eva" else ""

    def check_quantize(self, quantize: str) -> None:
        if self.init == "loftq" and quantize == "none":
            raise ConfigError(
                "method.init: loftq compensates the quantisation error of the base.",
                found="base.quantize is none.",
                fix="Set base.quantize to nf4, fp4 or int8, or choose another method.init.",
            )

    @property
    def fresh_changes(self) -> str:
        return "it compensates the quantisation error" if self.init == "loftq" else ""

    def sites(self, model: nn.Module) -> list[Site]:
        sites = super().sites(model)
        fitting = [site for site in sites if not self._is_left_out(model, site)]
        return fitting or sites  # if all are too small, `wrap` raises for the first one

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
        options, shape = self._options(site), linear_shape(base)
        _check_rank(options.rank, site.path, shape)
        if self.constant_in:
            self._check_blocks(self.constant_in, shape[0], site.path)
        if self.init == "loftq" and not is_quantized(base):
            raise TargetError(
                f"init 'loftq' compensates the quantisation error of {site.path}",
                found="this layer is not quantised",
                fix="Quantise the base as in training, or remove this layer from the targets.",
            )
        if site.rows and self.init in SUBTRACTED:
            raise TargetError(
                f"init '{self.init}' is not possible for some roles of the fused layer {site.path}",
                found=f"targeted roles: {', '.join(site.roles)}",
                fix="Use init 'default', or target the whole layer by its module name.",
            )
        return self.module_class(base, site, options)

    def _options(self, site: Site) -> Options:
        dtype, constant_in = ADAPTER_DTYPES[self.dtype], self.constant_in or 1
        return Options(*self.scale_of(site), self.init, dtype, self.dropout, constant_in)

    def _check_blocks(self, constant_in: int, num_columns: int, path: str) -> None:
        """Check that A of a layer can be constant in blocks of its columns.

        B A then adds one number to all weights of a block. Types with a minimum per block (Q4_1,
        Q5_1) change the minimum and keep the codes, so a merge keeps the update.
        """
        if self.type != "lora" or self.init not in ("default", "gaussian"):
            raise TargetError(
                f"constant_in {constant_in} is not possible for {path}",
                found=f"method.type is '{self.type}', method.init '{self.init}'",
                fix="Use type 'lora' with init 'default' or 'gaussian', or remove constant_in.",
            )
        if num_columns % constant_in:
            raise TargetError(
                f"constant_in {constant_in} does not divide the columns of {path}",
                found=f"its weight has {num_columns} columns",
                fix="Remove this layer from the targets, or choose a divisor.",
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
                    fix="Remove it from the targets.",
                )
            if self.dropout or self.constant_in or self.init in (*SUBTRACTED, *DATA_INITS):
                raise self._not_on_experts(path)
            options = self._options(site)
            _check_rank(options.rank, path, stacked_shape(experts, site.parameter)[1:])
            stacks.append(LoRAStack(experts, site, options))
        return LoRAExperts(experts, sites, stacks)

    def linear_sites(self, model: nn.Module) -> list[Site]:
        """Return the sites for an initialisation that requires linear layers.

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
            f"{self.type} on the stacked experts {path} supports neither dropout nor this init nor "
            "constant_in",
            found=f"dropout {self.dropout}, init '{self.init}', constant_in {self.constant_in}",
            fix="Use dropout 0 and init 'default', or remove the experts from the targets.",
        )

    def scale_of(self, site: Site) -> tuple[int, float]:
        """Return the rank and the scaling of a site."""
        rank = self._by_pattern(site, self.rank_pattern, self.rank)
        alpha = self._by_pattern(site, self.alpha_pattern, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.rslora else rank)

    @staticmethod
    def _by_pattern(site: Site, pattern: Mapping[str, object], default: object) -> Any:
        """Return a site's value in a pattern: by role, then by name (PEFT's rule)."""
        values = {pattern[role] for role in site.roles if role in pattern}
        if len(values) > 1 or (values and any(role not in pattern for role in site.roles)):
            raise TargetError(
                f"{site.path} holds {', '.join(site.roles)} in one fused layer",
                found="the patterns give them different ranks or alphas",
                fix="Give all of them the same values, or target the layer by its module name.",
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
            raise ConfigError(f"eva_rho: {self.eva_rho} requires init 'eva', not '{self.init}'.")
        return self

    @model_validator(mode="after")
    def _check_patterns(self) -> LoRA:
        for name in (*self.rank_pattern, *self.alpha_pattern):
            if not is_simple(name) or not is_pattern(name):
                raise ConfigError(
                    f"cannot use {shown(name)} in rank_pattern or alpha_pattern",
                    found="it is not a regular expression that matches in bounded time",
                    fix="Name roles, or the ends of module names.",
                )
        return self


def _check_rank(rank: int, path: str, shape: tuple[int, ...]) -> None:
    if rank > min(shape):
        raise TargetError(
            f"rank {rank} is larger than the matrix of {path}",
            found=f"its shape is {' x '.join(map(str, shape))}",
            fix=f"Use a rank of at most {min(shape)}, or remove this layer from the targets.",
        )
