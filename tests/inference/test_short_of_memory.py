"""Where memory runs out answers go on, fewer at a time, from the tokens that they have."""

from typing import Any

import pytest
import torch

from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import FEWEST_TOKENS, AnswerTooLarge, Limits, Request
from peftkit.inference.generate import ModelSampler, generate_ids
from peftkit.inference.open_engine import open_engine, why_plain
from peftkit.inference.plain_engine import PlainEngine
from peftkit.inference.sampling import Sampling
from peftkit_server.worker import Worker
from tests.helpers.families import FAMILIES
from tests.helpers.generation import MODELS, TOKENIZER
from tests.helpers.memory import limit_memory
from tests.helpers.worker import Submitted
from tests.simulated_gpu.simulation import simulated

PROMPTS = [[7 + n, 8, 9 + n] for n in range(9)]
SETTINGS = [Sampling(9 + n, 0.0 if n % 2 else 1.0, seed=n) for n in range(9)]


def streamed_answers(model: Any, tokenizer: Any, told: list[int]) -> list[list[int]]:
    """Return the tokens of each answer as they were streamed."""
    pieces: list[list[int]] = [[] for _ in PROMPTS]
    with open_engine(model, tokenizer, on_fewer=told.append) as engine:
        completions = [
            engine.submit(
                Request(ids, one, number, on_token=lambda c, n=number: pieces[n].extend(c.ids[-1:]))
            )
            for number, (ids, one) in enumerate(zip(PROMPTS, SETTINGS, strict=True))
        ]
        engine.run()
    assert all(one.ended_by in ("stop", "length") for one in completions)
    assert [one.ids for one in completions] == [
        of[: len(one.ids)] for of, one in zip(pieces, completions, strict=True)
    ]
    return [one.ids for one in completions]


@pytest.mark.parametrize("name", ["llama", pytest.param("jamba", marks=pytest.mark.slow)])
@pytest.mark.parametrize("after", [0, 6])
def test_answers_are_those_of_enough_memory(tokenizer, name, after):
    model, told = MODELS[name]().eval(), list[int]()
    expected = streamed_answers(model, tokenizer, told)
    assert not told
    limit_memory(model, 2, after=after)
    assert streamed_answers(model, tokenizer, told) == expected
    assert told[-1] == 2
    again: list[int] = []
    assert streamed_answers(model, tokenizer, again) == expected
    assert again == []  # the next engine begins with as many


def test_prompts_are_computed_in_shorter_passes(llama, tokenizer):
    prompt = [5 + n for n in range(200)]
    expected = generate_ids(llama, tokenizer, [prompt], max_new_tokens=4)
    limit_memory(llama, 64, tokens=150)
    assert generate_ids(llama, tokenizer, [prompt], max_new_tokens=4) == expected


def test_a_reply_that_cannot_fit_fails_without_the_others(llama, tokenizer):
    assert why_plain(llama, tokenizer) is None
    limit_memory(llama, 64, tokens=100)
    long, short = Request([5] * 201, Sampling(5)), Request([7, 8], Sampling(5))
    with CachedEngine(llama, tokenizer, Limits(rows=1)) as engine:
        engine.submit(long)
        other = engine.submit(short)
        with pytest.raises(AnswerTooLarge, match=r"It has 201 tokens, and up to 5 would follow\."):
            engine.run()
        engine.run()
    assert len(other.ids) == 5


@pytest.mark.parametrize("kind", [CachedEngine, PlainEngine])
@pytest.mark.parametrize("waits", [False, True])
def test_a_cancelled_reply_that_does_not_fit_costs_the_others_nothing(
    llama, tokenizer, monkeypatch, kind, waits
):
    """It is cancelled, by any thread, in the pass in which memory runs out."""
    with kind(llama, tokenizer, Limits(rows=1, pass_tokens=FEWEST_TOKENS)) as engine:
        first = engine.submit(Request([5, 6, 7], Sampling(5)))
        other = engine.submit(Request([7, 8], Sampling(5))) if waits else None

        def run_out(*args: Any, **more: Any) -> Any:
            first.finish()
            monkeypatch.undo()
            raise torch.OutOfMemoryError("CUDA out of memory.")

        monkeypatch.setattr(llama, "forward", run_out)
        engine.run()
    assert first.ended_by == "cancelled"
    assert other is None or len(other.ids) == 5 or other.ended_by == "stop"


def test_a_server_answers_the_others(llama, tokenizer):
    from peftkit.inference.bank import AdapterBank
    from tests.helpers.bank import tiny_base

    bank = AdapterBank(tiny_base(llama, tokenizer))
    bank.engine()  # which tries how the model takes it
    limit_memory(llama, 64, tokens=100)
    worker = Worker(bank)
    long, short = Submitted(None, [5] * 201), Submitted(None, [7, 8])
    worker.submit([long.job, short.job])
    worker.start()
    try:
        assert isinstance(long.end(), AnswerTooLarge)
        assert short.end().num_tokens == 4
    finally:
        worker.stop()


@pytest.mark.smoke
def test_rollouts_go_on(llama, tokenizer):
    sampler = ModelSampler(llama, tokenizer, 64)

    def answers() -> list[list[Any]]:
        seeds = [[10 * n + k for k in range(4)] for n in range(3)]
        return sampler.answers(PROMPTS[:3], seeds, max_new_tokens=8, stops=())

    expected = answers()
    limit_memory(llama, 3, after=4)
    assert answers() == expected


def test_a_card_that_runs_out_answers_all():
    prompts = [[7 + n] * 30 for n in range(6)]
    with simulated() as card:
        model: Any = FAMILIES["llama"]().eval().to("cuda")
        assert why_plain(model, TOKENIZER) is None
        told: list[int] = []
        with CachedEngine(model, TOKENIZER, on_fewer=told.append) as engine:
            engine.graphs.records = False
            expected = engine.answers(prompts, Sampling(6))
        card.memory = card.allocated + 60_000
        with CachedEngine(model, TOKENIZER, on_fewer=told.append) as engine:
            engine.graphs.records = False
            answers = engine.answers(prompts, Sampling(6))
    assert told
    assert [one.ids for (one,) in answers] == [one.ids for (one,) in expected]
