"""A tiny base for a bank of adapters, and adapters with random weights."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from peftkit.adapter import attach
from peftkit.base.load import Base
from peftkit.base.pack import fingerprint
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.methods.lora import LoRA
from peftkit.quant.audit import audit
from tests.helpers.adapters import perturb


def tiny_base(model: nn.Module, tokenizer: Any = None) -> Base:
    """Say of a tiny model what load_base says of a real one."""
    return Base(
        model=model,
        tokenizer=tokenizer,
        name="tiny",
        hub_id=None,
        revision=None,
        fingerprint=fingerprint(model),
        audit=audit(model),
        device=torch.device("cpu"),
    )


def write_adapter(
    model: nn.Module, method: LoRA, folder: Path, seed: int, **provenance: Any
) -> Path:
    """Write an adapter that has learnt something; the model is bare again."""
    adapter = attach(model, method, seed=seed)
    perturb(adapter.parameters(), seed=seed)
    save_adapter(adapter, folder, Provenance(**provenance))
    adapter.detach()
    return folder
