"""Command lines of the guide and of launch files, parsed by the command line itself."""

import shlex
from functools import cache
from typing import Any

import typer.main

from peftkit_cli.app import app

ROOT_OPTIONS = {"--debug": 0, "--log-format": 1}
"""Options before the command, and the number of their values."""


@cache
def root() -> Any:
    return typer.main.get_command(app)


def refused(arguments: str) -> str:
    """Parse a command line without running it; return what is wrong with it."""
    command, words = root(), shlex.split(arguments)
    while words and words[0] in ROOT_OPTIONS:
        words = words[1 + ROOT_OPTIONS[words[0]] :]
    if words in (["--help"], ["--version"], ["--install-completion"]):
        return ""
    while hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            return f"there is no command {' '.join(words[:1])!r}"
        command, words = command.commands[words[0]], words[1:]
    if words in ([], ["--help"]):  # a sentence names the command alone
        return ""
    try:
        command.make_context(command.name, words)
    except Exception as problem:  # typer's usage errors, wherever typer keeps their class
        told = getattr(problem, "format_message", None)
        return str(told()) if told else repr(problem)
    return ""
