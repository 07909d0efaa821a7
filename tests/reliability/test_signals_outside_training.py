"""SIGTERM and SIGINT before the first step and after the last: at once, or when all is saved."""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from peftkit.errors import BaseError
from peftkit.events import Event, Progress, Saved, Stage, Table
from peftkit.execution.signals import Interrupted, stopping_immediately
from peftkit.formats.open_adapter import open_adapter
from peftkit.formats.peft.folder import AdapterFolder
from peftkit.run import run as run_recipe
from tests.helpers.command_line import start

BOTH = [signal.SIGINT, signal.SIGTERM]


def kill_self(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def signal_at(is_moment: Callable[[Event], bool], number: signal.Signals) -> Callable[..., None]:
    """Return a listener that sends a signal to its own process, once."""
    sent: list[Event] = []

    def listen(event: Event) -> None:
        if not sent and is_moment(event):
            sent.append(event)
            kill_self(number)

    return listen


MOMENTS: dict[str, Callable[[Event], bool]] = {
    "loading the base": lambda e: isinstance(e, Stage) and e.text.startswith("Loading the base"),
    "attaching the adapter": lambda e: isinstance(e, Table) and e.title.startswith("Adapter"),
    "reading the data": lambda e: isinstance(e, Stage) and e.text.startswith("Reading"),
    "encoding the data": lambda e: isinstance(e, Progress),
}


@pytest.mark.parametrize(("moment", "number"), [*zip(MOMENTS, BOTH * 2, strict=True)])
def test_a_signal_before_the_first_step_ends_the_run_and_leaves_nothing_half_written(
    moment, number, asked, tmp_path
):
    with pytest.raises(Interrupted, match="before the first step") as caught:
        run_recipe(asked, on_event=signal_at(MOMENTS[moment], number))
    assert caught.value.exit_code == 128 + number
    files = [path.name for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not files
    run_recipe(asked.model_copy(update={"train": asked.train.model_copy(update={"max_steps": 1})}))


def test_a_signal_before_a_resumed_step_keeps_checkpoints(asked, tmp_path):
    with pytest.raises(Interrupted):
        run_recipe(asked, on_event=signal_at(lambda e: isinstance(e, Saved), signal.SIGTERM))
    before = sorted((tmp_path / "run").rglob("*"))
    stop = signal_at(MOMENTS["reading the data"], signal.SIGTERM)
    with pytest.raises(Interrupted, match="before the first step"):
        run_recipe(asked, resume=True, on_event=stop)
    assert sorted((tmp_path / "run").rglob("*")) == before
    run_recipe(asked, resume=True)


def swallow() -> None:
    with contextlib.suppress(BaseException):
        kill_self(signal.SIGTERM)


def rename() -> None:
    try:
        kill_self(signal.SIGTERM)
    except SystemExit:
        raise BaseError("the download broke off") from None


@pytest.mark.parametrize("library", [swallow, rename])
def test_a_stop_survives_libraries_that_swallow_it(library):
    with pytest.raises(Interrupted), stopping_immediately("here"):
        library()


def test_an_error_without_a_signal_stays_what_it_is():
    with pytest.raises(BaseError), stopping_immediately("here"):
        raise BaseError("no signal came")


def test_a_signal_waits_for_the_adapter(asked, tmp_path, monkeypatch):
    number, save = signal.SIGTERM, AdapterFolder.save

    def interrupted_save(adapter: AdapterFolder, folder: Path) -> None:
        if folder == tmp_path / "run":  # not a checkpoint
            kill_self(number)
        save(adapter, folder)

    monkeypatch.setattr(AdapterFolder, "save", interrupted_save)
    with pytest.raises(Interrupted, match="the adapter is in") as caught:
        run_recipe(asked)
    assert caught.value.exit_code == 128 + number
    assert (tmp_path / "run" / "README.md").exists()
    open_adapter(tmp_path / "run")


@pytest.mark.slow
def test_the_command_line_ends_with_143_and_one_message(recipe_file, tmp_path):
    process = start("train", recipe_file, cwd=tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if "Loading the base" in line:
            break
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "")
    assert "Interrupted: SIGTERM: stopped before the first step" in err
    assert "Traceback" not in err
