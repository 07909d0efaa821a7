"""Calls of tools in an answer as it grows, and in the format of OpenAI's interface."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from peftkit.inference.call_formats import Call, dumped
from peftkit.inference.call_style import CallStyle
from peftkit.inference.calls import Said
from peftkit.inference.engine import Completion


class AnswerCalls:
    """Reads one answer for calls.

    Args:
        prompt: Tokens before it.
        tools: As chat templates take them.
        is_single: Whether the answer ends after one call.
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

    def take(self, text: str, completion: Completion) -> Said:
        """Return what has become certain with more text; end the answer after its only call.

        Args:
            text: Of the answer, with special tokens.
        """
        pieces: list[Said] = []
        for piece in self._reader.feed(text, over=completion.ended_by is not None):
            if piece.calls and self._is_single:
                pieces.append(piece._replace(calls=piece.calls[:1]))
                completion.finish("stop")
                break
            pieces.append(piece)
        return Said(
            self._special.sub("", "".join(piece.text for piece in pieces)),
            "".join(piece.thought for piece in pieces),
            tuple(call for piece in pieces for call in piece.calls),
        )


def call_fields(call: Call) -> dict[str, Any]:
    """Return a call as clients get it; its id has nine letters and digits, as templates need."""
    return {
        "id": call.id or uuid.uuid4().hex[:9],
        "type": "function",
        "function": {"name": call.name, "arguments": dumped(call)},
    }
