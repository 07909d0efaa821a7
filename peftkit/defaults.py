"""Default settings derived from the rows and the base.

docs/defaults.md gives the source and the measurements of each rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peftkit.settings import TrainConfig

MIN_STEPS = 24
"""Minimum number of optimizer steps; a shorter run hardly leaves its warm-up."""
EPOCH_STEPS = 24
"""Minimum number of steps of an epoch; it limits the batch size."""
RUN_STEPS = 160
"""Steps of a run on few rows, reached with several epochs."""
MAX_EPOCHS = 5
"""Maximum number of epochs, unless MIN_STEPS requires more."""
BATCHES = (4, 8, 16)
"""Batch sizes by number of rows; LoRA loses more with large batches than full fine-tuning does."""
CONTRASTIVE_BATCHES = (16, 32, 64, 128)
"""Batch sizes of tasks with in-batch negatives, such as embedding."""
PACKED_BATCH = 8
"""Batch size in packed rows."""
ALPHA = 32
"""Constant alpha: the best learning rate then hardly depends on the rank."""
RANKS = ((20_000, 16), (100_000, 32))
"""Pairs (n, rank): the rank for fewer than n rows."""
MAX_RANK = 64
BASE_RATE, BASE_WIDTH, RATE_POWER = 5e-4, 2048, 0.78
"""Learning rate BASE_RATE x (BASE_WIDTH / width)^RATE_POWER, ten times the rate of full tuning."""
UNKNOWN_WIDTH = 4096
PREFERENCE_RATE = 0.1
"""Factor of the learning rate for preference tasks."""

ANCHOR_SHARE, MAX_ANCHORS = 1 / 8, 4
"""Tokens of `task.anchor` as a share of the rows' tokens of a step; its maximum number of rows."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Default settings for a data set and a base.

    Attributes:
        batch_size: Rows (packed rows with packing) of an optimizer step, on all processes.
        num_steps: Optimizer steps of the run.
    """

    packing: bool
    batch_size: int
    epochs: int
    learning_rate: float
    rank: int
    num_steps: int
    alpha: int = ALPHA


def defaults_for(
    num_rows: int,
    num_tokens: int = 0,
    max_length: int = 1024,
    width: int | None = None,
    *,
    batches: Sequence[int] = BATCHES,
) -> Defaults:
    """Return the default settings for a data set and a base.

    Args:
        num_rows: Documents to train on.
        num_tokens: Approximate number of tokens of all rows; 0 if they are not packed.
        max_length: Tokens of a packed row.
        width: Hidden size of the base; None if unknown.
        batches: Allowed batch sizes, in ascending order.
    """
    num_packed = math.ceil(num_tokens / max_length)
    packing = should_pack(num_packed) and num_packed <= num_rows / 2
    batch_size = PACKED_BATCH if packing else batch_of(num_rows, batches)
    epoch_steps = math.ceil((num_packed if packing else num_rows) / batch_size)
    passes = (math.ceil(steps / max(epoch_steps, 1)) for steps in (RUN_STEPS, MIN_STEPS))
    epochs = max(min(MAX_EPOCHS, next(passes)), next(passes))
    return Defaults(
        packing=packing,
        batch_size=batch_size,
        epochs=epochs,
        learning_rate=learning_rate_of(width),
        rank=next((rank for limit, rank in RANKS if num_rows < limit), MAX_RANK),
        num_steps=epochs * epoch_steps,
    )


def batch_of(num_rows: int, batches: Sequence[int] = BATCHES) -> int:
    """Return the largest batch size with which an epoch has EPOCH_STEPS steps."""
    return max(size for size in batches if size * EPOCH_STEPS <= num_rows or size == batches[0])


def should_pack(num_packed: int) -> bool:
    """Return whether an epoch of `num_packed` packed rows has enough steps."""
    return num_packed >= EPOCH_STEPS * PACKED_BATCH


def learning_rate_of(width: int | None) -> float:
    """Return the learning rate of LoRA for a base of this hidden size, to one digit."""
    rate = BASE_RATE * (BASE_WIDTH / (width or UNKNOWN_WIDTH)) ** RATE_POWER
    return float(f"{rate:.0e}")


def anchors_per_step(tokens: float, anchor_tokens: float) -> int:
    """Return the number of anchor rows in a step.

    Args:
        tokens: Tokens of the step's rows on one process.
        anchor_tokens: Tokens of an anchor row.
    """
    return max(1, min(MAX_ANCHORS, round(ANCHOR_SHARE * tokens / anchor_tokens)))


def drift_advice(task: Any, train: TrainConfig, config: Any) -> str:
    """Return advice if a run neither limits nor measures drift at a high learning rate; else "".

    Half of `learning_rate_of` moved SmolLM2-135M by 1.0 nats per token, a fifth of it by 0.17
    (docs/forgetting.md).

    Args:
        task: The task of the recipe; only causal_lm has an anchor.
        config: The configuration of the base in transformers.
    """
    if task.type != "causal_lm" or task.anchor is not None or train.drift is not None:
        return ""
    width = getattr(config.get_text_config(), "hidden_size", None)
    if train.learning_rate < learning_rate_of(width) / 2:
        return ""
    return (
        f"A learning rate of {train.learning_rate:g} also changes the answers to unrelated "
        "prompts. To keep them: --set task.anchor=1. To measure the change: "
        "--set train.drift.on=self."
    )


def why_too_short(
    config: TrainConfig, num_rows: int, num_documents: int, num_processes: int = 1
) -> str:
    """Return a warning with a fix if a run is too short or its batch too large; else "".

    An explicit train.max_steps is never too short.

    Args:
        num_rows: Training rows, after packing.
        num_documents: Training rows before packing.
    """
    rows_per_step = config.rows_per_step(num_processes)
    num_steps = config.num_steps(num_rows, num_processes)
    is_short = config.max_steps is None and num_steps < MIN_STEPS
    is_large = rows_per_step > num_rows > 0
    if not (is_short or is_large):
        return ""
    packed = f" ({num_documents:,} documents, packed)" if num_documents != num_rows else ""
    setting = "train.batch_size x gradient_accumulation"
    setting += " x processes" if num_processes > 1 else ""
    step = f"an optimizer step takes {rows_per_step:,} rows ({setting})"
    suggested = defaults_for(num_documents)
    size = max(1, min(suggested.batch_size, num_documents) // num_processes)
    changes = [
        *(["data.packing=false"] if packed else []),
        f"train.batch_size={size}",
        *(["train.gradient_accumulation=1"] if config.gradient_accumulation > 1 else []),
    ]
    if not is_short:
        return (
            f"The batch is larger than the data: {step}, and there are {num_rows:,}{packed}. "
            f"Try: --set {' --set '.join(changes)}"
        )
    epochs = max(suggested.epochs, config.epochs)
    steps = math.ceil(epochs * math.ceil(num_documents / (size * num_processes)))
    return (
        f"This run is too short to learn: {num_steps:,} optimizer steps, fewer than "
        f"{MIN_STEPS}; {step} of {num_rows:,}{packed}. For {steps:,} steps: "
        f"--set {' --set '.join([*changes, f'train.epochs={epochs:g}'])}"
    )
