"""Models train the same with the CPU attention as with torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from peftkit.adapter import attach
from peftkit.kernels import attention
from peftkit.methods.lora import LoRA
from peftkit.tasks import attention_kernels
from peftkit.tasks.attention import training_attention
from tests.families import ARCHITECTURES, FURTHER

IDS = torch.arange(36).remainder(23).view(3, 12) + 3
FAMILIES = ["llama", "gpt2", "gpt_neox", "gemma2", "bert", "t5", "bart", "qwen3_moe", "mistral_swa"]
VALUES_APART = ["deepseek_v2", "deepseek_v3"]
"""Values are of another size than keys."""
SHORT_ONLY = ["gemma2", "t5"]
"""Rows of any length are short, for scores that are capped or have a bias of positions."""
WAYS = ("grouped_attention", "blocked_attention")
CASES = [
    *((family, WAYS[n % 2], n % 4 < 2) for n, family in enumerate([*FAMILIES, *VALUES_APART])),
    *(("llama", WAYS[1], padded) for padded in (False, True)),
]
MASK = torch.ones(3, 12, dtype=torch.long)
MASK[1, 7:] = MASK[2, 10:] = 0


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, way: str) -> Iterator[list[bool]]:
    """Count the calls that a kind of attention takes."""
    calls: list[bool] = []
    whole = getattr(attention_kernels, way)

    def counting(*args: Tensor) -> Tensor:
        calls.append(True)
        return whole(*args)

    with monkeypatch.context() as patch:
        patch.setattr(attention_kernels, way, counting)
        yield calls


def trained(model: nn.Module, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
    labels = IDS.where(mask.bool(), -100)  # what padding sees within a window is nobody's business
    loss = model(input_ids=IDS, labels=labels, attention_mask=mask).loss
    learning = [p for p in model.parameters() if p.requires_grad]
    return loss.detach(), list(torch.autograd.grad(loss, learning))


@pytest.mark.parametrize(("family", "way", "padded"), CASES)
def test_loss_and_gradients_are_those_of_torchs_attention(
    family: str, way: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "blocked_attention":
        monkeypatch.setattr(attention, "MAX_BYTES", 0)  # no row is short
    torch.manual_seed(0)
    model = {**ARCHITECTURES, **FURTHER}[family]()
    model.eval()  # dropout would go to torch's attention; gradients are asked for all the same
    for parameter in attach(model, LoRA(rank=2, alpha=4)).parameters():
        nn.init.normal_(parameter, std=0.1)
    mask = MASK if padded else torch.ones_like(MASK)
    want, wanted = trained(model, mask)
    with training_attention(model) as used, counted(monkeypatch, way) as calls:
        loss, grads = trained(model, mask)
    assert used
    assert calls or family in SHORT_ONLY
    torch.testing.assert_close(loss, want)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
