"""LoRA: y = W x + (alpha / r) B A x  (Hu et al., 2021, arXiv:2106.09685).

Also rsLoRA (alpha / sqrt(r); Kalajdzievski, 2023, arXiv:2312.03732) and two initialisations that
start from the weight itself: PiSSA (Meng et al., 2024, arXiv:2404.02948) and OLoRA (Buyukakyuz,
2024, arXiv:2406.01775). These two subtract their starting point B0 A0 from the weight; here the
weight stays as it is and the difference B A - B0 A0 is what is added, which is the same function,
is exactly zero at the start, works over a 4-bit base, and is an ordinary LoRA of rank 2 r on disk.

Shapes: r rank, R = columns of the full B: r, times the roles of a fused layer, times two where a
start is subtracted. `...` is any leading shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from peftkit.anatomy import linear_shape, stacked_shape
from peftkit.errors import AdapterError, ConfigError, TargetError
from peftkit.kernels.lora import add_lora, low_rank
from peftkit.methods.experts import EXPERTS_SINCE, LoRAExperts, LoRAStack, check_layout
from peftkit.methods.protocol import ADAPTER_DTYPES, AdapterModule, Method, refuse_unknown
from peftkit.methods.scales import peft_scales
from peftkit.patterns import is_pattern, is_simple
from peftkit.quant import weight_of
from peftkit.strict_json import shown
from peftkit.targets import Site

Init = Literal["default", "gaussian", "pissa", "olora"]


class LoRALinear(AdapterModule):
    """A frozen linear layer plus a trainable low-rank update.

    On a fused projection the update reaches only the rows of the roles asked for: each role has its
    own rank-r pair, and the full B is zero outside them.

    Attributes:
        lora_A: (num_roles * r, in).
        lora_B: (num_rows, r): the output rows that are adapted, all of them unless fused.
        start_A, start_B: (r, in), (out, r): the subtracted start of PiSSA and OLoRA, or None.
    """

    start_A: Tensor | None
    start_B: Tensor | None
    rows: Tensor | None
    columns: Tensor | None

    def __init__(
        self,
        base: nn.Module,
        site: Site,
        *,
        rank: int,
        scaling: float,
        dropout: float,
        init: Init,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(base, site)
        self.in_features, self.out_features = linear_shape(base)
        self.rank, self.scaling, self.init = rank, scaling, init
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        device = next((t.device for t in (*base.parameters(), *base.buffers())), None)
        num_roles = len(site.rows) if site.rows else 1
        rows = torch.cat(list(site.rows.values())).to(device) if site.rows else None
        num_rows = self.out_features if rows is None else len(rows)
        self.lora_A = nn.Parameter(
            torch.zeros(num_roles * rank, self.in_features, dtype=dtype, device=device)
        )
        self.lora_B = nn.Parameter(torch.zeros(num_rows, rank, dtype=dtype, device=device))
        self.register_buffer("rows", rows, persistent=False)  # (num_rows,) into the outputs
        self.register_buffer("columns", self._columns(), persistent=False)  # (num_rows, r) into R
        subtracts = init in ("pissa", "olora")
        for name, shape in (
            ("start_A", (rank, self.in_features)),
            ("start_B", (self.out_features, rank)),
        ):
            start = torch.zeros(shape, dtype=dtype, device=device) if subtracts else None
            self.register_buffer(name, start, persistent=False)

    def _columns(self) -> Tensor | None:
        if not self.site.rows:
            return None
        blocks = [
            (torch.arange(self.rank) + role * self.rank).expand(len(rows), -1)
            for role, rows in enumerate(self.site.rows.values())
        ]
        return torch.cat(blocks).to(self.lora_A.device)

    def full_a(self) -> Tensor:
        """Return A as it is applied and saved: (R, in)."""
        return self.lora_A if self.start_A is None else torch.cat([self.lora_A, self.start_A])

    def full_b(self) -> Tensor:
        """Return B as it is applied and saved: (out, R), zero rows where nothing is adapted."""
        if self.start_B is not None:
            return torch.cat([self.lora_B, -self.start_B], dim=1)
        if self.rows is None or self.columns is None:
            return self.lora_B
        full = self.lora_B.new_zeros(self.out_features, self.lora_A.shape[0])
        return full.index_put((self.rows[:, None], self.columns), self.lora_B)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = self.base(x, *args, **kwargs)
        if not self.enabled:
            return out
        x = self.dropout(x)
        if self.start_A is None or self.start_B is None:
            return add_lora(out, x, self.full_a(), self.full_b(), self.scaling)
        # the same products in the same order on both sides, so that their difference starts at zero
        moved = low_rank(x, self.lora_A, self.lora_B) - low_rank(x, self.start_A, self.start_B)
        return out + self.scaling * moved

    def reset(self, generator: torch.Generator) -> None:
        with torch.no_grad():
            self.lora_B.zero_()
            if self.init in ("pissa", "olora"):
                self._start_from_weight()
            elif self.init == "gaussian":
                self.lora_A.copy_(self._draw(torch.Tensor.normal_, generator, std=1 / self.rank))
            else:  # kaiming_uniform_(a=sqrt(5)), as nn.Linear itself
                bound = 1 / math.sqrt(self.in_features)
                self.lora_A.copy_(self._draw(torch.Tensor.uniform_, generator, -bound, bound))

    def _draw(
        self, sample: Any, generator: torch.Generator, *args: float, **kwargs: float
    ) -> Tensor:
        # drawn on the CPU in float32, so that a seed means the same adapter on every device
        return sample(torch.empty(self.lora_A.shape), *args, **kwargs, generator=generator)

    def _start_from_weight(self) -> None:
        weight = weight_of(self.base).float()
        if self.init == "pissa":
            u, s, vh = torch.linalg.svd(weight, full_matrices=False)
            root = (s[: self.rank] / self.scaling).sqrt()
            a, b = root[:, None] * vh[: self.rank], u[:, : self.rank] * root
        else:
            q, upper = torch.linalg.qr(weight)
            a, b = upper[: self.rank], q[:, : self.rank]
        assert self.start_A is not None
        assert self.start_B is not None
        for trained, start, value in (
            (self.lora_A, self.start_A, a),
            (self.lora_B, self.start_B, b),
        ):
            trained.copy_(value)
            start.copy_(value)

    def state(self) -> dict[str, Tensor]:
        return {"lora_A.weight": self.full_a().detach(), "lora_B.weight": self.full_b().detach()}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        columns = self.lora_A.shape[0] * (1 if self.start_A is None else 2)
        return {
            "lora_A.weight": (columns, self.in_features),
            "lora_B.weight": (self.out_features, columns),
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        a, b = state["lora_A.weight"], state["lora_B.weight"]
        self.lora_A.copy_(a[: self.lora_A.shape[0]])
        if self.start_A is not None and self.start_B is not None:
            self.lora_B.copy_(b[:, : self.rank])
            self.start_A.copy_(a[self.rank :])
            self.start_B.copy_(-b[:, self.rank :])
        elif self.rows is None or self.columns is None:
            self.lora_B.copy_(b)
        else:
            self.lora_B.copy_(b[self.rows[:, None].cpu(), self.columns.cpu()])
            if torch.count_nonzero(b) != torch.count_nonzero(self.full_b()):
                raise AdapterError(
                    f"the adapter of {self.site.path} is not one of {', '.join(self.site.roles)}",
                    found="its B has values in rows or columns of other roles",
                    fix="Load it as an adapter of the whole layer: target it by its module name.",
                )

    def complete(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Add the subtracted start to a file that trusts the reader to make it from the weight."""
        if self.start_A is None or self.start_B is None:
            return state
        a, b = state["lora_A.weight"], state["lora_B.weight"]
        return {
            **state,
            "lora_A.weight": torch.cat([a, self.start_A.to(a)]),
            "lora_B.weight": torch.cat([b, -self.start_B.to(b)], dim=1),
        }

    def merged_weight(self, weight: Tensor, name: str = "weight") -> Tensor:
        a, b = self.full_a().float(), self.full_b().float()
        return torch.addmm(weight, b.to(weight.device), a.to(weight.device), alpha=self.scaling)


class LoRA(Method):
    """Low-rank adaptation of linear layers and of stacked experts."""

    peft_type: ClassVar[str] = "LORA"
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
    """Start of A and B: default (Kaiming A, zero B), gaussian, pissa, olora."""
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Other ranks, by role or by the end of a module's name: {v: 8, "layers.0.mlp.up_proj": 4}."""
    alpha_pattern: dict[str, Annotated[int | float, Field(gt=0)]] = Field(default_factory=dict)
    """Other alphas, likewise."""

    def wrap(self, base: nn.Module, site: Site) -> LoRALinear:
        rank, scaling = self.scale_of(site)
        _check_rank(rank, site.path, linear_shape(base))
        if site.rows and self.init in ("pissa", "olora"):
            raise TargetError(
                f"init '{self.init}' cannot start from a part of the fused layer {site.path}",
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
            if self.dropout or self.init in ("pissa", "olora"):
                raise TargetError(
                    f"{self.type} on the stacked experts {path} has neither dropout nor a start "
                    "that is subtracted",
                    found=f"dropout {self.dropout}, init '{self.init}'",
                    fix="Use dropout 0 and init 'default', or leave the experts out.",
                )
            rank, scaling = self.scale_of(site)
            _check_rank(rank, path, stacked_shape(experts, site.parameter)[1:])
            dtype = ADAPTER_DTYPES[self.dtype]
            stacks.append(LoRAStack(experts, site, rank=rank, scaling=scaling, dtype=dtype))
        return LoRAExperts(experts, sites, stacks)

    def scale_of(self, site: Site) -> tuple[int, float]:
        """Return the rank and the scaling of a site."""
        rank = self._of(site, self.rank_pattern, self.rank)
        alpha = self._of(site, self.alpha_pattern, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.rslora else rank)

    @staticmethod
    def _of(site: Site, pattern: Mapping[str, Any], default: Any) -> Any:
        """Return the pattern's value for a site; PEFT's own rule, with roles before names."""
        found = {pattern[role] for role in site.roles if role in pattern}
        if len(found) > 1 or (found and any(role not in pattern for role in site.roles)):
            raise TargetError(
                f"{site.path} holds {', '.join(site.roles)} in one fused layer",
                found="different ranks or alphas for them",
                fix="Give them the same, or target the layer by its module name.",
            )
        if found:
            return found.pop()
        paths = [f"{site.path}.{site.parameter or 'weight'}"]
        paths += [site.path] if site.parameter is None else []
        for name, value in pattern.items():
            if any(re.match(rf"(.*\.)?({name})$", path) for path in paths):
                return value
        return default

    def to_peft(self, modules: Mapping[str, AdapterModule]) -> dict[str, Any]:
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
        init = "gaussian" if self.init == "gaussian" else True
        fields = {"lora_dropout": self.dropout, "init_lora_weights": init}
        if any(module.stacked for module in modules.values()):
            fields["peft_version"] = ".".join(map(str, (*EXPERTS_SINCE, 0)))
        return fields | peft_scales(ranks, scalings, rslora=self.rslora)

    @classmethod
    def from_peft(cls, fields: Mapping[str, Any]) -> Method:
        refuse_unknown(fields, _READ_FIELDS, cls.peft_type)
        check_layout(fields)
        init = fields.get("init_lora_weights", True)
        if init not in ("pissa", "olora"):
            # every other start is a value of A and B that the file replaces
            init = "gaussian" if init == "gaussian" else "default"
        return cls(
            rank=fields.get("r", 8),
            alpha=fields.get("lora_alpha", 8),
            dropout=fields.get("lora_dropout", 0.0),
            rslora=fields.get("use_rslora", False),
            init=init,
            rank_pattern=fields.get("rank_pattern") or {},
            alpha_pattern=fields.get("alpha_pattern") or {},
        )

    @model_validator(mode="after")
    def _check_patterns(self) -> LoRA:
        for name in (*self.rank_pattern, *self.alpha_pattern):
            if not is_simple(name) or not is_pattern(name):
                raise ConfigError(
                    f"cannot use {shown(name)} in rank_pattern or alpha_pattern",
                    found="it is no regular expression that can be matched in bounded time",
                    fix="Name roles, or the ends of module names.",
                )
        return self


_READ_FIELDS: dict[str, Any] = dict.fromkeys(
    (
        "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path",
        "revision", "inference_mode", "runtime_config", "r", "lora_alpha", "lora_dropout",
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
        "fan_in_fan_out", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern",
        "init_lora_weights", "loftq_config", "eva_config", "megatron_core", "qalora_group_size",
        "ensure_weight_tying", "target_parameters",
    ),
    ...,
) | {"bias": "none"}  # fmt: skip
"""Fields of PEFT's LoRA config that are acted on, or that say nothing about the tensors."""


def _check_rank(rank: int, path: str, shape: tuple[int, ...]) -> None:
    if rank > min(shape):
        raise TargetError(
            f"rank {rank} is larger than the matrix of {path}",
            found=f"its shape is {' x '.join(map(str, shape))}",
            fix=f"Use a rank of at most {min(shape)}, or leave this layer out of the targets.",
        )
