"""Run a job with Unsloth, which patches TRL's SFTTrainer.

Runs in a separate environment (unsloth, with the older transformers and trl that it requires);
imports nothing of peftkit. Activations are kept, as on the other sides, unless a job has
`checkpointing` (Unsloth's `use_gradient_checkpointing`) or `recompute`; `packing` packs rows.
"""

from __future__ import annotations

import contextlib
import sys

with contextlib.redirect_stdout(sys.stderr):
    import unsloth  # first: it patches what the others import

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from trl import SFTConfig, SFTTrainer

from benchmarks.workers.meter import Meter, device_of, read_job, telling_of_memory
from benchmarks.workers.trl import run, settings

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    """Train a job's rows in their order."""
    job = read_job()
    with telling_of_memory():
        device = device_of(job)
        meter = Meter(job, device)
        with contextlib.redirect_stdout(sys.stderr):
            recompute = job.get("checkpointing", "unsloth" if job.get("recompute") else False)
            longest = max(len(row["input_ids"]) for row in job["rows"])
            model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
                job["source"],
                max_seq_length=longest,
                dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[job["dtype"]],
                load_in_4bit=job["quantize"] == "nf4",
                use_gradient_checkpointing=recompute,
                use_exact_model_name=True,  # otherwise a name may map to Unsloth's own checkpoint
            )
            model = unsloth.FastLanguageModel.get_peft_model(
                model,
                r=job["rank"],
                lora_alpha=2 * job["rank"],
                lora_dropout=0,
                target_modules=ALL_LINEAR,
                use_gradient_checkpointing=recompute,
            )
            # Unsloth's default is autocast over float32 adapters; PEFT is fastest without
            own_way = job.get("adapters") != "bf16" and job["dtype"] == "bf16"
            if not own_way:
                for parameter in model.parameters():
                    parameter.data = parameter.data.to(model.dtype)
            told = settings(job, device) | {"bf16": own_way}
            if job.get("packing"):
                told |= {"packing": True, "max_length": longest, "dataset_kwargs": None}
            trainer = SFTTrainer(
                model=model,
                args=SFTConfig(**told, gradient_checkpointing=bool(recompute)),
                train_dataset=Dataset.from_list(job["rows"]),
                processing_class=tokenizer,
            )
        type(trainer)._get_train_sampler = lambda self, *args: SequentialSampler(self.train_dataset)
        run(trainer, meter)


if __name__ == "__main__":
    main()
