"""LoftQ: what is lost by quantising comes back as far as the rank allows."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from peftkit.adapter import attach
from peftkit.errors import AdapterError, TargetError
from peftkit.formats.peft.folder import load_adapter, save_adapter
from peftkit.methods.data_init import loftq_starts
from peftkit.methods.lora import LoRA
from peftkit.quant.layers import weight_of
from peftkit.quant.quantize import quantize_model
from tests.families import ARCHITECTURES, FAMILIES

LOFTQ = LoRA(rank=5, alpha=15, init="loftq", targets=("q", "v", "down"))


def pair(family: str, kind: str = "nf4") -> tuple[nn.Module, nn.Module]:
    """Return a model and the same quantised."""
    original = FAMILIES[family]().eval()
    model = copy.deepcopy(original)
    quantize_model(model, kind, compute_dtype=torch.float32)
    return original, model


@pytest.mark.parametrize(("family", "kind"), [("llama", "fp4"), ("gpt2", "nf4"), ("phi3", "int8")])
def test_it_starts_as_the_best_of_its_rank_for_what_was_lost(family: str, kind: str) -> None:
    original, model = pair(family, kind)
    adapter = attach(model, LOFTQ, starts=loftq_starts(model, LOFTQ, original))
    for path, module in adapter.modules.items():
        weight, quantized = (weight_of(m).float() for m in (original.get_submodule(path), module))
        left = weight - module.merged_weight(quantized)
        parts = module.site.rows.values() if module.site.rows else [torch.arange(len(weight))]
        for rows in parts:  # in gpt2 and phi3 q and v are rows of one layer
            tail = torch.linalg.svdvals(weight[rows] - quantized[rows])[5:]
            # Eckart and Young: no matrix of rank 5 leaves less
            torch.testing.assert_close(left[rows].norm(), tail.norm(), atol=1e-5, rtol=1e-4)
        others = torch.ones(len(weight), dtype=torch.bool)
        others[torch.cat(list(parts))] = False
        assert torch.equal(left[others], (weight - quantized)[others])


def test_without_its_start_it_is_refused_by_the_name_of_what_makes_it() -> None:
    _, model = pair("llama")
    with pytest.raises(AdapterError, match=r"Make it with loftq_starts\(\.\.\.\)"):
        attach(model, LOFTQ)


def test_over_weights_that_lost_nothing_it_is_refused(tmp_path: Path) -> None:
    original, model = pair("llama")
    with pytest.raises(TargetError, match="the weight equals the original"):
        loftq_starts(original, LOFTQ, copy.deepcopy(original))
    save_adapter(attach(model, LOFTQ, starts=loftq_starts(model, LOFTQ, original)), tmp_path)
    with pytest.raises(AdapterError, match="this layer is not quantised"):
        load_adapter(original, tmp_path)


def test_stacked_experts_have_no_such_start() -> None:
    model = ARCHITECTURES["mixtral"]()
    with pytest.raises(TargetError, match=r"stacked experts .* supports neither"):
        loftq_starts(model, LoRA(rank=2, init="loftq"), model)
