"""The report: one file that is whole, safe and small."""

import base64
import copy
import hashlib
import json
import random
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from peftkit.errors import DataError
from peftkit.files.disk import write_holder
from peftkit.report.chart import SPANS, Chart, Line, charts, points
from peftkit.report.history import CURVES, History, read_history
from peftkit.report.page import page, write_report
from tests.helpers.folders import write_rows
from tests.helpers.story import FACTS, STARTED, evaluation, step, write_run

BAD = "<script>alert(1)</script><img src=x onerror=alert(2)>\x00\x1b"
SAMPLES = [
    {"step": n, "prompt": "Say yes.", "reference": "yes", "completion": f"{n} yes", "source": "e:1"}
    for n in (0, 20, 40)
]


class Tags(HTMLParser):
    """Collects what a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def marked(value: Any) -> Any:
    """Return values with markup in every text and name."""
    if isinstance(value, dict):
        return {name: marked(item) for name, item in value.items()}
    if isinstance(value, list):
        return [marked(item) for item in value]
    return value + BAD if isinstance(value, str) else value


def test_a_report_runs_no_script_of_its_data(tmp_path):
    lines = [
        {**STARTED, "device": BAD, "paths": BAD},
        step(1),
        step(2),
        evaluation(2, 1.0, **{BAD: 0.5}),
        {"event": "Notice", "text": BAD},
        {"event": "RunStopped", "step": 2, "state": "failed", "text": BAD},
    ]
    samples = [{"step": 0, "prompt": BAD, "reference": BAD, "completion": BAD, "source": BAD}]
    folder = write_run(tmp_path / "<b>run", lines, facts=marked(FACTS), samples=samples)
    for runs in ([folder], [folder, write_run(tmp_path / "other")]):
        text = write_report(runs, tmp_path / "report.html").read_text(encoding="utf-8")
        seen = Tags(text)
        assert seen.tags.count("script") == 1
        assert "img" not in seen.tags
        assert not [name for name, _ in seen.attributes if name.startswith("on")]
        assert "&lt;script&gt;alert(1)" in text
        assert "\x00" not in text


def test_only_the_script_of_the_report_may_run_and_no_request_leaves(tmp_path):
    text = page([read_history(write_run(tmp_path / "run"))])
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src &#x27;sha256-{digest}&#x27;" in text
    assert "default-src &#x27;none&#x27;" in text
    assert not re.search(r"https?://|url\(|@import", text)


def test_it_tells_all_that_the_files_do(tmp_path):
    text = page([read_history(write_run(tmp_path / "run", samples=SAMPLES))])
    for part in (
        "<span>steps</span><b>40 of 40</b>",
        "<span>time</span><b>42 s</b>",
        "<span>best eval, step 40</span><b>0.05</b>",
        "<span>rows</span><b>640, 1.00 epochs</b>",
        "Eval: exact match",
        "<td>rows read</td><td>650</td>",
        "20 yes",
        "<mark>yes&lt;|im_end|&gt;</mark>",
        "sha256:1",
        "Gradient norm",
        "peftkit chat ",
        "peftkit merge ",
    ):
        assert part in text, part


def test_scores_of_tasks_stand_side_by_side(tmp_path):
    folder = write_run(tmp_path / "run")
    score = {"task": "arc", "metric": "acc", "base": 0.25, "adapter": 0.5, "num_rows": 9}
    (folder / "tasks.json").write_text(json.dumps({"scores": [score]}))
    cells = "".join(f"<td>{cell}</td>" for cell in ("arc", "acc", "0.25", "0.5", "-", "9"))
    assert "<h2>Tasks</h2>" in (text := page([read_history(folder)]))
    assert f"<tr>{cells}</tr>" in text
    (folder / "tasks.json").write_text('{"scores": 3}')
    assert "<h2>Tasks</h2>" not in page([read_history(folder)])


def test_a_hundred_thousand_steps_are_less_than_a_megabyte():
    run, rng = History(Path("run"), "run", started=STARTED), random.Random(0)
    for name in CURVES:
        run.curves[name] = {step: rng.random() for step in range(1, 100_001)}
    began = time.process_time()
    text = page([run])
    assert len(text) < 500_000
    assert time.process_time() - began < 20  # a tenth of that on a quiet machine


def test_few_points_keep_the_lowest_and_the_highest():
    curve = {n: 1.0 + n % 7 for n in range(1, 50_001)} | {31_415: 100.0, 27_182: -5.0}
    thinned = points(curve)
    assert len(thinned) <= 2 * SPANS + 2
    assert (31_415, 100.0) in thinned
    assert (27_182, -5.0) in thinned
    assert thinned[0][0] == 1
    assert thinned[-1][0] == 50_000
    assert thinned == sorted(thinned)


def test_several_runs_are_one_picture_and_their_differences_a_table(tmp_path):
    other = copy.deepcopy(FACTS)
    other["recipe"]["method"]["rank"] = 64
    other["recipe"]["train"]["output_dir"] = "runs/b"
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", facts=other)]
    text = write_report(folders, tmp_path / "both.html").read_text(encoding="utf-8")
    assert "<tr><td>method.rank</td><td>16</td><td>64</td></tr>" in text
    assert "output_dir" not in text
    losses = charts([read_history(folder) for folder in folders])[0]
    assert len({line.color for line in losses.lines}) == 2


def test_figures_of_a_task_have_a_chart_each(tmp_path):
    lines = [
        STARTED,
        *(step(n, figures={"reward": n / 40, "reward_std": 0.1}) for n in range(1, 9)),
    ]
    run = read_history(write_run(tmp_path / "run", lines))
    titles = [chart.title for chart in charts([run])]
    assert {"Train: reward", "Train: reward std"} <= set(titles)
    assert "Train: reward" in page([run, run])


def test_a_report_of_no_step_and_of_an_empty_file_is_written(tmp_path):
    for name, lines in (("begun", [STARTED]), ("empty", [])):
        folder = write_run(tmp_path / name, lines, facts={"tables": 3, "data": [], "row": "x"})
        assert "No step is done yet" in write_report([folder], tmp_path / "r.html").read_text()


def test_a_run_that_goes_on_is_read_again_by_the_browser(tmp_path):
    folder = write_run(tmp_path / "run", [{**STARTED, "time": time.time()}, step(1)])
    (folder / ".locks").mkdir()
    write_holder(folder)
    assert 'http-equiv="refresh"' in page([read_history(folder)])
    assert 'http-equiv="refresh"' not in page([read_history(write_run(tmp_path / "done"))])


def test_only_a_run_that_saved_a_step_is_said_to_go_on(tmp_path):
    folder = write_run(tmp_path / "run", [STARTED, step(1)])
    (folder / "checkpoints").mkdir()
    assert "--resume" not in page([read_history(folder)])
    (folder / "checkpoints" / "step-1").mkdir()
    assert "--resume" in page([read_history(folder)])


def test_no_run_is_one_message(tmp_path):
    with pytest.raises(DataError, match="holds no run"):
        write_report([tmp_path], tmp_path / "report.html")


def test_the_best_and_the_worst_answers_are_shown_with_their_rewards(tmp_path):
    folder = write_run(tmp_path / "run", [STARTED, step(1), step(2)])
    answers = [
        (1, 0.1, "bad"),
        (1, 0.9, "good"),
        (2, 0.5, "lost"),
        (2, 0.5, "same"),
        (1, 0.2, "late"),
    ]
    lines = [
        {"step": n, "prompt": "?", "completion": text, "reward": worth, "parts": {"a": 1.5, "b": 2}}
        for n, worth, text in (*answers, (1, 0.3, BAD))
    ]
    write_rows(folder / "answers.jsonl", lines)
    history = read_history(folder)
    assert {n: [one["reward"] for one in pair] for n, pair in history.answers.items()} == {
        1: [0.3, 0.2]
    }  # a resumed run made step 1 again
    shown = page([history])
    assert "Completions and their rewards" in shown
    assert "late" in shown
    assert "a 1.5" in shown
    assert "onerror" in shown
    assert "img" not in Tags(shown).tags


def test_what_is_nought_all_the_time_is_no_chart():
    history = History(Path("runs/a"), "a")
    history.curves["loss"] = {1: 2.0, 2: 1.0}
    history.curves["train/cut"] = {1: 0.0, 2: 0.0}
    history.curves["train/accuracy"] = {1: 0.0, 2: 1.0}
    assert [chart.title for chart in charts([history])] == ["Loss", "Train: accuracy"]


def test_ticks_have_the_figures_that_tell_them_apart_and_one_point_is_no_chart():
    flat = [(step, 1.2e9 + step * 1.2e5) for step in range(9)]
    chart = Chart("Peak memory", "peak_bytes", [Line("", flat, 0)])
    shown = [text for _, text in chart.y_ticks()]
    assert len(shown) == len(set(shown)) >= 3
    assert shown[0] == "1.2000 GB"


def test_a_classifier_is_shown_by_label_and_by_its_confusions(tmp_path):
    metrics = {"precision": 0.5, "recall": 0.25, "f1": 1 / 3, "rows": 4}
    line = {"event": "ClassReport", "labels": {BAD: metrics, "b": metrics}}
    confusion = {"confusion": [[1, 3], [0, 4]]}
    write_run(tmp_path, [STARTED, step(1), line | confusion])
    text = page([read_history(tmp_path)])
    tags = Tags(text)
    assert tags.tags.count("script") == 1
    assert "img" not in tags.tags
    shares = [value for name, value in tags.attributes if name == "style" and "--share" in value]
    assert shares == ["--share:25%", "--share:75%", "--share:0%", "--share:100%"]
    assert ("title", "b as b: 100%") in tags.attributes
    assert "0.333" in text
    write_run(tmp_path, [STARTED, step(1), line | {"confusion": None}])
    assert "Confusion" not in page([read_history(tmp_path)])
