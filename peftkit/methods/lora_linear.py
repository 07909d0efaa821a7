"""The layers of LoRA and DoRA, of a whole linear layer or of rows of a fused one.

    LoRA   y = W x + s B A x
    DoRA   y = m * (W + s B A) x / ||W + s B A||, the norm of each output row (Liu et al., 2024,
           arXiv:2402.09353), a constant to the gradient (their section 4.3)

Initial values of A and B:

    default, gaussian   A is drawn, B is zero
    pissa               the largest part of the weight's SVD (Meng et al., 2024, arXiv:2404.02948)
    olora               the first columns of its QR (Buyukakyuz, 2024, arXiv:2406.01775)
    eva, loftq          computed before attach() from data or other weights: data_init.py

Shapes: r rank, R = columns of the full B: r, times the roles of a fused layer, times two where the
initial values are subtracted; out, in features of the layer; `...` is any leading shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from peftkit.kernels import svd
from peftkit.kernels.lora_update import adapted_row_norms, add_lora, low_rank
from peftkit.methods.protocol import AdapterModule
from peftkit.model.places import linear_shape
from peftkit.model.targets import RowSlice, Site
from peftkit.quant.layers import weight_of

Init = Literal["default", "gaussian", "pissa", "olora", "eva", "loftq"]
SUBTRACTED = ("pissa", "olora")
"""Initial values that are subtracted again, so that the update starts at zero."""
DATA_INITS = {"eva": "eva_starts", "loftq": "loftq_starts"}
"""Initialisations that are passed to attach(), and the functions that compute them."""


MAGNITUDE = "lora_magnitude_vector"


class LoRALinear(AdapterModule):
    """A frozen linear layer plus a trainable low-rank update.

    On a fused projection the update reaches only the rows of the roles asked for: each role has its
    own rank-r pair, and the full B is zero outside them.

    Attributes:
        lora_A: (num_roles * r, in).
        lora_B: (num_rows, r): the output rows that are adapted, all of them unless fused.
        initial_A, initial_B: (r, in), (out, r): the subtracted start of PiSSA and OLoRA, or None.
        group: Computes it while it is trained; None: it does so itself.
        training_layout: What puts it into a group (see lora_groups.py).
    """

    initial_A: Tensor | None
    initial_B: Tensor | None
    group: Any = None
    training_layout: Any = None

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
        self.slice = RowSlice(site, self.out_features, self.base_device, rank)
        self.lora_A = self.new_parameter(self.slice.num_roles * rank, self.in_features, dtype=dtype)
        self.lora_B = self.new_parameter(self.slice.num_rows, rank, dtype=dtype)
        subtracts = init in SUBTRACTED
        for name, like in (("initial_A", self.lora_A), ("initial_B", self.lora_B)):
            start = torch.zeros_like(like.detach()) if subtracts else None
            self.register_buffer(name, start, persistent=False)

    def full_a(self) -> Tensor:
        """Return A as it is applied and saved: (R, in)."""
        return self.lora_A if self.initial_A is None else torch.cat([self.lora_A, self.initial_A])

    def full_b(self) -> Tensor:
        """Return B as it is applied and saved: (out, R), zero rows where nothing is adapted."""
        if self.initial_B is not None:
            return torch.cat([self.lora_B, -self.initial_B], dim=1)
        return self.slice.spread_matrix(self.lora_B)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        alone = self.group is None or not self.enabled or args or kwargs
        if not alone and self.group.takes(x):
            return cast(Tensor, self.group.output(self, x))
        out = self.frozen(x, *args, **kwargs)
        if not self.enabled:
            return out
        x = self.dropout(x)
        if self.initial_A is None or self.initial_B is None:
            return add_lora(out, x, self.full_a(), self.full_b(), self.scaling)
        # the same products in the same order on both sides, so that their difference starts at
        # zero; torch folds an x with gaps for a weight that trains, not for one that is frozen
        x = x.contiguous()
        moved = low_rank(x, self.lora_A, self.lora_B) - low_rank(x, self.initial_A, self.initial_B)
        return out + self.scaling * moved

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        if self.initial_A is None or self.initial_B is None:
            a = drawn(self.init, self.lora_A.shape, self.rank, generator)
            return self.init_from(a, None)
        return self.init_from(*self.subtracted_values())

    @torch.no_grad()
    def subtracted_values(self, *, exact: bool = False) -> tuple[Tensor, Tensor]:
        """Make what is subtracted from the base's weight, and return it; see `of_weight`."""
        assert self.initial_A is not None
        assert self.initial_B is not None
        weight = weight_of(self.base).float()
        a, b = of_weight(self.init, weight, self.rank, self.scaling, exact=exact)
        return self.initial_A.copy_(a), self.initial_B.copy_(b)

    @torch.no_grad()
    def init_from(self, *start: Tensor | None) -> None:
        for trained, value in zip((self.lora_A, self.lora_B), start, strict=True):
            trained.zero_() if value is None else trained.copy_(value)

    def state(self) -> dict[str, Tensor]:
        return {"lora_A.weight": self.full_a().detach(), "lora_B.weight": self.full_b().detach()}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        columns = self.lora_A.shape[0] * (1 if self.initial_A is None else 2)
        return {
            "lora_A.weight": (columns, self.in_features),
            "lora_B.weight": (self.out_features, columns),
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        a, b = state["lora_A.weight"], state["lora_B.weight"]
        self.lora_A.copy_(a[: self.lora_A.shape[0]])
        if self.initial_A is not None and self.initial_B is not None:
            self.lora_B.copy_(b[:, : self.rank])
            self.initial_A.copy_(a[self.rank :])
            self.initial_B.copy_(-b[:, self.rank :])
        else:
            self.lora_B.copy_(self.slice.take_matrix(b))

    def merged_weight(self, weight: Tensor, name: str = "weight") -> Tensor:
        a, b = self.full_a().float(), self.full_b().float()
        return torch.addmm(weight, b.to(weight.device), a.to(weight.device), alpha=self.scaling)


class DoRALinear(LoRALinear):
    """A frozen linear layer with a LoRA on its direction and trained row norms.

    Attributes:
        lora_magnitude: (num_rows,): the trained norms of the adapted output rows.
        squared_norms: (out,) float32: ||w||^2 of the frozen rows.
    """

    squared_norms: Tensor

    def __init__(self, base: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(base, *args, **kwargs)
        self.lora_magnitude = nn.Parameter(self.lora_B.detach().new_ones(self.lora_B.shape[0]))
        squared = torch.zeros(self.out_features, dtype=torch.float32, device=self.lora_B.device)
        self.register_buffer("squared_norms", squared, persistent=False)
        if squared.device.type != "meta":
            with torch.no_grad():
                squared.copy_(weight_of(base).float().square().sum(1))

    def full_magnitude(self) -> Tensor:
        """Return m of every output row (out,): the frozen norm where nothing is adapted."""
        rows = self.slice.rows
        if rows is None:
            return self.lora_magnitude
        return self.squared_norms.sqrt().index_put((rows,), self.lora_magnitude.float())

    def _row_norms(self, weight: Tensor, squared_norms: Tensor) -> Tensor:
        return adapted_row_norms(
            weight, self.full_a().detach(), self.full_b().detach(), self.scaling, squared_norms
        )

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = self.frozen(x, *args, **kwargs)
        if not self.enabled:
            return out
        norms = self._row_norms(weight_of(self.base), self.squared_norms)
        ratio = self.full_magnitude().float() / norms  # (out,), exactly one at the start
        plain = out if self.bias is None else out - self.bias
        out = out + (ratio - 1).to(out.dtype) * plain
        scaled_b = ratio[:, None] * self.full_b()
        return add_lora(out, self.dropout(x), self.full_a(), scaled_b, self.scaling)

    @torch.no_grad()
    def init_from(self, *start: Tensor | None) -> None:
        super().init_from(*start)
        # by the same formula as in forward, so that the ratio starts at exactly one
        norms = self._row_norms(weight_of(self.base), self.squared_norms)
        self.lora_magnitude.copy_(norms if self.slice.rows is None else norms[self.slice.rows])

    def state(self) -> dict[str, Tensor]:
        return super().state() | {MAGNITUDE: self.full_magnitude().detach().to(self.lora_A.dtype)}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return super().state_shapes() | {MAGNITUDE: (self.out_features,)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        super().load(state)
        magnitude, rows = state[MAGNITUDE], self.slice.rows
        self.lora_magnitude.copy_(magnitude if rows is None else magnitude[rows.cpu()])

    def merged_weight(self, weight: Tensor, name: str = "weight") -> Tensor:
        direction = super().merged_weight(weight, name)
        magnitude = self.full_magnitude().float().to(weight.device)
        return direction * (magnitude / direction.norm(dim=1))[:, None]


def drawn(init: Init, shape: torch.Size, rank: int, generator: torch.Generator) -> Tensor:
    """Return a random A, drawn on the CPU in float32, so that a seed means the same everywhere."""
    if init == "gaussian":
        return torch.empty(shape).normal_(std=1 / rank, generator=generator)
    bound = 1 / math.sqrt(shape[-1])  # kaiming_uniform_(a=sqrt(5)), as nn.Linear itself
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def of_weight(
    init: Init, weight: Tensor, rank: int, scaling: float, *, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the initial A (r, in) and B (out, r) of a weight (out, in), float32.

    Args:
        exact: By a decomposition of the whole weight, as PEFT makes it, where its file leaves the
            initial values out. Otherwise only what is needed is computed: values that are
            subtracted again may be any, and those of a randomised SVD are nearly the best.
    """
    if init == "pissa" and exact:
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        root = (s[:rank] / scaling).sqrt()
        return root[:, None] * vh[:rank], u[:, :rank] * root
    if init == "pissa":
        largest = svd.of_matrix(weight, rank)
        return largest.a / math.sqrt(scaling), largest.b / math.sqrt(scaling)
    if exact:
        q, upper = torch.linalg.qr(weight)
        return upper[:rank], q[:, :rank]
    q, _ = torch.linalg.qr(weight[:, :rank])  # Q's columns depend on those of the weight before
    return q.t() @ weight, q
