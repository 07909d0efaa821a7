"""The table of models by cards says what a plan says."""

from __future__ import annotations

import pytest

from benchmarks import fits, shapes
from peftkit.execution.environment import gpu_of_size
from peftkit.planning.memory import MemoryEstimator


@pytest.mark.slow
def test_a_card_without_room_is_told_and_another_has_the_longest_row_of_its_plan() -> None:
    ((name, none, small, waits),) = fits.rows_of(["gpt2"], (0, 1), "nf4", 256)
    assert (name, none, waits) == ("gpt2", "no", "")
    recipe = fits.recipe_of("gpt2", "nf4", 256, "none")
    estimator = MemoryEstimator(recipe, shapes.SHAPES["gpt2"].make_config(), gpu_of_size(fits.GB))
    assert small == f"{max(way.longest_row for way in estimator.strategies()):,}"
