"""Sampling: which tokens top_p, top_k and min_p leave, penalties, and what a token depends on."""

import math

import pytest
import torch
from torch import Tensor

from peftkit.errors import DataError
from peftkit.inference.engine import Request
from peftkit.inference.open_engine import open_engine
from peftkit.inference.sampling import DRAWS, LIKELY, Penalties, Sampling, SamplingTable, uniform
from tests.simulated_gpu.simulation import simulated

WORDS = 5 * LIKELY
PEAKED, FLAT = 6.0, 0.01
"""Spread of logits: top_p = 0.9 leaves a few hundred tokens, or nearly all."""
CUTS = (
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=0.7, top_k=40),
    Sampling(temperature=1.0, top_p=0.5, top_k=3_000),
    Sampling(temperature=1.3),
    Sampling(),
)


def logits(spread: float, rows: int = len(CUTS)) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return spread * torch.randn(rows, WORDS, generator=generator)


def chosen(settings: tuple[Sampling, ...], values: Tensor, seed: int = 0) -> list[int]:
    seeds = [seed + n for n in range(len(settings))]
    table = SamplingTable(settings, seeds, [4] * len(settings), values.device)
    return [int(token) for token in table.choose(values)[:, 0].tolist()]


def by_sorting(one: Sampling, values: Tensor, seed: int) -> int:
    """Return the token of one row, by the definition of top_p and top_k."""
    if not one.temperature:
        return int(values.argmax())
    likely = (values / one.temperature).softmax(-1)
    order = torch.arange(WORDS)
    if one.top_p < 1 or one.top_k:
        likely, order = likely.sort(descending=True)
        keep = (likely.cumsum(-1) - likely < one.top_p) & (
            order.new_ones(WORDS).cumsum(-1) <= (one.top_k or WORDS)
        )
        likely = likely * keep
    cumulative = likely.double().cumsum(-1)
    share = uniform(torch.tensor([seed]), torch.tensor([4]))
    return int(order[torch.searchsorted(cumulative, share * cumulative[-1], right=True)])


@pytest.mark.parametrize("spread", [PEAKED, FLAT])
def test_a_token_is_the_one_that_sorting_all_would_give(spread):
    values = logits(spread)
    for seed in range(0, 60, 7):
        expected = [by_sorting(one, values[n], seed + n) for n, one in enumerate(CUTS)]
        assert chosen(CUTS, values, seed) == expected


@pytest.mark.parametrize("spread", [PEAKED, FLAT])
def test_a_row_is_drawn_alike_whatever_the_others_ask_for(spread):
    values = logits(spread)
    together = chosen(CUTS, values)
    for number, one in enumerate(CUTS):
        table = SamplingTable([one], [number], [4], "cpu")
        assert int(table.choose(values[number : number + 1])[0, 0]) == together[number]


def test_a_draw_depends_on_its_number_not_on_where_the_table_began():
    values = logits(FLAT)[:1]
    one = Sampling(temperature=1.0)
    table = SamplingTable([one], [9], [3], "cpu")
    drawn = [int(table.choose(values)[0, 0]) for _ in range(2 * DRAWS + 3)]
    alone = [SamplingTable([one], [9], [3 + n], "cpu") for n in range(len(drawn))]
    assert drawn == [int(table.choose(values)[0, 0]) for table in alone]
    assert len(set(drawn)) > DRAWS


@pytest.mark.parametrize(
    ("asked", "spread", "num_waits", "sorts"),
    [
        (Sampling(temperature=1.0), PEAKED, 0, False),
        (Sampling(temperature=1.0, top_k=40), FLAT, 0, False),
        (Sampling(temperature=1.0, top_p=0.9), PEAKED, 1, False),
        (Sampling(temperature=1.0, top_p=0.9), FLAT, 1, True),
    ],
)
def test_full_sorts_if_needed(asked, spread, num_waits, sorts):
    with simulated() as card:
        values = logits(spread, 2).to("cuda")
        table = SamplingTable([asked, asked], [1, 2], [4, 4], "cuda")
        before = len(card.waits)
        table.choose(values)
        assert len(card.waits) - before == num_waits
        assert (card.operators["sort"] > 0) == sorts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_follow_their_formulas(dtype):
    logits = torch.randn(16, generator=torch.Generator().manual_seed(0)).to(dtype)
    prompt, ids = [1, 2, 2, 3], [3, 4, 4, 4]
    penalties = Penalties(repetition=1.5, frequency=0.25, presence=0.5, bias={4: -2.0, 9: 7.0})
    changed = penalties.applied(logits, prompt, ids)
    for token, value in enumerate(logits.float().tolist()):
        if token in (*prompt, *ids):
            value = value / 1.5 if value > 0 else value * 1.5
        if token in ids:
            value -= 0.25 * ids.count(token) + 0.5
        value += penalties.bias.get(token, 0.0)
        assert changed[token].item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_min_p_draws_from_likely_tokens_only(temperature):
    values = 3 * torch.randn(1, 5000, generator=torch.Generator().manual_seed(0))
    probabilities = (values[0] / temperature).softmax(-1)
    setting = Sampling(temperature=temperature, min_p=0.2)
    drawn = {
        int(SamplingTable([setting], [seed], [4], "cpu").choose(values)[0, 0])
        for seed in range(300)
    }
    likely = set((probabilities >= 0.2 * probabilities.max()).nonzero()[:, 0].tolist())
    assert drawn <= likely
    assert len(drawn) > 1


def test_a_completion_with_a_bias_leaves_the_others_unchanged(llama, tokenizer):
    prompt = [5, 6, 7]

    def ids(*settings: Sampling) -> list[list[int]]:
        with open_engine(llama, tokenizer) as engine:
            done = [engine.submit(Request(prompt, each)) for each in settings]
            engine.run()
        return [completion.ids for completion in done]

    plain = Sampling(max_new_tokens=8)
    forced = Sampling(max_new_tokens=8, penalties=Penalties(bias={9: 1000.0}))
    spread = Sampling(max_new_tokens=8, penalties=Penalties(frequency=1000.0))
    alone = ids(plain)[0]
    assert len({*alone}) < 8  # without penalties, the tiny model repeats tokens
    together = ids(plain, forced, spread)
    assert together[0] == alone
    assert together[1] == [9] * 8
    assert len({*together[2]}) == len(together[2])


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition": 0.0},
        {"repetition": math.inf},
        {"presence": math.nan},
        {"bias": {1: math.inf}},
    ],
)
def test_values_out_of_range(fields):
    with pytest.raises(DataError):
        Penalties(**fields)
