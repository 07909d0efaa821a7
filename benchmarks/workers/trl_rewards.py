"""Run a GRPO job with TRL over PEFT: losses of given completions, or steps.

Runs in a separate environment (trl, peft); imports nothing of peftkit.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import PeftModel
from trl import GRPOConfig, GRPOTrainer

from benchmarks.workers import sums
from benchmarks.workers.meter import Meter, read_job, telling_of_memory
from benchmarks.workers.peer_model import peft_model
from benchmarks.workers.vowels import vowels

SETTINGS: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "luspo": {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
}
HERMES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}
"""The response_template of a tokenizer for calls in Hermes' format."""
COMMON: dict[str, Any] = {
    "report_to": [],
    "bf16": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "beta": 0.0,
    "temperature": 1.0,
    "logging_steps": 1,
}


def padded(rows: list[list[Any]], *, left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows padded with zeros, and a mask."""
    width = max(map(len, rows))
    made, mask = [], []
    for row in rows:
        pad = [0] * (width - len(row))
        made.append([*pad, *row] if left else [*row, *pad])
        mask.append([*pad, *[1] * len(row)] if left else [*[1] * len(row), *pad])
    return torch.tensor(made), torch.tensor(mask)


def losses(job: dict[str, Any]) -> dict[str, float]:
    """Return each loss of given completions."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["source"])
    documents = [
        (group["prompt"], answer, worth)
        for group in job["groups"]
        for answer, worth in zip(group["answers"], group["worth"], strict=True)
    ]
    old, start = [], 0
    for _, answer, _ in documents:
        old.append(job["old"][start : start + len(answer)])
        start += len(answer)
    prompts, prompt_mask = padded([list(prompt) for prompt, _, _ in documents], left=True)
    answers, answer_mask = padded([answer for _, answer, _ in documents])
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": answers,
        "completion_mask": answer_mask,
        "advantages": torch.tensor([worth for _, _, worth in documents]),
        "old_per_token_logps": padded(old)[0],
        "num_items_in_batch": answer_mask.sum(),
    }
    found = {}
    for loss in job["losses"]:
        base = transformers.AutoModelForCausalLM.from_pretrained(job["source"], dtype="float32")
        model = PeftModel.from_pretrained(base, job["adapter"], is_trainable=True)
        config = GRPOConfig(
            job["output"],
            per_device_train_batch_size=len(documents),
            num_generations=len(documents),
            max_completion_length=job["max_new_tokens"],
            **COMMON,
            **SETTINGS[loss],
        )
        rows = Dataset.from_list([{"prompt": "x"}] * 4)
        trainer = GRPOTrainer(model, vowels, config, rows, processing_class=tokenizer)
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        with torch.no_grad():
            found[loss] = float(trainer._compute_loss(trainer.model, inputs))
    return found


def learn(job: dict[str, Any], meter: Meter) -> None:
    """Train a job."""
    seconds: list[float] = []
    before = time.process_time()

    class Steps(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            nonlocal before
            seconds.append(time.process_time() - before)
            before = time.process_time()
            meter.step()

    with contextlib.redirect_stdout(sys.stderr):
        tokenizer = transformers.AutoTokenizer.from_pretrained(job["source"])
        told = job | {"quantize": "none", "task": "causal_lm"}
        model = peft_model(told, torch.device("cpu"))
        lines = Path(job["file"]).read_text().splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines]
        rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]
        parts = job.get("parts", 1)
        config = GRPOConfig(
            job["output"],
            per_device_train_batch_size=job["prompts"] * job["answers"] // parts,
            gradient_accumulation_steps=parts,
            num_generations=job["answers"],
            max_completion_length=job["max_new_tokens"],
            max_steps=job["steps"],
            learning_rate=1e-5,
            **COMMON,
            **SETTINGS["dapo"],
        )
        given: dict[str, Any] = {"reward_funcs": vowels, "processing_class": tokenizer}
        if "tools" in job:
            use_tools(job, given, config)
        meter.init_from()
        trainer = GRPOTrainer(model, args=config, train_dataset=Dataset.from_list(rows), **given)
        rollouts = clocked(trainer)
        trainer.add_callback(Steps())
        trainer.train()
    number = job["prompts"] * job["answers"]
    log = [one for one in trainer.state.log_history if "completions/mean_length" in one]
    figures = {
        "new_tokens": [one["completions/mean_length"] * number for one in log],
        "calls": [one.get("tools/call_frequency", 0) for one in log],
        "rollout_seconds": rollouts,
    }
    meter.finish([], model, cpu_seconds=seconds, **figures)


def use_tools(job: dict[str, Any], given: dict[str, Any], config: GRPOConfig) -> None:
    """Give the job functions to call, and reward the turns of completions."""
    tokenizer = given["processing_class"]
    tokenizer.chat_template, tokenizer.response_template = job["template"], HERMES
    given |= {"tools": [sums.multiply, sums.add], "reward_funcs": sums.turns}
    config.max_tool_calling_iterations = 2


def clocked(trainer: GRPOTrainer) -> list[float]:
    """Return a list that grows by the processor seconds of each rollout."""
    seconds: list[float] = []
    generate = trainer._generate

    def timed(*args: Any) -> Any:
        began = time.process_time()
        found = generate(*args)
        seconds.append(time.process_time() - began)
        return found

    trainer._generate = timed
    return seconds


def main() -> None:
    """Do a job."""
    job = read_job()
    meter = Meter(job, torch.device("cpu"))
    with telling_of_memory():
        if "groups" in job:
            with contextlib.redirect_stdout(sys.stderr):
                found = losses(job)
            print("\n" + json.dumps(found), flush=True)
        else:
            learn(job, meter)


if __name__ == "__main__":
    main()
