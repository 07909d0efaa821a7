"""What is read of a run's files, whole or torn."""

import json

import pytest

from peftkit.errors import DataError
from peftkit.files.disk import write_holder
from peftkit.report.chart import charts
from peftkit.report.history import read_histories, read_history, smoothed
from peftkit.report.page import page
from tests.helpers.story import STARTED, done, evaluation, step, write_run


def test_a_resumed_run_is_one_curve_with_a_seam(tmp_path):
    again = {**STARTED, "start_step": 3}
    lines = [STARTED, *(step(n, loss=9.0) for n in range(1, 6)), again, step(4), step(5), step(6)]
    run = read_history(write_run(tmp_path / "run", lines))
    assert list(run.curves["loss"]) == [1, 2, 3, 4, 5, 6]
    assert list(run.curves["loss"].values())[:3] == [9.0, 9.0, 9.0]
    assert run.curves["loss"][4] < 9.0
    assert run.seams == [3]


def test_a_run_from_the_start_replaces_the_one_before_it(tmp_path):
    lines = [STARTED, step(1), evaluation(1, 5.0), done(1), STARTED, evaluation(0, 3.0), step(1)]
    run = read_history(write_run(tmp_path / "run", lines))
    assert len(run.curves["loss"]) == 1
    assert run.curves["eval/loss"] == {0: 3.0}
    assert not run.end
    assert run.seams == []


def test_torn_and_foreign_lines_are_passed_over(tmp_path):
    folder = write_run(tmp_path / "run", [STARTED, step(1)])
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"event": "StepDo\n[1]\n\xff\xfe\n' + b"[" * 100_000 + b"\n")
        file.write(json.dumps(step(2, loss=None, grad_norm="x")).encode() + b"\n")
        file.write(b'{"event": "StepDone", "step": 3')  # being written
    run = read_history(folder)
    assert list(run.curves["loss"]) == [1]
    assert list(run.curves["learning_rate"]) == [1, 2]


def test_the_state_of_a_run(tmp_path):
    run = read_history(write_run(tmp_path / "run", [STARTED, step(1), step(2)]))
    assert run.state() == "stopped"  # no process holds the folder, however recent its last line
    (run.folder / ".locks").mkdir()
    write_holder(run.folder)
    assert run.state(now=run.changed + 9999) == "running"
    holder = run.folder / ".locks" / "holder"
    holder.write_text(holder.read_text().replace("on ", "on not-"))
    run.changed = run.began + 20.0
    assert run.state(now=run.changed + 110) == "running"
    assert run.state(now=run.changed + 130) == "stopped"
    run.changed = run.began + 40.0  # 20 seconds a step
    assert run.state(now=run.changed + 130) == "running"
    assert read_history(write_run(tmp_path / "done")).state() == "finished"


@pytest.mark.parametrize("state", ["failed", "stopped"])
def test_a_run_that_ended_early_says_so_and_why(state, tmp_path):
    end = {"event": "RunStopped", "step": 2, "state": state, "text": "the disk is full.\n  free: 0"}
    run = read_history(write_run(tmp_path / "run", [STARTED, step(1), step(2), end]))
    assert run.state() == state
    assert f"The run {state} after step 2 of 40: the disk is full.\n  free: 0" in page([run])
    assert f'class="state {state}"' in page([run])


def test_a_folder_without_a_run_names_the_runs_in_it(tmp_path):
    write_run(tmp_path / "first")
    with pytest.raises(DataError, match=r"holds no run(.|\n)*first"):
        read_history(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        read_history(tmp_path / "absent")


def test_smoothing_is_the_mean_around_a_step():
    smooth = smoothed({n + 1: float(n % 2) for n in range(100)})
    assert list(smooth) == list(range(1, 101))
    assert smooth[51] == pytest.approx(0.4)
    assert smooth[1] == pytest.approx(1 / 3)


def test_runs_are_compared_by_each_step_and_the_smoothed_line(tmp_path):
    losses = {"a": (2.5, 2.4, 2.3), "b": (2.6, 2.5, 2.4)}
    folders = [
        write_run(tmp_path / name, [STARTED, *(step(n, loss=v) for n, v in enumerate(values, 1))])
        for name, values in losses.items()
    ]
    (chart,) = [c for c in charts(read_histories(folders)) if c.name == "loss"]
    raw = [[value for _, value in line.points] for line in chart.lines if line.style == "raw"]
    assert raw == [list(values) for values in losses.values()]


def test_runs_are_named_by_their_paths_below_the_folder_they_share(tmp_path):
    names = ["a/x", "b/x", "b/y"]
    runs = read_histories([write_run(tmp_path / name, [STARTED]) for name in names])
    assert [run.name for run in runs] == names
