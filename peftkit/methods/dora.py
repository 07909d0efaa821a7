"""DoRA: y = m * (W + s B A) x / ||W + s B A||, the norm of each output row
(Liu et al., 2024, arXiv:2402.09353), a constant to the gradient (their section 4.3).

Shapes: r rank, R = columns of the full B (r, times the roles of a fused layer); out, in features of
the layer; `...` is any leading shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from peftkit.files.strict_json import Json
from peftkit.kernels.lora import adapted_row_norms, add_lora
from peftkit.methods.base import AdapterModule, Method, Modules
from peftkit.methods.lora import LoRA
from peftkit.methods.lora_format import LoRAFormat, trains_biases
from peftkit.methods.lora_init import Options
from peftkit.methods.lora_linear import LoRALinear
from peftkit.methods.peft_format import MAGNITUDE
from peftkit.model.targets import Site
from peftkit.quant.weights import weight_of


class DoRALinear(LoRALinear):
    """A frozen linear layer with a LoRA on its direction and trained row norms.

    Attributes:
        lora_magnitude: (num_rows,) trained norms of the adapted output rows.
        squared_norms: (out,) float32: ||w||^2 of the frozen rows.
    """

    can_group: ClassVar[bool] = False
    squared_norms: Tensor

    def __init__(self, base: nn.Module, site: Site, options: Options) -> None:
        super().__init__(base, site, options)
        self.lora_magnitude = nn.Parameter(self.lora_B.detach().new_ones(self.lora_B.shape[0]))
        squared = torch.zeros(self.out_features, dtype=torch.float32, device=self.lora_B.device)
        self.register_buffer("squared_norms", squared, persistent=False)
        if squared.device.type != "meta":
            with torch.no_grad():
                squared.copy_(weight_of(base).float().square().sum(1))

    def full_magnitude(self) -> Tensor:
        """Return m of every output row (out,): the frozen norm if the row is not adapted."""
        rows = self.slice.rows
        if rows is None:
            return self.lora_magnitude
        return self.squared_norms.sqrt().index_put((rows,), self.lora_magnitude.float())

    def _row_norms(self, weight: Tensor, squared_norms: Tensor) -> Tensor:
        return adapted_row_norms(
            weight, self.full_a().detach(), self.full_b().detach(), self.scaling, squared_norms
        )

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        out: Tensor = self.base(x, *args, **kwargs)
        if not self.enabled:
            return out
        norms = self._row_norms(weight_of(self.base), self.squared_norms)
        ratio = self.full_magnitude().float() / norms  # (out,), exactly one at the start
        product = out if self.bias is None else out - self.bias
        out = out + (ratio - 1).to(out.dtype) * product
        scaled_b = ratio[:, None] * self.full_b()
        return add_lora(out, self.dropout(x), self.full_a(), scaled_b, self.scaling)

    @torch.no_grad()
    def init_from(self, *start: Tensor | None) -> None:
        super().init_from(*start)
        # by the same formula as in forward, to start with a ratio of exactly one
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


class DoRA(LoRA):
    """Weight-decomposed low-rank adaptation of linear layers."""

    files: ClassVar[str] = "PEFT, MLX"
    sits_on_stacks: ClassVar[bool] = False
    module_class: ClassVar[Callable[..., LoRALinear]] = DoRALinear

    type: Literal["dora"] = "dora"  # type: ignore[assignment]
    init: Literal["default", "gaussian", "eva"] = "default"
    """Initialisation of A: default (Kaiming), gaussian, eva (from activations); B is zero."""

    def wrap_experts(self, experts: nn.Module, sites: Sequence[Site]) -> AdapterModule:
        # row norms of stacked experts are not supported
        return Method.wrap_experts(self, experts, sites)


class DoRAFormat(LoRAFormat):
    """DoRA: a LoRA with `use_dora`."""

    method_class = DoRA
    known_fields = (*LoRAFormat.known_fields, "use_dora")

    def describes(self, fields: Mapping[str, object]) -> bool:
        ours = fields.get("peft_type") == self.peft_type and not trains_biases(fields)
        return ours and bool(fields.get("use_dora"))

    def fields(self, method: LoRA, model: nn.Module, modules: Modules) -> Json:
        return super().fields(method, model, modules) | {"use_dora": True}
