"""A model in training: an adapter of the shared base, its gradients and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from peftkit.adapter import Adapter, refresh_copies, ungroup_modules
from peftkit.train.optim import complete_gradients, load_optimizer_state, optimizer_state
from peftkit_server.refusals import RequestError
from peftkit_server.tinker.bodies import Adam

LATER = 3
"""Tensors per parameter that training allocates: a gradient and two of the optimizer."""
VALUE, GRADIENT, OPTIMIZER = "value/", "gradient/", "optimizer/"
"""Prefixes of the tensors of an offloaded tenant."""


class Tenant:
    """A model in training.

    Attributes:
        adapter: Adapter, whose modules are on the base only during the tenant's operations.
        parameters: Parameters by name, in the order of the model.
        layers: Modules of the adapter.
        optimizer: AdamW; None before the first step.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        names = {
            id(parameter): name
            for path, module in adapter.modules.items()
            for name, parameter in module.named_parameters(path)
        }
        self.parameters = {names[id(p)]: p for p in adapter.parameters()}
        self.layers = nn.ModuleList(adapter.modules.values())
        self.optimizer: AdamW | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        return sum(p.nbytes for p in self.parameters.values())

    @property
    def num_later(self) -> int:
        """Bytes that training has yet to allocate: gradients and optimizer state."""
        parameters = self.parameters.values()
        has_gradient = sum(p.grad is not None for p in parameters) / len(parameters)
        return int(self.num_bytes * (LATER - has_gradient - 2 * (self.optimizer is not None)))

    def take_gradients(self) -> list[Tensor | None]:
        """Return the gradients, and clear them."""
        gradients = [p.grad for p in self.parameters.values()]
        self.set_gradients([None] * len(gradients))
        return gradients

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            parameter.grad = gradient

    def add_gradients(self, others: Sequence[Tensor | None], factor: float) -> None:
        """Multiply the gradients by a factor, then add others."""
        for parameter, other in zip(self.parameters.values(), others, strict=True):
            if parameter.grad is None:
                parameter.grad = other
                continue
            if factor != 1.0:
                parameter.grad.mul_(factor)
            if other is not None:
                parameter.grad.add_(other)

    def step(self, settings: Adam) -> float:
        """Take an AdamW step and clear the gradients; return the norm of the gradients.

        Raises:
            RequestError: A gradient is not finite; gradients are cleared, weights unchanged.
        """
        norm = torch.nn.utils.get_total_norm(complete_gradients(self.parameters))
        if not math.isfinite(norm.item()):
            self.take_gradients()
            raise RequestError(
                "the step was not taken: its gradient is not finite.",
                found="The weights are unchanged; the gradient was cleared.",
                fix="Check the losses and advantages of the rows since the last step.",
            )
        optimizer, max_norm = self._with_optimizer(), settings.grad_clip_norm
        self.optimizer_tensors()  # allocates the state before clipping: it may run out of memory
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, norm)
        optimizer.param_groups[0].update(
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        optimizer.step()
        refresh_copies(self.layers)
        self.take_gradients()
        return float(norm)

    def _with_optimizer(self) -> AdamW:
        if self.optimizer is None:
            self.optimizer = AdamW(self.parameters.values(), lr=0.0, fused=True)
        return self.optimizer

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the optimizer's state; empty before the first step."""
        if self.optimizer is None:
            return {}
        return optimizer_state(self.optimizer, self.parameters)[0]

    def load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of `optimizer_tensors`.

        Raises:
            CheckpointError: The tensors do not match the parameters.
        """
        if tensors:
            load_optimizer_state(self._with_optimizer(), self.parameters, tensors, {})

    def emptied(self) -> dict[str, Tensor]:
        """Return all tensors with prefixed names, and free them in the tenant, until `fill`."""
        tensors = {OPTIMIZER + name: tensor for name, tensor in self.optimizer_tensors().items()}
        gradients = zip(self.parameters, self.take_gradients(), strict=True)
        tensors |= {GRADIENT + name: grad for name, grad in gradients if grad is not None}
        self.optimizer = None
        ungroup_modules(self.layers)  # groups hold copies of the parameters
        for name, parameter in self.parameters.items():
            tensors[VALUE + name] = parameter.data
            parameter.data = parameter.data.new_empty(0)
        return tensors

    def fill(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore the tensors that `emptied` returned."""
        for name, parameter in self.parameters.items():
            parameter.data = tensors[VALUE + name].to(device)
            gradient = tensors.get(GRADIENT + name)
            parameter.grad = None if gradient is None else gradient.to(device)
        self.load_optimizer(
            {
                name.removeprefix(OPTIMIZER): tensor
                for name, tensor in tensors.items()
                if name.startswith(OPTIMIZER)
            }
        )
