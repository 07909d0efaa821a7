"""Responses of /v1/messages, whole or as events. Source: Anthropic's API reference."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from peftkit.errors import PeftkitError
from peftkit.files.strict_json import Json
from peftkit.inference.call_formats import Call
from peftkit_server.answers import Event, Reply
from peftkit_server.generation import Output, call_fields
from peftkit_server.refusals import public, status_of

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Type of an error by its HTTP status; Source: Anthropic's API reference, errors."""
DELTAS = {"text": "text_delta", "thinking": "thinking_delta"}
"""Type of the delta of each block with text."""


def message_error(error: PeftkitError) -> Json:
    """Return an error in Anthropic's format."""
    status = status_of(error)
    kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": public(error)}}


class MessagesReply(Reply):
    """The response to one request.

    Args:
        model: Name of the model in the request.
    """

    def __init__(self, model: str) -> None:
        self._blocks: list[Json] = []
        self._is_open, self._texts = False, [""]
        self._message: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def start(self, num_prompt: int) -> list[Event]:
        self._message["usage"] = {"input_tokens": num_prompt, "output_tokens": 0}
        return [{"type": "message_start", "message": dict(self._message)}]

    def take(self, index: int, output: Output) -> list[Event]:
        events: list[Event] = []
        if output.thought:
            events += self._extended("thinking", output.thought)
        if output.text:
            events += self._extended("text", output.text)
        for call in output.calls:
            events += [*self._closed(), *self._called(call)]
        if output.reason is not None:
            events += [*self._closed(), *self._ended(output)]
        return events

    def failed(self, error: PeftkitError) -> list[Event]:
        return [message_error(error)]

    def whole(self, answers: Sequence[Output], num_prompt: int) -> Json:
        self.start(num_prompt)
        self.take(0, *answers)
        return self._message

    def _event(self, kind: str, **fields: object) -> Event:
        """Return an event of the last block."""
        return {"type": f"content_block_{kind}", "index": len(self._blocks) - 1, **fields}

    def _extended(self, kind: str, text: str) -> list[Event]:
        """Add text to the open block of a type, or to a new one."""
        events: list[Event] = []
        if not self._is_open or self._blocks[-1]["type"] != kind:
            events = self._closed()
            signature = {"signature": ""} if kind == "thinking" else {}
            self._blocks.append({"type": kind, kind: "", **signature})
            self._is_open, self._texts = True, []
            events.append(self._event("start", content_block=dict(self._blocks[-1])))
        self._texts.append(text)
        return [*events, self._event("delta", delta={"type": DELTAS[kind], kind: text})]

    def _closed(self) -> list[Event]:
        """End the open block, if any."""
        if not self._is_open:
            return []
        block = self._blocks[-1]
        block[block["type"]] = "".join(self._texts)
        self._is_open = False
        return [self._event("stop")]

    def _called(self, call: Call) -> list[Event]:
        """Add a call: the server sends its input when it is complete."""
        fields = call_fields(call)
        block = {"type": "tool_use", "id": fields["id"], "name": call.name}
        self._blocks.append({**block, "input": call.arguments})
        text = fields["function"]["arguments"]
        return [
            self._event("start", content_block={**block, "input": {}}),
            self._event("delta", delta={"type": "input_json_delta", "partial_json": text}),
            self._event("stop"),
        ]

    def _ended(self, output: Output) -> list[Event]:
        reason = "max_tokens" if output.reason == "length" else "end_turn"
        if any(block["type"] == "tool_use" for block in self._blocks) and reason == "end_turn":
            reason = "tool_use"
        elif output.stop_text is not None:
            reason = "stop_sequence"
        usage = {**self._message["usage"], "output_tokens": output.num_tokens}
        delta = {"stop_reason": reason, "stop_sequence": output.stop_text}
        self._message |= {**delta, "content": self._blocks, "usage": usage}
        return [{"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]
