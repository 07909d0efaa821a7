"""Runs over a base that several processes share: many of them in one set of processes.

To start processes takes longer than to train tiny models, so that one set goes through all runs.
"""

import faulthandler
import json
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from peftkit.base.sharding import SHARDS_PACKED
from peftkit.config.schema import from_dict
from peftkit.recipe import Recipe
from peftkit.run import run
from tests.helpers.children import exit_code, start_ranks
from tests.helpers.classifiers import save_base, write_texts, write_words
from tests.helpers.families import ARCHITECTURES
from tests.helpers.folders import write_rows

Settings = dict[str, Any]
SECONDS = 600
PROMPTS = [f"what is the answer to the question {n}?" for n in range(9)]
PAIRS = [{"prompt": text, "completion": "the fox " * (n % 3 + 1)} for n, text in enumerate(PROMPTS)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "causal_lm": PAIRS,
    "seq2seq": PAIRS,
    "masked_lm": [{"text": f"{text} the dog" * (n % 2 + 1)} for n, text in enumerate(PROMPTS)],
    "preference": [
        {"prompt": text, "chosen": "the fox " * (n % 3 + 1), "rejected": "olives"}
        for n, text in enumerate(PROMPTS)
    ],
    "kto": [{**row, "label": n % 2 == 0} for n, row in enumerate(PAIRS)],
    "embedding": [
        {"anchor": text, "positive": f"{n} " * (n % 4 + 1)} for n, text in enumerate(PROMPTS)
    ],
}
ROWS["reward"] = ROWS["preference"]
FAMILY = {
    "causal_lm": "llama",
    "preference": "llama",
    "kto": "llama",
    "reward": "llama",
    "embedding": "llama",
    "seq2seq": "t5",
}
METHODS: dict[str, Settings] = {
    "lora": {"type": "lora", "rank": 3, "targets": ["all-linear"]},
    "dora": {"type": "dora", "rank": 3, "targets": ["q", "v"]},
    "ia3": {"type": "ia3"},
    "vera": {"type": "vera", "rank": 16},
}


def settings_of(
    folder: Path, task: str, method: str = "lora", family: str = "", **sections: Settings
) -> Settings:
    """Return a recipe of few steps with rows of many lengths; its base and rows in a folder.

    Args:
        task: Its type, or "kto".
        family: Of the base; by default one for the task.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writers: dict[str, Callable[[Path], str]] = {
        "sequence_classification": write_texts,
        "token_classification": write_words,
    }
    data = writers.get(task, lambda file: write_rows(file, ROWS[task]))(folder / "rows.jsonl")
    base = sections.get("base", {})
    if "model" not in base:
        base = {**base, "model": str(_base(folder / "base", family or FAMILY.get(task, "bert")))}
    kinds = {"kto": {"type": "preference", "loss": "kto"}}
    # so few rows are not packed by default
    packing = {"packing": True} if task == "causal_lm" else {}
    return {
        "task": kinds.get(task, {"type": task}),
        "base": {"dtype": "fp32", **base},
        "method": METHODS[method],
        "data": {
            "train": data,
            "eval": data,
            "max_length": 64,
            **packing,
            **sections.get("data", {}),
        },
        "train": {
            "max_steps": 4,
            "batch_size": 2,
            "learning_rate": 5e-3,
            "eval_every": 2,
            "tokens_per_batch": 24,
            "compile": False,
            **sections.get("train", {}),
        },
    }


def _base(folder: Path, family: str) -> Path:
    torch.manual_seed(0)
    model = ARCHITECTURES[family]()
    for name in [n for n in vars(model.config) if "dropout" in n or n.endswith("pdrop")]:
        setattr(model.config, name, 0.0)  # processes draw other numbers each
    return save_base(folder, model=model)


def run_ranks(folder: Path, cells: Mapping[str, Settings], world: int = 2) -> dict[str, str]:
    """Run recipes, one after the other, in processes that share the base; return what went wrong.

    Each recipe's output is in a folder of its name.
    """
    is_packed = any(cell["base"].get("quantize", "none") != "none" for cell in cells.values())
    if is_packed and not SHARDS_PACKED:
        pytest.skip("torch before 2.13 does not shard packed weights")
    shared = [(name, _shared(cell, folder / name)) for name, cell in cells.items()]
    cache = str(folder / "cache")
    children = start_ranks(_work, str(folder), shared, world=world, PEFTKIT_CACHE=cache)
    codes = [exit_code(child, SECONDS) for child in children]
    files = sorted(folder.glob("problems-*.json"))
    problems: dict[str, str] = {}
    for file in files:
        problems |= json.loads(file.read_text())
    if len(files) < world:
        raise AssertionError(f"processes ended early: {codes}; {problems}")
    return problems


def _shared(cell: Settings, out: Path) -> Settings:
    return {**cell, "train": {"shard": "base", **cell["train"], "output_dir": str(out)}}


def _work(folder: str, cells: Iterable[tuple[str, Settings]]) -> None:
    problems: dict[str, str] = {}
    file = Path(folder, f"problems-{os.environ['RANK']}.json")
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # one that waits for ever says where
    for name, cell in cells:
        try:
            torch.manual_seed(0)
            run(from_dict(Recipe, cell, "test"))
        except Exception:
            problems[name] = traceback.format_exc()
            break  # the others may wait for this one
    file.write_text(json.dumps(problems))
    os._exit(0)


def run_alone(cell: Settings, out: Path, world: int = 2) -> None:
    """Run a recipe in this process, with as many rows in a step."""
    train = {**cell["train"], "output_dir": str(out), "shard": "none"}
    train["gradient_accumulation"] = world * train.get("gradient_accumulation", 1)
    run(from_dict(Recipe, {**cell, "train": train}, "test"))


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that tell what was learnt."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] in ("StepDone", "EvalDone")]


def samples(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of samples.jsonl."""
    file = folder / "samples.jsonl"
    return [*map(json.loads, file.read_text().splitlines())] if file.exists() else []


WORDS = ("yes", "no", "perhaps", "of course not", "why do you ask me that again")


SAYINGS = [
    {"instruction": f"Say {word} {n}.", "output": f"{word} {n}"} for n in range(3) for word in WORDS
]


def ragged_recipe(folder: Path, model: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    data = folder / "rows.jsonl"
    write_rows(data, SAYINGS)
    settings: dict[str, dict[str, Any]] = {
        "base": {"model": str(model), "dtype": "fp32"},
        "method": {"type": "lora", "rank": 3, "targets": ["q", "v", "down"]},
        "data": {"train": str(data), "eval": str(data), "max_length": 64, "packing": False},
        "train": {
            "max_steps": 5,
            "batch_size": 2,
            "learning_rate": 5e-3,
            "eval_every": 2,
            # rows of many lengths: the processes take different numbers of micro-batches
            "tokens_per_batch": 32,
        },
    }
    return {name: {**section, **sections.get(name, {})} for name, section in settings.items()}


def logged_losses(folder: Path, key: str = "loss") -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [entry[key] for entry in map(json.loads, lines) if "learning_rate" in entry]
