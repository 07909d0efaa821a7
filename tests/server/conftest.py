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
from tests.helpers.families import FAMILIES
from tests.helpers.serving import HERE


def write_adapters(llama: Any, folder: Path) -> dict[str, Path]:
    """Write two adapters whose completions differ from the base; one learned conversations."""
    return {
        "one": write_adapter(llama, LoRA(rank=4, alpha=64), folder / "one", 1),
        "two": write_adapter(
            llama, LoRA(rank=2, alpha=64), folder / "two", 2, prompt_style=Style("plain")
        ),
    }


def client_of(bank: AdapterBank) -> TestClient:
    limits = Limits(max_batch=4, max_waiting=4, max_body=4096, max_new_tokens=8)
    return TestClient(make_app(bank, limits=limits), base_url=HERE)


@pytest.fixture
def paths(llama: Any, tmp_path: Path) -> dict[str, Path]:
    return write_adapters(llama, tmp_path)


@pytest.fixture
def bank(llama: Any, tokenizer: Any, paths: dict[str, Path]) -> AdapterBank:
    return AdapterBank(tiny_base(llama, tokenizer), paths)


@pytest.fixture
def client(bank: AdapterBank) -> Iterator[TestClient]:
    with client_of(bank) as client:
        yield client


@pytest.fixture(scope="module")
def refusing(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client for requests that change nothing: a server for all tests of a module."""
    llama = FAMILIES["llama"]().eval()
    paths = write_adapters(llama, tmp_path_factory.mktemp("adapters"))
    with client_of(AdapterBank(tiny_base(llama, tokenizer), paths)) as client:
        yield client
