"""Responses in the format of OpenAI's API: whole, streamed as events, or an error."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from starlette.responses import Response, StreamingResponse

from peftkit.errors import PeftkitError, RunError
from peftkit.files.strict_json import Json
from peftkit.inference.sampling import Chosen
from peftkit_server.generation import Generation, Output, call_fields
from peftkit_server.refusals import error_fields

OutputQueue = asyncio.Queue[tuple[int, Output | Exception]]
"""Outputs of the completions of one request, each with the index of its completion."""
Event = Json | None
"""A server-sent event; `type`, if any, is also its name. None: the end of OpenAI's streams."""


class Reply(ABC):
    """The response to one request, as a state machine that each output advances.

    Attributes:
        response: The response of one completion, whole after its last output.
    """

    response: Json

    @abstractmethod
    def start(self, num_prompt: int) -> Sequence[Event]:
        """Return the events before the first output.

        Args:
            num_prompt: Tokens of all prompts.
        """

    @abstractmethod
    def take(self, index: int, output: Output) -> Sequence[Event]:
        """Return the events of new output of a completion; its last output has a reason."""

    @abstractmethod
    def failed(self, error: PeftkitError) -> Sequence[Event]:
        """Return the events of an error after the stream has begun."""

    def whole(self, answers: Sequence[Output], num_prompt: int) -> Json:
        """Return the response with whole completions."""
        self.start(num_prompt)
        self.take(0, *answers)
        return self.response

    def streamed(
        self, generations: Sequence[Generation], queue: OutputQueue, num_prompt: int
    ) -> Response:
        """Return the events as they come; errors after the first one are events, too."""
        return StreamingResponse(
            self._events(generations, queue, num_prompt),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )

    async def _events(
        self, generations: Sequence[Generation], queue: OutputQueue, num_prompt: int
    ) -> AsyncIterator[str]:
        num_running = len(generations)
        try:
            for event in self.start(num_prompt):
                yield _text(event)
            while num_running:
                index, output = await queue.get()
                if isinstance(output, Output):
                    events = self.take(index, output)
                    num_running -= output.reason is not None
                else:
                    error = output if isinstance(output, PeftkitError) else RunError(str(output))
                    events, num_running = self.failed(error), 0
                for event in events:
                    yield _text(event)
        finally:
            for generation in generations:
                generation.cancel()


def _text(event: Event) -> str:
    if event is None:
        return "data: [DONE]\n\n"
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event, ensure_ascii=False)}\n\n"


@dataclass
class OpenAIReply(Reply):
    """Chat completions, or text completions.

    Attributes:
        num_choices: Number of completions.
        token_bytes: Returns the UTF-8 bytes of a token, perhaps part of a character; None: unknown.
        fingerprint: Identifies the base, as `system_fingerprint`.
        wants_usage: Whether a stream ends with token counts; its other chunks have null.
        num_top: Number of top tokens to report with each token; None: no log-probabilities.
        is_named: Whether the client named the tool to call; the finish reason is then "stop".
        num_calls: Number of calls of each completion that a stream has sent.
        ended: Last outputs of the completions that have ended.
    """

    is_chat: bool
    model: str
    num_choices: int
    token_text: Callable[[int], str]
    token_bytes: Callable[[int], bytes | None]
    fingerprint: str
    wants_usage: bool = False
    num_top: int | None = None
    is_named: bool = False
    num_calls: dict[int, int] = field(default_factory=dict)
    ended: list[Output] = field(default_factory=list)
    num_prompt: int = 0
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Output], num_prompt: int) -> Json:
        choices = [
            self._choice(index, "message", message(answer), answer)
            for index, answer in enumerate(answers)
        ]
        return self._object(choices, False) | {"usage": usage(answers, num_prompt)}

    def start(self, num_prompt: int) -> list[Event]:
        self.num_prompt, delta = num_prompt, {"role": "assistant", "content": ""}
        choices = (self._choice(n, "delta", delta, Output("")) for n in range(self.num_choices))
        return [self._object([choice], True) for choice in choices if self.is_chat]

    def take(self, index: int, output: Output) -> list[Event]:
        deltas: list[tuple[Json, Output]] = []
        if output.text or output.chosen:
            deltas.append(({"content": output.text}, Output(output.text, output.chosen)))
        if output.thought:
            deltas.append(({"reasoning_content": output.thought}, Output("")))
        for call in output.calls:
            number = self.num_calls[index] = self.num_calls.get(index, -1) + 1
            deltas.append(({"tool_calls": [{"index": number, **call_fields(call)}]}, Output("")))
        if output.reason is not None:
            deltas.append(({}, Output("", (), output.reason)))
            self.ended.append(output)
        events: list[Event] = [
            self._object([self._choice(index, "delta", *delta)], True) for delta in deltas
        ]
        if len(self.ended) == self.num_choices:
            if self.wants_usage:
                counts = usage(self.ended, self.num_prompt)
                events.append(self._object([], True) | {"usage": counts})
            events.append(None)
        return events

    def failed(self, error: PeftkitError) -> list[Event]:
        return [error_fields(error)]

    def _choice(
        self, index: int, key: str, turn: Mapping[str, object], output: Output
    ) -> dict[str, object]:
        content = {key: dict(turn)} if self.is_chat else {"text": output.text}
        has_log_probs = self.num_top is not None and output.chosen
        log_probs = self._log_probs(output.chosen) if has_log_probs else None
        reason: str | None = output.reason
        if reason == "stop" and not self.is_named and (output.calls or index in self.num_calls):
            reason = "tool_calls"
        return {"index": index, **content, "logprobs": log_probs, "finish_reason": reason}

    def _log_probs(self, chosen: Sequence[Chosen]) -> dict[str, object]:
        if self.is_chat:
            content = [
                self._token(token.token, token.log_prob)
                | {"top_logprobs": [self._token(*top) for top in token.top[: self.num_top]]}
                for token in chosen
            ]
            return {"content": content, "refusal": None}
        texts = [self.token_text(token.token) for token in chosen]
        return {
            "tokens": texts,
            "token_logprobs": [token.log_prob for token in chosen],
            "top_logprobs": [
                {self.token_text(top): value for top, value in token.top[: self.num_top]}
                for token in chosen
            ],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)),
        }

    def _token(self, token: int, log_prob: float) -> dict[str, object]:
        data = self.token_bytes(token)
        return {
            "token": self.token_text(token),
            "logprob": log_prob,
            "bytes": None if data is None else [*data],
        }

    def _object(self, choices: list[dict[str, object]], is_chunk: bool) -> dict[str, object]:
        prefix, kind = (
            ("chatcmpl", "chat.completion") if self.is_chat else ("cmpl", "text_completion")
        )
        return {
            "id": f"{prefix}-{self.id}",
            "object": f"{kind}.chunk" if is_chunk and self.is_chat else kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "system_fingerprint": self.fingerprint,
            **({"usage": None} if is_chunk and self.wants_usage else {}),
        }


def message(answer: Output) -> Json:
    """Return a whole completion as a message; its content is null if it has calls and no text."""
    fields: Json = {"role": "assistant", "content": answer.text}
    if answer.thought:
        fields["reasoning_content"] = answer.thought
    if answer.calls:
        fields["content"] = answer.text or None
        fields["tool_calls"] = [call_fields(call) for call in answer.calls]
    return fields


def usage(answers: Sequence[Output], num_prompt: int) -> dict[str, int]:
    """Return the token counts of a request."""
    new = sum(answer.num_tokens for answer in answers)
    return {"prompt_tokens": num_prompt, "completion_tokens": new, "total_tokens": num_prompt + new}
