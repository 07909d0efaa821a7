"""Events that a run passes to its listeners.

The command line draws them, `metrics.jsonl` records them, tests collect them in a list.
Sizes are bytes, times are seconds, counts are `num_*`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LOG_FORMAT = "PEFTKIT_LOG_FORMAT"
"""Environment variable: with "json", each message on stderr is one line of JSON."""


@dataclass(frozen=True, slots=True)
class Event:
    """Base class of all events."""


@dataclass(frozen=True, slots=True)
class Stage(Event):
    """Start of a long operation: one line, present participle ("Loading the base ...")."""

    text: str


@dataclass(frozen=True, slots=True)
class Progress(Event):
    """Progress of a long operation; `unit` is "B" if `done` and `total` are bytes."""

    text: str
    done: int
    total: int
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """A remark for the user; a failure is always an error instead."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """A path that is slower or larger than the planned one, reported once, when it is chosen.

    Attributes:
        path: The path, as a clause: "Blocks are not compiled".
        cause, cost, fix: One sentence each.
    """

    path: str
    cause: str
    cost: str
    fix: str

    @property
    def text(self) -> str:
        return f"{self.path}. {self.cause} {self.cost} {self.fix}"

    @property
    def notice(self) -> Notice:
        return Notice(self.text)


@dataclass(frozen=True, slots=True)
class Table(Event):
    """A table to print once: the audit of the base, the counts of the data.

    Attributes:
        summary: One line that replaces the table on a brief screen.
        source: The file of rows that the table describes, if any.
        counts: The numbers for code, since the text of cells may change. For a file of rows:
            num_read, num_cut, num_dropped.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    summary: str = ""
    source: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClassReport(Table):
    """Metrics of each label of a classifier, as a table and for code.

    Attributes:
        labels: precision, recall, f1 and rows of each label.
        confusion: Rows by true label, then by predicted label; None for many labels.
    """

    labels: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    confusion: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """Training begins.

    `num_parameters` are the base's; `plan` and `paths` describe how the model is computed.
    """

    num_steps: int
    start_step: int
    num_rows: int
    num_trainable: int
    num_parameters: int
    device: str
    paths: str = ""
    plan: str = ""


@dataclass(frozen=True, slots=True)
class StepDone(Event):
    """One optimizer step; `loss` is the mean over the step's target tokens on all ranks.

    `figures` are the task's other metrics by name, such as the accuracy of preferences.
    """

    step: int
    num_steps: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    num_tokens: int
    tokens_per_second: float
    peak_bytes: int
    seconds_left: float
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalDone(Event):
    """One pass over the eval rows."""

    step: int
    metrics: Mapping[str, float]
    best: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion of a prompt; `reference` is the eval row's answer, if it has one."""

    prompt: str
    completion: str
    reference: str | None
    source: str

    @property
    def is_exact(self) -> bool:
        """Whether the completion equals the reference, apart from surrounding white space."""
        return self.completion.strip() == (self.reference or "").strip()


@dataclass(frozen=True, slots=True)
class Sampled(Event):
    """Completions of the prompts that a run samples from; step 0 is before training."""

    step: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """A completion in a step of on-policy training, and its rewards; NaN if not scored."""

    prompt: str
    completion: str
    reward: float
    parts: Mapping[str, float]
    advantage: float
    is_cut: bool
    source: str


@dataclass(frozen=True, slots=True)
class RolledOut(Event):
    """The completions that a step trains on, and the time of generating them in seconds."""

    step: int
    seconds: float
    answers: tuple[ScoredAnswer, ...]


@dataclass(frozen=True, slots=True)
class Saved(Event):
    """A checkpoint, adapter, or merged model is completely on disk."""

    kind: str
    path: Path


@dataclass(frozen=True, slots=True)
class RunDone(Event):
    """Training is over."""

    step: int
    seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunStopped(Event):
    """Training ended before its last step; `state` is "failed" or, after a signal, "stopped"."""

    step: int
    state: str
    text: str


def logs_json() -> bool:
    """Return whether messages on stderr are lines of JSON."""
    return os.environ.get(LOG_FORMAT) == "json"


def as_line(event: str, fields: Mapping[str, object]) -> str:
    """Return an event as a line of JSON: its name, the time in seconds, and its fields."""
    line = {"event": event, "time": round(time.time(), 3), **fields}
    return json.dumps(plain(line), default=str, ensure_ascii=False) + "\n"


def plain(value: Any) -> Any:
    """Replace NaN and infinity by null, for JSON."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def event_line(event: Event) -> str:
    """Return an event of this module as a line of JSON; see `as_line`."""
    return as_line(type(event).__name__, asdict(event))


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Discard an event."""


def to_all(*listeners: Listener) -> Listener:
    """Return a listener that passes each event to all `listeners`, in order."""

    def on_event(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return on_event
