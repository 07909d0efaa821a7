"""The command line: its commands, and the exit codes of errors.

Exit codes: 0 success; 2 wrong input; 1 failure; 130 SIGINT; 143 SIGTERM.
Data goes to stdout, everything else to stderr. Commands import torch only when they need it, so
`--help` and a misspelt path return immediately.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Annotated, Any, Literal, NoReturn

import typer
import typer.core

from peftkit.errors import PeftkitError, is_silent
from peftkit.events import LOG_FORMAT, logs_json
from peftkit_cli import (
    about,
    data,
    distill,
    exchange,
    import_recipe,
    init,
    inspect,
    merge,
    plan,
    prove,
    runs,
    serving,
    talk,
    train,
)
from peftkit_cli.arguments import ResumeCommand, with_help, wrapped, write_error


class CommandsByPurpose(typer.core.TyperGroup):
    """Lists the commands under headings, as plain text: rich would double the time of `--help`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section of names and short help texts for each heading."""
        panels: dict[str, list[tuple[str, str]]] = {}
        room = formatter.width - 6 - max(len(name) for name in self.commands)
        command: Any
        for name, command in self.commands.items():
            short = command.get_short_help_str(room)
            panels.setdefault(command.rich_help_panel, []).append((name, short))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


app = typer.Typer(
    name="peftkit",
    cls=CommandsByPurpose,
    help="Parameter-efficient fine-tuning of transformers.",
    epilog="Start with `peftkit quickstart`, or with your own data: `peftkit init`.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
LogFormat = Literal["text", "json"]
TRAIN, USE, INSPECT = "Train", "Use", "Inspect"
app.command(rich_help_panel=TRAIN)(with_help(about.quickstart))
app.command(rich_help_panel=TRAIN)(with_help(init.init))
app.command("import-recipe", rich_help_panel=TRAIN)(with_help(import_recipe.import_recipe))
app.command(cls=ResumeCommand, rich_help_panel=TRAIN)(with_help(train.train))
app.command(rich_help_panel=TRAIN)(with_help(train.check))
app.command(rich_help_panel=TRAIN)(with_help(distill.distill))
app.command(rich_help_panel=TRAIN)(with_help(runs.sweep))
app.command(rich_help_panel=TRAIN)(with_help(plan.plan))
app.command(rich_help_panel=USE)(with_help(talk.generate))
app.command(rich_help_panel=USE)(with_help(talk.chat))
app.command(rich_help_panel=USE)(with_help(talk.predict))
app.command("eval", rich_help_panel=USE)(with_help(talk.evaluate))
app.command(rich_help_panel=USE)(with_help(serving.serve))
app.command(rich_help_panel=USE)(with_help(merge.merge))
app.command(rich_help_panel=USE)(with_help(merge.combine))
app.command(rich_help_panel=USE)(with_help(exchange.export))
app.command("import", rich_help_panel=USE)(with_help(exchange.import_))
app.command(rich_help_panel=USE)(with_help(prove.prove))
app.command(rich_help_panel=USE)(with_help(exchange.push))
app.command(rich_help_panel=USE)(with_help(exchange.pull))
app.command("inspect", rich_help_panel=INSPECT)(with_help(inspect.inspect))
app.command(rich_help_panel=INSPECT)(with_help(data.data))
app.command(rich_help_panel=INSPECT)(with_help(runs.report))
app.command(rich_help_panel=INSPECT)(with_help(runs.runs))
app.command(rich_help_panel=INSPECT)(with_help(serving.studio))
app.add_typer(about.base, name="base", rich_help_panel=INSPECT)
app.add_typer(about.recipes, name="recipes", rich_help_panel=INSPECT)
app.command(rich_help_panel=INSPECT)(with_help(about.env))
app.command(rich_help_panel=INSPECT)(with_help(about.schema))


def _print_version(is_set: bool) -> None:
    if is_set:
        from importlib.metadata import version

        typer.echo(f"peftkit {version('peftkit')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="PEFTKIT_DEBUG", help="Show tracebacks and warnings.")
    ] = False,
    log_format: Annotated[
        LogFormat,
        typer.Option(
            "--log-format",
            envvar=LOG_FORMAT,
            metavar="text|json",
            help="json: each message and event on stderr is one line of JSON.",
        ),
    ] = "text",
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Parameter-efficient fine-tuning of transformers."""
    if log_format == "json":
        os.environ[LOG_FORMAT] = "json"
    if debug:
        os.environ["PEFTKIT_DEBUG"] = "1"
    else:
        quiet_libraries()
    if context.invoked_subcommand is None:
        with redirect_stdout(sys.stderr):
            typer.echo(context.get_help())
        raise typer.Exit(2)


def quiet_libraries() -> None:
    """Silence the libraries; peftkit reports through events."""
    warnings.simplefilter("ignore")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for stream in (sys.stdout, sys.stderr):  # the encoding of a pipe on Windows may lack characters
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    code = run(argv)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _abandon_stdout()
    sys.exit(code)


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command, print an error as one message on stderr, and return the exit code."""
    try:
        # Standalone mode would print usage errors in a box of 80 columns.
        code = app(args=argv, prog_name="peftkit", standalone_mode=False)
    except PeftkitError as error:
        if not is_silent(error):
            _print_error(type(error).__name__, str(error), error)
        return error.exit_code
    except BrokenPipeError:
        _abandon_stdout()
        return 1
    except (KeyboardInterrupt, typer.Abort):
        code = 128 + signal.SIGINT
    except Exception as error:
        return _exit_code_of(error)
    if code == 128 + signal.SIGINT:  # also typer's exit code for Ctrl-C
        _print_error("Interrupted", "the command was stopped.")
    return code if isinstance(code, int) else 0


def _exit_code_of(error: Exception) -> int:
    """Print any error but a PeftkitError, and return its exit code."""
    if is_silent(error):
        return int(getattr(error, "exit_code", 1))
    if hasattr(
        error, "format_message"
    ):  # a usage error of typer, whose class moves between versions
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "peftkit"
        if error.format_message().startswith("Usage:"):  # help of a group without a command
            typer.echo(error.format_message(), err=True)
            return 2
        _print_error("UsageError", f"{error.format_message()}\n  See: {command} --help")
        return 2
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        # any look at such a path fails, in any command
        name = os.path.basename(str(error.filename))
        _print_error("ConfigError", f"the name '{name[:40]}...' is too long for this file system.")
        return 2
    if isinstance(code := getattr(error, "exit_code", None), int):  # stopped by a signal
        _print_error(type(error).__name__, str(error))
        return code
    _print_error(type(error).__name__, f"{error}\n  {_save_traceback(error)}")
    return 1


def _save_traceback(error: Exception) -> str:
    """Print the traceback with --debug, else save it to a file; return a hint for the user."""
    text = "".join(traceback.format_exception(error))
    if os.environ.get("PEFTKIT_DEBUG"):
        typer.echo(text, err=True)
        return "The traceback is above."
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="peftkit-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
    except OSError:
        return "To see the traceback, set PEFTKIT_DEBUG=1."
    return (
        "Unexpected error, probably a bug in peftkit or one of its libraries.\n"
        f"  Full traceback: {file.name}\n  For a bug report, add the output of: peftkit env"
    )


def _print_error(name: str, text: str, error: Exception | None = None) -> None:
    if logs_json():
        write_error(name, error, text)
        return
    rank = os.environ.get("RANK", "0")
    prefix = "" if rank == "0" else f"[rank {rank}] "
    styled = typer.style(name, fg="red", bold=True)
    lines = wrapped(f"{prefix}{name}: {text}", sys.stderr)
    typer.echo(lines.replace(name, styled, 1), err=True)


def _abandon_stdout() -> None:
    """Redirect stdout to devnull after its reader has closed; else Python complains at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
