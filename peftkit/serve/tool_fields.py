"""Fields of chat requests that concern tools. Source: OpenAI's API reference."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from peftkit.inference.call_formats import Call, CallFormat

MAX_TOOLS = 128
TEMPLATE_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""Ids of calls that every chat template takes; Mistral's take no others."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _CalledFunction(_Strict):
    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, text: str) -> str:
        if not isinstance(_parsed(text), dict):
            raise ValueError("the arguments of a call are a JSON object, as text")
        return text


class ToolCall(_Strict):
    """A call in an earlier answer."""

    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: _CalledFunction

    @property
    def call(self) -> Call:
        """What was called."""
        return Call(self.function.name, _parsed(self.function.arguments))


class _Schema(BaseModel):
    """The keywords of a JSON schema that answers are read by; others may be anything."""

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
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _are_a_schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            _Schema.model_validate(schema or {})
        except ValidationError as problem:
            place = ".".join(str(part) for part in problem.errors()[0]["loc"][:4])
            raise ValueError(f"no JSON schema: {place[:80]} cannot be what it is") from None
        return schema


class Tool(_Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: _Function

    def plain(self) -> dict[str, Any]:
        """Return it as chat templates take it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {**function, "parameters": parameters}}


class _NamedFunction(_Strict):
    name: str


class NamedTool(_Strict):
    """`tool_choice`: this one."""

    type: Literal["function"]
    function: _NamedFunction


class _AllowedTools(_Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(_Strict):
    """`tool_choice`: some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class ToolUse(_Strict):
    """Which tools a request offers, and which of them has to be called.

    Attributes:
        offered: As chat templates take them.
        forced: Those of which one must be called; empty: none has to be.
        is_named: Whether the client named the one to call.
        is_single: Whether an answer ends after one call.
    """

    offered: list[dict[str, Any]]
    forced: list[dict[str, Any]]
    is_named: bool
    is_single: bool

    @classmethod
    def of(
        cls, tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool | None
    ) -> ToolUse | None:
        """Return what a request asks for; None: it offers no tools.

        Raises:
            ValueError: Two tools have one name, or the choice names none of them.
        """
        names = [tool.function.name for tool in tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tools are called {twice[0]}")
        if not names:
            if choice not in (None, "none", "auto"):
                raise ValueError("tool_choice needs tools")
            return None
        chosen, must = _chosen(names, choice)
        offered = [tool.plain() for tool in tools if tool.function.name in chosen]
        is_single = parallel is False or must
        named = isinstance(choice, NamedTool)
        forced = offered if must else []
        return cls(offered=offered, forced=forced, is_named=named, is_single=is_single)


def _chosen(names: Sequence[str], choice: ToolChoice | None) -> tuple[Sequence[str], bool]:
    """Return the tools that a choice leaves, and whether one of them must be called."""
    if choice is None or isinstance(choice, str):
        return ([] if choice == "none" else names), choice == "required"
    if isinstance(choice, NamedTool):
        asked, must = [choice.function.name], True
    else:
        asked = [tool.function.name for tool in choice.allowed_tools.tools]
        must = choice.allowed_tools.mode == "required"
    if unknown := [name for name in asked if name not in names]:
        raise ValueError(f"tool_choice names {unknown[0][:64]}; tools: {', '.join(names[:5])}")
    return asked, must


def with_calls(
    turns: Sequence[dict[str, Any]], calls: Sequence[Sequence[ToolCall]], form: CallFormat | None
) -> list[dict[str, Any]]:
    """Return a conversation whose calls and replies stand as its chat template takes them.

    Args:
        turns: Messages; those of tools with their `tool_call_id`.
        calls: Of each message.
        form: How the template writes calls; None: it writes none.

    Raises:
        ValueError: A reply is to no call before it, or there is no form.
    """
    known: dict[str, tuple[str, str]] = {}
    done: list[dict[str, Any]] = []
    for number, (turn, made) in enumerate(zip(turns, calls, strict=True)):
        if made:
            if form is None:
                raise ValueError("the chat template of this model writes no calls of tools")
            keys = [_template_id(call.id, len(known) + n) for n, call in enumerate(made)]
            known |= {c.id: (k, c.function.name) for c, k in zip(made, keys, strict=True)}
            pairs = [(key, call.call) for key, call in zip(keys, made, strict=True)]
            done.append({**turn, **form.message(turn["content"], pairs)})
        elif turn["role"] == "tool":
            if turn["tool_call_id"] not in known:
                found = turn["tool_call_id"][:64]
                raise ValueError(f"messages.{number} replies to a call that is not there: {found}")
            key, name = known[turn["tool_call_id"]]
            done.append({"name": name, **turn, "tool_call_id": key})
        else:
            done.append(turn)
    return done


def _template_id(text: str, number: int) -> str:
    return text if TEMPLATE_ID.fullmatch(text) else f"call{number:05}"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
