"""The server process of one predictor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from peftkit.errors import AdapterError, ConfigError
from peftkit.events import Listener, ignore
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.open_adapter import open_adapter, task_of
from peftkit.formats.peft.load import read_adapter
from peftkit_server.endpoints import PREDICTING
from peftkit_server.limits import Limits, parse_limits
from peftkit_server.listening import listening
from peftkit_server.server import checked_keys, protocol


def predicting_tasks(adapters: Mapping[str, str | Path]) -> list[str]:
    """Return the tasks of adapters that embed, rank or classify texts, or transcribe audio."""
    tasks = []
    for path in adapters.values():
        with suppress(AdapterError):  # `serve_adapters` reports it, after the host and the limits
            tasks.append(task_of(read_adapter(adapter_folder(path))).type)
    return [task for task in tasks if task in PREDICTING]


def serve_predictor(
    adapters: Mapping[str, str | Path],
    base: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    key: str | Sequence[str] | None = None,
    max_waiting: int | None = None,
    limit: Sequence[str] = (),
    force: bool = False,
    on_event: Listener = ignore,
    on_ready: Callable[[str, str, Sequence[str]], None] = lambda url, name, endpoints: None,
) -> None:
    """Serve an adapter that predicts until the process gets a signal.

    Args:
        adapters: One folder by its model name.
        on_ready: Called with the server's address, the model's name and its endpoints.

    Other arguments and errors are as in `serve_adapters`.

    Raises:
        ConfigError: There are several adapters, the host requires a key, the port is in use, or a
            limit is invalid.
    """
    keys = checked_keys(key, host)
    import uvicorn

    from peftkit_server.predictions.app import make_predictor_app
    from peftkit_server.predictions.predictor import Predictor

    if len(adapters) != 1:
        raise ConfigError(
            "cannot serve several adapters here.",
            found=f"At least one of {', '.join(adapters)} predicts instead of completing prompts.",
            fix="Start a server for each adapter that embeds, ranks or classifies texts.",
        )
    ((name, folder),) = adapters.items()
    waiting = {} if max_waiting is None else {"max_waiting": max_waiting}
    limits = Limits(**waiting, **parse_limits(limit))
    with listening(host, port) as listener:
        opened = open_adapter(folder, base, force=force, on_event=on_event)
        predictor = Predictor(opened)
        app = make_predictor_app(predictor, name, keys=keys, limits=limits)
        config = uvicorn.Config(
            app, http=protocol(limits.head_seconds), log_level="warning", access_log=False
        )
        address = f"[{host}]" if ":" in host else host
        url = f"http://{address}:{listener.getsockname()[1]}"
        on_ready(url, name, predictor.endpoints)
        uvicorn.Server(config).run(sockets=[listener])
