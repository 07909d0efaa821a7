"""Responses of /v1/responses, whole or as events. Source: OpenAI's API reference."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from peftkit.errors import PeftkitError
from peftkit.files.strict_json import Json
from peftkit_server.answers import Event, Reply
from peftkit_server.clients.responses_body import ResponsesBody
from peftkit_server.generation import Output, call_fields
from peftkit_server.refusals import error_fields

PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Type of the content of each item that has text; its events have the same name."""


class ResponsesReply(Reply):
    """The response to one request.

    Args:
        keep: Called at the end with the response and its message in the format of a chat.
    """

    def __init__(
        self, body: ResponsesBody, keep: Callable[[dict[str, object], dict[str, object]], None]
    ) -> None:
        self._keep = keep
        self._num_events, self._num_prompt = 0, 0
        self._item: Json | None = None
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Json] = []
        self._output: list[Json] = []
        echoed = body.model_dump(
            include={
                *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "model"),
                *("previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier"),
                *("temperature", "top_p", "user"),
            }
        )
        text_format = body.text.format if body.text else None
        self.response = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            **echoed,
            "metadata": body.metadata or {},
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "store": body.store is not False,
            "text": {
                "format": {"type": "text"}
                if text_format is None
                else text_format.model_dump(exclude_none=True, by_alias=True)
            },
            "tool_choice": "auto" if body.tool_choice is None else _plain(body.tool_choice),
            "tools": [_plain(tool) for tool in body.tools or ()],
            "truncation": "disabled",
            "usage": None,
        }

    def start(self, num_prompt: int) -> list[Event]:
        self._num_prompt = num_prompt
        return [self._state("created"), self._state("in_progress")]

    def take(self, index: int, output: Output) -> list[Event]:
        events: list[Event] = []
        if output.thought:
            events += self._extended("reasoning", output.thought, self._thoughts)
        if output.text:
            events += self._extended("message", output.text, self._texts)
        for call in output.calls:
            events += [*self._closed(), *self._called(call_fields(call))]
        if output.reason is not None:
            if not self._output and self._item is None:
                events += self._opened("message")
            events += [*self._closed(output.reason == "length"), self._ended(output)]
        return events

    def failed(self, error: PeftkitError) -> list[Event]:
        fields = error_fields(error)["error"]
        reported = {name: fields[name] for name in ("code", "message", "param")}
        self.response |= {
            "status": "failed",
            "error": {"code": fields["code"] or fields["type"], "message": fields["message"]},
        }
        return [self._event("error", **reported), self._state("failed")]

    def _event(self, kind: str, **fields: object) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _state(self, status: str) -> Event:
        return self._event(f"response.{status}", response=dict(self.response))

    def _place(self) -> Json:
        """Return the fields that locate the text of the open item."""
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._output), "content_index": 0}

    def _opened(self, kind: str) -> list[Event]:
        """Begin an item with text, after the end of the item before."""
        events = self._closed()
        item: Json
        if kind == "message":
            item = {"id": f"msg_{uuid.uuid4().hex}", "type": kind, "role": "assistant"}
        else:
            item = {"id": f"rs_{uuid.uuid4().hex}", "type": kind, "summary": []}
        self._item = {**item, "status": "in_progress", "content": []}
        self._item_texts: list[str] = []
        added = {"output_index": len(self._output), "item": self._item}
        return [
            *events,
            self._event("response.output_item.added", **added),
            self._event("response.content_part.added", **self._place(), part=_part(kind, "")),
        ]

    def _extended(self, kind: str, text: str, texts: list[str]) -> list[Event]:
        """Add text to the open item of a type, or to a new one."""
        is_open = self._item is not None and self._item["type"] == kind
        events = [] if is_open else self._opened(kind)
        self._item_texts.append(text)
        texts.append(text)
        return [*events, self._text_event(kind, "delta", delta=text)]

    def _text_event(self, kind: str, name: str, **fields: object) -> Event:
        log_probs: Json = {"logprobs": []} if kind == "message" else {}
        return self._event(f"response.{PARTS[kind]}.{name}", **self._place(), **fields, **log_probs)

    def _closed(self, is_cut: bool = False) -> list[Event]:
        """End the open item, if any."""
        if self._item is None:
            return []
        kind, text = self._item["type"], "".join(self._item_texts)
        item = {
            **self._item,
            "status": "incomplete" if is_cut else "completed",
            "content": [_part(kind, text)],
        }
        events = [
            self._text_event(kind, "done", text=text),
            self._event("response.content_part.done", **self._place(), part=_part(kind, text)),
            self._event("response.output_item.done", output_index=len(self._output), item=item),
        ]
        self._item = None
        self._output.append(item)
        return events

    def _called(self, call: Json) -> list[Event]:
        """Add a call: the server sends its arguments when they are complete."""
        self._calls.append(call)
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            "name": name,
            "arguments": arguments,
        }
        index = len(self._output)
        place = {"item_id": item["id"], "output_index": index}
        added = {**item, "status": "in_progress", "arguments": ""}
        kind = "response.function_call_arguments"
        self._output.append(item)
        return [
            self._event("response.output_item.added", output_index=index, item=added),
            self._event(f"{kind}.delta", **place, delta=arguments),
            self._event(f"{kind}.done", **place, name=name, arguments=arguments),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _ended(self, output: Output) -> Event:
        is_cut = output.reason == "length"
        status = "incomplete" if is_cut else "completed"
        self.response |= {
            "status": status,
            "completed_at": int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            # cached tokens and tokens of reasoning are included, not counted separately
            "usage": {
                "input_tokens": self._num_prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": output.num_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self._num_prompt + output.num_tokens,
            },
        }
        message: Json = {"role": "assistant", "content": "".join(self._texts)}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        self._keep(self.response, message)
        return self._state(status)


def _part(kind: str, text: str) -> Json:
    extra: Json = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": PARTS[kind], "text": text, **extra}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else value.model_dump()
