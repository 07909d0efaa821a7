"""Request bodies of /v1/responses, and their translation into a chat.

Source: OpenAI's API reference, /v1/responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from peftkit.files.strict_json import Json
from peftkit_server.requests import MAX_TOKENS, ChatBody, Effort
from peftkit_server.tool_fields import MAX_TOOLS
from peftkit_server.validation import NullIsUnset, check_schema, validated


class _Text(NullIsUnset):
    IGNORED = ("annotations", "logprobs", "prompt_cache_breakpoint")
    type: Literal["input_text", "output_text", "text"]
    text: str


class _Refusal(NullIsUnset):
    type: Literal["refusal"]
    text: Annotated[str, Field(alias="refusal")]


_Part = Annotated[_Text | _Refusal, Field(discriminator="type")]
_Parts = Annotated[list[_Part], Field(fail_fast=True)]


def _text(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class _Turn(NullIsUnset):
    IGNORED = ("id", "phase", "status")
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | _Parts


class _Call(NullIsUnset):
    IGNORED = ("id", "status")
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: str
    arguments: str


class _CallOutput(NullIsUnset):
    IGNORED = ("id", "status")
    type: Literal["function_call_output"]
    call_id: str
    output: str | _Parts


class _Thought(NullIsUnset):
    type: Literal["reasoning_text"]
    text: str


class _Reasoning(NullIsUnset):
    IGNORED = ("encrypted_content", "id", "status", "summary")
    type: Literal["reasoning"]
    content: Annotated[list[_Thought], Field(fail_fast=True)] | None = None


def _item_type(item: object) -> str:
    kind = item.get("type") or "message" if isinstance(item, dict) else getattr(item, "type", "")
    return kind if isinstance(kind, str) else ""


Item = Annotated[
    Annotated[_Turn, Tag("message")]
    | Annotated[_Call, Tag("function_call")]
    | Annotated[_CallOutput, Tag("function_call_output")]
    | Annotated[_Reasoning, Tag("reasoning")],
    Discriminator(_item_type),
]


class _Tool(NullIsUnset):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None

    def plain(self) -> dict[str, object]:
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": function}


class _NamedTool(NullIsUnset):
    type: Literal["function"]
    name: str

    def plain(self) -> dict[str, object]:
        return {"type": "function", "function": {"name": self.name}}


class _AllowedTools(NullIsUnset):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]

    def plain(self) -> dict[str, object]:
        tools = [tool.plain() for tool in self.tools]
        return {"type": self.type, "allowed_tools": {"mode": self.mode, "tools": tools}}


class _TextFormat(NullIsUnset):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> _TextFormat:
        check_schema(self.type, self.schema_, "schema")
        return self

    def plain(self) -> dict[str, object]:
        if self.type != "json_schema":
            return {"type": self.type}
        fields = self.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        return {"type": self.type, "json_schema": fields}


class _TextOptions(NullIsUnset):
    format: _TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class _ReasoningOptions(NullIsUnset):
    IGNORED = ("generate_summary", "summary")
    effort: Effort | None = None


class ResponsesBody(NullIsUnset):
    """A request to /v1/responses; None: the server's default."""

    IGNORED = (
        *("client_metadata", "prompt_cache_options", "prompt_cache_retention", "service_tier"),
        "stream_options",
    )
    UNSUPPORTED = (
        *("access_programs", "background_options", "context_management", "conversation"),
        *("image", "moderation", "prompt"),
    )

    model: str
    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning: _ReasoningOptions | None = None
    store: bool | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    text: _TextOptions | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | _AllowedTools | None = None
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    # only their default values are accepted
    background: Literal[False] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    truncation: Literal["disabled"] | None = None
    # they do not affect responses: the server has no built-in tools and no paid tiers
    include: (
        list[
            Literal[
                "reasoning.encrypted_content",
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
                "file_search_call.results",
                "message.input_image.image_url",
                "web_search_call.action.sources",
                "web_search_call.results",
            ]
        ]
        | None
    ) = None
    max_tool_calls: Any = None
    metadata: Json | None = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    user: Any = None

    def turns(self) -> list[Json]:
        """Return the input as messages of a chat, without the instructions."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        turns: list[Json] = []
        thought: Json = {}
        for item in self.input:
            if isinstance(item, _Reasoning):
                text = "".join(part.text for part in item.content or ())
                thought = {"reasoning_content": text} if text else {}
            elif isinstance(item, _CallOutput):
                content = _text(item.output)
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            elif isinstance(item, _Call):
                if thought or not turns or turns[-1]["role"] != "assistant":
                    turns.append({"role": "assistant", "content": "", **thought})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                turns[-1].setdefault("tool_calls", []).append(call)
                thought = {}
            else:
                turns.append({"role": item.role, "content": _text(item.content), **thought})
                thought = {}
        return turns

    def chat(self, earlier: Sequence[dict[str, object]]) -> ChatBody:
        """Return the request as a chat.

        Args:
            earlier: Messages of the conversation that `previous_response_id` continues.

        Raises:
            RequestError: A tool, a call or the choice of tools is invalid.
        """
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        choice = self.tool_choice
        format = self.text.format if self.text else None
        same = {"model", "parallel_tool_calls", "stream", "temperature", "top_p"}
        fields = {
            **self.model_dump(include=same),
            "messages": [*system, *earlier, *self.turns()],
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": format.plain() if format else None,
            "tool_choice": choice if choice is None or isinstance(choice, str) else choice.plain(),
            "tools": [tool.plain() for tool in self.tools or ()] or None,
        }
        return validated(fields, ChatBody)
