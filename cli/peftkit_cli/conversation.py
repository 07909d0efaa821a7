"""The conversation behind `peftkit chat`: what is typed, what is answered, by whom."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import ClassVar

import typer

from peftkit.data.encode import prompt_ids, stop_ids
from peftkit.errors import PeftkitError, did_you_mean
from peftkit.formats.folder import Opened
from peftkit.generate import stream
from peftkit_cli.arguments import note


class Conversation:
    """A conversation with a base whose adapter can be switched off and on.

    Attributes:
        history: The messages so far, both sides; the switch does not touch them.
        uses_adapter: Whether the adapter takes part in the next answer.
    """

    COMMANDS: ClassVar = {
        "/base": "answer with the bare base from now on",
        "/adapter": "answer with the adapter again",
        "/reset": "forget the conversation",
        "/help": "show this list",
        "/quit": "leave; Ctrl-D does too, and Ctrl-C stops an answer",
    }

    def __init__(
        self, opened: Opened, max_new_tokens: int, temperature: float, seed: int | None
    ) -> None:
        self.opened, self.seed = opened, seed
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.history: list[dict[str, str]] = []
        self.uses_adapter = True
        self.on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self.style = opened.style
        if self.style.kind != "chat":
            note("This adapter learnt from single prompts: each line is asked alone.")

    def lines(self) -> Iterator[str]:
        """Yield what the user types, until the end of the input."""
        if not self.on_terminal:
            yield from sys.stdin
            return
        import readline  # noqa: F401 - its import gives input() line editing and history

        while True:
            try:
                yield input("adapter> " if self.uses_adapter else "base> ")
            except EOFError:
                note("")
                return

    def take(self, line: str) -> bool:
        """Answer a line or do what it commands; return False when the user leaves."""
        text = line.rstrip("\n")
        if not text.startswith("/"):  # a leading space sends a slash as it is
            if text.strip():
                self.answer(text.strip())
            return True
        command = text.strip()
        if command in ("/base", "/adapter"):
            self.uses_adapter = command == "/adapter"
            note("The adapter answers." if self.uses_adapter else "The base answers.")
        elif command == "/reset":
            self.history.clear()
            note("The conversation is forgotten.")
        elif command == "/help":
            for name, meaning in self.COMMANDS.items():
                note(f"{name:9} {meaning}")
        elif command != "/quit":
            hint = did_you_mean(command, self.COMMANDS) or "/help lists them."
            note(f"There is no command {command}. {hint}")
        return command != "/quit"

    def answer(self, text: str) -> None:
        """Stream the answer to a message; Ctrl-C keeps what has come so far."""
        self.history.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            with nullcontext() if self.uses_adapter else self.opened.adapter.disabled():
                for piece in stream(
                    self.opened.base.model,
                    self.opened.base.tokenizer,
                    prompt_ids(self.opened.base.tokenizer, self._said(), self.style),
                    stops=stop_ids(self.opened.base.tokenizer, self.style),
                    max_new_tokens=self.max_new_tokens,
                    temperature=self.temperature,
                    seed=self.seed,
                ):
                    typer.echo(piece, nl=False)
                    pieces.append(piece)
        except KeyboardInterrupt:
            pass
        except PeftkitError as error:
            self.history.pop()
            if not self.on_terminal:
                raise
            note(f"{error}\n  /reset forgets the conversation and makes room.")
            return
        typer.echo()
        self.history.append({"role": "assistant", "content": "".join(pieces)})

    def _said(self) -> str | list[dict[str, str]]:
        """Return what is asked: the conversation, or its last line where the style knows none."""
        return self.history if self.style.kind == "chat" else self.history[-1]["content"]
