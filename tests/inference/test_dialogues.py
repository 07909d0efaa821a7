"""Answers of several turns are those of one request a turn, and compute no beginning again."""

from collections.abc import Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from peftkit.execution import rng
from peftkit.inference import dialogues as module
from peftkit.inference.cached_attention import Prefill
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.dialogues import Wait, dialogues
from peftkit.inference.engine import Engine, Limits, Request
from peftkit.inference.generate import ModelSampler, SampledAnswer
from peftkit.inference.open_engine import open_engine
from peftkit.inference.plain_engine import PlainEngine
from peftkit.inference.sampling import Sampling

Tokenizer = PreTrainedTokenizerFast
MOST = 40
COMMON = [11 + 5 * n for n in range(35)]
PROMPTS = [[5, 9, 11, 30, 7], [8, 8, 200], [*COMMON, 3], [*COMMON, 4, 4]]
SEEDS = [[10 * n + k for k in range(3)] for n in range(len(PROMPTS))]
STOPS = tuple(range(0, 384, 6))


def reply(index: int, number: int, turn: SampledAnswer) -> Wait | None:
    """Say something after most turns; it does not fit into what a long answer has left."""
    said = [100 + index, 200 + number, 300]

    def wait(room: int) -> list[int] | None:
        return said if len(said) < room else None

    return None if len(turn.ids) % 4 == 0 else wait


def answers(model: Any, tokenizer: Tokenizer, seeds: Any = SEEDS, rows: int = 5) -> Any:
    sampler = ModelSampler(model, tokenizer, rows)
    prompts = [[ids] * (1 if seeds is None else 3) for ids in PROMPTS]
    settings: Any = {"max_new_tokens": MOST, "stops": STOPS, "reply": reply}
    return dialogues(sampler, prompts, seeds, **settings)


def turn_by_turn(model: Any, tokenizer: Tokenizer, place: tuple[int, int]) -> SampledAnswer:
    """Return an answer whose every turn is a request of its own, from the beginning."""
    index, number = place
    prompt, seed, ids, learnt, turns = PROMPTS[index], SEEDS[index][number], [], [], 0
    with open_engine(model, tokenizer, Limits()) as engine:
        while True:
            left = MOST - len(ids)
            sampling = Sampling(max_new_tokens=left, temperature=1.0, stops=STOPS)
            drawn = rng.seed_of(seed, turns) if turns else seed
            one = engine.submit(Request([*prompt, *ids], sampling, drawn))
            engine.run()
            turn = (*one.ids, *([] if one.end is None else [one.end]))
            ids, learnt, turns = [*ids, *turn], learnt + [True] * len(turn), turns + 1
            if one.end is None:
                return SampledAnswer(tuple(ids), True, tuple(learnt))
            wait = reply(index, number, SampledAnswer(turn, False))
            if wait is None:
                return SampledAnswer(tuple(ids), False, tuple(learnt))
            said = wait(MOST - len(ids))
            if said is None:
                return SampledAnswer(tuple(ids), True, tuple(learnt))
            ids, learnt = [*ids, *said], learnt + [False] * len(said)


@pytest.mark.covers("peftkit")
@pytest.mark.parametrize("read", [1, 1 << 30])
def test_turns_are_those_of_single_requests(read, llama, tokenizer, monkeypatch):
    # what prompts have in common is read where it is, or each row has a copy
    monkeypatch.setattr("peftkit.inference.cached_engine.MIN_READ", read)
    found = answers(llama, tokenizer)
    assert found == [
        [turn_by_turn(llama, tokenizer, (i, n)) for n in range(3)] for i in range(len(PROMPTS))
    ]
    flat = [one for group in found for one in group]
    assert {one.is_cut for one in flat} == {True, False}
    assert max(len(one.ids) - one.num_targets for one in flat) >= 6  # three turns and more
    monkeypatch.setattr(module, "open_engine", PlainEngine)
    assert answers(llama, tokenizer) == found
    assert answers(llama, tokenizer, seeds=None)[0][0].num_targets > 0


@pytest.mark.covers("peftkit")
def test_a_waiting_row_resumes(llama, tokenizer, monkeypatch):
    computed: list[int] = []
    start = Prefill.__init__

    def counted(self: Prefill, chunks: Sequence[Any], **how: Any) -> None:
        computed.extend(size for _, size in chunks)
        start(self, chunks, **how)

    monkeypatch.setattr(Prefill, "__init__", counted)
    found, with_cache = answers(llama, tokenizer), sum(computed)
    computed.clear()
    for index in range(len(PROMPTS)):
        for number in range(3):
            turn_by_turn(llama, tokenizer, (index, number))
    replies = sum(len(one.ids) - one.num_targets for group in found for one in group)
    assert with_cache <= 3 * sum(map(len, PROMPTS)) + replies
    assert sum(computed) > 2 * with_cache


@pytest.mark.covers("peftkit")
def test_caches_are_dropped_if_memory_is_short(llama, tokenizer, monkeypatch):
    engines: list[Any] = []
    expected = answers(llama, tokenizer)

    def tight(model: Any, tokenizer: Any, limits: Limits) -> Engine:
        engines.append(open_engine(model, tokenizer, Limits(rows=limits.rows, tokens=120)))
        return engines[-1]

    monkeypatch.setattr(module, "open_engine", tight)
    assert answers(llama, tokenizer) == expected
    assert not engines[0]._kept
    assert not any(span.num_users for span in engines[0]._prefixes._spans)


def test_dialogue_rows_grow_during_generation(llama, tokenizer, monkeypatch):
    step, steps, grown = CachedEngine.step, [0], list[int]()

    def counted(self: CachedEngine) -> None:
        steps[0] += 1
        step(self)

    def replies(index: int, number: int, turn: SampledAnswer) -> Wait | None:
        began = steps[0]

        def wait(room: int) -> None:
            grown.append(steps[0] - began)

        return wait

    monkeypatch.setattr(CachedEngine, "step", counted)
    sampler = ModelSampler(llama, tokenizer, 64)
    settings: Any = {"max_new_tokens": MOST, "stops": STOPS, "reply": replies}
    dialogues(sampler, [[ids] * 3 for ids in PROMPTS], SEEDS, **settings)
    assert len(grown) > 4
    assert max(grown) == module.REPLY_STEPS  # others grew meanwhile
    assert min(grown) < module.REPLY_STEPS  # the last ones wait for no others
