"""The server process: the base it loads, and its end by signals."""

import asyncio
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
import uvicorn

from peftkit.errors import AdapterError
from peftkit.events import Notice
from peftkit.inference.bank import AdapterBank
from peftkit.methods.lora import LoRA
from peftkit.settings import BaseConfig
from peftkit_server import server
from peftkit_server.training import TrainingOptions
from tests.helpers.bank import tiny_base, write_adapter


class Busy:
    """A worker whose step takes long."""

    def __init__(self) -> None:
        self.stopping, self.goes_on = threading.Event(), threading.Event()

    def stop(self) -> None:
        self.stopping.set()
        self.goes_on.wait(20)


def test_a_second_signal_does_not_wait_for_a_step(monkeypatch):
    codes: list[int] = []
    said: list[tuple[int, bytes]] = []
    system = SimpleNamespace(_exit=codes.append, write=lambda *given: said.append(given))
    monkeypatch.setattr(server, "os", system)
    busy: Any = Busy()
    made = server.server_of(uvicorn.Config(lambda: None, log_config=None), busy, trains=True)
    made.servers = []

    async def ends() -> None:
        made.handle_exit(signal.SIGTERM, None)
        waits = asyncio.create_task(made.shutdown())
        try:
            assert await asyncio.to_thread(busy.stopping.wait, 20)
            assert codes == []
            assert said == [(2, server.STOPPING.encode())]
            made.handle_exit(signal.SIGINT, None)
            assert codes == [130]
        finally:
            busy.goes_on.set()
        await waits

    asyncio.run(ends())


def test_training_servers_check_adapters(llama, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "load_base", lambda *_, **__: tiny_base(llama, tokenizer))
    options = TrainingOptions(folder=tmp_path, base=BaseConfig(model="tiny"))
    told: list[Any] = []

    def made(**notes: Any) -> AdapterBank:
        folder = tmp_path / f"made{len(list(tmp_path.iterdir()))}"
        path = write_adapter(llama, LoRA(rank=2), folder, 1, **notes)
        return server._bank_to_train({"a": path}, options, True, told.append)

    bank = made(loading={"quantize": "nf4", "double_quant": True, "dtype": "fp32"})
    (notice,) = [one.text for one in told if isinstance(one, Notice)]
    assert notice.startswith("'a' was trained over a base with quantize: nf4, here none")
    bank.drop("a")
    with pytest.raises(AdapterError, match="does not complete prompts"):
        made(task={"type": "reward"})
