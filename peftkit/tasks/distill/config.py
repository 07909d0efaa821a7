"""A recipe's `task: {type: distill, ...}`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import nn

from peftkit.config.schema import Config
from peftkit.data.load import CHAT, DataConfig
from peftkit.errors import ConfigError
from peftkit.kernels.divergence import Divergence, DivergenceName
from peftkit.tasks.distill.prompt import TeacherPrompt, read_prompt
from peftkit.tasks.distill.task import Distill
from peftkit.tasks.protocol import TaskConfig


class TeacherConfig(Config):
    """Who is learnt from: the base without the adapter, another adapter on it, or another model."""

    prompt: str | None = None
    """A file that the teacher reads before a row: instructions as text (.md, .txt), with examples
    under the headings "## User" and "## Assistant"; or messages with role and content (.json,
    .jsonl)."""
    adapter: str | None = None
    """Folder of a LoRA on the same base; null: the base without an adapter."""
    model: str | None = None
    """Another model, with the same tokens: hub id, folder, .gguf file or short name."""

    @model_validator(mode="after")
    def _says_who(self) -> TeacherConfig:
        if self.adapter and self.model:
            raise ConfigError(
                "task.teacher names an adapter and a model.",
                found="A teacher is an adapter on the base, or another model.",
                fix="Leave one of them out; merge the adapter if it belongs to that model.",
            )
        if not (self.prompt or self.adapter or self.model):
            raise ConfigError(
                "task.teacher names nobody.",
                found="Without a prompt the base would teach itself.",
                fix="Name a prompt, an adapter or a model.",
            )
        return self


class DistillConfig(TaskConfig):
    """Distillation: the adapter learns to answer as the base does with a prompt in front."""

    task_type: ClassVar[str] = "CAUSAL_LM"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    command: ClassVar[str] = "peftkit chat {folder}"
    generates: ClassVar[bool] = True
    writes_text: ClassVar[bool] = True
    data_fields: ClassVar[frozenset[str]] = frozenset(
        {"format", "max_length", *CHAT, "max_dropped"}
    )

    type: Literal["distill"] = "distill"
    teacher: TeacherConfig
    """Who is learnt from."""
    answers: Literal["teacher", "data", "student"] = "teacher"
    """Whose answers the two are compared on. teacher: made before the first step, greedily, and
    kept in the run's folder; rows need none. data: the last one of each row. student: its own,
    made in each step as it is then (on-policy); kind: reverse is usual with it."""
    kind: DivergenceName = "forward"
    """What is learnt at each token of an answer, over the whole vocabulary: forward is
    KL(teacher, student), which learns all that the teacher may say; reverse is
    KL(student, teacher), which learns what it says most; jsd lies between."""
    beta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The teacher's weight in the mixture of jsd; null: 0.5."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Both sides' logits are divided by it."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """Longest answer that is made, in tokens."""

    @model_validator(mode="after")
    def _settings_are_used(self) -> DistillConfig:
        if self.beta is not None and self.kind != "jsd":
            raise ConfigError(
                f"task.beta is not used by task.kind: {self.kind}.",
                fix="Leave it out, or set task.kind: jsd.",
            )
        return self

    @property
    def divergence(self) -> Divergence:
        """What is computed at each token."""
        return Divergence(self.kind, self.beta or 0.5, self.temperature)

    def saved(self) -> dict[str, Any]:
        """What has learnt it answers prompts, and is measured by that; the teacher stays behind."""
        return {"type": "causal_lm"}

    @staticmethod
    def task(
        model: nn.Module, tokenizer: Any, config: DistillConfig, data: DataConfig, **more: Any
    ) -> Distill:
        file = config.teacher.prompt
        prompt = read_prompt(file) if file else TeacherPrompt()
        return Distill(model, tokenizer, config, data, prompt, **more)
