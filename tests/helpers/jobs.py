"""A server of fine-tuning jobs in this process, and its client."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
pytest.importorskip("openai", reason="the official client is not installed")
from starlette.testclient import TestClient

from peftkit.base.load import load_base
from peftkit.inference.bank import AdapterBank
from peftkit.settings import BaseConfig
from peftkit_server.app import make_app
from peftkit_server.limits import Limits
from peftkit_server.training import TrainingOptions
from tests.helpers.command_line import turn

HERE = "http://127.0.0.1:8000"
FILES, JOBS = "/v1/files", "/v1/fine_tuning/jobs"
WEIGHTS = "adapter_model.safetensors"
ENDED = ("succeeded", "failed", "cancelled")


def chats(number: int = 12) -> list[dict[str, Any]]:
    """Return supervised rows."""
    return [turn(f"the quick {n}", f"brown fox {n}") for n in range(number)]


class Client(TestClient):
    """A client that uploads rows, creates jobs and waits for them."""

    told: list[str]
    folder: Path

    def upload(self, rows: Sequence[Any] | bytes, name: str = "rows.jsonl") -> str:
        """Upload rows; return the file's id."""
        data = rows if isinstance(rows, bytes) else "\n".join(map(json.dumps, rows)).encode()
        done = self.post(FILES, files={"file": (name, data)}, data={"purpose": "fine-tune"})
        assert done.status_code == 200, done.text
        return str(done.json()["id"])

    def job(self, rows: Sequence[Any] | bytes | None = None, **body: Any) -> dict[str, Any]:
        """Create a job over rows."""
        if rows is not None:
            body["training_file"] = self.upload(rows)
        done = self.post(JOBS, json={"model": "base", "seed": 7, **body})
        assert done.status_code == 200, done.text
        found: dict[str, Any] = done.json()
        return found

    def until(self, id: str, *statuses: str) -> dict[str, Any]:
        """Wait until a job has a status."""
        while True:
            job: dict[str, Any] = self.get(f"{JOBS}/{id}").json()
            if job["status"] in (statuses or ENDED):
                return job
            assert job["status"] not in ENDED, job
            time.sleep(0.01)

    def events(self, id: str) -> list[str]:
        """Return the messages of a job's events, the oldest first."""
        found = self.get(f"{JOBS}/{id}/events?limit=100").json()["data"]
        return [event["message"] for event in reversed(found)]

    def say(self, model: str, text: str = "the quick 3") -> str:
        """Chat."""
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
        done = self.post("/v1/chat/completions", json=body)
        assert done.status_code == 200, done.text
        return str(done.json()["choices"][0]["message"]["content"])


def hyper(kind: str = "supervised", **values: Any) -> dict[str, Any]:
    """Return a job's method."""
    usual = {"n_epochs": 3, "batch_size": 4, "learning_rate_multiplier": 5.0}
    return {"type": kind, kind: {"hyperparameters": {**usual, **values}}}


@contextmanager
def serving(
    model: Path,
    folder: Path,
    *,
    keys: Sequence[str] = (),
    dtype: Any = "fp32",
    quantize: Any = "none",
    limits: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Iterator[Client]:
    """Serve a base that trains."""
    told: list[str] = []
    settings = BaseConfig(model=str(model), dtype=dtype, quantize=quantize)
    bank = AdapterBank(load_base(str(model), dtype=dtype, quantize=quantize))
    options = {"folder": folder, "base": settings, "say": told.append, **options}
    bounds = Limits(**{"max_new_tokens": 8, **limits})
    app = make_app(bank, keys=keys, limits=bounds, training=TrainingOptions(**options))
    with Client(app, base_url=HERE) as client:
        client.told, client.folder = told, folder
        yield client


Served = Callable[..., Any]


PAIRS = [
    {
        "input": {"messages": [{"role": "user", "content": f"the quick {n}"}]},
        "preferred_output": [{"role": "assistant", "content": "brown fox"}],
        "non_preferred_output": [{"role": "assistant", "content": "lazy dog"}],
    }
    for n in range(12)
]


LIKE = {
    "type": "text_similarity",
    "name": "like",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "evaluation_metric": "fuzzy_match",
}


def prompts(number: int = 4) -> list[dict[str, Any]]:
    """Return rows of reinforcement."""
    turns = [{"role": "user", "content": "the quick"}]
    return [{"messages": turns, "answer": f"brown fox {n}"} for n in range(number)]


def graded(grader: Any, **settings: Any) -> dict[str, Any]:
    """Return a method of reinforcement."""
    settings = {"n_epochs": 1, "batch_size": 4, "compute_multiplier": 0.25, **settings}
    section = {"grader": grader, "hyperparameters": settings}
    return {"type": "reinforcement", "reinforcement": section}


class Gated:
    """Holds a job at a step until the test goes on: a terminal that waits to be read."""

    def __init__(self, step: str) -> None:
        self._step, self.reached, self._go = step, threading.Event(), threading.Event()

    def say(self, text: str) -> None:
        """Hear a line."""
        if self._step in text and not self.reached.is_set():
            self.reached.set()
            assert self._go.wait(60)

    def go(self, seconds: float = 0.0) -> None:
        """Let the job go on, at once or after some time."""
        threading.Timer(seconds, self._go.set).start()
