"""LoRA on stacks of experts: one low-rank pair for each expert's matrix.

y = x W_e^T + s (x A_e^T) B_e^T for the tokens that are routed to expert e. How tokens are brought
to experts is the model's own business: its forward runs as it is, over `AdaptedStack`s in the place
of its weights, and each of its products gets its two skinny ones. Thus every implementation of
transformers (eager, grouped_mm, batched_mm) and every other that multiplies by its weights works,
and computes the base bit for bit as before.

On disk this is PEFT's `target_parameters`: A is (E r, in), expert by expert, but B is (out, r E)
with the experts varying fastest. The first parameter of a module is PEFT's innermost wrapper, so
its names go through one "base_layer." for each parameter after it.

Shapes: E experts, r rank, R = r times the roles of a fused stack, S routed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from peftkit.anatomy import is_transposed, stacked_shape
from peftkit.errors import AdapterError, TargetError
from peftkit.methods.protocol import AdapterModule
from peftkit.targets import Site

_GROUPED_MM = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
_ALIGNED = 8
"""grouped_mm on GPUs takes matrices whose rows are multiples of 16 bytes."""


class _NoProductError(Exception):
    """Names an operation that adapted experts are not for."""


class AdaptedStack:
    """W + B A, of one expert or of many, as something to multiply with; the sum is never formed.

    Attributes:
        weight: As the model keeps it: (..., out, in), or (..., in, out) if `flipped`.
        a, b: (..., R, in), (..., out, R); scaled, and in the weight's dtype.
    """

    def __init__(self, weight: Tensor, a: Tensor, b: Tensor, *, flipped: bool) -> None:
        self.weight, self.a, self.b, self.flipped = weight, a, b, flipped

    @property
    def shape(self) -> torch.Size:
        """Of the weight; its dtype, device and address likewise."""
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        """Of the weight."""
        return self.weight.device

    def data_ptr(self) -> int:
        """Return the weight's address, whose alignment transformers looks at."""
        return self.weight.data_ptr()

    def __getitem__(self, index: Any) -> AdaptedStack:
        return AdaptedStack(self.weight[index], self.a[index], self.b[index], flipped=self.flipped)

    def transpose(self, first: int, second: int) -> AdaptedStack:
        """Swap in and out: of the last two dimensions only."""
        if {first % self.weight.ndim, second % self.weight.ndim} != {
            self.weight.ndim - 2,
            self.weight.ndim - 1,
        }:
            raise _NoProductError(f"transpose({first}, {second}) of adapted experts")
        return AdaptedStack(self.weight.mT, self.a, self.b, flipped=not self.flipped)

    @property
    def T(self) -> AdaptedStack:  # noqa: N802 - torch's own name
        """One expert's matrix, transposed."""
        return self.transpose(-2, -1)

    @property
    def mT(self) -> AdaptedStack:  # noqa: N802 - torch's own name
        """Every expert's matrix, transposed."""
        return self.transpose(-2, -1)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), dict(kwargs or {})
        is_stack = [isinstance(argument, cls) for argument in args]
        if is_stack.count(True) != 1 or len(args) < 2:
            raise _NoProductError(f"torch.{name} of adapted experts")
        place = is_stack.index(True)
        stack, x = args[place], args[1 - place]
        plain = [stack.weight if argument is stack else argument for argument in args]
        if name == "linear" and place == 1 and not stack.flipped:
            first = stack.a.mT
        elif name in ("matmul", "__matmul__", "mm", "bmm") and len(args) == 2:
            if place == 0:  # W x, by columns
                if stack.flipped:
                    raise _NoProductError(f"torch.{name} of adapted experts from the left")
                return torch.add(func(*plain, **kwargs), func(stack.b, func(stack.a, x)))
            if not stack.flipped:
                raise _NoProductError(f"torch.{name} by adapted experts' weights as stored")
            first = stack.a.mT
        elif name in _GROUPED_MM and place == 1 and stack.flipped:
            return cls._grouped(func, plain, kwargs, stack, x)
        else:
            raise _NoProductError(f"torch.{name} of adapted experts")
        return torch.add(func(*plain, **kwargs), (x.to(stack.dtype) @ first) @ stack.b.mT)

    @staticmethod
    def _grouped(
        func: Any, plain: list[Any], kwargs: dict[str, Any], stack: AdaptedStack, x: Tensor
    ) -> Tensor:
        out = cast(Tensor, func(*plain, **kwargs))
        missing = -stack.a.shape[-2] % _ALIGNED
        a = functional.pad(stack.a, (0, 0, 0, missing))
        b = functional.pad(stack.b, (0, missing))
        return out + func(func(x, a.mT, **kwargs), b.mT, **kwargs)


class LoRAStack(nn.Module):
    """The low-rank pairs of one stack of experts; of a fused one, only the asked-for rows'.

    Attributes:
        lora_A: (E, R, in).
        lora_B: (E, num_rows, r): the output rows that are adapted, all of them unless fused.
    """

    rows: Tensor | None
    columns: Tensor | None

    def __init__(
        self, experts: nn.Module, site: Site, *, rank: int, scaling: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.name, self.rank, self.scaling, self.roles = site.parameter, rank, scaling, site.roles
        self.num_experts, self.in_features, self.out_features = stacked_shape(
            experts, cast(str, site.parameter)
        )
        device = next(t.device for t in (*experts.parameters(), *experts.buffers()))
        parts = list(site.rows.values()) if site.rows else []
        rows = torch.cat(parts).to(device) if parts else None  # (num_rows,) into the outputs
        role_of_row = torch.repeat_interleave(torch.tensor([len(part) for part in parts] or [0]))
        columns = (role_of_row[:, None] * rank + torch.arange(rank)).to(device) if parts else None
        num_rows = self.out_features if rows is None else len(rows)
        self.lora_A = nn.Parameter(
            torch.zeros(
                self.num_experts,
                max(len(parts), 1) * rank,
                self.in_features,
                dtype=dtype,
                device=device,
            )
        )
        self.lora_B = nn.Parameter(
            torch.zeros(self.num_experts, num_rows, rank, dtype=dtype, device=device)
        )
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)  # (num_rows, r) into R

    def full_b(self) -> Tensor:
        """Return B as it is applied: (E, out, R), zero rows where nothing is adapted."""
        if self.rows is None or self.columns is None:
            return self.lora_B
        full = self.lora_B.new_zeros(self.num_experts, self.out_features, self.lora_A.shape[1])
        every = torch.arange(self.num_experts, device=self.rows.device)[:, None, None]
        return full.index_put((every, self.rows[:, None], self.columns), self.lora_B)

    def over(self, weight: Tensor, *, flipped: bool) -> AdaptedStack:
        """Return what the model multiplies with instead of its weight."""
        b = (self.scaling * self.full_b()).to(weight.dtype)
        return AdaptedStack(weight, self.lora_A.to(weight.dtype), b, flipped=flipped)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes as on disk."""
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
    def load(self, state: Mapping[str, Tensor], path: str) -> None:
        """Take the tensors of `state()`."""
        self.lora_A.copy_(state["lora_A.weight"].view_as(self.lora_A))
        full = state["lora_B.weight"].view(self.out_features, -1, self.num_experts)
        full = full.permute(2, 0, 1)  # (E, out, R)
        if self.rows is None or self.columns is None:
            self.lora_B.copy_(full)
            return
        self.lora_B.copy_(full[:, self.rows[:, None].cpu(), self.columns.cpu()])
        if torch.count_nonzero(full) != torch.count_nonzero(self.lora_B):
            raise AdapterError(
                f"the adapter of {path} is not one of {', '.join(self.roles)}",
                found="its B has values in rows or columns of other roles",
                fix=f"Load it as an adapter of the whole stack: target {self.name}.",
            )


class LoRAExperts(AdapterModule):
    """A module of stacked experts, frozen, with low-rank updates of some of its stacks."""

    def __init__(self, experts: nn.Module, sites: Sequence[Site], stacks: Sequence[LoRAStack]):
        site = Site(sites[0].path, tuple(role for site in sites for role in site.roles))
        super().__init__(experts, site)
        self.stacks = nn.ModuleDict(
            {str(site.parameter): stack for site, stack in zip(sites, stacks, strict=True)}
        )
        self.flipped = is_transposed(experts)

    @property
    def stacked(self) -> tuple[str, ...]:
        return tuple(self.stacks)

    def parts(self) -> dict[str, LoRAStack]:
        """Return the stacks by parameter name."""
        return {name: cast(LoRAStack, stack) for name, stack in self.stacks.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.enabled:
            return self.base(*args, **kwargs)
        adapted = {
            name: stack.over(getattr(self.base, name), flipped=self.flipped)
            for name, stack in self.parts().items()
        }
        run = cast(_Forward, type(self.base))
        try:
            return run.forward(_Lens(self.base, adapted), *args, **kwargs)
        except _NoProductError as error:
            raise TargetError(
                f"lora cannot sit on the experts of {self.site.path}",
                found=f"{type(self.base).__name__} uses its weights otherwise than in products: "
                f"{error}",
                fix="Choose another with model.set_experts_implementation, or leave the experts "
                "out of the targets.",
            ) from error

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        for stack in self.parts().values():
            bound = 1 / math.sqrt(stack.in_features)  # as in LoRA of a linear layer
            sample = torch.empty(stack.lora_A.shape).uniform_(-bound, bound, generator=generator)
            stack.lora_A.copy_(sample)
            stack.lora_B.zero_()

    def _depths(self) -> dict[str, tuple[str, LoRAStack]]:
        """Return "base_layer." as often as there are wrappers around, and the stack, by name."""
        last = len(self.stacks) - 1
        return {
            name: ("base_layer." * (last - index), stack)
            for index, (name, stack) in enumerate(self.parts().items())
        }

    def state(self) -> dict[str, Tensor]:
        found = self._depths().values()
        return {depth + n: tensor for depth, part in found for n, tensor in part.state().items()}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        found = self._depths().values()
        return {depth + n: shape for depth, part in found for n, shape in part.shapes().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        for depth, stack in self._depths().values():
            stack.load({name: state[depth + name] for name in stack.shapes()}, self.site.path)

    def weights(self, base: nn.Module) -> dict[str, Tensor]:
        found = {name: cast(Tensor, getattr(base, name)) for name in self.stacks}
        return {name: weight.mT if self.flipped else weight for name, weight in found.items()}

    def merged_weight(self, weight: Tensor, name: str = "weight") -> Tensor:
        stack = self.parts()[name]
        a, b = stack.lora_A.float().to(weight.device), stack.full_b().float().to(weight.device)
        return torch.baddbmm(weight, b, a, alpha=stack.scaling)


class _Forward(Protocol):
    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any: ...


class _Lens:
    """A module as its own forward sees it, with some of its weights replaced."""

    def __init__(self, module: nn.Module, replaced: Mapping[str, AdaptedStack]) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
