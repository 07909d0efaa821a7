"""Tokens in, tokens and their log-probabilities out, as programs that train by rewards ask for it.

Source: `/inference/v1/generate` of vLLM.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from peftkit.serve.answers import usage
from peftkit.serve.generation import Output
from peftkit.serve.requests import Body, RequestError

MAX_STOPS = 64
_SETTINGS = "sampling_params"


class TokenBody(Body):
    """A request to /inference/v1/generate: what stands in `sampling_params` are its own fields."""

    token_ids: Annotated[list[int], Field(min_length=1, fail_fast=True)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    stream: Literal[False] | None = None
    cache_salt: Any = None
    priority: Any = None
    request_id: Any = None
    routed_experts_prompt_start: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None

    @model_validator(mode="before")
    @classmethod
    def _with_settings(cls, fields: Any) -> Any:
        settings = fields.get(_SETTINGS) if isinstance(fields, dict) else None
        if not isinstance(settings, dict):
            return fields
        if twice := sorted({*settings} & {*fields}):
            raise ValueError(f"{', '.join(twice)}: given twice, in {_SETTINGS} and beside it")
        given = {name: value for name, value in settings.items() if value is not None}
        return {**fields, **given, _SETTINGS: None}

    sampling_params: None = None

    @property
    def num_top(self) -> int:
        """Each token's own log-probability is always told."""
        return 0

    @property
    def keeps_end(self) -> bool:
        return True

    @property
    def stop_ids(self) -> Sequence[int]:
        return self.stop_token_ids or ()

    @property
    def num_likeliest(self) -> int:
        return max(self.top_k, 0)


def vocabulary(model: Any) -> int:
    """Return how many tokens a model has."""
    return int(model.config.get_text_config().vocab_size)


def unknown_token(where: str, token: int, size: int, param: str | None = None) -> RequestError:
    """Return the error for a token that a model of so many does not have."""
    return RequestError(
        f"{where} holds the token {token}.",
        found=f"The base has the tokens 0 to {size - 1:,}.",
        param=param,
    )


def token_answers(model: str, answers: Sequence[Output], num_prompt: int) -> dict[str, Any]:
    """Return the response: each answer's token ids with its end token, and their log-probabilities.

    Log-probabilities are natural logarithms by softmax(logits / temperature), before top_p and
    top_k; of greedy answers by softmax(logits).
    """
    return {
        "request_id": f"gen-{uuid.uuid4().hex}",
        "model": model,
        "created": int(time.time()),
        "choices": [_choice(index, answer) for index, answer in enumerate(answers)],
        "usage": usage(answers, num_prompt),
    }


def _choice(index: int, answer: Output) -> dict[str, Any]:
    content = [
        {"token": f"token_id:{one.token}", "token_id": one.token, "logprob": one.log_prob}
        for one in answer.chosen
    ]
    return {
        "index": index,
        "token_ids": [one.token for one in answer.chosen],
        "finish_reason": answer.reason,
        "logprobs": {"content": content},
    }
