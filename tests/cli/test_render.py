"""What the screen shows of a run, live and as lines."""

import io
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from peftkit import events, figures
from peftkit.events import Event
from peftkit_cli import render
from peftkit_cli.render import LiveScreen, PlainScreen, Renderer


def step(number: int, num_steps: int = 100, loss: float = 0.5) -> events.StepDone:
    return events.StepDone(
        number, num_steps, number / 50, loss, 2e-4, 0.25, 900, 1234.5, 3e9, 187.0
    )


DRIFT = {"drift": 0.02636, "drift_95": 0.09274, "drift_same": 0.9167}
RUN: list[Event] = [
    events.Stage("Loading the base"),
    events.Table("Base", ("kind", "count"), (("nf4 [q]", "210"), ("x" * 150, "1"))),
    events.Notice("labels of 2 rows were cut"),
    events.RunStarted(100, 0, 1500, 4_884_480, 134_500_000, "cpu"),
    *[step(number, loss=2 / number) for number in range(1, 51)],
    events.EvalDone(50, {"loss": 0.51, "num_rows": 64, **DRIFT}, True),
    events.Saved("checkpoint", Path("runs/demo/checkpoints/step-50")),
    *[step(number, loss=2 / number) for number in range(51, 101)],
    events.RunDone(
        100,
        75.2,
        {"loss": 0.02, "epochs": 2, "eval_loss": 0.5, "best_eval_loss": 0.4}
        | {f"eval_{name}": value for name, value in DRIFT.items()},
    ),
]


def plain(happened: list[Event], seconds_each: float = 0.0) -> list[str]:
    """Return the lines that a log file gets."""
    console, now = Console(file=io.StringIO(), width=80), [0.0]
    screen = PlainScreen(console, console, clock=lambda: now[0])
    for event in happened:
        now[0] += seconds_each
        screen.on_event(event)
    return console.file.getvalue().splitlines()


def live(happened: list[Event], *, transient: bool = False, width: int = 100) -> str:
    """Return all that a terminal gets."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    screen = LiveScreen(console, console, transient=transient)
    screen.start()
    for event in happened:
        screen.on_event(event)
    screen.finish()
    return console.file.getvalue()


def test_a_log_tells_every_fact_in_one_line_each():
    lines = plain(RUN)
    text = "\n".join(lines)
    assert lines[0] == "Loading the base"
    assert "nf4 [q]" in text
    assert "x" * 150 in text, "a cell is never cut"
    assert "note: labels of 2 rows were cut" in lines
    share = "4.88M parameters (3.63 % of the base's 134.5M)"
    assert f"Training {share} on cpu: 1,500 rows, 100 steps" in lines
    at = lines.index("eval at step 50: loss 0.51, rows 64 (best so far)")
    drift = "drift on unrelated prompts: 0.02636 nats a token; 95 % of tokens below 0.09274; 91.7 %"
    assert lines[at + 1] == f"  {drift} unchanged"
    assert "saved checkpoint: runs/demo/checkpoints/step-50" in lines
    assert lines[-3] == "Done: 100 steps in 1:15; loss 0.02 (mean of the last 10 steps), epochs 2"
    assert lines[-2:] == ["  eval: loss 0.5, best loss 0.4", f"  {drift} unchanged"]


def test_a_log_holds_the_first_and_last_step_and_few_between():
    steps = [line for line in plain(RUN) if line.startswith("step ")]
    assert steps[0].startswith("step 1/100  loss 2.0000  lr 2.00e-04  grad 0.25  epoch 0.02")
    assert steps[-1].startswith("step 100/100  loss 0.0200")
    assert "1,234 tokens/s  peak 3.0 GB  3:07 left" in steps[-1]
    assert 40 <= len(steps) <= 60


def test_a_slow_run_gives_a_sign_of_life_every_minute():
    slow = plain([step(number, num_steps=100_000) for number in range(2, 22)], seconds_each=20.0)
    assert [line.split("/")[0] for line in slow] == [f"step {n}" for n in (4, 7, 10, 13, 16, 19)]


def test_a_log_has_tenths_of_a_long_piece_of_work_and_none_of_a_short_one():
    work: list[Event] = [events.Progress("Encoding", done, 1000) for done in range(1001)]
    lines = plain(work, seconds_each=1.0)
    assert len(lines) == 11
    assert lines[-1] == "Encoding 1,000/1,000"
    assert plain(work, seconds_each=0.004) == []


def test_a_terminal_keeps_what_is_done():
    text = live(RUN)
    assert "✓ Loading the base" in text
    assert "100/100" in text
    assert "saved checkpoint" in text


def test_figures_of_a_step_and_what_is_left_fit_80_columns():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    screen = LiveScreen(console, console, transient=False)
    screen.on_event(step(7))
    (parts, bar) = screen.get_renderables()
    assert isinstance(parts, Text)
    assert parts.plain.endswith("1,234 tokens/s  peak 3.0 GB")
    assert len(parts.plain) <= 80
    with console.capture() as shown:
        console.print(bar)
    assert shown.get().rstrip().endswith("7/100  3:07 left")


@pytest.mark.parametrize("words", [3, 30])
def test_a_long_stage_leaves_the_bar_of_the_steps_whole(words):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    screen = LiveScreen(console, console, transient=False)
    screen.on_event(step(7))
    screen.on_event(events.Stage("answering prompts " * words))
    (_, bars) = screen.get_renderables()
    with console.capture() as shown:
        console.print(bars)
    assert "━" in shown.get()
    assert "7/100  3:07 left" in shown.get()
    assert shown.get().count("answering prompts") >= words // 2, "the text wraps: it is not cut"
    assert max(map(len, shown.get().splitlines())) <= 80


def test_a_long_line_of_an_event_keeps_its_indentation():
    metrics = {f"figure_{n}": 0.5 for n in range(20)}
    text = live([events.EvalDone(50, metrics | DRIFT, False)], width=60)
    assert "\n  drift on unrelated prompts: 0.02636 nats a token; 95 % of" in text
    assert "\n  tokens below 0.09274; 91.7 % unchanged" in text


def test_nothing_is_redrawn_while_an_event_is_printed(monkeypatch):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    drawn: list[str] = []
    with LiveScreen(console, console, transient=False) as screen:
        assert isinstance(screen, LiveScreen)
        monkeypatch.setattr(screen.live, "refresh", lambda: drawn.append("by rich's thread"))

        def printed(*_: object) -> None:
            before = len(drawn)
            time.sleep(0.3)  # more than twice the interval of refreshes
            assert len(drawn) == before

        monkeypatch.setattr(console, "print", printed)
        screen.on_event(events.Notice("a text"))
        monkeypatch.undo()


def test_a_command_shows_that_it_loads_libraries_until_its_first_event(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    screen = LiveScreen(console, console, transient=False)
    with screen:
        assert [task.description for task in screen.tasks] == ["Loading PyTorch and transformers"]
        screen.on_event(events.Stage("Loading the base"))
        assert [task.description for task in screen.tasks] == ["Loading the base"]
        screen.finish()
    assert "✓ Loading PyTorch" not in console.file.getvalue()


def test_figures_in_a_table_stay_whole_on_a_narrow_terminal():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    names = ", ".join(["post_attention_layernorm"] * 6)
    table = events.Table(
        "The base in memory",
        ("weights", "stored as", "parameters", "size"),
        (
            (f"linear layers: {names}", "bfloat16", "106,168,320", "212.3 MB"),
            ("all", "", "9", "1 B"),
        ),
    )
    render.show_table(console, table)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("106,168,320" in line and "212.3 MB" in line for line in lines)
    assert "parameters" in lines[1], "a heading is not cut either"


@pytest.mark.parametrize("columns", [40, 80])
def test_a_table_in_a_pipe_is_as_wide_as_columns(columns, monkeypatch):
    table = events.Table("", ("what", "text"), (("a row", "a word and more " * 20),))
    wide, narrow = (Console(file=io.StringIO()) for _ in range(2))
    monkeypatch.delenv("COLUMNS", raising=False)
    render.show_table(wide, table)
    assert "a word and more " * 19 in wide.file.getvalue()
    monkeypatch.setenv("COLUMNS", str(columns))
    render.show_table(narrow, table)
    assert columns - 16 < max(map(len, narrow.file.getvalue().splitlines())) <= columns


def test_brackets_in_texts_are_no_markup():
    happened: list[Event] = [events.Stage("Reading [red]x[/red].jsonl"), events.Stage("next")]
    assert "Reading [red]x[/red].jsonl" in live(happened)
    assert plain(happened)[0] == "Reading [red]x[/red].jsonl"


def test_a_stage_that_broke_off_is_not_shown_as_done():
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    screen = LiveScreen(console, console, transient=False)
    screen.start()
    screen.on_event(events.Stage("Loading"))
    screen.finish(failed=True)
    assert "✓" not in console.file.getvalue()


def test_only_the_main_process_draws(monkeypatch, capsys):
    for rank, lines in (("1", []), ("0", ["Loading"])):
        monkeypatch.setenv("RANK", rank)
        with Renderer() as on_event:
            on_event(events.Stage("Loading"))
        assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (figures.count(999), "999"),
        (figures.count(4_884_480), "4.88M"),
        (figures.count(139_400_000), "139.4M"),
        (figures.count(8_030_000_000), "8.03B"),
        (figures.size(512), "512 B"),
        (figures.size(1.5e6), "1.5 MB"),
        (figures.size(80e9), "80.0 GB"),
        (figures.duration(59.4), "59 s"),
        (figures.duration(187), "3:07"),
        (figures.duration(3765), "1:02:45"),
        (figures.metric("num_rows", 64), "64"),
        (figures.metric("exact_match", 1.0), "1"),
        (figures.metric("loss", 0.51234), "0.5123"),
        (figures.metric("peak_bytes", 1.5e9), "1.5 GB"),
        (figures.metric("peak_bytes", 1.234e9, 1), "1.23 GB"),
        (figures.metric("eval/perplexity", 1.0007512, 3), "1.000751"),
    ],
)
def test_figures_as_texts(figure, text):
    assert figure == text


def test_the_header_shows_in_one_line_what_computes_the_model():
    started = events.RunStarted(100, 0, 1500, 4_884_480, 134_500_000, "cpu", "blocks: compiled")
    line, how = (render.describe(started) or "").splitlines()
    assert line.endswith("1,500 rows, 100 steps")
    assert "blocks: compiled" in how
