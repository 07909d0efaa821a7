"""What a run that came to its end leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from peftkit.train.metrics import peak_bytes
from peftkit.train.trainer import Trainer
from peftkit.train.validation import Validation


@dataclass(frozen=True, slots=True)
class Result:
    """A run that came to its end.

    Attributes:
        step: Optimizer steps, those before a resume included.
        seconds: Likewise.
        metrics: loss (of the last step), num_tokens, tokens_per_second, peak_bytes; with eval rows
            eval_loss, best_eval_loss and, of a task that predicts tokens, eval_perplexity.
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


def result_of(learner: Trainer, validation: Validation, folder: Path, seconds: float) -> Result:
    """Return the result of a run.

    Args:
        folder: With its checkpoints.
        seconds: That it took.
    """
    state, device = learner.state, learner.ranks.device
    metrics = {
        "loss": state.loss,
        "num_tokens": float(state.num_tokens),
        "tokens_per_second": state.num_tokens / max(state.step_seconds, 1e-9),
        "peak_bytes": float(peak_bytes(device)),
    }
    metrics |= {f"eval_{name}": value for name, value in validation.figures.items()}
    if state.best_loss is not None:
        metrics["best_eval_loss"] = state.best_loss
    best = None if state.best_step is None else folder / f"step-{state.best_step}"
    return Result(
        step=state.step,
        seconds=seconds,
        metrics=metrics,
        checkpoint=folder / f"step-{state.step}",
        best_step=state.best_step,
        best_checkpoint=best,
        is_main=learner.ranks.is_main,
    )
