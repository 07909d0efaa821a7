"""Show the events of a run: live on a terminal, else as lines."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import IO, Any, cast

from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Column
from rich.table import Table as Grid
from rich.text import Text

from peftkit import events
from peftkit.events import Event, Listener, logs_json
from peftkit.figures import count, duration, loss_name, metric, metric_name, size
from peftkit_cli.arguments import fit, write_event

STEP_METRICS = ("accuracy", "margin", "reward", "entropy")  # metrics.jsonl has all
PLAIN_LINES = 40  # approximate number of step lines in a log
PLAIN_SECONDS = 60.0  # maximum time between two step lines
FIGURE = re.compile(r"[-+]?[\d.,:]+(e-?\d+)?( [A-Za-z]{1,4})?")
"""A cell that must not wrap: 1,024, 212.3 MB, 3:07."""
PROGRESS_SECONDS = 5.0  # minimum time between two progress lines


class Renderer:
    """Shows events on stderr; a context manager that stops the live display on exit.

    Args:
        tables: Console for tables, if they are the output of the command.
        transient: Remove finished stages from the terminal.
        brief: Show the one-line summary of a table, if it has one.
        quiet: Show notices only.
    """

    def __init__(
        self,
        *,
        tables: Console | None = None,
        transient: bool = False,
        brief: bool = False,
        quiet: bool = False,
    ) -> None:
        console = Console(file=cast("IO[str]", Unfailing(sys.stderr)), highlight=False)
        self._live: LiveScreen | None = None
        if os.environ.get("RANK", "0") != "0":  # under `accelerate launch`, rank 0 draws
            self._listener: Listener = events.ignore
        elif logs_json():
            self._listener = json_listener(tables, quiet=quiet)
        elif quiet or not console.is_terminal or console.is_dumb_terminal:
            screen = PlainScreen(console, tables or console, brief=brief, quiet=quiet)
            self._listener = screen.on_event
        else:
            if tables is None or tables.is_terminal:
                tables = console  # the console that redraws the terminal must print all
            self._live = LiveScreen(console, tables, transient=transient, brief=brief)
            self._listener = self._live.on_event

    def __enter__(self) -> Listener:
        if self._live is not None:
            self._live.start()
        return self._listener

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.finish(failed=error[0] is not None)


def json_listener(tables: Console | None, *, quiet: bool) -> Listener:
    """Return a listener that writes events as JSON; tables that are output stay tables."""

    def on_event(event: Event) -> None:
        if tables is not None and isinstance(event, events.Table):
            show_table(tables, event)
        elif not quiet or isinstance(event, events.Notice):
            write_event(event)

    return on_event


class Unfailing:
    """A stream that discards its output if its reader has closed or its disk is full.

    A run therefore survives a closed terminal or a full log disk.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or discard after a failure."""
        try:
            return self._stream.write(text)
        except OSError:
            self._abandon()
            return len(text)

    def flush(self) -> None:
        """Flush, or do nothing after a failure."""
        try:
            self._stream.flush()
        except OSError:
            self._abandon()

    def _abandon(self) -> None:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self._stream.flush()


class PlainScreen:
    """One line per event, for log files and pipes; about `PLAIN_LINES` lines of steps."""

    def __init__(
        self,
        console: Console,
        tables: Console,
        clock: Callable[[], float] = time.monotonic,
        *,
        brief: bool = False,
        quiet: bool = False,
    ) -> None:
        self.console, self.tables, self.clock = console, tables, clock
        self.brief, self.quiet = brief, quiet
        self._last_line = clock()
        self._last_tenth = ("", 0)

    def on_event(self, event: Event) -> None:
        """Print an event; skip most steps and progress events."""
        if self.quiet and not isinstance(event, events.Notice):
            return
        if isinstance(event, events.Table):
            show_table(self.tables, event, brief=self.brief)
        elif isinstance(event, events.Progress):
            tenth = (event.text, 10 * event.done // max(event.total, 1))
            if tenth != self._last_tenth and self._waited(PROGRESS_SECONDS):
                self._last_tenth = tenth
                self._line(f"{event.text} {how_far(event)}")
        elif isinstance(event, events.StepDone):
            if self._is_due(event):
                self._line("  ".join([f"step {event.step}/{event.num_steps}", *step_parts(event)]))
        elif (text := describe(event)) is not None:
            self._line(text)

    def _is_due(self, event: events.StepDone) -> bool:
        every = max(1, round(event.num_steps / PLAIN_LINES))
        is_end = event.step in (1, event.num_steps)
        return is_end or event.step % every == 0 or self._waited(PLAIN_SECONDS)

    def _waited(self, seconds: float) -> bool:
        return self.clock() - self._last_line >= seconds

    def _line(self, text: str) -> None:
        self._last_line = self.clock()
        # Unwrapped, for searches in logs.
        self.console.print(text, markup=False, soft_wrap=True)


class LiveScreen(Progress):
    """Redraws the current operation in place; finished operations are printed above."""

    def __init__(
        self, console: Console, tables: Console, *, transient: bool, brief: bool = False
    ) -> None:
        self.tables, self.transient, self.brief = tables, transient, brief
        self._stage: tuple[str, float] | None = None
        self._work: TaskID | None = None
        self._training: TaskID | None = None
        self._step: events.StepDone | None = None
        super().__init__(
            SpinnerColumn(style="cyan"),
            TextColumn("{task.description}", markup=False, table_column=Column()),  # wraps
            BarColumn(),
            TextColumn("{task.fields[how_far]}"),
            console=console,
            transient=transient,
            refresh_per_second=8,
        )

    def start(self) -> None:
        """Start redrawing; a command imports its libraries, for seconds, before the first event."""
        if "torch" not in sys.modules:
            self._work = self.add_task("Loading PyTorch and transformers", total=None, how_far="")
        super().start()

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the figures of the last step, and the progress bars."""
        if self._step is not None:
            yield Text("  ".join(step_parts(self._step)[:-1]))
        yield self.make_tasks_table(self.tasks)

    def on_event(self, event: Event) -> None:
        """Show an event."""
        with self.live._lock:  # else rich's thread may redraw, and move the cursor, within a print
            self._show(event)

    def _show(self, event: Event) -> None:
        if isinstance(event, events.StepDone):
            self._end_stage()
            self._step = event
            step = events.Progress("step", event.step, event.num_steps)
            self._training = self._bar(self._training, step, step_parts(event)[-1])
        elif isinstance(event, events.Progress):
            self._work = self._bar(self._work, event)
        elif isinstance(event, events.Notice):
            self.console.print(_styled(event, f"note: {event.text}"))
        else:
            self._end_stage()
            if isinstance(event, events.Stage):
                self._stage = (event.text, time.monotonic())
                self._work = self.add_task(event.text, total=None, how_far="")
            elif isinstance(event, events.Table):
                show_table(self.tables, event, brief=self.brief)
            elif (text := describe(event)) is not None:
                self.console.print(_styled(event, fit(text, self.console.width)))

    def finish(self, *, failed: bool = False) -> None:
        """Stop redrawing."""
        if failed:  # a failed stage has no check mark
            self._stage = None
        self._end_stage()
        self.stop()

    def _bar(self, task: TaskID | None, event: events.Progress, left: str = "") -> TaskID:
        """Update a progress bar (a new one for None), and return it."""
        far = "  ".join(filter(None, (how_far(event), left)))
        fields: Any = {"completed": event.done, "total": max(event.total, 1), "how_far": far}
        if task is None:
            return self.add_task(event.text, **fields)
        self.update(task, description=event.text, **fields)
        return task

    def _end_stage(self) -> None:
        if self._work is not None:
            self.remove_task(self._work)
            self._work = None
        if self._stage is not None and not self.transient:
            text, began = self._stage
            took = f" {time.monotonic() - began:.1f} s"
            done = ("✓ ", "green"), text.rstrip(". "), (took, "dim")
            self.console.print(Text.assemble(*done))
        self._stage = None


def print_table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table as a command's output."""
    show_table(Console(highlight=False), events.Table(title, columns, tuple(rows)))


def show_table(console: Console, table: events.Table, *, brief: bool = False) -> None:
    """Print a table; outside a terminal, as wide as its text, or as COLUMNS if that is set.

    Args:
        brief: Print its summary instead, if it has one.
    """
    if brief and table.summary:
        console.print(Text(table.summary), soft_wrap=True)
    else:
        _show_grid(console, table)


def _show_grid(console: Console, table: events.Table) -> None:
    if table.title:  # separate: rich wraps titles to the width of the grid
        console.print(Text(table.title, style="bold"), soft_wrap=not console.is_terminal)
    grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, show_header=any(table.columns))
    for number, column in enumerate(table.columns):
        figures = [row[number] for row in table.rows if FIGURE.fullmatch(row[number])]
        width = max(map(len, figures), default=None)
        grid.add_column(Text(column), overflow="fold", min_width=width)
    for row in table.rows:
        grid.add_row(*(Text(cell) for cell in row))
    if console.is_terminal:
        console.print(grid, Text())
        return
    # Lines in a file do not wrap, for searches, unless COLUMNS requests it.
    limit = os.environ.get("COLUMNS", "")
    limits = console.options.update(width=int(limit) if limit.isdecimal() else 10_000)
    width = console.measure(grid, options=limits).maximum
    page = io.StringIO()
    Console(file=page, width=width).print(grid)
    lines = (line.rstrip() for line in page.getvalue().splitlines())
    console.print("\n".join(lines), markup=False, soft_wrap=True, end="\n\n")


def describe(event: Event) -> str | None:
    """Return the text of an event; None for events without text."""
    match event:
        case events.Stage(text):
            return text
        case events.Notice(text):
            return f"note: {text}"
        case events.RunStarted():
            share = 100 * event.num_trainable / max(event.num_parameters, 1)
            start = f", from step {event.start_step}" if event.start_step else ""
            return (
                f"Training {count(event.num_trainable)} parameters ({share:.2f} % of the base's "
                f"{count(event.num_parameters)}) on {event.device}: {event.num_rows:,} rows, "
                f"{event.num_steps:,} steps{start}"
                + (f"\n  plan: {event.plan}" if event.plan else "")
                + (f"\n  computed by: {event.paths}" if event.paths else "")
            )
        case events.EvalDone(step, metrics, best):
            return f"eval at step {step}: {eval_lines(metrics, ' (best so far)' * best)}"
        case events.Sampled(step, samples):
            return "\n".join([f"samples at step {step}:", *map(_sample_line, samples)])
        case events.Saved(kind, path):
            return f"saved {kind}: {path}"
        case events.RunDone(step, seconds, metrics):
            means = loss_name(step).removeprefix("loss")
            of_eval = {n.replace("eval_", ""): v for n, v in metrics.items() if "eval_" in n}
            of_steps = ((n, metrics_line({n: v})) for n, v in metrics.items() if "eval_" not in n)
            figures = ", ".join(text + means * (name == "loss") for name, text in of_steps)
            took = f"Done: {step:,} steps in {duration(seconds)}{'; ' * bool(figures)}{figures}"
            return f"{took}\n  eval: {eval_lines(of_eval)}" if of_eval else took
    return None


def _sample_line(sample: events.Sample) -> str:
    """Return a sample as one line: the end of the prompt and the start of the answer."""
    prompt, answer = " ".join(sample.prompt.split()), " ".join(sample.completion.split())
    prompt = prompt if len(prompt) <= 48 else f"...{prompt[-45:]}"
    answer = answer if len(answer) <= 96 else f"{answer[:93]}..."
    return f"  {prompt} -> {answer}"


def step_parts(step: events.StepDone) -> list[str]:
    """Return the figures of one step, each as a short string."""
    parts = [
        f"loss {step.loss:.4f}",
        *(f"{name} {step.figures[name]:.3f}" for name in STEP_METRICS if name in step.figures),
        f"lr {step.learning_rate:.2e}",
        f"grad {step.grad_norm:.2f}",
        f"epoch {step.epoch:.2f}",
        f"{step.tokens_per_second:,.0f} tokens/s",
    ]
    if step.peak_bytes > 0:
        parts.append(f"peak {size(step.peak_bytes)}")
    return [*parts, f"{duration(step.seconds_left)} left"]


def metrics_line(metrics: Mapping[str, float]) -> str:
    """Return metrics as one line."""
    return ", ".join(
        f"{metric_name(name)} {metric(name, value)}" for name, value in metrics.items()
    )


def eval_lines(metrics: Mapping[str, float], remark: str = "") -> str:
    """Return an evaluation's metrics as one line, and what train.drift measured as a second."""
    drift = {name: value for name, value in metrics.items() if name.startswith("drift")}
    line = metrics_line({n: v for n, v in metrics.items() if n not in drift}) + remark
    if not drift:
        return line
    parts = [f"{drift['drift']:.4g} nats a token"]
    if "drift_same" in drift:
        parts.append(f"95 % of tokens below {drift['drift_95']:.4g}")
        parts.append(f"{100 * drift['drift_same']:.1f} % unchanged")
    return f"{line}\n  drift on unrelated prompts: {'; '.join(parts)}"


def how_far(event: events.Progress) -> str:
    """Return the progress as text: 3/14, 1.2 GB/4.5 GB."""
    text = size if event.unit == "B" else "{:,}".format
    return f"{text(event.done)}/{text(event.total)}"


def _styled(event: Event, text: str) -> Text:
    style = {events.Notice: "yellow", events.RunStarted: "bold", events.RunDone: "bold"}
    return Text(text, style=style.get(type(event), ""))
