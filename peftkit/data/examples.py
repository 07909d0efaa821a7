"""Examples: the four kinds of training data that records become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from peftkit.data.messages import (
    Message,
    Tool,
    WrongField,
    kind_of,
    parse_tools,
    parsed_json,
    text_of,
)
from peftkit.data.records import Record

TURNS = ("messages", "conversations", "conversation")
ANSWERS = ("output", "response", "answer", "completion")
QUESTIONS = ("instruction", "question", "query", "input")
TEXTS = ("text", "content")
CONTEXT = ("system", "tools", "chat_template_kwargs")
"""Fields that accompany a conversation."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns as transformers' chat templates read them.

    Args:
        target_turns: Indices of the assistant turns to train on.
        tools: JSON schemas of the functions that the assistant may call.
        variables: Variables of the chat template, which override the recipe's.
    """

    messages: tuple[Message, ...]
    target_turns: tuple[int, ...]
    tools: tuple[Tool, ...]
    source: str
    variables: Mapping[str, object] = field(default_factory=dict)


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


def first_of(fields: Mapping[str, object], names: Sequence[str]) -> str | None:
    """Return the first of these names that is a field of the row; one with a value, if any."""
    present = [name for name in names if name in fields]
    filled = [name for name in present if fields[name] is not None]
    return next(iter(filled or present), None)


def conversation_of(
    record: Record, messages: Sequence[Message], target_turns: Sequence[int]
) -> Conversation:
    """Return a conversation with the fields of its row in `CONTEXT`."""
    fields = record.fields
    if fields.get("system"):
        system: Message = {"role": "system", "content": text_of(fields, "system")}
        if messages[0]["role"] != "system":
            messages, target_turns = [system, *messages], [turn + 1 for turn in target_turns]
        elif messages[0] != system:
            raise WrongField("system", "the messages begin with another system turn")
    tools = parse_tools(fields["tools"], "tools") if "tools" in fields else []
    variables = fields.get("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping):
        problem = f"expected an object with variables, found {kind_of(variables)}"
        raise WrongField("chat_template_kwargs", problem)
    source = record.source
    return Conversation(tuple(messages), tuple(target_turns), tuple(tools), source, variables)


def with_parsed_cells(record: Record) -> Record:
    """Return a row whose conversations, tools and variables are not JSON in a text."""
    fields = {
        name: value
        for name in (*TURNS, *CONTEXT[1:])
        if isinstance(text := record.fields.get(name), str)
        and (value := parsed_json(text)) is not None
    }
    return Record({**record.fields, **fields}, record.source) if fields else record
