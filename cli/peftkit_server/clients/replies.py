"""Responses of one completion whose streams are sequences of named events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from peftkit.errors import PeftkitError, RunError
from peftkit_server.answers import OutputQueue, whole_answers
from peftkit_server.generation import Generation, Output

Event = dict[str, Any]
"""Fields of an event; `type` is also its name."""


class EventReply(ABC):
    """The response to one request, as a state machine that each output advances."""

    @abstractmethod
    def start(self, num_prompt: int) -> list[Event]:
        """Return the events before the first output.

        Args:
            num_prompt: Tokens of the prompt.
        """

    @abstractmethod
    def take(self, output: Output) -> list[Event]:
        """Return the events of new output; the last output has a reason."""

    @abstractmethod
    def failed(self, error: PeftkitError) -> list[Event]:
        """Return the events of an error after the stream has begun."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the response, after the last output."""

    async def respond(
        self,
        request: Request,
        generations: Sequence[Generation],
        queue: OutputQueue,
        num_prompt: int,
        *,
        is_streamed: bool,
    ) -> Response:
        """Return the HTTP response to a request with one completion."""
        if is_streamed:
            return StreamingResponse(
                self._streamed(generations, queue, num_prompt),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache"},
            )
        (answer,) = await whole_answers(request, generations, queue)
        self.start(num_prompt)
        self.take(answer)
        return JSONResponse(self.whole())

    async def _streamed(
        self, generations: Sequence[Generation], queue: OutputQueue, num_prompt: int
    ) -> AsyncIterator[str]:
        try:
            for event in self.start(num_prompt):
                yield _event_text(event)
            is_over = False
            while not is_over:
                _, output = await queue.get()
                if isinstance(output, Output):
                    events, is_over = self.take(output), output.reason is not None
                else:
                    error = output if isinstance(output, PeftkitError) else RunError(str(output))
                    events = self.failed(error)
                    is_over = True
                for event in events:
                    yield _event_text(event)
        finally:
            for generation in generations:
                generation.cancel()


def _event_text(event: Mapping[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"
