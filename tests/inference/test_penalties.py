"""Penalties, biases and min_p: formulas, and completions that they change."""

import math

import pytest
import torch

from peftkit.errors import DataError
from peftkit.inference.engine import Request
from peftkit.inference.open_engine import open_engine
from peftkit.inference.sampling import Penalties, Sampling, SamplingTable


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
