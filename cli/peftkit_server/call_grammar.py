"""Grammars of forced tool calls, in llguidance's Lark syntax.

The chat template renders a probe call. The grammar takes its literal text around the function name
and the arguments, so a forced call has the format of the model's training. Source: llguidance,
docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peftkit.data.chat import special_texts
from peftkit.files.strict_json import JsonMap
from peftkit.inference.calls import PROBE, PROBE_ID, CallStyle, written_probe

NO_ARGUMENTS: JsonMap = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_ID = "[a-zA-Z0-9]{9}"
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class _Separators:
    """White space of JSON, as in the probe, to match the model's training."""

    item: str
    key: str

    def rule(self, schema: Mapping[str, object]) -> str:
        """Return the rule of JSON with a schema."""
        spaces = {
            "whitespace_flexible": False,
            "item_separator": self.item,
            "key_separator": self.key,
        }
        return f"%json {json.dumps({**schema, 'x-guidance': spaces})}"


_PLAIN = _Separators(", ", ": ")


@dataclass(frozen=True, slots=True)
class _JsonCall:
    """A call with one JSON object: head NAME between OBJECT tail."""

    head: str
    between: str
    tail: str
    separators: _Separators

    def rules(self, tool: JsonMap, quoted: _Quoted) -> list[str]:
        function = tool["function"]
        schema = {"type": "object", **(function.get("parameters") or NO_ARGUMENTS)}
        before, after = quoted(self.head + function["name"] + self.between), quoted(self.tail)
        return [f"{before} {self.separators.rule(schema)} {after}"]


@dataclass(frozen=True, slots=True)
class _KeyedCall:
    """A call with a text for each argument: head NAME (opens KEY between VALUE)* tail.

    Attributes:
        close: End of a value; the tail begins with it.
    """

    head: str
    opens: str
    between: str
    close: str
    tail: str

    def rules(self, tool: JsonMap, quoted: _Quoted) -> list[str]:
        function = tool["function"]
        schema = function.get("parameters") or NO_ARGUMENTS
        properties: JsonMap = schema.get("properties") or {}
        parts = [quoted(self.head + function["name"])]
        for key, value in properties.items():
            begin = quoted(self.opens + key + self.between)
            optional = "" if key in (schema.get("required") or ()) else "?"
            parts.append(f"({begin} {self._value(value, quoted)}){optional}")
        return [" ".join([*parts, quoted(self.tail.removeprefix(self.close))])]

    def _value(self, schema: Any, quoted: _Quoted) -> str:
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if isinstance(schema, Mapping) and "enum" in schema:
            texts = (text if isinstance(text, str) else json.dumps(text) for text in schema["enum"])
            return f"({' | '.join(map(json.dumps, texts))}) {quoted(self.close)}"
        if kind in ("integer", "number", "boolean", "object", "array", "null"):
            return f"{_PLAIN.rule(schema)} {quoted(self.close)}"
        return "text"


class _Quoted:
    """Quotes literal text for a grammar, with special tokens as token ids."""

    def __init__(self, tokenizer: Any) -> None:
        texts = special_texts(tokenizer)
        marks = [*texts, PROBE_ID]
        self._parts = re.compile(f"({'|'.join(map(re.escape, marks))})")
        self._ids = {text: int(tokenizer.convert_tokens_to_ids(text)) for text in texts}

    def __call__(self, text: str) -> str:
        """Return a sequence of strings and tokens."""
        return " ".join(self._part(part) for part in self._parts.split(text) if part) or '""'

    def _part(self, part: str) -> str:
        if part == PROBE_ID:
            return f"/{_ID}/"
        return f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part)


def call_grammar(
    calls: CallStyle, tokenizer: object, tools: Sequence[Mapping[str, object]], *, thinks: bool
) -> str | None:
    """Return the grammar of one call to any of the tools; None: the call format has no grammar.

    Args:
        tools: Tools in the format of chat templates.
        thinks: Whether the completion starts inside reasoning, which the grammar then allows first.
    """
    written = written_probe(calls.render, as_text=calls.form.as_text)
    begins = [at for mark in calls.form.opens if (at := written.find(mark)) >= 0]
    ends = "|".join(re.escape(calls.decoded([token])) for token in calls.stops)
    written = re.sub(rf"(?:{ends})\s*\Z", "", written[min(begins, default=0) :])
    syntax = _keyed(written) if calls.form.is_untyped else _json_call(written)
    if syntax is None:
        return None
    quoted = _Quoted(tokenizer)
    rules = [rule for tool in tools for rule in syntax.rules(tool, quoted)]
    names = [f"call_{number}" for number in range(len(rules))]
    start = f"thought ({' | '.join(names)})" if thinks else " | ".join(names)
    lines = [
        f"start: {start}",
        *(f"{name}: {rule}" for name, rule in zip(names, rules, strict=True)),
    ]
    if isinstance(syntax, _KeyedCall):
        lines.append(_up_to("text", syntax.close))
    if thinks:
        lines += ["thought: thinking /\\s*/", _up_to("thinking", calls.form.thought[1])]
    return "\n".join(lines) + "\n"


def _up_to(name: str, close: str) -> str:
    """Return the rule of any text up to the first occurrence of `close`, inclusive."""
    literal = re.escape(close).replace("/", r"\/").replace("\\\n", r"\n")
    return f"{name}[lazy]: /(?s:.*){literal}/"


def _json_call(written: str) -> _JsonCall | None:
    """Split a probe call with one JSON object into its literal parts."""
    for begin in (match.start() for match in re.finditer(r"\{", written)):
        try:
            value, end = _DECODER.raw_decode(written, begin)
        except ValueError:
            continue
        name = written.rfind(PROBE.name, 0, begin)
        if value != PROBE.arguments or name < 0:
            continue
        text = written[begin:end]
        item = ", " if text.startswith('{"') and ", " in text else ","
        separators = _Separators(item, ": " if '": ' in text else ":")
        between = written[name + len(PROBE.name) : begin]
        return _JsonCall(written[:name], between, written[end:].rstrip(), separators)
    return None


def _keyed(written: str) -> _KeyedCall | None:
    """Split a probe call with a text for each argument into its literal parts."""
    (first, value), *_, (last, _) = PROBE.arguments.items()
    second = [*PROBE.arguments][1]
    name, one, two = (written.find(text) for text in (PROBE.name, first, second))
    text = written.find(value, one)
    if min(name, one, two, text) < 0:
        return None
    size = 0
    while size < one and written[one - size - 1] == written[two - size - 1]:
        size += 1
    opens, between = written[one - size : one], written[one + len(first) : text]
    over = re.search(re.escape(opens + last + between) + "(?i:true)", written)
    if over is None:
        return None
    return _KeyedCall(
        head=written[:name],
        opens=opens,
        between=between,
        close=written[text + len(value) : two - size],
        tail=written[over.end() :].rstrip(),
    )
