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
read; text_formats.py has the other formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from peftkit.data.examples import (
    ANSWERS,
    CONTEXT,
    QUESTIONS,
    TEXTS,
    TURNS,
    Example,
    conversation_of,
    first_of,
    with_parsed_cells,
)
from peftkit.data.messages import WrongField, parse_messages, unused_keys
from peftkit.data.records import Record
from peftkit.settings import FormatName

if TYPE_CHECKING:
    from peftkit.data.field_names import FieldNames

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """The examples of records; `unused` are the fields that no example used."""

    format: FormatName
    examples: tuple[Example, ...]
    unused: tuple[str, ...]


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
) -> ParsedRow:
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
        return ParsedRow(parsed.format, parsed.examples, unused)
    records = [with_usual_names(with_parsed_cells(record)) for record in records]
    format_name = detect(records[0].fields) if name == "auto" else name
    if format_name is None:
        from peftkit.data.format_errors import unknown_fields

        raise unknown_fields(records[0], where)
    read = partial(_example, name=format_name, auto=name == "auto")
    examples, unused = read_each(records, read, format_name, where)
    return ParsedRow(format_name, tuple(examples), unused)


def read_each(
    records: Sequence[Record],
    read: Callable[[Record], tuple[Parsed, Iterable[str]]],
    what: str,
    where: str,
    fix: str = "Correct or remove these rows, or drop them: data.drop_invalid: true.",
) -> tuple[list[Parsed], tuple[str, ...]]:
    """Parse each record; return the results, and the fields and keys that no record used.

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
        from peftkit.data.format_errors import bad_rows

        raise bad_rows(problems, len(records), what, where, fix)
    names = dict.fromkeys(name for record in records for name in record.fields)
    return parsed, (*[name for name in names if name not in used], *inner)


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
        from peftkit.data.text_formats import BUILDERS

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
