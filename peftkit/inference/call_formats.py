"""The formats in which model families write tool calls in the text of their answers.

Hermes and Qwen, Qwen3-Coder, GLM-4.5, Mistral, DeepSeek, Harmony (gpt-oss), Gemma 4, LFM2, Olmo 3,
Llama 3 and Llama 4, each as its chat template writes it.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call of a tool; `id` where the model itself wrote one."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


class NoCall(ValueError):
    """Text that begins as a call and is none."""


class Unclosed(NoCall):
    """What looks like the end of a call is inside of one of its strings."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls.

    Attributes:
        opens: Texts with which calls begin.
        close: The text that ends them; None: the end of the answer.
        read: Returns the calls of a text from its opening to its end; raises `NoCall`, or another
            ValueError, SyntaxError, TypeError, RecursionError or MemoryError.
        at_start: Whether calls stand before any text only.
        is_untyped: Whether arguments are written without their types, which the schema tells.
        thought: What reasoning stands between.
        skips: Texts between the parts of an answer.
        as_text: Whether the chat template takes a call's arguments as JSON text.
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

    def message(self, text: str, calls: Sequence[tuple[str, Call]]) -> dict[str, Any]:
        """Return an answer as the chat template takes it.

        Args:
            calls: Each with its id.
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
    """Return a call's arguments as JSON text.

    Raises:
        ValueError, TypeError: They are no JSON.
    """
    return json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise NoCall(f"{text} is no number of JSON")
    return number


_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _decoded(text: str, at: int = 0) -> tuple[Any, int]:
    """Return the JSON value at a place, and where it ends."""
    try:
        return _JSON.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise Unclosed(error.msg) if "Unterminated string" in error.msg else error from None


def _whole(text: str) -> Any:
    value, end = _decoded(text := text.strip())
    if text[end:].strip():
        raise NoCall("more than one value")
    return value


def _call(found: Any) -> Call:
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        raise NoCall("no object with a name")
    given = found.get("arguments", found.get("parameters", {}))
    if isinstance(given, str):
        given = _whole(given)
    if not isinstance(given, dict):
        raise NoCall("arguments are no object")
    identity = found.get("id")
    return Call(found["name"], given, identity if isinstance(identity, str) else None)


def calls_of(found: Any) -> list[Call]:
    """Return the calls of one object with a name and arguments, or of a list of them.

    Raises:
        NoCall: It is another thing.
    """
    return [_call(one) for one in (found if isinstance(found, list) else [found])]


def _inside(text: str, opening: str, close: str) -> str:
    if not text.endswith(close):
        raise NoCall("not closed")
    return text.removeprefix(opening).removesuffix(close).strip()


def _hermes(text: str) -> list[Call]:
    return calls_of(_whole(_inside(text, "<tool_call>", "</tool_call>")))


_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.S)
_GLM_ARGUMENT = re.compile(
    r"\s*<arg_key>((?:(?!</arg_key>).)*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.S
)


def _pairs(pattern: re.Pattern[str], text: str) -> dict[str, Any]:
    # one after the other, not searched for: an answer may open thousands and close none
    pairs, at = dict[str, Any](), 0
    while match := pattern.match(text, at):
        pairs[match[1].strip()], at = match[2], match.end()
    if text[at:].strip():
        raise NoCall("other text between the arguments")
    return pairs


def _coder(text: str) -> list[Call]:
    body = _inside(text, "<tool_call>", "</tool_call>")
    name, end, rest = _inside(body, "<function=", "</function>").partition(">")
    if not body.startswith("<function=") or not end:
        raise NoCall("no function")
    return [Call(name.strip(), _pairs(_PARAMETER, rest))]


def _glm(text: str) -> list[Call]:
    body = _inside(text, "<tool_call>", "</tool_call>")
    name = re.match(r"[^\s<{]+", body)
    if name is None:
        raise NoCall("no name")
    return [Call(name[0], _pairs(_GLM_ARGUMENT, body[name.end() :]))]


def _llama(text: str) -> list[Call]:
    text = text.removeprefix("<|python_tag|>").strip()
    found, at = [], 0
    while at < len(text):
        value, at = _decoded(text, at)
        found.append(_call(value))
        while at < len(text) and text[at] in "; \t\r\n":
            at += 1
    return found


_MISTRAL = re.compile(r"([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(?=\{)")


def _mistral(text: str) -> list[Call]:
    found: list[Call] = []
    for piece in filter(None, map(str.strip, text.split("[TOOL_CALLS]"))):
        if piece.startswith("["):
            found += calls_of(_whole(piece))
        elif match := _MISTRAL.match(piece):
            found.append(_call({"name": match[1], "arguments": _whole(piece[match.end() :])}))
            found[-1] = found[-1]._replace(id=match[2])
        else:
            raise NoCall("no name")
    return found


def deepseek_mark(words: str) -> str:
    """Return a mark of DeepSeek's, which has characters that look like others."""
    bar, space = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"
    return f"<{bar}{words.replace(' ', space)}{bar}>"


_CALLS_BEGIN, _CALLS_END = deepseek_mark("tool calls begin"), deepseek_mark("tool calls end")
_CALL_BEGIN, _CALL_END = deepseek_mark("tool call begin"), deepseek_mark("tool call end")
_SEPARATOR = deepseek_mark("tool sep")
_DEEPSEEK = re.compile(
    rf"(?:function{_SEPARATOR})?([\w.-]+)\s*(?:{_SEPARATOR}\s*)?(?:```json\s*)?"
    rf"(\{{.*\}})\s*(?:```\s*)?{_CALL_END}\s*",
    re.S,
)
"""No two runs of white space meet: they could be shared out in a thousand ways."""


def _deepseek(text: str) -> list[Call]:
    body = _inside(text, _CALLS_BEGIN, _CALLS_END)
    found = []
    for piece in body.split(_CALL_BEGIN)[1:]:
        match = _DEEPSEEK.fullmatch(piece)
        if match is None:
            raise NoCall("no name with arguments")
        found.append(_call({"name": match[1], "arguments": _whole(match[2])}))
    return found


def _harmony(text: str) -> list[Call]:
    header, found, body = text.removesuffix("<|call|>").partition("<|message|>")
    name = re.search(r"to=functions\.([\w.-]+)", header)
    if name is None or not found:
        raise NoCall("no function")
    return [_call({"name": name[1], "arguments": _whole(body)})]


_GEMMA = re.compile(r"call:([\w.-]+)(?=\{)")
_GEMMA_KEY = re.compile(r'([{,]\s*)([^\s"{}\[\],:]+)\s*:')


def _gemma(text: str) -> list[Call]:
    body = _inside(text, "<|tool_call>", "<tool_call|>")
    match = _GEMMA.match(body)
    if match is None:
        raise NoCall("no name")
    pieces = body[match.end() :].split('<|"|>')  # every second one is a string
    for number, piece in enumerate(pieces):
        keyed = re.sub(r"\bNone\b", "null", _GEMMA_KEY.sub(r'\1"\2":', piece))
        pieces[number] = json.dumps(piece) if number % 2 else keyed
    return [_call({"name": match[1], "arguments": _whole("".join(pieces))})]


_NAMES = {"true": True, "false": False, "null": None}
_PYTHONIC_MARKS = re.compile(
    r"<\|tool_call_(?:start|end)\|>|</?function_calls>|<\|python_(?:start|end)\|>"
)


class _Literals(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node


def _pythonic(text: str) -> list[Call]:
    """Read `[f(a=1), g()]`, or calls on lines of their own; nothing of it is executed."""
    found: list[Call] = []
    for line in ast.parse(_PYTHONIC_MARKS.sub("", text).strip()).body:
        value = line.value if isinstance(line, ast.Expr) else None
        for one in value.elts if isinstance(value, ast.List) else [value]:
            if (
                not isinstance(one, ast.Call)
                or one.args
                or any(k.arg is None for k in one.keywords)
            ):
                raise NoCall("no call with named arguments")
            given = {str(k.arg): ast.literal_eval(_Literals().visit(k.value)) for k in one.keywords}
            found.append(Call(ast.unparse(one.func), _whole(json.dumps(given))))
    return found


FORMATS: tuple[CallFormat, ...] = (
    CallFormat("hermes", ("<tool_call>",), "</tool_call>", _hermes),
    CallFormat("coder", ("<tool_call>",), "</tool_call>", _coder, is_untyped=True),
    CallFormat("glm", ("<tool_call>",), "</tool_call>", _glm, is_untyped=True),
    CallFormat("mistral", ("[TOOL_CALLS]",), None, _mistral, thought=("[THINK]", "[/THINK]")),
    CallFormat("deepseek", (_CALLS_BEGIN,), _CALLS_END, _deepseek),
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
    CallFormat(
        "gemma",
        ("<|tool_call>",),
        "<tool_call|>",
        _gemma,
        thought=("<|channel>thought\n", "<channel|>"),
    ),
    CallFormat("lfm", ("<|tool_call_start|>",), "<|tool_call_end|>", _pythonic),
    CallFormat("olmo", ("<function_calls>",), "</function_calls>", _pythonic),
    CallFormat("llama", ("<|python_tag|>", "{"), None, _llama, at_start=True),
    CallFormat("pythonic", ("<|python_start|>", "["), None, _pythonic, at_start=True),
)

NO_CALLS = CallFormat("none", (), None, lambda _: [])
"""Of templates that write no calls: an answer is text and reasoning."""


def typed(call: Call, tools: Sequence[Mapping[str, Any]]) -> Call:
    """Return a call whose arguments have the types of the tool's schema."""
    schema: Mapping[str, Any] = next(
        (t["function"] for t in tools if t["function"]["name"] == call.name), {}
    )
    known = (schema.get("parameters") or {}).get("properties") or {}
    given = {key: _of_type(value, known.get(key)) for key, value in call.arguments.items()}
    return call._replace(arguments=given)


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
