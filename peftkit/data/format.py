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

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from peftkit.data.load import DECODER, Record
from peftkit.errors import ConfigError, DataError, did_you_mean, first_few
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


Message = Mapping[str, Any]
MAX_CHARACTERS = 10_000_000
"""Limit of one text: a tokenizer takes about a second per million."""

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}
# what may come before a turn; None is the beginning
_BEFORE: dict[str, tuple[str | None, ...]] = {
    "system": (None,),
    "developer": (None, "system"),
    "user": (None, "system", "developer", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


_REASONING = ("reasoning_content", "reasoning", "thinking")
_THINK_TAG = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)


class WrongField(Exception):
    """A field of a row is invalid; `field` is its path, such as "messages[2].role"."""

    def __init__(self, field: str, words: str) -> None:
        super().__init__(f"{field}: {words}" if field else words)


def text_of(fields: Mapping[str, Any], name: str, path: str = "") -> str:
    """Return a field that must be text."""
    path = path or name
    if name not in fields:
        raise WrongField(path, "missing")
    value = fields[name]
    if not isinstance(value, str):
        raise WrongField(path, f"expected text, found {kind_of(value)}")
    if len(value) > MAX_CHARACTERS:
        raise WrongField(path, f"{len(value):,} characters; at most {MAX_CHARACTERS:,} are read")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise WrongField(path, "holds half of a surrogate pair (\\ud800 to \\udfff)") from None
    return value


def text_or_number(fields: Mapping[str, Any], name: str) -> str:
    """Return an answer: a text, or a number as JSON writes it."""
    value = fields.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return json.dumps(value) if is_number else text_of(fields, name)


def full_text(fields: Mapping[str, Any], name: str, path: str = "") -> str:
    """Return a field that must be text with more than white space in it."""
    text = text_of(fields, name, path)
    if not text.strip():
        raise WrongField(path or name, "empty")
    return text


def texts_of(fields: Mapping[str, Any], name: str) -> list[str]:
    """Return a field that is a text or a list of texts."""
    value = fields.get(name)
    if not isinstance(value, list):
        return [full_text(fields, name)]
    if not value:
        raise WrongField(name, "empty")
    return [full_text({name: text}, name, f"{name}[{n}]") for n, text in enumerate(value)]


def parse_messages(value: Any, field: str) -> tuple[list[Message], list[int]]:
    """Return the messages and the indices of the assistant turns to train on.

    An assistant turn with `weight: 0` is context only, as in OpenAI's format.
    """
    messages, weights = _messages(value, field)
    _check_order(messages, field)
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise WrongField(field, "there is no assistant turn")
    return messages, [turn for turn in turns if weights[turn]]


def completion_messages(
    fields: Mapping[str, Any], prompt: str, completion: str
) -> tuple[list[Message], list[int]]:
    """Join two lists of messages; return the messages, and the target turns of the second."""
    context, _ = _messages(fields[prompt], prompt)
    if completion not in fields:
        raise WrongField(completion, "missing")
    answer, weights = _messages(fields[completion], completion)
    _check_order([*context, *answer], f"{prompt} + {completion}")
    turns = [n for n, message in enumerate(answer) if message["role"] == "assistant"]
    if not turns:
        raise WrongField(completion, "there is no assistant turn")
    return [*context, *answer], [len(context) + turn for turn in turns if weights[turn]]


def parse_tools(value: Any, field: str) -> list[Mapping[str, Any]]:
    """Return tools as [{"type": "function", "function": {name, ...}}]; they may be JSON text."""
    if isinstance(value, str):
        value = _parse_json(value, field) if value.strip() else None
    if value is None:
        return []
    if not isinstance(value, list):
        raise WrongField(field, f"expected a list of functions, found {kind_of(value)}")
    tools: list[Mapping[str, Any]] = []
    for number, tool in enumerate(value):
        where = f"{field}[{number}]"
        if not isinstance(tool, Mapping):
            raise WrongField(where, f"expected an object, found {kind_of(tool)}")
        function = tool.get("function", tool)
        if not isinstance(function, Mapping):
            raise WrongField(f"{where}.function", f"expected an object, found {kind_of(function)}")
        text_of(function, "name", f"{where}.name")
        kind = tool.get("type", "function") if "function" in tool else "function"
        tools.append({"type": kind, "function": function})
    return tools


def _messages(value: Any, field: str) -> tuple[list[Message], list[bool]]:
    if not isinstance(value, list):
        raise WrongField(field, f"expected a list of turns, found {kind_of(value)}")
    if not value:
        raise WrongField(field, "empty")
    parsed = [_message(turn, f"{field}[{number}]") for number, turn in enumerate(value)]
    return [message for message, _ in parsed], [weight for _, weight in parsed]


def _message(turn: Any, path: str) -> tuple[Message, bool]:
    if not isinstance(turn, Mapping):
        raise WrongField(path, f"expected an object, found {kind_of(turn)}")
    role_key, text_key = turn_keys(turn)
    name = text_of(turn, role_key, f"{path}.{role_key}")
    role = _ROLES.get(name)
    if role is None:
        hint = did_you_mean(name, _ROLES)
        raise WrongField(f"{path}.{role_key}", f"unknown role '{name}'. {hint}".rstrip())
    handled = {role_key, text_key, "tool_calls", "function_call", "weight", *_REASONING}
    message: dict[str, Any] = {"role": role}
    if reasoning := _reasoning(turn, role, text_key, path):
        message["reasoning_content"] = reasoning
    calls = turn.get("tool_calls")
    if name == "function_call":
        calls = _parse_json(text_of(turn, text_key, f"{path}.{text_key}"), f"{path}.{text_key}")
        calls = calls if isinstance(calls, list) else [calls]
    else:
        if calls is None and turn.get("function_call") is not None:  # OpenAI before tool_calls
            calls = [turn["function_call"]]
        if not calls or turn.get(text_key) is not None:
            message["content"] = _content(turn, text_key, f"{path}.{text_key}")
    if calls:
        message["tool_calls"] = _calls(calls, role, f"{path}.tool_calls")
    message |= {k: v for k, v in turn.items() if k not in handled and v is not None}
    return message, _weight(turn, role, f"{path}.weight")


def turn_keys(turn: Mapping[str, Any]) -> tuple[str, str]:
    """Return the keys of a turn's role and text: OpenAI's, or ShareGPT's."""
    is_sharegpt = "from" in turn and "role" not in turn
    return ("from", "value") if is_sharegpt else ("role", "content")


def role_of(turn: Any) -> str:
    """Return the role of a turn in a row, as templates name it; "" if it has none of these."""
    if not isinstance(turn, Mapping):
        return ""
    return _ROLES.get(str(turn.get(turn_keys(turn)[0])), "")


def _reasoning(turn: Mapping[str, Any], role: str, text_key: str, path: str) -> str:
    """Return the assistant's reasoning: a field of the turn, or parts of its content."""
    texts = [text_of(turn, name, f"{path}.{name}") for name in _REASONING if turn.get(name)]
    parts = turn.get(text_key)
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, Mapping) and part.get("type") in _REASONING:
            name = next((name for name in (*_REASONING, "text") if part.get(name)), "text")
            texts.append(text_of(part, name, f"{path}.{text_key}"))
    if texts and role != "assistant":
        raise WrongField(path, f"only the assistant may have reasoning, found it on {role}")
    return "\n".join(texts)


def reasoning_of(message: Message) -> str:
    """Return the reasoning of a message: its field, or the <think> that it begins with."""
    inline = _THINK_TAG.match(message.get("content") or "")
    return str(message.get("reasoning_content") or (inline[1] if inline else "")).strip()


def without_reasoning(message: Message) -> Message:
    """Return a message without its reasoning."""
    bare = {key: value for key, value in message.items() if key != "reasoning_content"}
    if message["role"] == "assistant" and bare.get("content"):
        bare["content"] = _THINK_TAG.sub("", bare["content"])
    return bare


def _weight(turn: Mapping[str, Any], role: str, path: str) -> bool:
    weight = turn.get("weight")
    if weight is None:
        return True
    if role != "assistant" or isinstance(weight, bool) or weight not in (0, 1):
        raise WrongField(path, f"expected 0 or 1 on an assistant turn, found {weight!r} on {role}")
    return bool(weight)


def _content(turn: Mapping[str, Any], key: str, path: str) -> str:
    value = turn.get(key)
    if not isinstance(value, list):
        return text_of(turn, key, path)
    parts = []
    for number, part in enumerate(value):
        where = f"{path}[{number}]"
        if not isinstance(part, Mapping):
            raise WrongField(where, f"expected an object, found {kind_of(part)}")
        if part.get("type") in _REASONING:
            continue
        if part.get("type") != "text":
            raise WrongField(where, f"only text can be trained on, found {part.get('type')!r}")
        parts.append(text_of(part, "text", f"{where}.text"))
    return "".join(parts)


def _calls(value: Any, role: str, path: str) -> list[Mapping[str, Any]]:
    if role != "assistant":
        raise WrongField(path, f"only the assistant may call tools, found calls on {role}")
    if not isinstance(value, list):
        raise WrongField(path, f"expected a list, found {kind_of(value)}")
    calls: list[Mapping[str, Any]] = []
    for number, call in enumerate(value):
        where = f"{path}[{number}]"
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise WrongField(where, "expected an object with name and arguments")
        name = text_of(function, "name", f"{where}.name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parse_json(arguments, f"{where}.arguments") if arguments.strip() else {}
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, Mapping):
            kind = kind_of(arguments)
            raise WrongField(f"{where}.arguments", f"expected an object, found {kind}")
        entry = {"type": "function", "function": {"name": name, "arguments": arguments}}
        has_id = call.get("id") is not None and "function" in call
        calls.append(entry | ({"id": call["id"]} if has_id else {}))
    return calls


def _check_order(messages: list[Message], field: str) -> None:
    before: str | None = None
    for number, message in enumerate(messages):
        role = message["role"]
        if before not in _BEFORE[role]:
            place = "comes first" if before is None else f"follows {before}"
            raise WrongField(f"{field}[{number}].role", f"wrong order: {role} {place}")
        if role == "tool" and before == "assistant" and "tool_calls" not in messages[number - 1]:
            raise WrongField(f"{field}[{number}].role", "wrong order: tool follows no tool call")
        before = role


def _parse_json(text: str, path: str) -> Any:
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError) as problem:
        raise WrongField(path, f"not JSON: {problem}") from None


def kind_of(value: Any) -> str:
    """Return the type of a JSON value, in words."""
    names = {type(None): "null", list: "a list", dict: "an object", str: "text", bool: "a boolean"}
    return names.get(type(value), f"a number ({value!r})")
