"""Answers in the format of OpenAI's interface: whole, as the events of a stream, or an error."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from peftkit.errors import OutputError, PeftkitError, RunError
from peftkit.inference.sampling import Chosen
from peftkit.serve.answer_calls import call_fields
from peftkit.serve.generation import Generation, Output
from peftkit.serve.requests import RequestError

OutputQueue = asyncio.Queue[tuple[int, Output | Exception]]
"""Pieces of the answers to one request, each with the index of its answer."""


def status_of(error: PeftkitError) -> int:
    """Return the HTTP status of an error: the client's fault is 400, ours 500, a full disk 503."""
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, OutputError):
        return 503
    return 400 if error.exit_code == 2 else 500


def error_fields(error: PeftkitError) -> dict[str, Any]:
    """Return an error in the format of clients."""
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
    """Return the response for an error."""
    status = status_of(error)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(status)
    return JSONResponse(error_fields(error), status, headers)


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """The format of the answers to one request: a chat, or plain text.

    Attributes:
        num_top: Number of likeliest tokens to report with each token; None: no log-probabilities.
        is_named: Whether the client named the tool to call; OpenAI's answers then end with "stop".
        num_calls: How many calls of each answer a stream has sent.
    """

    is_chat: bool
    model: str
    token_text: Callable[[int], str]
    num_top: int | None = None
    is_named: bool = False
    num_calls: dict[int, int] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Output], num_prompt: int) -> dict[str, Any]:
        """Return the response with whole answers."""
        choices = [
            self._choice(index, "message", message(answer), answer)
            for index, answer in enumerate(answers)
        ]
        return self._object(choices, False) | {"usage": usage(answers, num_prompt)}

    def begin(self, index: int) -> list[dict[str, Any]]:
        """Return the chunks before the first text: in a chat, the role."""
        delta = {"role": "assistant", "content": ""}
        choice = self._choice(index, "delta", delta, Output(""))
        return [self._object([choice], True)] if self.is_chat else []

    def piece(self, index: int, piece: Output) -> list[dict[str, Any]]:
        """Return the chunks of a piece: its text, and the end of the answer."""
        parts: list[tuple[dict[str, Any], Output]] = []
        if piece.text or piece.chosen:
            parts.append(({"content": piece.text}, Output(piece.text, piece.chosen)))
        if piece.thought:
            parts.append(({"reasoning_content": piece.thought}, Output("")))
        for call in piece.calls:
            number = self.num_calls[index] = self.num_calls.get(index, -1) + 1
            parts.append(({"tool_calls": [{"index": number, **call_fields(call)}]}, Output("")))
        if piece.reason is not None:
            parts.append(({}, Output("", (), piece.reason)))
        return [
            self._object([self._choice(index, "delta", delta, part)], True) for delta, part in parts
        ]

    def used(self, answers: Sequence[Output], num_prompt: int) -> dict[str, Any]:
        """Return the chunk with the token counts."""
        return self._object([], True) | {"usage": usage(answers, num_prompt)}

    def _choice(
        self, index: int, place: str, turn: Mapping[str, Any], piece: Output
    ) -> dict[str, Any]:
        content = {place: dict(turn)} if self.is_chat else {"text": piece.text}
        has_log_probs = self.num_top is not None and piece.chosen
        log_probs = self._log_probs(piece.chosen) if has_log_probs else None
        reason: str | None = piece.reason
        if reason == "stop" and not self.is_named and (piece.calls or index in self.num_calls):
            reason = "tool_calls"
        return {"index": index, **content, "logprobs": log_probs, "finish_reason": reason}

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
        is_whole = "\N{REPLACEMENT CHARACTER}" not in text  # else part of a character
        return {
            "token": text,
            "logprob": log_prob,
            "bytes": list(text.encode()) if is_whole else None,
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


def message(answer: Output) -> dict[str, Any]:
    """Return a whole answer as a message; its content is null where it only calls."""
    fields: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.thought:
        fields["reasoning_content"] = answer.thought
    if answer.calls:
        fields["content"] = answer.text or None
        fields["tool_calls"] = [call_fields(call) for call in answer.calls]
    return fields


def usage(answers: Sequence[Output], num_prompt: int) -> dict[str, int]:
    """Return the token counts of a request."""
    new = sum(answer.num_tokens for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": new,
        "total_tokens": num_prompt + new,
    }


def event(fields: Mapping[str, Any] | None) -> str:
    """Return a server-sent event; None is the last."""
    return f"data: {'[DONE]' if fields is None else json.dumps(fields, ensure_ascii=False)}\n\n"


async def whole_answers(
    request: Request, jobs: Sequence[Generation], queue: OutputQueue
) -> list[Output]:
    """Return the whole answers, in order; cancel the jobs if the client disconnects."""
    pieces: list[list[Output]] = [[] for _ in jobs]
    gone = asyncio.create_task(_gone(request))
    try:
        while not all(of and of[-1].reason for of in pieces):
            coming = asyncio.create_task(queue.get())
            await asyncio.wait((coming, gone), return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                raise RequestError("the client has gone.", status=499)
            index, piece = coming.result()
            if isinstance(piece, Exception):
                raise piece
            pieces[index].append(piece)
    finally:
        gone.cancel()
        for job in jobs:
            job.cancel()
    return [
        replace(
            of[-1],
            text="".join(piece.text for piece in of),
            thought="".join(piece.thought for piece in of),
            calls=tuple(call for piece in of for call in piece.calls),
            chosen=tuple(one for piece in of for one in piece.chosen),
        )
        for of in pieces
    ]


async def _gone(request: Request) -> None:
    """Return when the client has disconnected; its body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def streamed(
    form: ReplyFormat,
    jobs: Sequence[Generation],
    queue: OutputQueue,
    num_prompt: int,
    wants_usage: bool,
) -> AsyncIterator[str]:
    """Yield the events of a streamed answer; an error after the first comes as an event too."""
    ended: list[Output] = []
    try:
        for chunk in (chunk for index in range(len(jobs)) for chunk in form.begin(index)):
            yield event(chunk)
        while len(ended) < len(jobs):
            index, piece = await queue.get()
            if isinstance(piece, Exception):
                error = piece if isinstance(piece, PeftkitError) else RunError(str(piece))
                yield event(error_fields(error))
                return
            for chunk in form.piece(index, piece):
                yield event(chunk)
            ended += [piece] if piece.reason else []
        if wants_usage:
            yield event(form.used(ended, num_prompt))
        yield event(None)
    finally:
        for job in jobs:
            job.cancel()
