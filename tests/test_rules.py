"""What does not go together is refused when a recipe is read, or where it is launched."""

from typing import Any

import pytest

from peftkit.config.schema import from_dict
from peftkit.errors import ConfigError
from peftkit.recipe import Recipe, check_settings

PLAIN: dict[str, dict[str, Any]] = {"base": {"model": "x"}, "data": {"train": "rows.jsonl"}}
READ: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gradient_checkpointing is false", {
        "base": {"placement": "stream", "quantize": "nf4"},
        "train": {"gradient_checkpointing": False},
    }),
    ("train.shard: offload", {
        "base": {"placement": "stream", "quantize": "nf4"}, "train": {"shard": "offload"},
    }),
    ("method.type: prompt_tuning", {
        "method": {"type": "prompt_tuning"}, "data": {"packing": True},
    }),
    ("init: eva", {
        "task": {"type": "distill", "teacher": {"prompt": "rules.md"}}, "method": {"init": "eva"},
    }),
    ("base.quantize is none", {"base": {"quantize_embeddings": "int8"}}),
    ("method.start_from", {"base": {"new_tokens": ["<a>"]}, "method": {"start_from": "run"}}),
    ("method.token_rows", {"base": {"new_tokens": ["<a>"]}, "method": {"token_rows": [3]}}),
    ("data.eval is not set", {"train": {"keep_best": True}}),
    ("generates no text", {
        "task": {"type": "masked_lm"}, "train": {"eval_generate": 4}, "data": {"eval": "r.jsonl"},
    }),
    ("method.type: bitfit", {"method": {"type": "bitfit"}, "train": {"shard": "base"}}),
)  # fmt: skip
LAUNCHED = (("There is one process", {"shard": "base"}, 1, 2),)


def recipe(**sections: dict[str, Any]) -> Recipe:
    given = {name: dict(section) for name, section in PLAIN.items()}
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section}
    if "method" in given:
        given["method"].setdefault("type", "lora")
    return from_dict(Recipe, given, "test")


@pytest.mark.parametrize(("told", "sections"), READ)
def test_conflicting_settings_are_refused_at_load(told, sections):
    with pytest.raises(ConfigError) as error:
        recipe(**sections)
    assert told in str(error.value)


@pytest.mark.parametrize(("told", "train", "wrong", "right"), LAUNCHED)
def test_rank_settings_refused(told, train, wrong, right):
    asked = recipe(train=train)
    check_settings(asked, right)
    with pytest.raises(ConfigError, match=told):
        check_settings(asked, wrong)


def test_context_parallel_was_removed_but_recipes_that_did_not_use_it_are_read():
    assert recipe(train={"context_parallel": 1}).train == recipe().train
    with pytest.raises(ConfigError, match=r"context_parallel.* was removed.*shard: base"):
        recipe(train={"context_parallel": 2})


def test_nothing_is_wrong_with_a_plain_recipe():
    check_settings(recipe(), 1)
