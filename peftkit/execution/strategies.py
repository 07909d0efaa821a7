"""What takes less memory, one step after the other: the one ladder of a plan and of a run.

All activations are kept; blocks are recomputed; their inputs wait in main memory. On each step
fewer rows go through the model at once before the next is taken, but on a GPU never so few that it
idles while another step takes more. Before a run, counts choose the step (`choose`); when memory
runs out nevertheless, the run takes the next one (`smaller`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from peftkit.execution.plan import Activations, ExecutionPlan


def activation_modes(
    wish: bool | Literal["auto"],
    *,
    on_gpu: bool,
    has_blocks: bool = True,
    streamed: bool = False,
    recomputes: bool = False,
) -> tuple[Activations, ...]:
    """Return what may be kept of activations, the fastest first.

    Args:
        wish: train.gradient_checkpointing.
        has_blocks: Whether the model has blocks that can be computed again.
        streamed: Whether blocks' weights are streamed: kept activations would hold them all.
        recomputes: Whether the model was found recomputing its blocks.
    """
    less: tuple[Activations, ...] = ("recompute", "offload") if on_gpu else ("recompute",)
    if streamed or wish is True or (wish == "auto" and recomputes):
        return less
    return ("keep", *less) if wish == "auto" and has_blocks else ("keep",)


def choose(
    asked: ExecutionPlan,
    costs: Sequence[tuple[Activations, float]],
    available: float,
    longest: int,
) -> ExecutionPlan | None:
    """Return the first step that fits, as it was asked for or with fewer tokens at once.

    With fewer than keep the device busy only where no other step takes more. None: no row fits.

    Args:
        costs: Bytes of a token for each step, the cheapest in time first.
        available: Bytes.
        longest: Tokens of the longest row, padding included; 1 if rows have none.
    """
    rows, tokens = asked.rows, asked.tokens
    most = rows * longest if tokens is None else max(min(tokens, rows * longest), longest)
    enough = max(longest, asked.busy_tokens if longest > 1 else 1)
    for least, steps in ((enough, costs), (longest, costs[::-1])):
        for activations, each in steps:
            fit = int(available / each)
            if fit >= most:
                return replace(asked, activations=activations)
            if fit >= least and longest > 1:
                return replace(asked, activations=activations, tokens=fit)
            if fit >= least:
                return replace(asked, activations=activations, rows=fit, tokens=None)
    return None


def smaller(
    plan: ExecutionPlan,
    asked: ExecutionPlan,
    modes: Sequence[Activations],
    *,
    rows: int,
    tokens: int,
    counts_tokens: bool = True,
) -> ExecutionPlan | None:
    """Return the next step after a plan for which memory did not suffice; None: there is none.

    Args:
        asked: As the recipe has it: with less kept, as many rows are tried again.
        modes: What may be kept of activations, the fastest first.
        rows, tokens: The most that go through the model at once now.
        counts_tokens: Whether rows have a length, by which a device is busy or not.
    """
    later = modes[modes.index(plan.activations) + 1 :]
    busy = plan.busy_tokens if counts_tokens else 0
    if rows > 1 and (tokens / 2 >= busy or not later):
        if plan.tokens is None:
            return replace(plan, rows=_halved(plan.rows, rows))
        return replace(plan, tokens=_halved(plan.tokens, tokens))
    if later:
        return replace(plan, activations=later[0], rows=asked.rows, tokens=asked.tokens)
    return None


def _halved(limit: int, now: int) -> int:
    """Return a half, a quarter, ... of a limit: the first below what goes through at once now."""
    while limit >= now:
        limit //= 2
    return max(limit, 1)
