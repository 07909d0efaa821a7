"""Run a job with TRL's SFTTrainer over PEFT, with its best settings for the machine.

Runs in a separate environment (trl, peft); imports nothing of peftkit.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch.utils.data import SequentialSampler
from trl import SFTConfig, SFTTrainer

from benchmarks import shapes
from benchmarks.workers.meter import Meter, device_of, read_job, telling_of_memory
from benchmarks.workers.peer_model import peft_model


class InOrder(SFTTrainer):
    """SFTTrainer without shuffling: both sides see the same batches."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class ModelLoss(InOrder):
    """The same with the model's own loss, as in transformers' Trainer.

    TRL's loss never holds all logits, but on a CPU it computes every position, masked ones too, and
    multiplies in float32.
    """

    compute_loss = transformers.Trainer.compute_loss


class Steps(transformers.TrainerCallback):
    """Clocks the steps."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.meter.step()


def shard_on_cpu() -> None:
    """Make accelerate shard on CPUs, where it otherwise ignores its FSDP settings."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


def settings(job: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the settings of both TRL and Unsloth."""
    return {
        "output_dir": job["output"],
        "per_device_train_batch_size": job["batch_size"],
        "gradient_accumulation_steps": 1,  # Unsloth's default is another one
        "num_train_epochs": 1,
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "max_length": None,
        "bf16": False,  # the base and the adapters are in bf16 already: faster than autocast
        "use_cpu": device.type == "cpu",
        "optim": "adamw_torch_fused",
        "disable_tqdm": True,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "remove_unused_columns": False,
        "dataloader_pin_memory": device.type == "cuda",
    }


def run(trainer: Any, meter: Meter) -> None:
    """Train, save the adapter as ours does, and print the measurements."""
    trainer.add_callback(Steps(meter))
    meter.init_from()
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train()
        trainer.save_model()
    history = trainer.state.log_history
    meter.finish([float(entry["loss"]) for entry in history if "loss" in entry], trainer.model)


def main() -> None:
    """Train a job's rows in their order."""
    job = read_job()
    with telling_of_memory():
        device = device_of(job)
        meter = Meter(job, device)
        model = peft_model(job, device)
        config = SFTConfig(
            **settings(job, device),
            gradient_checkpointing=bool(job.get("recompute")),
            torch_compile=bool(job.get("compile")),
            use_liger_kernel=bool(job.get("liger")),
            padding_free=bool(job.get("padding_free")),
        )
        if job.get("shard_on_cpu"):
            shard_on_cpu()
        if "shape" in job:
            tokenizer = shapes.tokenizer()
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(job["source"])
        kind = ModelLoss if job.get("model_loss") else InOrder
        trainer = kind(
            model=model,
            args=config,
            train_dataset=Dataset.from_list(job["rows"]),
            processing_class=tokenizer,
        )
        run(trainer, meter)


if __name__ == "__main__":
    main()
