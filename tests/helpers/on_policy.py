"""Tasks with rewards: the losses' formulas and a small recipe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from peftkit.adapter import Adapter
from peftkit.settings import DataConfig
from peftkit.tasks.rewards.grpo import GRPO
from peftkit.tasks.rewards.grpo_config import GRPOConfig
from peftkit.tasks.rewards.reward_functions import RewardTerm
from tests.helpers.finished import sections
from tests.helpers.folders import write_rows as write

MAX_NEW, KL = 7, 0.3


def task_of(model: nn.Module, tokenizer: PreTrainedTokenizerFast, loss: str, **more: Any) -> GRPO:
    asked = GRPOConfig(
        rewards=(RewardTerm(use="exact_match"),),
        loss=loss,  # type: ignore[arg-type]
        max_new_tokens=MAX_NEW,
        **more,
    )
    return asked.on(model, tokenizer, DataConfig(train="x", max_length=32))


def clipped(r: Tensor, a: float, low: float, high: float) -> Tensor:
    return -torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


def soft(r: Tensor, a: float, t: float) -> Tensor:
    return -a * (4 / t / (1 + (-t * (r - 1)).exp())).mean()


def gamma(lp: Tensor, old: Tensor, a: float, k: float, rate: float) -> Tensor:
    w = (lp - old).sum().exp().detach()
    return (-(w**k) * (rate * (1 - w)).exp() * a * lp).sum()


Formula = Callable[[Tensor, Tensor, float], Tensor]


FORMULAS: dict[str, tuple[Formula, str]] = {
    "dapo": (lambda lp, old, a: clipped((lp - old).exp(), a, 0.2, 0.28).sum(), "tokens"),
    "grpo": (lambda lp, old, a: clipped((lp - old).exp(), a, 0.2, 0.2).mean(), "answers"),
    "dr_grpo": (
        lambda lp, old, a: clipped((lp - old).exp(), a, 0.2, 0.2).sum() / MAX_NEW,
        "answers",
    ),
    "gspo": (lambda lp, old, a: clipped((lp - old).mean().exp(), a, 3e-4, 4e-4), "answers"),
    "cispo": (
        lambda lp, old, a: -((lp - old).exp().clamp(max=5.0).detach() * a * lp).sum(),
        "tokens",
    ),
    "rloo": (lambda lp, old, a: clipped((lp - old).sum().exp(), a, 0.2, 0.2), "answers"),
    "luspo": (
        lambda lp, old, a: len(lp) * clipped((lp - old).mean().exp(), a, 3e-4, 4e-4),
        "answers",
    ),
    "sapo": (lambda lp, old, a: soft((lp - old).exp(), a, 1.0 if a > 0 else 1.05), "answers"),
    "vespo": (lambda lp, old, a: gamma(lp, old, a, *((2, 3) if a >= 0 else (3, 2))), "tokens"),
}


def gradients(adapter: Adapter) -> Tensor:
    return torch.cat([p.grad.flatten() for p in adapter.parameters() if p.grad is not None])


REWARDS = """
import asyncio, time

def share_of_o(prompts, completions, **columns):
    return [text.count("o") / (len(text) + 1) for text in texts(completions)]

async def later(prompts, completions, word, **columns):
    await asyncio.sleep(0)
    assert len(word) == len(completions)
    return [None if n % 2 else float(len(text)) for n, text in enumerate(texts(completions))]

def texts(completions):
    return [c if isinstance(c, str) else c[0]["content"] for c in completions]

def always(prompts, completions, **columns):
    return [1.0] * len(completions)

def short(prompts, completions, **columns):
    return [1.0]

def huge(prompts, completions, **columns):
    return [10**400] * len(completions)

def endless(prompts, completions, **columns):
    return [10**5000] * len(completions)

def pairs(prompts, completions, **columns):
    import torch
    return [torch.ones(2)] * len(completions)

def nan(prompts, completions, **columns):
    return [float("nan")] * len(completions)

def raises(prompts, completions, **columns):
    raise KeyError("price")

def hangs(prompts, completions, **columns):
    time.sleep(60)
"""


def reward_recipe(folder: Path, model_folder: Path, *functions: str, **task: Any) -> dict[str, Any]:
    """Return a recipe of six prompts: two a step, four answers each."""
    (folder / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"the quick brown {n}", "word": str(n)} for n in range(6)]
    file = write(folder / "p.jsonl", rows)
    rewards = [{"use": f"{folder}/rewards.py:{name}"} for name in functions]
    task = {"rewards": rewards, "answers": 4, "max_new_tokens": 8, "mask_cut": False, **task}
    told = sections(folder, model_folder, file, "grpo", **task)
    told["train"] |= {"max_steps": 4, "batch_size": 2, "learning_rate": 0.02, "compile": False}
    return told
