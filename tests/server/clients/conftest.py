"""A server of scripted models, and a client of its application."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from peftkit.inference.bank import AdapterBank
from tests.helpers.families import FAMILIES
from tests.helpers.scripted_chat import make_say, scripted_bank

pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
pytest.importorskip("llguidance", reason="the extra peftkit[json] is not installed")
from starlette.testclient import TestClient

from peftkit_server.app import make_app
from peftkit_server.limits import Limits

KEYS = ("key-a", "key-b")


@pytest.fixture(scope="module")
def scripted(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> AdapterBank:
    return scripted_bank(FAMILIES["llama"]().eval(), tokenizer, tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="module")
def client(scripted: AdapterBank) -> Iterator[TestClient]:
    limits = Limits(max_body=1 << 16, max_new_tokens=180, response_bytes=8_000)
    headers = {"X-API-Key": KEYS[0]}
    with TestClient(make_app(scripted, keys=KEYS, limits=limits), headers=headers) as client:
        yield client


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, scripted: AdapterBank) -> Callable[..., None]:
    """Make the models generate texts."""
    return partial(make_say, monkeypatch, scripted)
