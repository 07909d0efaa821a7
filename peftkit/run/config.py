"""The recipe: everything that `peftkit train` needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, model_validator

from peftkit.base.config import BaseConfig
from peftkit.config import schema
from peftkit.config.schema import Config
from peftkit.data.load import DataConfig
from peftkit.errors import ConfigError
from peftkit.methods.table import AnyMethod
from peftkit.run import rules
from peftkit.settings import TrainConfig
from peftkit.tasks.table import TASKS, AnyTask


class Recipe(Config):
    """Everything that `peftkit train` needs to know."""

    task: AnyTask = Field("causal_lm", validate_default=True)
    """What the model is trained to do: a name, or a section with that name as its type."""
    base: BaseConfig
    """The frozen model."""
    method: AnyMethod = Field({"type": "lora"}, validate_default=True)
    """The adapter that is trained on it."""
    data: DataConfig
    """Rows to train on."""
    train: TrainConfig = TrainConfig()
    """How to train."""

    @model_validator(mode="after")
    def _settings_go_together(self) -> Recipe:
        self.method.check_quantize(self.base.quantize)
        rules.check(self)
        return self

    @property
    def packs_beside_virtual_tokens(self) -> bool:
        """Whether rows would share the virtual tokens before them."""
        packs = self.data.packing and "packing" in self.task.data_fields
        return self.method.acts_on_input and packs

    @model_validator(mode="after")
    def _data_suits_the_task(self) -> Recipe:
        read = {"train", "eval", *self.task.data_fields}
        for name, field in DataConfig.model_fields.items():
            if name not in read and getattr(self.data, name) != field.default:
                users = [task for task, kind in TASKS.items() if name in kind.data_fields]
                raise ConfigError(
                    f"data.{name} is not used by the task {self.task.type}.",
                    found=f"Tasks that use it: {', '.join(users)}.",
                    fix="Leave it out.",
                )
        return self


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe; of one that lies beside an adapter no functions are taken.

    Args:
        path: A YAML file.
        overrides: "section.key=value" each; they go through the same validation.

    Raises:
        ConfigError: Every error at once, each with its file and line.
    """
    found = schema.load(Recipe, Path(path), overrides)
    functions = [term.use for term in getattr(found.task, "rewards", ()) if term.is_function]
    is_named_here = any(text.startswith(("task.rewards=", "task=")) for text in overrides)
    if functions and not is_named_here and (Path(path).parent / "adapter_config.json").exists():
        raise ConfigError(
            f"the recipe {path} came with an adapter, and names reward functions: these are not "
            "run unasked.",
            found=", ".join(functions),
            fix=f"Name your own: --set 'task.rewards=[{{use: {functions[0]}}}]'",
        )
    return found
