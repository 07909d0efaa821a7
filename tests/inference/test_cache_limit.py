"""What the cache of keys and values allocates stays below its limit, and nobody waits for ever."""

import gc
from itertools import product
from typing import Any

import pytest

from peftkit.inference.budget import CacheBudget
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import Limits, Request
from peftkit.inference.open_engine import open_engine, why_plain
from peftkit.inference.sampling import Sampling
from tests.helpers.families import FAMILIES
from tests.helpers.generation import MODELS, TOKENIZER, most_allocated
from tests.simulated_gpu.simulation import simulated

MOST_STEPS = 3000
BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4
"""Keys and values of two layers with two heads of eight float32 numbers."""


@pytest.mark.parametrize("state", [0, 3])
def test_a_budget_counts_slots_at_their_final_lengths(state):
    held, slots = 10, {128: (4, 96), 256: (1, 160)}
    budget = CacheBudget(1000, state, held, slots, (96, 128, 160, 192))
    assert budget.num_tokens == 10 + 4 * (128 + state) + 2 * (192 + state)
    assert budget.shrunk().num_tokens == 10 + 2 * (128 + state) + 2 * (192 + state)
    more = budget.plus(480, held=5)
    assert more.num_tokens == budget.num_tokens + 5 + 480 + state
    assert (budget.fits, more.fits, more._replace(limit=None).fits) == (True, False, True)
    most = budget.max_slots(256, 200)
    assert most is not None
    for number, fits in ((most, True), (most + 1, False)):
        grown = budget.num_tokens + (number - 2) * (200 + state)
        assert (grown <= 1000) == fits


def finished(engine: CachedEngine) -> bool:
    """Step until all is answered, or so often that it never will be."""
    for _ in range(MOST_STEPS):
        if engine.is_idle:
            return True
        engine.step()
    return engine.is_idle


@pytest.mark.parametrize("tokens", [240, 400, 480, 700])
@pytest.mark.parametrize("kept", [0, 8192])
def test_a_prefix_that_fills_the_cache_is_served(llama, tokenizer, tokens, kept):
    assert why_plain(llama, tokenizer) is None
    prompt, sampling = [5] * 201, Sampling(max_new_tokens=30)
    with CachedEngine(llama, tokenizer) as engine:
        ((alone,),) = engine.answers([prompt], sampling)
    with CachedEngine(llama, tokenizer, Limits(tokens=tokens, prefix_tokens=kept)) as engine:
        answers = [engine.submit(Request(prompt, sampling)) for _ in range(3)]
        assert finished(engine), (engine.num_waiting, engine.num_running)
    assert [one.ids for one in answers] == [alone.ids] * 3


SIZES = [(3, 12), (90, 30), (40, 100), (5, 150), (7, 12), (60, 60), (30, 90), (12, 110)] * 3


def requests(common: int, number: int) -> list[Request]:
    """Return requests of many lengths, with a common prefix."""
    pairs = enumerate(SIZES[:number])
    return [Request([5] * common + [6 + n] * size, Sampling(new)) for n, (size, new) in pairs]


@pytest.mark.parametrize(
    ("common", "tokens"),
    [
        (0, 2500),
        (50, 2500),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in product((0, 50), (600, 1000))),
    ],
)
def test_allocations_keep_the_limit(llama, tokenizer, tokens, common):
    limits = Limits(tokens=tokens, prefix_tokens=100, pass_tokens=64)
    assert why_plain(llama, tokenizer) is None
    with CachedEngine(llama, tokenizer, limits) as engine:
        engine.ends = frozenset()
        most, num_running = most_allocated(engine, requests(common, len(SIZES)))
    assert num_running > 2
    assert 0.8 < most / (tokens * BYTES_PER_TOKEN) <= 1


@pytest.mark.covers("peftkit")
def test_recorded_steps_keep_no_more(llama):
    with simulated():
        model = llama.to("cuda")
        assert why_plain(model, TOKENIZER) is None
        with CachedEngine(model, TOKENIZER, Limits(tokens=600)) as engine:
            most, num_running = most_allocated(engine, requests(0, 8))
            assert engine.graphs.num_recorded > 1
    assert num_running > 2
    assert most <= 600 * BYTES_PER_TOKEN


@pytest.mark.covers("peftkit")
def test_the_peak_of_a_card_is_that_of_the_limit_and_of_a_layer_that_grows():
    with simulated() as card:
        model: Any = FAMILIES["llama"]().eval().to("cuda")
        assert why_plain(model, TOKENIZER) is None
        with CachedEngine(model, TOKENIZER, Limits(tokens=1500, pass_tokens=16)) as engine:
            engine.graphs.records = False
            gc.collect()
            before = card.allocated
            card.reset()
            most_allocated(engine, requests(0, 12))
        cache = 1500 * BYTES_PER_TOKEN
        assert 0.7 * cache < card.peak - before < 1.5 * cache  # one of two layers exists twice


def test_a_plain_batch_has_as_many_rows_as_the_limit_holds(tokenizer):
    model: Any = MODELS["jamba"]().eval()
    sizes: list[int] = []
    with open_engine(model, tokenizer, Limits(tokens=60)) as engine:
        watch = model.register_forward_pre_hook(
            lambda module, args, named: sizes.append(len(named["input_ids"])), with_kwargs=True
        )
        engine.answers([[7, 8, 9]] * 5, Sampling(max_new_tokens=12))
        watch.remove()
    assert list(dict.fromkeys(sizes)) == [4, 1]
