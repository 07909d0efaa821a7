"""Tool calls: parsed from a completion token by token, and in the format of OpenAI's API."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from peftkit.inference.call_formats import Call, dumped
from peftkit.inference.calls import AnswerPiece, CallStyle
from peftkit.inference.engine import Completion


class AnswerCalls:
    """Streaming parser of the tool calls of one completion.

    Args:
        prompt: Token ids before the completion.
        tools: Tools in the format of chat templates.
        is_single: Whether the completion ends after one call.
    """

    def __init__(
        self,
        style: CallStyle,
        prompt: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
        *,
        is_single: bool,
    ) -> None:
        self._reader = style.reader(prompt, tools)
        self._special, self._is_single = style.special, is_single

    def take(self, text: str, completion: Completion) -> AnswerPiece:
        """Parse new text; return its complete text, reasoning and calls.

        Args:
            text: New text of the completion, with special tokens.
        """
        parts: list[AnswerPiece] = []
        for part in self._reader.feed(text, over=completion.ended_by is not None):
            if part.calls and self._is_single:
                parts.append(part._replace(calls=part.calls[:1]))
                completion.finish("stop")
                break
            parts.append(part)
        return AnswerPiece(
            self._special.sub("", "".join(part.text for part in parts)),
            "".join(part.thought for part in parts),
            tuple(call for part in parts for call in part.calls),
        )


def call_fields(call: Call) -> dict[str, Any]:
    """Return a call in OpenAI's format, with an id of nine letters and digits for templates."""
    return {
        "id": call.id or uuid.uuid4().hex[:9],
        "type": "function",
        "function": {"name": call.name, "arguments": dumped(call)},
    }
