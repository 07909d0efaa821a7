"""Sampling: which tokens top_p and top_k leave, and what a row's token depends on."""

import pytest
import torch
from torch import Tensor

from peftkit.inference.sampling import LIKELY, Sampling, SamplingTable, uniform
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
