"""Small bases for tasks of classes, and rows for them."""

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from peftkit.base.load import Base, load_base
from peftkit.events import Event
from peftkit.settings import DataConfig
from peftkit.tasks.config import TaskConfig
from tests.helpers.families import ARCHITECTURES, BOS, EOS, tiny_tokenizer
from tests.helpers.folders import write_rows

TEXTS = [
    ("the quick brown fox jumps", "animal"),
    ("pizza with cheese and olives", "food"),
    ("what is the answer?", "question"),
    ("the lazy dog and the other dog", "animal"),
    ("three extra olives", "food"),
    ("is the question in the other question?", "question"),
]
LABELS = ("animal", "food", "question")
WORDS = [
    (["Anna", "wants", "pizza", "margherita"], ["B-NAME", "O", "B-DISH", "I-DISH"]),
    (["the", "dog", "eats", "cheese"], ["O", "O", "O", "B-DISH"]),
    (["olives", "?"], ["B-DISH", "O"]),
]
TAGS = ("B-DISH", "B-NAME", "I-DISH", "O")


def framing_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of an encoder: <s> and <|im_end|> stand around texts."""
    own = copy.deepcopy(tiny_tokenizer())
    own.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A <|im_end|>",
        pair="<s> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<s>", BOS), ("<|im_end|>", EOS)],
    )
    return own


def save_base(folder: Path, family: str = "bert", model: Any = None) -> Path:
    """Write a base with random weights and a tokenizer that frames texts."""
    torch.manual_seed(0)
    (ARCHITECTURES[family]() if model is None else model).save_pretrained(folder)
    framing_tokenizer().save_pretrained(folder)
    return folder


def task_for(
    kind: type[TaskConfig], folder: Path, data: str, *, max_length: int | None = 64, **settings: Any
) -> tuple[Base, Any, list[Event]]:
    """Return a base for the rows of a file, the task on it, and the list of what it tells."""
    seen: list[Event] = []
    config = DataConfig(train=data, max_length=max_length)
    settled = kind(**{"type": kind.model_fields["type"].default, **settings}).resolve(config)
    base = load_base(str(folder), purpose=settled.purpose, dtype="fp32")
    return base, settled.on(base.model, base.processor, config, on_event=seen.append), seen


def write_texts(file: Path) -> str:
    """Write the labelled texts."""
    return write_rows(file, ({"text": text, "label": label} for text, label in TEXTS))


def write_words(file: Path) -> str:
    """Write the tagged words."""
    return write_rows(file, ({"words": words, "tags": tags} for words, tags in WORDS))
