"""What rows ask, with or without an answer: for tasks whose answers are made by a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from peftkit.data.format import (
    ANSWERS,
    QUESTIONS,
    TURNS,
    Conversation,
    Example,
    Instruction,
    Message,
    ParsedRow,
    Text,
    first_of,
    parse,
)
from peftkit.data.load import FormatName, Record
from peftkit.errors import DataError

OPEN = "\ue000"
"""What stands in place of an answer that a row does not have."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a row asks for its last answer.

    Attributes:
        prompt: What the user says, or a conversation up to there.
        reference: The row's own answer, where it has one.
        tools: Functions that the assistant may call.
    """

    prompt: str | tuple[Message, ...]
    reference: str | None
    tools: tuple[Mapping[str, Any], ...]
    source: str

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as a conversation."""
        is_text = isinstance(self.prompt, str)
        return ({"role": "user", "content": self.prompt},) if is_text else tuple(self.prompt)  # type: ignore[arg-type]


def read_prompts(
    records: Sequence[Record], name: Literal["auto"] | FormatName = "auto", *, where: str
) -> tuple[list[Asked], ParsedRow]:
    """Return what records ask, in any format of conversations, questions or prompts.

    Raises:
        DataError: As `parse`; or a record is a text, which asks nothing.
    """
    parsed = parse([_with_answer(record) for record in records], name, where=where)
    return [_asked(example) for example in parsed.examples], parsed


def _asked(example: Example) -> Asked:
    if isinstance(example, Text):
        raise DataError(
            f"{example.source} asks nothing.",
            found="It is a text (format 'text').",
            fix="Give rows with a prompt, a question or messages.",
        )
    if isinstance(example, Conversation):
        turns = [n for n, turn in enumerate(example.messages) if turn["role"] == "assistant"]
        prompt, answer = example.messages[: turns[-1]], example.messages[turns[-1]]
        said = answer.get("content") or ""
        return Asked(prompt, _known(said), example.tools, example.source)
    if isinstance(example, Instruction):
        return Asked(example.request, _known(example.output), (), example.source)
    return Asked(example.prompt, _known(example.completion), (), example.source)


def _known(answer: str) -> str | None:
    return answer if answer.strip() and answer != OPEN else None


def _with_answer(record: Record) -> Record:
    """Return a record that has an answer, if only one that is left open."""
    fields = dict(record.fields)
    turns = first_of(fields, TURNS)
    question = turns or first_of(fields, ("prompt", *QUESTIONS))
    if question is None:
        return record
    asked = fields[question]
    if turns is not None:
        fields[turns] = _with_turn(asked)
    else:
        name = first_of(fields, [name for name in ANSWERS if name != question]) or "completion"
        answer = fields.get(name) or fields.get("reference") or OPEN
        if isinstance(asked, list) and not isinstance(answer, list):
            answer = [{"role": "assistant", "content": answer}]
        is_known_kind = isinstance(answer, str) or isinstance(asked, list)
        fields[name] = answer if is_known_kind else json.dumps(answer)
    return replace(record, fields=fields)


def _with_turn(turns: Any) -> Any:
    last = turns[-1] if isinstance(turns, list) and turns else None
    if not isinstance(last, Mapping):
        return turns
    role, content = ("from", "value") if "from" in last else ("role", "content")
    answered = last.get(role) in ("assistant", "gpt")
    return turns if answered else [*turns, {role: "assistant", content: OPEN}]
