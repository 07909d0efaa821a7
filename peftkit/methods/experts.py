"""LoRA on stacks of experts: one low-rank pair for each expert's matrix.

y = x W_e^T + s (x A_e^T) B_e^T for the tokens that are routed to expert e. The model's forward runs
with `AdaptedStack`s instead of its weights, and the two low-rank products follow each of its
products. This supports all implementations of transformers (eager, grouped_mm, batched_mm) and any
other that only multiplies by its weights, and the base is computed bit for bit as before.

On disk this is PEFT's `target_parameters`: A is (E r, in), expert by expert, but B is (out, r E)
with the experts varying fastest. The first parameter of a module is PEFT's innermost wrapper, so
its names have one "base_layer." for each later parameter.

Shapes: E experts, r rank, R = r times the roles of a fused stack, S routed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from peftkit.errors import TargetError
from peftkit.kernels.stacked import AdaptedStack, NoProductError
from peftkit.methods.base import AdapterModule
from peftkit.methods.lora_init import Options
from peftkit.methods.lora_linear import drawn
from peftkit.model.places import is_transposed, stacked_shape
from peftkit.model.targets import RowSlice, Site


class LoRAStack(nn.Module):
    """The low-rank pairs of a stack of experts, for the targeted rows if the stack is fused.

    Attributes:
        lora_A: (E, R, in).
        lora_B: (E, num_rows, r) for the adapted output rows, which are all rows unless fused.
    """

    def __init__(self, experts: nn.Module, site: Site, options: Options) -> None:
        super().__init__()
        self.rank, self.scaling, self.init, dtype, *_ = options
        self.num_experts, self.in_features, self.out_features = stacked_shape(
            experts, cast(str, site.parameter)
        )
        device = next(t.device for t in (*experts.parameters(), *experts.buffers()))
        self.slice = RowSlice(site, self.out_features, device, self.rank)
        shape_a = self.num_experts, self.slice.num_roles * self.rank, self.in_features
        shape_b = self.num_experts, self.slice.num_rows, self.rank
        self.lora_A = nn.Parameter(torch.zeros(shape_a, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.zeros(shape_b, dtype=dtype, device=device))

    def full_b(self) -> Tensor:
        """Return the applied B (E, out, R), with zeros in rows that are not adapted."""
        return self.slice.spread_matrix(self.lora_B)

    def over(self, weight: Tensor, *, flipped: bool) -> AdaptedStack:
        """Return the adapted stack that replaces the model's weight."""
        b = (self.scaling * self.full_b()).to(weight.dtype)
        a = self.lora_A.to(weight.dtype)
        return AdaptedStack(weight, a, b, flipped=flipped)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes on disk."""
        num_columns = self.lora_A.shape[0] * self.lora_A.shape[1]
        return {
            "lora_A.weight": (num_columns, self.in_features),
            "lora_B.weight": (self.out_features, num_columns),
        }

    def state(self) -> dict[str, Tensor]:
        """Return A expert by expert, and B with the experts varying fastest."""
        b = self.full_b().detach().permute(1, 2, 0)  # (out, R, E)
        return {
            "lora_A.weight": self.lora_A.detach().flatten(0, 1),
            "lora_B.weight": b.reshape(self.out_features, -1),
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors of `state()`."""
        self.lora_A.copy_(state["lora_A.weight"].view_as(self.lora_A))
        full = state["lora_B.weight"].view(self.out_features, -1, self.num_experts)
        self.lora_B.copy_(self.slice.take_matrix(full.permute(2, 0, 1)))  # (E, out, R)


class LoRAExperts(AdapterModule):
    """A frozen module of stacked experts with low-rank updates of some of its stacks."""

    def __init__(self, experts: nn.Module, sites: Sequence[Site], stacks: Sequence[LoRAStack]):
        names = (name for site in sites for name in site.roles or (str(site.parameter),))
        site = Site(sites[0].path, tuple(names))
        super().__init__(experts, site)
        self.stacks = nn.ModuleDict(
            {str(site.parameter): stack for site, stack in zip(sites, stacks, strict=True)}
        )
        self.flipped = is_transposed(experts)

    @property
    def stacked(self) -> tuple[str, ...]:
        return tuple(self.stacks)

    def parts(self) -> dict[str, LoRAStack]:
        return {name: cast(LoRAStack, stack) for name, stack in self.stacks.items()}

    def forward(self, *args: object, **kwargs: object) -> Any:
        if not self.enabled:
            return self.base(*args, **kwargs)
        adapted = {
            name: stack.over(getattr(self.base, name), flipped=self.flipped)
            for name, stack in self.parts().items()
        }
        try:  # a cast of the class would hide its forward from torch.compile
            return type(self.base).forward(_Lens(self.base, adapted), *args, **kwargs)
        except NoProductError as error:
            raise TargetError(
                f"lora does not support the experts of {self.site.path}",
                found=f"{type(self.base).__name__} uses its weights for more than matrix products: "
                f"{error}",
                fix="Choose another implementation with model.set_experts_implementation, or "
                "remove the experts from the targets.",
            ) from error

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        for stack in self.parts().values():
            stack.lora_A.copy_(drawn(stack.init, stack.lora_A.shape, stack.rank, generator))
            stack.lora_B.zero_()

    def _depths(self) -> dict[str, tuple[str, LoRAStack]]:
        """Return each stack with PEFT's prefix ("base_layer." per outer wrapper)."""
        last = len(self.stacks) - 1
        return {
            name: ("base_layer." * (last - index), stack)
            for index, (name, stack) in enumerate(self.parts().items())
        }

    def state(self) -> dict[str, Tensor]:
        stacks = self._depths().values()
        return {depth + n: tensor for depth, part in stacks for n, tensor in part.state().items()}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        stacks = self._depths().values()
        return {depth + n: shape for depth, part in stacks for n, shape in part.shapes().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        for depth, stack in self._depths().values():
            stack.load({name: state[depth + name] for name in stack.shapes()})

    def weights(self, base: nn.Module) -> dict[str, Tensor]:
        weights = {name: cast(Tensor, getattr(base, name)) for name in self.stacks}
        return {name: weight.mT if self.flipped else weight for name, weight in weights.items()}

    def merged_weight(self, weight: Tensor, name: str = "weight") -> Tensor:
        stack = self.parts()[name]
        a, b = stack.lora_A.float().to(weight.device), stack.full_b().float().to(weight.device)
        return torch.baddbmm(weight, b, a, alpha=stack.scaling)


class _Lens:
    """A view of a module with some of its weights replaced."""

    def __init__(self, module: nn.Module, replaced: Mapping[str, AdaptedStack]) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
