"""Adapters there and back: saved here and loaded by PEFT, saved by PEFT and loaded here."""

from __future__ import annotations

import copy
from pathlib import Path

import peft
import torch
from torch import nn

from peftkit.adapter import Adapter, attach
from peftkit.formats.peft.folder import load_adapter, save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.methods.protocol import Method
from tests.families import ARCHITECTURES
from tests.kinds import outputs

TOLERANCE = 2e-6
"""float32 sums in another order; logits are of order one to ten."""


def built(family: str) -> nn.Module:
    """Return one and the same tiny model each time."""
    torch.manual_seed(0)
    return ARCHITECTURES[family]().eval()


def moved(model: nn.Module, size: float = 0.05) -> None:
    """Stand in for training: move every trainable value a little."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape, generator=generator)


def trained(model: nn.Module, method: Method) -> Adapter:
    """Attach a method and move its tensors; a fresh one must have changed nothing."""
    before = outputs(model)
    adapter = attach(model, method)
    assert torch.equal(outputs(model), before)
    moved(model)
    assert not torch.allclose(outputs(model), before, atol=1e-2)
    return adapter


def saved(adapter: Adapter, folder: Path) -> Path:
    """Save an adapter of whatever task."""
    return save_adapter(adapter, folder, Provenance(task_type=None))


def check_back(family: str, config: peft.PeftConfig, folder: Path) -> Adapter:
    """We compute from PEFT's file what PEFT computes, and again from that saved by us."""
    theirs = peft.get_peft_model(built(family), copy.deepcopy(config)).eval()
    moved(theirs)
    theirs.save_pretrained(folder)
    expected = outputs(theirs.base_model.model)
    model = built(family)
    adapter = load_adapter(model, folder)
    torch.testing.assert_close(outputs(model), expected, atol=TOLERANCE, rtol=0)
    saved(adapter, folder / "again")
    other = built(family)
    adapter = load_adapter(other, folder / "again")
    assert torch.equal(outputs(other), outputs(model))
    return adapter
