"""A renderer for the package `renderers` that supports any chat template with tool calls.

The package selects a renderer by model family. This renderer probes the chat template instead, as
peftkit does, and never re-tokenizes sampled tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from renderers.base import ParsedResponse, ParsedToolCall, RenderedTokens, ToolCallParseStatus
from renderers.configs import BaseRendererConfig

from peftkit.data.chat import Chat
from peftkit.data.chat_template import CHATML
from peftkit.data.generation import prompt_ids
from peftkit.data.style import Style
from peftkit.data.turns import Turns
from peftkit.inference.calls import CallStyle, whole

Messages = Sequence[Mapping[str, Any]]


class TemplateConfig(BaseRendererConfig):
    name: Literal["peftkit"] = "peftkit"
    template: str | None = None
    _internal_fields: ClassVar[frozenset[str]] = frozenset({"template"})


class TemplateRenderer:
    """Renders prompts, parses answers, and appends the next turns to them.

    Args:
        config: Its `template` is "chatml", a template's text, or None for the tokenizer's own.
    """

    config_class = TemplateConfig
    supports_tools = True
    is_prefix_stable = False

    def __init__(self, tokenizer: Any, config: TemplateConfig | None = None, **_: Any) -> None:
        self.config = config or TemplateConfig()
        template = CHATML if self.config.template == "chatml" else self.config.template
        self._style = Style("chat", template)
        self._tokenizer, self._turns = tokenizer, Turns(tokenizer, template)
        self._chat, self._calls = Chat(tokenizer, template), CallStyle(tokenizer, self._style)

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **_: Any,
    ) -> RenderedTokens:
        """Return the tokens of a conversation."""
        ids = self.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return _rendered(ids, [len(messages) - 1] * len(ids), messages)

    def render_ids(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **_: Any,
    ) -> list[int]:
        """Return the tokens of a conversation."""
        plain, tools = _plain(messages), tools or ()
        if add_generation_prompt:
            return [*prompt_ids(self._tokenizer, plain, self._style, tools)]
        text = self._chat.render(plain, tools, "a conversation")
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def get_stop_token_ids(self) -> list[int]:
        """Return the tokens that end an answer."""
        return list(self._calls.stops)

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Any] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedResponse:
        """Return the text, the reasoning and the calls of an answer."""
        ids = [token for token in token_ids if token not in self._calls.stops]
        reader = self._calls.reader(prompt_ids or (), tools or ())
        parsed = whole(reader, self._calls.decoded(ids))
        calls = [
            ParsedToolCall(
                raw="", name=call.name, arguments=call.arguments, status=ToolCallParseStatus.OK
            )
            for call in parsed.calls
        ]
        text = self._calls.special.sub("", parsed.text)
        return ParsedResponse(
            content=text, reasoning_content=parsed.thought or None, tool_calls=calls
        )

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Messages,
        *,
        tools: Sequence[Any] | None = None,
        **_: Any,
    ) -> RenderedTokens | None:
        """Return all tokens up to the next answer, or None if the last one was truncated."""
        before = [*previous_prompt_ids, *previous_completion_ids]
        if not previous_completion_ids or before[-1] not in self._calls.stops:
            return None
        answer = self.parse_response(
            previous_completion_ids, tools=tools, prompt_ids=previous_prompt_ids
        )
        new, calls = _plain(new_messages), []
        replies = (message for message in new if message["role"] == "tool")
        for number, (reply, call) in enumerate(zip(replies, answer.tool_calls, strict=False)):
            reply["name"], reply["tool_call_id"] = call.name, f"call{number:05}"
            calls.append((call.name, reply["tool_call_id"]))
        ended_by = self._calls.decoded(before[-1:])
        _, ids = self._turns.after(new, calls, tools or (), ended_by=ended_by)
        places = [-1] * len(before) + [len(new) - 1] * len(ids)
        return _rendered([*before, *ids], places, new)


def _rendered(ids: list[int], places: list[int], messages: Messages) -> RenderedTokens:
    return RenderedTokens(
        token_ids=ids,
        message_indices=places,
        sampled_mask=[False] * len(ids),
        is_content=[],
        message_roles=[message["role"] for message in messages],
    )


def _plain(messages: Messages) -> list[dict[str, Any]]:
    """Return messages for a chat template: content as text, arguments as objects."""
    found = []
    for message in messages:
        plain = {**message, "content": _text(message.get("content"))}
        if calls := message.get("tool_calls"):
            plain["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _object(call)}}
                for call in calls
            ]
        found.append(plain)
    return found


def _text(content: Any) -> str:
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    return "".join(part.get("text", "") for part in parts)


def _object(call: Mapping[str, Any]) -> Any:
    given = call["function"]["arguments"]
    return json.loads(given) if isinstance(given, str) else given
