"""Tool fields of chat requests. Source: OpenAI's API reference."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from peftkit.files.strict_json import Json
from peftkit.inference.call_formats import Call, CallFormat
from peftkit_server.validation import Strict

MAX_TOOLS = 128
TEMPLATE_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""Call ids that every chat template accepts; Mistral's templates refuse others."""


def _parsed_arguments(text: Any) -> Json:
    try:
        arguments = json.loads("{}" if text == "" else text)
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call must be a JSON object, as text")
    return arguments


class _CalledFunction(Strict):
    name: str
    arguments: Annotated[Json, BeforeValidator(_parsed_arguments)]
    IGNORED = ("parsed_arguments",)  # added by OpenAI's client


class ToolCall(Strict):
    """A call in an earlier assistant message."""

    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: _CalledFunction
    index: int | None = None
    """Added by OpenAI's client; ignored."""

    @property
    def call(self) -> Call:
        """The function and its arguments."""
        return Call(self.function.name, self.function.arguments)


class _Schema(BaseModel):
    """The keywords of a JSON schema that the call parsers read; others are not validated."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: str | list[str] | None = None
    properties: dict[str, _Schema | bool] | None = None
    required: list[str] | None = None
    enum: Annotated[list[Any], Field(min_length=1)] | None = None
    anyOf: list[_Schema | bool] | None = None
    oneOf: list[_Schema | bool] | None = None


class _Function(BaseModel):
    # transformers' get_json_schema adds `return`, which templates may read
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _are_a_schema(cls, schema: Json | None) -> Json | None:
        try:
            _Schema.model_validate(schema or {})
        except ValidationError as problem:
            place = ".".join(str(part) for part in problem.errors()[0]["loc"][:4])
            raise ValueError(f"not a JSON schema: {place[:80]} is invalid") from None
        return schema


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: _Function

    def plain(self) -> Json:
        """Return the tool in the format of chat templates."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {**function, "parameters": parameters}}

    def forced(self) -> Json:
        """Return the tool for the grammar of a forced call: `strict` closes its objects."""
        tool = self.plain()
        if self.function.strict:
            tool["function"]["parameters"] = closed(tool["function"]["parameters"])
        return tool


def closed(schema: object) -> Any:
    """Return a `strict` JSON schema whose objects have no keys but their properties.

    Parts of `allOf` stay open: each of them describes the same object.
    """
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(named := schema.get(name), dict):
            out[name] = {key: closed(value) for key, value in named.items()}
    for name in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(listed := schema.get(name), list):
            out[name] = [closed(value) for value in listed]
    if "items" in schema:
        out["items"] = closed(schema["items"])
    if "properties" in schema and "allOf" not in schema:
        out.setdefault("additionalProperties", False)
    return out


class _NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    """`tool_choice`: a named tool."""

    type: Literal["function"]
    function: _NamedFunction


class _AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Strict):
    """`tool_choice`: a subset of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class ToolUse(Strict):
    """The tools of a request, and whether the model must call one.

    Attributes:
        offered: Tools in the format of chat templates.
        forced: Tools of which the model must call one; empty: it may answer without a call.
        is_named: Whether the client named the tool to call.
        is_single: Whether a completion ends after one call.
    """

    offered: list[Json]
    forced: list[Json]
    is_named: bool
    is_single: bool

    @classmethod
    def of(
        cls, tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool | None
    ) -> ToolUse | None:
        """Return the tool use of a request; None: it has no tools.

        Raises:
            ValueError: Two tools have the same name, or the choice names an unknown tool.
        """
        names = [tool.function.name for tool in tools]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tools have the name {repeated[0]}")
        if not names:
            if choice not in (None, "none", "auto"):
                raise ValueError("tool_choice requires tools")
            return None
        chosen, is_forced = _chosen(names, choice)
        offered = [tool.plain() for tool in tools if tool.function.name in chosen]
        return cls(
            offered=offered,
            forced=[tool.forced() for tool in tools if is_forced and tool.function.name in chosen],
            is_named=isinstance(choice, NamedTool),
            is_single=parallel is False or is_forced,
        )


def _chosen(names: Sequence[str], choice: ToolChoice | None) -> tuple[Sequence[str], bool]:
    """Return the names of the chosen tools, and whether the model must call one."""
    if choice is None or isinstance(choice, str):
        return ([] if choice == "none" else names), choice == "required"
    if isinstance(choice, NamedTool):
        chosen, is_forced = [choice.function.name], True
    else:
        chosen = [tool.function.name for tool in choice.allowed_tools.tools]
        is_forced = choice.allowed_tools.mode == "required"
    if unknown := [name for name in chosen if name not in names]:
        raise ValueError(f"tool_choice names {unknown[0][:64]}; tools: {', '.join(names[:5])}")
    return chosen, is_forced


def with_calls(
    turns: Sequence[Json], calls: Sequence[Sequence[ToolCall]], form: CallFormat | None
) -> list[Json]:
    """Return a conversation with its calls and tool messages in the format of a chat template.

    Args:
        turns: Messages; tool messages have a `tool_call_id`.
        calls: The calls of each message.
        form: Call format of the template; None: it has none.

    Raises:
        ValueError: A tool message refers to no earlier call, or the template has no call format.
    """
    functions: dict[str, tuple[str, str]] = {}  # by the client's call id: template id and name
    messages: list[Json] = []
    for number, (turn, turn_calls) in enumerate(zip(turns, calls, strict=True)):
        if turn_calls:
            if form is None:
                raise ValueError("the chat template of this model has no format of tool calls")
            template_calls: list[tuple[str, Call]] = []
            first = len(functions)
            for index, call in enumerate(turn_calls, first):
                id = call.id if TEMPLATE_ID.fullmatch(call.id) else f"call{index:05}"
                functions[call.id] = id, call.function.name
                template_calls.append((id, call.call))
            messages.append({**turn, **form.message(turn["content"], template_calls)})
        elif turn["role"] == "tool":
            id = turn["tool_call_id"]
            if id not in functions:
                raise ValueError(f"messages.{number} refers to an unknown call: {id[:64]}")
            template_id, name = functions[id]
            messages.append({"name": name, **turn, "tool_call_id": template_id})
        else:
            messages.append(turn)
    return messages
