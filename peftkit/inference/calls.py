"""Tool calls in answers: detect the format of a chat template; parse answers as they stream.

To detect the format, the template renders a probe call, and the first format that parses it back is
used. This recognises changed templates and those saved with an adapter, too. A tokenizer's
`response_template` (transformers 5.13) is used first: it has the markers around calls and reasoning
as texts or patterns, and transformers parses calls with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from peftkit.data.chat import Chat, special_texts
from peftkit.data.generation import stop_ids
from peftkit.data.style import Style
from peftkit.data.tokens import decoded
from peftkit.errors import ConfigError
from peftkit.files.strict_json import JsonMap
from peftkit.inference.call_formats import (
    FORMATS,
    NO_CALLS,
    Call,
    CallFormat,
    NoCall,
    Unclosed,
    calls_of,
    dumped,
    typed,
)
from peftkit.inference.generate import num_held

Render = Callable[[Sequence[JsonMap]], str]
"""Writes a conversation with a chat template."""


class AnswerPiece(NamedTuple):
    """A piece of an answer: text, reasoning, or calls."""

    text: str = ""
    thought: str = ""
    calls: tuple[Call, ...] = ()


PROBE_ID = "abcdefghi"  # nine letters and digits, as Mistral's templates require
PROBE = Call("peftkit_probe", {"city": "Lima", "days": 3, "deep": {"a": [1, 2]}, "on": True})
_TYPES = {"city": "string", "days": "integer", "deep": "object", "on": "boolean"}
PROBE_TOOL: JsonMap = {
    "type": "function",
    "function": {
        "name": PROBE.name,
        "description": "A function.",
        "parameters": {"type": "object", "properties": {k: {"type": t} for k, t in _TYPES.items()}},
    },
}
_QUESTION = {"role": "user", "content": "Hello"}
_MARK = "PEFTKITsentinelCALL"


def format_of(render: Render, shipped: Any = None) -> CallFormat | None:
    """Return the call format of a chat template; None if it writes no calls in a known format.

    Args:
        render: Renders a conversation without a generation prompt; an exception means that the
            template does not support calls.
        shipped: The tokenizer's `response_template`; takes precedence if it parses the probe.
    """
    try:
        turns = [written_probe(render, as_text=as_text) for as_text in (False, True)]
    except Exception:  # a template is a program: it can raise anything
        return None
    for as_text, written in enumerate(turns):
        template_format = shipped and shipped_format(shipped, written, PROBE.name)
        for form in (template_format, *FORMATS) if template_format else FORMATS:
            if _reads_probe(form, written):
                return replace(form, as_text=bool(as_text))
    return None


def written_probe(render: Render, *, as_text: bool) -> str:
    """Return the turn that a chat template writes for the probe call; "": it refuses the call.

    The turn may have a header before the call.

    Args:
        as_text: Whether the template requires a call's arguments as JSON text.
    """
    before = render([_QUESTION])
    ending = render([_QUESTION, {"role": "assistant", "content": _MARK}]).partition(_MARK)[2]
    message = replace(NO_CALLS, as_text=as_text).message("", [(PROBE_ID, PROBE)])
    try:
        text = render([_QUESTION, message])
    except Exception:
        return ""
    return text.removeprefix(before).removesuffix(ending)


def _reads_probe(form: CallFormat, text: str) -> bool:
    """Whether a format reads the probe in a turn, whose header may stand before it."""
    starts = [at for mark in form.opens if (at := text.find(mark)) >= 0]
    _, _, calls = read_answer(form, text[min(starts, default=0) :], [PROBE_TOOL])
    return [one[:2] for one in calls] == [PROBE[:2]]


class Reader:
    """Streaming parser of an answer; the result does not depend on the split of its text.

    A call that cannot be parsed is text. White space around reasoning and calls is dropped.

    Args:
        form: The format of calls; None: there are none.
        tools: The functions, whose schemas have the types of arguments.
        thinks: Whether the answer begins within reasoning, which the prompt has opened.
    """

    def __init__(
        self,
        form: CallFormat | None,
        tools: Sequence[JsonMap] = (),
        *,
        thinks: bool = False,
    ) -> None:
        self._form = form or NO_CALLS
        opens, skips = self._form.opens, self._form.skips
        first = opens if self._form.at_start else ()
        self._first = (self._form.thought[0], *first)  # where nothing has been said yet
        self._marks = (*skips, *(() if self._form.at_start else opens))
        self._tools = tools
        self._buffer, self._searched = "", 0
        self._step = self._in_thought if thinks else self._in_text
        self._is_fresh, self._trims = True, thinks  # nothing said yet; drops white space
        self._mark = self._space = ""

    def feed(self, text: str, *, over: bool = False) -> Iterator[AnswerPiece]:
        """Yield the pieces that further text cannot change.

        Args:
            over: Whether the answer ends here.
        """
        self._buffer += text
        has_more = True
        while has_more:
            piece, has_more = self._step(over)
            if piece != AnswerPiece():
                yield piece

    def _in_text(self, over: bool) -> tuple[AnswerPiece, bool]:
        if self._is_fresh:
            head = self._buffer.lstrip()
            mark = next((mark for mark in self._first if head.startswith(mark)), None)
            if mark is not None:
                return self._open(mark, len(self._buffer) - len(head))
            if not over and any(mark.startswith(head) for mark in self._first):
                return AnswerPiece(), False
        matches = [(at, mark) for mark in self._marks if (at := self._buffer.find(mark)) >= 0]
        if not matches:
            text = self._taken(self._marks, over)
            self._is_fresh = self._is_fresh and not text
            return AnswerPiece(text), False
        at, mark = min(matches)
        text = self._buffer[:at].rstrip()
        if self._trims:
            text = text.lstrip()
        if text:
            self._is_fresh = self._trims = False
            self._buffer = self._buffer[len(self._buffer[:at].rstrip()) :]
            return AnswerPiece(text), True
        return self._open(mark, at)

    def _open(self, mark: str, at: int) -> tuple[AnswerPiece, bool]:
        """Start reasoning or a call, or skip a mark."""
        self._space = "" if self._trims else self._buffer[:at]
        self._mark, self._buffer = mark, self._buffer[at:]
        if mark in self._form.opens:
            self._step, self._searched = self._in_call, len(mark)
            return AnswerPiece(), True
        self._buffer = self._buffer[len(mark) :]
        self._step = self._in_thought if mark == self._form.thought[0] else self._in_text
        self._is_fresh = self._trims = True
        return AnswerPiece(), True

    def _in_thought(self, over: bool) -> tuple[AnswerPiece, bool]:
        thought, close, rest = self._buffer.partition(self._form.thought[1])
        if not close:
            return AnswerPiece(thought=self._taken(self._form.thought[1:], over)), False
        thought = thought.rstrip()
        piece = AnswerPiece(thought=thought.lstrip() if self._trims else thought)
        self._buffer, self._step = rest, self._in_text
        self._is_fresh = self._trims = True
        return piece, True

    def _taken(self, marks: Sequence[str], over: bool) -> str:
        """Remove and return the text in which no mark, nor white space before one, can begin."""
        if self._trims:
            self._buffer = self._buffer.lstrip()
        size = len(self._buffer)
        if not over:
            size -= num_held(self._buffer, marks)
            size = len(self._buffer[:size].rstrip())
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        self._trims = self._trims and not text
        return text

    def _in_call(self, over: bool) -> tuple[AnswerPiece, bool]:
        close, calls, at = self._form.close, None, -1
        while calls is None:
            at = -1 if close is None else self._buffer.find(close, self._searched)
            if at < 0 and not over:
                self._searched = max(self._searched, len(self._buffer) - len(close or ""))
                return AnswerPiece(), False
            self._searched = len(self._buffer) if at < 0 else at + len(close or "")
            calls = self._read(self._buffer[: self._searched], is_last=at < 0)
        self._step = self._in_text
        if not calls:  # a false start
            text, self._buffer = self._space + self._mark, self._buffer[len(self._mark) :]
            self._is_fresh = self._trims = False
            return AnswerPiece(text), True
        self._buffer, self._trims = self._buffer[self._searched :], True
        return AnswerPiece(calls=tuple(calls)), True

    def _read(self, text: str, *, is_last: bool) -> list[Call] | None:
        """Return the calls of a text, [] if there are none; None: it ends in one of its strings."""
        try:
            calls = self._form.read(text)
            for call in calls:
                dumped(call).encode()  # raises for invalid JSON and half characters
        except (ValueError, TypeError, RecursionError) as error:
            return None if isinstance(error, Unclosed) and not is_last else []
        return [typed(call, self._tools) for call in calls] if self._form.is_untyped else calls


def read_answer(
    form: CallFormat | None,
    text: str,
    tools: Sequence[Mapping[str, object]] = (),
    *,
    thinks: bool = False,
) -> AnswerPiece:
    """Return the text, the reasoning and the calls of a whole answer; arguments as of `Reader`."""
    return whole(Reader(form, tools, thinks=thinks), text)


def whole(reader: Reader, text: str) -> AnswerPiece:
    """Parse a whole answer with a reader."""
    pieces = [*reader.feed(text, over=True)]
    return AnswerPiece(
        "".join(piece.text for piece in pieces),
        "".join(piece.thought for piece in pieces),
        tuple(call for piece in pieces for call in piece.calls),
    )


CALLS = "tool_calls"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
UNTYPED = ("xml-inline", "kv-lines")


def shipped_format(template: Any, written: str, name: str) -> CallFormat | None:
    """Return the format of a response template; None if it does not match the probe call.

    Args:
        template: The tokenizer's response template.
        written: The chat template's rendering of the probe call.
        name: Function name in the probe call.
    """
    try:
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template
    except ImportError:  # before 5.13
        return None
    try:
        loaded = load_response_template(template)
    except Exception:  # from another version, or invalid
        return None
    field: Any = loaded.fields.get(CALLS)
    begin = field.open_re.search(written) if field and field.open_re else None
    if begin is None:
        return None
    opens = begin.group().partition(name)[0].strip()
    end = field.close_re.search(written, begin.end()) if field.close_re else None
    if not opens or (end is None and field.close_re):
        return None

    def read(text: str) -> list[Call]:
        parser = ResponseParser(loaded, prefix="")
        try:
            parser.feed(text)
            parsed = parser.finalize()[0].get(CALLS) or []
            calls = parsed if isinstance(parsed, list) else [parsed]
            functions = [call["function"] for call in calls]
        except Exception as error:  # its parsers raise any type
            raise NoCall(str(error)) from error
        return calls_of(functions)

    return CallFormat(
        "shipped",
        (opens,),
        end and end.group().strip(),
        read,
        is_untyped=field.content in UNTYPED,
        thought=_thought(loaded),
    )


def _thought(loaded: Any) -> tuple[str, str]:
    """Return the markers around reasoning, such as <think> and </think>."""
    for name in THOUGHTS:
        field = loaded.fields.get(name)
        if field is not None and field.open_literals and field.close_literals:
            return field.open_literals[0].strip(), field.close_literals[0].strip()
    return NO_CALLS.thought


ENDS = ("<|eom_id|>", "<|call|>", "<|observation|>", "<|tool_response>")
"""Further special tokens that end a turn with calls in some families."""
TAIL = 32
"""Tokens of a prompt in which it can open reasoning."""


class CallStyle:
    """How a model with a chat template calls tools.

    Attributes:
        form: How it writes calls.
        stops: Tokens that end a turn.
        special: Matches special tokens, which stay in the text of an answer until it is read.

    Raises:
        ConfigError: The template writes no calls, or in an unknown format.
    """

    def __init__(self, tokenizer: Any, style: Style) -> None:
        self._tokenizer = tokenizer
        self._chat = Chat(tokenizer, style.chat_template) if style.kind == "chat" else None
        shipped = getattr(tokenizer, "response_template", None)
        form = self._chat and format_of(self.render, shipped)
        if not form:
            raise ConfigError(
                "the chat template writes no calls of tools in a known format.",
                fix="Set data.chat_template to chatml, or to a template of a known format; or add "
                "a response_template to the tokenizer (transformers 5.13).",
            )
        self.form: CallFormat = form
        texts = special_texts(tokenizer)
        self.special = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        ends = [tokenizer.convert_tokens_to_ids(text) for text in ENDS if text in texts]
        self.stops = sorted({*stop_ids(tokenizer, style), *ends})

    @property
    def render(self) -> Render:
        """Writes a conversation without tools, up to the end of its last turn."""
        chat = self._chat
        assert chat is not None
        return lambda turns: chat.render(turns, (), "a call")

    def reader(self, prompt: Sequence[int], tools: Sequence[Mapping[str, object]]) -> Reader:
        """Return a reader of the answer to a prompt, whose text comes from `decoded`."""
        return Reader(self.form, tools, thinks=self.thinks(prompt))

    def thinks(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends where reasoning has begun."""
        return self.decoded(prompt[-TAIL:]).rstrip().endswith(self.form.thought[0].rstrip())

    def decoded(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, the special ones too."""
        return decoded(self._tokenizer, ids, special=True)
