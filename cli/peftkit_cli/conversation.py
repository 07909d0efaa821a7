"""The conversation of `peftkit chat`."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import typer

from peftkit.data.chat_template import shortened
from peftkit.data.generation import prompt_ids, stop_ids, style_with_system
from peftkit.data.media.files import KINDS, Media
from peftkit.data.style import Style
from peftkit.errors import DataError, PeftkitError, did_you_mean
from peftkit.evaluation.predict import media_task
from peftkit.files.strict_json import Json
from peftkit.formats.open_adapter import Opened
from peftkit.inference.bank import AdapterBank
from peftkit.inference.call_formats import Call
from peftkit.inference.calls import AnswerPiece
from peftkit.inference.generate import stream
from peftkit.tasks.media.media_text import MediaPrompt
from peftkit_cli.arguments import note
from peftkit_cli.chat_tools import ChatTools

BASE = "base"
"""Name of the base without an adapter; reserved."""
MAX_TURNS = 16
"""Maximum number of turns of an answer that calls tools."""
FENCE = '"""'
"""Start and end of a message of several lines."""


@dataclass(frozen=True, slots=True)
class Voice:
    """An adapter or the base: its prompt style, and a context that switches the model to it."""

    style: Style
    using: Callable[[], AbstractContextManager[object]]


def voices_of(source: Opened | AdapterBank) -> dict[str, Voice]:
    """Return the adapters, then the base; the single adapter of `Opened` is named "adapter"."""
    if isinstance(source, Opened):
        style = source.style
        return {"adapter": Voice(style, nullcontext), BASE: Voice(style, source.adapter.disabled)}

    def voice(name: str | None) -> Voice:
        return Voice(source.style(name), lambda: source.use(name))

    return {**{name: voice(name) for name in source.names}, BASE: voice(None)}


class Conversation:
    """Conversations with a base and adapters, of which one answers at a time.

    Each has its own history: a base that reads an adapter's answers copies their form.

    Attributes:
        current: Name of the voice that answers next.
    """

    COMMANDS: ClassVar = {
        "/base": "answer with the base, without the adapter; it has another history",
        "/adapter": "answer with the adapter again; /adapter NAME: with the one of this name",
        "/compare": "show the answers of base and adapters to the last message; /compare TEXT: to "
        "TEXT; each answer stays in its own history",
        "/image": "/image FILE: attach an image to the next message, if the adapter reads images",
        "/audio": "/audio FILE: attach audio",
        "/video": "/video FILE: attach a video",
        "/system": '/system TEXT: set the system prompt; /system: show it; /system "": remove it',
        "/reset": "clear the history",
        "/save": "/save FILE: append the conversation to FILE, as a training row",
        "/help": "show this list",
        "/quit": "quit, like Ctrl-D; Ctrl-C stops an answer",
        FENCE: "starts and ends a message of several lines; pasted lines are one message",
    }

    def __init__(
        self,
        source: Opened | AdapterBank,
        *,
        system: str | None = None,
        tools: ChatTools | None = None,
        **settings: object,
    ) -> None:
        """Start a conversation.

        Args:
            system: System prompt that replaces the one used in training; "" for none.
            tools: Functions that the model may call.
            settings: Fields of `peftkit.inference.sampling.Sampling`.

        Raises:
            DataError: The adapter or its chat template does not support system prompts.
            ConfigError: The chat template does not support tool calls.
        """
        self._tools = tools
        self.base, self.voices = source.base, voices_of(source)
        self._settings = settings
        self._histories: dict[str, list[Json]] = {name: [] for name in self.voices}
        reads_media = isinstance(source, Opened) and source.task.prompt_media
        self._media_task = media_task(source) if reads_media else None  # type: ignore[arg-type]
        self._media: list[Media] = []
        self.current = self._adapter = next(iter(self.voices))
        self.on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        single = [n for n, v in self.voices.items() if v.style.kind != "chat" and n != BASE]
        if single:
            names = "This adapter" if isinstance(source, Opened) else ", ".join(single)
            note(f"{names} was trained on single prompts: it sees your last message only.")
        if tools is not None:
            tools.style(self.voices[self.current].style)
        if system is not None:
            self.set_system(system)
        elif prompt := self.systems():
            note(f"System prompt, as in training: {prompt}")

    @property
    def history(self) -> list[Json]:
        """The messages of the current voice so far."""
        return self._histories[self.current]

    def systems(self) -> str:
        """Return the start of the system prompt, or of the prompt of each voice, as one line."""
        systems = {n: v.style.system for n, v in self.voices.items() if v.style.system}
        if len(set(systems.values())) == 1:
            return shortened(next(iter(systems.values())))
        return ", ".join(f"{name}: {shortened(system)}" for name, system in systems.items())

    def set_system(self, system: str) -> None:
        """Set the system prompt; "" for none.

        Raises:
            DataError: The current voice or its chat template does not support one.
        """
        changed = {}
        for name, voice in self.voices.items():
            if self._media_task is not None and voice.style.kind == "chat":
                changed[name] = replace(voice, style=replace(voice.style, system=system or None))
            elif voice.style.kind == "chat" or name == self.current:
                style = style_with_system(self.base.tokenizer, voice.style, system)
                changed[name] = replace(voice, style=style)
        self.voices |= changed

    def lines(self) -> Iterator[str]:
        """Yield the user's messages and commands until the end of input."""
        if self.on_terminal:
            edit_several_lines()
        while (line := self._line(f"{self.current}> ")) is not None:
            if not line.startswith(FENCE):
                yield line
                continue
            lines = [line.removeprefix(FENCE)]
            while not lines[-1].rstrip().endswith(FENCE):
                if (line := self._line("... ")) is None:
                    break
                lines.append(line)
            # the leading space marks a message, even if it starts with a slash
            yield " " + "\n".join(lines).rstrip().removesuffix(FENCE)

    def _line(self, prompt: str) -> str | None:
        """Return the next input (several lines if pasted); None at the end of input."""
        if not self.on_terminal:
            line = sys.stdin.readline()
            return line.removesuffix("\n") if line else None
        try:
            return input(prompt)
        except EOFError:
            note("")
            return None

    def take(self, line: str) -> bool:
        """Answer a message or run a command; return False to quit."""
        text = line.rstrip("\n")
        command, _, rest = text.strip().partition(" ")
        is_message = "\n" in text and command not in self.COMMANDS
        if not text.startswith("/") or is_message:  # a leading space escapes a slash
            if text.strip():
                self.answer(text.strip())
            return True
        if command == "/adapter":
            self._switch(rest.strip() or self._adapter)
        elif command == "/compare":
            self.compare(rest.strip())
        elif command == "/system":
            self._change_system(rest.strip())
        elif command == "/save":
            self.save(rest.strip())
        elif kind := next((kind for kind in KINDS if command == f"/{kind.name}"), None):
            self.show(kind, rest.strip())
        elif rest:
            note(
                f"{command} takes no text. To send a message with a leading /, type a space first."
            )
        elif command == "/base":
            self._switch(BASE)
        elif command == "/reset":
            for history in self._histories.values():
                history.clear()
            self._media.clear()
            note("The history is cleared.")
        elif command == "/help":
            for name, meaning in self.COMMANDS.items():
                note(textwrap.fill(f"{name:9} {meaning}", 79, subsequent_indent=" " * 10))
        elif command != "/quit":
            hint = did_you_mean(command, self.COMMANDS) or "/help lists the commands."
            note(f"There is no command {command}. {hint}")
        return command != "/quit" or bool(rest)

    def answer(self, text: str) -> None:
        """Stream the answer to a message; Ctrl-C stops it and keeps the partial answer.

        If the answer calls tools, the model continues with their replies.
        """
        messages = [*self.history, self._user_message(text)]
        for _ in range(MAX_TURNS):
            if (answer := self._stream_answer(self.current, messages)) is None:
                return
            self._histories[self.current] = messages = [*messages, answer.message]
            if self._tools is None or not answer.calls:
                return
            messages = [*messages, *self._tools.replies(answer.message, answer.calls)]
        note(f"The model has called tools {MAX_TURNS} times without an answer.")

    def compare(self, text: str) -> None:
        """Stream the answers of all voices to a message, by default the last one.

        A new message and its answers are added to the histories.
        """
        if not text and not self.history:
            note("There is nothing to compare yet. Give a message: /compare TEXT")
            return
        before = self.history[:-1]
        asked = (m for m in reversed(before) if m["role"] == "user")
        message = self._user_message(text) if text else next(asked)
        for name, history in self._histories.items():
            typer.echo(f"[{name}] ", nl=False)
            repeats = not text and name == self.current
            messages = before if repeats else [*history, message]
            reply = self._stream_answer(name, messages)
            if reply is None:
                return
            if text:
                self._histories[name] = [*messages, reply.message]

    def _change_system(self, text: str) -> None:
        if text:
            try:
                self.set_system("" if text == '""' else text)
            except DataError as error:
                note(str(error))
                return
        note(f"System prompt: {self.systems() or 'none'}")

    def save(self, name: str) -> None:
        """Append the conversation to a JSONL file, as a row of messages."""
        if not self.history or not name:
            note("There is no conversation yet." if name else "Give a file: /save FILE")
            return
        if any("media" in message for message in self.history):
            note("A conversation with images, audio or videos cannot be saved.")
            return
        style, path = self.voices[self.current].style, Path(name).expanduser()
        row: Json = {"messages": style.opened(self.history)}
        if self._tools is not None:
            row["tools"] = self._tools.schemas
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            note(f"Cannot write {path}: {error.strerror}.")
            return
        note(f"Saved {len(self.history)} messages as the last row of {path}.")

    def show(self, kind: type[Media], name: str) -> None:
        """Attach an image, audio or a video to the next message."""
        if self._media_task is None:
            note(f"This adapter was trained on text only; it cannot read {kind.kind}s.")
            return
        processor = self._media_task.encoder.media_processor
        medium = kind(Path(name).expanduser(), name)
        try:
            processor.check([medium], name)
            size = kind.describe(medium.read(processor.limits), processor.limits)
        except PeftkitError as error:
            note(str(error))
            return
        self._media.append(medium)
        note(f"Attached {name} ({size}) to the next message.")

    def _user_message(self, text: str) -> dict[str, object]:
        """Return the user's message with the attached media."""
        if not self._media:
            return {"role": "user", "content": text}
        media, self._media = tuple(self._media), []
        content = "".join(medium.mark for medium in media) + text
        return {"role": "user", "content": content, "media": media}

    def prompt(self, messages: Sequence[Json], style: Style) -> Any:
        """Return the token ids of a prompt; for a media task, all model inputs."""
        prompt: Any = list(messages) if style.kind == "chat" else messages[-1]["content"]
        if self._media_task is None:
            tools = self._tools.schemas if self._tools else ()
            return prompt_ids(self.base.tokenizer, prompt, style, tools)
        used = messages if style.kind == "chat" else messages[-1:]
        media = tuple(medium for message in used for medium in message.get("media", ()))
        if style.kind == "chat":
            prompt = [{k: v for k, v in message.items() if k != "media"} for message in messages]
        text = self._media_task.encoder.prompt(prompt, style)
        return self._media_task.generation_inputs(self.base.model, [MediaPrompt(text, media)])

    def _stops(self, style: Style) -> list[int]:
        if self._tools is not None:
            return self._tools.style(style).stops
        if self._media_task is None:
            return stop_ids(self.base.tokenizer, style)
        return self._media_task.encoder.stop_ids(style)

    def _switch(self, name: str) -> None:
        if name not in self.voices:
            adapters = [voice for voice in self.voices if voice != BASE]
            hint = did_you_mean(name, adapters) or f"The adapters are: {', '.join(adapters)}."
            note(f"There is no adapter {name}. {hint}")
            return
        self.current = name
        if name != BASE:
            self._adapter = name
        note(f"The {name} answers now." if name in (BASE, "adapter") else f"{name} answers now.")

    def _stream_answer(self, name: str, messages: Sequence[dict[str, object]]) -> _Answer | None:
        """Stream the answer of a voice and return it; None if the prompt was refused."""
        style, tokenizer, tools = self.voices[name].style, self.base.tokenizer, self._tools
        pieces: list[AnswerPiece] = []
        is_complete = False
        try:
            with self.voices[name].using():
                prompt, stops = self.prompt(messages, style), self._stops(style)
                reader = tools.reader(style, prompt) if tools else None
                for piece in stream(
                    self.base.model,
                    tokenizer,
                    prompt,
                    special=tools is not None,
                    stops=stops,
                    **self._settings,
                ):
                    pieces += _echoed(reader.feed(piece) if reader else [AnswerPiece(piece)])
                if reader is not None:
                    pieces += _echoed(reader.feed("", over=True))
            is_complete = True
        except KeyboardInterrupt:
            pass
        except PeftkitError as error:
            if not self.on_terminal:
                raise
            note(f"{error}\n  /reset clears the history, which makes room.")
            return None
        typer.echo()
        text = "".join(piece.text for piece in pieces)
        if tools is None:
            return _Answer({"role": "assistant", "content": text}, [])
        # a stopped answer must not call tools
        calls = [call for piece in pieces for call in piece.calls] if is_complete else []
        thought = "".join(piece.thought for piece in pieces)
        return _Answer(tools.message(style, text, thought, calls), calls)


class _Answer(NamedTuple):
    """An answer as a message for the chat template, and its tool calls."""

    message: Json
    calls: list[Call]


def _echoed(pieces: Iterable[AnswerPiece]) -> Iterator[AnswerPiece]:
    """Print and yield the pieces of an answer, including the reasoning."""
    for piece in pieces:
        typer.echo(piece.thought + piece.text, nl=False)
        yield piece


def edit_several_lines() -> None:
    """Enable multi-line `input`: pasted lines are one text, and Alt-Enter inserts a line break.

    Python's readline disables bracketed paste. libedit (macOS) supports neither.
    """
    with suppress(ImportError):  # no readline on Windows
        import readline

        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")
            readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')
