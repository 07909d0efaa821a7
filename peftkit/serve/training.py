"""What a server that trains has beside its answers: its folder, its store, and how its jobs run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.routing import BaseRoute

from peftkit.inference.bank import AdapterBank
from peftkit.serve.models import Models
from peftkit.serve.store import Store
from peftkit.serve.worker import Worker
from peftkit.settings import BaseConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """What the operator of a server that trains says.

    Attributes:
        folder: Keeps everything: the store, uploaded files, jobs, weights.
        base: With it `peftkit train` opens the same base.
        names: Further names that the base answers to.
        allow_code: Whether code of clients may run: graders of the type python.
        say: Shows a line in the terminal that serves.
    """

    folder: Path
    base: BaseConfig
    names: tuple[str, ...] = ()
    allow_code: bool = False
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What both dialects, OpenAI's and Tinker's, work with.

    Attributes:
        options: The operator's.
        worker: Has the model: see `Worker.call` and `Worker.queue`.
        models: Where finished adapters are published.
    """

    options: TrainingOptions
    bank: AdapterBank
    worker: Worker
    store: Store
    models: Models

    @property
    def folder(self) -> Path:
        return self.options.folder

    def log(self, text: str) -> None:
        """Show a line in the terminal that serves."""
        self.options.say(text)

    def is_base(self, name: str) -> bool:
        """Whether a model's name is one of the base's."""
        return name in self.models.base_names


@dataclass(frozen=True, slots=True)
class Dialect:
    """One interface of a server that trains.

    Attributes:
        routes: Its paths.
        begin: Called once when the server starts: goes on with what was under way when it ended.
    """

    routes: Sequence[BaseRoute]
    begin: Callable[[], None] = lambda: None
