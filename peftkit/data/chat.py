"""Conversations as text, and the exact spans of the assistant's turns in it.

A turn is located by rendering prefixes of the conversation: `prompt` ends before the turn, with the
generation prompt; `closed` ends after it. If both are prefixes of the full text, the turn is
text[len(prompt):len(closed)]. Some templates render earlier turns differently from the last one
(Qwen3 strips their reasoning, Phi-3 ends a conversation with another token). In this case a
sentinel replaces the turn's content, which shows the text before and after it. If neither method
locates a turn, that is an error: spans are never guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from peftkit.data.chat_template import own_template
from peftkit.data.examples import Conversation
from peftkit.data.messages import Message, Tool, reasoning_of
from peftkit.errors import DataError
from peftkit.execution.signals import pause_point

SENTINEL = "PEFTKITsentinelTURN"
_THOUGHT_END = re.compile(r"\s*(</[a-z]+>|\[/[A-Z]+\])?\s*")
_TEMPLATE_FIX = (
    'Set data.chat_template to "chatml" (it writes system, tool and tool-call turns), or to a '
    ".jinja file."
)


class Span(NamedTuple):
    """Characters [start, end) of a rendered conversation that are a target.

    `ended`: whether the last character belongs to a special token that ends the turn.
    """

    start: int
    end: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text.

    Args:
        spans: The target turns, in order.
        as_generated: Whether the last turn begins at the end of a generation prompt.
        thoughts: For each target turn with reasoning, whether the template renders the reasoning.
    """

    text: str
    spans: tuple[Span, ...]
    as_generated: bool
    thoughts: tuple[bool, ...] = ()


def special_texts(tokenizer: Any) -> list[str]:
    """Return the texts of the special tokens, the longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {str(token) for token in added if getattr(token, "special", False)}
    texts |= {str(token) for token in tokenizer.all_special_tokens}
    return sorted((text for text in texts if text), key=lambda text: (-len(text), text))


class Chat:
    """Renderer of conversations with a chat template, which also locates their target turns.

    Args:
        template: Replaces the tokenizer's template.
        renderer: Its `apply_chat_template` replaces the tokenizer's.
        trains_reasoning: Whether the reasoning before a response is a target too.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None = None,
        renderer: Any = None,
        *,
        trains_reasoning: bool = True,
    ) -> None:
        self._renderer, self._template = renderer or tokenizer, template
        self._text = template or own_template(self._renderer)
        self._trains_reasoning = trains_reasoning
        self._special = special_texts(tokenizer)
        special = "|".join(map(re.escape, self._special)) or r"(?!)"
        self._next_special = re.compile(rf"\s*({special})")
        self._writes_tools = False
        self._writes_calls = False

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        source: str,
        *,
        generation: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return a conversation as text, with the generation prompt if `generation`.

        Args:
            variables: Replace variables that the template sets itself.

        Raises:
            DataError: The template refuses the conversation; with the template's message.
        """
        pause_point()
        try:
            text = self._renderer.apply_chat_template(
                [self._as_read(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self._template,
                add_generation_prompt=generation,
                tokenize=False,
                **(variables or {}),
            )
        except Exception as problem:  # a template is a program: it can raise anything
            reason = f"Its error: {problem}"
            if any("tool_calls" in message for message in messages):
                reason += "\nThe row has tool calls; this template may not support them."
            raise DataError(
                f"The chat template cannot render {source}.",
                found=reason,
                fix="Change the row, or drop such rows (data.drop_invalid: true), or change the "
                f"template. {_TEMPLATE_FIX}",
            ) from problem
        assert isinstance(text, str)
        return text

    def _render(
        self, conversation: Conversation, messages: Sequence[Message], *, generation: bool = False
    ) -> str:
        """Render messages with the tools and variables of a conversation."""
        tools, source, variables = conversation.tools, conversation.source, conversation.variables
        return self.render(messages, tools, source, generation=generation, variables=variables)

    def _as_read(self, message: Message) -> dict[str, object]:
        """Return a message with the role and the field of reasoning that the template reads."""
        turn = dict(message)
        if turn["role"] == "developer" and "developer" not in self._text:
            turn["role"] = "system"
        if "reasoning_content" in self._text or not (thought := turn.pop("reasoning_content", "")):
            return turn
        if re.search(r"\.thinking\b|['\"]thinking['\"]", self._text):
            return turn | {"thinking": thought}
        return turn | {"content": f"<think>\n{thought}\n</think>\n\n{turn.get('content') or ''}"}

    def spans(self, conversation: Conversation) -> Rendered:
        """Render a conversation and locate its target turns.

        Raises:
            DataError: The template omits a message, or a turn cannot be located exactly.
        """
        whole = self._render(conversation, conversation.messages)
        self._check_complete(conversation, whole)
        spans: list[Span] = []
        thoughts: list[bool] = []
        as_generated = True
        for turn in conversation.target_turns:
            message = conversation.messages[turn]
            if not (message.get("content") or "").strip() and "tool_calls" not in message:
                continue  # an empty response
            span, as_generated = self._span(conversation, turn, whole)
            if thought := reasoning_of(message):
                thoughts.append(thought in whole[span.start : span.end])
                if not self._trains_reasoning and thoughts[-1]:
                    span = _after_thought(whole, span, message, thought)
            if not spans or span.start >= spans[-1].end:
                spans.append(span)
            else:
                raise _not_found(conversation, turn, "it overlaps the turn before it")
        return Rendered(whole, tuple(spans), as_generated, tuple(thoughts))

    def _span(self, conversation: Conversation, turn: int, whole: str) -> tuple[Span, bool]:
        """Return a turn's span, and whether it begins where the generation prompt ends."""
        messages = conversation.messages
        # many templates read the first message, so nothing is rendered before it
        prompt = self._render(conversation, messages[:turn], generation=True) if turn else SENTINEL
        closed = whole
        if turn + 1 < len(messages):
            closed = self._render(conversation, messages[: turn + 1])
        starts, ends = whole.startswith(prompt), whole.startswith(closed)
        if starts and ends and len(closed) > len(prompt):
            return self._ended(whole, len(prompt), len(closed)), True

        before, after = self._around(conversation, turn, len(messages))
        start = len(prompt) if starts else len(before)
        if not starts and not whole.startswith(before):
            raise _not_found(conversation, turn, "the text before it changes with its content")
        if ends and len(closed) > start:
            return self._ended(whole, start, len(closed)), starts
        if not whole.endswith(after):
            raise _not_found(conversation, turn, "the text after it changes with its content")
        end = len(whole) - len(after)
        # the end of turn is a target if a whole conversation ends with the same token
        _, after_last = self._around(conversation, turn, turn + 1)
        stop, last_stop = self._next_special.match(after), self._next_special.match(after_last)
        ended = bool(stop and last_stop and stop[1] == last_stop[1])
        if stop and ended:
            end += stop.end()
        if end <= start:
            raise _not_found(conversation, turn, "the template renders nothing for it")
        return Span(start, end, ended), starts

    def _ended(self, whole: str, start: int, end: int) -> Span:
        """Return a span that ends with the end-of-turn token, before any white space.

        Backwards from the end, in linear time: a regular expression would take cubic time.
        """
        place, ended, after_special = end, 0, False
        while place > start:
            if special := next((s for s in self._special if whole.endswith(s, start, place)), ""):
                ended = ended if after_special else place
                place, after_special = place - len(special), True
            elif whole[place - 1].isspace():
                place, after_special = place - 1, False
            else:
                break
        return Span(start, ended, True) if ended else Span(start, end, False)

    def _around(self, conversation: Conversation, turn: int, stop: int) -> tuple[str, str]:
        """Return the text of messages[:stop] before and after the content of a turn."""
        messages = list(conversation.messages[:stop])
        messages[turn] = {"role": "assistant", "content": SENTINEL}
        marked = self._render(conversation, messages)
        before, *rest = marked.split(SENTINEL)
        if len(rest) != 1:
            raise _not_found(conversation, turn, "its content is not in the text exactly once")
        return before, rest[0]

    def _check_complete(self, conversation: Conversation, whole: str) -> None:
        """Refuse templates that silently drop tools, tool calls or messages."""
        if conversation.tools:
            self._check_tools(conversation, whole)
        for number, message in enumerate(conversation.messages):
            # reasoning models' templates drop the reasoning of earlier turns intentionally
            response = _without_thought(message)
            if response and response not in whole and not self._writes(conversation, number):
                role = message["role"]
                raise DataError(
                    f"The chat template omits a message of {conversation.source}.",
                    found=f"The {role} turn (number {number} from 0) is not in the rendered text.",
                    fix=_TEMPLATE_FIX,
                )
            for call in message.get("tool_calls") or ():
                self._check_call(conversation, number, call["function"], whole)

    def _writes(self, conversation: Conversation, number: int) -> bool:
        """Return whether a message's content is rendered, possibly escaped."""
        messages = list(conversation.messages)
        messages[number] = {**messages[number], "content": SENTINEL}
        return SENTINEL in self._render(conversation, messages)

    def _check_tools(self, conversation: Conversation, whole: str) -> None:
        names = [tool["function"]["name"] for tool in conversation.tools]
        if not self._writes_tools:
            bare = self._render(replace(conversation, tools=()), conversation.messages)
            self._writes_tools = bare != whole
        if not self._writes_tools or any(name not in whole for name in names):
            raise DataError(
                f"The chat template does not render the tools of {conversation.source}.",
                found=f"The row has the tools {', '.join(names)}; the text does not.",
                fix=_TEMPLATE_FIX,
            )

    def _check_call(
        self, conversation: Conversation, number: int, function: Mapping[str, Any], whole: str
    ) -> None:
        if not self._writes_calls:
            messages = list(conversation.messages)
            probe = {"name": function["name"], "arguments": {"value": SENTINEL}}
            calls = [{**c, "function": probe} for c in messages[number]["tool_calls"]]
            messages[number] = {**messages[number], "tool_calls": calls}
            marked = self._render(conversation, messages)
            self._writes_calls = SENTINEL in marked
        if not self._writes_calls or function["name"] not in whole:
            raise DataError(
                f"The chat template does not render the tool calls of {conversation.source}.",
                found=f"Turn {number} (from 0) calls {json.dumps(function['name'])}.",
                fix=_TEMPLATE_FIX,
            )


def _without_thought(message: Message) -> str:
    return str(message.get("content") or "").rpartition("</think>")[2].strip()


def _after_thought(whole: str, span: Span, message: Message, thought: str) -> Span:
    """Return the span from the beginning of the response, or from the end of the thought."""
    start = whole.index(thought, span.start) + len(thought)
    response = _without_thought(message)
    ending = _THOUGHT_END.match(whole, start, span.end)
    end = ending.end() if ending else start
    # search after the tag, which may contain the response; then before, if a tag begins it
    places = (whole.find(response, after, span.end) for after in (end, start) if response)
    return Span(next((place for place in places if place >= 0), end), span.end, span.ended)


def _not_found(conversation: Conversation, turn: int, reason: str) -> DataError:
    return DataError(
        f"Cannot locate the assistant's tokens in {conversation.source}.",
        found=f"Turn {turn} (from 0): {reason}.",
        fix=f"Use a template that renders each turn independently. {_TEMPLATE_FIX}",
    )
