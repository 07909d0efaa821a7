"""Metrics of a run: metrics.jsonl always, and trackers that the recipe names."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from peftkit.errors import ConfigError
from peftkit.events import (
    EvalDone,
    Event,
    Listener,
    Notice,
    RolledOut,
    RunDone,
    RunStarted,
    RunStopped,
    Sampled,
    Saved,
    StepDone,
)
from peftkit.kernels.device import gpu_of, peak_resident_bytes
from peftkit.train.config import TrainConfig

FILE, SAMPLES, ANSWERS = "metrics.jsonl", "samples.jsonl", "answers.jsonl"
RECORDED = (RunStarted, StepDone, EvalDone, Saved, Notice, RunDone, RunStopped)
Complain = Callable[[str], None]


class MetricsFile:
    """Appends one JSON line per event to metrics.jsonl: {"event": "StepDone", "step": 1, ...}.

    A resumed run goes on in the same file, after a RunStarted line with its `start_step`: of two
    lines for one step the later counts. A disk that refuses costs the file, not the run.
    """

    def __init__(self, output_dir: Path, complain: Complain, name: str = FILE) -> None:
        self.path, self._complain = output_dir / name, complain
        self._broken = False
        self._needs_newline = _is_cut_short(self.path)

    def on_event(self, event: Event) -> None:
        """Write the event, if it is one of a run's."""
        if isinstance(event, RECORDED):
            fields = {"event": type(event).__name__, "time": round(time.time(), 3)}
            self._append({**fields, **_plain(asdict(event))})

    def _append(self, *lines: dict[str, Any]) -> None:
        if self._broken:
            return
        text = "".join(f"{json.dumps(line, default=str)}\n" for line in lines)
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write("\n" * self._needs_newline + text)
            self._needs_newline = False
        except OSError as error:
            self._broken = True
            self._complain(f"{self.path} is no longer written: {error}")


class SamplesFile(MetricsFile):
    """Appends one JSON line per sample to samples.jsonl: step, prompt, completion, reference."""

    def __init__(self, output_dir: Path, complain: Complain) -> None:
        super().__init__(output_dir, complain, SAMPLES)

    def on_event(self, event: Event) -> None:
        """Write samples."""
        if isinstance(event, Sampled):
            lines = [{"step": event.step, **asdict(s)} for s in event.samples]
            self._append(*lines)


class AnswersFile(MetricsFile):
    """Appends one JSON line per answer that was learnt from: step, prompt, completion, reward."""

    def __init__(self, output_dir: Path, complain: Complain) -> None:
        super().__init__(output_dir, complain, ANSWERS)

    def on_event(self, event: Event) -> None:
        """Write answers."""
        if isinstance(event, RolledOut):
            self._append(*({"step": event.step, **_plain(asdict(one))} for one in event.answers))


class Tracker(Protocol):
    """The part of accelerate's GeneralTracker that is used here."""

    name: str

    def log(self, values: dict[str, float], step: int | None) -> Any:
        """Record values of a step."""

    def finish(self) -> Any:
        """Write what is left."""


class Trackers:
    """Passes figures on to trackers; one that raises is dropped with one Notice."""

    def __init__(self, trackers: Iterable[Tracker], complain: Complain) -> None:
        self._trackers, self._complain = list(trackers), complain

    def on_event(self, event: Event) -> None:
        """Log a step's or an eval's figures."""
        if isinstance(event, StepDone):
            figures = {"loss", "learning_rate", "grad_norm", "epoch", "tokens_per_second"}
            told = {name: getattr(event, name) for name in sorted(figures)} | dict(event.figures)
            values = {f"train/{name}": value for name, value in told.items()}
        elif isinstance(event, EvalDone):
            values = {f"eval/{name}": value for name, value in event.metrics.items()}
        else:
            return
        self._each(lambda tracker: tracker.log(values, step=event.step))

    def finish(self) -> None:
        """End all trackers."""
        self._each(lambda tracker: tracker.finish())

    def _each(self, call: Callable[[Tracker], Any]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # whatever it is, a tracker never costs the run
                self._trackers.remove(tracker)
                self._complain(_failed(tracker.name, error))


@contextmanager
def recording(config: TrainConfig, user: Listener) -> Iterator[list[Listener]]:
    """Yield what writes a run's events to its files and the trackers of train.log_to.

    Args:
        user: Hears of those that fail.
    """

    def complain(text: str) -> None:
        user(Notice(text))

    settings = config.model_dump(mode="json", exclude={"log_to"})
    started = start_trackers(config.log_to, config.output_dir, settings, complain)
    trackers = Trackers(started, complain)
    kinds = (MetricsFile, SamplesFile, AnswersFile)
    files = [kind(config.output_dir, complain) for kind in kinds]
    try:
        yield [*(file.on_event for file in files), trackers.on_event]
    finally:
        trackers.finish()


def require_trackers(names: Iterable[str]) -> None:
    """Raise ConfigError for a tracker whose library is not installed."""
    installed = {str(tracker) for tracker in get_available_trackers()}
    for name in names:
        if name not in installed:
            raise ConfigError(
                f"train.log_to: {name} is not installed", fix=f"Install it: pip install {name}"
            )


def start_trackers(
    names: Iterable[str], output_dir: Path, settings: Mapping[str, Any], complain: Complain
) -> list[Tracker]:
    """Start accelerate's trackers, each by itself: if one cannot start, the others do."""
    started: list[Tracker] = []
    for name in names:
        try:
            kind = LOGGER_TYPE_TO_CLASS[name]
            places = {"logging_dir": output_dir} if kind.requires_logging_directory else {}
            tracker = kind("peftkit", **places)
            tracker.start()
            # TensorBoard takes plain values only
            plain = {
                k: v if isinstance(v, int | float | str) else str(v) for k, v in settings.items()
            }
            tracker.store_init_configuration(plain)
            started.append(tracker)
        except Exception as error:  # no account, no network, a broken install
            complain(_failed(name, error))
    return started


def peak_bytes(device: torch.device) -> int:
    """Return the run's peak memory: what torch allocated on a GPU, else the process's peak RSS.

    The latter counts from the process's start, loading the model included; 0 where unknown.
    """
    gpu = gpu_of(device)
    return peak_resident_bytes() if gpu is None else gpu.peak(device)


def _failed(name: str, error: Exception) -> str:
    return f"The tracker {name} failed and is left out from here on: {error}"


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: NaN and Infinity become null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_cut_short(path: Path) -> bool:
    """Return whether a run that was killed left half a line."""
    try:
        with open(path, "rb") as file:
            file.seek(-1, 2)
            return file.read(1) != b"\n"
    except OSError:  # absent or empty
        return False
