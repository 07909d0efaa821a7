"""The command line: its commands, and how errors become exit codes.

Exit codes: 0 done; 2 the user's input is wrong; 1 something broke; 130 SIGINT; 143 SIGTERM.
Data goes to stdout, everything else to stderr. Torch is imported inside the commands that need it,
so that `--help` and a misspelt path are answered at once.
"""

from __future__ import annotations

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
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from peftkit.errors import PeftkitError, is_silent
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
    runs,
    serving,
    talk,
    train,
)


class CommandsByPurpose(typer.core.TyperGroup):
    """Lists the commands under the headings they were registered with, as plain text.

    Rich help would cost as much time again as all the rest of `--help`.
    """

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section of names and short helps for each heading."""
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
    epilog="Start with: peftkit quickstart; or your own rows: peftkit init",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
TRAIN, TALK, LOOK = "Train", "Talk and merge", "Look"
app.command(rich_help_panel=TRAIN)(about.quickstart)
app.command(rich_help_panel=TRAIN)(init.init)
app.command("import-recipe", rich_help_panel=TRAIN)(import_recipe.import_recipe)
app.command(rich_help_panel=TRAIN)(train.train)
app.command(rich_help_panel=TRAIN)(train.check)
app.command(rich_help_panel=TRAIN)(distill.distill)
app.command(rich_help_panel=TRAIN)(runs.sweep)
app.command(rich_help_panel=TRAIN)(plan.plan)
app.command(rich_help_panel=TALK)(talk.generate)
app.command(rich_help_panel=TALK)(talk.chat)
app.command(rich_help_panel=TALK)(talk.predict)
app.command("eval", rich_help_panel=TALK)(talk.evaluate)
app.command(rich_help_panel=TALK)(serving.serve)
app.command(rich_help_panel=TALK)(merge.merge)
app.command(rich_help_panel=TALK)(merge.combine)
app.command(rich_help_panel=TALK)(exchange.export)
app.command("import", rich_help_panel=TALK)(exchange.import_)
app.command(rich_help_panel=TALK)(exchange.push)
app.command(rich_help_panel=TALK)(exchange.pull)
app.command("inspect", rich_help_panel=LOOK)(inspect.inspect)
app.command(rich_help_panel=LOOK)(data.data)
app.command(rich_help_panel=LOOK)(runs.report)
app.command(rich_help_panel=LOOK)(runs.runs)
app.add_typer(about.base, name="base", rich_help_panel=LOOK)
app.add_typer(about.recipes, name="recipes", rich_help_panel=LOOK)
app.command(rich_help_panel=LOOK)(about.env)
app.command(rich_help_panel=LOOK)(about.schema)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"peftkit {version('peftkit')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    debug: Annotated[
        bool,
        typer.Option("--debug", envvar="PEFTKIT_DEBUG", help="Show tracebacks and warnings."),
    ] = False,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Parameter-efficient fine-tuning of transformers."""
    if debug:
        os.environ["PEFTKIT_DEBUG"] = "1"
    else:
        quiet_libraries()
    if context.invoked_subcommand is None:
        with redirect_stdout(sys.stderr):
            typer.echo(context.get_help())
        raise typer.Exit(2)


def quiet_libraries() -> None:
    """Silence the libraries; what a user should know comes as a peftkit event."""
    warnings.simplefilter("ignore")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for stream in (sys.stdout, sys.stderr):  # a pipe on Windows may know 250 characters only
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    code = run(argv)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _abandon_stdout()
    sys.exit(code)


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; every error becomes one message on stderr."""
    try:
        # Not standalone: typer would wrap a usage error into a box, cut at 80 columns.
        code = app(args=argv, prog_name="peftkit", standalone_mode=False)
    except PeftkitError as error:
        if not is_silent(error):
            _say(type(error).__name__, str(error))
        return error.exit_code
    except BrokenPipeError:
        _abandon_stdout()
        return 1
    except (KeyboardInterrupt, typer.Abort):
        code = 128 + signal.SIGINT
    except Exception as error:
        return _end_of(error)
    if code == 128 + signal.SIGINT:  # typer's own answer to Ctrl-C too
        _say("Interrupted", "the command stopped where it was.")
    return code if isinstance(code, int) else 0


def _end_of(error: Exception) -> int:
    """Return the exit code of an error that is not the user's, or that typer raised."""
    if is_silent(error):
        return int(getattr(error, "exit_code", 1))
    if hasattr(error, "format_message"):  # typer's usage errors, wherever typer keeps their class
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "peftkit"
        if error.format_message().startswith("Usage:"):  # a group without a command: its help
            typer.echo(error.format_message(), err=True)
            return 2
        _say("UsageError", f"{error.format_message()}\n  See: {command} --help")
        return 2
    if isinstance(code := getattr(error, "exit_code", None), int):  # stopped by a signal
        _say(type(error).__name__, str(error))
        return code
    _say(type(error).__name__, f"{error}\n  {_keep_traceback(error)}")
    return 1


def _keep_traceback(error: Exception) -> str:
    """Show the traceback under --debug, else write it to a file; return where it is."""
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
        "This is not a mistake of yours that peftkit knows. "
        f"The traceback is in {file.name}\n  For a bug report, add the output of: peftkit env"
    )


def _say(name: str, text: str) -> None:
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f"[rank {rank}] "
    typer.echo(f"{where}{typer.style(name, fg='red', bold=True)}: {text}", err=True)


def _abandon_stdout() -> None:
    """Point stdout at nothing: its reader has gone, and Python would complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
