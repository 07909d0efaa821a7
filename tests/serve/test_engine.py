"""Prompts that wait are answered together, each by its adapter, and nobody is forgotten."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest

from peftkit.errors import RunError
from peftkit.inference.bank import AdapterBank
from peftkit.inference.rows import Row, Whole
from peftkit.serve import engine as engine_module
from peftkit.serve.engine import Engine, Job
from peftkit.serve.requests import RequestError


class Asked:
    """A job, and what it is told."""

    def __init__(self, adapter: str | None, ids: list[int], **more: Any) -> None:
        self.queue: SimpleQueue[Any] = SimpleQueue()
        settings = {
            "stops": (), "stop_texts": (), "max_new_tokens": 4, "temperature": 0.0, "top_p": 1.0,
            "seed": None,
        }  # fmt: skip
        self.job = Job(adapter, ids, tell=self.queue.put, **settings | more)

    def end(self) -> Any:
        """Return the whole answer, or the error."""
        while isinstance(what := self.queue.get(timeout=20), str):
            pass
        return what


def answered(bank: AdapterBank, asked: list[Asked], **settings: Any) -> tuple[list[Any], Engine]:
    """Answer jobs that all wait already."""
    engine = Engine(bank, gather=0, **settings)
    engine.submit([one.job for one in asked])
    engine.start()
    try:
        return [one.end() for one in asked], engine
    finally:
        engine.stop()


def test_two_adapters_and_the_base_share_a_batch(bank: AdapterBank) -> None:
    prompts = [[7, 8, 9], [10, 11], [12, 13, 14, 15], [7, 8, 9]]
    names = ["one", "two", None, "two"]
    lengths = [6, 3, 5, 4]
    expected = [
        bank.base.tokenizer.decode(
            bank.generate_ids([ids], [name], max_new_tokens=length)[0], skip_special_tokens=True
        )
        for ids, name, length in zip(prompts, names, lengths, strict=True)
    ]
    asked = [
        Asked(name, ids, max_new_tokens=length)
        for name, ids, length in zip(names, prompts, lengths, strict=True)
    ]
    answers, engine = answered(bank, asked)
    assert [answer.text for answer in answers] == expected
    assert len(set(expected)) == 4
    assert [answer.num_tokens for answer in answers] == lengths
    assert (engine.counts["batches"], engine.counts["rows"]) == (1, 4)


def test_what_cannot_share_a_batch_does_not(bank: AdapterBank) -> None:
    asked = [
        Asked("one", [7, 8]),
        Asked("one", [7, 8], temperature=1.0, seed=3),
        Asked("one", [7, 8], temperature=1.0, seed=3),
        Asked("one", [7, 8]),
        Asked("one", [7, 8]),
    ]
    answers, engine = answered(bank, asked, max_batch=2)
    assert engine.counts["batches"] == 4  # two greedy, one greedy, and each with a seed alone
    assert answers[1] == answers[2]
    assert answers[0] == answers[3] == answers[4]


def test_a_full_queue_takes_all_prompts_of_a_request_or_none(bank: AdapterBank) -> None:
    engine = Engine(bank, max_waiting=3)
    engine.submit([Asked("one", [7]).job] * 2)
    with pytest.raises(RequestError, match="too many") as error:
        engine.submit([Asked("one", [7]).job] * 2)
    assert error.value.status == 429
    assert engine.num_waiting == 2


def test_a_failed_batch_is_told_and_the_next_one_runs(
    bank: AdapterBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine_module.run_rows

    def fails_once(*args: Any, **named: Any) -> None:
        monkeypatch.setattr(engine_module, "run_rows", real)
        raise MemoryError("no more")

    monkeypatch.setattr(engine_module, "run_rows", fails_once)
    answers, _ = answered(bank, [Asked("one", [7]), Asked("one", [8])], max_batch=1)
    assert isinstance(answers[0], RunError)
    assert "no more" in str(answers[0])
    assert isinstance(answers[1], Whole)


def test_stopping_tells_those_who_wait(bank: AdapterBank) -> None:
    engine, asked = Engine(bank, gather=30), Asked("one", [7])
    engine.submit([asked.job])
    engine._ended = True  # before its thread has looked
    engine.start()
    engine.stop()
    assert asked.end().status == 503
    with pytest.raises(RequestError, match="shutting down"):
        engine.submit([asked.job])


def test_a_cancelled_answer_stops_while_the_others_go_on(bank: AdapterBank) -> None:
    gone, stays = Asked("one", [7, 8], max_new_tokens=9), Asked("two", [7, 8], max_new_tokens=9)
    put = gone.queue.put

    def leave(what: Any) -> None:
        put(what)
        gone.job.cancelled.set()

    gone.job.tell = leave
    answers, engine = answered(bank, [gone, stays])
    assert isinstance(answers[0], RequestError)
    assert answers[1].num_tokens == 9
    assert engine.counts["generated_tokens"] < 18


def test_a_text_that_may_become_a_stop_text_is_held_back(tokenizer: Any) -> None:
    told: list[Any] = []
    ids = tokenizer("the quick the quiet")["input_ids"]
    row = Row([1], 50, stop_texts=["quiet", "quit"], tell=told.append)
    for token in ids:
        row.take(token, (), tokenizer)
    *pieces, whole = told
    assert "".join(pieces) == whole.text == "the quick the "
    assert whole.reason == "stop"
    assert row.done
