"""The recipe that a job's request becomes, and the rows that it may have."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peftkit.defaults import PREFERENCE_RATE, learning_rate_of
from peftkit.recipe import Recipe, load
from peftkit.settings import BaseConfig
from peftkit_cli.start.recipes import recipe_file
from peftkit_server.refusals import public
from peftkit_server.tuning.bodies import JobBody, Kind
from peftkit_server.tuning.recipes import (
    ANSWER_TOKENS,
    ANSWERS,
    PROMPTS,
    REWARDS_RATE,
    grader_of,
    recipe_of,
)
from peftkit_server.tuning.rows import JobError, count_rows
from tests.helpers.jobs import LIKE, PAIRS, chats, graded, hyper, prompts

NAMES = ("n_epochs", "batch_size", "learning_rate_multiplier")


def asked(**body: Any) -> JobBody:
    return JobBody.model_validate({"model": "base", "training_file": "file-x", **body})


def recipe_for(
    model: Any, folder: Path, num_rows: int, start: Path | None = None, **body: Any
) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe of a job over a tiny base, and its hyperparameters."""
    training: Any = SimpleNamespace(
        bank=SimpleNamespace(base=SimpleNamespace(model=model)),
        options=SimpleNamespace(base=BaseConfig(model="tiny"), allow_code=False),
    )
    job = asked(**body)
    grader = grader_of(job.grader, training, folder) if job.grader else None
    files = (folder / "rows.jsonl", folder / "valid.jsonl")
    places: Any = {"files": files, "start": start, "out": folder / "out"}
    return recipe_of(job, 7, grader, training, num_rows=num_rows, **places)


def test_auto_becomes_numbers_by_the_rules_of_defaults(llama, tmp_path):
    auto = {"hyperparameters": {"n_epochs": "auto"}}
    assert asked(**auto).as_job("x", 7)["hyperparameters"] == dict.fromkeys(NAMES, "auto")
    recipe, numbers = recipe_for(llama, tmp_path, 120, **auto)
    assert numbers == dict(zip(NAMES, (5, 4, 1.0), strict=True))
    train = recipe.train
    assert (train.learning_rate, train.epochs, recipe.method.rank) == (1e-2, 5.0, 16)
    assert not recipe.data.packing


@pytest.mark.parametrize("is_old", [True, False])
def test_hyperparameters_are_read_in_either_place(llama, tmp_path, is_old):
    given = dict(zip(NAMES, (1, 12, 0.5), strict=True))
    body: dict[str, Any] = {"hyperparameters": given} if is_old else {"method": hyper(**given)}
    job = asked(**body).as_job("x", 7)
    assert job["hyperparameters"] == job["method"]["supervised"]["hyperparameters"] == given
    recipe, numbers = recipe_for(llama, tmp_path, 12, **body)
    assert numbers == given
    assert recipe.train.learning_rate == pytest.approx(0.5 * 1e-2)


def test_a_dpo_recipe_has_its_beta_its_rate_and_its_start(llama, tmp_path):
    method = hyper("dpo", beta=0.3)
    recipe, _ = recipe_for(llama, tmp_path, 12, tmp_path / "start", method=method)
    assert recipe.method.start_from == str(tmp_path / "start")
    assert recipe.task.model_dump().items() >= {"loss": "dpo", "beta": 0.3}.items()
    assert recipe.train.learning_rate == pytest.approx(5 * PREFERENCE_RATE * learning_rate_of(32))


def test_a_reinforcement_recipe_scales_its_answers(llama, tmp_path):
    recipe, _ = recipe_for(llama, tmp_path, 4, method=graded(LIKE, eval_interval=1))
    assert recipe.task.model_dump()["answers"] == 2
    assert (recipe.train.eval_every, recipe.train.schedule) == (1, "constant")


def test_wandb_is_a_setting_of_the_recipe(llama, tmp_path):
    integrations = [{"type": "wandb", "wandb": {"project": "peftkit"}}]
    assert asked(integrations=integrations).as_job("x", 7)["integrations"] == integrations
    recipe, _ = recipe_for(llama, tmp_path, 12, integrations=integrations)
    assert recipe.train.log_to == ("wandb",)


def test_rates_and_answers_are_those_of_the_ready_made_recipes():
    rewards = load(recipe_file("grpo"))
    assert (rewards.train.learning_rate, rewards.train.batch_size) == (REWARDS_RATE, PROMPTS)
    task = rewards.task.model_dump()
    assert (task["answers"], task["max_new_tokens"]) == (ANSWERS, ANSWER_TOKENS)


FORMAT, ROWS = "invalid_file_format", "invalid_training_file"
USER = {"messages": [{"role": "user", "content": "x"}]}
WEIGHTED = {"messages": [{"role": "assistant", "content": "x", "weight": 2}]}
OTHER = {"prompt": "a", "completion": "b"}
WRONG_PAIR = {**PAIRS[0], "input": {"messages": "x"}}
NO_ANSWER = {"messages": prompts()[0]["messages"]}
BAD: list[tuple[Any, Kind, str, str]] = [
    (chats(9), "supervised", "invalid_n_examples", "9 rows; supervised requires at least 10"),
    (b"not JSON\n" * 10, "supervised", FORMAT, "rows.jsonl:1:1 as JSON"),
    (b"", "supervised", FORMAT, "empty"),
    (b"\x1f\x8b\x08", "supervised", FORMAT, "gzip"),
    (b"[" * 5000, "supervised", FORMAT, ""),
    (b'{"a": ' * 5000, "supervised", FORMAT, "nested too deep"),
    ([*chats(), {"messages": []}], "supervised", ROWS, "Line 13: messages: empty"),
    ([*chats(11), USER] * 7, "supervised", ROWS, "7 of 84 rows cannot be used. Line 12: messages:"),
    (
        [*chats(), WEIGHTED],
        "supervised",
        ROWS,
        "Line 13: messages[0].weight: expected true, false, 0 or 1",
    ),
    ([*chats(), OTHER], "supervised", ROWS, "Line 13: its"),
    ([{"text": "a"}] * 10, "supervised", ROWS, "Line 1: messages: missing"),
    (chats(), "dpo", ROWS, "Line 1: preferred_output: missing; its fields: messages"),
    ([*PAIRS, WRONG_PAIR], "dpo", ROWS, "Line 13: input.messages: expected a list"),
    ([*prompts(3), NO_ANSWER], "reinforcement", ROWS, "Line 4: answer: missing, and the grader"),
]


@pytest.mark.parametrize(("rows", "kind", "code", "told"), BAD, ids=[one[3][:30] for one in BAD])
def test_bad_rows_have_lines(tmp_path, rows, kind, code, told):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(rows if isinstance(rows, bytes) else "\n".join(map(json.dumps, rows)).encode())
    fields = ("answer",) if kind == "reinforcement" else ()
    with pytest.raises(JobError) as failure:
        count_rows(file, kind, fields)
    assert (failure.value.code, failure.value.param) == (code, "training_file")
    message = public(failure.value)
    assert told in message
    assert str(tmp_path) not in message
