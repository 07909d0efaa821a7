"""Sampling fields of completion requests. Source: OpenAI's API reference; vLLM for min_p, top_k
and repetition_penalty."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from peftkit.inference.sampling import Penalties

MAX_BIASES = 1024
TokenId = Annotated[str, Field(pattern=r"^(0|[1-9]\d{0,8})$")]


class SamplingFields(BaseModel):
    """Settings of the sampling of each token; None: the server's default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)
        ]
        | None
    ) = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    @property
    def biases(self) -> dict[int, float]:
        """Numbers to add to the logits of tokens."""
        return {int(token): value for token, value in (self.logit_bias or {}).items() if value}

    @property
    def penalties(self) -> Penalties | None:
        """Changes to the logits; None: none."""
        penalties = Penalties(
            repetition=self.repetition_penalty or 1.0,
            frequency=self.frequency_penalty or 0.0,
            presence=self.presence_penalty or 0.0,
            bias=self.biases,
        )
        return None if penalties == Penalties() else penalties
