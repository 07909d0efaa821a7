"""The recipe of a job, with which `peftkit train` gives the same result."""

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
from peftkit.files.strict_json import Json, JsonMap
from peftkit.forward.row_lengths import context_length
from peftkit.recipe import Recipe
from peftkit.tasks.rewards.graders import AnyGrader, Grader
from peftkit_server.refusals import RequestError
from peftkit_server.training import Training
from peftkit_server.tuning.bodies import JobBody

REWARDS_RATE = 1e-5
"""Learning rate of the built-in recipe `grpo`."""
PROMPTS, ANSWERS, ANSWER_TOKENS = 8, 8, 256
"""Prompts per step, completions per prompt and their maximum tokens in the recipe `grpo`."""
MAX_ENTRIES = 64
"""Most entries of a list or an object in a grader."""
SAVE_STEPS = 100
"""Most steps between checkpoints."""


class GraderBox(Config):
    """A config with a grader only, to validate it."""

    grader: AnyGrader


def grader_of(fields: Mapping[str, object], training: Training, folder: Path) -> Grader:
    """Return a client's grader in the format of recipes.

    Args:
        folder: Where the sources of python graders are written, if the server allows them.

    Raises:
        RequestError: The grader is invalid, names a model other than the base, or has code that
            the server does not allow.
    """
    _check_entries(fields)
    settings = {"grader": _grader_settings(fields, training, folder)}
    try:
        return from_dict(GraderBox, settings, "the grader").grader
    except ConfigError as error:
        raise RequestError(
            error.problem, found=error.found, fix=error.fix, param="grader"
        ) from None


def _check_entries(value: object) -> None:
    """Refuse lists and objects with many entries: to explain each error takes long.

    Raises:
        RequestError: A list or an object has more than `MAX_ENTRIES` entries.
    """
    if not isinstance(value, list | Mapping):
        return
    if len(value) > MAX_ENTRIES:
        found = f"A list or an object in it has {len(value):,} entries; the limit is {MAX_ENTRIES}."
        raise RequestError("the grader is too large.", found=found, param="grader")
    for each in value.values() if isinstance(value, Mapping) else value:
        _check_entries(each)


def _grader_settings(fields: Mapping[str, object], training: Training, folder: Path) -> Json:
    settings = {name: value for name, value in fields.items() if value is not None}
    kind, graders = settings.get("type"), settings.get("graders")
    if kind == "multi" and isinstance(graders, Mapping):
        settings["graders"] = {
            name: _grader_settings(grader, training, folder / str(number))
            if isinstance(grader, Mapping)
            else grader
            for number, (name, grader) in enumerate(graders.items())
        }
    if kind == "score_model":
        if settings.get("model") in training.models.base_names:
            settings["model"] = "base"
        if isinstance(sampling := settings.get("sampling_params"), Mapping):
            settings["sampling_params"] = {n: v for n, v in sampling.items() if v is not None}
    if kind == "python":
        settings.pop("image_tag", None)
        settings["source"] = _write_source(settings.get("source"), training, folder)
    return settings


def _write_source(text: Any, training: Training, folder: Path) -> str:
    """Write a grader's source to a file; return the reference of recipes, FILE:grade."""
    if not training.options.allow_code:
        raise RequestError(
            "this server does not run clients' code, such as graders of the type python.",
            fix="The operator can allow it: peftkit serve --run-graders.",
            status=403,
            code="code_not_allowed",
            param="grader",
        )
    try:
        ast.parse(text)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as problem:
        raise RequestError(
            f"the source of a grader is not valid Python: {problem}", param="grader"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    write_text(text, folder / "grader.py")
    return f"{folder / 'grader.py'}:grade"


def recipe_of(
    body: JobBody,
    seed: int,
    grader: Grader | None,
    training: Training,
    *,
    files: tuple[Path, Path | None],
    num_rows: int,
    start: Path | None,
    out: Path,
) -> tuple[Recipe, Json]:
    """Return a job's recipe, and its hyperparameters with "auto" resolved.

    Args:
        files: Training and validation rows.
        start: Adapter to start from; None: a new adapter.
        out: Folder of the run.

    Raises:
        ConfigError: The settings conflict.
    """
    width = getattr(training.bank.base.model.config.get_text_config(), "hidden_size", None)
    batches = (PROMPTS,) if body.kind == "reinforcement" else BATCHES
    defaults = defaults_for(num_rows, width=width, batches=batches)
    hyperparameters = _resolved(body, defaults)
    steps = math.ceil(num_rows / hyperparameters["batch_size"])
    save_every = math.ceil(steps / math.ceil(steps / SAVE_STEPS))
    rates = {"dpo": PREFERENCE_RATE * defaults.learning_rate, "reinforcement": REWARDS_RATE}
    rate = rates.get(body.kind, defaults.learning_rate)
    limit = context_length(training.bank.base.model.config)
    data = {"train": str(files[0]), "eval": str(files[1]) if files[1] else None}
    lora = {"rank": defaults.rank, "alpha": defaults.alpha, "targets": "all-linear"}
    settings = {
        "task": _task(body.kind, hyperparameters, grader, limit),
        "base": training.options.base.model_dump(),
        "method": {"start_from": str(start)} if start else {"type": "lora", **lora},
        "data": {
            **data,
            **({"max_length": None} if limit else {}),
            **({"packing": False} if body.kind == "supervised" else {}),
        },
        "train": {
            "output_dir": str(out),
            "epochs": float(hyperparameters["n_epochs"]),
            "batch_size": hyperparameters["batch_size"],
            "learning_rate": rate * hyperparameters["learning_rate_multiplier"],
            "schedule": "constant" if body.kind == "reinforcement" else "cosine",
            "seed": seed,
            "save_every": save_every,
            "eval_every": hyperparameters.get("eval_interval", save_every),
            "log_to": ["wandb"] if body.integrations else [],
        },
    }
    return from_dict(Recipe, settings, "the job"), hyperparameters


def _resolved(body: JobBody, defaults: Defaults) -> Json:
    """Return the hyperparameters with "auto" replaced by defaults."""
    auto: Json = {
        "n_epochs": defaults.epochs,
        "batch_size": defaults.batch_size,
        "learning_rate_multiplier": 1.0,
    }
    if body.kind == "dpo":
        auto["beta"] = 0.1
    if body.kind == "reinforcement":
        auto |= {"compute_multiplier": 1.0, "eval_samples": 1, "reasoning_effort": "default"}
    return auto | body.all_hyperparameters.set()


def _task(kind: str, hyperparameters: JsonMap, grader: Grader | None, limit: int | None) -> Json:
    if kind == "supervised":
        return {"type": "causal_lm"}
    if kind == "dpo":
        return {"type": "preference", "loss": "dpo", "beta": float(hyperparameters["beta"])}
    assert grader is not None
    return {
        "type": "grpo",
        "rewards": [{"use": "grader", "grader": grader.model_dump(mode="json")}],
        "answers": max(2, round(ANSWERS * hyperparameters["compute_multiplier"])),
        "max_new_tokens": min(ANSWER_TOKENS, (limit or 2 * ANSWER_TOKENS) // 2),
    }
