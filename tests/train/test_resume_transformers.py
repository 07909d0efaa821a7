"""A resumed run is bit-equal with what people train: 4 bits, packed rows, dropout."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from peftkit.adapter import attach
from peftkit.events import Event, StepDone
from peftkit.methods.lora import LoRA
from peftkit.quant.quantize import quantize_model
from peftkit.settings import DataConfig, TrainConfig
from peftkit.tasks.tokens import CausalLM
from peftkit.train.loop import fit
from tests.helpers.families import FAMILIES, tiny_tokenizer
from tests.helpers.toy import Crash, crash_after


def train(
    folder: Path, kind: str, data: Path, *, resume: bool = False, crash: int | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a tiny model anew, from its loading on; return losses and trained weights."""
    torch.manual_seed(0)
    model = FAMILIES["llama"]()
    if kind != "none":
        quantize_model(model, kind)
    adapter = attach(model, LoRA(rank=4, dropout=0.2, targets=("q", "v", "down")))
    config = DataConfig(train=str(data), max_length=48, packing=True)
    task = CausalLM(model, tiny_tokenizer(), config)
    losses: list[float] = []
    stop: Callable[[Event], None] = crash_after(crash) if crash else lambda event: None

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            losses.append(event.loss)
        stop(event)

    settings = TrainConfig(
        output_dir=folder, max_steps=6, batch_size=2, gradient_accumulation=2, save_every=1
    )
    rows = task.load(str(data))
    assert any(len(row.lengths) > 1 for row in rows), "nothing was packed"
    with suppress(Crash):
        fit(model, task, rows, rows[:2], settings, resume=resume, on_event=listen)
    return losses, {name: tensor.clone() for name, tensor in adapter.state().items()}


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_quantised_packed_runs_with_dropout_resume_to_the_bit(tmp_path, kind):
    data = tmp_path / "train.jsonl"
    data.write_text(
        "\n".join(
            json.dumps({"prompt": f"{n} ", "completion": "x" * (1 + n % 5)}) for n in range(30)
        )
    )
    losses, weights = train(tmp_path / "whole", kind, data)
    before, _ = train(tmp_path / "parts", kind, data, crash=4)
    after, resumed = train(tmp_path / "parts", kind, data, resume=True)
    assert len(losses) == 6
    assert before + after == losses
    assert all(torch.equal(resumed[name], tensor) for name, tensor in weights.items())
