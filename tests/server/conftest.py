"""A server in this process: a tiny base, two adapters, and a client of its application."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peftkit.data.style import Style
from peftkit.inference.bank import AdapterBank
from peftkit.methods.lora import LoRA
from tests.helpers.bank import tiny_base, write_adapter

pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
from starlette.testclient import TestClient

from peftkit_server.app import make_app
from peftkit_server.limits import Limits
from tests.helpers.serving import HERE


@pytest.fixture
def paths(llama: Any, tmp_path: Path) -> dict[str, Path]:
    """Two adapters whose completions differ from the base; one was trained on conversations."""
    return {
        "one": write_adapter(llama, LoRA(rank=4, alpha=64), tmp_path / "one", 1),
        "two": write_adapter(
            llama, LoRA(rank=2, alpha=64), tmp_path / "two", 2, prompt_style=Style("plain")
        ),
    }


@pytest.fixture
def bank(llama: Any, tokenizer: Any, paths: dict[str, Path]) -> AdapterBank:
    return AdapterBank(tiny_base(llama, tokenizer), paths)


@pytest.fixture
def client(bank: AdapterBank) -> Iterator[TestClient]:
    limits = Limits(max_batch=4, max_waiting=4, max_body=4096, max_new_tokens=8)
    with TestClient(make_app(bank, limits=limits), base_url=HERE) as client:
        yield client
