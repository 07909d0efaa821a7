"""A job of preferences by peftkit."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.workers.meter import Meter, read_job, telling_of_memory
from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.data.load import DataConfig
from peftkit.events import Event, StepDone
from peftkit.formats.peft.folder import load_adapter
from peftkit.methods.lora import LoRA
from peftkit.tasks.preference.config import PreferenceConfig
from peftkit.train.config import TrainConfig
from peftkit.train.loop import fit


def main() -> None:
    """Train as the job says."""
    job = read_job()
    with telling_of_memory():
        base = load_base(job["source"], dtype=job["dtype"], device="cpu")
        meter = Meter(job, torch.device("cpu"))
        losses: list[float] = []

        def listen(event: Event) -> None:
            if isinstance(event, StepDone):
                losses.append(event.loss)
                meter.step()

        if job.get("adapter"):
            adapter = load_adapter(base.model, job["adapter"], trainable=True)
        else:
            adapter = attach(base.model, LoRA(rank=job["rank"], alpha=2 * job["rank"]))
        settings = PreferenceConfig(loss=job["loss"], **job["settings"])
        meter.init_from()
        data = DataConfig(train=job["file"], max_length=job["max_length"])
        task = settings.on(base.model, base.tokenizer, data)
        rows = task.load(job["file"])
        config = TrainConfig(
            output_dir=Path(job["output"]),
            max_steps=job["steps"],
            batch_size=job["batch_size"],
            learning_rate=job["learning_rate"],
            schedule="constant",
            warmup_ratio=0.0,
            save_every=None,
        )
        fit(base.model, task, rows, config=config, on_event=listen)
        meter.finish(losses, adapter.num_trainable)


if __name__ == "__main__":
    main()
