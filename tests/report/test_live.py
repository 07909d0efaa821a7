"""The report of a run that goes on, and the table of runs."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peftkit.errors import DataError
from peftkit.events import EvalDone, Event, RunStopped, Saved, StepDone, ignore
from peftkit.report.history import list_runs
from peftkit.report.page import LiveReport
from peftkit_cli.app import app
from tests.helpers.story import STARTED, step, write_run

STEP = StepDone(1, 9, 0.1, 1.0, 1e-4, 1.0, 10, 10.0, 0, 1.0)
EVAL = EvalDone(1, {"loss": 1.0}, True)
SAVED = Saved("adapter", Path("run"))


def test_it_is_written_at_the_step_after_an_evaluation(tmp_path):
    folder = write_run(tmp_path / "run", [STARTED, step(1)])
    live = LiveReport(folder, ignore)
    live.on_event(STEP)
    live.on_event(EVAL)
    assert not (folder / "report.html").exists()
    live.on_event(STEP)
    assert "smollm2-135m" in (folder / "report.html").read_text()


def test_it_takes_a_small_share_of_the_time(tmp_path):
    folder = write_run(tmp_path / "run", [STARTED, step(1)])
    ticks = iter([0.0, 10.0, 10.0, 12.0, 20.0, 99.0, 1000.0, 1000.0, 1001.0])
    live = LiveReport(folder, ignore, clock=lambda: next(ticks))
    written = []
    for _ in range(3):
        live.on_event(EVAL)
        live.on_event(STEP)
        written.append((folder / "report.html").exists())
        (folder / "report.html").unlink(missing_ok=True)
    assert written == [True, False, False]  # 2 of 20 s are too much, and of 99 s
    live.on_event(STEP)
    assert (folder / "report.html").exists()


def test_what_goes_wrong_costs_one_notice(tmp_path):
    folder = write_run(tmp_path / "run", [STARTED, step(1)])
    (folder / "report.html").mkdir()
    notices: list[Event] = []
    live = LiveReport(folder, notices.append)
    for _ in range(3):
        live.on_event(EVAL)
        live.on_event(STEP)
    live.on_event(SAVED)
    assert len(notices) == 1


def test_it_is_written_at_the_end_whatever_the_end_is(tmp_path):
    folder = write_run(tmp_path / "run", [STARTED, step(1)])
    LiveReport(folder, ignore).on_event(RunStopped(1, "failed", "the disk is full"))
    assert "after step 1 of 40: the disk is full" in (folder / "report.html").read_text()
    folder = write_run(tmp_path / "run")
    LiveReport(folder, ignore).on_event(SAVED)
    assert 'class="state finished"' in (folder / "report.html").read_text()


def test_runs_are_listed_newest_first_with_what_differs(tmp_path):
    for number, name in enumerate(("old", "deep/new")):
        folder = write_run(tmp_path / name)
        facts = json.loads((folder / "run.json").read_text())
        facts["recipe"]["method"]["rank"] = 8 * (number + 1)
        (folder / "run.json").write_text(json.dumps(facts))
        os.utime(folder / "metrics.jsonl", (1e9 + number, 1e9 + number))
    runs = list_runs(tmp_path)
    assert [Path(run.run).name for run in runs] == ["new", "old"]
    assert [run.differs for run in runs] == [{"method.rank": "16"}, {"method.rank": "8"}]
    assert (runs[0].best_eval_loss, runs[0].best_step) == (0.05, 40)
    shown = CliRunner().invoke(app, ["runs", str(tmp_path)])
    assert "method.rank" in shown.stdout
    listed = json.loads(CliRunner().invoke(app, ["runs", str(tmp_path), "--json"]).stdout)
    assert [row["state"] for row in listed] == ["finished", "finished"]


def test_a_folder_without_runs_is_one_message(tmp_path):
    for folder, message in ((tmp_path, "no runs in"), (tmp_path / "absent", "no folder")):
        with pytest.raises(DataError, match=message):
            list_runs(folder)


def test_report_prints_where_it_is(tmp_path):
    folder = write_run(tmp_path / "run")
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.stdout.strip() == str(folder / "report.html")
    assert (folder / "report.html").stat().st_size > 10_000
