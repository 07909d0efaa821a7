"""Rows of comparisons: pairs of answers, or single answers with a verdict.

| rows     | fields                                                                            |
| pairs    | chosen, rejected; the prompt before both as prompt, as messages or conversations  |
|          | that end before the answers, as instruction (question, query; input), or as the   |
|          | common beginning of both                                                          |
| OpenAI's | input: {messages, tools}, preferred_output, non_preferred_output                  |
| verdicts | prompt and completion, or any other format of causal_lm, and label: true or false |

Prompts and answers are texts or messages; `system` and `tools` are those of causal_lm. An answer
may be a text, a message, a list of messages, or a conversation that begins with the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from peftkit.data.examples import (
    CONTEXT,
    QUESTIONS,
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
from peftkit.data.format import ParsedRow, parse, read_each, refuse_fields
from peftkit.data.messages import (
    Message,
    WrongField,
    completion_messages,
    full_text,
    kind_of,
    parse_messages,
    parse_tools,
    role_of,
    text_of,
)
from peftkit.data.records import Dropped, Record
from peftkit.data.tokens import num_common
from peftkit.errors import DataError

SIDES = ("chosen", "rejected")
OPENAI_SIDES = ("preferred_output", "non_preferred_output")
"""The names of the same two in the files of OpenAI's fine-tuning."""
PAIRS = "pairs of a chosen and a rejected answer"
"""Name of the rows' format."""
LABEL = "label"
USELESS = "an empty answer, or two equal ones"
"""Reason to drop a pair; see `RowEncoder.drops`."""
NOTHING_TO_COMPARE = {USELESS: "give these rows two answers"}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt.

    Args:
        shared: Whether both texts begin with the prompt, which ends where their tokens differ.
        margin: By how much the chosen answer is better, if the row has it.
    """

    chosen: Example
    rejected: Example
    shared: bool
    source: str
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer, and whether it is wanted."""

    example: Example
    wanted: bool
    source: str


def read_pair(record: Record, margin: str | None = None) -> tuple[Pair | Dropped, Sequence[str]]:
    """Return the pair of a row, and the fields that it was made of.

    A row with an empty answer, or with two equal ones, is dropped.

    Args:
        margin: Field with the margin, if there is to be one.

    Raises:
        WrongField: It is no pair.
    """
    record = with_parsed_cells(record)
    if is_useless(record):
        return Dropped(record.source, USELESS), ()
    pair, used = _pair(record)
    if margin is None:
        return pair, [*used]
    return replace(pair, margin=_number(record.fields, margin)), [*used, margin]


def read_pairs_of(records: Sequence[Record], where: str) -> ParsedRow[Pair | Dropped]:
    """Return the pairs of a file.

    Raises:
        DataError: With file, line and field of the first few rows that are no pairs.
    """
    return read_each(records, read_pair, PAIRS, where)


def read_verdicts(records: Sequence[Record], where: str) -> ParsedRow[Verdict]:
    """Return the judged answers of a file.

    Raises:
        DataError: With file, line and field of the first few rows that are no such answers.
    """

    def without_label(record: Record) -> tuple[Record, set[str]]:
        fields = dict(record.fields)
        value = fields.pop(LABEL, None)
        if not isinstance(value, bool):
            there = "missing" if LABEL not in record.fields else f"found {value!r:.40}"
            raise WrongField(LABEL, f"expected true or false, {there}")
        return Record(fields, record.source), set()

    bare = read_each(records, without_label, "answers with a label", where)
    parsed = parse(bare.examples, "auto", where=where)
    verdicts = []
    for record, example in zip(records, parsed.examples, strict=True):
        if isinstance(example, Text):  # then all rows are
            raise DataError(
                f"Cannot use {record.source}: a text alone has no prompt and no answer."
            )
        if isinstance(example, Conversation) and parsed.format != "prompt_completion":
            example = replace(example, target_turns=example.target_turns[-1:])
        verdicts.append(Verdict(example, record.fields[LABEL], record.source))
    return ParsedRow(tuple(verdicts), parsed.unused, parsed.format)


def check_both_labels(where: str, wanted: int, unwanted: int) -> None:
    """Refuse a file whose rows all have one label, with a DataError."""
    if not wanted or not unwanted:
        raise DataError(
            f"Cannot train on {where}: all of its rows have one label.",
            found=f"{LABEL} is {str(wanted > 0).lower()} in all {wanted + unwanted} rows.",
            fix="Give wanted (true) and unwanted (false) answers, or use the task causal_lm.",
        )


def is_useless(record: Record) -> bool:
    """Return whether both answers are there, and one is empty or equal to the other."""
    sides = [record.fields.get(side) for side in _sides(record.fields)]
    if any(side is None for side in sides):
        return False
    empty = [not side or (isinstance(side, str) and not side.strip()) for side in sides]
    return any(empty) or sides[0] == sides[1]


def _sides(fields: Mapping[str, object]) -> tuple[str, str]:
    return OPENAI_SIDES if not fields.keys().isdisjoint(OPENAI_SIDES) else SIDES


def _pair(record: Record) -> tuple[Pair, set[str]]:
    fields = record.fields
    for side in (sides := _sides(fields)):
        if side not in fields or fields[side] is None:
            raise WrongField(side, f"missing: a pair has {sides[0]} and {sides[1]}")
    refuse_fields(fields)
    if sides == OPENAI_SIDES:
        return _of_openai(record)
    turns = first_of(fields, TURNS) if fields.get("prompt") is None else None
    if isinstance(fields.get("prompt"), list):
        return _of_messages(record, "prompt")
    if turns and _is_prompt(fields[turns], fields):
        return _of_messages(record, turns)
    texts = [isinstance(fields[side], str) for side in SIDES]
    if texts[0] != texts[1]:
        raise WrongField("rejected", "one of the two answers is text, the other is not")
    return _of_texts(record) if texts[0] else _of_conversations(record)


def _is_prompt(turns: object, fields: Mapping[str, object]) -> bool:
    """Return whether a field holds the turns before both answers."""
    if not isinstance(turns, list) or not turns:
        return False
    answers = [_as_list(fields[side]) for side in SIDES]
    starts = [role_of(answer[0]) in ("assistant", "") for answer in answers]
    begins = [answer[: len(turns)] == turns for answer in answers]
    is_before = all(one or other for one, other in zip(starts, begins, strict=True))
    return is_before and role_of(turns[-1]) != "assistant"


def _question(record: Record) -> tuple[Instruction | None, set[str]]:
    """Return the instruction before both answers, if any, and the names of its fields."""
    fields = record.fields
    question = first_of(fields, QUESTIONS)
    if question is None or fields[question] is None:
        return None, set()
    material = text_of(fields, "input") if question != "input" and fields.get("input") else ""
    request = full_text(fields, question)
    return Instruction(request, material, "", record.source), {question, "input"}


def _of_texts(record: Record) -> tuple[Pair, set[str]]:
    """Read two texts, after a prompt or with one in common."""
    fields, source = record.fields, record.source
    chosen, rejected = (text_of(fields, side) for side in SIDES)
    prompt = text_of(fields, "prompt") if fields.get("prompt") is not None else None
    question, used = (None, {"prompt"}) if prompt is not None else _question(record)
    context = [key for key in CONTEXT if fields.get(key)]
    examples: list[Example]
    if question is not None:
        answers = [replace(question, output=text) for text in (chosen, rejected)]
        examples = [*answers]
        if context:
            turns = [answer.conversation.messages for answer in answers]
            examples = [conversation_of(record, messages, (1,)) for messages in turns]
    elif context:
        problem = f"{context[0]} need messages; a plain prompt has no place for them"
        raise WrongField(context[0], problem)
    elif prompt is not None:
        examples = [Completion(prompt, text, source) for text in (chosen, rejected)]
    elif (key := first_of(fields, TURNS)) and fields[key]:
        raise WrongField(key, "is no prompt of both answers, and the row has no other")
    else:
        examples = [Text(text, source) for text in (chosen, rejected)]
    is_shared = isinstance(examples[0], Text)
    return Pair(examples[0], examples[1], is_shared, source), {*used, *SIDES, *CONTEXT}


def _of_openai(record: Record) -> tuple[Pair, set[str]]:
    """Read the object with messages and tools, and the answer of each side."""
    given = record.fields.get("input")
    if not isinstance(given, Mapping):
        raise WrongField("input", f"expected an object with messages, found {kind_of(given)}")
    tools, examples = tuple(parse_tools(given.get("tools"), "input.tools")), []
    for side in OPENAI_SIDES:
        answer = {"input.messages": given.get("messages"), side: _as_list(record.fields[side])}
        messages, targets = completion_messages(answer, "input.messages", side)
        _refuse_empty(messages, targets, side)
        examples.append(Conversation(tuple(messages), tuple(targets), tools, record.source))
    return Pair(examples[0], examples[1], False, record.source), {"input", *OPENAI_SIDES}


def _of_messages(record: Record, key: str) -> tuple[Pair, set[str]]:
    """Read a list of messages as the prompt, and what each side answers."""
    fields = record.fields
    prompt = fields[key]
    if not isinstance(prompt, list) or not prompt:
        raise WrongField(key, "expected a list of turns")
    examples = []
    for side in SIDES:
        answer = _as_list(fields[side])
        if isinstance(answer[0], Mapping) and role_of(answer[0]) != "assistant":
            if answer[: len(prompt)] != prompt:
                raise WrongField(side, f"{key} is not what it begins with")
            answer = answer[len(prompt) :]
            if not answer:
                raise WrongField(side, f"there is nothing after {key}")
        messages, targets = completion_messages({key: prompt, side: answer}, key, side)
        examples.append(_conversation(messages, targets, record, side))
    return Pair(examples[0], examples[1], False, record.source), {key, *SIDES, *CONTEXT}


def _of_conversations(record: Record) -> tuple[Pair, set[str]]:
    """Read two conversations; their common prefix is the prompt."""
    fields = record.fields
    prompt = text_of(fields, "prompt") if fields.get("prompt") is not None else None
    question, used = (None, {"prompt"}) if prompt is not None else _question(record)
    request = question.request if question is not None else prompt
    sides = []
    for side in SIDES:
        answer = _as_list(fields[side])
        if role_of(answer[0]) == "assistant":
            if request is None:
                raise WrongField(side, "there is no prompt before it")
            answer = [{"role": "user", "content": request}, *answer]
        messages, _ = parse_messages(answer, side)
        questions = [message.get("content") for message in messages if message["role"] == "user"]
        if prompt is not None and prompt not in questions:
            raise WrongField("prompt", f"{side} does not begin with it")
        used = used if request in questions else set()
        sides.append(messages)
    common, examples = num_common(*sides), []
    for side, messages in zip(SIDES, sides, strict=True):
        if common >= len(messages):
            raise WrongField(side, "there is nothing after what both begin with")
        if messages[common]["role"] != "assistant":
            raise WrongField(side, f"turn {common} is {messages[common]['role']}'s: not one prompt")
        turns = range(common, len(messages))
        targets = [turn for turn in turns if messages[turn]["role"] == "assistant"]
        examples.append(_conversation(messages, targets, record, side))
    return Pair(examples[0], examples[1], False, record.source), {*used, *SIDES, *CONTEXT}


def _conversation(
    messages: Sequence[Message], targets: Sequence[int], record: Record, side: str
) -> Conversation:
    _refuse_empty(messages, targets, side)
    return conversation_of(record, messages, targets)


def _refuse_empty(messages: Sequence[Message], targets: Sequence[int], side: str) -> None:
    turns = [messages[turn] for turn in targets]
    if not any(t.get("tool_calls") or str(t.get("content") or "").strip() for t in turns):
        raise WrongField(side, "empty")


def _as_list(value: object) -> list[object]:
    """Return an answer, a text or a message, as messages; a text is the assistant's."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return value if isinstance(value, list) else [value]


def _number(fields: Mapping[str, object], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise WrongField(name, f"expected a number (task.margin), found {value!r:.40}")
    return float(value)
