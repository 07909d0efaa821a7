"""What a run knows of itself between two steps, apart from weights, optimizer and generators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from peftkit.errors import CheckpointError


@dataclass(slots=True)
class State:
    """A run's own memory, saved with every checkpoint.

    Attributes:
        step: Optimizer steps done.
        micro_batch: Rows that go through the model at once: train.batch_size, or fewer after
            running out of memory.
        recompute: Whether running out of memory has switched gradient checkpointing on.
        loss: Of the last step.
        num_tokens: Put through the model so far, on all processes.
        seconds: Spent in all, resumed parts together.
        step_seconds: Spent in optimizer steps.
        evaluated_step: The last step that was evaluated.
        eval_loss: What came out, None if it was not finite.
        best_step: The step with the lowest eval loss, which is `best_loss`.
        loss_scale: See LossScale.
        good_steps: Likewise.
    """

    micro_batch: int
    recompute: bool = False
    step: int = 0
    loss: float = 0.0
    num_tokens: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    evaluated_step: int | None = None
    eval_loss: float | None = None
    best_step: int | None = None
    best_loss: float | None = None
    loss_scale: float = 1.0
    good_steps: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def state_from_json(values: Mapping[str, Any]) -> State:
    """Return a saved state; CheckpointError if it is another version's."""
    if set(values) != {field.name for field in fields(State)}:
        raise CheckpointError(
            "cannot resume: state.json is not of this version", found=", ".join(sorted(values))
        )
    return State(**values)
