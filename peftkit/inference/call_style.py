"""The tool calls of one model: the format of its chat template, and the ends of its turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from peftkit.data.chat import Chat, special_texts
from peftkit.data.generation import stop_ids
from peftkit.data.style import Style
from peftkit.errors import ConfigError
from peftkit.inference.call_formats import CallFormat
from peftkit.inference.calls import Reader, Render, format_of
from peftkit.inference.generate import decoded

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
