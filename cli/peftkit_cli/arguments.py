"""Arguments that several commands share, and their messages on stderr."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import IO, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
import typer.core

from peftkit.events import Event, as_line, event_line, logs_json

Adapter = Annotated[
    str,
    typer.Argument(metavar="ADAPTER", help="Adapter folder, or USER/NAME[@REVISION] on the hub."),
]
Base = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Base model to use instead of the recorded one: hub id, folder, .gguf file or "
        "short name.",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Use the adapter even if it was trained on another base.")
]
System = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help='System prompt, instead of the one used in training; "" for none.'
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show notices and errors only.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a recipe field: train.learning_rate=1e-4. Repeatable.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")]
ResumeOrAuto = Annotated[
    Literal["no", "yes", "auto"],
    typer.Option(
        "--resume",
        metavar="[auto]",
        show_default=False,
        help="Continue the run in the output folder; auto: start, continue, or do nothing if it "
        "is finished.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the run in the output folder.")
]
OutFolder = Annotated[Path, typer.Option(metavar="DIR", help="New folder for the adapter.")]
Replace = Annotated[bool, typer.Option("--force", help="Replace an adapter in the output folder.")]


class ResumeCommand(typer.core.TyperCommand):
    """A command whose option `--resume` takes `auto` as an optional value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give `--resume` a value: `auto` if it is the next argument, otherwise `yes`."""
        rest = [*args, ""]
        joined = [
            arg if arg != "--resume" else f"--resume={'auto' if rest[n + 1] == 'auto' else 'yes'}"
            for n, arg in enumerate(args)
            if not (arg == "auto" and n and args[n - 1] == "--resume")
        ]
        return super().parse_args(ctx, joined)


_ENTRY = re.compile(r"(\w+)(?: \((\S+)\))?: (.+)", re.DOTALL)


def with_help(command: Callable[..., None]) -> Callable[..., None]:
    """Move the section Args of a command's docstring into typer's description of its parameters.

    An entry is "name (METAVAR): help". A parameter without a default is an argument and one with a
    default an option, unless its annotation says otherwise; a bool is a flag without a negation.
    """
    text, _, entries = inspect.cleandoc(command.__doc__ or "").partition("\n\nArgs:\n    ")
    hints = get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters
    for entry in filter(None, re.split(r"\n    (?! )", entries)):
        match = _ENTRY.fullmatch(entry)
        assert match, f"{command.__name__}: {entry}"
        name, metavar, explanation = match.groups()
        hint = hints[name]
        if get_origin(hint) is Annotated:
            hint, described = get_args(hint)
        elif parameters[name].default is inspect.Parameter.empty:
            described = typer.Argument()
        else:
            flags = [f"--{name.replace('_', '-')}"] if hint is bool else []
            described = typer.Option(*flags)
        described.metavar, described.help = metavar, " ".join(explanation.split())
        command.__annotations__[name] = Annotated[hint, described]
    command.__doc__ = text
    return command


def note(text: str) -> None:
    """Print a line to stderr; stdout is for data."""
    if logs_json():
        _write(as_line("Note", {"text": text}))
    else:
        typer.echo(wrapped(text, sys.stderr), err=True)


def wrapped(text: str, stream: IO[str]) -> str:
    """Return `fit` for the width of a terminal; the lines of a file do not wrap, for searches."""
    return fit(text, get_terminal_size().columns) if stream.isatty() else text


def fit(text: str, width: int) -> str:
    """Wrap the lines of a text between words, with their indentation."""
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()))
        options: Any = {"break_long_words": False, "break_on_hyphens": False}
        lines.append(
            fill(line, max(width, 40), subsequent_indent=indent, **options) if line else ""
        )
    return "\n".join(lines)


def _write(line: str) -> None:
    """Write a line of `--log-format json`, or nothing if the reader of stderr has gone."""
    with suppress(OSError):
        sys.stderr.write(line)
        sys.stderr.flush()


def write_event(event: Event) -> None:
    """Write an event of `peftkit.events`, as one line of JSON."""
    _write(event_line(event))


def write_error(kind: str, error: Exception | None, text: str) -> None:
    """Write an error as the event Error: its class, and of peftkit's errors the three parts."""
    parts = {name: getattr(error, name, "") for name in ("problem", "found", "fix")}
    fields = parts if parts["problem"] else {"problem": text, "found": "", "fix": ""}
    _write(as_line("Error", {"kind": kind, "rank": int(os.environ.get("RANK", "0")), **fields}))
