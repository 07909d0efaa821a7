"""Records as examples of four kinds, read from five formats.

| format            | fields (and aliases)                                             |
| messages          | messages: [{role, content, tool_calls ...}], tools               |
| sharegpt          | conversations: [{from, value}], tools, system                    |
| alpaca            | instruction (question, query, input), input (context),           |
|                   | output (answer, response), system, history                       |
| prompt_completion | prompt, completion (response, answer, output): two texts, or     |
|                   | two lists of messages                                            |
| text              | text (content)                                                   |

messages.py converts messages of OpenAI and ShareGPT to the form that transformers' chat templates
read.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from peftkit.data.examples import (
    ANSWERS,
    CONTEXT,
    QUESTIONS,
    TEXTS,
    TURNS,
    Completion,
    Conversation,
    Example,
    Instruction,
    Text,
    conversation_of,
    first_of,
    with_parsed_cells,
)
from peftkit.data.messages import (
    WrongField,
    completion_messages,
    full_text,
    parse_messages,
    text_of,
    text_or_number,
    unused_keys,
)
from peftkit.data.records import Record
from peftkit.errors import ConfigError, DataError, first_few
from peftkit.settings import FormatName


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Names of the fields with prompt and completion, given in a recipe.

    Attributes:
        settings: The recipe's keys that name them.
    """

    prompt: str
    completion: str
    settings: tuple[str, str]

    @classmethod
    def of(cls, **settings: str | None) -> FieldNames | None:
        """Return the names that two settings give; None if both are None.

        Raises:
            ConfigError: Only one is None.
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

    def renamed(self, records: Sequence[Record], where: str) -> list[Record]:
        """Return the records with these two fields only, named `prompt` and `completion`.

        Raises:
            DataError: A record lacks one of the fields.
        """
        needed = {self.prompt, self.completion}
        lacking = [record for record in records if not needed <= record.fields.keys()]
        if lacking:
            raise DataError(
                f"Cannot use {len(lacking)} of {len(records)} rows of {where}.",
                found=f"{lacking[0].source} lacks '{self.prompt}' or '{self.completion}' "
                f"({', '.join(self.settings)}); its fields: "
                f"{', '.join(lacking[0].fields) or 'none'}.",
                fix="Name fields that every row has.",
            )
        pairs = ((r.fields[self.prompt], r.fields[self.completion], r.source) for r in records)
        return [Record({"prompt": p, "completion": c}, source) for p, c, source in pairs]


Parsed = TypeVar("Parsed")


class ParsedRow(NamedTuple, Generic[Parsed]):
    """The examples of records.

    Attributes:
        unused: Fields and keys that no example used.
        format: Detected format; "": the task has one format.
    """

    examples: tuple[Parsed, ...]
    unused: tuple[str, ...]
    format: FormatName | Literal[""] = ""


MEDIA = {
    "images": "images",
    "image": "images",
    "videos": "videos",
    "video": "videos",
    "audios": "audio",
    "audio": "audio",
}
"""Fields that a loss over text cannot use."""
PREFERENCES = dict.fromkeys(("chosen", "rejected"), "preferences (chosen and rejected)")


def parse(
    records: Sequence[Record],
    name: Literal["auto"] | FormatName,
    *,
    where: str,
    fields: FieldNames | None = None,
) -> ParsedRow[Example]:
    """Convert each record to an example.

    Args:
        name: The format; auto: the format of the first record, required of all others.
        fields: Names of the prompt's and completion's fields, read in place of any format.

    Raises:
        DataError: Rows cannot be used; with file, line and field of the first few.
    """
    if fields is not None:
        parsed = parse(fields.renamed(records, where), "prompt_completion", where=where)
        names = dict.fromkeys(name for record in records for name in record.fields)
        unused = tuple(n for n in names if n not in (fields.prompt, fields.completion))
        return parsed._replace(unused=unused)
    records = [with_usual_names(with_parsed_cells(record)) for record in records]
    format_name = detect(records[0].fields) if name == "auto" else name
    if format_name is None:
        raise _unknown_fields(records[0], where)
    read = partial(_example, name=format_name, auto=name == "auto")
    return read_each(records, read, format_name, where)._replace(format=format_name)


def read_each(
    records: Sequence[Record],
    read: Callable[[Record], tuple[Parsed, Iterable[str]]],
    what: str,
    where: str,
    fix: str = "Correct or remove these rows, or drop them: data.drop_invalid: true.",
) -> ParsedRow[Parsed]:
    """Parse each record.

    Args:
        read: Returns a record's result, and the fields that it used.
        what: The rows' format, for messages.

    Raises:
        DataError: `read` raised WrongField; with file, line and field of the first few such rows.
    """
    parsed, problems, used = list[Parsed](), list[str](), set[str]()
    inner: dict[str, None] = {}
    for record in records:
        try:
            result, used_fields = read(record)
            parsed.append(result)
            read_fields = {name: record.fields.get(name) for name in used_fields}
            used.update(read_fields)
            for name, value in read_fields.items():
                inner.update(dict.fromkeys(unused_keys(value, name)))
        except WrongField as problem:
            problems.append(f"{record.source}: {problem}")
    if problems:
        raise _bad_rows(problems, len(records), what, where, fix)
    names = dict.fromkeys(name for record in records for name in record.fields)
    return ParsedRow(tuple(parsed), (*[name for name in names if name not in used], *inner))


def detect(fields: Mapping[str, object]) -> FormatName | None:
    """Return the format of a row's fields, the most specific one if several match.

    Fields without a value count only if no others match.
    """
    filled = {name: value for name, value in fields.items() if value is not None}
    return _format_of(filled) or _format_of(fields)


def _format_of(fields: Mapping[str, object]) -> FormatName | None:
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
    return "text" if first_of(fields, TEXTS) else None


def with_usual_names(record: Record) -> Record:
    """Return a row with lower-case field names if only these match a format."""
    lower = {name.strip().lower(): value for name, value in record.fields.items()}
    if len(lower) < len(record.fields) or detect(record.fields) or not detect(lower):
        return record
    return Record(lower, record.source)


def _example(record: Record, name: FormatName, *, auto: bool) -> tuple[Example, set[str]]:
    """Return an example and the names of the fields that it used."""
    fields = record.fields
    if auto and (detected := detect(fields)) != name:
        kind = "make no known format" if detected is None else f"make the format '{detected}'"
        listed = ", ".join(fields) or "none at all"
        raise WrongField("", f"its fields ({listed}) {kind}; the first row is '{name}'")
    refuse_fields(fields, {**PREFERENCES, **MEDIA})
    if name not in ("messages", "sharegpt"):
        return BUILDERS[name](record)
    key = first_of(fields, TURNS)
    if key is None:
        raise WrongField(TURNS[0], "missing")
    messages, targets = parse_messages(fields[key], key)
    return conversation_of(record, messages, targets), {key, *CONTEXT}


def refuse_fields(fields: Mapping[str, object], kinds: Mapping[str, str] = MEDIA) -> None:
    """Raise `WrongField` for a field of a kind that a task cannot use, by default media."""
    for key, kind in kinds.items():
        if fields.get(key):
            raise WrongField(key, f"the row has {kind}, which this task cannot train on")


MAX_LISTED = 5


def _unknown_fields(record: Record, where: str) -> DataError:
    """Return the error for a first row whose fields match no format."""
    prompt, completion = [*record.fields, "question", "answer"][:2]
    return DataError(
        f"Cannot detect the format of {where}.",
        found=f"{record.source} has the fields: {', '.join(record.fields) or 'none'}.",
        fix="Accepted: messages; conversations; instruction + output (input); question + answer; "
        "prompt + completion; text.\nOr name the fields with prompt and completion:\n"
        f"--set 'task.prompt={prompt}' --set 'task.completion={completion}'",
    )


def _bad_rows(problems: Sequence[str], total: int, name: str, where: str, fix: str) -> DataError:
    """Return the error that counts the unusable rows and lists the first few.

    If there are more, a file in the folder for temporary files lists all of them.
    """
    listed = first_few(problems, MAX_LISTED)
    if len(problems) > MAX_LISTED:
        name_of_file = re.sub(r"[^\w.-]+", "-", Path(where).name) or "data"
        prefix = f"peftkit-bad-rows-{name_of_file}-"
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


INPUTS = ("input", "context")


def _instruction(record: Record) -> tuple[Example, set[str]]:
    """Return an example of the format alpaca, and the names of the fields that it used."""
    fields = record.fields
    question = first_of(fields, QUESTIONS) or QUESTIONS[0]
    answer = first_of(fields, [key for key in ANSWERS if key != question]) or ANSWERS[0]
    context = first_of(fields, [key for key in INPUTS if key != question])
    request, output = full_text(fields, question), text_or_number(fields, answer)
    input_text = text_of(fields, context) if context and fields[context] is not None else ""
    example = Instruction(request, input_text, output, record.source)
    used = {question, answer, context or "", "system", "history"}
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
    """Return an example of the format prompt_completion, and the names of its fields."""
    fields = record.fields
    prompt = first_of(fields, ("prompt", *QUESTIONS)) or "prompt"
    answer = first_of(fields, ("completion", *[key for key in ANSWERS if key != prompt]))
    answer = answer or "completion"
    used = {prompt, answer, "tools"}
    if isinstance(fields.get(prompt), list):  # conversational: two lists of messages
        messages, targets = completion_messages(fields, prompt, answer)
        return conversation_of(record, messages, targets), {*used, *CONTEXT}
    if fields.get("tools"):
        raise WrongField("tools", "tools need messages; a plain prompt cannot hold them")
    answer_text = text_or_number(fields, answer)
    return Completion(text_of(fields, prompt), answer_text, record.source), used


def _text(record: Record) -> tuple[Example, set[str]]:
    """Return an example of the format text, and the name of its field."""
    key = first_of(record.fields, TEXTS) or TEXTS[0]
    return Text(text_of(record.fields, key), record.source), {key}


BUILDERS: dict[FormatName, Callable[[Record], tuple[Example, set[str]]]] = {
    "alpaca": _instruction,
    "prompt_completion": _completion,
    "text": _text,
}
