"""A recipe in small, and the two things that tests of configs do with one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, model_validator

from peftkit.config.lazy import LazyTable
from peftkit.config.schema import Config, load
from peftkit.errors import ConfigError

DATA = "data: {train: a.jsonl}\n"


class Ranked(Config):
    """What both kinds of method share."""

    rank: Annotated[int, Field(gt=0)] = 8
    """Columns of A."""
    alpha: int | float = 16
    targets: tuple[str, ...] | str = ("q", "v")
    pattern: dict[str, int] = Field(default={})
    init: Literal["default", "gaussian", "pissa"] = "default"


class Low(Ranked):
    """A low-rank update."""

    type: Literal["low"] = "low"


class Decomposed(Ranked):
    """A low-rank update with magnitudes."""

    type: Literal["decomposed"] = "decomposed"
    magnitude: bool = True


METHODS = LazyTable[Ranked](
    {"low": "tests.helpers.small_recipe:Low", "decomposed": "tests.helpers.small_recipe:Decomposed"}
)


class Rows(Config):
    """Where rows come from."""

    train: Path
    more: tuple[Path, ...] = ()
    packing: bool = True


class Loop(Config):
    """How to learn."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    epochs: Annotated[int, Field(ge=1, le=1000)] = 3
    batch_size: int = 8
    max_steps: Annotated[int, Field(gt=0)] | Literal["auto"] | None = None
    checkpointing: Literal["auto"] | bool = "auto"
    log_to: tuple[Literal["wandb", "trackio"], ...] = ()
    schedule: Annotated[str, Field(min_length=1)] = "cosine"

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Loop:
        if self.max_steps == 13:
            raise ConfigError("13 is no number of steps.", fix="Take 12.")
        return self


class Whole(Config):
    """A recipe in small."""

    task: Literal["causal_lm"] = "causal_lm"
    method: Annotated[Ranked, METHODS] = Low()
    data: Rows
    train: Loop = Loop()


def read(folder: Path, text: str | bytes, *overrides: str) -> Whole:
    """Load a text as `recipe.yaml`, with overrides."""
    path = folder / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(Whole, path, overrides)


def refuse(folder: Path, text: str | bytes, *overrides: str) -> list[str]:
    """Load what must be refused; return the error's lines after the first, the folder cut off."""
    with pytest.raises(ConfigError) as caught:
        read(folder, text, *overrides)
    assert type(caught.value) is ConfigError
    return str(caught.value).replace(f"{folder}/", "").replace("\n  ", "\n").split("\n")[1:]
