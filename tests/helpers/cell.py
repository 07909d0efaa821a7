"""A cell of the grid: a method on an architecture, alive; and how its numbers are compared."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.adapter import Adapter, attach
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.methods.base import Method
from peftkit.model.modes import begin_training
from peftkit.quant.quantize import quantize_model
from tests.helpers.adapters import gradients as gradients_of
from tests.helpers.families import ARCHITECTURES
from tests.helpers.kinds import loss, outputs

ROUNDING = 1e-5
"""Of float32 sums in another order, as a part of the largest logit (or gradient)."""
STEPS = 3


class BrokenLaw(AssertionError):
    """A law does not hold in a cell."""


def demand(holds: bool, message: str) -> None:
    """Raise BrokenLaw unless something holds."""
    if not holds:
        raise BrokenLaw(message)


def demand_close(
    actual: Tensor, expected: Tensor, what: str, tolerance: float = ROUNDING, scale: float = 1.0
) -> None:
    """Raise BrokenLaw where two tensors differ by more than rounding."""
    demand(
        actual.shape == expected.shape, f"{what}: {tuple(actual.shape)}, {tuple(expected.shape)}"
    )
    worst = float((actual - expected).abs().max()) / scale
    demand(worst <= tolerance, f"{what}: off by {worst:.1e} of the largest")


def largest(*tensors: Tensor) -> float:
    """Return the largest value of some tensors."""
    return max(float(tensor.abs().max()) for tensor in tensors)


@dataclass(slots=True)
class Cell:
    """A method on an architecture, frozen and perhaps quantised.

    Attributes:
        plain: What the bare model gives.
        adapter: In place and trained, once the laws of the start have been asked.
        notes: Codes of `grid.LEGEND` that laws add.
    """

    architecture: str
    quantize: str
    model: nn.Module
    given: dict[str, Any]
    plain: Tensor
    adapter: Adapter
    notes: list[str] = field(default_factory=list)

    def outputs(self) -> Tensor:
        """Return what the model gives now."""
        return outputs(self.model, self.given)


def bare_model(architecture: str, quantize: str) -> nn.Module:
    """Return the base of a cell: always the same weights.

    It is frozen, as every base is: torch sums in another order where a weight trains.
    """
    model = tiny_model(architecture).requires_grad_(False)
    if quantize != "none":
        quantize_model(model, quantize, double_quant=True, compute_dtype=torch.float32)
    return model


def tiny_model(family: str) -> nn.Module:
    """Return one and the same tiny model each time."""
    torch.manual_seed(0)
    return ARCHITECTURES[family]().eval()


def perturb_trained(model: nn.Module, size: float = 0.05, parts: tuple[str, ...] = ("",)) -> None:
    """Stand in for training: move every trainable value of some names a little."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and any(part in name for part in parts):
                parameter += size * torch.randn(parameter.shape, generator=generator)


def trained(model: nn.Module, method: Method) -> Adapter:
    """Attach a method and move its tensors; a fresh one must have changed nothing."""
    before = outputs(model)
    adapter = attach(model, method)
    assert torch.equal(outputs(model), before)
    perturb_trained(model)
    assert not torch.allclose(outputs(model), before, atol=1e-2)
    return adapter


def saved(adapter: Adapter, folder: Path) -> Path:
    """Save an adapter of whatever task."""
    return save_adapter(adapter, folder, Provenance(task_type=None))


def losses(adapter: Adapter, given: dict[str, Any], steps: int = STEPS) -> list[float]:
    """Take some steps on one batch and return the losses before each and after the last."""
    optimizer = torch.optim.AdamW(list(adapter.parameters()), lr=5e-3)
    seen = []
    for step in range(steps + 1):
        value = loss(adapter.model, given)
        seen.append(float(value.detach()))
        if step < steps:
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    return seen


@contextmanager
def own_warnings() -> Iterator[None]:
    """Let another library say what it says, of names that it uses and of things it cannot know."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def gradients(cell: Cell) -> dict[str, Tensor]:
    """Return loss and gradients of one step in training mode, with the same dropout each time."""
    begin_training(cell.model)
    torch.manual_seed(3)
    value = loss(cell.model, cell.given)
    values = gradients_of(cell.model, value)
    cell.model.eval()
    return {"loss": value.detach(), **values}


def demand_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], message: str) -> None:
    """Raise BrokenLaw where gradients differ by more than rounding in the precision they are in."""
    demand(actual.keys() == expected.keys(), f"{message}: gradients of other tensors")
    scale = largest(*expected.values())
    for name, gradient in expected.items():
        rounding = max(ROUNDING, torch.finfo(gradient.dtype).eps)
        demand_close(actual[name], gradient, f"{message}: gradient of {name}", rounding, scale)
