"""Run a preference job with peftkit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.workers.meter import Meter, read_job, telling_of_memory
from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.events import Event, StepDone
from peftkit.formats.peft.load import load_adapter
from peftkit.methods.lora import LoRA
from peftkit.settings import DataConfig, TrainConfig
from peftkit.tasks.pairs.preference import PreferenceConfig
from peftkit.train.loop import fit


def train(job: dict[str, Any], meter: Meter) -> tuple[list[float], nn.Module]:
    """Train a job; return the losses of its steps, and the model."""
    base = load_base(job["source"], dtype=job["dtype"], device="cpu")
    losses: list[float] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            losses.append(event.loss)
            meter.step()

    if job.get("adapter"):
        load_adapter(base.model, job["adapter"], trainable=True)
    else:
        attach(base.model, LoRA(rank=job["rank"], alpha=2 * job["rank"]))
    settings = PreferenceConfig(loss=job["loss"], **job["settings"])
    meter.init_from()
    data = DataConfig(train=job["file"], max_length=job["max_length"])
    task = settings.on(base.model, base.tokenizer, data)
    config = TrainConfig(
        output_dir=Path(job["output"]) / job["loss"],
        max_steps=job["steps"],
        batch_size=job["batch_size"],
        learning_rate=job["learning_rate"],
        schedule="constant",
        warmup_ratio=0.0,
        save_every=None,
    )
    fit(base.model, task, task.load(job["file"]), config=config, on_event=listen)
    return losses, base.model


def main() -> None:
    """Run a job; for several losses, print the values of each."""
    job = read_job()
    meter = Meter(job, torch.device("cpu"))
    with telling_of_memory():
        if "jobs" in job:
            found = {each["loss"]: train(each, meter)[0] for each in job["jobs"]}
            print("\n" + json.dumps(found), flush=True)
        else:
            meter.finish(*train(job, meter))


if __name__ == "__main__":
    main()
