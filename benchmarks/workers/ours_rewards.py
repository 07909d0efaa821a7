"""Run a GRPO job with peftkit: losses of given completions, or steps with rollouts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.workers.meter import Meter, read_job, telling_of_memory
from peftkit import run_recipe
from peftkit.base.load import load_base
from peftkit.config.schema import from_dict
from peftkit.events import Event, RolledOut, StepDone
from peftkit.formats.peft.load import load_adapter
from peftkit.inference import dialogues
from peftkit.inference.engine import Request
from peftkit.recipe import Recipe
from peftkit.settings import DataConfig
from peftkit.tasks.rewards.grpo_config import GRPOConfig
from peftkit.tasks.rewards.grpo_rows import Group
from peftkit.tasks.rewards.grpo_tools import Tools
from peftkit.tasks.rewards.reward_functions import RewardTerm

APART = 0.2
"""Standard deviation of old log-probabilities around the current ones."""


def losses(job: dict[str, Any]) -> dict[str, Any]:
    """Return each loss of given completions, and the old log-probabilities."""
    base = load_base(job["source"], dtype="fp32", device="cpu")
    load_adapter(base.model, job["adapter"], trainable=True)
    found: dict[str, Any] = {}
    for loss in job["losses"]:
        asked = GRPOConfig(
            rewards=(RewardTerm(use="exact_match"),),
            loss=loss,
            max_new_tokens=job["max_new_tokens"],
            updates=2,
        )
        task: Any = asked.on(base.model, base.tokenizer, DataConfig(train="x", max_length=128))
        groups = [
            Group(tuple(g["prompt"]), tuple(map(tuple, g["answers"])), tuple(g["worth"]), "rows:1")
            for g in job["groups"]
        ]
        with task.training(base.model), torch.no_grad():
            task.add_log_probs(base.model, groups, task.collate(groups))
            batch = task.collate(groups)
            now = batch["old"]
            noise = torch.randn(now.shape, generator=torch.Generator().manual_seed(2))
            old = now + APART * noise
            batch["old"] = old
            found[loss] = float(task.loss(base.model, batch)[0]) / task.num_targets(batch)
        found["old"] = old.tolist()
    return found


def learn(job: dict[str, Any], meter: Meter) -> None:
    """Train a job."""
    seconds: list[float] = []
    tokens: list[float] = []
    calls: list[float] = []
    rollouts: list[float] = []
    before = time.process_time()

    def listen(event: Event) -> None:
        nonlocal before
        if isinstance(event, RolledOut):
            tokens.append(0)
        if isinstance(event, StepDone):
            tokens[-1] = event.figures["length"] * job["prompts"] * job["answers"]
            calls.append(event.figures.get("calls", 0))
            seconds.append(time.process_time() - before)
            before = time.process_time()
            meter.step()

    spec = {
        "task": {
            "type": "grpo",
            "rewards": [{"use": "benchmarks/workers/vowels.py:vowels"}],
            "answers": job["answers"],
            "max_new_tokens": job["max_new_tokens"],
            "mask_cut": False,
        },
        "base": {"model": job["source"], "dtype": job["dtype"]},
        "method": {"type": "lora", "rank": job["rank"], "alpha": 2 * job["rank"]},
        "data": {"train": job["file"], "max_length": 512},
        "train": {
            "output_dir": str(Path(job["output"]) / "run"),
            "max_steps": job["steps"],
            "batch_size": job["prompts"],
            "learning_rate": 1e-5,
            "save_every": None,
            "compile": False,
        },
    }
    if "tools" in job:
        use_tools(job, spec)
    if job.get("anew"):
        dialogues.Request = _of_its_own  # type: ignore[misc, assignment]
    sample = Tools.sample

    def clocked(*args: Any) -> Any:
        began = time.process_time()
        found = sample(*args)
        rollouts.append(time.process_time() - began)
        return found

    Tools.sample = clocked  # type: ignore[method-assign]
    meter.init_from()
    run_recipe(from_dict(Recipe, spec, "the job"), on_event=listen)
    figures = {"new_tokens": tokens, "calls": calls, "rollout_seconds": rollouts}
    meter.finish([], torch.nn.Module(), cpu_seconds=seconds, **figures)


def use_tools(job: dict[str, Any], spec: dict[str, Any]) -> None:
    """Give the job functions to call, and reward the turns of completions."""
    template = Path(job["output"] + ".jinja")
    template.write_text(job["template"], encoding="utf-8")
    spec["data"]["chat_template"] = str(template)
    tools = [f"{job['tools']}:{name}" for name in ("multiply", "add")]
    rewards = [{"use": f"{job['tools']}:turns"}]
    spec["task"] |= {"tools": tools, "rewards": rewards, "max_turns": 3}


def _of_its_own(ids: Any, sampling: Any, seed: int, **_: Any) -> Request:
    """Return the request of a turn without computed keys and values."""
    return Request(ids, sampling, seed)


def main() -> None:
    """Do a job."""
    job = read_job()
    meter = Meter(job, torch.device("cpu"))
    with telling_of_memory():
        if "groups" in job:
            print("\n" + json.dumps(losses(job)), flush=True)
        else:
            learn(job, meter)


if __name__ == "__main__":
    main()
