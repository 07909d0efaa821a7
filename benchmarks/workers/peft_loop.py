"""Run a job with PEFT in a minimal loop, the lower bound of its cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.workers.meter import Meter, device_of, read_job, telling_of_memory
from benchmarks.workers.peer_model import peft_model


def main() -> None:
    """Train a job's rows in their order."""
    job = read_job()
    with telling_of_memory():
        device = device_of(job)
        meter = Meter(job, device)
        losses: list[Tensor] = []

        def listen(loss: Tensor) -> None:
            losses.append(loss)
            meter.step()

        model, train = prepare(job, device, listen)
        meter.init_from()
        train()
        meter.finish([float(loss) for loss in losses], model)


def prepare(
    job: dict[str, Any], device: torch.device, listen: Callable[[Tensor], None]
) -> tuple[nn.Module, Callable[[], object]]:
    """Return the model with its adapter, and the call that trains it."""
    model = peft_model(job, device)
    if job.get("recompute"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=job["learning_rate"], weight_decay=0.0, fused=True)
    if job.get("compile"):
        blocks = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
        for block in (block for several in blocks for block in several):
            block.compile(dynamic=True)  # the full model would take minutes
    rows, size = job["rows"], job["batch_size"]

    def train() -> None:
        for start in range(0, len(rows), size):
            batch = collate(rows[start : start + size], paired=job["task"] == "seq2seq")
            moved = {name: tensor.to(device) for name, tensor in batch.items()}
            loss = model(**moved).loss
            loss.backward()
            clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            listen(loss.detach())

    return model, train


def collate(rows: list[dict[str, list[int]]], *, paired: bool) -> dict[str, Tensor]:
    """Return a batch, padded on the right to its longest row.

    Args:
        paired: Labels are a separate text, not the next tokens.
    """
    batch = {}
    for name, fill in (("input_ids", 0), ("labels", -100)):
        size = max(len(row[name]) for row in rows)
        batch[name] = torch.full((len(rows), size), fill)
        for number, row in enumerate(rows):
            batch[name][number, : len(row[name])] = torch.tensor(row[name])
    lengths = torch.tensor([[len(row["input_ids"])] for row in rows])
    places = torch.arange(batch["input_ids"].shape[1])
    assert paired or batch["labels"].shape == batch["input_ids"].shape
    return batch | {"attention_mask": (places < lengths).long()}


if __name__ == "__main__":
    main()
