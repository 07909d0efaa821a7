"""Waiting prompts share a batch, each with its adapter, and every client receives an end."""

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from peftkit.errors import RunError
from peftkit.inference.bank import AdapterBank
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import Completion, Limits, Request
from peftkit.inference.generate import TextStream
from peftkit.inference.sampling import Chosen, Sampling
from peftkit_server.generation import Output
from peftkit_server.refusals import RequestError
from peftkit_server.worker import Worker
from tests.helpers.worker import Submitted, run_jobs, running


@pytest.mark.smoke
def test_two_adapters_and_the_base_share_a_batch(bank):
    prompts = [[7, 8, 9], [10, 11], [12, 13, 14, 15], [7, 8, 9]]
    names = ["one", "two", None, "two"]
    lengths = [6, 3, 5, 4]
    expected = []
    for ids, name, length in zip(prompts, names, lengths, strict=True):
        with bank.engine() as engine:
            ((alone,),) = engine.answers([ids], Sampling(length), adapters=[name])
        expected.append(bank.base.tokenizer.decode(alone.ids, skip_special_tokens=True))
    requests = [
        Submitted(name, ids, max_new_tokens=length)
        for name, ids, length in zip(names, prompts, lengths, strict=True)
    ]
    answers, _ = run_jobs(bank, requests)
    assert [answer.text for answer in answers] == expected
    assert len(set(expected)) == 4
    assert [answer.num_tokens for answer in answers] == lengths


def test_a_full_queue_takes_all_prompts_of_a_request_or_none(bank):
    worker = Worker(bank, max_waiting=3)
    worker.submit([Submitted("one", [7]).job] * 2)
    with pytest.raises(RequestError, match="too many") as error:
        worker.submit([Submitted("one", [7]).job] * 2)
    assert error.value.status == 429
    assert worker.batch.num_waiting == 2


def test_prompts_wait_for_an_earlier_operation_and_its_failure(bank):
    worker, told = Worker(bank, max_waiting=3), list[str]()
    after, failed = Submitted("one", [7]), Submitted("one", [7])
    worker.submit([after.job], first=lambda: told.append(str(worker.batch.num_waiting)))
    worker.submit([failed.job], first=lambda: [][0])
    assert (worker.batch.num_waiting, worker.batch.num_running) == (2, 0)
    with pytest.raises(RequestError, match="too many"):
        worker.submit([Submitted("one", [7]).job] * 2, first=lambda: None)
    with running(worker):
        assert isinstance(failed.end(), IndexError)
        assert after.end().num_tokens == 4
    assert told == ["2"]
    assert worker.batch.num_waiting == 0


def test_an_operation_restores_the_base(bank, monkeypatch):
    is_bare, plain = threading.Event(), bank.lifted

    @contextmanager
    def lifted() -> Iterator[None]:
        with plain():
            is_bare.set()
            yield
            time.sleep(0.05)
        is_bare.clear()

    monkeypatch.setattr(bank, "lifted", lifted)
    worker = Worker(bank)
    with running(worker):
        assert worker.call(is_bare.is_set).result(20)
        assert not is_bare.is_set()
        with pytest.raises(IndexError):
            worker.call(lambda: [][0]).result(20)
        assert not is_bare.is_set()


def test_a_failure_affects_one_request(bank, monkeypatch):
    bank.engine()  # probes the model with a step
    real = CachedEngine.step

    def fails_once(self: CachedEngine) -> None:
        monkeypatch.setattr(CachedEngine, "step", real)
        raise MemoryError("no more")

    monkeypatch.setattr(CachedEngine, "step", fails_once)
    worker, first, second = Worker(bank), Submitted("one", [7]), Submitted("one", [8])
    worker.submit([first.job])
    worker.start()
    failed = first.end()
    worker.submit([second.job])
    assert isinstance(second.end(), Output)
    worker.stop()
    assert isinstance(failed, RunError)
    assert "no more" in str(failed)


def test_a_model_that_fails_to_start_fails_waiting_requests(bank, monkeypatch):
    real = AdapterBank.engine

    def fails(self: AdapterBank, limits: Limits) -> Any:
        monkeypatch.setattr(AdapterBank, "engine", real)
        raise MemoryError("no more")

    worker, first, second = Worker(bank), Submitted("one", [7]), Submitted("one", [8])
    monkeypatch.setattr(AdapterBank, "engine", fails)
    worker.submit([first.job])
    with running(worker):
        error = first.end()
        assert isinstance(error, RunError)
        assert "no more" in str(error)
        worker.submit([second.job])
        assert isinstance(second.end(), Output)


def test_stopping_tells_those_who_wait(bank):
    worker, request = Worker(bank), Submitted("one", [7])
    worker.submit([request.job])
    worker._ended = True  # before its thread starts
    worker.start()
    worker.stop()
    assert request.end().status == 503
    with pytest.raises(RequestError, match="shutting down"):
        worker.submit([request.job])


def test_a_text_that_may_become_a_stop_text_is_held_back(tokenizer):
    ids = tokenizer("the quick the quiet")["input_ids"]
    completion = Completion(Request([1]), 50, frozenset())
    text, pieces = TextStream(tokenizer, ["quiet", "quit"]), []
    for token in ids:
        completion.take(Chosen(token, 0.0, ()))
        pieces.append(text.take(completion))
    assert "".join(pieces) == text.text == "the quick the "
    assert completion.ended_by == "stop"


def test_an_answer_that_cannot_be_read_fails_alone(bank):
    class Reads:
        def take(self, text: str, completion: Completion) -> Any:
            raise AttributeError("no such field")

    wrong, right = Submitted("one", [7], max_new_tokens=6), Submitted("one", [8], max_new_tokens=6)
    wrong.job.calls = Reads()  # type: ignore[assignment]
    (error, answer), _ = run_jobs(bank, [wrong, right])
    assert isinstance(error, RunError)
    assert "no such field" in str(error)
    assert answer.num_tokens == 6


def test_an_adapter_that_memory_does_not_take_fails_its_own_answers(bank):
    def ready(adapter: str | None) -> None:
        if adapter == "two":
            raise MemoryError("no more")

    requests = [Submitted("one", [7]), Submitted("two", [7]), Submitted(None, [7])]
    (one, two, base), _ = run_jobs(bank, requests, ready)
    assert isinstance(two, RunError)
    assert "no more" in str(two)
    assert one.num_tokens == base.num_tokens == 4


def test_a_failure_frees_its_adapter(bank, monkeypatch):
    real, steps = CachedEngine.step, [0]

    def fails_late(self: CachedEngine) -> None:
        steps[0] += 1
        if steps[0] == 4:
            raise RuntimeError("no more")
        real(self)

    bank.engine()  # probes the model with a step
    monkeypatch.setattr(CachedEngine, "step", fails_late)
    # pytest keeps log records, whose traceback holds the engine
    monkeypatch.setattr("peftkit_server.batch._LOG.exception", lambda *_: None)
    worker, request = Worker(bank), Submitted("one", [7], max_new_tokens=9)
    worker.submit([request.job])
    gc.disable()
    try:
        worker.start()
        assert isinstance(request.end(), RunError)
        worker.call(lambda: bank.drop("one")).result(20)
    finally:
        worker.stop()
        gc.enable()
