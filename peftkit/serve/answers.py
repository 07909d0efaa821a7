"""Answers in the form of OpenAI's interface: objects, chunks of a stream, errors."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from starlette.responses import JSONResponse

from peftkit.errors import PeftkitError
from peftkit.inference.sampling import Chosen
from peftkit.serve.requests import RequestError
from peftkit.serve.worker import Piece, Whole


def status_of(error: PeftkitError) -> int:
    """Return the HTTP status of an error: the client's fault is 400, ours 500."""
    if isinstance(error, RequestError):
        return error.status
    return 400 if error.exit_code == 2 else 500


def error_fields(error: PeftkitError) -> dict[str, Any]:
    """Return an error as clients read it."""
    status = status_of(error)
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {
        "error": {
            "message": str(error),
            "type": kind,
            "param": getattr(error, "param", None),
            "code": getattr(error, "code", None),
        }
    }


def refusal(error: PeftkitError) -> JSONResponse:
    """Return the response that tells an error."""
    status = status_of(error)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(status)
    return JSONResponse(error_fields(error), status, headers)


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How the answers to one request are written: as a chat, or as plain text.

    Attributes:
        num_top: How many of the likeliest tokens are told with each; None: no log-probabilities.
    """

    is_chat: bool
    model: str
    token_text: Callable[[int], str]
    num_top: int | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Whole], num_prompt: int) -> dict[str, Any]:
        """Return the response that is not streamed."""
        choices = [
            self._choice(
                index,
                "message",
                {"role": "assistant", "content": answer.text},
                answer.text,
                answer.reason,
                answer.chosen,
            )
            for index, answer in enumerate(answers)
        ]
        return self._object(choices, False) | {"usage": usage(answers, num_prompt)}

    def begin(self, index: int) -> dict[str, Any] | None:
        """Return the chunk before the first text: a chat says whose turn it is."""
        delta = {"role": "assistant", "content": ""}
        return (
            self._object([self._choice(index, "delta", delta, "")], True) if self.is_chat else None
        )

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the chunk with a piece of text."""
        delta = {"content": piece.text}
        choice = self._choice(index, "delta", delta, piece.text, None, piece.chosen)
        return self._object([choice], True)

    def end(self, index: int, reason: str) -> dict[str, Any]:
        """Return the chunk that ends an answer."""
        return self._object([self._choice(index, "delta", {}, "", reason)], True)

    def used(self, answers: Sequence[Whole], num_prompt: int) -> dict[str, Any]:
        """Return the chunk with the numbers of tokens."""
        return self._object([], True) | {"usage": usage(answers, num_prompt)}

    def _choice(
        self,
        index: int,
        place: str,
        turn: Mapping[str, str],
        text: str,
        reason: str | None = None,
        chosen: Sequence[Chosen] = (),
    ) -> dict[str, Any]:
        content = {place: dict(turn)} if self.is_chat else {"text": text}
        told = None if self.num_top is None or not chosen else self._log_probs(chosen)
        return {"index": index, **content, "logprobs": told, "finish_reason": reason}

    def _log_probs(self, chosen: Sequence[Chosen]) -> dict[str, Any]:
        if self.is_chat:
            content = [
                self._token(one.token, one.log_prob)
                | {"top_logprobs": [self._token(*top) for top in one.top[: self.num_top]]}
                for one in chosen
            ]
            return {"content": content, "refusal": None}
        texts = [self.token_text(one.token) for one in chosen]
        return {
            "tokens": texts,
            "token_logprobs": [one.log_prob for one in chosen],
            "top_logprobs": [
                {self.token_text(token): value for token, value in one.top[: self.num_top]}
                for one in chosen
            ],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)),
        }

    def _token(self, token: int, log_prob: float) -> dict[str, Any]:
        text = self.token_text(token)
        whole = "\N{REPLACEMENT CHARACTER}" not in text  # else a part of a character
        return {
            "token": text,
            "logprob": log_prob,
            "bytes": list(text.encode()) if whole else None,
        }

    def _object(self, choices: list[dict[str, Any]], is_chunk: bool) -> dict[str, Any]:
        prefix, kind = (
            ("chatcmpl", "chat.completion") if self.is_chat else ("cmpl", "text_completion")
        )
        return {
            "id": f"{prefix}-{self.id}",
            "object": f"{kind}.chunk" if is_chunk and self.is_chat else kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage(answers: Sequence[Whole], num_prompt: int) -> dict[str, int]:
    """Return the numbers of tokens of a request."""
    new = sum(answer.num_tokens for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": new,
        "total_tokens": num_prompt + new,
    }


def event(fields: Mapping[str, Any] | None) -> str:
    """Return a server-sent event; None is the last."""
    return f"data: {'[DONE]' if fields is None else json.dumps(fields, ensure_ascii=False)}\n\n"
