"""Models train the same with plain products for attention as with torch's own."""

import pytest
import torch
from torch import Tensor, nn

from peftkit.adapter import attach
from peftkit.execution.plan import ExecutionPlan
from peftkit.forward import attention_kernels as attention
from peftkit.forward.attention import training_attention
from peftkit.methods.lora import LoRA
from tests.helpers.families import ARCHITECTURES
from tests.helpers.hybrids import FURTHER

IDS = torch.arange(36).remainder(23).view(3, 12) + 3
FAMILIES = ["llama", "gpt2", "gpt_neox", "gemma2", "bert", "t5", "bart", "qwen3_moe", "mistral_swa"]
VALUES_APART = ["deepseek_v2"]
"""Values are of another size than keys."""
MASK = torch.ones(3, 12, dtype=torch.long)
MASK[1, 7:] = MASK[2, 10:] = 0
GROUPED = ExecutionPlan(dtype="bfloat16")


def trained(model: nn.Module, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
    labels = IDS.where(mask.bool(), -100)  # what padding sees within a window is nobody's business
    loss = model(input_ids=IDS, labels=labels, attention_mask=mask).loss
    learning = [p for p in model.parameters() if p.requires_grad]
    return loss.detach(), list(torch.autograd.grad(loss, learning))


@pytest.mark.parametrize(
    ("family", "padded"),
    [("llama", False), ("bert", False), *((name, True) for name in FAMILIES + VALUES_APART)],
)
def test_loss_matches_torch(family, padded, monkeypatch):
    torch.manual_seed(0)
    model = {**ARCHITECTURES, **FURTHER}[family]()
    model.eval()  # dropout would go to torch's attention; gradients are asked for all the same
    for parameter in attach(model, LoRA(rank=2, alpha=4)).parameters():
        nn.init.normal_(parameter, std=0.1)
    mask = MASK if padded else torch.ones_like(MASK)
    want, wanted = trained(model, mask)
    calls: list[bool] = []
    grouped = attention.grouped_attention

    def counting(*args: Tensor) -> Tensor:
        calls.append(True)
        return grouped(*args)

    monkeypatch.setattr(attention, "grouped_attention", counting)
    with training_attention(model, GROUPED, documents=False) as used:
        loss, grads = trained(model, mask)
    assert used
    assert calls
    torch.testing.assert_close(loss, want)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_what_gains_nothing_is_left_to_torch():
    plan = ExecutionPlan(dtype="float32")
    with training_attention(ARCHITECTURES["llama"](), plan, documents=False) as used:
        assert used is None
    assert ExecutionPlan(device="cuda", dtype="bfloat16").attention == "sdpa"
