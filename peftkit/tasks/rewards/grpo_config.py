"""The settings of GRPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from peftkit.config.schema import Location
from peftkit.errors import ConfigError
from peftkit.settings import CHAT
from peftkit.tasks.rewards.grpo import GRPO
from peftkit.tasks.rewards.grpo_losses import CLIP, LossName
from peftkit.tasks.rewards.reward_functions import RewardTerm
from peftkit.tasks.tokens import AnswerConfig
from peftkit.tasks.user_code import PATTERN


class GRPOConfig(AnswerConfig):
    """Reinforcement learning on rewards of sampled completions: GRPO and variants."""

    writes_text: ClassVar[bool] = False
    scores_documents: ClassVar[bool] = True
    data_fields: ClassVar[frozenset[str]] = frozenset({"max_length", *CHAT})

    task: ClassVar = GRPO

    type: Literal["grpo"] = "grpo"
    rewards: tuple[RewardTerm, ...] = ()
    """Reward functions. The reward of an answer is their weighted sum, plus the result of the
    environment's get_reward()."""
    tools: tuple[Annotated[Location, Field(pattern=PATTERN)], ...] = ()
    """Functions that the model may call in its answers, FILE.py:FUNCTION, sync or async, with types
    and a docstring."""
    environment: Annotated[Location, Field(pattern=PATTERN)] | None = None
    """A class with one instance for each answer, FILE.py:CLASS. reset(**row) starts an answer, the
    public methods are tools, and get_reward() returns the reward."""
    max_turns: Annotated[int, Field(ge=1)] = 8
    """Maximum turns of an answer; calls in the last turn are ignored."""
    tool_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Maximum seconds of a call; a longer call returns an error to the model."""
    loss: LossName = "dapo"
    """The policy-gradient loss; see grpo_losses.py."""
    answers: Annotated[int, Field(ge=2)] = 8
    """Number of answers to each prompt: the size of a group."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """Maximum tokens of an answer; with tools, of all its turns and the replies of tools."""
    updates: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps on the same answers."""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the base, or from method.start_from."""
    clip_low: Annotated[float, Field(ge=0)] | None = None
    """Clip range of the ratio below 1; null: 0.2 (gspo, luspo: 3e-4)."""
    clip_high: Annotated[float, Field(ge=0)] | None = None
    """Clip range above 1; null: 0.28 for dapo, 4e-4 for gspo and luspo, otherwise 0.2. For cispo it
    is the largest ratio, 5. sapo and vespo do not clip."""
    normalise: bool | None = None
    """Divide by the standard deviation of the group's rewards; null: true except for dr_grpo, rloo.
    """
    mask_cut: bool = True
    """Do not train on answers that reach max_new_tokens; their rewards count in the group."""
    stop_entropy: Annotated[float, Field(ge=0)] | None = None
    """End the run when the model's entropy (nats per token) falls below this value, because the
    model no longer explores; null: never. A usual value is 0.05."""
    reward_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Maximum seconds of one call of a reward function."""

    @model_validator(mode="after")
    def _has_rewards(self) -> GRPOConfig:
        if not self.rewards and self.environment is None:
            raise ConfigError(
                "No reward is set for answers.",
                fix="Set task.rewards, or task.environment, a class with get_reward().",
            )
        return self

    @property
    def code(self) -> Mapping[str, Sequence[str]]:
        return {
            "rewards": [use for term in self.rewards for use in term.code],
            "tools": self.tools,
            "environment": [self.environment] if self.environment else [],
        }

    def without_tools(self) -> GRPOConfig:
        if not self.has_tools:
            return self
        return self.model_copy(update={"tools": (), "environment": None})

    @property
    def has_tools(self) -> bool:
        """Whether the model may call functions in its answers."""
        return bool(self.tools) or self.environment is not None

    @property
    def texts_per_row(self) -> int:
        """Number of answers to a prompt."""
        return self.answers

    @property
    def needs_reference(self) -> bool:
        return self.kl > 0

    @property
    def clips(self) -> tuple[float, float]:
        """Clip bounds of the ratio, with the loss's defaults."""
        low, high = CLIP[self.loss]
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    @property
    def normalises(self) -> bool:
        """Whether to divide advantages by the standard deviation of the group."""
        return self.loss not in ("dr_grpo", "rloo") if self.normalise is None else self.normalise
