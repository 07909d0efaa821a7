"""The training loop: the same weights whatever a batch is cut into, and after any interruption.

A step's rows depend on the seed and the step alone (sampler.py), its learning rate on the step
alone (optim.py); what else decides the next step is saved: weights, optimizer, generators, State.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from peftkit.errors import DataError
from peftkit.events import Listener, ignore
from peftkit.execution.signals import stop_requests
from peftkit.execution.state import Result
from peftkit.settings import TrainConfig
from peftkit.tasks.base import Task
from peftkit.train.checkpoints.checkpoint import (
    StartPolicy,
    delete_checkpoints,
    locked,
    prepare_output,
)
from peftkit.train.metrics import require_trackers
from peftkit.train.model import trainable_parameters
from peftkit.train.run import Job, Run
from peftkit.train.saving import Weights


def fit(
    model: nn.Module,
    task: Task,
    train_rows: Sequence[Any],
    eval_rows: Sequence[Any] = (),
    config: TrainConfig | None = None,
    *,
    weights: Weights | None = None,
    identity: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: Sequence[str] = (),
    on_event: Listener = ignore,
) -> Result:
    """Train the parameters of a model that require a gradient, where the model is.

    Seeds python's, numpy's and torch's generators. Puts the model into training mode, and back.

    Args:
        task: Makes batches of rows, and losses of batches.
        config: How to learn; `TrainConfig()` by default.
        weights: What checkpoints hold of the model; by default its trainable parameters.
        identity: What else a resumed run must have in common with the saved one, as plain JSON.
        resume: Go on from the newest valid checkpoint in config.output_dir.
        overwrite: Delete the checkpoints that are there.
        allow_changes: Dotted keys of identity, "train" or "rows" that may have changed.
        on_event: Hears what happens, on the main process alone.

    Raises:
        PeftkitError: The input is wrong; RunError: the run broke.
        Interrupted: SIGINT or SIGTERM came; the run is saved.
    """
    config = config or TrainConfig()
    start = StartPolicy(resume, overwrite, allow_changes)
    check_output(config, start)
    with locked(config.output_dir):
        job = Job(
            model,
            task,
            train_rows,
            eval_rows,
            config,
            weights=weights,
            identity=identity or {},
            on_event=on_event,
        )
        return train_job(job, start)


def check_output(config: TrainConfig, start: StartPolicy) -> None:
    """Make sure, before anything heavy, that a run can write its results where it is to.

    Raises:
        PeftkitError: As `prepare_output` and `require_trackers`.
    """
    prepare_output(config.output_dir, start)
    require_trackers(config.log_to)


def train_job(job: Job, start: StartPolicy) -> Result:
    """Do what `fit` does after `check_output`, in a locked folder."""
    if not job.train_rows:
        raise DataError("there are no rows to train on")
    trainable_parameters(job.model)
    if start.overwrite:
        delete_checkpoints(job.config.output_dir)
    with stop_requests() as stop:
        run = Run(job, stop)
        with run.prepared():
            return run.train(start.allow_changes if start.resume else None)
