"""A training server in this process, and a client of its Tinker API."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra peftkit[train-api] is not installed")
pytest.importorskip("google.protobuf", reason="the extra peftkit[train-api] is not installed")
from starlette.testclient import TestClient

from peftkit.inference.bank import AdapterBank
from peftkit.model.modes import take_off
from peftkit.settings import BaseConfig
from peftkit_server.app import make_app
from peftkit_server.limits import Limits
from peftkit_server.training import TrainingOptions
from tests.helpers.bank import tiny_base
from tests.helpers.serving import HERE, Serve
from tests.helpers.wire_client import Client


@pytest.fixture
def serve(llama: Any, tokenizer: Any, tmp_path: Path) -> Iterator[Serve]:
    """Start servers over one base and one folder, consecutively."""
    with ExitStack() as stack:

        def started(*, limits: Limits | None = None, **named: Any) -> TestClient:
            stack.close()
            take_off(llama)
            options = TrainingOptions(folder=tmp_path / "state", base=BaseConfig(model="tiny"))
            app = make_app(
                AdapterBank(tiny_base(llama, tokenizer)),
                training=options,
                limits=limits or Limits(max_waiting=512),
                **named,
            )
            return stack.enter_context(TestClient(app, base_url=HERE))

        yield started


@pytest.fixture
def http(serve: Serve) -> TestClient:
    return serve()


@pytest.fixture
def client(http: TestClient) -> Client:
    return Client(http)
