"""Tiny models with an adapter whose tensors are not at their initial values."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from peftkit.adapter import Adapter, attach
from peftkit.methods.lora import LoRA
from tests.helpers.families import FAMILIES

IDS = torch.arange(20).view(2, 10) + 3


def perturb(parameters: Iterable[Tensor], std: float = 0.05, seed: int | None = None) -> None:
    """Add normal noise to parameters, as training would move them."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter += std * torch.randn(parameter.shape, generator=generator).to(parameter)


def model_with_adapter(family: str, method: LoRA) -> tuple[nn.Module, Adapter]:
    """Return a tiny model with an adapter that does something."""
    model = FAMILIES[family]().eval()
    adapter = attach(model, method)
    perturb(adapter.parameters())
    return model, adapter


def gradients(model: nn.Module, loss: Tensor | None = None) -> dict[str, Tensor]:
    """Return the gradients of a model, of a loss if there is one, by the parameters' names."""
    if loss is not None:
        model.zero_grad(set_to_none=True)
        loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


def base_folder(family: str, folder: Path) -> str:
    FAMILIES[family]().config.save_pretrained(folder)
    return str(folder)
