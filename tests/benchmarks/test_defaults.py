"""The small data sets on which the defaults are shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.defaults import HELD_OUT, SETS, make_rows, recipe
from peftkit.defaults import defaults_for


@pytest.mark.parametrize("name", SETS)
def test_held_out_rows_are_of_the_kind_and_unseen(name: str, tmp_path: Path) -> None:
    files = make_rows(name, tmp_path)
    train, held_out = (
        [json.loads(line) for line in file.read_text().splitlines()] for file in files
    )
    number = SETS[name][1]
    assert (len(train), len(held_out)) == (number, HELD_OUT)
    seen = {row["instruction"] for row in train}
    assert not seen & {row["instruction"] for row in held_out}
    rules = defaults_for(number, width=576)
    settings = recipe(files, tmp_path / "run", rules, rules.learning_rate)
    assert settings.train.num_steps(number) == rules.num_steps
