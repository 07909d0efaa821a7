"""`peftkit generate`, `peftkit chat` and `peftkit eval`: use an adapter on its base."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peftkit.errors import DataError, PeftkitError, did_you_mean
from peftkit_cli.arguments import Adapter, Base, Force, Json, adapter_folder

if TYPE_CHECKING:
    from peftkit.formats.folder import Opened

MaxNewTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Length of an answer at most.")]
Temperature = Annotated[
    float,
    typer.Option(metavar="X", min=0.0, help="0: the likeliest token always; above: sample."),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Seed of the sampling.")]


def generate(
    adapter: Adapter,
    prompt: Annotated[
        str, typer.Option(metavar="TEXT", help="What to complete; - reads it from stdin.")
    ],
    base: Base = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    force: Force = False,
) -> None:
    """Complete a prompt. Prints the completion and nothing else."""
    text = sys.stdin.read().rstrip("\n") if prompt == "-" else prompt
    if not text:
        raise DataError("the prompt is empty.", fix="Give at least one word with --prompt.")
    opened = _open(adapter, base, force)
    from peftkit.generate import generate as complete

    (answer,) = complete(
        opened.base.model,
        opened.base.tokenizer,
        [text],
        style=opened.file.provenance.prompt_style,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    )
    typer.echo(answer)


def evaluate(
    adapter: Adapter,
    data: Annotated[
        Path, typer.Option(metavar="FILE", help="Rows in any format that training takes.")
    ],
    base: Base = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Measure loss, perplexity and the exact match of completions on a data file."""
    if not data.exists():
        raise DataError(f"there is no data file '{data}'.", fix="Give a file that exists.")
    opened = _open(adapter, base, force)
    from peftkit.evaluate import evaluate as measure
    from peftkit_cli.render import Renderer, number

    with Renderer(transient=True) as on_event:
        metrics = measure(opened, data, on_event=on_event)
    if as_json:
        typer.echo(json.dumps(dict(metrics)))
        return
    width = max(len(name) for name in metrics)
    for name, value in metrics.items():
        typer.echo(f"{name:{width}}  {number(value)}")


def chat(
    adapter: Adapter,
    base: Base = None,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    force: Force = False,
) -> None:
    """Talk with an adapter; switch to the bare base and back with /base and /adapter."""
    opened = _open(adapter, base, force)
    talk = Chat(opened, max_new_tokens, temperature, seed)
    if talk.on_terminal:
        typer.echo(f"{Path(adapter).name} on {opened.base.name}. /help lists the commands.", err=True)
    for line in talk.lines():
        if not talk.take(line):
            break


class Chat:
    """A conversation with a base whose adapter can be switched off and on.

    Attributes:
        history: The messages so far, both sides; the switch does not touch them.
        uses_adapter: Whether the adapter takes part in the next answer.
    """

    COMMANDS = {
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
        self.on_terminal = sys.stdin.isatty()

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
                typer.echo(err=True)
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
            typer.echo("The adapter answers." if self.uses_adapter else "The base answers.", err=True)
        elif command == "/reset":
            self.history.clear()
            typer.echo("The conversation is forgotten.", err=True)
        elif command == "/help":
            for name, meaning in self.COMMANDS.items():
                typer.echo(f"{name:9} {meaning}", err=True)
        elif command != "/quit":
            hint = did_you_mean(command, self.COMMANDS) or "/help lists them."
            typer.echo(f"There is no command {command}. {hint}", err=True)
        return command != "/quit"

    def answer(self, text: str) -> None:
        """Stream the answer to a message; Ctrl-C keeps what has come so far."""
        from peftkit.generate import stream

        self.history.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            with nullcontext() if self.uses_adapter else self.opened.adapter.disabled():
                for piece in stream(
                    self.opened.base.model,
                    self.opened.base.tokenizer,
                    self._prompt_ids(),
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
            typer.echo(f"{error}\n  /reset forgets the conversation and makes room.", err=True)
            return
        typer.echo()
        self.history.append({"role": "assistant", "content": "".join(pieces)})
