"""Addresses and recipes of the servers under test."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
import uvicorn
from starlette.applications import Starlette
from starlette.testclient import TestClient

from peftkit.config.schema import from_dict
from peftkit.recipe import Recipe
from peftkit_server.listening import listening
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


def refusal(response: Any, status: int = 400) -> Any:
    """Return the error of a refused request."""
    assert response.status_code == status, response.text
    return response.json()["error"]


def scope_of(path: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the ASGI scope of a POST request."""
    sent = {"host": "127.0.0.1", **(headers or {})}
    pairs = [(name.encode(), value.encode()) for name, value in sent.items()]
    head = {"type": "http", "method": "POST", "query_string": b""}
    return {**head, "path": path, "headers": pairs}


def adapter_bytes(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


@contextmanager
def openai_client(app: Starlette, key: str) -> Iterator[Any]:
    """Serve an application over a socket; yield OpenAI's own client of it."""
    openai = pytest.importorskip("openai", reason="the official client is not installed")
    with served_app(app) as port:
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=30) as client:
            yield client


@contextmanager
def served_app(app: Starlette, **settings: Any) -> Iterator[int]:
    """Serve an application over a socket; yield its port."""
    with listening("127.0.0.1", 0) as listener:
        config = uvicorn.Config(app, log_level="warning", access_log=False, **settings)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
