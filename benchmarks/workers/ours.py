"""The job by peftkit."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from peftkit.adapter import attach
from peftkit.base import load_base
from peftkit.data.load import DataConfig
from peftkit.data.pack import Row
from peftkit.events import Event, StepDone
from peftkit.methods.lora import LoRA
from peftkit.tasks.causal_lm import CausalLM
from peftkit.train.config import TrainConfig
from peftkit.train.loop import fit
from peftkit.train.metrics import peak_bytes


def main() -> None:
    """Train as the job says, in the order of its rows."""
    job = json.loads(Path(sys.argv[1]).read_text())
    losses: list[float] = []
    first_step: list[float] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            first_step.append(time.perf_counter())
            losses.append(event.loss)

    base = load_base(job["model"], dtype=job["dtype"], quantize=job["quantize"])
    attach(base.model, LoRA(rank=job["rank"], alpha=2 * job["rank"]))
    task = CausalLM(base.model, base.tokenizer, DataConfig(train="", packing=False))
    rows = [
        Row(tuple(r["input_ids"]), tuple(r["labels"]), (len(r["input_ids"]),), f"row {n}")
        for n, r in enumerate(job["rows"])
    ]
    config = TrainConfig(
        output_dir=Path(job["output"]),
        epochs=1.0,
        batch_size=job["batch_size"],
        learning_rate=job["learning_rate"],
        schedule="constant",
        warmup_ratio=0.0,
        save_every=None,
    )
    began = time.perf_counter()
    fit(base.model, task, _in_order(rows, config), config=config, on_event=listen)
    seconds = time.perf_counter() - began
    facts = {
        "seconds": seconds,
        "first_step_seconds": first_step[0] - began,
        "peak_bytes": peak_bytes(base.device),
        "losses": losses,
    }
    print(json.dumps(facts))


def _in_order(rows: list[Row], config: TrainConfig) -> list[Row]:
    """Return the rows such that fit's shuffle puts them back into the order they had."""
    from peftkit.train.order import Order

    order = Order(len(rows), config.batch_size, config.seed)
    shuffled: list[Row] = list(rows)
    place = 0
    for step in range(order.steps_per_epoch):
        for index in order.group(step):
            shuffled[index] = rows[place]
            place += 1
    return shuffled


if __name__ == "__main__":
    main()
