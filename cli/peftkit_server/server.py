"""The server process: it binds the port, then loads the base and its adapters."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import TYPE_CHECKING

from peftkit.base.load import load_base
from peftkit.base.new_tokens import notify_split_tokens
from peftkit.errors import AdapterError, ConfigError
from peftkit.events import Listener, ignore
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.open_adapter import open_adapter, task_of
from peftkit.formats.peft.load import read_adapter
from peftkit.formats.serving import check_serving, served_rank, vllm_serve
from peftkit.inference.bank import AdapterBank, open_bank, read_files, report_other_bases
from peftkit_server.endpoints import PREDICTING
from peftkit_server.limits import DEFAULTS, Limits
from peftkit_server.listening import listening, require_extra

if TYPE_CHECKING:
    import uvicorn

    from peftkit_server.predictions.predictor import Predictor
    from peftkit_server.training import TrainingOptions
    from peftkit_server.worker import Worker

STOPPING = "\nStopping after the current training step. Press Ctrl-C again to stop immediately.\n"


def serve_adapters(
    adapters: Mapping[str, str | Path],
    base: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    key: str | Sequence[str] | None = None,
    limits: Limits = DEFAULTS,
    force: bool = False,
    training: TrainingOptions | None = None,
    on_event: Listener = ignore,
    on_ready: Callable[[str, AdapterBank | Predictor], None] = lambda url, served: None,
) -> None:
    """Serve adapters over HTTP with OpenAI's API until the process receives a signal.

    The model names are the adapters' names and `base`, the base without an adapter. An adapter
    that predicts instead of completing prompts is served alone.

    Args:
        adapters: Folders by model name; at least one, except with `training`.
        base: Path or hub id of the base, if it is not the recorded one; not with `training`.
        host: The address to listen on; addresses other than loopback require a key.
        port: 0 picks a free port.
        key: Clients send it as `Authorization: Bearer KEY` or `X-API-Key: KEY`. With several keys,
            the files, jobs and models of each key are separate.
        force: Accept adapters that were trained on other weights.
        training: Options of a training server, which OpenAI's and Tinker's clients use.
        on_ready: Called with the server's address and its models before the first request.

    Raises:
        ConfigError: The extra `serve` is not installed, the host requires a key, the port is in
            use, or one of several adapters predicts.
        AdapterError: As `open_bank`.
        BaseError: The base cannot be found or loaded.
        OutputError: The folder of `training` is not writable, or another server uses it.
    """
    keys = checked_keys(key, host)
    import uvicorn

    from peftkit_server.app import make_app
    from peftkit_server.models import BARE
    from peftkit_server.predictions.app import make_predictor_app
    from peftkit_server.predictions.predictor import Predictor
    from peftkit_server.store import Store

    predicts = training is None and bool(predicting_tasks(adapters))
    if predicts and len(adapters) > 1:
        raise ConfigError(
            "cannot serve several adapters here.",
            found=f"At least one of {', '.join(adapters)} predicts instead of completing prompts.",
            fix="Start a server for each adapter that embeds, ranks or classifies texts.",
        )
    if BARE in adapters and not predicts:
        raise AdapterError(
            f"an adapter cannot be served as '{BARE}'.",
            found="This name is reserved for the base without an adapter.",
            fix=f"Use another name: NAME={adapters[BARE]}",
        )
    with listening(host, port) as listener:
        served: AdapterBank | Predictor
        if predicts:
            ((name, folder),) = adapters.items()
            opened = open_adapter(folder, base, force=force, on_event=on_event)
            served = Predictor(opened)
            app = make_predictor_app(served, name, keys=keys, limits=limits)
        else:
            if training is None:
                served = open_bank(adapters, base, force=force, on_event=on_event)
            else:
                Store(training.folder).close()  # raises before the base takes minutes to load
                served = _bank_to_train(adapters, training, force, on_event)
            folders = {name: served.file(name).folder for name in served.names}
            notify_split_tokens(folders, served.base.tokenizer, on_event)
            app = make_app(served, keys=keys, limits=limits, training=training)
        config = uvicorn.Config(
            app,
            http=protocol(limits.head_seconds),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=None if predicts else 5,
        )
        address = f"[{host}]" if ":" in host else host
        on_ready(f"http://{address}:{listener.getsockname()[1]}", served)
        trains = training is not None
        server = (
            uvicorn.Server(config)
            if predicts
            else server_of(config, app.state.worker, trains=trains)
        )
        server.run(sockets=[listener])


def predicting_tasks(adapters: Mapping[str, str | Path]) -> list[str]:
    """Return the tasks of adapters that embed, rank or classify texts, or transcribe audio."""
    tasks = []
    for path in adapters.values():
        with suppress(AdapterError):  # `open_bank` reports it, after the port
            tasks.append(task_of(read_adapter(adapter_folder(path))).type)
    return [task for task in tasks if task in PREDICTING]


def checked_keys(key: str | Sequence[str] | None, host: str) -> list[str]:
    """Return the keys of a server on a host.

    Raises:
        ConfigError: The extra `serve` is not installed, or the host requires a valid key.
    """
    require_extra()
    from peftkit_server.access import is_loopback

    keys = [key] if isinstance(key, str) else list(key or ())
    if not keys and not is_loopback(host):
        raise ConfigError(
            f"cannot serve on {host} without a key.",
            found="Other machines could send requests.",
            fix="Set PEFTKIT_API_KEY (or --api-key), or omit --host.",
        )
    if not all(each.isascii() and each.strip() == each != "" for each in keys):
        raise ConfigError("the key is not valid.", fix="Use ASCII letters and digits.")
    return keys


def protocol(seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with a deadline for the head of each request.

    The application bounds the time of a body (`quotas.Intake`), except after its response.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

        def _is_handling(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _watch(self) -> None:
            """Close the connection later, unless a request is complete until then."""
            if self._is_handling() and self._timer is not None:
                self._timer.cancel()
                self._timer = None
            elif not self._is_handling() and self._timer is None:
                self._timer = self.loop.call_later(seconds, self._expire)

        def _expire(self) -> None:
            self._timer = None
            if not self._is_handling():
                self.transport.close()

    return TimedProtocol


def server_of(config: uvicorn.Config, worker: Worker, *, trains: bool) -> uvicorn.Server:
    """Return a server that stops after one signal; a second signal ends the process."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit:
                os._exit(128 + sig)  # Python cannot interrupt computing threads
            super().handle_exit(sig, frame)
            if trains:
                with suppress(OSError):  # not print, which is not reentrant in a signal handler
                    os.write(2, STOPPING.encode())

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Send waiting requests an error before their connections close."""
            await asyncio.to_thread(worker.stop)
            await super().shutdown(sockets)

    return Server(config)


def _bank_to_train(
    adapters: Mapping[str, str | Path], training: TrainingOptions, force: bool, on_event: Listener
) -> AdapterBank:
    """Load the base of a training server, with the operator's adapters."""
    report_other_bases(read_files(adapters), training.base.model_dump(mode="json"), on_event)
    settings = training.base.model_dump(exclude={"rope_scaling", "new_tokens"})
    return AdapterBank(load_base(**settings, on_event=on_event), adapters, force=force)


def vllm_command(bank: AdapterBank) -> str | None:
    """Return the vLLM command for the same folders; None: vLLM supports none of them."""
    supported, rank = [], 0
    for name in bank.names:
        file = bank.file(name)
        try:
            check_serving(file.folder)
        except AdapterError:
            continue
        supported.append(f"{name}={file.folder}")
        rank = max(rank, served_rank(file.method))
    if not supported:
        return None
    return vllm_serve(quote(bank.base.hub_id or bank.base.name), rank, *supported)
