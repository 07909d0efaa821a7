"""A job's documents in the store, and the progress of its run: events, checkpoints, metrics."""

from __future__ import annotations

import base64
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from peftkit.events import (
    EvalDone,
    Event,
    Notice,
    Progress,
    RolledOut,
    RunStarted,
    Saved,
    StepDone,
    Table,
)
from peftkit.execution.signals import Interrupted, stop_here
from peftkit.formats.folders import CONFIG, NOTES, START, TENSORS, new_adapter_folder
from peftkit.report.history import History, read_history
from peftkit_server.refusals import public
from peftkit_server.store import Store, new_id
from peftkit_server.training import Training

CHECKPOINTS = "checkpoints"
"""Subfolder of the server for the checkpoints that are models."""
JOB, CHECKPOINT, EVENT = "job", "checkpoint", "event"
"""Kinds of documents. Fields: `response`, the object that clients receive; of a job further
`request`, its body; `name`, the name of its model; and `base`, the base it trains over. An event is
that object itself."""
ENDED = ("succeeded", "failed", "cancelled")

Level = Literal["info", "warn", "error"]
MAX_CHECKPOINTS = 3
"""Most checkpoints of a job that are served as models: the newest ones, at ends of epochs."""
PRINTED_STEPS = 10
"""Approximate number of steps of a run that the server prints."""
UNUSED = "fields not used"
"""Label of a table of rows (`tasks.row_loader`)."""
PAUSE_SECONDS = 0.1
"""Time between two turns while rows are prepared."""
TURNS = (StepDone, EvalDone, Saved, RolledOut, Progress)
"""Events between two steps: the worker may serve other requests here."""


@contextmanager
def changing(store: Store, id: str) -> Iterator[dict[str, Any]]:
    """Yield a job's document and write it at the end; the context is one transaction."""
    with store.transaction():
        job = store.existing(JOB, id)
        yield job
        store.put(JOB, id, job, owner=store.owner(JOB, id))


def add_event(
    store: Store, id: str, text: str, level: Level = "info", data: Mapping[str, Any] | None = None
) -> None:
    """Append an event to a job's journal; its message is one line."""
    event: dict[str, Any] = {
        "object": "fine_tuning.job.event",
        "id": new_id("ftevent-"),
        "created_at": int(time.time()),
        "level": level,
        "message": _line(text),
        "type": "metrics" if data else "message",
        "data": dict(data or {}),
    }
    store.put(EVENT, event["id"], event, parent=id)


def add_warning_once(store: Store, id: str, text: str) -> None:
    """Add a warning unless the job has it already; a resumed run repeats its notices."""
    if _line(text) not in (event["message"] for event in store.all(EVENT, parent=id)):
        add_event(store, id, text, "warn")


def _line(text: str) -> str:
    """Return a text for clients in one line."""
    return " ".join(public(text).split())


class JobProgress:
    """Listener of a job's run: it records events and stops the run if a client requests that.

    Args:
        folder: Folder of the run.
        yield_model: Serves waiting requests, then returns.
    """

    def __init__(
        self, training: Training, id: str, folder: Path, yield_model: Callable[[], None]
    ) -> None:
        self._training, self._store, self._id = training, training.store, id
        self._folder, self._yield_model = folder, yield_model
        job = training.store.existing(JOB, id)
        self._name, self._owner = job["name"], training.store.owner(JOB, id)
        self._epochs: int = job["response"]["hyperparameters"]["n_epochs"]
        self._evaluates = job["response"]["validation_file"] is not None
        self._step: StepDone | None = None
        self._num_steps = 1
        self._last_turn = time.monotonic()
        self._has_stepped = False

    def on_event(self, event: Event) -> None:
        """Handle an event of the run.

        Raises:
            Interrupted: A client stopped the job, and the run has not taken a step since its
                start: nothing needs saving.
        """
        if not self._has_stepped and not self._is_wanted():
            raise Interrupted(signal.SIGTERM, "stopped before the first step.")
        self._has_stepped = self._has_stepped or isinstance(event, StepDone)
        if isinstance(event, StepDone):
            self.flush()
            self._step = event
            if not self._evaluates:  # with evaluation, the validation loss may follow
                self.flush()
        elif isinstance(event, EvalDone):
            self.flush(event.metrics)
        elif isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, Saved) and event.kind == "checkpoint":
            self.flush()
            with changing(self._store, self._id) as job:
                job["attempts"] = 1  # this one
            self._publish_checkpoint(int(event.path.name.rpartition("-")[2]))
        elif isinstance(event, Notice):
            add_warning_once(self._store, self._id, event.text)
        elif isinstance(event, Table) and event.source:
            self._warn_of_rows(event)
        if isinstance(event, TURNS):
            self._turn()

    def pause(self) -> None:
        """Take a turn between two renderings of rows, if the last one is `PAUSE_SECONDS` ago."""
        if time.monotonic() - self._last_turn > PAUSE_SECONDS:
            self._turn()

    def _turn(self) -> None:
        """Stop the run if a client requested that; then serve waiting requests."""
        self._last_turn = math.inf  # rendering for a request is no pause
        try:
            if not self._is_wanted():
                stop_here()
            self._yield_model()
        finally:
            self._last_turn = time.monotonic()

    def _is_wanted(self) -> bool:
        job = self._store.get(JOB, self._id)
        return job is not None and job["response"]["status"] == "running"

    def flush(self, valid: Mapping[str, float] | None = None) -> None:
        """Record the last step, with the metrics of an evaluation after it."""
        step, self._step = self._step, None
        if step is None:
            return
        metrics = {f"train_{name}": value for name, value in step.figures.items()}
        metrics |= {f"valid_{name}": value for name, value in (valid or {}).items()}
        metrics = {"train_loss": step.loss, **metrics}
        data = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        text = f"Step {step.step}/{step.num_steps}: training loss={step.loss:.2f}"
        labels = {"validation loss": "valid_loss", "reward": "train_reward"}
        text += "".join(f", {k}={data[name]:.2f}" for k, name in labels.items() if name in data)
        data = {"step": step.step, "total_steps": step.num_steps, **data}
        with changing(self._store, self._id) as job:
            add_event(self._store, self._id, text, data=data)
            if job["response"]["status"] == "running":
                job["response"]["estimated_finish"] = int(time.time() + step.seconds_left)
        if step.step % math.ceil(step.num_steps / PRINTED_STEPS) == 0:
            self._training.log(f"{self._id}: {text}")

    def _start(self, event: RunStarted) -> None:
        self._num_steps, start = event.num_steps, event.start_step
        text = f"resumed after step {start}" if start else "started"
        add_event(self._store, self._id, f"Fine-tuning job {text}")
        self._training.log(f"{self._id}: {text}, {event.num_steps} steps, {event.device}")
        if start:
            self._publish_checkpoint(start)  # a killed server may not have published it

    def _warn_of_rows(self, table: Table) -> None:
        """Warn of truncated and dropped rows, and of fields that nothing reads."""
        name = Path(table.source).stem
        if unused := next((row[1] for row in table.rows if row[0] == UNUSED), ""):
            add_warning_once(self._store, self._id, f"Fields of {name} are not used: {unused}.")
        cut, dropped = (table.counts.get(name, 0) for name in ("num_cut", "num_dropped"))
        if cut or dropped:
            text = (
                f"{cut} rows of {name} exceed the model's context and were "
                f"truncated; {dropped} rows without target tokens were dropped."
            )
            add_warning_once(self._store, self._id, text)

    def _publish_checkpoint(self, step: int) -> None:
        """Publish a checkpoint of the run as a model, if it is the first after an epoch's end."""
        epoch = step * self._epochs // self._num_steps
        published = self._store.all(CHECKPOINT, parent=self._id)
        if not 0 < epoch < self._epochs or any(each["epoch"] >= epoch for each in published):
            return
        folder = self._kept(step)
        folder.parent.mkdir(exist_ok=True)
        copy_adapter(self._folder / "checkpoints" / f"step-{step}", folder)
        with self._store.transaction():
            self.publish(f"{self._name}:ckpt-step-{step}", folder, step, read_history(self._folder))
        self.delete_old_checkpoints()

    def _kept(self, step: int) -> Path:
        """Return the folder of a checkpoint that is a model."""
        return self._training.folder.resolve() / CHECKPOINTS / f"{self._id}-step-{step}"

    def publish(self, model: str, folder: Path, step: int, history: History) -> None:
        """Publish the adapter of a step as a model and a checkpoint of the job."""
        id, valid = new_id("ftckpt_"), history.curves["eval/loss"].get(step)
        losses = {"train_loss": history.curves["loss"].get(step), "valid_loss": valid}
        response = {
            "object": "fine_tuning.job.checkpoint",
            "id": id,
            "created_at": int(time.time()),
            "fine_tuned_model_checkpoint": model,
            "fine_tuning_job_id": self._id,
            "step_number": step,
            "metrics": {"step": step, **losses, "full_valid_loss": valid},
        }
        body = {"response": response, "epoch": step * self._epochs // self._num_steps}
        self._training.models.publish(model, folder, self._owner)
        self._store.put(CHECKPOINT, id, body, owner=self._owner, parent=self._id)
        add_event(self._store, self._id, f"Checkpoint created at step {step}")

    def delete_old_checkpoints(self) -> None:
        """Delete all checkpoints but the newest `MAX_CHECKPOINTS`."""
        for body in self._store.all(CHECKPOINT, parent=self._id)[:-MAX_CHECKPOINTS]:
            old = body["response"]
            name, folder = old["fine_tuned_model_checkpoint"], self._kept(old["step_number"])
            self._training.models.discard(name, folder, (CHECKPOINT, old["id"]))


def copy_adapter(source: Path, folder: Path) -> None:
    """Copy the files of an adapter into a new folder, as links if the file system has them."""
    with new_adapter_folder(folder, force=True) as new:
        for name in (CONFIG, TENSORS, NOTES, START):
            if name != START or (source / name).exists():
                try:
                    os.link(source / name, new / name)
                except OSError:
                    shutil.copyfile(source / name, new / name)


def results(history: History) -> bytes:
    """Return a run's metrics as CSV, in base64 as OpenAI's clients expect it."""
    names = ("loss", "train/accuracy", "eval/loss", "eval/accuracy")
    columns = [history.curves[name] for name in names]
    lines = ["step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy"]
    for step in columns[0]:
        values = (column.get(step) for column in columns)
        cells = ("" if value is None else f"{value:.5f}" for value in values)
        lines.append(",".join([str(step), *cells]))
    return base64.b64encode("\n".join([*lines, ""]).encode())
