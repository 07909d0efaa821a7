"""Examples: the four kinds of training data that records become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peftkit.data.messages import Message, WrongField, parse_tools, text_of
from peftkit.data.records import Record

TURNS = ("messages", "conversations", "conversation")
ANSWERS = ("output", "response", "answer", "completion")
QUESTIONS = ("instruction", "question", "query", "input")
TEXTS = ("text", "content")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns as transformers' chat templates read them.

    Args:
        target_turns: Indices of the assistant turns to train on.
        tools: JSON schemas of the functions that the assistant may call.
    """

    messages: tuple[Message, ...]
    target_turns: tuple[int, ...]
    tools: tuple[Mapping[str, Any], ...]
    source: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction, optionally with input, and its output."""

    instruction: str
    input: str
    output: str
    source: str

    @property
    def request(self) -> str:
        """The user's message."""
        return f"{self.instruction}\n\n{self.input}" if self.input.strip() else self.instruction

    @property
    def conversation(self) -> Conversation:
        """The example as two turns, for a chat template."""
        turns = (
            {"role": "user", "content": self.request},
            {"role": "assistant", "content": self.output},
        )
        return Conversation(turns, (1,), (), self.source)


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion, without a template."""

    prompt: str
    completion: str
    source: str

    @property
    def conversation(self) -> Conversation:
        """The example as two turns, for a chat template."""
        return Instruction(self.prompt, "", self.completion, self.source).conversation


@dataclass(frozen=True, slots=True)
class Text:
    """A document, whose tokens are all targets."""

    text: str
    source: str


Example = Conversation | Instruction | Completion | Text


def first_of(fields: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the first of these names that is a field of the row."""
    return next((name for name in names if name in fields), None)


def conversation_of(
    record: Record, messages: Sequence[Message], target_turns: Sequence[int]
) -> Conversation:
    """Return a conversation with the system message and the tools of its row's fields."""
    fields = record.fields
    if fields.get("system"):
        if messages[0]["role"] == "system":
            raise WrongField("system", "the messages begin with a system turn already")
        system: Message = {"role": "system", "content": text_of(fields, "system")}
        messages, target_turns = [system, *messages], [turn + 1 for turn in target_turns]
    tools = parse_tools(fields.get("tools"), "tools")
    return Conversation(tuple(messages), tuple(target_turns), tuple(tools), record.source)
