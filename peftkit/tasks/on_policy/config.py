"""A recipe's `task: {type: grpo, ...}`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from peftkit.data.load import CHAT
from peftkit.tasks.on_policy.losses import CLIP, LossName
from peftkit.tasks.on_policy.rewards import RewardTerm
from peftkit.tasks.on_policy.task import GRPO
from peftkit.tasks.protocol import TaskConfig


class GRPOConfig(TaskConfig):
    """Learning from rewards for the model's own answers: GRPO and its kin."""

    task_type: ClassVar[str] = "CAUSAL_LM"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    command: ClassVar[str] = "peftkit chat {folder}"
    generates: ClassVar[bool] = True
    data_fields: ClassVar[frozenset[str]] = frozenset({"max_length", *CHAT, "max_dropped"})

    task: ClassVar = GRPO

    type: Literal["grpo"] = "grpo"
    rewards: Annotated[tuple[RewardTerm, ...], Field(min_length=1)]
    """What an answer is worth: the weighted sum of these."""
    loss: LossName = "dapo"
    """How answers are learnt from: see peftkit/tasks/on_policy/losses.py."""
    answers: Annotated[int, Field(ge=2)] = 8
    """Answers to each prompt, which are compared with each other."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """The most tokens of an answer."""
    updates: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps with the same answers."""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the base, or from method.start_from."""
    clip_low: Annotated[float, Field(ge=0)] | None = None
    """How far a token's ratio counts below 1; null: 0.2 (gspo: 3e-4)."""
    clip_high: Annotated[float, Field(ge=0)] | None = None
    """And above 1; null: 0.28 of dapo, 4e-4 of gspo, else 0.2; of cispo the largest ratio, 5."""
    normalise: bool | None = None
    """Divide by the standard deviation of the group's rewards; null: true but for dr_grpo, rloo."""
    mask_cut: bool = True
    """Do not learn from answers that reach max_new_tokens; their rewards count all the same."""
    stop_entropy: Annotated[float, Field(ge=0)] | None = None
    """End the run when the model's entropy (nats a token, see the steps' figures) falls below this:
    what is sure tries nothing new; null: never. 0.05 is a usual end."""
    reward_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that one call of a reward function may take."""

    @property
    def texts_per_row(self) -> int:
        """A prompt with all of its answers."""
        return self.answers

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the model with what it was."""
        return self.kl > 0

    @property
    def clips(self) -> tuple[float, float]:
        """The bounds of the ratio, as set or the loss's own."""
        low, high = CLIP[self.loss]
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    @property
    def normalises(self) -> bool:
        """Whether advantages are divided by the group's deviation."""
        return self.loss not in ("dr_grpo", "rloo") if self.normalise is None else self.normalise
