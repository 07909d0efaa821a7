"""Tool call formats of model families: parsers of calls in generated text.

Supported: Hermes and Qwen, Qwen3-Coder, Mistral, Harmony (gpt-oss) and Llama 3. For other families,
the tokenizer's `response_template` parses calls (`shipped_format`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from peftkit.files.strict_json import Json, JsonMap


class Call(NamedTuple):
    """A tool call; `id` is set if the model wrote one."""

    name: str
    arguments: Json
    id: str | None = None


class NoCall(ValueError):
    """The text begins like a call but is not one."""


class Unclosed(NoCall):
    """The closing text is inside a string of the call."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Format of a model's tool calls.

    Attributes:
        opens: Opening texts of a call.
        close: Closing text; None: a call ends with the answer.
        read: Parses calls from a text that includes opening and closing text; raises `NoCall`, or
            another ValueError, TypeError or RecursionError.
        at_start: Whether calls occur only at the start of an answer.
        is_untyped: Whether arguments are plain text; the tool's schema has their types.
        thought: Opening and closing text of reasoning.
        skips: Texts to drop between the parts of an answer.
        as_text: Whether the chat template requires a call's arguments as JSON text.
    """

    name: str
    opens: tuple[str, ...]
    close: str | None
    read: Callable[[str], list[Call]]
    at_start: bool = False
    is_untyped: bool = False
    thought: tuple[str, str] = ("<think>", "</think>")
    skips: tuple[str, ...] = ()
    as_text: bool = False

    def message(self, text: str, calls: Sequence[tuple[str, Call]]) -> Json:
        """Return an answer with calls as a message for the chat template.

        Args:
            calls: Calls with their ids.
        """
        return {
            "role": "assistant",
            "content": text,
            "tool_calls": [
                {
                    "id": identity,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": dumped(call) if self.as_text else call.arguments,
                    },
                }
                for identity, call in calls
            ],
        }


def dumped(call: Call) -> str:
    """Return arguments as JSON text; raises ValueError or TypeError for other values."""
    return json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise NoCall(f"{text} is not a JSON number")
    return number


_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _decoded(text: str, at: int = 0) -> tuple[Any, int]:
    """Return the JSON value at an offset, and its end."""
    try:
        return _JSON.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise Unclosed(error.msg) if "Unterminated string" in error.msg else error from None


def _whole(text: str) -> Any:
    value, end = _decoded(text := text.strip())
    if text[end:].strip():
        raise NoCall("more than one value")
    return value


def _call(value: object) -> Call:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise NoCall("no object with a name")
    given = value.get("arguments", value.get("parameters", {}))
    if isinstance(given, str):
        given = _whole(given)
    if not isinstance(given, dict):
        raise NoCall("arguments are not an object")
    identity = value.get("id")
    return Call(value["name"], given, identity if isinstance(identity, str) else None)


def calls_of(value: object) -> list[Call]:
    """Return the call, or the calls of a list; raises NoCall for other values."""
    return [_call(item) for item in (value if isinstance(value, list) else [value])]


def _inside(text: str, opening: str, close: str) -> str:
    if not text.endswith(close):
        raise NoCall("not closed")
    return text.removeprefix(opening).removesuffix(close).strip()


def _hermes(text: str) -> list[Call]:
    return calls_of(_whole(_inside(text, "<tool_call>", "</tool_call>")))


_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.S)


def _coder(text: str) -> list[Call]:
    body = _inside(text, "<tool_call>", "</tool_call>")
    name, end, rest = _inside(body, "<function=", "</function>").partition(">")
    if not body.startswith("<function=") or not end:
        raise NoCall("no function")
    # consecutive matches instead of a search, which is quadratic if no parameter is closed
    arguments, at = dict[str, Any](), 0
    while match := _PARAMETER.match(rest, at):
        arguments[match[1].strip()], at = match[2], match.end()
    if rest[at:].strip():
        raise NoCall("other text between the arguments")
    return [Call(name.strip(), arguments)]


def _llama(text: str) -> list[Call]:
    text = text.removeprefix("<|python_tag|>").strip()
    calls, at = [], 0
    while at < len(text):
        value, at = _decoded(text, at)
        calls.append(_call(value))
        while at < len(text) and text[at] in "; \t\r\n":
            at += 1
    return calls


_MISTRAL = re.compile(r"([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(?=\{)")


def _mistral(text: str) -> list[Call]:
    calls: list[Call] = []
    for piece in filter(None, map(str.strip, text.split("[TOOL_CALLS]"))):
        if piece.startswith("["):
            calls += calls_of(_whole(piece))
        elif match := _MISTRAL.match(piece):
            calls.append(_call({"name": match[1], "arguments": _whole(piece[match.end() :])}))
            calls[-1] = calls[-1]._replace(id=match[2])
        else:
            raise NoCall("no name")
    return calls


def _harmony(text: str) -> list[Call]:
    header, separator, body = text.removesuffix("<|call|>").partition("<|message|>")
    name = re.search(r"to=functions\.([\w.-]+)", header)
    if name is None or not separator:
        raise NoCall("no function")
    return [_call({"name": name[1], "arguments": _whole(body)})]


FORMATS: tuple[CallFormat, ...] = (
    CallFormat("hermes", ("<tool_call>",), "</tool_call>", _hermes),
    CallFormat("coder", ("<tool_call>",), "</tool_call>", _coder, is_untyped=True),
    CallFormat("mistral", ("[TOOL_CALLS]",), None, _mistral, thought=("[THINK]", "[/THINK]")),
    CallFormat(
        "harmony",
        ("<|channel|>commentary to=functions.", "to=functions."),
        "<|call|>",
        _harmony,
        at_start=True,
        thought=("<|channel|>analysis<|message|>", "<|end|>"),
        skips=(
            *("<|start|>assistant", "<|end|>", "<|return|>"),
            *("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
        ),
    ),
    CallFormat("llama", ("<|python_tag|>", "{"), None, _llama, at_start=True),
)

NO_CALLS = CallFormat("none", (), None, lambda _: [])
"""Format for templates without tool calls: an answer is text and reasoning."""


def typed(call: Call, tools: Sequence[JsonMap]) -> Call:
    """Return a call whose arguments have the types of the tool's schema."""
    schema: JsonMap = next((t["function"] for t in tools if t["function"]["name"] == call.name), {})
    properties = (schema.get("parameters") or {}).get("properties") or {}
    arguments = {key: _of_type(value, properties.get(key)) for key, value in call.arguments.items()}
    return call._replace(arguments=arguments)


def _of_type(text: str, schema: Any) -> Any:
    types = _types(schema)
    if not types or "string" in types:
        return text
    try:
        return _whole({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except (ValueError, RecursionError):
        return text


def _types(schema: Any) -> list[str]:
    if not isinstance(schema, Mapping):
        return []
    kinds = schema.get("type") or []
    kinds = [kinds] if isinstance(kinds, str) else [*kinds]
    return kinds + [
        kind
        for name in ("anyOf", "oneOf")
        for one in schema.get(name) or ()
        for kind in _types(one)
    ]
