"""Shows a run's events: live on a terminal, as single lines anywhere else."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, cast

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table as Grid
from rich.text import Text

from peftkit import events
from peftkit.events import Event, Listener
from peftkit.report.figures import count, duration, metric, size
from peftkit.report.plot import plot
from peftkit_cli.unfailing import Unfailing

CURVE_COLUMNS, CURVE_LINES = 64, 7
SHOWN = ("accuracy", "margin")  # of a task's figures; metrics.jsonl has them all
PLAIN_LINES = 40  # about as many lines of steps as a log should hold
PLAIN_BYTES = 1 << 30  # less is loaded in a second or two
PLAIN_SECONDS = 60.0  # and a sign of life at least this often


class Renderer:
    """Shows events on stderr, as a context manager that stops the live display on leaving.

    Args:
        tables: Console of tables, if they are the command's output rather than a remark.
        transient: Remove finished stages from the terminal.
    """

    def __init__(self, *, tables: Console | None = None, transient: bool = False) -> None:
        console = Console(file=cast("IO[str]", Unfailing(sys.stderr)), highlight=False)
        self._live: LiveScreen | None = None
        if os.environ.get("RANK", "0") != "0":  # under `accelerate launch` one process draws
            self._listener = events.ignore
        elif not console.is_terminal or console.is_dumb_terminal:
            self._listener = PlainScreen(console, tables or console).on_event
        else:
            if tables is None or tables.is_terminal:
                tables = console  # on one terminal, all go through the console that redraws it
            self._live = LiveScreen(console, tables, transient=transient)
            self._listener = self._live.on_event

    def __enter__(self) -> Listener:
        if self._live is not None:
            self._live.live.start()
        return self._listener

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.finish(failed=error[0] is not None)


class PlainScreen:
    """One line per fact, for log files and pipes; steps thinned to about `PLAIN_LINES`."""

    def __init__(
        self,
        console: Console,
        tables: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console, self.tables, self.clock = console, tables, clock
        self._last_line = clock()
        self._last_tenth = ("", 0)

    def on_event(self, event: Event) -> None:
        """Print the event, or nothing if it is one of many alike."""
        if isinstance(event, events.Table):
            show_table(self.tables, event)
        elif isinstance(event, events.Progress):
            tenth = (event.text, 10 * event.done // max(event.total, 1))
            is_short = event.unit == "B" and event.total < PLAIN_BYTES
            if tenth != self._last_tenth and tenth[1] > 0 and not is_short:
                self._last_tenth = tenth
                self._line(f"{event.text} {how_far(event)}")
        elif isinstance(event, events.StepDone):
            if self._is_due(event):
                self._line("  ".join([f"step {event.step}/{event.num_steps}", *step_parts(event)]))
        elif (text := describe(event)) is not None:
            self._line(text)

    def _is_due(self, event: events.StepDone) -> bool:
        every = max(1, round(event.num_steps / PLAIN_LINES))
        return (
            event.step in (1, event.num_steps)
            or event.step % every == 0
            or self.clock() - self._last_line >= PLAIN_SECONDS
        )

    def _line(self, text: str) -> None:
        self._last_line = self.clock()
        # Unwrapped: a log line that can be searched beats one that fits 80 columns.
        self.console.print(text, markup=False, soft_wrap=True)


class LiveScreen:
    """Redraws the current work in place; finished work is printed above it."""

    def __init__(self, console: Console, tables: Console, *, transient: bool) -> None:
        self.tables, self.transient = tables, transient
        self._stage: tuple[str, float] | None = None
        self._progress: events.Progress | None = None
        self._spinner = Spinner("dots", style="cyan")
        self._step: events.StepDone | None = None
        self._losses: list[tuple[int, float]] = []
        self._evals: list[tuple[int, float]] = []
        self.live = Live(
            console=console, refresh_per_second=8, transient=transient, get_renderable=self._draw
        )

    def on_event(self, event: Event) -> None:
        """Show an event."""
        if isinstance(event, events.StepDone):
            self._end_stage()
            self._step = event
            self._losses.append((event.step, event.loss))
        elif isinstance(event, events.Progress):
            self._progress = event
        elif isinstance(event, events.Stage):
            self._end_stage()
            self._stage = (event.text, time.monotonic())
        elif isinstance(event, events.Table):
            self._end_stage()
            show_table(self.tables, event)
        elif (text := describe(event)) is not None:
            if isinstance(event, events.EvalDone) and "loss" in event.metrics:
                self._evals.append((event.step, event.metrics["loss"]))
            if not isinstance(event, events.Notice):
                self._end_stage()
            self.live.console.print(_styled(event, text))

    def finish(self, *, failed: bool = False) -> None:
        """Stop redrawing."""
        if failed:  # a stage that broke off is not done
            self._stage = self._progress = None
        self._end_stage()
        self.live.stop()

    def _end_stage(self) -> None:
        self._progress = None
        if self._stage is None:
            return
        (text, began), self._stage = self._stage, None
        if not self.transient:
            seconds = time.monotonic() - began
            done = f"[green]✓[/] {escape(text.rstrip('. '))} [dim]{seconds:.1f} s[/]"
            self.live.console.print(done)

    def _draw(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._step is not None:
            parts.append(self._draw_training(self._step))
        if self._progress is not None:
            seconds = 0.0 if self._stage is None else time.monotonic() - self._stage[1]
            parts.append(_bar(self._progress, seconds))
        elif self._stage is not None:
            self._spinner.update(text=Text(self._stage[0]))
            parts.append(self._spinner)
        return Group(*parts)

    def _draw_training(self, step: events.StepDone) -> RenderableType:
        figures = Grid.grid(padding=(0, 2))
        figures.add_row(*(Text(part) for part in step_parts(step)))
        width = min(CURVE_COLUMNS, self.live.console.width - 24)
        lines = plot(self._losses, self._evals, width, CURVE_LINES)
        curve = Text("\n").join(
            Text.assemble((axis, "dim"), (dots, "cyan"), (key, "dim")) for axis, dots, key in lines
        )
        return Group(curve, _bar(events.Progress("step", step.step, step.num_steps), 0.0), figures)


def show_table(console: Console, table: events.Table) -> None:
    """Print a table; off a terminal as wide as its text, so that no cell is cut."""
    if table.title:  # by itself: a grid's own title is as narrow as its columns
        console.print(Text(table.title, style="bold"), soft_wrap=True)
    grid = Grid(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        show_header=any(table.columns),
    )
    for column in table.columns:
        grid.add_column(Text(column), overflow="fold")
    for row in table.rows:
        grid.add_row(*(Text(cell) for cell in row))
    if console.is_terminal:
        console.print(grid, Text())
        return
    # In a file nothing wraps: lines there are searched, whatever their length.
    width = console.measure(grid, options=console.options.update(width=10_000)).maximum
    page = io.StringIO()
    Console(file=page, width=width).print(grid)
    lines = (line.rstrip() for line in page.getvalue().splitlines())
    console.print("\n".join(lines), markup=False, soft_wrap=True, end="\n\n")


def describe(event: Event) -> str | None:
    """Return the one line that tells of an event, or None if it has no line of its own."""
    if isinstance(event, events.Stage):
        return event.text
    if isinstance(event, events.Notice):
        return f"note: {event.text}"
    if isinstance(event, events.RunStarted):
        share = 100 * event.num_trainable / max(event.num_parameters, 1)
        start = f", from step {event.start_step}" if event.start_step else ""
        return (
            f"Training {count(event.num_trainable)} of {count(event.num_parameters)} parameters "
            f"({share:.2f} %) on {event.device}: {event.num_rows:,} rows, "
            f"{event.num_steps:,} steps{start}" + (f" ({event.paths})" if event.paths else "")
        )
    if isinstance(event, events.EvalDone):
        best = " (best so far)" if event.best else ""
        return f"eval at step {event.step}: {metrics_line(event.metrics)}{best}"
    if isinstance(event, events.Sampled):
        return "\n".join([f"samples at step {event.step}:", *map(_said, event.samples)])
    if isinstance(event, events.Saved):
        return f"saved {event.kind}: {event.path}"
    if isinstance(event, events.RunDone):
        took = f"Done: {event.step:,} steps in {duration(event.seconds)}"
        return f"{took}; {metrics_line(event.metrics)}" if event.metrics else took
    return None


def _said(sample: events.Sample) -> str:
    """Return a sample as one line: the end of the prompt, and the beginning of the answer."""
    prompt, answer = " ".join(sample.prompt.split()), " ".join(sample.completion.split())
    prompt = prompt if len(prompt) <= 48 else f"...{prompt[-45:]}"
    answer = answer if len(answer) <= 96 else f"{answer[:93]}..."
    return f"  {prompt} -> {answer}"


def step_parts(step: events.StepDone) -> list[str]:
    """Return the figures of one step, each as a short text."""
    parts = [
        f"loss {step.loss:.4f}",
        *(f"{name} {step.figures[name]:.3f}" for name in SHOWN if name in step.figures),
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
    return ", ".join(f"{name} {metric(name, value)}" for name, value in metrics.items())


def how_far(event: events.Progress) -> str:
    """Return how much is done of how much: 3/14, 1.2 GiB/4.5 GiB."""
    shown = size if event.unit == "B" else "{:,}".format
    return f"{shown(event.done)}/{shown(event.total)}"


def _bar(event: events.Progress, seconds: float) -> RenderableType:
    """Return a bar of what is done, and where bytes are counted the time left."""
    row, total = Grid.grid(padding=(0, 1)), max(event.total, 1)
    bar = ProgressBar(total=total, completed=event.done, width=40)
    cells: list[RenderableType] = [Text(event.text), bar, Text(how_far(event))]
    cells.append(Text(f"{100 * event.done // total} %"))
    if event.unit == "B" and event.done and seconds > 1:
        left = seconds * (event.total - event.done) / event.done
        cells.append(Text(f"{duration(left)} left"))
    row.add_row(*cells)
    return row


def _styled(event: Event, text: str) -> Text:
    style = {events.Notice: "yellow", events.RunStarted: "bold", events.RunDone: "bold"}
    return Text(text, style=style.get(type(event), ""))
