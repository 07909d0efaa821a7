"""State of a run between two steps (without weights, optimizer and generators), and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from peftkit.errors import CheckpointError
from peftkit.execution.plan import ExecutionPlan, plan_from

RETIRED = ("empty_steps", "is_sure", "loss")
"""Fields of earlier versions that a checkpoint may contain."""


@dataclass(slots=True)
class State:
    """State of a run, saved with every checkpoint.

    Attributes:
        step: Completed optimizer steps.
        plan: The current execution plan.
        measured: Whether the plan is refined by measuring rows of this run (train/memory.py).
        recent_losses: Losses of the last RECENT_STEPS steps.
        num_tokens: Tokens trained on so far, on all processes.
        seconds: Wall-clock time of the run, including the time before a resume.
        step_seconds: Time spent in optimizer steps.
        evaluated_step: Step of the last evaluation.
        eval_loss: Loss of that evaluation; None if it was not finite.
        best_step: Step of the best evaluation by `train.best_metric`; `best_loss` is its loss.
        best_metric: `train.best_metric` of the evaluations so far.
        best_score, patience_loss: Best metric for `best_step` and for early stopping; negated if a
            higher metric is better.
        worse_evals: Number of evaluations since `patience_loss`.
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
    best_metric: str = "loss"
    best_score: float | None = None
    patience_loss: float | None = None
    worse_evals: int = 0
    is_ended: bool = False
    loss_scale: float = 1.0
    good_steps: int = 0


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Figures of one step; all but `notice` are equal on all processes.

    Attributes:
        loss: Mean over the targets of all processes.
        figures: Metrics of the task, by name.
        num_tokens: Tokens trained on, summed over all processes.
        stop: Signal that one of the processes received, or 0.
        notice: Description of a change of the plan, or "".
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
        step: Optimizer steps, including steps before a resume.
        seconds: Wall-clock time, including the time before a resume.
        metrics: loss (`recent_mean`), epochs, num_tokens, tokens_per_second, peak_bytes; with eval
            rows eval_loss, best_eval_loss (eval_loss_of_best_step, if train.best_metric is another
            metric) and, for a task that predicts tokens, eval_perplexity.
        checkpoint: The last checkpoint; the model has its weights.
        best_step: Step of the best evaluation.
        best_checkpoint: Checkpoint of that step.
        is_main: Whether this process has rank 0 and writes the files.
    """

    step: int
    seconds: float
    metrics: Mapping[str, float]
    checkpoint: Path
    best_step: int | None
    best_checkpoint: Path | None
    is_main: bool


def state_from_json(values: Mapping[str, Any]) -> State:
    """Return a saved state; missing fields get their defaults.

    Raises:
        CheckpointError: It has unknown fields or lacks required ones.
    """
    required = {field.name: field.default is MISSING for field in fields(State)}
    names = {name for name in values if name not in RETIRED}
    missing = [name for name in required if required[name] and name not in names]
    if missing or not names <= set(required):
        raise CheckpointError(
            "cannot resume: state.json is from another version of peftkit",
            found=", ".join(sorted(values)),
        )
    current = {"is_ended": values.get("is_sure", False)} | {name: values[name] for name in names}
    losses = tuple(current.get("recent_losses", ()))
    return State(**{**current, "recent_losses": losses, "plan": plan_from(values["plan"])})
