"""Conversations as they are found, OpenAI's and ShareGPT's, brought to one shape.

The shape is that of transformers' chat templates: roles system, developer, user, assistant and
tool; content is text; what the assistant thought is `reasoning_content`; a tool call's arguments
are an object, not JSON in a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from peftkit.errors import did_you_mean

Message = Mapping[str, Any]
MAX_CHARACTERS = 10_000_000
"""Of one text: a tokenizer takes about a second for each million."""

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}
# what may come before a turn; None is the beginning
_BEFORE: dict[str, tuple[str | None, ...]] = {
    "system": (None,),
    "developer": (None, "system"),
    "user": (None, "system", "developer", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


_REASONING = ("reasoning_content", "reasoning", "thinking")
_THOUGHT = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)


class WrongField(Exception):
    """A field of a row is not what it must be; `field` is its path, such as "messages[2].role"."""

    def __init__(self, field: str, words: str) -> None:
        super().__init__(f"{field}: {words}" if field else words)


def text_of(fields: Mapping[str, Any], name: str, path: str = "") -> str:
    """Return a field that must be text."""
    path = path or name
    if name not in fields:
        raise WrongField(path, "missing")
    value = fields[name]
    if not isinstance(value, str):
        raise WrongField(path, f"expected text, found {kind_of(value)}")
    if len(value) > MAX_CHARACTERS:
        raise WrongField(path, f"{len(value):,} characters; at most {MAX_CHARACTERS:,} are read")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise WrongField(path, "holds half of a surrogate pair (\\ud800 to \\udfff)") from None
    return value


def full_text(fields: Mapping[str, Any], name: str, path: str = "") -> str:
    """Return a field that must be text with more than white space in it."""
    found = text_of(fields, name, path)
    if not found.strip():
        raise WrongField(path or name, "empty")
    return found


def texts_of(fields: Mapping[str, Any], name: str) -> list[str]:
    """Return a field that is a text or a list of texts."""
    value = fields.get(name)
    if not isinstance(value, list):
        return [full_text(fields, name)]
    if not value:
        raise WrongField(name, "empty")
    return [full_text({name: text}, name, f"{name}[{n}]") for n, text in enumerate(value)]


def parse_messages(value: Any, field: str) -> tuple[list[Message], list[int]]:
    """Return the messages and the indices of the assistant turns to learn.

    A turn of the assistant with `weight: 0` is context only, as in OpenAI's format.
    """
    messages, weights = _messages(value, field)
    _check_order(messages, field)
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise WrongField(field, "there is no assistant turn")
    return messages, [turn for turn in turns if weights[turn]]


def completion_messages(
    fields: Mapping[str, Any], prompt: str, completion: str
) -> tuple[list[Message], list[int]]:
    """Join a prompt and a completion that are lists of messages; only the latter is learnt."""
    given, _ = _messages(fields[prompt], prompt)
    if completion not in fields:
        raise WrongField(completion, "missing")
    answer, weights = _messages(fields[completion], completion)
    _check_order([*given, *answer], f"{prompt} + {completion}")
    turns = [n for n, message in enumerate(answer) if message["role"] == "assistant"]
    if not turns:
        raise WrongField(completion, "there is no assistant turn")
    return [*given, *answer], [len(given) + turn for turn in turns if weights[turn]]


def parse_tools(value: Any, field: str) -> list[Mapping[str, Any]]:
    """Return tools as [{"type": "function", "function": {name, ...}}]; they may be JSON text."""
    if isinstance(value, str):
        value = _parse_json(value, field) if value.strip() else None
    if value is None:
        return []
    if not isinstance(value, list):
        raise WrongField(field, f"expected a list of functions, found {kind_of(value)}")
    tools: list[Mapping[str, Any]] = []
    for number, tool in enumerate(value):
        where = f"{field}[{number}]"
        if not isinstance(tool, Mapping):
            raise WrongField(where, f"expected an object, found {kind_of(tool)}")
        function = tool.get("function", tool)
        if not isinstance(function, Mapping):
            raise WrongField(f"{where}.function", f"expected an object, found {kind_of(function)}")
        text_of(function, "name", f"{where}.name")
        kind = tool.get("type", "function") if "function" in tool else "function"
        tools.append({"type": kind, "function": function})
    return tools


def _messages(value: Any, field: str) -> tuple[list[Message], list[bool]]:
    if not isinstance(value, list):
        raise WrongField(field, f"expected a list of turns, found {kind_of(value)}")
    if not value:
        raise WrongField(field, "empty")
    parsed = [_message(turn, f"{field}[{number}]") for number, turn in enumerate(value)]
    return [message for message, _ in parsed], [learnt for _, learnt in parsed]


def _message(turn: Any, path: str) -> tuple[Message, bool]:
    if not isinstance(turn, Mapping):
        raise WrongField(path, f"expected an object, found {kind_of(turn)}")
    role_key = "from" if "from" in turn and "role" not in turn else "role"
    text_key = "value" if role_key == "from" else "content"
    name = text_of(turn, role_key, f"{path}.{role_key}")
    role = _ROLES.get(name)
    if role is None:
        hint = did_you_mean(name, _ROLES)
        raise WrongField(f"{path}.{role_key}", f"unknown role '{name}'. {hint}".rstrip())
    taken = {role_key, text_key, "tool_calls", "function_call", "weight", *_REASONING}
    message: dict[str, Any] = {"role": role}
    if reasoning := _reasoning(turn, role, text_key, path):
        message["reasoning_content"] = reasoning
    calls = turn.get("tool_calls")
    if name == "function_call":
        calls = _parse_json(text_of(turn, text_key, f"{path}.{text_key}"), f"{path}.{text_key}")
        calls = calls if isinstance(calls, list) else [calls]
    else:
        if calls is None and turn.get("function_call") is not None:  # OpenAI before tool_calls
            calls = [turn["function_call"]]
        if not calls or turn.get(text_key) is not None:
            message["content"] = _content(turn, text_key, f"{path}.{text_key}")
    if calls:
        message["tool_calls"] = _calls(calls, role, f"{path}.tool_calls")
    message |= {k: v for k, v in turn.items() if k not in taken and v is not None}
    return message, _weight(turn, role, f"{path}.weight")


def _reasoning(turn: Mapping[str, Any], role: str, text_key: str, path: str) -> str:
    """Return what the assistant thought: a field of the turn, or parts of its content."""
    texts = [text_of(turn, name, f"{path}.{name}") for name in _REASONING if turn.get(name)]
    parts = turn.get(text_key)
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, Mapping) and part.get("type") in _REASONING:
            name = next((name for name in (*_REASONING, "text") if part.get(name)), "text")
            texts.append(text_of(part, name, f"{path}.{text_key}"))
    if texts and role != "assistant":
        raise WrongField(path, f"only the assistant thinks, found reasoning on {role}")
    return "\n".join(texts)


def reasoning_of(message: Message) -> str:
    """Return what was thought before a message: its field, or the <think> that it begins with."""
    inline = _THOUGHT.match(message.get("content") or "")
    return str(message.get("reasoning_content") or (inline[1] if inline else "")).strip()


def without_reasoning(message: Message) -> Message:
    """Return a message without what was thought before it."""
    said = {key: value for key, value in message.items() if key != "reasoning_content"}
    if message["role"] == "assistant" and said.get("content"):
        said["content"] = _THOUGHT.sub("", said["content"])
    return said


def _weight(turn: Mapping[str, Any], role: str, path: str) -> bool:
    weight = turn.get("weight")
    if weight is None:
        return True
    if role != "assistant" or isinstance(weight, bool) or weight not in (0, 1):
        raise WrongField(path, f"expected 0 or 1 on an assistant turn, found {weight!r} on {role}")
    return bool(weight)


def _content(turn: Mapping[str, Any], key: str, path: str) -> str:
    value = turn.get(key)
    if not isinstance(value, list):
        return text_of(turn, key, path)
    parts = []
    for number, part in enumerate(value):
        where = f"{path}[{number}]"
        if not isinstance(part, Mapping):
            raise WrongField(where, f"expected an object, found {kind_of(part)}")
        if part.get("type") in _REASONING:
            continue
        if part.get("type") != "text":
            raise WrongField(where, f"only text can be learnt, found {part.get('type')!r}")
        parts.append(text_of(part, "text", f"{where}.text"))
    return "".join(parts)


def _calls(value: Any, role: str, path: str) -> list[Mapping[str, Any]]:
    if role != "assistant":
        raise WrongField(path, f"only the assistant calls tools, found them on {role}")
    if not isinstance(value, list):
        raise WrongField(path, f"expected a list, found {kind_of(value)}")
    calls: list[Mapping[str, Any]] = []
    for number, call in enumerate(value):
        where = f"{path}[{number}]"
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise WrongField(where, "expected an object with name and arguments")
        name = text_of(function, "name", f"{where}.name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parse_json(arguments, f"{where}.arguments") if arguments.strip() else {}
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, Mapping):
            kind = kind_of(arguments)
            raise WrongField(f"{where}.arguments", f"expected an object, found {kind}")
        known = {"id": call["id"]} if call.get("id") is not None and "function" in call else {}
        entry = {"type": "function", "function": {"name": name, "arguments": arguments}}
        calls.append(entry | known)
    return calls


def _check_order(messages: list[Message], field: str) -> None:
    before: str | None = None
    for number, message in enumerate(messages):
        role = message["role"]
        if before not in _BEFORE[role]:
            place = "stands first" if before is None else f"follows {before}"
            raise WrongField(f"{field}[{number}].role", f"wrong order: {role} {place}")
        if role == "tool" and before == "assistant" and "tool_calls" not in messages[number - 1]:
            raise WrongField(f"{field}[{number}].role", "wrong order: tool follows no tool call")
        before = role


def _parse_json(text: str, path: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as problem:
        raise WrongField(path, f"not JSON: {problem}") from None


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def kind_of(value: Any) -> str:
    """Return what a JSON value is, in words."""
    names = {type(None): "null", list: "a list", dict: "an object", str: "text", bool: "a boolean"}
    return names.get(type(value), f"a number ({value!r})")
