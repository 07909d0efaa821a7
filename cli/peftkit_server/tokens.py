"""Token ids in, token ids and log-probabilities out, for rollouts of RL trainers.

Source: `/inference/v1/generate` of vLLM.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from peftkit_server.answers import usage
from peftkit_server.generation import Output
from peftkit_server.refusals import RequestError
from peftkit_server.requests import Body

MAX_STOPS = 64
_SETTINGS = "sampling_params"


class TokenBody(Body):
    """A request to /inference/v1/generate, with `sampling_params` moved to the top level."""

    IGNORED = (
        *(*Body.IGNORED, "cache_salt", "priority", "request_id", "routed_experts_prompt_start"),
        *("skip_special_tokens", "spaces_between_special_tokens"),
    )
    token_ids: Annotated[list[int], Field(min_length=1, fail_fast=True)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    stream: Literal[False] | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_settings(cls, fields: Any) -> Any:
        settings = fields.get(_SETTINGS) if isinstance(fields, dict) else None
        if not isinstance(settings, dict):
            return fields
        if repeated := sorted({*settings} & {*fields}):
            raise ValueError(
                f"{', '.join(repeated)}: set twice, in {_SETTINGS} and at the top level"
            )
        non_null = {name: value for name, value in settings.items() if value is not None}
        return {**fields, **non_null, _SETTINGS: None}

    sampling_params: None = None


def vocabulary(model: Any) -> int:
    """Return a model's vocabulary size."""
    return int(model.config.get_text_config().vocab_size)


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """Return the bytes of a token's text, which may be part of a character; None: unknown."""
    text = str(tokenizer.decode([token]))
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text.encode()
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if match := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):  # byte fallback of SentencePiece
        return bytes([int(match[1], 16)])
    alphabet = _byte_alphabet()
    return bytes(alphabet[char] for char in piece) if {*piece} <= {*alphabet} else None


@cache
def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in byte-level vocabularies. Source: GPT-2's encoder."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}


def unknown_token(where: str, token: int, size: int, param: str | None = None) -> RequestError:
    """Return the error for a token outside a vocabulary of `size` tokens."""
    return RequestError(
        f"{where} contains the token {token}.",
        found=f"The vocabulary of the base has the tokens 0 to {size - 1:,}.",
        param=param,
    )


def token_answers(model: str, answers: Sequence[Output], num_prompt: int) -> dict[str, object]:
    """Return the response: token ids of each completion, with its end token, and log-probabilities.

    Log-probabilities are natural logarithms of softmax(logits / temperature), before top_p and
    top_k; for greedy completions, of softmax(logits).
    """
    return {
        "request_id": f"gen-{uuid.uuid4().hex}",
        "model": model,
        "created": int(time.time()),
        "choices": [_choice(index, answer) for index, answer in enumerate(answers)],
        "usage": usage(answers, num_prompt),
    }


def _choice(index: int, answer: Output) -> dict[str, object]:
    content = [
        {"token": f"token_id:{token.token}", "token_id": token.token, "logprob": token.log_prob}
        for token in answer.chosen
    ]
    return {
        "index": index,
        "token_ids": [token.token for token in answer.chosen],
        "finish_reason": answer.reason,
        "logprobs": {"content": content},
    }
