"""The server process: binds the port first, then loads the base and its adapters."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import TYPE_CHECKING

from peftkit.base.load import load_base
from peftkit.base.new_tokens import notify_split_tokens
from peftkit.errors import AdapterError, ConfigError
from peftkit.events import Listener, ignore
from peftkit.formats.serving import check_serving, served_rank, vllm_serve
from peftkit.inference.bank import AdapterBank, open_bank, read_files, tell_other_bases

if TYPE_CHECKING:
    import uvicorn

    from peftkit.serve.training import TrainingOptions
    from peftkit.serve.worker import Worker

BACKLOG = 128
MAX_WAITING, MAX_SAMPLES = 64, 4096
STOPPING = "\nStopping, after the step of training under way, if any. Once more: stop at once.\n"


def serve_adapters(
    adapters: Mapping[str, str | Path],
    base: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    key: str | Sequence[str] | None = None,
    max_batch: int = 32,
    max_waiting: int | None = None,
    max_new_tokens: int = 1024,
    temperature: float = 0.0,
    force: bool = False,
    training: TrainingOptions | None = None,
    on_event: Listener = ignore,
    on_ready: Callable[[str, AdapterBank], None] = lambda url, bank: None,
) -> None:
    """Serve adapters over HTTP with OpenAI's interface, until a signal.

    The models are the adapters' names and `base`, the base without an adapter.

    Args:
        adapters: Name to folder; at least one, unless the server trains.
        base: Where the base is, if elsewhere than recorded; not for a server that trains.
        host: The address to listen on; other than loopback it needs a key.
        port: 0 picks a free port.
        key: Clients send it as `Authorization: Bearer KEY` or `X-API-Key: KEY`; or several keys,
            each with files, jobs and models of its own.
        max_batch: Answers at once.
        max_waiting: Prompts that may wait; by default 64, and 4,096 of a server that trains:
            programs with a loop of their own ask for a step's samples at once.
        max_new_tokens: Default length of an answer.
        temperature: Default temperature; 0 is greedy.
        force: Accept adapters that were trained on other weights.
        training: Train over the base that it names, as OpenAI's and Tinker's clients ask for it.
        on_ready: Called with the server's address and the bank before the first request.

    Raises:
        ConfigError: The extra `serve` is not installed, the host needs a key, or the port is taken.
        AdapterError: As `open_bank`.
        BaseError: The base cannot be found or loaded.
        OutputError: The folder of `training` cannot be used, or another server has it.
    """
    _require_extra()
    import uvicorn

    from peftkit.serve.access import is_loopback
    from peftkit.serve.app import Limits, make_app
    from peftkit.serve.models import BARE

    keys = [key] if isinstance(key, str) else list(key or ())
    if not keys and not is_loopback(host):
        raise ConfigError(
            f"cannot serve on {host} without a key.",
            found="Others than programs on this machine could ask.",
            fix="Set PEFTKIT_API_KEY (or --api-key), or leave --host out.",
        )
    if not all(one.isascii() and one.strip() == one != "" for one in keys):
        raise ConfigError("the key is not usable.", fix="Use ASCII letters and digits.")
    if BARE in adapters:
        raise AdapterError(
            f"an adapter cannot be served as '{BARE}'.",
            found="That is the base without an adapter.",
            fix=f"Give it another name: NAME={adapters[BARE]}",
        )
    with listening(host, port) as listener:
        if training is None:
            bank = open_bank(adapters, base, force=force, on_event=on_event)
        else:
            from peftkit.serve.store import Store

            Store(training.folder).close()  # what cannot be is told before minutes of loading
            bank = _bank_to_train(adapters, training, force, on_event)
        folders = {name: bank.file(name).folder for name in bank.names}
        notify_split_tokens(folders, bank.base.tokenizer, on_event)
        limits = Limits(
            max_batch=max_batch,
            max_waiting=max_waiting or (MAX_WAITING if training is None else MAX_SAMPLES),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        )
        app = make_app(bank, keys=keys, limits=limits, training=training)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=5
        )
        shown = f"[{host}]" if ":" in host else host

        on_ready(f"http://{shown}:{listener.getsockname()[1]}", bank)
        server_of(config, app.state.worker, trains=training is not None).run(sockets=[listener])


def server_of(config: uvicorn.Config, worker: Worker, *, trains: bool) -> uvicorn.Server:
    """Return a server that a signal stops, and a second one ends at once."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit:
                os._exit(128 + sig)  # threads that compute cannot be interrupted otherwise
            super().handle_exit(sig, frame)
            if trains:
                with suppress(OSError):  # not print: a handler may run in the middle of one
                    os.write(2, STOPPING.encode())

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Answer waiting requests with an error before their connections close."""
            await asyncio.to_thread(worker.stop)
            await super().shutdown(sockets)

    return Server(config)


def _bank_to_train(
    adapters: Mapping[str, str | Path], training: TrainingOptions, force: bool, on_event: Listener
) -> AdapterBank:
    """Load the base that a server trains over, with the operator's adapters."""
    tell_other_bases(read_files(adapters), training.base.model_dump(mode="json"), on_event)
    settings = training.base.model_dump(exclude={"rope_scaling", "new_tokens"})
    return AdapterBank(load_base(**settings, on_event=on_event), adapters, force=force)


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket; clients that connect before the model is loaded wait.

    Raises:
        ConfigError: The port is taken, or the host is not this machine's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}, port {port}.",
            found=getattr(error, "strerror", None) or str(error),
            fix="Choose another with --port (0 picks a free port) or --host.",
        ) from None


def vllm_command(bank: AdapterBank) -> str | None:
    """Return the command with which vLLM serves the same folders; None: it takes none of them."""
    taken, rank = [], 0
    for name in bank.names:
        file = bank.file(name)
        try:
            check_serving(file.folder)
        except AdapterError:
            continue
        taken.append(f"{name}={file.folder}")
        rank = max(rank, served_rank(file.method))
    if not taken:
        return None
    return vllm_serve(quote(bank.base.hub_id or bank.base.name), rank, *taken)


def _require_extra() -> None:
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            "cannot serve.",
            found=f"Not installed: {', '.join(missing)}.",
            fix="pip install 'peftkit[serve]'",
        )
