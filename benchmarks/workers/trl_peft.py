"""The job by TRL's SFTTrainer over PEFT, at its best settings for the machine.

Runs in an environment of its own (trl, peft); imports nothing of peftkit.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.utils.data import SequentialSampler
from trl import SFTConfig, SFTTrainer


class InOrder(SFTTrainer):
    """SFTTrainer that takes the rows as they come, so that both sides see the same batches."""

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


class FirstStep(transformers.TrainerCallback):
    """Notes when the first step ends."""

    at = 0.0

    def on_step_end(self, *args, **kwargs):
        self.at = self.at or time.perf_counter()


def main() -> None:
    """Train as the job says, in the order of its rows."""
    job = json.loads(Path(sys.argv[1]).read_text())
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[job["dtype"]]
    quantization = None
    if job["quantize"] == "nf4":
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["source"], dtype=dtype, quantization_config=quantization
    )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # else gradients vanish after an eval
    lora = LoraConfig(
        r=job["rank"],
        lora_alpha=2 * job["rank"],
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    # adapters in the base's dtype: faster on a CPU than the float32 that PEFT would choose
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    config = SFTConfig(
        output_dir=job["output"],
        per_device_train_batch_size=job["batch_size"],
        num_train_epochs=1,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        max_length=None,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        disable_tqdm=True,
        torch_compile=job["compile"],
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["source"])
    first = FirstStep()
    trainer = InOrder(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=tokenizer,
        callbacks=[first],
    )
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    facts = {
        "seconds": seconds,
        "first_step_seconds": first.at - began,
        "peak_bytes": peak,
        "losses": losses,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
