"""A job as a recipe: what `peftkit train` would run to the same end."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peftkit.config.schema import Config, from_dict
from peftkit.defaults import BATCHES, PREFERENCE_RATE, Defaults, defaults_for
from peftkit.errors import ConfigError
from peftkit.files.disk import write_text
from peftkit.inference.engine import context_length
from peftkit.recipe import Recipe
from peftkit.serve.requests import RequestError
from peftkit.serve.training import Training
from peftkit.serve.tuning.bodies import JobBody
from peftkit.tasks.rewards.graders import AnyGrader, Grader

REWARDS_RATE = 1e-5
"""Learning rate of the ready-made recipe `grpo`."""
PROMPTS, ANSWERS, ANSWER_TOKENS = 8, 8, 256
"""Prompts of a step, answers to each, and the most tokens of an answer, of the recipe `grpo`."""
SAVE_STEPS = 100
"""Steps between checkpoints, at most."""


class GraderBox(Config):
    """A grader by itself, to check it."""

    grader: AnyGrader


def grader_of(told: Mapping[str, Any], training: Training, folder: Path) -> Grader:
    """Return a client's grader as recipes have it.

    Args:
        folder: Gets the sources of its functions, where the operator lets them run.

    Raises:
        RequestError: It is none, asks another model than the base, or would run code.
    """
    try:
        return from_dict(GraderBox, {"grader": _own(told, training, folder)}, "the grader").grader
    except ConfigError as error:
        raise RequestError(
            error.problem, found=error.found, fix=error.fix, param="grader"
        ) from None


def _own(told: Mapping[str, Any], training: Training, folder: Path) -> dict[str, Any]:
    own = {name: value for name, value in told.items() if value is not None}
    kind, parts, settings = own.get("type"), own.get("graders"), own.get("sampling_params")
    if kind == "multi" and isinstance(parts, Mapping):
        parts = [*parts.items()]
        own["graders"] = {
            name: _own(part, training, folder / str(number)) if isinstance(part, Mapping) else part
            for number, (name, part) in enumerate(parts)
        }
    if kind == "score_model":
        if isinstance(own.get("model"), str) and training.is_base(own["model"]):
            own["model"] = "base"
        if isinstance(settings, Mapping):
            own["sampling_params"] = {n: v for n, v in settings.items() if v is not None}
    if kind == "python":
        own.pop("image_tag", None)
        own["source"] = _source(own.get("source"), training, folder)
    return own


def _source(text: Any, training: Training, folder: Path) -> str:
    """Write the source of a function to a file; return its name, as recipes have it."""
    if not training.options.allow_code:
        raise RequestError(
            "this server runs no code of clients, such as graders of the type python.",
            fix="Its operator may allow it: peftkit serve --run-graders.",
            status=403,
            code="code_not_allowed",
            param="grader",
        )
    try:
        ast.parse(text)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as problem:
        text = f"the source of a grader is no Python: {problem}"
        raise RequestError(text, param="grader") from None
    folder.mkdir(parents=True, exist_ok=True)
    write_text(text, folder / "grader.py")
    return f"{folder / 'grader.py'}:grade"


def recipe_of(
    asked: JobBody,
    seed: int,
    grader: Grader | None,
    training: Training,
    *,
    files: tuple[Path, Path | None],
    num_rows: int,
    start: Path | None,
    out: Path,
) -> tuple[Recipe, dict[str, Any]]:
    """Return a job's recipe, and its hyperparameters as numbers.

    Args:
        files: Rows to train on, and to evaluate on.
        start: The adapter to go on from; None: a new one.
        out: The folder of the run.

    Raises:
        ConfigError: The settings do not go together.
    """
    width = getattr(training.bank.base.model.config.get_text_config(), "hidden_size", None)
    batches = (PROMPTS,) if asked.kind == "reinforcement" else BATCHES
    usual = defaults_for(num_rows, width=width, batches=batches)
    numbers = _numbers(asked, usual)
    steps = math.ceil(num_rows / numbers["batch_size"])
    every = math.ceil(steps / math.ceil(steps / SAVE_STEPS))
    rates = {"dpo": PREFERENCE_RATE * usual.learning_rate, "reinforcement": REWARDS_RATE}
    rate = rates.get(asked.kind, usual.learning_rate) * numbers["learning_rate_multiplier"]
    limit = context_length(training.bank.base.model)
    data = {"train": str(files[0]), "eval": str(files[1]) if files[1] else None}
    method = {"type": "lora", "rank": usual.rank, "alpha": usual.alpha, "targets": "all-linear"}
    settings = {
        "task": _task(asked.kind, numbers, grader, limit),
        "base": training.options.base.model_dump(),
        "method": {"start_from": str(start)} if start else method,
        "data": {
            **data,
            **({"max_length": None} if limit else {}),
            **({"packing": False} if asked.kind == "supervised" else {}),
        },
        "train": {
            "output_dir": str(out),
            "epochs": float(numbers["n_epochs"]),
            "batch_size": numbers["batch_size"],
            "learning_rate": rate,
            "schedule": "constant" if asked.kind == "reinforcement" else "cosine",
            "seed": seed,
            "save_every": every,
            "eval_every": numbers.get("eval_interval", every),
            "log_to": ["wandb"] if asked.integrations else [],
        },
    }
    return from_dict(Recipe, settings, "the job"), numbers


def _numbers(asked: JobBody, usual: Defaults) -> dict[str, Any]:
    """Return the hyperparameters, "auto" as a number."""
    auto: dict[str, Any] = {
        "n_epochs": usual.epochs,
        "batch_size": usual.batch_size,
        "learning_rate_multiplier": 1.0,
    }
    if asked.kind == "dpo":
        auto["beta"] = 0.1
    if asked.kind == "reinforcement":
        auto |= {"compute_multiplier": 1.0, "eval_samples": 1, "reasoning_effort": "default"}
    return auto | asked.given.set()


def _task(
    kind: str, numbers: Mapping[str, Any], grader: Grader | None, limit: int | None
) -> dict[str, Any]:
    if kind == "supervised":
        return {"type": "causal_lm"}
    if kind == "dpo":
        return {"type": "preference", "loss": "dpo", "beta": float(numbers["beta"])}
    assert grader is not None
    return {
        "type": "grpo",
        "rewards": [{"use": "grader", "grader": grader.model_dump(mode="json")}],
        "answers": max(2, round(ANSWERS * numbers["compute_multiplier"])),
        "max_new_tokens": min(ANSWER_TOKENS, (limit or 2 * ANSWER_TOKENS) // 2),
    }
