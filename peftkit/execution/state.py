"""A run's state between two steps, apart from weights, optimizer and generators; and its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from peftkit.errors import CheckpointError
from peftkit.execution.plan import ExecutionPlan, plan_from

RETIRED = ("empty_steps", "is_sure", "loss")
"""Fields of earlier versions, which a checkpoint may have."""


@dataclass(slots=True)
class State:
    """A run's state, saved with every checkpoint.

    Attributes:
        step: Optimizer steps done.
        plan: How rows go through the model now.
        measured: Whether the plan is refined by the run's own rows (train/memory.py).
        recent_losses: Of the last RECENT_STEPS steps.
        num_tokens: Trained on so far, on all processes.
        seconds: Wall-clock time of the run, including the parts before a resume.
        step_seconds: Time in optimizer steps.
        evaluated_step: The last step that was evaluated.
        eval_loss: Of that evaluation; None if it was not finite.
        best_step: The step with the lowest eval loss, which is `best_loss`.
        patience_loss: The lowest eval loss, as early stopping counts it.
        worse_evals: Evaluations since then.
        is_ended: Whether the task has ended the run early (`RunHooks.stop_reason`).
        loss_scale, good_steps: State of LossScale.
    """

    plan: ExecutionPlan
    measured: bool = False
    step: int = 0
    recent_losses: tuple[float, ...] = ()
    num_tokens: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    evaluated_step: int | None = None
    eval_loss: float | None = None
    best_step: int | None = None
    best_loss: float | None = None
    patience_loss: float | None = None
    worse_evals: int = 0
    is_ended: bool = False
    loss_scale: float = 1.0
    good_steps: int = 0


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The figures of one step; all but `notice` are equal on every process.

    Attributes:
        loss: Mean over the targets of all processes.
        figures: The task's metrics, by name.
        num_tokens: Trained on, all processes together.
        stop: A signal that some process got, or 0.
        notice: A change of the plan in words, or "".
    """

    loss: float
    figures: Mapping[str, float]
    grad_norm: float
    num_tokens: int
    stop: int
    notice: str


@dataclass(frozen=True, slots=True)
class Result:
    """A completed run.

    Attributes:
        step: Optimizer steps, including those before a resume.
        seconds: Wall-clock time, likewise.
        metrics: loss (`recent_mean`), epochs, num_tokens, tokens_per_second, peak_bytes; with eval
            rows eval_loss, best_eval_loss and, of a task that predicts tokens, eval_perplexity.
        checkpoint: The last one; the model has its weights.
        best_step: The step with the lowest eval loss.
        best_checkpoint: Its checkpoint.
        is_main: Whether this is the process, of several, that writes files.
    """

    step: int
    seconds: float
    metrics: Mapping[str, float]
    checkpoint: Path
    best_step: int | None
    best_checkpoint: Path | None
    is_main: bool


def state_from_json(values: Mapping[str, Any]) -> State:
    """Return a saved state; missing fields have their defaults.

    Raises:
        CheckpointError: It has unknown fields or lacks required ones.
    """
    required = {field.name: field.default is MISSING for field in fields(State)}
    names = {name for name in values if name not in RETIRED}
    missing = [name for name in required if required[name] and name not in names]
    if missing or not names <= set(required):
        raise CheckpointError(
            "cannot resume: state.json is not of this version", found=", ".join(sorted(values))
        )
    current = {"is_ended": values.get("is_sure", False)} | {name: values[name] for name in names}
    losses = tuple(current.get("recent_losses", ()))
    return State(**{**current, "recent_losses": losses, "plan": plan_from(values["plan"])})
