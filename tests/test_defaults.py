"""Defaults that learn: settings by rows and base, and runs that are too short."""

import math
from pathlib import Path

import pytest
from transformers import LlamaConfig

from peftkit.defaults import (
    EPOCH_STEPS,
    MAX_ANCHORS,
    MIN_STEPS,
    PREFERENCE_RATE,
    anchors_per_step,
    batch_of,
    defaults_for,
    drift_advice,
    learning_rate_of,
    should_pack,
    why_too_short,
)
from peftkit.recipe import load
from peftkit.settings import TrainConfig
from peftkit.tasks.tokens import CausalLMConfig


@pytest.mark.parametrize("num_rows", [100, 180, 300, 640, 1_000, 5_000, 60_000])
@pytest.mark.parametrize("tokens", [30, 400])
def test_an_epoch_has_dozens_of_steps_whatever_the_rows(num_rows, tokens):
    settings = defaults_for(num_rows, num_rows * tokens, 2_048)
    rows = math.ceil(num_rows * tokens / 2_048) if settings.packing else num_rows
    epoch_steps = math.ceil(rows / settings.batch_size)
    assert epoch_steps >= EPOCH_STEPS
    assert settings.num_steps == epoch_steps * settings.epochs >= 100


@pytest.mark.parametrize("tokens", [1, 448, 830, 1_500, 16_384])
@pytest.mark.parametrize("anchor_tokens", [20, 60, 90])
def test_an_anchor_takes_an_eighth_of_a_step_or_one_to_four_rows(tokens, anchor_tokens):
    number = anchors_per_step(tokens, anchor_tokens)
    assert 1 <= number <= MAX_ANCHORS
    assert number in (1, MAX_ANCHORS) or abs(number - tokens / 8 / anchor_tokens) <= 0.5


def test_few_rows_are_not_packed_and_many_are():
    assert not defaults_for(180, 180 * 60, 2_048).packing
    assert defaults_for(60_000, 60_000 * 60, 2_048).packing
    assert should_pack(192)
    assert not should_pack(191)
    assert [batch_of(number) for number in (9, 100, 300, 1_000, 10**6)] == [4, 4, 8, 16, 16]


@pytest.mark.parametrize(
    ("width", "rate"), [(384, 2e-3), (576, 1e-3), (1_536, 6e-4), (4_096, 3e-4), (None, 3e-4)]
)
def test_the_learning_rate_falls_with_the_width(width, rate):
    assert learning_rate_of(width) == rate


def test_the_newcomers_recipe_is_called_too_short():
    config = TrainConfig(epochs=5, batch_size=4, gradient_accumulation=4)
    told = why_too_short(config, 6, 180)
    assert "5 optimizer steps" in told
    assert "16 rows (train.batch_size x gradient_accumulation) of 6 (180 documents, packed)" in told
    changes = "--set data.packing=false --set train.batch_size=4 --set train.gradient_accumulation"
    assert changes in told
    cured = TrainConfig(epochs=5, batch_size=4)
    assert why_too_short(cured, 180, 180) == ""
    assert cured.num_steps(180) >= MIN_STEPS


def test_a_number_of_steps_that_was_asked_for_is_not_short():
    assert why_too_short(TrainConfig(max_steps=2, batch_size=2), 9, 9) == ""
    told = why_too_short(TrainConfig(max_steps=2, batch_size=32), 9, 9)
    assert told.startswith("The batch is larger than the data")
    assert "--set train.batch_size=4" in told


@pytest.mark.parametrize("num_rows", [1, 3, 12, 19, 40, 99])
def test_no_recipe_of_the_rules_is_called_too_short(num_rows):
    rules = defaults_for(num_rows)
    config = TrainConfig(epochs=rules.epochs, batch_size=min(rules.batch_size, num_rows))
    assert rules.num_steps >= MIN_STEPS
    assert why_too_short(config, num_rows, num_rows) == ""


def test_what_is_told_of_too_few_rows_makes_the_fewest_steps():
    told = why_too_short(TrainConfig(epochs=5, batch_size=2), 3, 3)
    assert told.endswith("For 24 steps: --set train.batch_size=3 --set train.epochs=24")


@pytest.mark.parametrize(
    ("rate", "anchor", "drift", "is_told"),
    [
        (5e-4, None, None, True),
        (2e-4, None, None, False),
        (1e-3, 1.0, None, False),
        (1e-3, None, {}, False),
    ],
)
def test_a_run_that_is_likely_to_drift_is_told(rate, anchor, drift, is_told):
    train = TrainConfig(learning_rate=rate, drift=drift)
    config = LlamaConfig(hidden_size=576)
    advice = drift_advice(CausalLMConfig(type="causal_lm", anchor=anchor), train, config)
    assert bool(advice) is is_told
    assert not is_told or "--set task.anchor=1" in advice


WIDTHS = {"smollm2-135m": 576, "Qwen2.5-0.5B": 896, "Qwen2.5-1.5B-Instruct": 1_536}
WIDTHS |= {"Qwen2.5-3B": 2_048, "Qwen2.5-3B-Instruct": 2_048, "Llama-3.1-8B-Instruct": 4_096}
RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_ready_made_recipes_keep_the_rule_of_the_learning_rate(file):
    recipe = load(file)
    if recipe.task.type not in ("causal_lm", "distill", "preference"):
        return
    rate = learning_rate_of(WIDTHS[recipe.base.model.split("/")[-1]])
    rate *= PREFERENCE_RATE if recipe.task.type == "preference" else 1
    assert rate / 2.6 <= recipe.train.learning_rate <= rate * 2.6
    assert recipe.train.rows_per_step() <= 16
