"""/v1/messages: bodies, their translation into a chat, and responses, whole or as events.

Source: Anthropic's API reference, /v1/messages and /v1/messages/count_tokens.
"""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from peftkit.errors import PeftkitError
from peftkit.inference.call_formats import Call
from peftkit_server.answers import Event, Reply
from peftkit_server.generation import Output, call_fields
from peftkit_server.refusals import public, status_of
from peftkit_server.requests import MAX_TOKENS, ChatBody, StopText
from peftkit_server.tool_fields import MAX_TOOLS, closed
from peftkit_server.validation import NullIsUnset, validated


class _Text(NullIsUnset):
    IGNORED = ("cache_control", "citations")
    type: Literal["text"]
    text: str


_Texts = Annotated[list[_Text], Field(fail_fast=True)]


def _text(content: str | list[_Text] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content)


class _Thinking(NullIsUnset):
    IGNORED = ("signature",)
    type: Literal["thinking"]
    thinking: str


class _RedactedThinking(NullIsUnset):
    IGNORED = ("data",)
    type: Literal["redacted_thinking"]


class _ToolUse(NullIsUnset):
    IGNORED = ("cache_control", "caller")
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: str
    input: dict[str, Any]


class _ToolResult(NullIsUnset):
    IGNORED = ("cache_control",)
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | _Texts | None = None
    is_error: bool | None = None
    """Ignored: chat templates have no field for it."""


_Block = Annotated[
    _Text | _Thinking | _RedactedThinking | _ToolUse | _ToolResult, Field(discriminator="type")
]
_BLOCKS = {
    "user": (_Text, _ToolResult),
    "assistant": (_Text, _Thinking, _RedactedThinking, _ToolUse),
}


class _Message(NullIsUnset):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[_Block], Field(fail_fast=True)]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> _Message:
        for block in () if isinstance(self.content, str) else self.content:
            if not isinstance(block, _BLOCKS[self.role]):
                raise ValueError(f"messages of the role {self.role} have no {block.type} blocks")
        return self

    def turns(self) -> list[dict[str, Any]]:
        """Return the message as turns of a chat: the results of tools come first."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        blocks = self.content
        turns: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
            for block in blocks
            if isinstance(block, _ToolResult)
        ]
        texts = [block.text for block in blocks if isinstance(block, _Text)]
        thoughts = [block.thinking for block in blocks if isinstance(block, _Thinking)]
        calls = [_call(block) for block in blocks if isinstance(block, _ToolUse)]
        if texts or not turns:
            turn: dict[str, Any] = {"role": self.role, "content": "".join(texts)}
            if thoughts:
                turn["reasoning_content"] = "".join(thoughts)
            turns.append(turn | ({"tool_calls": calls} if calls else {}))
        return turns


def _call(block: _ToolUse) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


class _Tool(NullIsUnset):
    IGNORED = ("cache_control", "eager_input_streaming")
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        function = self.model_dump(include={"name", "description", "strict"}, exclude_none=True)
        return {"type": "function", "function": {**function, "parameters": self.input_schema}}


class _ToolChoice(NullIsUnset):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> _ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("the type tool, and no other, has a name")
        return self

    def plain(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class _Thoughts(NullIsUnset):
    IGNORED = ("budget_tokens", "display")  # `max_tokens` bounds the completion with its reasoning
    type: Literal["enabled", "disabled", "adaptive"]


class _Format(NullIsUnset):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class _OutputConfig(NullIsUnset):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


class _Edit(NullIsUnset):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class _ContextManagement(NullIsUnset):
    edits: Annotated[list[_Edit], Field(max_length=8)] | None = None


class CountBody(NullIsUnset):
    """A request to /v1/messages/count_tokens."""

    IGNORED: ClassVar[Any] = ("cache_control", "speed", "user_profile_id", "workspace_id")
    UNSUPPORTED = ("container", "mcp_servers")

    model: str
    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    system: str | _Texts | None = None
    thinking: _Thoughts | None = None
    tool_choice: _ToolChoice | None = None
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS)] | None = None
    output_config: _OutputConfig | None = None
    context_management: _ContextManagement | None = None

    @model_validator(mode="after")
    def _ends_with_the_user(self) -> CountBody:
        if self.messages[-1].role != "user":
            raise ValueError("the last message must have the role user")
        return self

    def chat(self, **sampling: Any) -> ChatBody:
        """Return the request as a chat.

        Args:
            sampling: Fields that affect the completion alone.

        Raises:
            RequestError: A tool, a call or the choice of tools is invalid.
        """
        system = _text(self.system)
        turns = [{"role": "system", "content": system}] if system else []
        choice, output = self.tool_choice, self.output_config or _OutputConfig()
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [*turns, *(turn for each in self.messages for turn in each.turns())],
            "tools": [tool.plain() for tool in self.tools or ()] or None,
            "tool_choice": choice.plain() if choice else None,
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            # "high" is the same as no effort by Anthropic's reference
            "reasoning_effort": None if output.effort == "high" else output.effort,
        }
        if output.format is not None:
            schema = {"name": "output", "schema": closed(output.format.schema_)}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.thinking is not None and self.thinking.type != "adaptive":
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinking.type == "enabled"}
        return validated({**fields, **sampling}, ChatBody)


class MessagesBody(CountBody):
    """A request to /v1/messages; None: the server's default."""

    IGNORED = (*CountBody.IGNORED, "diagnostics", "inference_geo", "metadata", "service_tier")
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    stop_sequences: Annotated[list[StopText], Field(max_length=4)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    def chat(self, **sampling: Any) -> ChatBody:
        same = {"max_tokens", "stream", "temperature", "top_k", "top_p"}
        return super().chat(stop=self.stop_sequences, **self.model_dump(include=same), **sampling)


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


def message_error(error: PeftkitError) -> dict[str, Any]:
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
        self._blocks: list[dict[str, Any]] = []
        self._is_open, self._texts = False, [""]
        self.response = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def start(self, num_prompt: int) -> list[Event]:
        self.response["usage"] = {"input_tokens": num_prompt, "output_tokens": 0}
        return [{"type": "message_start", "message": dict(self.response)}]

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

    def _event(self, kind: str, **fields: Any) -> Event:
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
        usage = {**self.response["usage"], "output_tokens": output.num_tokens}
        delta = {"stop_reason": reason, "stop_sequence": output.stop_text}
        self.response |= {**delta, "content": self._blocks, "usage": usage}
        return [{"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]
