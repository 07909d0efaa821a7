"""Messages and tools of a row, in the form that transformers' chat templates read.

Roles are system, developer, user, assistant and tool. Content is text, reasoning is
`reasoning_content`, and the arguments of a tool call are an object, not JSON in a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from peftkit.data.readers import DECODER
from peftkit.errors import did_you_mean
from peftkit.files.strict_json import Json, JsonMap

Message = JsonMap
Tool = JsonMap
"""A function that the assistant may call: {"type": "function", "function": {name, ...}}."""
MAX_CHARACTERS = 10_000_000
"""Limit for one text: a tokenizer needs about a second per million characters."""

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
    "function_response": "tool",
}
_CALLS = ("function_call", "tool_call")
"""Roles of assistant turns whose text is a tool call in JSON."""
MARKS = ("weight", "loss", "train", "trainable", "training", "loss_mask")
"""Fields of a turn that exclude it from the loss (false or 0) or include it (true or 1)."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TURN = frozenset(
    ("role", "from", "content", "value", "tool_calls", "function_call", *MARKS, *_REASONING)
)
_KEYS: dict[str, tuple[str, ...]] = {
    "content[]": ("type", "text", *_REASONING),
    "value[]": ("type", "text", *_REASONING),
    "tool_calls[]": ("id", "type", "function", "name", "arguments"),
    "function": ("name", "arguments"),
    "function_call": ("name", "arguments"),
    "tools[]": ("type", "function"),
    "input": ("messages", "tools"),
    "chat_template_kwargs": (),
}
"""Keys that are read of each object in a row, by the end of its path; the others are turns."""
_NESTED = ("content", "value", "tool_calls", "function_call", "messages", "tools")
_THINK_TAG = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)


class WrongField(Exception):
    """A field of a row is invalid; `field` is its path, such as "messages[2].role"."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)


def text_of(fields: Mapping[str, object], name: str, path: str = "") -> str:
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


def text_or_number(fields: Mapping[str, object], name: str) -> str:
    """Return a response: a text, or a number in JSON's notation."""
    value = fields.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return json.dumps(value) if is_number else text_of(fields, name)


def full_text(fields: Mapping[str, object], name: str, path: str = "") -> str:
    """Return a field that must be text other than white space."""
    text = text_of(fields, name, path)
    if not text.strip():
        raise WrongField(path or name, "empty")
    return text


def texts_of(fields: Mapping[str, object], name: str) -> list[str]:
    """Return a field that is a text or a list of texts."""
    value = fields.get(name)
    if not isinstance(value, list):
        return [full_text(fields, name)]
    if not value:
        raise WrongField(name, "empty")
    return [full_text({name: text}, name, f"{name}[{n}]") for n, text in enumerate(value)]


def parse_messages(value: object, field: str) -> tuple[list[Message], list[int]]:
    """Return the messages and the indices of the assistant turns to train on.

    An assistant turn with a mark such as `weight: 0` is context only. The chat template decides
    which orders of roles are valid.
    """
    messages, weights = _messages(value, field)
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise WrongField(field, "there is no assistant turn")
    return messages, [turn for turn in turns if weights[turn]]


def completion_messages(
    fields: Mapping[str, object], prompt: str, completion: str
) -> tuple[list[Message], list[int]]:
    """Join two lists of messages; return the messages, and the target turns of the second list."""
    context, _ = _messages(fields[prompt], prompt)
    if completion not in fields:
        raise WrongField(completion, "missing")
    response, weights = _messages(fields[completion], completion)
    turns = [n for n, message in enumerate(response) if message["role"] == "assistant"]
    if not turns:
        raise WrongField(completion, "there is no assistant turn")
    return [*context, *response], [len(context) + turn for turn in turns if weights[turn]]


def parse_tools(value: object, field: str) -> list[Tool]:
    """Return tools as [{"type": "function", "function": {name, ...}}], read from JSON or text."""
    if isinstance(value, str):
        value = _parse_json(value, field) if value.strip() else None
    if value is None:
        return []
    if not isinstance(value, list):
        raise WrongField(field, f"expected a list of functions, found {kind_of(value)}")
    tools: list[Tool] = []
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


def _messages(value: object, field: str) -> tuple[list[Message], list[bool]]:
    if isinstance(value, str) and value.lstrip().startswith("["):  # a cell of a CSV file
        value = _parse_json(value, field)
    if not isinstance(value, list):
        raise WrongField(field, f"expected a list of turns, found {kind_of(value)}")
    if not value:
        raise WrongField(field, "empty")
    parsed = [_message(turn, f"{field}[{number}]") for number, turn in enumerate(value)]
    return [message for message, _ in parsed], [weight for _, weight in parsed]


def _message(turn: object, path: str) -> tuple[Message, bool]:
    if not isinstance(turn, Mapping):
        raise WrongField(path, f"expected an object, found {kind_of(turn)}")
    role_key, text_key = turn_keys(turn)
    name = _usual_role(text_of(turn, role_key, f"{path}.{role_key}"))
    role = _ROLES.get(name)
    if role is None:
        hint = did_you_mean(name, _ROLES)
        raise WrongField(f"{path}.{role_key}", f"unknown role '{name}'. {hint}".rstrip())
    handled = {role_key, text_key, "tool_calls", "function_call", *MARKS, *_REASONING}
    message: Json = {"role": role}
    if reasoning := _reasoning(turn, role, text_key, path):
        message["reasoning_content"] = reasoning
    calls = turn.get("tool_calls")
    if name in _CALLS:
        calls = _parse_json(text_of(turn, text_key, f"{path}.{text_key}"), f"{path}.{text_key}")
        calls = calls if isinstance(calls, list) else [calls]
    else:
        if calls is None and turn.get("function_call") is not None:  # OpenAI before tool_calls
            calls = [turn["function_call"]]
        if not calls or turn.get(text_key) is not None:
            message["content"] = _content(turn, text_key, f"{path}.{text_key}")
    if calls:
        message["tool_calls"] = _calls(calls, role, f"{path}.tool_calls")
    message |= {k: v for k, v in turn.items() if k not in handled and v is not None}
    return message, _is_target(turn, role, path)


def turn_keys(turn: Mapping[str, object]) -> tuple[str, str]:
    """Return the keys of a turn's role and text: OpenAI's, or ShareGPT's."""
    is_sharegpt = "from" in turn and "role" not in turn
    return ("from", "value") if is_sharegpt else ("role", "content")


def role_of(turn: object) -> str:
    """Return the role of a row's turn by the templates' name, "" for an unknown role."""
    if not isinstance(turn, Mapping):
        return ""
    return _ROLES.get(_usual_role(str(turn.get(turn_keys(turn)[0]))), "")


def unused_keys(value: object, path: str) -> Iterator[str]:
    """Yield the paths of a field's keys that nothing reads, such as "messages[].score".

    A chat template may read further keys of a turn, and variables.
    """
    if isinstance(value, list):
        for item in value:
            yield from unused_keys(item, f"{path}[]")
    if not isinstance(value, Mapping):
        return
    place = path.rpartition(".")[2]
    keys = _KEYS.get(place, _TURN if "role" in value or "from" in value else value)
    if place == "tools[]" and "function" not in value:  # the function itself
        return
    for key, item in value.items():
        if key not in keys:
            if item is not None:
                yield f"{path}.{key}"
        elif key in _NESTED or (key, place) == ("function", "tool_calls[]"):
            yield from unused_keys(item, f"{path}.{key}")


def _usual_role(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def _reasoning(turn: Mapping[str, object], role: str, text_key: str, path: str) -> str:
    """Return the assistant's reasoning, from a field of the turn or from parts of its content."""
    texts = [text_of(turn, name, f"{path}.{name}") for name in _REASONING if turn.get(name)]
    parts = turn.get(text_key)
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, Mapping) and part.get("type") in _REASONING:
            name = next((name for name in (*_REASONING, "text") if part.get(name)), "text")
            texts.append(text_of(part, name, f"{path}.{text_key}"))
    if texts and role != "assistant":
        raise WrongField(path, f"only the assistant may have reasoning, found it on {role}")
    return "\n".join(texts)


def reasoning_of(message: Message) -> str:
    """Return the reasoning of a message: its field, or the <think> block at its beginning."""
    inline = _THINK_TAG.match(message.get("content") or "")
    return str(message.get("reasoning_content") or (inline[1] if inline else "")).strip()


def without_reasoning(message: Message) -> Message:
    """Return a message without its reasoning."""
    bare = {key: value for key, value in message.items() if key != "reasoning_content"}
    if message["role"] == "assistant" and bare.get("content"):
        bare["content"] = _THINK_TAG.sub("", bare["content"])
    return bare


def _is_target(turn: Mapping[str, object], role: str, path: str) -> bool:
    """Return whether a turn's marks include it in the loss; only an assistant turn may be."""
    values = {mark: turn[mark] for mark in MARKS if turn.get(mark) is not None}
    for mark, value in values.items():
        if value not in (0, 1) or (value and role != "assistant"):
            expected = "false or 0" if role != "assistant" else "true, false, 0 or 1"
            problem = f"expected {expected} on a turn of {role}, found {value!r:.40}"
            raise WrongField(f"{path}.{mark}", problem)
    first, *others = values or ["weight"]
    if other := next((mark for mark in others if values[mark] != values[first]), None):
        problem = f"{values[other]!r} contradicts {first}: {values[first]!r}"
        raise WrongField(f"{path}.{other}", problem)
    return bool(values.get(first, 1))


def _content(turn: Mapping[str, object], key: str, path: str) -> str:
    value = turn.get(key)
    return _joined(value, path) if isinstance(value, list) else text_of(turn, key, path)


def _joined(content: Sequence[object], path: str) -> str:
    """Return the text of a list of {"type": "text", "text": ...}, without reasoning."""
    parts = []
    for number, part in enumerate(content):
        where = f"{path}[{number}]"
        if not isinstance(part, Mapping):
            raise WrongField(where, f"expected an object, found {kind_of(part)}")
        if part.get("type") in _REASONING:
            continue
        if part.get("type") != "text":
            raise WrongField(where, f"only text can be trained on, found {part.get('type')!r}")
        parts.append(text_of(part, "text", f"{where}.text"))
    return "".join(parts)


def _calls(value: object, role: str, path: str) -> list[Tool]:
    if role != "assistant":
        raise WrongField(path, f"only the assistant may call tools, found calls on {role}")
    if not isinstance(value, list):
        raise WrongField(path, f"expected a list, found {kind_of(value)}")
    calls: list[Tool] = []
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
        entry = {"type": "function", "function": {"name": name, "arguments": arguments}}
        has_id = call.get("id") is not None and "function" in call
        calls.append(entry | ({"id": call["id"]} if has_id else {}))
    return calls


def parsed_json(text: str) -> Any:
    """Return the list or object that a text is in JSON; None if it is neither."""
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list | dict) else None


def _parse_json(text: str, path: str) -> Any:
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError) as problem:
        raise WrongField(path, f"not JSON: {problem}") from None


def kind_of(value: object) -> str:
    """Return the type of a JSON value, for messages."""
    names = {type(None): "null", list: "a list", dict: "an object", str: "text", bool: "a boolean"}
    return names.get(type(value), f"a number ({value!r})")


def system_of(messages: Sequence[Message]) -> str:
    """Return the system prompt at the beginning of a conversation, "" if it has none."""
    is_system = bool(messages) and messages[0]["role"] in ("system", "developer")
    return str(messages[0].get("content") or "") if is_system else ""
