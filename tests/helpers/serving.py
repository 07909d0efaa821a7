"""Addresses and recipes of the servers under test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
from starlette.testclient import TestClient

from peftkit.config.schema import from_dict
from peftkit.recipe import Recipe
from tests.helpers.command_line import turn
from tests.helpers.folders import write_rows

HERE = "http://127.0.0.1:8000"
Serve = Callable[..., TestClient]
WORDS = ("quick", "brown", "lazy", "other")


def recipe(folder: Path, name: str, **train: Any) -> Recipe:
    file = folder / "train.jsonl"
    write_rows(file, [turn(f"what is the {word}?", f"the {word} dog") for word in WORDS] * 2)
    return from_dict(
        Recipe,
        {
            "base": {"model": "tiny"},
            "method": {"type": "lora", "rank": 2, "alpha": 4, "targets": ["q", "v", "down"]},
            "data": {"train": str(file), "max_length": 64},
            "train": {
                "output_dir": str(folder / name),
                "max_steps": 4,
                "batch_size": 2,
                "learning_rate": 0.05,
                "save_every": 2,
                **train,
            },
        },
        "test",
    )


def weights(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()
