"""Small questions, a teacher's prompt, and what learns them."""

from pathlib import Path
from typing import Any

from peftkit.tasks.distill.distill import DistillConfig
from tests.helpers.folders import write_rows

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


def write_questions(folder: Path, *, answers: bool = True) -> str:
    rows = [{"instruction": q} | ({"output": a} if answers else {}) for q, a in QUESTIONS]
    return write_rows(folder / "rows.jsonl", rows)


def write_prompt(folder: Path, text: str = PROMPT) -> str:
    file = folder / "prompt.md"
    file.write_text(text, encoding="utf-8")
    return str(file)


def settings(folder: Path, **more: Any) -> DistillConfig:
    told = {"teacher": {"prompt": write_prompt(folder)}, "answers": "data", **more}
    return DistillConfig(**told)
