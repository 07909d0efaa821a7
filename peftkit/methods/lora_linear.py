"""The layer of LoRA: y = W x + s B A x, for the whole of a linear layer or for rows of a fused one.

Shapes: r rank, R = columns of the full B: r, times the roles of a fused layer, times two where a
start is subtracted. `...` is any leading shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from peftkit.kernels.lora import add_lora, low_rank
from peftkit.methods.lora_init import SUBTRACTED, Init, drawn, of_weight
from peftkit.methods.protocol import AdapterModule
from peftkit.methods.row_slice import RowSlice
from peftkit.model.places import linear_shape
from peftkit.model.targets import Site
from peftkit.model.training import TrainingLayout
from peftkit.quant.layers import weight_of


class Grouped(Protocol):
    """What computes a layer together with others that read its input (see groups.py)."""

    how: str

    def takes(self, x: Tensor) -> bool:
        """Tell whether it computes the layers now, for such an input."""

    def output(self, layer: LoRALinear, x: Tensor) -> Tensor:
        """Return what the layer gives for x."""


class LoRALinear(AdapterModule):
    """A frozen linear layer plus a trainable low-rank update.

    On a fused projection the update reaches only the rows of the roles asked for: each role has its
    own rank-r pair, and the full B is zero outside them.

    Attributes:
        lora_A: (num_roles * r, in).
        lora_B: (num_rows, r): the output rows that are adapted, all of them unless fused.
        start_A, start_B: (r, in), (out, r): the subtracted start of PiSSA and OLoRA, or None.
        group: Computes it while it is trained; None: it does so itself.
        training_layout: What puts it into a group (see grouping.py).
    """

    start_A: Tensor | None
    start_B: Tensor | None
    group: Grouped | None = None
    training_layout: TrainingLayout | None = None

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
        self.slice = RowSlice(site, self.out_features, device, rank)
        how: Any = {"dtype": dtype, "device": device}
        self.lora_A = nn.Parameter(
            torch.zeros(self.slice.num_roles * rank, self.in_features, **how)
        )
        self.lora_B = nn.Parameter(torch.zeros(self.slice.num_rows, rank, **how))
        subtracts = init in SUBTRACTED
        for name, shape in (
            ("start_A", (rank, self.in_features)),
            ("start_B", (self.out_features, rank)),
        ):
            start = torch.zeros(shape, dtype=dtype, device=device) if subtracts else None
            self.register_buffer(name, start, persistent=False)

    def full_a(self) -> Tensor:
        """Return A as it is applied and saved: (R, in)."""
        return self.lora_A if self.start_A is None else torch.cat([self.lora_A, self.start_A])

    def full_b(self) -> Tensor:
        """Return B as it is applied and saved: (out, R), zero rows where nothing is adapted."""
        if self.start_B is not None:
            return torch.cat([self.lora_B, -self.start_B], dim=1)
        return self.slice.spread_matrix(self.lora_B)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        alone = self.group is None or not self.enabled or args or kwargs
        if not alone and self.group is not None and self.group.takes(x):
            return self.group.output(self, x)
        out = self.frozen(x, *args, **kwargs)
        if not self.enabled:
            return out
        x = self.dropout(x)
        if self.start_A is None or self.start_B is None:
            return add_lora(out, x, self.full_a(), self.full_b(), self.scaling)
        # the same products in the same order on both sides, so that their difference starts at
        # zero; torch folds an x with gaps for a weight that trains, not for one that is frozen
        x = x.contiguous()
        moved = low_rank(x, self.lora_A, self.lora_B) - low_rank(x, self.start_A, self.start_B)
        return out + self.scaling * moved

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        if self.start_A is None or self.start_B is None:
            a = drawn(self.init, self.lora_A.shape, self.rank, generator)
            return self.init_from(a, None)
        return self.init_from(*self.subtracted_start())

    @torch.no_grad()
    def subtracted_start(self, *, exact: bool = False) -> tuple[Tensor, Tensor]:
        """Make what is subtracted from the base's weight, and return it; see `of_weight`."""
        assert self.start_A is not None
        assert self.start_B is not None
        weight = weight_of(self.base).float()
        a, b = of_weight(self.init, weight, self.rank, self.scaling, exact=exact)
        return self.start_A.copy_(a), self.start_B.copy_(b)

    @torch.no_grad()
    def init_from(self, *start: Tensor | None) -> None:
        for trained, value in zip((self.lora_A, self.lora_B), start, strict=True):
            trained.zero_() if value is None else trained.copy_(value)

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
        else:
            self.lora_B.copy_(self.slice.take_matrix(b))

    def merged_weight(self, weight: Tensor, name: str = "weight") -> Tensor:
        a, b = self.full_a().float(), self.full_b().float()
        return torch.addmm(weight, b.to(weight.device), a.to(weight.device), alpha=self.scaling)
