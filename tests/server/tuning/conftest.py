"""A server in this process that trains over a tiny base, and what clients do with it."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from peftkit.config.schema import from_dict
from peftkit.recipe import Recipe
from peftkit.run import run

pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
pytest.importorskip("openai", reason="the official client is not installed")

from tests.helpers.jobs import WEIGHTS, Client, Served, chats, serving


@pytest.fixture
def served(model_folder: Path, tmp_path: Path) -> Served:
    """Serve in a context; the folder is the same each time."""
    return partial(serving, model_folder, tmp_path / "server")


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with served() as client:
        yield client


@pytest.fixture(scope="module")
def shared(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server for tests that look at nothing but their own jobs."""
    with serving(model_folder, tmp_path_factory.mktemp("server")) as client:
        yield client


@pytest.fixture(scope="session")
def alone(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights that `chats()` and `hyper()` give by a recipe that no server has written."""
    folder = tmp_path_factory.mktemp("alone")
    rows = "".join(f"{json.dumps(row)}\n" for row in chats())
    (folder / "rows.jsonl").write_text(rows)
    told = {
        "base": {"model": str(model_folder), "dtype": "fp32"},
        "method": {"type": "lora", "rank": 16, "alpha": 32, "targets": "all-linear"},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": None, "packing": False},
        "train": {
            "output_dir": str(folder / "run"),
            "epochs": 3.0,
            "batch_size": 4,
            "learning_rate": 0.05,
            "seed": 7,
        },
    }
    run(from_dict(Recipe, told, "a test"))
    return (folder / "run" / WEIGHTS).read_bytes()
