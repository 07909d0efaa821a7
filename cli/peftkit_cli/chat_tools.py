"""Functions that the model may call in `peftkit chat`, if the user allows it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from peftkit.data.style import Style
from peftkit.errors import ConfigError
from peftkit.files.strict_json import Json, JsonMap
from peftkit.inference.call_formats import Call
from peftkit.inference.calls import CallStyle, Reader
from peftkit.tasks.user_code import UserCode, called, tool_schemas
from peftkit_cli.arguments import note

SECONDS = 600.0
"""Timeout of a function call."""
REFUSED = str({"error": "The user did not allow this call."})
STOPPED = str({"error": "The user stopped this call."})


class ChatTools:
    """The tools of a conversation.

    Args:
        uses: Functions, as FILE.py:FUNCTION.
        confirm: Whether the user must allow each call.

    Raises:
        ConfigError: A function cannot be loaded, or cannot be a tool.
    """

    def __init__(self, tokenizer: object, uses: Sequence[str], *, confirm: bool) -> None:
        self._tokenizer, self._confirm = tokenizer, confirm
        code = UserCode()
        functions = [code.load(use) for use in uses]
        self._functions = {function.__name__: function for function in functions}
        if len(self._functions) < len(functions):
            raise ConfigError("two tools have the same name.", fix="Rename one of them.")
        self._allowed: set[str] = set()
        self._styles: dict[Style, CallStyle] = {}

    @cached_property
    def schemas(self) -> list[JsonMap]:
        """Schemas of the tools, for chat templates."""
        return tool_schemas(self._functions)

    def style(self, style: Style) -> CallStyle:
        """Return the call format of a prompt style; raises ConfigError if it has none."""
        if style not in self._styles:
            self._styles[style] = CallStyle(self._tokenizer, style)
        return self._styles[style]

    def reader(self, style: Style, prompt: Sequence[int]) -> Reader:
        """Return a reader of the answer to a prompt."""
        return self.style(style).reader(prompt, self.schemas)

    def message(self, style: Style, text: str, thought: str, calls: Sequence[Call]) -> Json:
        """Return an answer as a message for the chat template."""
        message: Json = {"role": "assistant", "content": text}
        if calls:
            pairs = [(call.id or f"call{n:05}", call) for n, call in enumerate(calls)]
            message = self.style(style).form.message(text, pairs)
        return message | ({"reasoning_content": thought} if thought else {})

    def replies(self, message: JsonMap, calls: Sequence[Call]) -> list[dict[str, object]]:
        """Print the calls of a message, run them if the user allows it, and return the replies."""
        ids = [call["id"] for call in message.get("tool_calls", ())]
        replies = []
        for id, call in zip(ids, calls, strict=True):
            content = self._run(call)
            note(f"= {content}")
            reply = {"role": "tool", "name": call.name, "tool_call_id": id, "content": content}
            replies.append(reply)
        return replies

    def _run(self, call: Call) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
        note(f"calls {call.name}({arguments})")
        function = self._functions.get(call.name)
        if function is not None and not self._is_allowed(call.name):
            return REFUSED
        try:
            return called(function, call, SECONDS)[0]
        except KeyboardInterrupt:
            return STOPPED

    def _is_allowed(self, name: str) -> bool:
        if not self._confirm or name in self._allowed:
            return True
        try:
            answer = input("Run it? [y]es, [n]o, [a]lways for this function: ").strip().lower()
        except (EOFError, KeyboardInterrupt):
            note("")
            return False
        if answer in ("a", "always"):
            self._allowed.add(name)
        return answer in ("y", "yes", "a", "always")
