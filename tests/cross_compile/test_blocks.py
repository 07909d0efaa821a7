"""Blocks as a GPU runs them, compiled: one graph, and none again for rows of another length.

The graphs are those of a GPU's layout (LoRA beside the base, norms and gates as their kernels take
them), made by Dynamo and AOTAutograd; what machine code becomes of them is not seen here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from peftkit.adapter import attach
from peftkit.execution.plan import ExecutionPlan
from peftkit.kernels.packing import keep_copies
from peftkit.methods.lora import LoRA
from peftkit.model.modes import prepared_for_training
from peftkit.quant.quantize import quantize_model
from peftkit.train.memory import blocks as blocks_module
from peftkit.train.memory.blocks import Blocks
from tests.families import ARCHITECTURES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # torch.compile's own
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),
]
LENGTHS = (12, 20, 37)


def gradients(model: Any, length: int) -> list[Tensor]:
    ids = torch.arange(2 * length).remainder(53).view(2, length) + 5
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", ["none", "nf4"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_a_block_is_one_graph_for_every_length(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "BACKEND", "aot_eager")
    torch.manual_seed(0)
    model: Any = ARCHITECTURES[family]().bfloat16().train()
    del model.model.layers[1:]
    if kind != "none":
        quantize_model(model, kind)
        keep_copies(model, 0)
    adapter = attach(model, LoRA(rank=3))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(std=0.1)
    with prepared_for_training(model, ExecutionPlan(device="cuda")):
        expected = [gradients(model, length) for length in LENGTHS]
        torch.compiler.reset()
        counters.clear()
        blocks = Blocks(model)
        blocks.compile()
        found = [gradients(model, length) for length in LENGTHS]
        graphs = counters["stats"]["unique_graphs"]
        breaks = dict(counters["graph_break"])
        blocks.restore()
    torch.compiler.reset()
    assert graphs == 1
    assert not breaks
    for own, wanted in zip(found, expected, strict=True):
        error = torch.stack([(a - b).norm() for a, b in zip(own, wanted, strict=True)]).norm()
        # a compiled graph rounds to 16 bits elsewhere
        assert error <= 0.05 * torch.stack([grad.norm() for grad in wanted]).norm()
