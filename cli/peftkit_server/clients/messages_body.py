"""Request bodies of /v1/messages, and their translation into a chat.

Source: Anthropic's API reference, /v1/messages and /v1/messages/count_tokens.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from peftkit.files.strict_json import Json
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
    input: Json


class _ToolResult(NullIsUnset):
    IGNORED = ("cache_control",)
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | _Texts | None = None
    is_error: bool | None = None
    """Ignored: chat templates have no field for it."""


def _block_type(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", "")
    return kind if isinstance(kind, str) else ""


_Block = Annotated[
    Annotated[_Text, Tag("text")]
    | Annotated[_Thinking, Tag("thinking")]
    | Annotated[_RedactedThinking, Tag("redacted_thinking")]
    | Annotated[_ToolUse, Tag("tool_use")]
    | Annotated[_ToolResult, Tag("tool_result")],
    Discriminator(_block_type),
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

    def turns(self) -> list[Json]:
        """Return the message as turns of a chat: the results of tools come first."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        blocks = self.content
        turns: list[Json] = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
            for block in blocks
            if isinstance(block, _ToolResult)
        ]
        texts = [block.text for block in blocks if isinstance(block, _Text)]
        thoughts = [block.thinking for block in blocks if isinstance(block, _Thinking)]
        calls = [_call(block) for block in blocks if isinstance(block, _ToolUse)]
        if texts or not turns:
            turn: Json = {"role": self.role, "content": "".join(texts)}
            if thoughts:
                turn["reasoning_content"] = "".join(thoughts)
            turns.append(turn | ({"tool_calls": calls} if calls else {}))
        return turns


def _call(block: _ToolUse) -> Json:
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


class _Tool(NullIsUnset):
    IGNORED = ("cache_control", "eager_input_streaming")
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: Json
    strict: bool | None = None

    def plain(self) -> dict[str, object]:
        function: Json = {"name": self.name, "parameters": self.input_schema}
        optional: Json = {"description": self.description, "strict": self.strict}
        function |= {name: value for name, value in optional.items() if value is not None}
        return {"type": "function", "function": function}


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
    schema_: Annotated[Json, Field(alias="schema")]


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

    def chat(self) -> ChatBody:
        """Return the request as a chat.

        Raises:
            RequestError: A tool, a call or the choice of tools is invalid.
        """
        system = _text(self.system)
        turns = [{"role": "system", "content": system}] if system else []
        choice, output = self.tool_choice, self.output_config or _OutputConfig()
        fields: Json = {
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
        return validated({**fields, **self._sampling()}, ChatBody)

    def _sampling(self) -> dict[str, object]:
        """Return the fields that affect the completion alone."""
        return {}


class MessagesBody(CountBody):
    """A request to /v1/messages; None: the server's default."""

    IGNORED = (*CountBody.IGNORED, "diagnostics", "inference_geo", "metadata", "service_tier")
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    stop_sequences: Annotated[list[StopText], Field(max_length=4)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    def _sampling(self) -> dict[str, object]:
        same = {"max_tokens", "stream", "temperature", "top_k", "top_p"}
        return {"stop": self.stop_sequences, **self.model_dump(include=same)}
