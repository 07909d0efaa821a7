"""Small comparisons and what learns them."""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerFast

from peftkit.adapter import Adapter, attach
from peftkit.methods.base import Method
from peftkit.methods.lora import LoRA
from peftkit.settings import DataConfig
from peftkit.tasks.pairs.preference import PreferenceConfig
from tests.helpers.adapters import perturb
from tests.helpers.folders import write_rows as write

PAIRS = [
    ("the quick brown fox ", "jumps over the lazy dog", "sleeps"),
    ("pizza with cheese ", "and olives", "and the other dog and the other fox"),
    ("what is the answer? ", "the answer is cheese", "the question"),
    ("the dog and ", "the fox", "extra olives with extra cheese"),
    ("the quick brown dog ", "is lazy", "is a pizza with three olives"),
]


def write_pairs(file: Path) -> str:
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS]
    return write(file, rows)


def write_verdicts(file: Path) -> str:
    rows = [
        {"prompt": p, "completion": answer, "label": good}
        for p, c, r in PAIRS
        for answer, good in ((c, True), (r, False))
    ]
    return write(file, rows)


def settings(loss: str, **more: Any) -> PreferenceConfig:
    if loss == "robust":
        more.setdefault("label_smoothing", 0.1)
    return PreferenceConfig(loss=loss, **more)  # type: ignore[arg-type]


def task_on(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, asked: Any, file: str, **data: Any
) -> tuple[Any, list[Any]]:
    """Return the task of a config over a model, and the rows of a file."""
    config = DataConfig(train=file, **{"max_length": 64, **data})
    task = asked.on(model, tokenizer, config)
    return task, list(task.load(file))


def moved_adapter(model: nn.Module, method: Method | None = None) -> Adapter:
    """Attach an adapter and move it away from the base."""
    adapter = attach(model, method or LoRA(rank=3, targets=("q", "v", "down")))
    perturb(adapter.parameters(), 0.3, seed=3)
    return adapter
