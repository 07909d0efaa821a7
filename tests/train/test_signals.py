"""SIGINT and SIGTERM: the first saves and stops, wherever the run is; the second ends it."""

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor, nn

from peftkit.events import EvalDone, Event
from peftkit.execution.signals import STOPPING, Interrupted, StopRequest, stop_requests
from peftkit.tasks.run_hooks import Run
from peftkit.train import checkpoint_files
from peftkit.train.checkpoint_files import Checkpoints
from tests.helpers.toy import COUNTED, Played, Row, Toy, ToyTask, play, same

BOTH = [signal.SIGINT, signal.SIGTERM]


class Signalling(ToyTask):
    """Sends signals to its own process at the given calls, training and eval batches counted."""

    def __init__(self, calls: dict[int, signal.Signals], *, in_training: bool = True) -> None:
        self.calls, self.in_training = calls, in_training
        self.count = -COUNTED if in_training else 0

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        if model.training == self.in_training:
            self.count += 1
            if self.count in self.calls:
                os.kill(os.getpid(), self.calls[self.count])
        return super().loss(model, batch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(tmp_path_factory.mktemp("whole"), model=Toy(dropout=0.3))


def go_on(folder: Path) -> Played:
    return play(folder, model=Toy(dropout=0.3), save_every=None, resume=True)


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_in_a_step_saves(tmp_path, whole, number):
    task = Signalling({8: number})  # the first of the two batches of step 5
    run = play(tmp_path, model=Toy(dropout=0.3), task=task, save_every=None)
    run.failed(Interrupted)
    assert run.error.exit_code == 128 + number
    assert "step-5" in str(run.error)
    assert "--resume" in str(run.error)
    assert run.saved[-1] == "step-5"
    rest = go_on(tmp_path)
    assert run.losses + rest.losses == whole.losses
    assert same(rest.weights, whole.weights)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_signal_between_two_steps_never_loses_the_step_before(tmp_path, whole, monkeypatch, when):
    """At the very moment in which the run decides whether to save."""
    decide = Run.is_due

    def decided(self: Run, every: int | None) -> bool:
        now = self.state.step == 5 and every == 100
        if now and when == "before":
            os.kill(os.getpid(), signal.SIGTERM)
        result = decide(self, every)
        if now and when == "after":
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Run, "is_due", decided)
        run = play(tmp_path, model=Toy(dropout=0.3), save_every=100)
    run.failed(Interrupted)
    assert run.saved[-1] == f"step-{len(run.losses)}"
    assert run.losses + go_on(tmp_path).losses == whole.losses


def test_a_signal_within_an_evaluation_defers_it_to_the_resume(tmp_path, whole):
    rows = [Row((n, n + 1), (-100, n), "eval") for n in range(10)]
    reference = play(tmp_path / "a", eval_rows=rows)
    # in the second evaluation of 5 batches
    task = Signalling({7: signal.SIGTERM}, in_training=False)
    run = play(tmp_path / "b", task=task, eval_rows=rows)
    run.failed(Interrupted)
    assert task.count == 7, "the evaluation should have ended with the batch of the signal"
    assert run.saved[-1] == "step-6"
    rest = play(tmp_path / "b", eval_rows=rows, resume=True)

    def evals(*runs: Played) -> list[tuple[int, float]]:
        events = [e for run in runs for e in run.events if isinstance(e, EvalDone)]
        return [(event.step, event.metrics["loss"]) for event in events]

    assert evals(run, rest) == evals(reference)
    assert rest.result.best_step == reference.result.best_step
    assert rest.result.best_checkpoint.is_dir()


@pytest.mark.parametrize("where", ["weights", "latest"])
def test_a_signal_within_a_save_lets_it_finish(tmp_path, whole, monkeypatch, where):
    def failpoint(name: str) -> None:
        if name == where:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "failpoint", failpoint)
        run = play(tmp_path, model=Toy(dropout=0.3), save_every=4, eval_every=None)
    run.failed(Interrupted)
    assert run.saved == ["step-4"]
    Checkpoints(tmp_path, keep=1).verified(4)
    assert go_on(tmp_path).losses == whole.losses[4:]


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_second_signal_ends_the_run_at_once(tmp_path, whole, number, expected):
    task = Signalling({8: number, 9: number})  # both in step 5
    run = play(tmp_path, model=Toy(dropout=0.3), task=task, save_every=2)
    run.failed(expected)
    assert getattr(run.error, "code", 128 + number) == 128 + number
    assert len(run.losses) == 4
    assert run.saved[-1] == "step-4"
    assert go_on(tmp_path).losses == whole.losses[4:]


def test_a_second_signal_in_a_save_is_safe(tmp_path, monkeypatch):
    passed = 0

    def failpoint(name: str) -> None:
        nonlocal passed
        passed += name == "optimizer"
        if name == "optimizer" and passed == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(checkpoint_files, "failpoint", failpoint)
    run = play(tmp_path)
    run.failed(SystemExit)
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == ["step-1", "step-2"]
    assert Checkpoints(tmp_path, keep=1).newest_valid(lambda event: None).step == 2


def test_handlers_are_restored_afterwards(tmp_path):
    before = [signal.getsignal(number) for number in BOTH]
    during: list[object] = []

    def listen(event: Event) -> None:
        during.append(signal.getsignal(signal.SIGTERM))

    play(tmp_path, max_steps=1, on_event=listen)
    assert during[0] != before[1]
    assert [signal.getsignal(number) for number in BOTH] == before
    play(tmp_path, max_steps=1)  # refused: the folder holds a run
    assert [signal.getsignal(number) for number in BOTH] == before


def test_a_run_in_a_thread_takes_no_signals(tmp_path):
    runs: list[Played] = []
    thread = threading.Thread(target=lambda: runs.append(play(tmp_path)))
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    during = signal.getsignal(signal.SIGTERM)
    thread.join()
    assert runs[0].error is None
    assert during == before


def test_a_signal_that_a_launcher_relays_is_one_request(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    request = StopRequest()
    for _ in range(3):
        request.receive(signal.SIGTERM, None)
    assert request.signum == signal.SIGTERM
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 10)
    with pytest.raises(SystemExit):
        request.receive(signal.SIGTERM, None)


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_that_a_parent_ignores_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with stop_requests() as request:
            os.kill(os.getpid(), number)
        assert request.signum == 0
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_the_first_signal_prints_its_message(capfd):
    with stop_requests(message=STOPPING) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signum == signal.SIGINT
        assert capfd.readouterr().err.strip() == STOPPING
        assert len(STOPPING) < 80
    with stop_requests():
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err == ""
