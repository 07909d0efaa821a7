"""What a run counts of its own rows and what a plan counts without them grow alike with a row."""

from typing import Any

import pytest

from benchmarks.plan import Measured, config_of, reckoner_of
from peftkit.execution.plan import Activations
from peftkit.train.fitting import ActivationBytes, saved_by
from tests.helpers.families import llama

SHORT, LONG = 128, 512
BOUNDS: dict[Activations, tuple[float, float]] = {
    "keep": (0.75, 1.1),
    "selective": (0.75, 1.3),
    "recompute": (0.65, 1.75),
}
"""The run's count over the plan's, which is within 1 % of the allocator's. The run sees saved
tensors, no temporary ones (copies of rows for experts), and takes a block's backward pass to need
as much again as the block saves: of recomputed ones that is a lot."""


def of_a_run(measured: Measured, length: int) -> ActivationBytes:
    with measured.steps("keep", length) as take:
        step: Any = take.func  # type: ignore[attr-defined]
        rows = take.args[0]  # type: ignore[attr-defined]
        with step.blocks.keeping_all():
            return saved_by(lambda: step.loss(rows), step.blocks.blocks, step.blocks.feed_forward)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "quantize"), [("llama", "none"), ("llama", "nf4"), ("qwen3_moe", "none")]
)
def test_a_longer_row_takes_as_much_more_by_both_counts(family, quantize):
    config = llama() if family == "llama" else config_of(family)
    steps, measured = reckoner_of(config, quantize), Measured(config, quantize)
    short, long = (of_a_run(measured, length) for length in (SHORT, LONG))
    for way, (least, most) in BOUNDS.items():
        if way == "selective" and not any(long.tiled):
            continue  # experts are not recomputed alone
        counted = [steps.count(1, length, way).peak["activations"] for length in (SHORT, LONG)]
        ratio = (long.needed(way) - short.needed(way)) / (counted[1] - counted[0])
        assert least < ratio < most, (way, ratio)
