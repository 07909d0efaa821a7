"""What looks wrong with a run is said, and only that."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from peftkit.report.history import History, read_history
from peftkit.report.page import page
from peftkit.report.verdict import verdict, warnings
from tests.report.story import FACTS, STARTED, done, evaluation, step, write_run

CLEAN = copy.deepcopy(FACTS)
CLEAN["tables"] = []


def run_of(folder: Path, *lines: dict[str, Any], facts: dict[str, Any] = CLEAN) -> History:
    return read_history(write_run(folder, [STARTED, *lines], facts=facts))


STEPS = [step(n) for n in range(1, 41)]


def test_nothing_is_wrong_with_a_good_run(tmp_path: Path) -> None:
    good = [*STEPS, evaluation(20, 0.5), evaluation(40, 0.3), done()]
    assert warnings(run_of(tmp_path / "run", *good)) == []


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([*STEPS, evaluation(10, 0.4), evaluation(40, 0.6), done()], "rises since step 10"),
        ([*(step(n, grad_norm=0.0) for n in range(1, 41)), done()], "changes nothing"),
        ([*STEPS, evaluation(20, 0.5), evaluation(40, 0.5), done()], "changes nothing"),
        ([*(step(n, loss=2.0) for n in range(1, 41)), done()], "hardly fell"),
        ([*(step(n, figures={"reward": 1 - n / 50}) for n in range(1, 41)), done()], "not rise"),
        ([*STEPS[:20]], "stopped after step 20 of 40"),
    ],
)
def test_what_is_wrong_comes_first(tmp_path: Path, lines: list[dict[str, Any]], told: str) -> None:
    run = run_of(tmp_path / "run", *lines)
    run.changed -= 1e9
    assert told in warnings(run)[0]


def test_the_loss_of_a_policy_is_no_sign(tmp_path: Path) -> None:
    rising = [step(n, loss=0.0, figures={"reward": n / 50}) for n in range(1, 41)]
    assert warnings(run_of(tmp_path / "run", *rising, done())) == []


@pytest.mark.parametrize("state", ["failed", "stopped"])
def test_a_run_that_ended_early_says_so_and_why(state: str, tmp_path: Path) -> None:
    why = {"event": "RunStopped", "step": 7, "state": state, "text": "the disk is full.\n  free: 0"}
    run = run_of(tmp_path / "run", *STEPS[:7], why)
    assert run.state() == state
    assert f"The run {state} after step 7 of 40: the disk is full." in warnings(run)[0]
    assert f'class="state {state}"' in page([run])


def test_rows_that_are_cut_or_dropped_are_counted(tmp_path: Path) -> None:
    facts = copy.deepcopy(FACTS)
    facts["tables"][1]["counts"] |= {"num_read": 6_500, "num_cut": 1_650}
    facts["tables"][1]["rows"] = [["in other words", "many"]]
    told = warnings(run_of(tmp_path / "run", *STEPS, done(), facts=facts))
    assert told[0].startswith("1,650 of 6,500 rows of data/train.jsonl are cut")
    assert told[1].startswith("10 of 6,500 rows")


def test_a_run_that_was_rewound_before_its_first_evaluation_has_a_verdict(tmp_path: Path) -> None:
    again = {**STARTED, "start_step": 3}
    run = run_of(tmp_path / "run", *STEPS[:6], evaluation(6, 0.5), again, step(4))
    assert "eval" not in verdict(run)
    assert page([run])
