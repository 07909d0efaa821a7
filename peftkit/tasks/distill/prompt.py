"""The teacher's prompt: a file of text, or of messages, that is put in front of every row."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peftkit.data.format import Message, WrongField, parse_messages
from peftkit.errors import DataError, neighbours

TEXT_ENDINGS = (".md", ".txt")
TURN = re.compile(r"^#+ *(system|user|assistant) *:? *$", re.IGNORECASE | re.MULTILINE)
"""A heading of a text file under which a turn of an example stands."""
_FIX = (
    "Write the instructions as text (.md, .txt), with examples under headings '## User' and "
    "'## Assistant'; or messages with role and content (.json, .jsonl)."
)


@dataclass(frozen=True, slots=True)
class TeacherPrompt:
    """What the teacher reads before each row.

    Attributes:
        system: Instructions; "" if there are none.
        turns: Examples: user and assistant in turn.
    """

    system: str = ""
    turns: tuple[Message, ...] = ()

    @property
    def examples(self) -> list[str]:
        """What users say in the examples."""
        return [str(turn["content"]) for turn in self.turns if turn["role"] == "user"]

    def before(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return a conversation with the prompt before it; its own system message comes second."""
        own = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
        rest = messages[1:] if own else messages
        system = "\n\n".join(text for text in (self.system, own) if text)
        first: tuple[Message, ...] = ({"role": "system", "content": system},) if system else ()
        return (*first, *self.turns, *rest)


def read_prompt(path: str | Path) -> TeacherPrompt:
    """Read a teacher's prompt: system text, or messages.

    Raises:
        DataError: It cannot be read, is empty, or its messages are not in order.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        found = str(problem) if file.exists() else neighbours(file, "*")
        raise DataError(f"Cannot read the teacher's prompt {path}.", found=found) from None
    if file.suffix.lower() not in (*TEXT_ENDINGS, ".json", ".jsonl"):
        raise DataError(
            f"Cannot read the teacher's prompt {path}.",
            found=f"The ending '{file.suffix}' does not say whether it is text or messages.",
            fix=_FIX,
        )
    if not text.strip():
        raise DataError(f"The teacher's prompt {path} is empty.", fix=_FIX)
    try:
        is_text = file.suffix.lower() in TEXT_ENDINGS
        return _of_messages(_of_text(text) if is_text else _of_json(text, file.suffix.lower()))
    except (WrongField, ValueError) as problem:
        raise DataError(
            f"Cannot use the teacher's prompt {path}.", found=str(problem), fix=_FIX
        ) from None


def _of_text(text: str) -> list[Mapping[str, Any]]:
    """Return the messages of a text: what stands before the first heading of a turn is system."""
    first, *parts = TURN.split(text)
    named = zip(["system", *parts[::2]], [first, *parts[1::2]], strict=True)
    said = [{"role": role.lower(), "content": part.strip()} for role, part in named]
    return [message for number, message in enumerate(said) if number or message["content"]]


def _of_json(text: str, ending: str) -> Any:
    lines = [text] if ending == ".json" else [line for line in text.splitlines() if line.strip()]
    values = [json.loads(line) for line in lines]
    found = values[0] if len(values) == 1 else values
    if isinstance(found, Mapping):
        return found.get("messages", [found])
    return found


def _of_messages(messages: Any) -> TeacherPrompt:
    if not isinstance(messages, list):
        raise WrongField("", "it is no list of messages")
    if not messages:
        raise WrongField("", "it has no messages")
    row = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    found, _ = parse_messages([*messages, *row], "messages")  # as they will stand before a row
    turns = found[: -len(row)]
    for number, message in enumerate(turns):
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            raise WrongField(f"messages[{number}].content", "empty")
    if turns[0]["role"] == "system":
        return TeacherPrompt(str(turns[0]["content"]).strip(), tuple(turns[1:]))
    return TeacherPrompt("", tuple(turns))
