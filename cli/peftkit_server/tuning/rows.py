"""Validation of uploaded rows before a job is queued; errors name the line of each bad row."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from peftkit.data.format import detect, parse
from peftkit.data.messages import WrongField
from peftkit.data.preferences import OPENAI_SIDES, SIDES, read_pair
from peftkit.data.prompts import read_prompts
from peftkit.data.records import Record, iterate_records
from peftkit.errors import DataError, PeftkitError, first_few
from peftkit_server.limits import DEFAULTS, Limits
from peftkit_server.tuning.bodies import Kind

MIN_ROWS = {"supervised": 10, "dpo": 10, "reinforcement": 1}
"""Fewest rows of a training file."""
MAX_REPORTED = 5
"""Bad rows that an error describes."""


MANY_MESSAGES = 64
"""Messages of a conversation up to which its rendering is fast for any length."""


class JobError(PeftkitError):
    """The error of a failed job.

    Args:
        param: The invalid field of the job.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def count_rows(
    path: Path,
    method: Kind,
    fields: Collection[str] = (),
    *,
    param: str = "training_file",
    limits: Limits = DEFAULTS,
) -> int:
    """Validate all rows of a file for a method; return their number.

    Args:
        fields: Fields that the grader reads from each row.
        param: Field of the job that names the file.

    Raises:
        JobError: The file is not readable, or has bad rows or too few rows.
    """
    _check_lines(path, param, limits.line_bytes)
    number, num_bad, problems = 0, 0, list[str]()
    first = ""
    try:
        for record in iterate_records(str(path)):
            number += 1
            first = first or str(detect(record.fields))
            if problem := _problem(record, method, fields, first, limits.row_work):
                num_bad += 1
                if num_bad <= MAX_REPORTED:
                    problems.append(f"Line {record.source.rpartition(':')[2]}: {problem}")
    except DataError as error:
        text = f"{error.problem} {error.found} {error.fix}"
        raise JobError("invalid_file_format", text, param) from None
    if num_bad:
        more = f" And {num_bad - MAX_REPORTED} more." if num_bad > MAX_REPORTED else ""
        text = f"{num_bad} of {number} rows cannot be used. {' '.join(problems)}{more}"
        raise JobError(f"invalid_{param}", text, param)
    min_rows = MIN_ROWS[method] if param == "training_file" else 1
    if number < min_rows:
        text = f"The file has {number} rows; {method} requires at least {min_rows}."
        raise JobError("invalid_n_examples", text, param)
    return number


def _check_lines(path: Path, param: str, max_bytes: int) -> None:
    """Refuse a file with a long line or JSON array: parsed, it takes about 30 times the memory.

    Raises:
        JobError: A line, or the array, has more than `max_bytes`.
    """
    line, length = 1, 0
    with open(path, "rb") as file:
        is_array = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
        file.seek(0)
        while chunk := file.readline(1 << 20):
            length += len(chunk)
            if length > max_bytes:
                what = "The JSON array" if is_array else f"Line {line}"
                text = f"{what} has more than {max_bytes:,} bytes. Write one row per line."
                raise JobError("invalid_file_format", text, param)
            if chunk.endswith(b"\n") and not is_array:
                line, length = line + 1, 0


def _is_costly(fields: Mapping[str, object], max_work: int) -> bool:
    """Return whether a conversation takes too long to render: each turn renders those before it."""
    source = fields.get("input", fields)
    messages = source.get("messages") if isinstance(source, Mapping) else None
    if not isinstance(messages, list) or len(messages) <= MANY_MESSAGES:
        return False
    return len(json.dumps(messages)) * len(messages) > max_work


def _problem(
    record: Record, method: Kind, fields: Collection[str], first: str, max_work: int
) -> str:
    """Return why a row cannot be used; "" for a valid row."""
    if "functions" in record.fields:
        return "functions: the field is deprecated; use tools and tool_calls."
    if _is_costly(record.fields, max_work):
        return "the conversation has too many messages for its length; split it."
    try:
        if method == "dpo":
            if record.fields.keys().isdisjoint({*OPENAI_SIDES, *SIDES}):
                raise _other_fields(record, OPENAI_SIDES[0])
            read_pair(record)
        elif method == "reinforcement":
            read_prompts([record], where=record.source)
        else:
            name = detect(record.fields)
            if name not in ("messages", "prompt_completion"):
                raise _other_fields(record, "messages")
            if name != first:
                raise WrongField("", f"its fields differ from the first row's ({first})")
            parse([record], name, where=record.source)
    except WrongField as problem:
        return f"{problem}."
    except DataError as error:
        text = (error.found or error.problem).removeprefix(f"{record.source}: ")
        return text.split("\n")[0].rstrip(".") + "."
    missing = sorted(set(fields) - record.fields.keys())
    return f"{missing[0]}: missing, and the grader reads it." if missing else ""


def _other_fields(record: Record, expected: str) -> WrongField:
    fields = first_few(record.fields, 8, ", ") or "none"
    return WrongField(expected, f"missing; its fields: {fields}")
