"""Rows of uploaded files, checked before a job is queued: each bad one is named by its line."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from peftkit.data.format import detect, parse
from peftkit.data.messages import WrongField
from peftkit.data.preferences import OPENAI_SIDES, SIDES, read_pair
from peftkit.data.prompts import read_prompts
from peftkit.data.records import Record, iterate_records
from peftkit.errors import DataError, PeftkitError, first_few
from peftkit.serve.tuning.bodies import Kind

FEWEST = {"supervised": 10, "dpo": 10, "reinforcement": 1}
"""Rows that a training file has at least."""
MAX_NAMED = 5


class JobError(PeftkitError):
    """Why a job fails.

    Args:
        param: The field of the job.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def count_rows(
    path: Path, method: Kind, fields: Collection[str] = (), *, param: str = "training_file"
) -> int:
    """Return how many rows a file has, all of which a method can read.

    Args:
        fields: That each row has, for a grader.
        param: Field of the job that names the file.

    Raises:
        JobError: It cannot be read, has bad rows, or too few.
    """
    number, num_bad, told = 0, 0, list[str]()
    first = ""
    try:
        for record in iterate_records(str(path)):
            number += 1
            first = first or str(detect(record.fields))
            if problem := _problem(record, method, fields, first):
                num_bad += 1
                if num_bad <= MAX_NAMED:
                    told.append(f"Line {record.source.rpartition(':')[2]}: {problem}")
    except DataError as error:
        text = public(f"{error.problem} {error.found} {error.fix}", path)
        raise JobError("invalid_file_format", text, param) from None
    if num_bad:
        more = f" And {num_bad - MAX_NAMED} more." if num_bad > MAX_NAMED else ""
        text = f"{num_bad} of {number} rows cannot be used. {' '.join(told)}{more}"
        raise JobError(f"invalid_{param}", text, param)
    fewest = FEWEST[method] if param == "training_file" else 1
    if number < fewest:
        text = f"The file has {number} rows; {method} takes {fewest} at least."
        raise JobError("invalid_n_examples", text, param)
    return number


def _problem(record: Record, method: Kind, fields: Collection[str], first: str) -> str:
    """Return why a row cannot be used; "" if it can."""
    try:
        if method == "dpo":
            if record.fields.keys().isdisjoint({*OPENAI_SIDES, *SIDES}):
                raise _other_fields(record, OPENAI_SIDES[0])
            read_pair(record)
        elif method == "reinforcement":
            read_prompts([record], where=record.source)
        else:
            parse([record], _format_of(record, first), where=record.source)
    except WrongField as problem:
        return f"{problem}."
    except DataError as error:
        return f"{_without_source(error.found or error.problem, record.source)}."
    lacking = sorted(set(fields) - record.fields.keys())
    return f"{lacking[0]}: missing, and the grader reads it." if lacking else ""


def _format_of(record: Record, first: str) -> Literal["messages", "prompt_completion"]:
    name = detect(record.fields)
    if name not in ("messages", "prompt_completion"):
        raise _other_fields(record, "messages")
    if name != first:
        raise WrongField("", f"its fields are not those of the first row ({first})")
    return name


def _other_fields(record: Record, wanted: str) -> WrongField:
    return WrongField(wanted, f"missing; its fields: {first_few(record.fields, 8, ', ') or 'none'}")


def _without_source(text: str, source: str) -> str:
    return text.removeprefix(f"{source}: ").split("\n")[0].rstrip(".")


def public(text: str, *paths: Path) -> str:
    """Return a message in one line, without this machine's paths: a file is named by its id."""
    for path in paths:
        text = re.sub(rf"{re.escape(str(path))}:(\d+)(:\d+)?", rf"{path.stem}, line \1", text)
        text = text.replace(str(path), path.stem)
    return " ".join(text.split())
