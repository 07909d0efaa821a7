"""What takes less memory, one step after the other: the one ladder of a plan and of a run.

All activations are kept; blocks are recomputed; their inputs wait in main memory; and the base's
weights do too. On each step fewer rows go through the model at once before the next is taken, but
on a GPU never so few that it idles while another step has more.
"""

from __future__ import annotations

from typing import Literal

Activations = Literal["keep", "recompute", "offload"]
"""What is kept: all that a block computes; its input; its input, in main memory."""


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
