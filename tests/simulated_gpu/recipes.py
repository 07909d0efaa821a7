"""A recipe of each task, small enough for the simulated card."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from peftkit.recipe import Recipe
from tests.helpers.classifiers import save_base, write_texts, write_words
from tests.helpers.families import ARCHITECTURES
from tests.helpers.folders import write_rows


def recipe_for(task: str, folder: Path) -> Recipe:
    """Return a recipe of three steps, its base and data in a folder."""
    texts = [{"prompt": f"what is {n}?", "completion": "the fox " * n} for n in range(1, 7)]
    plain = [
        {"text": "the quick brown fox jumps over the lazy dog " * (n % 3 + 1)} for n in range(6)
    ]
    ranked = [{"query": "the fox", "positive": "a quick fox", "negatives": ["a", "pizza"]}] * 6
    families = {"causal_lm": "llama", "seq2seq": "t5"}
    writers: dict[str, Any] = {
        "sequence_classification": write_texts,
        "token_classification": write_words,
        "masked_lm": lambda file: write_rows(file, plain),
        "reranker": lambda file: write_rows(file, ranked),
    }
    write = writers.get(task, lambda file: write_rows(file, texts))
    data = write(folder / "rows.jsonl")
    model = ARCHITECTURES[families.get(task, "bert")]()
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        setattr(model.config, name, 0.0)  # padded rows would draw other numbers
    base = save_base(folder / "base", model=model)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    tokenizer.mask_token = "<unk>"
    tokenizer.save_pretrained(base)
    targets = {"targets": ["q", "v"]}
    return small_recipe(folder, task, base, data, targets, max_length=64, eval_every=None)


def small_recipe(
    folder: Path,
    task: Any,
    base: Path,
    data: Path | str,
    method: dict[str, Any],
    *,
    max_length: int | None = None,
    **train: Any,
) -> Recipe:
    """Return a recipe of three steps with LoRA, which evaluates on its training data."""
    given = {"max_steps": 3, "batch_size": 3, "learning_rate": 0.02, "compile": False}
    limits = {} if max_length is None else {"max_length": max_length}
    return Recipe(
        task=task,
        base={"model": str(base), "dtype": "fp32"},
        method={"type": "lora", "rank": 3, **method},
        data={"train": str(data), "eval": str(data), **limits},
        train={"output_dir": folder / "out", **given, **train},
    )
