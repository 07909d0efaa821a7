"""Read prompts, and reference answers if any, for tasks in which a model generates the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from peftkit.data.examples import (
    ANSWERS,
    QUESTIONS,
    TURNS,
    Conversation,
    Example,
    Instruction,
    Text,
    first_of,
    with_parsed_cells,
)
from peftkit.data.format import ParsedRow, parse
from peftkit.data.messages import Message, Tool, role_of, turn_keys
from peftkit.data.records import Record
from peftkit.errors import DataError
from peftkit.settings import FormatName

OPEN = "\ue000"
"""Placeholder of an answer that a row does not have."""


@dataclass(frozen=True, slots=True)
class PromptExample:
    """A row's prompt for its last answer.

    Attributes:
        prompt: The user's text, or a conversation up to the answer.
        reference: The row's own answer, if it has one.
        tools: Functions that the assistant may call.
        variables: Variables of the chat template, which override the recipe's.
        fields: All fields of the row.
    """

    prompt: str | tuple[Message, ...]
    reference: str | None
    tools: tuple[Tool, ...]
    source: str
    variables: Mapping[str, object] = field(default_factory=dict)
    fields: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as a conversation."""
        if isinstance(self.prompt, str):
            return ({"role": "user", "content": self.prompt},)
        return self.prompt


def read_prompts(
    records: Sequence[Record], name: Literal["auto"] | FormatName = "auto", *, where: str
) -> ParsedRow[PromptExample]:
    """Return the prompts of records in any format of conversations, questions or prompts.

    Raises:
        DataError: As `parse`; or a record is a text, without a prompt.
    """
    parsed = parse([_with_answer(record) for record in records], name, where=where)
    pairs = zip(parsed.examples, records, strict=True)
    return ParsedRow(tuple(_prompt(*pair) for pair in pairs), parsed.unused, parsed.format)


def _prompt(example: Example, record: Record) -> PromptExample:
    if isinstance(example, Text):
        raise DataError(
            f"{example.source} asks nothing.",
            found="It is a text (format 'text').",
            fix="Give rows with a prompt, a question or messages.",
        )
    prompt: str | tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    if isinstance(example, Conversation):
        last = max(n for n, turn in enumerate(example.messages) if turn["role"] == "assistant")
        prompt, tools = example.messages[:last], example.tools
        answer = example.messages[last].get("content") or ""
    elif isinstance(example, Instruction):
        prompt, answer = example.request, example.output
    else:
        prompt, answer = example.prompt, example.completion
    reference = answer if answer.strip() and answer != OPEN else None
    variables = example.variables if isinstance(example, Conversation) else {}
    return PromptExample(prompt, reference, tools, example.source, variables, record.fields)


def _with_answer(record: Record) -> Record:
    """Return a record that has an answer: its own, or the placeholder."""
    fields = dict(with_parsed_cells(record).fields)
    turns = first_of(fields, TURNS)
    key = turns or first_of(fields, ("prompt", *QUESTIONS))
    if key is None:
        return record
    question = fields[key]
    if turns is not None:
        fields[turns] = _with_turn(question)
    else:
        name = first_of(fields, [name for name in ANSWERS if name != key]) or "completion"
        answer = fields.get(name) or fields.get("reference") or OPEN
        if isinstance(question, list) and not isinstance(answer, list):
            answer = [{"role": "assistant", "content": answer}]
        is_readable = isinstance(answer, str) or isinstance(question, list)
        fields[name] = answer if is_readable else json.dumps(answer)
    return replace(record, fields=fields)


def _with_turn(turns: Any) -> Any:
    last = turns[-1] if isinstance(turns, list) and turns else None
    if not isinstance(last, Mapping):
        return turns
    role, content = turn_keys(last)
    has_answer = role_of(last) == "assistant"
    return turns if has_answer else [*turns, {role: "assistant", content: OPEN}]
