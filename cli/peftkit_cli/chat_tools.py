"""Functions that the model may call in `peftkit chat`; none runs unless the user says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from peftkit.data.style import Style
from peftkit.errors import ConfigError
from peftkit.inference.call_formats import Call
from peftkit.inference.call_style import CallStyle
from peftkit.inference.calls import Reader
from peftkit.tasks.user_code import UserCode, called, tool_schemas
from peftkit_cli.arguments import note

SECONDS = 600.0
"""A function may take so long."""
REFUSED = str({"error": "The user did not allow this call."})
STOPPED = str({"error": "The user stopped this call."})


class ChatTools:
    """The functions of a conversation.

    Args:
        uses: As FILE.py:FUNCTION.
        asks: Whether the user is asked before a call.

    Raises:
        ConfigError: A function cannot be loaded, or cannot be a tool.
    """

    def __init__(self, tokenizer: Any, uses: Sequence[str], *, asks: bool) -> None:
        self._tokenizer, self._asks = tokenizer, asks
        code = UserCode()
        functions = [code.load(use) for use in uses]
        self._functions = {function.__name__: function for function in functions}
        if len(self._functions) < len(functions):
            raise ConfigError("two tools have one name.", fix="Rename one of them.")
        self._allowed: set[str] = set()
        self._styles: dict[Style, CallStyle] = {}

    @cached_property
    def schemas(self) -> list[Mapping[str, Any]]:
        """As chat templates take them."""
        return tool_schemas(self._functions)

    def style(self, style: Style) -> CallStyle:
        """Return how a model with a prompt style calls.

        Raises:
            ConfigError: Its chat template writes no calls.
        """
        if style not in self._styles:
            self._styles[style] = CallStyle(self._tokenizer, style)
        return self._styles[style]

    def reader(self, style: Style, prompt: Sequence[int]) -> Reader:
        """Return a reader of the answer to a prompt."""
        return self.style(style).reader(prompt, self.schemas)

    def message(
        self, style: Style, text: str, thought: str, calls: Sequence[Call]
    ) -> dict[str, Any]:
        """Return an answer as the chat template takes it."""
        said: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            pairs = [(call.id or f"call{n:05}", call) for n, call in enumerate(calls)]
            said = self.style(style).form.message(text, pairs)
        return said | ({"reasoning_content": thought} if thought else {})

    def replies(self, said: Mapping[str, Any], calls: Sequence[Call]) -> list[dict[str, Any]]:
        """Show the calls of an answer, run those that the user allows, and return the replies."""
        keys = [one["id"] for one in said.get("tool_calls", ())]
        done = []
        for key, call in zip(keys, calls, strict=True):
            content = self._answered(call)
            note(f"= {content}")
            named = {"name": call.name, "tool_call_id": key}
            done.append({"role": "tool", **named, "content": content})
        return done

    def _answered(self, call: Call) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
        note(f"calls {call.name}({given})")
        function = self._functions.get(call.name)
        if function is not None and not self._is_allowed(call.name):
            return REFUSED
        try:
            return called(function, call, SECONDS)[0]
        except KeyboardInterrupt:
            return STOPPED

    def _is_allowed(self, name: str) -> bool:
        if not self._asks or name in self._allowed:
            return True
        try:
            answer = input("run it? [y]es, [n]o, [a]lways this function: ").strip().lower()
        except (EOFError, KeyboardInterrupt):
            note("")
            return False
        if answer in ("a", "always"):
            self._allowed.add(name)
        return answer in ("y", "yes", "a", "always")
