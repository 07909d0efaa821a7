"""The recipe: all settings of `peftkit train`, and the conflicts between them.

`check_settings` runs when a recipe is parsed, and again before a run, with the launched processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from peftkit.config import schema
from peftkit.config.schema import Config
from peftkit.errors import ConfigError
from peftkit.methods.table import METHODS, AnyMethod
from peftkit.settings import EVERY_TASK, BaseConfig, DataConfig, TrainConfig
from peftkit.tasks.table import TASKS, AnyTask


class Recipe(Config):
    """All settings of `peftkit train`."""

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
        check_settings(self)
        read = {*EVERY_TASK, *self.task.data_fields}
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
    """Read a recipe; refuse functions named in a recipe that is stored with an adapter.

    Args:
        path: A YAML file.
        overrides: "section.key=value" each; they go through the same validation.

    Raises:
        ConfigError: Lists all errors, each with its file and line.
    """
    recipe = schema.load(Recipe, Path(path), overrides)
    code = {
        f"task.{setting}": uses
        for setting, uses in recipe.task.code.items()
        if uses and not any(text.startswith((f"task.{setting}=", "task=")) for text in overrides)
    }
    if code and (Path(path).parent / "adapter_config.json").exists():
        raise ConfigError(
            f"the recipe {path} came with an adapter and names functions, which are not run "
            "without your consent.",
            found="; ".join(f"{setting}: {', '.join(uses)}" for setting, uses in code.items()),
            fix="Name the functions: " + " ".join(f"--set '{setting}=...'" for setting in code),
        )
    return recipe


LAUNCH = "accelerate launch --num_processes {} -m peftkit_cli train RECIPE.yaml"
LEAVE_ONE = "Leave one of them out."


def check_settings(recipe: object, processes: int | None = None) -> None:
    """Check that the settings of a recipe go together.

    Args:
        processes: Number of launched processes; None if the recipe is only read.

    Raises:
        ConfigError: Names the first conflict.
    """
    conflicts = chain(
        _of_base(recipe), _of_data(recipe), _of_evaluation(recipe), _of_processes(recipe, processes)
    )
    for setting, reason, fix in conflicts:
        raise ConfigError(setting, found=reason, fix=fix)


Conflict = tuple[str, str, str]
"""The setting, why it does not work, what to do."""


def _of_base(r: Any) -> Iterator[Conflict]:
    if r.base.placement == "stream" and r.train.gradient_checkpointing is False:
        yield (
            "base.placement: stream recomputes activations.",
            "train.gradient_checkpointing is false, which keeps every block's weights.",
            "Set it to auto or true, or base.placement: device.",
        )
    if r.base.placement == "stream" and r.train.shards_base:
        yield (
            f"base.placement: stream does not go with train.shard: {r.train.shard}.",
            "Both place the weights of blocks.",
            "Leave one of them out; train.shard: offload keeps the shards in main memory.",
        )
    setting = f"base.quantize_embeddings: {r.base.quantize_embeddings} is not possible here."
    if r.base.quantize_embeddings != "none" and r.base.quantize == "none":
        yield setting, "base.quantize is none.", LEAVE_ONE
    elif r.base.quantize_embeddings != "none" and (r.base.new_tokens or r.method.token_rows):
        yield setting, "base.new_tokens or method.token_rows trains rows of it.", LEAVE_ONE
    if r.base.new_tokens and r.method.start_from:
        yield (
            "base.new_tokens does not go with method.start_from.",
            "The rows of new tokens are fixed by the adapter that the run continues.",
            "Leave base.new_tokens out; the adapter adds its tokens.",
        )
    if r.base.new_tokens and r.method.token_rows:
        yield (
            "base.new_tokens selects the token rows to train.",
            "method.token_rows selects them too.",
            LEAVE_ONE,
        )


def _of_data(r: Any) -> Iterator[Conflict]:
    packs = r.data.packing_is_explicit and "packing" in r.task.data_fields
    if packs and r.method.acts_on_input:
        yield (
            f"data.packing does not go with method.type: {r.method.type}.",
            "The method prepends virtual tokens to each row of text.",
            "Set data.packing: false.",
        )
    if r.method.reads_rows and r.task.makes_answers:
        yield (
            f"{r.method.reads_rows} reads the training rows.",
            f"{r.task.makes_answers}, which generates their answers later.",
            "Set another method.init, or task.answers: data.",
        )


def _of_evaluation(r: Any) -> Iterator[Conflict]:
    if r.train.evaluates and not r.data.eval:
        setting = f"train.{r.train.evaluates[0]} needs eval rows."
        yield setting, "data.eval is not set.", "Set data.eval, or leave it out."
    if r.train.drift and (r.task.task_type != "CAUSAL_LM" and not r.task.prompt_media):
        reason = f"The task {r.task.type} trains no causal language model."
        yield "train.drift has no answers or text to measure on.", reason, "Leave it out."
    generates = r.train.sample_every or r.train.eval_generate
    reason = "train.sample_every or train.eval_generate is set."
    if generates and not r.task.writes_text:
        yield f"the task {r.task.type} generates no text.", reason, "Leave it out."


def _of_processes(r: Any, processes: int | None) -> Iterator[Conflict]:
    shards = r.train.shards_base
    if shards and not r.method.wraps_linear_layers:
        methods = [name for name, kind in METHODS.items() if kind.wraps_linear_layers]
        yield (
            f"train.shard: {r.train.shard} does not go with method.type: {r.method.type}",
            f"Methods that support it: {', '.join(methods)}.",
            "Set train.shard: none, or use one of these.",
        )
    if shards and processes == 1:
        setting = f"train.shard: {r.train.shard} shards the base over several processes"
        yield setting, "There is one process.", LAUNCH.format(2)
