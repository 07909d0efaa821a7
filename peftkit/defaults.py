"""Settings that follow from the rows and the base, so that a run is long enough to learn.

docs/defaults.md gives each rule with its source and what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peftkit.settings import TrainConfig

FEWEST_STEPS = 24
"""Optimizer steps below which a run hardly leaves its warm-up."""
EPOCH_STEPS = 24
"""Least number of steps of an epoch: larger ones would average what they could learn."""
RUN_STEPS = 160
"""Steps of a run to aim for with few rows, by passing over them again."""
MOST_EPOCHS = 5
"""But for the fewest steps."""
BATCHES = (4, 8, 16)
"""Rows of a step, by how many there are; LoRA loses with larger ones what full tuning does not."""
CONTRASTS = (16, 32, 64, 128)
"""Rows of a step whose rows are each other's negatives, as in the task embedding."""
PACKED_BATCH = 8
"""Packed rows of a step."""
ALPHA = 32
"""Alpha stays when the rank changes: the best learning rate then hardly depends on the rank."""
RANKS = ((20_000, 16), (100_000, 32))
"""Rank below so many rows."""
LARGEST_RANK = 64
BASE_RATE, BASE_WIDTH, RATE_POWER = 5e-4, 2048, 0.78
"""Learning rate of LoRA (ten times that of full tuning) at a width, and how it falls with it."""
UNKNOWN_WIDTH = 4096
OF_PREFERENCES = 0.1
"""Share of that rate with which preferences are learnt."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Settings for some rows and a base.

    Attributes:
        batch_size: Rows of an optimizer step, on all processes; packed ones where they are packed.
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
    """Return the settings for rows and a base.

    Args:
        num_rows: Documents to train on.
        num_tokens: Of all rows, about; 0 where they are not packed.
        max_length: Tokens of a packed row.
        width: Hidden size of the base; None where it is not known.
        batches: Rows that a step may have.
    """
    num_packed = math.ceil(num_tokens / max_length)
    packing = is_worth_packing(num_packed) and num_packed <= num_rows / 2
    batch_size = PACKED_BATCH if packing else batch_of(num_rows, batches)
    epoch_steps = math.ceil((num_packed if packing else num_rows) / batch_size)
    passes = (math.ceil(steps / max(epoch_steps, 1)) for steps in (RUN_STEPS, FEWEST_STEPS))
    epochs = max(min(MOST_EPOCHS, next(passes)), next(passes))
    return Defaults(
        packing=packing,
        batch_size=batch_size,
        epochs=epochs,
        learning_rate=learning_rate_of(width),
        rank=next((rank for limit, rank in RANKS if num_rows < limit), LARGEST_RANK),
        num_steps=epochs * epoch_steps,
    )


def batch_of(num_rows: int, batches: Sequence[int] = BATCHES) -> int:
    """Return the rows of a step: as many as leave an epoch its steps."""
    return max(size for size in batches if size * EPOCH_STEPS <= num_rows or size == batches[0])


def is_worth_packing(num_packed: int) -> bool:
    """Whether an epoch of so many packed rows has steps enough."""
    return num_packed >= EPOCH_STEPS * PACKED_BATCH


def learning_rate_of(width: int | None) -> float:
    """Return LoRA's learning rate for a base of this hidden size, with one figure."""
    rate = BASE_RATE * (BASE_WIDTH / (width or UNKNOWN_WIDTH)) ** RATE_POWER
    return float(f"{rate:.0e}")


def why_too_short(
    config: TrainConfig, num_rows: int, num_documents: int, num_processes: int = 1
) -> str:
    """Return why a run is too short to learn and what to set; "" if it is not.

    A number of steps that was asked for (train.max_steps) is not called short.

    Args:
        num_rows: As they are trained on.
        num_documents: The same unpacked.
    """
    in_step = config.rows_per_step(num_processes)
    num_steps = config.num_steps(num_rows, num_processes)
    is_short = config.max_steps is None and num_steps < FEWEST_STEPS
    is_large = in_step > num_rows > 0
    if not (is_short or is_large):
        return ""
    packed = f" ({num_documents:,} documents, packed)" if num_documents != num_rows else ""
    setting = "train.batch_size x gradient_accumulation"
    setting += " x processes" if num_processes > 1 else ""
    asked = f"an optimizer step takes {in_step:,} rows ({setting})"
    better = defaults_for(num_documents)
    size = max(1, min(better.batch_size, num_documents) // num_processes)
    changes = [
        *(["data.packing=false"] if packed else []),
        f"train.batch_size={size}",
        *(["train.gradient_accumulation=1"] if config.gradient_accumulation > 1 else []),
    ]
    if not is_short:
        return (
            f"The batch is larger than the data: {asked}, and there are {num_rows:,}{packed}. "
            f"Try: --set {' --set '.join(changes)}"
        )
    epochs = max(better.epochs, config.epochs)
    steps = math.ceil(epochs * math.ceil(num_documents / (size * num_processes)))
    return (
        f"This run is too short to learn: {num_steps:,} optimizer steps, fewer than "
        f"{FEWEST_STEPS}; {asked} of {num_rows:,}{packed}. For {steps:,} steps: "
        f"--set {' --set '.join([*changes, f'train.epochs={epochs:g}'])}"
    )
