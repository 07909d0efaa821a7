"""Records as examples: four kinds, of five formats.

| format            | fields (and aliases)                                             |
| messages          | messages: [{role, content, tool_calls ...}], tools               |
| sharegpt          | conversations: [{from, value}], tools, system                    |
| alpaca            | instruction (question, query, input), input (context),           |
|                   | output (answer, response), system, history                       |
| prompt_completion | prompt, completion (response, answer, output): two texts, or     |
|                   | two lists of messages                                            |
| text              | text (content)                                                   |

Messages, OpenAI's and ShareGPT's, are brought to the shape of transformers' chat templates: roles
system, developer, user, assistant and tool; content is text; reasoning is `reasoning_content`; a
tool call's arguments are an object, not JSON in a string.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from peftkit.data.messages import (
    Message,
    WrongField,
    completion_messages,
    full_text,
    parse_messages,
    parse_tools,
    text_of,
    text_or_number,
)
from peftkit.data.records import Record
from peftkit.errors import ConfigError, DataError, first_few
from peftkit.settings import FormatName

MAX_SHOWN = 5
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns as the chat templates of transformers take them.

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
        """The same as two turns, for a chat template."""
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
        """The same as two turns, for a chat template."""
        return Instruction(self.prompt, "", self.completion, self.source).conversation


@dataclass(frozen=True, slots=True)
class Text:
    """A document; all of its tokens are targets."""

    text: str
    source: str


Example = Conversation | Instruction | Completion | Text


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """The examples of records; `unused` are the fields that no example used."""

    format: FormatName
    examples: tuple[Example, ...]
    unused: tuple[str, ...]


TURNS = ("messages", "conversations", "conversation")
ANSWERS = ("output", "response", "answer", "completion")
QUESTIONS = ("instruction", "question", "query", "input")
_MATERIAL = ("input", "context")
_TEXTS = ("text", "content")

# fields that a loss over text cannot use
_MEDIA = {
    "images": "images",
    "image": "images",
    "videos": "videos",
    "video": "videos",
    "audios": "audio",
    "audio": "audio",
}
_PREFERENCES = dict.fromkeys(("chosen", "rejected"), "preferences (chosen and rejected)")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Names of the fields with prompt and completion, which a recipe gives instead of a format.

    Attributes:
        settings: The recipe's keys that name them.
    """

    prompt: str
    completion: str
    settings: tuple[str, str]

    @classmethod
    def of(cls, **settings: str | None) -> FieldNames | None:
        """Return the names that two settings give; None where both are None.

        Raises:
            ConfigError: One is None.
        """
        first, second = settings
        prompt, completion = settings.values()
        if prompt is not None and completion is not None:
            return cls(prompt, completion, (f"task.{first}", f"task.{second}"))
        if prompt is not None or completion is not None:
            raise ConfigError(
                f"{first} and {second} are named together or not at all.",
                fix=f"Name both: {first}: question, {second}: answer.",
            )
        return None


def parse(
    records: Sequence[Record],
    name: Literal["auto"] | FormatName,
    *,
    where: str,
    fields: FieldNames | None = None,
) -> ParsedRow:
    """Make an example of each record.

    Args:
        name: The format; auto: detected from the first record, and required of all others.
        fields: Read as prompt and completion, in place of any format.

    Raises:
        DataError: With file, line and field of the first few rows that cannot be used.
    """
    if fields is not None:
        return _parse_named(records, fields, where)
    records = [with_usual_names(record) for record in records]
    first = records[0]
    format_name = detect(first.fields) if name == "auto" else name
    if format_name is None:
        raise _unknown_fields(first, where)
    read = partial(_example, name=format_name, auto=name == "auto")
    examples, unused = read_each(records, read, format_name, where)
    return ParsedRow(format_name, tuple(examples), unused)


def read_each(
    records: Sequence[Record],
    read: Callable[[Record], tuple[Read, Iterable[str]]],
    what: str,
    where: str,
    fix: str = "Correct or remove these rows.",
) -> tuple[list[Read], tuple[str, ...]]:
    """Parse each record; return the results, and the fields that none of them used.

    Args:
        read: Returns a record's result, and the fields that it used.
        what: The rows' format, in words.

    Raises:
        DataError: `read` raised WrongField; with file, line and field of the first few such rows.
    """
    parsed, problems, used = list[Read](), list[str](), set[str]()
    for record in records:
        try:
            result, used_fields = read(record)
            parsed.append(result)
            used.update(used_fields)
        except WrongField as problem:
            problems.append(f"{record.source}: {problem}")
    if problems:
        raise bad_rows(problems, len(records), what, where, fix)
    names = dict.fromkeys(name for record in records for name in record.fields)
    return parsed, tuple(name for name in names if name not in used)


def _parse_named(records: Sequence[Record], names: FieldNames, where: str) -> ParsedRow:
    needed = {names.prompt, names.completion}
    lacking = [record for record in records if not needed <= record.fields.keys()]
    if lacking:
        settings = ", ".join(names.settings)
        raise DataError(
            f"Cannot use {len(lacking)} of {len(records)} rows of {where}.",
            found=f"{lacking[0].source} lacks '{names.prompt}' or '{names.completion}' "
            f"({settings}); its fields: {', '.join(lacking[0].fields) or 'none'}.",
            fix="Name fields that every row has.",
        )
    pairs = ((r.fields[names.prompt], r.fields[names.completion], r.source) for r in records)
    renamed = [
        Record({"prompt": prompt, "completion": completion}, source)
        for prompt, completion, source in pairs
    ]
    parsed = parse(renamed, "prompt_completion", where=where)
    others = dict.fromkeys(name for record in records for name in record.fields)
    return ParsedRow(parsed.format, parsed.examples, tuple(n for n in others if n not in needed))


def detect(fields: Mapping[str, Any]) -> FormatName | None:
    """Return the format that a row's fields make, the richest one if several fit."""
    turns = first_of(fields, TURNS)
    if turns is not None:
        value = fields[turns]
        opening = value[0] if isinstance(value, list) and value else {}
        return "sharegpt" if isinstance(opening, Mapping) and "from" in opening else "messages"
    if "prompt" in fields and first_of(fields, ANSWERS):
        return "prompt_completion"
    question = first_of(fields, QUESTIONS)
    if question and first_of(fields, [key for key in ANSWERS if key != question]):
        return "alpaca"
    return "text" if first_of(fields, _TEXTS) else None


def with_usual_names(record: Record) -> Record:
    """Return a row with its fields' names in small letters, if only these make a format."""
    small = {name.strip().lower(): value for name, value in record.fields.items()}
    if len(small) < len(record.fields) or detect(record.fields) or not detect(small):
        return record
    return Record(small, record.source)


def first_of(fields: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the first of some names that a row has as a field."""
    return next((name for name in names if name in fields), None)


def _example(record: Record, name: FormatName, *, auto: bool) -> tuple[Example, set[str]]:
    """Return an example and the names of the fields that it used."""
    fields = record.fields
    if auto and (detected := detect(fields)) != name:
        kind = "make no known format" if detected is None else f"make the format '{detected}'"
        listed = ", ".join(fields) or "none at all"
        raise WrongField("", f"its fields ({listed}) {kind}; the first row is '{name}'")
    refuse_fields(fields, {**_PREFERENCES, **_MEDIA})
    return _BUILDERS[name](record)


def refuse_fields(fields: Mapping[str, Any], kinds: Mapping[str, str] = _MEDIA) -> None:
    """Raise `WrongField` for a field that holds what a task cannot use: by default media."""
    for key, kind in kinds.items():
        if fields.get(key):
            raise WrongField(key, f"the row holds {kind}, which this task cannot learn from")


def _turns(record: Record) -> tuple[Example, set[str]]:
    fields = record.fields
    key = first_of(fields, TURNS)
    if key is None:
        raise WrongField(TURNS[0], "missing")
    messages, targets = parse_messages(fields[key], key)
    return conversation_of(record, messages, targets), {key, "system", "tools"}


def conversation_of(
    record: Record, messages: Sequence[Message], target_turns: Sequence[int]
) -> Conversation:
    """Return a conversation, with the system message and the tools in fields of its row."""
    fields = record.fields
    if fields.get("system"):
        if messages[0]["role"] == "system":
            raise WrongField("system", "the messages begin with a system turn already")
        system: Message = {"role": "system", "content": text_of(fields, "system")}
        messages, target_turns = [system, *messages], [turn + 1 for turn in target_turns]
    tools = parse_tools(fields.get("tools"), "tools")
    return Conversation(tuple(messages), tuple(target_turns), tuple(tools), record.source)


def _instruction(record: Record) -> tuple[Example, set[str]]:
    fields = record.fields
    question = first_of(fields, QUESTIONS) or QUESTIONS[0]
    answer = first_of(fields, [key for key in ANSWERS if key != question]) or ANSWERS[0]
    material = first_of(fields, [key for key in _MATERIAL if key != question])
    request, output = full_text(fields, question), text_or_number(fields, answer)
    given = text_of(fields, material) if material and fields[material] is not None else ""
    example = Instruction(request, given, output, record.source)
    used = {question, answer, material or "", "system", "history"}
    if not fields.get("system") and not fields.get("history"):
        return example, used
    turns: list[Any] = []
    if fields.get("system"):
        turns.append({"role": "system", "content": text_of(fields, "system")})
    for number, pair in enumerate(fields.get("history") or []):
        if not isinstance(pair, list) or len(pair) != 2:
            raise WrongField(f"history[{number}]", "expected [question, answer]")
        turns += [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    turns += [
        {"role": "user", "content": example.request},
        {"role": "assistant", "content": output},
    ]
    messages, targets = parse_messages(turns, "history")
    return Conversation(tuple(messages), tuple(targets), (), record.source), used


def _completion(record: Record) -> tuple[Example, set[str]]:
    fields = record.fields
    prompt = first_of(fields, ("prompt", *QUESTIONS)) or "prompt"
    answer = first_of(fields, ("completion", *[key for key in ANSWERS if key != prompt]))
    answer = answer or "completion"
    used = {prompt, answer, "tools"}
    if isinstance(fields.get(prompt), list):  # conversational: two lists of messages
        messages, targets = completion_messages(fields, prompt, answer)
        return conversation_of(record, messages, targets), {*used, "system"}
    if fields.get("tools"):
        raise WrongField("tools", "tools need messages; a plain prompt has no place for them")
    completion = text_or_number(fields, answer)
    return Completion(text_of(fields, prompt), completion, record.source), used


def _text(record: Record) -> tuple[Example, set[str]]:
    key = first_of(record.fields, _TEXTS) or _TEXTS[0]
    return Text(text_of(record.fields, key), record.source), {key}


_BUILDERS: dict[FormatName, Callable[[Record], tuple[Example, set[str]]]] = {
    "messages": _turns,
    "sharegpt": _turns,
    "alpaca": _instruction,
    "prompt_completion": _completion,
    "text": _text,
}


def _unknown_fields(record: Record, where: str) -> DataError:
    own = [*record.fields, "question", "answer"][:2]
    return DataError(
        f"Cannot detect the format of {where}.",
        found=f"{record.source} has the fields: {', '.join(record.fields) or 'none'}.",
        fix="Accepted: messages; conversations; instruction + output (input); question + answer; "
        "prompt + completion; text.\nOr name the fields that are read and learnt:\n"
        f"--set 'task.prompt={own[0]}' --set 'task.completion={own[1]}'",
    )


def bad_rows(problems: Sequence[str], total: int, name: str, where: str, fix: str) -> DataError:
    """Return the error that counts the unusable rows and names the first few.

    If there are more, all are listed in a file in the folder for temporary files.
    """
    listed = first_few(problems, MAX_SHOWN)
    if len(problems) > MAX_SHOWN:
        name_of_file = re.sub(r"[^\w.-]+", "-", Path(where).name) or "data"
        prefix = f"peftkit-bad-rows-{name_of_file}-"  # a name that nobody else can have taken
        with (
            suppress(OSError),
            tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", errors="replace", prefix=prefix, suffix=".txt", delete=False
            ) as file,
        ):
            file.write("\n".join(problems) + "\n")
            listed += f"\nAll are listed in {file.name}"
    return DataError(
        f"Cannot use {len(problems)} of {total} rows of {where} (format '{name}').",
        found=listed,
        fix=fix,
    )
