"""Conversations as text, and the exact spans of the assistant's turns in it.

A turn is located by rendering prefixes of the conversation: `prompt` ends before the turn, with the
generation prompt; `closed` ends after it. Where both are prefixes of the full text, the turn is
text[len(prompt):len(closed)]. Some templates render earlier turns differently from the last one
(Qwen3 strips their reasoning, Phi-3 ends a conversation with another token). Then a sentinel in
place of the turn's content shows the text before and after it. A turn that neither method locates
is an error, never a guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from peftkit.data.format import Conversation
from peftkit.data.messages import Message, reasoning_of
from peftkit.errors import DataError, did_you_mean

SENTINEL = "PEFTKITsentinelTURN"
_THOUGHT_END = re.compile(r"\s*(</[a-z]+>|\[/[A-Z]+\])?\s*")
_TEMPLATE_FIX = (
    'Set data.chat_template to "chatml" (it writes system, tool and tool-call turns), or to a '
    ".jinja file."
)

# ChatML; tools and calls as Qwen2.5 and Hermes write them
CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call one or more of these functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nTo call a function, write a JSON object with its name and arguments:\\n' }}
{{- '<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


class Span(NamedTuple):
    """Characters [start, end) of a rendered conversation that are a target.

    `ended`: whether the last of them is a special token, which ends the turn.
    """

    start: int
    end: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text.

    Args:
        spans: The target turns, in order.
        as_generated: Whether the last turn begins where a generation prompt ends.
        thoughts: For each target turn with reasoning, whether the template renders it.
    """

    text: str
    spans: tuple[Span, ...]
    as_generated: bool
    thoughts: tuple[bool, ...] = ()


def choose_template(
    tokenizer: Any, choice: str | None, variables: Mapping[str, Any] | None = None
) -> str | None:
    """Return the template of `data.chat_template`; None: the tokenizer's own, if it has one.

    Args:
        variables: Defaults that the template's first lines set, so that generation with this
            template prompts as training did.

    Raises:
        DataError: It names a file that does not exist, or does not read one of the variables.
    """
    template = _named_template(choice)
    if not variables:
        return template
    text = own_template(tokenizer) if template is None else template
    for name in variables:
        if not name.isidentifier() or not re.search(rf"\b{name}\b", text):
            raise DataError(
                f"Cannot use data.chat_template_kwargs: {name}.",
                found="The chat template does not read it." if text else "There is no template.",
                fix="Leave it out, or give a template that does with data.chat_template.",
            )
    lines = [
        f"{{%- set {name} = {name} if {name} is defined else {json.dumps(value)} -%}}\n"
        for name, value in variables.items()
    ]
    return "".join(lines) + text


def own_template(tokenizer: Any) -> str:
    """Return the text of a tokenizer's or processor's own template, "" if it has none."""
    for owner in (tokenizer, getattr(tokenizer, "tokenizer", None)):
        if template := getattr(owner, "chat_template", None):
            return str(template.get("default", "") if isinstance(template, Mapping) else template)
    return ""


def system_of(messages: Sequence[Message]) -> str:
    """Return the system prompt that a conversation begins with, "" if it has none."""
    is_system = bool(messages) and messages[0]["role"] in ("system", "developer")
    return str(messages[0].get("content") or "") if is_system else ""


def shortened(text: str, length: int = 44) -> str:
    """Return the beginning of a text, in quotes and on one line."""
    line = " ".join(text.split())
    return f'"{line if len(line) <= length else line[: length - 3] + "..."}"'


def with_system(template: str, system: str) -> str:
    """Return a template that begins a conversation without a system turn with this one."""
    # "developer" is not spelt out: `Chat` asks whether the template itself reads that role
    line = (
        "{%- if messages[0].role[:6] not in ('system', 'develo') -%}"
        "{%- set messages = [{'role': 'system', 'content': SYSTEM}] + (messages | list) -%}"
        "{%- endif -%}\n"
    )
    return line.replace("SYSTEM", json.dumps(system, ensure_ascii=False)) + template


def _named_template(choice: str | None) -> str | None:
    if choice is None:
        return None
    if choice == "chatml":
        return CHATML
    path = Path(choice).expanduser()
    summary = f"Cannot use data.chat_template '{choice}'."
    if path.suffix not in {".jinja", ".j2"}:
        hint = did_you_mean(choice, ["chatml"])
        raise DataError(summary, found=hint, fix='Give "chatml" or the path of a .jinja file.')
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        raise DataError(summary, found=str(problem)) from None


def special_texts(tokenizer: Any) -> list[str]:
    """Return the texts of the special tokens, the longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {str(token) for token in added if getattr(token, "special", False)}
    texts |= {str(token) for token in tokenizer.all_special_tokens}
    return sorted((text for text in texts if text), key=lambda text: (-len(text), text))


class Chat:
    """Renderer of conversations with a chat template; finds their target turns.

    Args:
        template: Used instead of the tokenizer's own.
        renderer: Its `apply_chat_template` is called instead of the tokenizer's.
        trains_reasoning: Whether the reasoning before an answer is a target too.
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
        special = "|".join(re.escape(text) for text in special_texts(tokenizer)) or r"(?!)"
        self._next_special = re.compile(rf"\s*({special})")
        # the end of a turn: special tokens, then nothing but white space and more of them
        self._turn_end = re.compile(rf"((?:{special})+)(?:\s|{special})*\Z")
        self._writes_tools = False
        self._writes_calls = False

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        source: str,
        *,
        generation: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as text, with the beginning of an answer for `generation`.

        Args:
            variables: For the template, in place of those that it sets itself.

        Raises:
            DataError: The template refuses the conversation; with its message.
        """
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
                fix=f"Change the row, or the template. {_TEMPLATE_FIX}",
            ) from problem
        assert isinstance(text, str)
        return text

    def _as_read(self, message: Message) -> dict[str, Any]:
        """Return a message with the names that the template reads."""
        turn = dict(message)
        if turn["role"] == "developer" and "developer" not in self._text:
            turn["role"] = "system"
        if "reasoning_content" in self._text or not (thought := turn.pop("reasoning_content", "")):
            return turn
        if re.search(r"\.thinking\b|['\"]thinking['\"]", self._text):
            return turn | {"thinking": thought}
        return turn | {"content": f"<think>\n{thought}\n</think>\n\n{turn.get('content') or ''}"}

    def spans(self, conversation: Conversation) -> Rendered:
        """Render a conversation and find its target turns.

        Raises:
            DataError: The template omits a message, or a turn cannot be located with certainty.
        """
        whole = self.render(conversation.messages, conversation.tools, conversation.source)
        self._check_complete(conversation, whole)
        spans: list[Span] = []
        thoughts: list[bool] = []
        as_generated = True
        for turn in conversation.target_turns:
            message = conversation.messages[turn]
            if not (message.get("content") or "").strip() and "tool_calls" not in message:
                continue  # an empty answer
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
        messages, tools, source = conversation.messages, conversation.tools, conversation.source
        prompt = self.render(messages[:turn], tools, source, generation=True)
        closed = whole
        if turn + 1 < len(messages):
            closed = self.render(messages[: turn + 1], tools, source)
        starts, ends = whole.startswith(prompt), whole.startswith(closed)
        if starts and ends and len(closed) > len(prompt):
            return self._ended(whole, len(prompt), len(closed)), True

        before, after = self._around(conversation, turn, len(messages))
        start = len(prompt) if starts else len(before)
        if not starts and not whole.startswith(before):
            raise _not_found(conversation, turn, "what comes before it changes with its content")
        if ends and len(closed) > start:
            return self._ended(whole, start, len(closed)), starts
        if not whole.endswith(after):
            raise _not_found(conversation, turn, "what comes after it changes with its content")
        end = len(whole) - len(after)
        # the end of turn is a target where a whole conversation ends with the same token
        _, last_after = self._around(conversation, turn, turn + 1)
        here, last = self._next_special.match(after), self._next_special.match(last_after)
        ended = bool(here and last and here[1] == last[1])
        if here and ended:
            end += here.end()
        if end <= start:
            raise _not_found(conversation, turn, "the template renders nothing for it")
        return Span(start, end, ended), starts

    def _ended(self, whole: str, start: int, end: int) -> Span:
        """Return a span that stops at the end-of-turn token, before the white space after it."""
        match = self._turn_end.search(whole, start, end)
        return Span(start, match.end(1), True) if match else Span(start, end, False)

    def _around(self, conversation: Conversation, turn: int, stop: int) -> tuple[str, str]:
        """Return what messages[:stop] have before and after the content of a turn."""
        messages = list(conversation.messages[:stop])
        messages[turn] = {"role": "assistant", "content": SENTINEL}
        marked = self.render(messages, conversation.tools, conversation.source)
        before, *rest = marked.split(SENTINEL)
        if len(rest) != 1:
            raise _not_found(conversation, turn, "its content is not in the text exactly once")
        return before, rest[0]

    def _check_complete(self, conversation: Conversation, whole: str) -> None:
        """Refuse templates that drop tools, tool calls or messages without an error."""
        if conversation.tools:
            self._check_tools(conversation, whole)
        for number, message in enumerate(conversation.messages):
            # reasoning models' templates drop the reasoning of earlier turns on purpose
            answer = (message.get("content") or "").rpartition("</think>")[2].strip()
            if answer and answer not in whole and not self._writes(conversation, number):
                role = message["role"]
                raise DataError(
                    f"The chat template omits a message of {conversation.source}.",
                    found=f"The {role} turn (number {number} from 0) is not in the rendered text.",
                    fix=_TEMPLATE_FIX,
                )
            for call in message.get("tool_calls") or ():
                self._check_call(conversation, number, call["function"], whole)

    def _writes(self, conversation: Conversation, number: int) -> bool:
        """Return whether a message's content is rendered, even if it is escaped."""
        messages = list(conversation.messages)
        messages[number] = {**messages[number], "content": SENTINEL}
        return SENTINEL in self.render(messages, conversation.tools, conversation.source)

    def _check_tools(self, conversation: Conversation, whole: str) -> None:
        names = [tool["function"]["name"] for tool in conversation.tools]
        if not self._writes_tools:
            bare = self.render(conversation.messages, (), conversation.source)
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
            marked = self.render(messages, conversation.tools, conversation.source)
            self._writes_calls = SENTINEL in marked
        if not self._writes_calls or function["name"] not in whole:
            raise DataError(
                f"The chat template does not render the tool calls of {conversation.source}.",
                found=f"Turn {number} (from 0) calls {json.dumps(function['name'])}.",
                fix=_TEMPLATE_FIX,
            )


def _after_thought(whole: str, span: Span, message: Message, thought: str) -> Span:
    """Return the span after a thought: from the answer on, or from the end of the thought."""
    start = whole.index(thought, span.start) + len(thought)
    answer = (message.get("content") or "").rpartition("</think>")[2].strip()
    ending = _THOUGHT_END.match(whole, start, span.end)
    end = ending.end() if ending else start
    # past the tag, of which the answer may be a piece; or a tag begins the answer
    found = (whole.find(answer, after, span.end) for after in (end, start) if answer)
    return Span(next((at for at in found if at >= 0), end), span.end, span.ended)


def _not_found(conversation: Conversation, turn: int, why: str) -> DataError:
    return DataError(
        f"Cannot locate the assistant's tokens in {conversation.source}.",
        found=f"Turn {turn} (from 0): {why}.",
        fix=f"Use a template that renders each turn independently. {_TEMPLATE_FIX}",
    )
