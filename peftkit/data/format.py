"""What the fields of a row mean: four kinds of example out of five formats.

| format            | fields (and aliases)                                             |
| messages          | messages: [{role, content, tool_calls ...}], tools               |
| sharegpt          | conversations: [{from, value}], tools, system                    |
| alpaca            | instruction (question, query, input), input (context),           |
|                   | output (answer, response), system, history                       |
| prompt_completion | prompt, completion (response, answer, output): as they stand, or |
|                   | two lists of messages                                            |
| text              | text (content)                                                   |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from peftkit.data.cache import cache_folder
from peftkit.data.load import FormatName, Record
from peftkit.data.messages import (
    Message,
    WrongField,
    completion_messages,
    full_text,
    parse_messages,
    parse_tools,
    text_of,
)
from peftkit.errors import ConfigError, DataError, first_few

MAX_SHOWN = 5
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns as the chat templates of transformers take them.

    Args:
        learnt: Indices of the assistant turns to learn.
        tools: JSON schemas of the functions that the assistant may call.
    """

    messages: tuple[Message, ...]
    learnt: tuple[int, ...]
    tools: tuple[Mapping[str, Any], ...]
    source: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """One question, maybe with material, and its answer: a conversation if there is a template."""

    instruction: str
    input: str
    output: str
    source: str

    @property
    def request(self) -> str:
        """What the user says."""
        return f"{self.instruction}\n\n{self.input}" if self.input.strip() else self.instruction


@dataclass(frozen=True, slots=True)
class Completion:
    """Text that is given, and text that continues it, both as they stand."""

    prompt: str
    completion: str
    source: str


@dataclass(frozen=True, slots=True)
class Text:
    """A document, all of it learnt."""

    text: str
    source: str


Example = Conversation | Instruction | Completion | Text


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """The examples of one file; `unused` are the fields that none of them needed."""

    format: FormatName
    examples: tuple[Example, ...]
    unused: tuple[str, ...]


TURNS = ("messages", "conversations", "conversation")
ANSWERS = ("output", "response", "answer", "completion")
QUESTIONS = ("instruction", "question", "query", "input")
_MATERIAL = ("input", "context")
_TEXTS = ("text", "content")

# fields that change what a row teaches, and that a causal language model's loss cannot use
_OTHER_TASKS = {
    "chosen": "preferences (chosen and rejected)",
    "rejected": "preferences (chosen and rejected)",
    "images": "images",
    "image": "images",
    "videos": "videos",
    "audios": "audio",
    "audio": "audio",
}


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Fields that a recipe names instead of a format: of the prompt, and of what completes it.

    Attributes:
        settings: The keys of the recipe that name them.
    """

    prompt: str
    completion: str
    settings: tuple[str, str]

    @classmethod
    def given(cls, **named: str | None) -> FieldNames | None:
        """Return the names that two settings give; None where they give none.

        Raises:
            ConfigError: One is given, and the other is not.
        """
        first, second = named
        prompt, completion = named.values()
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
    """Give every record its meaning; `auto` goes by the first record, and all must agree.

    Args:
        fields: Read as prompt and completion, whatever the format.

    Raises:
        DataError: With file, line and field of the first few rows that cannot be used.
    """
    if fields is not None:
        return _parse_named(records, fields, where)
    first = records[0]
    found = detect(first.fields) if name == "auto" else name
    if found is None:
        raise _unknown_fields(first, where)
    read = partial(_example, name=found, auto=name == "auto")
    examples, unused = read_each(records, read, found, where)
    return ParsedRow(found, tuple(examples), unused)


def read_each(
    records: Sequence[Record],
    read: Callable[[Record], tuple[Read, Iterable[str]]],
    what: str,
    where: str,
    fix: str = "Mend or remove these rows.",
) -> tuple[list[Read], tuple[str, ...]]:
    """Return what each record says, and the fields that none of them needed.

    Args:
        read: Returns what a record says, and the fields that it looked at.
        what: The rows' format, in words.

    Raises:
        DataError: `read` raised WrongField; with file, line and field of the first few such rows.
    """
    found, problems, used = list[Read](), list[str](), set[str]()
    for record in records:
        try:
            said, own = read(record)
            found.append(said)
            used.update(own)
        except WrongField as problem:
            problems.append(f"{record.source}: {problem}")
    if problems:
        raise bad_rows(problems, len(records), what, where, fix)
    names = dict.fromkeys(name for record in records for name in record.fields)
    return found, tuple(name for name in names if name not in used)


def _parse_named(records: Sequence[Record], names: FieldNames, where: str) -> ParsedRow:
    known = {names.prompt, names.completion}
    lacking = [record for record in records if not known <= record.fields.keys()]
    if lacking:
        settings = ", ".join(names.settings)
        raise DataError(
            f"Cannot use {len(lacking)} of {len(records)} rows of {where}.",
            found=f"{lacking[0].source} lacks '{names.prompt}' or '{names.completion}' "
            f"({settings}); its fields: {', '.join(lacking[0].fields) or 'none'}.",
            fix="Name fields that every row has.",
        )
    renamed = [
        Record(
            {"prompt": r.fields[names.prompt], "completion": r.fields[names.completion]}, r.source
        )
        for r in records
    ]
    parsed = parse(renamed, "prompt_completion", where=where)
    others = dict.fromkeys(name for record in records for name in record.fields)
    return ParsedRow(parsed.format, parsed.examples, tuple(n for n in others if n not in known))


def detect(fields: Mapping[str, Any]) -> FormatName | None:
    """Return the format that a row's fields make, the richest where there are several."""
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


def first_of(fields: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the first of some names that a row has as a field."""
    return next((name for name in names if name in fields), None)


def _example(record: Record, name: FormatName, *, auto: bool) -> tuple[Example, set[str]]:
    """Return an example and the names of the fields that it used."""
    fields = record.fields
    if auto and (own := detect(fields)) != name:
        kind = "make no known format" if own is None else f"make the format '{own}'"
        listed = ", ".join(fields) or "none at all"
        raise WrongField("", f"its fields ({listed}) {kind}; the first row is '{name}'")
    for key, kind in _OTHER_TASKS.items():
        if fields.get(key):
            raise WrongField(key, f"the row holds {kind}, which this task cannot learn from")
    return _BUILDERS[name](record)


def _turns(record: Record) -> tuple[Example, set[str]]:
    fields = record.fields
    key = first_of(fields, TURNS)
    if key is None:
        raise WrongField(TURNS[0], "missing")
    messages, learnt = parse_messages(fields[key], key)
    return conversation_of(record, messages, learnt), {key, "system", "tools"}


def conversation_of(
    record: Record, messages: Sequence[Message], learnt: Sequence[int]
) -> Conversation:
    """Return a conversation, with the system message and the tools that its row has as fields."""
    fields = record.fields
    if fields.get("system"):
        if messages[0]["role"] == "system":
            raise WrongField("system", "the messages begin with a system turn already")
        system: Message = {"role": "system", "content": text_of(fields, "system")}
        messages, learnt = [system, *messages], [turn + 1 for turn in learnt]
    tools = parse_tools(fields.get("tools"), "tools")
    return Conversation(tuple(messages), tuple(learnt), tuple(tools), record.source)


def _instruction(record: Record) -> tuple[Example, set[str]]:
    fields = record.fields
    question = first_of(fields, QUESTIONS) or QUESTIONS[0]
    answer = first_of(fields, [key for key in ANSWERS if key != question]) or ANSWERS[0]
    material = first_of(fields, [key for key in _MATERIAL if key != question])
    request, output = full_text(fields, question), text_of(fields, answer)
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
    messages, learnt = parse_messages(turns, "history")
    return Conversation(tuple(messages), tuple(learnt), (), record.source), used


def _completion(record: Record) -> tuple[Example, set[str]]:
    fields = record.fields
    prompt = first_of(fields, ("prompt", *QUESTIONS)) or "prompt"
    answer = first_of(fields, ("completion", *[key for key in ANSWERS if key != prompt]))
    answer = answer or "completion"
    used = {prompt, answer, "tools"}
    if isinstance(fields.get(prompt), list):  # conversational: two lists of messages
        messages, learnt = completion_messages(fields, prompt, answer)
        return conversation_of(record, messages, learnt), {*used, "system"}
    if fields.get("tools"):
        raise WrongField("tools", "tools need messages; a plain prompt says for itself what it can")
    return Completion(text_of(fields, prompt), text_of(fields, answer), record.source), used


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
    return DataError(
        f"Cannot tell the format of {where}.",
        found=f"{record.source} has the fields: {', '.join(record.fields) or 'none'}.",
        fix="Accepted: messages; conversations; instruction + output (input); question + answer; "
        f"prompt + completion; text.\nOr name it: data.format = {' | '.join(get_args(FormatName))}",
    )


def bad_rows(problems: Sequence[str], total: int, name: str, where: str, fix: str) -> DataError:
    """Return the error that names the first of the rows that cannot be used, and their number.

    Where there are more, all of them go into a file beside the encoded rows.
    """
    found = first_few(problems, MAX_SHOWN)
    if len(problems) > MAX_SHOWN:
        file = cache_folder() / f"bad rows of {Path(where).name or 'data'}.txt"
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(problems) + "\n", encoding="utf-8", errors="replace")
            found += f"\nAll are listed in {file}"
    return DataError(
        f"Cannot use {len(problems)} of {total} rows of {where} (format '{name}').",
        found=found,
        fix=fix,
    )
