"""Small questions, a teacher's prompt, and what learns them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerFast

from peftkit.settings import DataConfig
from peftkit.tasks.distill.distill import Distill, DistillConfig
from peftkit.tasks.distill.rows import Distilled

PROMPT = """The dog answers with pizza and olives.

## User
the quick fox?

## Assistant
the lazy dog
"""
QUESTIONS = [
    ("the quick brown fox ", "jumps over the lazy dog"),
    ("pizza with cheese ", "and olives"),
    ("what is the answer? ", "the answer is cheese"),
    ("the dog and ", "the fox"),
    ("the quick brown dog ", "is lazy"),
]


def write(file: Path, rows: Sequence[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def write_rows(folder: Path, *, answers: bool = True) -> str:
    rows = [{"instruction": q} | ({"output": a} if answers else {}) for q, a in QUESTIONS]
    return write(folder / "rows.jsonl", rows)


def write_prompt(folder: Path, text: str = PROMPT) -> str:
    file = folder / "prompt.md"
    file.write_text(text, encoding="utf-8")
    return str(file)


def settings(folder: Path, **more: Any) -> DistillConfig:
    told = {"teacher": {"prompt": write_prompt(folder)}, "answers": "data", **more}
    return DistillConfig(**told)


def task_on(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    asked: DistillConfig,
    file: str,
    **data: Any,
) -> tuple[Distill, list[Distilled]]:
    config = DataConfig(train=file, **{"max_length": 64, **data})
    task = asked.on(model, tokenizer, config)
    return task, list(task.load(file))
