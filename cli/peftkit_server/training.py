"""State that the training APIs of a server share: options, worker, store and models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.routing import BaseRoute

from peftkit.inference.bank import AdapterBank
from peftkit.settings import BaseConfig
from peftkit_server.limits import Limits
from peftkit_server.models import Models
from peftkit_server.quotas import Quotas
from peftkit_server.store import Store
from peftkit_server.threads import DaemonThreads
from peftkit_server.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Options of a training server.

    Attributes:
        folder: Folder of the store, uploaded files, jobs and weights.
        base: Settings of the base, as in a recipe.
        names: Further model names of the base.
        allow_code: Whether clients may send code: graders of the type python.
        say: Prints a line in the server's terminal.
    """

    folder: Path
    base: BaseConfig
    names: tuple[str, ...] = ()
    allow_code: bool = False
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Shared state of OpenAI's and Tinker's training APIs.

    Attributes:
        worker: Runs operations and training: see `Worker.call` and `Worker.queue`.
        models: Registry for finished adapters.
        quotas: Limits of each API key.
        threads: Threads that parse requests and wait for the store's disk.
    """

    options: TrainingOptions
    bank: AdapterBank
    worker: Worker
    store: Store
    models: Models
    quotas: Quotas
    threads: DaemonThreads

    @property
    def limits(self) -> Limits:
        return self.quotas.limits

    @property
    def folder(self) -> Path:
        return self.options.folder

    def log(self, text: str) -> None:
        """Print a line in the server's terminal."""
        self.options.say(text)


@dataclass(frozen=True, slots=True)
class Dialect:
    """A training API.

    Attributes:
        routes: HTTP routes.
        on_start: Called once when the server starts; resumes interrupted work.
        on_stop: Called once when the server stops.
    """

    routes: Sequence[BaseRoute]
    on_start: Callable[[], None] = lambda: None
    on_stop: Callable[[], None] = lambda: None
