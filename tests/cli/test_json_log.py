"""`--log-format json`: each line on stderr is an event, whatever the command."""

import json
import re
import signal
from dataclasses import fields

import pytest

from peftkit import events
from peftkit.execution.signals import StopRequest
from tests.helpers.command_line import ROOT


@pytest.fixture
def logged(peftkit, monkeypatch):
    """Run a command with a JSON log; return its exit code, stdout and the lines of the log."""
    monkeypatch.setenv("PEFTKIT_LOG_FORMAT", "text")  # restored after the test

    def call(*args):
        done = peftkit("--log-format", "json", *args)
        return done.code, done.out, [json.loads(line) for line in done.err.splitlines()]

    return call


def test_a_run_logs_its_events_with_all_fields(logged, project):
    code, out, lines = logged("train", "recipe.yaml", "--set", "train.max_steps=2")
    assert code == 0
    assert out == "runs/demo\n"
    kinds = {line["event"] for line in lines}
    assert {"Stage", "Table", "RunStarted", "StepDone", "EvalDone", "Saved", "RunDone"} <= kinds
    for line in lines:
        assert line["time"] > 1e9
        if line["event"] != "Note":
            kind = getattr(events, line["event"])
            assert line.keys() - {"event", "time"} == {field.name for field in fields(kind)}
    assert [line["step"] for line in lines if line["event"] == "StepDone"] == [1, 2]
    assert lines[-1] == {**lines[-1], "event": "Note", "text": "Next: peftkit chat runs/demo"}


def test_an_error_is_an_event_with_its_three_parts(logged, project):
    code, out, lines = logged("train", "recipe.yaml", "--set", "data.train=trian.jsonl")
    assert (code, out) == (2, "")
    assert lines[-1]["event"] == "Error"
    assert lines[-1]["kind"] == "DataError"
    assert lines[-1]["problem"] == "Cannot read trian.jsonl."
    assert "Did you mean 'train.jsonl'?" in lines[-1]["found"]
    code, _, lines = logged("train", "--no-such-option")
    assert code == 2
    assert [line["kind"] for line in lines] == ["UsageError"]


def test_the_first_signal_is_an_event(monkeypatch, capfd):
    monkeypatch.setenv("PEFTKIT_LOG_FORMAT", "json")
    StopRequest(message="Saving.").receive(signal.SIGTERM, None)
    line = json.loads(capfd.readouterr().err)
    assert (line["event"], line["text"]) == ("Notice", "Saving.")


def test_the_guide_lists_the_events_and_their_fields():
    page = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE))
    kinds = [kind for kind in vars(events).values() if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, events.Event) and kind is not events.Event:
            named = set(re.findall(r"`(\w+)`", table[kind.__name__]))
            assert named == {field.name for field in fields(kind)}, kind.__name__
