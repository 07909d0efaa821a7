"""Run a preference job with TRL's trainer for its loss over PEFT.

Runs in a separate environment (trl, peft); imports nothing of peftkit.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import PeftModel
from torch import nn
from torch.utils.data import SequentialSampler

from benchmarks.workers.meter import Meter, read_job, telling_of_memory
from benchmarks.workers.peer_model import peft_model

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def trainer_of(job: dict[str, Any], model: Any, tokenizer: Any) -> Any:
    """Return the trainer; its steps use the rows in the order of the file."""
    loss, told = job["loss"], job["settings"]
    alone = loss in ("orpo", "cpo", "simpo")  # their NLL is a mean over the tokens of a batch
    common: dict[str, Any] = {
        "output_dir": job["output"],
        "per_device_train_batch_size": 1 if alone and job["exact"] else job["batch_size"],
        "gradient_accumulation_steps": job["batch_size"] if alone and job["exact"] else 1,
        "max_steps": job["steps"],
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "max_length": job["max_length"],
        "beta": told.get("beta", 0.1),
    }
    if loss == "kto":
        from trl import KTOConfig as Config
        from trl import KTOTrainer as Trainer

        common["train_sampling_strategy"] = "sequential"
    elif loss == "orpo":
        from trl.experimental.orpo import ORPOConfig as Config
        from trl.experimental.orpo import ORPOTrainer as Trainer
    elif alone:
        from trl.experimental.cpo import CPOConfig as Config
        from trl.experimental.cpo import CPOTrainer as Trainer

        if loss == "simpo":
            common |= {"loss_type": "simpo", "cpo_alpha": 0.0}
    else:
        from trl import DPOConfig as Config
        from trl import DPOTrainer as Trainer

        common["loss_type"] = ["sigmoid" if loss == "dpo" else loss]
        common["label_smoothing"] = told.get("label_smoothing", 0.0)
        common["precompute_ref_log_probs"] = not job["exact"]

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    rows = [json.loads(line) for line in Path(job["ordered"]).read_text().splitlines()]
    return InOrder(
        model=model,
        args=Config(**common),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def train(job: dict[str, Any], meter: Meter) -> tuple[list[float], nn.Module]:
    """Train a job; return the losses of its steps, and the model."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[job["dtype"]]
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["source"])
    tokenizer.bos_token = None  # the base adds none; two of the trainers would
    if job.get("adapter"):
        base = transformers.AutoModelForCausalLM.from_pretrained(job["source"], dtype=dtype)
        model = PeftModel.from_pretrained(base, job["adapter"], is_trainable=True)
    else:
        told = job | {"quantize": "none", "task": "causal_lm"}
        model = peft_model(told, torch.device("cpu"))
    if not hasattr(model, "warnings_issued"):
        model.warnings_issued = {}

    class Steps(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            meter.step()

    meter.init_from()
    trainer = trainer_of(job, model, tokenizer)
    trainer.add_callback(Steps())
    trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return losses, model


def main() -> None:
    """Run a job; for several losses, print the values of each."""
    job = read_job()
    meter = Meter(job, torch.device("cpu"))
    with telling_of_memory():
        with contextlib.redirect_stdout(sys.stderr):
            if "jobs" in job:
                found = {each["loss"]: train(each, meter)[0] for each in job["jobs"]}
            else:
                losses, model = train(job, meter)
        if "jobs" in job:
            print("\n" + json.dumps(found), flush=True)
        else:
            meter.finish(losses, model)


if __name__ == "__main__":
    main()
