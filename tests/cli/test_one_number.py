"""A figure of a run is the same number wherever it is told, and says what it is."""

import json
import re
from pathlib import Path

from peftkit.report.history import read_history
from peftkit.report.page import page


def test_a_run_has_one_loss(trained, peftkit, monkeypatch):
    monkeypatch.chdir(trained)
    lines = map(json.loads, Path("runs/demo/metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["event"] == "StepDone"]
    mean = f"{sum(losses) / len(losses):.4g}"
    assert len(losses) == 8
    assert mean != f"{losses[-1]:.4g}"

    end = next(line for line in Path("err.txt").read_text().splitlines() if "Done: " in line)
    assert f"loss {mean} (mean of the last 8 steps)" in end
    done = peftkit("runs")
    demo = next(line.split() for line in done.out.splitlines() if "demo" in line)
    assert mean in demo
    assert "loss: mean of the last 10 steps; eval: loss of the last evaluation" in done.err
    duration = re.search(r"steps in ([\d: ]*\d(?: s)?);", end)
    assert duration
    assert " ".join(demo).endswith(duration[1])

    html = page([read_history("runs/demo")])
    assert f"<span>loss (mean of the last 8 steps)</span><b>{mean}</b>" in html
    assert (
        f"| loss (mean of the last 8 steps) | {mean} |" in Path("runs/demo/README.md").read_text()
    )


def test_rows_are_told_with_how_often_they_were_seen(trained):
    metrics = (trained / "runs/demo/metrics.jsonl").read_text().splitlines()
    epoch = max(json.loads(line).get("epoch", 0) for line in metrics)
    assert f"| steps | 8 ({epoch:.2f} epochs) |" in (trained / "runs/demo/README.md").read_text()
    assert f", {epoch:.2f} epochs</b>" in page([read_history(trained / "runs/demo")])
