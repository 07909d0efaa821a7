"""Run a job with peftkit: attach, then fit with the task."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import shapes
from benchmarks.workers.meter import Meter, device_of, read_job, telling_of_memory
from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.base.request import DTYPES
from peftkit.base.sharding import shard_base
from peftkit.data.pack import IGNORE, Row
from peftkit.events import Event, Notice, StepDone
from peftkit.formats.peft.load import load_adapter
from peftkit.methods.lora import LoRA
from peftkit.quant.layers import keep_copies
from peftkit.quant.quantize import quantize_model
from peftkit.settings import DataConfig, TrainConfig
from peftkit.tasks.text.masked_lm import MaskedLM, MaskedLMConfig
from peftkit.tasks.text.seq2seq import PairRow, Seq2Seq, Seq2SeqConfig
from peftkit.tasks.tokens import CausalLM
from peftkit.train.batches import StatelessSampler
from peftkit.train.loop import fit


def main() -> None:
    """Train a job's rows in their order."""
    job = read_job()
    with telling_of_memory():
        device = device_of(job)
        meter = Meter(job, device)
        losses: list[float] = []
        notices: list[str] = []

        def listen(event: Event) -> None:
            if isinstance(event, StepDone):
                meter.step()
                losses.append(event.loss)
            elif isinstance(event, Notice):
                notices.append(event.text)

        model, train = prepare(job, device, listen)
        meter.init_from()
        train()
        meter.finish(losses, model, notices=notices)


def prepare(
    job: dict[str, Any], device: torch.device, listen: Callable[[Event], None]
) -> tuple[nn.Module, Callable[[], object]]:
    """Return the model with its adapter, and the call that trains it."""
    model, tokenizer = _model(job, device)
    if "adapter" in job:
        load_adapter(model, job["adapter"], trainable=True)
    else:
        method = LoRA(rank=job["rank"], alpha=2 * job["rank"], **job.get("method", {}))
        attach(model, method)
    settings = {
        "epochs": 1.0,
        "batch_size": job["batch_size"],
        "learning_rate": job["learning_rate"],
        "schedule": "constant",
        "warmup_ratio": 0.0,
        "save_every": None,
        "output_dir": Path(job["output"]),
    }
    config = TrainConfig(**settings | job.get("train", {}))
    if config.shards_base:
        shard_base(model, device, offload=config.shard == "offload")
    task = _task(job, model, tokenizer)
    rows = [_row(job["task"], n, row) for n, row in enumerate(job["rows"])]
    ordered = _in_order(rows, config)
    return model, lambda: fit(model, task, ordered, config=config, on_event=listen)


def _model(job: dict[str, Any], device: torch.device) -> tuple[Any, Any]:
    quantize = job["quantize"]
    if "shape" not in job:
        base = load_base(job["source"], dtype=job["dtype"], quantize=quantize, device=device)
        model = base.model
        if layers := job.get("num_layers"):
            model.model.layers = model.model.layers[:layers]
            model.config.num_hidden_layers = layers
        return model, base.tokenizer

    def pack(block: nn.Module) -> None:
        if quantize != "none":
            quantize_model(block, quantize, device=device)

    shape, dtype = shapes.SHAPES[job["shape"]], DTYPES[job["dtype"]]
    changes = job.get("sizes", {})
    model = shapes.build(shape, dtype=dtype, device=device, each_block=pack, **changes)
    if device.type == "cpu":
        keep_copies(model)
    return model, shapes.tokenizer()


class _GivenMasks(MaskedLM):
    """Masked language modelling with given masks, which are the same on both sides."""

    def collate(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        size = max(len(row.input_ids) for row in rows)
        names = ("input_ids", "attention_mask", "labels")
        filled = dict(zip(names, (self.tokenizer.pad_token_id, 0, IGNORE), strict=True))
        batch = {name: torch.full((len(rows), size), value) for name, value in filled.items()}
        for number, row in enumerate(rows):
            length = len(row.input_ids)
            batch["input_ids"][number, :length] = torch.tensor(row.input_ids)
            batch["attention_mask"][number, :length] = 1
            batch["labels"][number, :length] = torch.tensor(row.labels)
        labels = batch.pop("labels").flatten()
        index = (labels != IGNORE).nonzero().flatten()
        batch |= {"target_index": index, "targets": labels[index]}
        return self.layout.unpadded(batch)


def _task(job: dict[str, Any], model: Any, tokenizer: Any) -> Any:
    longest = max(len(row["input_ids"]) for row in job["rows"])
    data = DataConfig(train="", packing=False, max_length=max(longest, 2))
    if job["task"] == "masked_lm":
        return _GivenMasks(model, tokenizer, MaskedLMConfig(), data)
    if job["task"] == "seq2seq":
        return Seq2Seq(model, tokenizer, Seq2SeqConfig(), data)
    return CausalLM(model, tokenizer, data)


def _row(task: str, number: int, row: dict[str, list[int]]) -> Any:
    ids, labels, name = tuple(row["input_ids"]), tuple(row["labels"]), f"row {number}"
    if task == "seq2seq":
        return PairRow(ids, labels, "", name)
    return Row(ids, labels, (len(ids),), name)


def _in_order(rows: list[Any], config: TrainConfig) -> list[Any]:
    """Return the rows in an order that fit's shuffle reverts."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    order = StatelessSampler(len(rows), config.rows_per_step(world), config.seed)
    shuffled = list(rows)
    place = 0
    for step in range(order.steps_per_epoch):
        for index in order.step_indices(step):
            shuffled[index] = rows[place]
            place += 1
    return shuffled


if __name__ == "__main__":
    main()
