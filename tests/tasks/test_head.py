"""The loss made chunk by chunk is the loss of the model's own logits, in every family."""

from __future__ import annotations

import pytest
import torch

from peftkit.adapter import attach
from peftkit.data.load import DataConfig
from peftkit.data.pack import Row
from peftkit.methods.lora import LoRA
from peftkit.tasks.causal_lm import CausalLM
from peftkit.tasks.loss import head_of
from peftkit.train.memory.blocks import Blocks
from peftkit.train.model import paths
from tests.conftest import use_small_chunks
from tests.families import ARCHITECTURES, tiny_tokenizer

FAMILIES = ["llama", "gpt2", "gemma2", "cohere", "granite", "gptj", "gpt_neox", "mixtral", "opt"]


@pytest.mark.parametrize("targets", [("q",), ("q", "head")], ids=["frozen-head", "adapted-head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_loss_and_gradients_are_those_of_the_whole(
    family: str, targets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ARCHITECTURES[family]().eval()
    adapter = attach(model, LoRA(rank=2, alpha=4, targets=targets))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    config = DataConfig(train="", packing=False, max_length=None)
    task = CausalLM(model, tiny_tokenizer(), config)
    rows = [Row(tuple(range(3, 3 + n)), (-100, -100, *range(5, 3 + n)), (n,), "") for n in (9, 14)]
    batch = task.collate(rows)
    results = []
    use_small_chunks(monkeypatch)
    said = []
    for head in (None, task._head):
        task._head = head
        said.append(
            paths(model, Blocks(model), task.paths).partition("loss: ")[2].partition(";")[0]
        )
        loss = task.loss_sum(model, batch)
        results.append((loss, torch.autograd.grad(loss, list(adapter.parameters()))))
    (whole, wanted), (chunked, found) = results
    assert head_of(model) is not None
    assert said == ["label rows, all logits at once", "label rows alone, in chunks"]
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # another order of sums


def test_a_head_that_does_more_than_its_config_says_is_not_used() -> None:
    model = ARCHITECTURES["llama"]().eval()
    model.lm_head.register_forward_hook(lambda module, args, output: 2 * output)
    assert head_of(model) is not None  # a hook is part of the module
    model = ARCHITECTURES["gemma2"]().eval()
    forward = model.forward

    def other(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        output.logits = output.logits + 1
        return output

    model.forward = other
    assert head_of(model) is None
