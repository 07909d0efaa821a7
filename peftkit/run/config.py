"""The recipe: everything that `peftkit train` needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import model_validator

from peftkit.base.load import BaseConfig
from peftkit.config import schema
from peftkit.config.schema import Config
from peftkit.data.load import DataConfig
from peftkit.errors import ConfigError
from peftkit.methods.lora import LoRA
from peftkit.methods.table import AnyMethod
from peftkit.tasks.causal_lm import CausalLMConfig
from peftkit.tasks.table import TASKS, AnyTask
from peftkit.train.config import SHARDED, TrainConfig


class Recipe(Config):
    """Everything that `peftkit train` needs to know."""

    task: AnyTask = CausalLMConfig()
    """What the model is trained to do: a word, or a section with that word as its type."""
    base: BaseConfig
    """The frozen model."""
    method: AnyMethod = LoRA()
    """What is trained beside it."""
    data: DataConfig
    """Rows to learn from."""
    train: TrainConfig = TrainConfig()
    """How to learn."""

    @model_validator(mode="after")
    def _start_suits_the_base(self) -> Recipe:
        self.method.check_quantize(self.base.quantize)
        return self

    @model_validator(mode="after")
    def _placement_suits_the_training(self) -> Recipe:
        kept = self.train.gradient_checkpointing is False
        if self.base.placement == "stream" and kept:
            raise ConfigError(
                "base.placement: stream recomputes activations.",
                found="train.gradient_checkpointing is false, which keeps every block's weights.",
                fix="Set it to auto or true, or base.placement: device.",
            )
        return self

    @model_validator(mode="after")
    def _data_suits_the_method(self) -> Recipe:
        if self.packs_beside_virtual_tokens and self.data.asks_to_pack:
            raise ConfigError(
                f"data.packing does not go with method.type: {self.method.type}.",
                found="Every row of text wants virtual tokens of its own before it.",
                fix="Set data.packing: false.",
            )
        if self.train.context_parallel > 1:
            self._check_context()
        if self.base.new_tokens and self.method.start_from:
            raise ConfigError(
                "base.new_tokens does not go with method.start_from.",
                found="The adapter that is gone on with has the rows that it has.",
                fix="Leave base.new_tokens out; tokens that the adapter knows are there.",
            )
        if self.base.new_tokens and self.method.token_rows:
            raise ConfigError(
                "base.new_tokens says which rows are trained.",
                found="method.token_rows does so too.",
                fix="Leave one of them out.",
            )
        return self

    def _check_context(self) -> None:
        """Make sure that the tokens of a row may lie on several processes."""
        found = ""
        if not self.task.takes_parts:
            tasks = ", ".join(task for task, kind in TASKS.items() if kind.takes_parts)
            found = f"The task is {self.task.type}; tasks that it goes with: {tasks}."
        elif self.method.acts_on_input:
            found = f"method.type: {self.method.type} puts virtual tokens before each row."
        elif self.data.asks_to_pack:
            found = "data.packing is true, and rows in parts hold one document each."
        if found:
            raise ConfigError(
                f"train.context_parallel: {self.train.context_parallel} does not go with this.",
                found=found,
                fix="Leave one of them out.",
            )

    @model_validator(mode="after")
    def _base_is_in_one_place(self) -> Recipe:
        if self.base.placement == "stream" and self.train.shard in SHARDED:
            raise ConfigError(
                f"base.placement: stream does not go with train.shard: {self.train.shard}.",
                found="Both say where the weights of blocks are.",
                fix="Leave one of them out; train.shard: offload keeps parts in main memory.",
            )
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

    @model_validator(mode="after")
    def _what_is_watched_is_there(self) -> Recipe:
        train = self.train
        if train.evaluates and not self.data.eval:
            raise ConfigError(
                f"train.{train.evaluates[0]} needs eval rows.",
                found="data.eval is not set.",
                fix="Set data.eval, or leave it out.",
            )
        if (train.sample_every or train.eval_generate) and not self.task.writes_text:
            raise ConfigError(
                f"the task {self.task.type} writes no text to look at.",
                found="train.sample_every or train.eval_generate is set.",
                fix="Leave it out.",
            )
        return self


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: A YAML file.
        overrides: "section.key=value" each; they go through the same validation.

    Raises:
        ConfigError: Every error at once, each with its file and line.
    """
    return schema.load(Recipe, Path(path), overrides)
