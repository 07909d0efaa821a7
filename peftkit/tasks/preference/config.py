"""A recipe's `task: {type: preference, ...}`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import nn

from peftkit.errors import ConfigError
from peftkit.settings import CHAT, DataConfig
from peftkit.tasks.preference.kto import KTO
from peftkit.tasks.preference.losses import DEFAULTS, WITH_REFERENCE, LossName
from peftkit.tasks.preference.task import Preference, PreferencePairs
from peftkit.tasks.token_task import AnswerConfig

OPTIONAL = ("label_smoothing", "gamma", "nll_weight")


class PreferenceConfig(AnswerConfig):
    """Preferences: of two answers the better one, or answers that are wanted or not."""

    num_texts: ClassVar[int] = 2
    data_fields: ClassVar[frozenset[str]] = frozenset({"max_length", *CHAT, "max_dropped"})

    type: Literal["preference"] = "preference"
    loss: LossName = "dpo"
    """What is learnt of a comparison; kto takes rows with a label, all others pairs."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How much a difference of log-probabilities counts."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | None = None
    """Share of pairs that are the wrong way round: of robust, cpo and simpo; null: 0."""
    gamma: Annotated[float, Field(ge=0)] | None = None
    """Margin that simpo asks for; null: 0.5."""
    nll_weight: Annotated[float, Field(ge=0)] | None = None
    """Weight of the chosen answer's own loss; null: 1 of orpo and cpo, 0 of the others."""

    @model_validator(mode="after")
    def _loss_uses_what_is_set(self) -> PreferenceConfig:
        for name in OPTIONAL:
            if getattr(self, name) is not None and name not in DEFAULTS[self.loss]:
                users = [loss for loss, takes in DEFAULTS.items() if name in takes]
                raise ConfigError(
                    f"task.{name} is not used by the loss {self.loss}.",
                    found=f"Losses that use it: {', '.join(users)}.",
                    fix="Leave it out.",
                )
        if self.loss == "robust" and not self.label_smoothing:
            raise ConfigError(
                "the loss robust needs task.label_smoothing above 0.",
                found="With 0 it is the loss dpo.",
                fix="Set the share of pairs that are the wrong way round, for example 0.1.",
            )
        return self

    @property
    def needs_reference(self) -> bool:
        return self.loss in WITH_REFERENCE

    def of(self, name: str) -> float:
        """Return an optional setting: what is set, else the loss's default, 0 if it has none."""
        asked = getattr(self, name)
        return float(DEFAULTS[self.loss].get(name, 0.0) if asked is None else asked)

    @staticmethod
    def task(
        model: nn.Module, tokenizer: Any, config: PreferenceConfig, data: DataConfig, **more: Any
    ) -> Preference:
        kind = KTO if config.loss == "kto" else PreferencePairs
        return kind(model, tokenizer, config, data, **more)
