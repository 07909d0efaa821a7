"""Completions, operations and training alternate over one base without affecting each other."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peftkit.config.schema import from_dict
from peftkit.events import EvalDone, Progress, RolledOut, Saved, StepDone
from peftkit.execution.signals import Interrupted, stop_here
from peftkit.inference.bank import AdapterBank
from peftkit.model.places import FrozenWrapper
from peftkit.recipe import Recipe
from peftkit.run import run
from peftkit_server.refusals import RequestError
from peftkit_server.worker import Worker
from tests.helpers.folders import write_rows
from tests.helpers.serving import WORDS, adapter_bytes, recipe
from tests.helpers.worker import Submitted, running


class Working:
    """A worker that trains a recipe; `at_step` is called in its thread between steps."""

    def __init__(self, bank: AdapterBank, recipe: Recipe, **start: bool) -> None:
        self.worker, self.recipe, self.start = Worker(bank), recipe, start
        self.at_step: Callable[[int], None] = lambda step: None
        self.at_event: Callable[[Any], None] = self._at_step
        self.give_way: Callable[[], None] = lambda: None
        self.outcome: Any = None
        self.done = threading.Event()
        self.worker.queue(self._train)

    def _at_step(self, event: Any) -> None:
        if isinstance(event, StepDone):
            self.at_step(event.step)
            self.give_way()

    def _train(self, give_way: Callable[[], None]) -> None:
        self.give_way = give_way
        try:
            self.outcome = run(
                self.recipe, base=self.worker.bank.base, on_event=self.at_event, **self.start
            )
        except BaseException as problem:
            self.outcome = problem
        finally:
            self.done.set()

    def wait(self) -> Any:
        assert self.done.wait(60)
        return self.outcome


def alone(bank: AdapterBank, name: str | None, ids: list[int]) -> list[int]:
    request = Submitted(name, ids).job.request
    with bank.engine() as engine:
        completion = engine.submit(request)
        engine.run()
    return completion.ids


@pytest.mark.smoke
def test_requests_leave_a_run_bit_equal(bank, tmp_path):
    prompts = {"one": [7, 8, 9], "two": [10, 11], None: [12, 13, 14, 15]}
    expected = {name: alone(bank, name, ids) for name, ids in prompts.items()}
    with bank.lifted():
        run(recipe(tmp_path, "alone"), base=bank.base)
    beside = Working(bank, recipe(tmp_path, "beside"))
    asked: list[Submitted] = []
    seen: list[tuple[int, bool]] = []

    def at_step(step: int) -> None:
        for name, ids in prompts.items():
            asked.append(Submitted(name, ids))
            beside.worker.submit([asked[-1].job])
        modules = [*bank.base.model.modules()]
        wrapped = lambda: sum(isinstance(m, FrozenWrapper) for m in bank.base.model.modules())  # noqa: E731
        learns = lambda: any(module.training for module in modules)  # noqa: E731
        beside.worker.call(lambda: seen.append((wrapped(), learns())))

    beside.at_step = at_step
    with running(beside.worker):
        assert beside.wait().step == 4
        texts = [request.end().text for request in asked]
    assert seen == [(0, False)] * 4  # operations run without adapters and dropout
    decode = bank.base.tokenizer.decode
    whole = [decode(expected[name], skip_special_tokens=True) for name in prompts]
    assert texts == whole * 4
    assert adapter_bytes(tmp_path / "beside") == adapter_bytes(tmp_path / "alone")
    assert {name: alone(bank, name, ids) for name, ids in prompts.items()} == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["preference", "grpo"])
def test_requests_at_any_event_keep_a_run(kind, bank, tmp_path):
    tasks = {
        "preference": {"type": "preference"},
        "grpo": {
            "type": "grpo",
            "rewards": [{"use": "length", "max_chars": 3}],
            "answers": 4,
            "max_new_tokens": 8,
        },
    }
    pairs = [{"chosen": f"the {word} dog", "rejected": f"a {word} fox"} for word in WORDS]
    rows = [
        {"prompt": f"what is the {word}?", **(pair if kind == "preference" else {})}
        for word, pair in zip(WORDS, pairs, strict=True)
    ]
    file = str(tmp_path / "rows.jsonl")
    write_rows(Path(file), rows * 2)

    def asked_for(name: str) -> Recipe:
        told = recipe(tmp_path, name, eval_every=2).model_dump()
        told |= {"task": tasks[kind], "data": {"train": file, "eval": file, "max_length": 64}}
        return from_dict(Recipe, told, "test")

    figures: dict[str, list[Any]] = {"alone": [], "beside": []}

    def note(name: str, event: Any) -> None:
        if isinstance(event, EvalDone):
            figures[name].append({k: v for k, v in event.metrics.items() if "seconds" not in k})

    with bank.lifted():
        run(asked_for("alone"), base=bank.base, on_event=lambda event: note("alone", event))
    beside = Working(bank, asked_for("beside"))
    asked: list[Submitted] = []

    def at_event(event: Any) -> None:
        note("beside", event)
        if isinstance(event, EvalDone | Progress | RolledOut | Saved | StepDone):
            asked.append(Submitted("one", [7, 8, 9], max_new_tokens=2))
            beside.worker.submit([asked[-1].job])
            beside.give_way()

    beside.at_event = at_event
    with running(beside.worker):
        assert beside.wait().step == 4
        assert {request.end().num_tokens for request in asked} == {2}
    assert figures["beside"] == figures["alone"] != []
    assert adapter_bytes(tmp_path / "beside") == adapter_bytes(tmp_path / "alone")


def test_an_answer_waits_for_a_step_not_for_the_run(bank, tmp_path):
    working = Working(bank, recipe(tmp_path, "run"))
    answered_at: list[int] = []
    steps: list[int] = []
    request = Submitted("one", [7, 8, 9], max_new_tokens=2)
    send = request.job.send

    def note(piece: Any) -> None:
        answered_at.append(steps[-1])
        send(piece)

    request.job.send = note

    def at_step(step: int) -> None:
        steps.append(step)
        if step == 2:
            working.worker.submit([request.job])

    working.at_step = at_step
    with running(working.worker):
        working.wait()
        assert request.end().num_tokens == 2
    assert set(answered_at) == {2}


def test_a_stopped_run_resumes_bit_equal(bank, tmp_path):
    with bank.lifted():
        run(recipe(tmp_path, "alone"), base=bank.base)
    stopped = Working(bank, recipe(tmp_path, "run"))
    stopped.at_step = lambda step: stop_here() if step == 3 else None
    stopped.worker.start()
    assert isinstance(stopped.wait(), Interrupted)
    stopped.worker.stop()
    assert not [m for m in bank.base.model.modules() if "LoRA" in type(m).__name__]
    again = Working(bank, recipe(tmp_path, "run"), resume=True)
    again.worker.start()
    assert again.wait().step == 4
    again.worker.stop()
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(tmp_path / "alone")


def test_shutdown_saves_the_run_and_refuses_waiting_ones(bank, tmp_path):
    working = Working(bank, recipe(tmp_path, "run", max_steps=400))
    begun, calls = threading.Event(), []

    def at_step(step: int) -> None:
        if step == 1:
            begun.set()
            calls.append(working.worker.call(lambda: 1))
            calls.append(working.worker.call(lambda: 2))

    working.at_step = at_step
    working.worker.start()
    assert begun.wait(60)
    working.worker.stop()
    assert isinstance(working.outcome, Interrupted)
    assert (tmp_path / "run" / "checkpoints").is_dir()
    outcomes = [call.exception() or call.result() for call in calls]
    assert all(one in (1, 2) or isinstance(one, RequestError) for one in outcomes)
    with pytest.raises(RequestError, match="shutting down"):
        working.worker.call(lambda: 3)


def test_operations_run_in_order_and_tell_what_fails(bank):
    worker = Worker(bank)
    order: list[int] = []
    calls = [worker.call(lambda n=n: order.append(n) or n) for n in range(5)]
    failed = worker.call(lambda: 1 / 0)
    with_gradient = worker.call(torch.is_grad_enabled)
    with running(worker):
        assert [call.result(20) for call in calls] == order == [0, 1, 2, 3, 4]
        assert isinstance(failed.exception(20), ZeroDivisionError)
        assert with_gradient.result(20)
        request = Submitted("one", [7])
        worker.submit([request.job])
        assert request.end().num_tokens == 4
        assert worker.call(lambda: 7).result(20) == 7  # the engine is on the model while it waits


@pytest.mark.parametrize("outside", [False, True])
def test_code_of_a_job_that_exits_stops_nothing_else(bank, outside):
    worker = Worker(bank)

    def work(give_way: Callable[[], None]) -> None:
        if not outside:
            sys.exit(3)

    worker.queue(work)
    exits = worker.call(sys.exit) if outside else None
    with running(worker):
        assert worker.call(lambda: 7).result(20) == 7
        assert exits is None or isinstance(exits.exception(20), SystemExit)


def test_no_request_waits_on_a_dead_one(bank, monkeypatch):
    def broken() -> Any:
        raise MemoryError("no more")

    monkeypatch.setattr(bank, "lifted", broken)
    worker = Worker(bank)
    calls = [worker.call(lambda: 1), worker.call(lambda: 2)]
    request = Submitted("one", [7])
    worker.submit([request.job])
    with running(worker):
        assert all(isinstance(call.exception(20), RequestError) for call in calls)
        assert request.end().status == 503
        with pytest.raises(RequestError):
            worker.call(lambda: 3)
    assert not worker.is_alive


@pytest.mark.parametrize("kind", ["operations", "training runs"])
def test_the_work_of_keys_runs_in_turn(bank, kind):
    """A key with any amount of work delays another by one piece of it."""
    worker, order = Worker(bank), list[str]()
    for owner in ("ann", "ann", "ann", "bob", "carl", "bob"):
        if kind == "operations":
            worker.call(lambda owner=owner: order.append(owner), owner)
        else:
            worker.queue(lambda give_way, owner=owner: order.append(owner), owner)
    with running(worker):
        while len(order) < 6:
            worker.call(lambda: None, "dora").result(20)
    assert order == ["ann", "bob", "carl", "ann", "bob", "ann"]
