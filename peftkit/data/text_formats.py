"""Records of the formats alpaca, prompt_completion and text as examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peftkit.data.examples import (
    ANSWERS,
    CONTEXT,
    QUESTIONS,
    TEXTS,
    Completion,
    Conversation,
    Example,
    Instruction,
    Text,
    conversation_of,
    first_of,
)
from peftkit.data.messages import (
    WrongField,
    completion_messages,
    full_text,
    parse_messages,
    text_of,
    text_or_number,
)
from peftkit.data.records import Record
from peftkit.settings import FormatName

INPUTS = ("input", "context")


def instruction(record: Record) -> tuple[Example, set[str]]:
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


def completion(record: Record) -> tuple[Example, set[str]]:
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


def text(record: Record) -> tuple[Example, set[str]]:
    """Return an example of the format text, and the name of its field."""
    key = first_of(record.fields, TEXTS) or TEXTS[0]
    return Text(text_of(record.fields, key), record.source), {key}


BUILDERS: dict[FormatName, Callable[[Record], tuple[Example, set[str]]]] = {
    "alpaca": instruction,
    "prompt_completion": completion,
    "text": text,
}
