"""What the training benchmark tells, and what it refuses to tell, from runs that are made up."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import Spread, table
from benchmarks.train import arguments, num_beginnings, tell
from benchmarks.workers import WorkerFailed, work

ROWS = [{"input_ids": [1] * 50}, {"input_ids": [1] * 150}]


def run(seconds: float, losses: list[float], peak: int = 10, **more: Any) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "whole_seconds": seconds + 1,
        "first_step_seconds": 1.0,
        "step_seconds": [seconds / len(losses)] * len(losses),
        "peak_bytes": peak,
        "losses": losses,
        "num_trainable": 7,
        **more,
    }


def settings(path: Path | None = None) -> argparse.Namespace:
    args = arguments(["--against", "trl", "--batch-size", "1"])
    args.json = path
    return args


def test_a_table_has_medians_and_ratios(tmp_path, capsys):
    ours = [run(seconds, [2.0, 1.0], peak=6) for seconds in (2.0, 1.0, 4.0)]
    theirs = [run(seconds, [2.0, 1.02], peak=10) for seconds in (8.0, 6.0, 7.0)]
    assert tell(settings(tmp_path / "f.json"), ROWS, {"ours": ours, "trl": theirs}) == 0
    told = capsys.readouterr().out
    assert "100 (50-200)" in told  # 200 tokens in 2, 4 and 1 seconds
    assert "3.50 x" in told  # 7 s against 2 s
    assert "0.60 x" in told
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["figures"]["trl"]["speed_of_ours"] == pytest.approx(3.5)
    assert {"command", "machine", "versions", "runs"} <= found.keys()


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (run(9.0, [2.0, 1.5]), "the losses differ by 14.3%, more than 8%"),
        (run(9.0, [2.0, float("nan")]), "the losses differ by nan"),
        (run(9.0, [2.0]), "1 steps, ours has 2"),
        (run(9.0, [2.0, 1.0]) | {"num_trainable": 8}, "trains 8 values, ours 7"),
        ({"failed": "out of memory"}, "out of memory"),
    ],
)
def test_an_incomparable_run_has_no_speed(theirs, why, capsys):
    assert tell(settings(), ROWS, {"ours": [run(2.0, [2.0, 1.0])], "trl": [theirs]}) == 1
    told = capsys.readouterr().out
    assert f"trl: no speed is reported: {why}" in told
    assert " x" not in told.replace(" x86", "")


def test_what_rows_begin_with_counts_once_in_a_batch():
    rows = [{"input_ids": ids} for ids in ([1, 2, 3], [1, 2, 4, 3], [2, 3], [1, 2, 3])]
    assert num_beginnings(rows, 1) == 3 + 4 + 2 + 3
    assert num_beginnings(rows, 2) == (3 + 2) + (2 + 3)
    assert num_beginnings(rows, 4) == 3 + 2 + 2


def test_a_table_is_markdown_whose_columns_line_up():
    lines = table(("", "speed"), [("ours", "1"), ("a peer", "100 (1-200)")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].endswith("-: |")
    assert Spread.of([3.0, 1.0, 2.0]).show(1) == "2.0 (1.0-3.0)"


def test_a_worker_that_breaks_says_why(tmp_path):
    with pytest.raises(WorkerFailed, match=r"No module named benchmarks\.workers\.nobody"):
        work("nobody", {}, tmp_path)
