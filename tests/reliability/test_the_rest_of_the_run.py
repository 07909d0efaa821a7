"""A tracker, the model card or the recipe's copy failing never costs a trained adapter."""

import os
import random
import signal
import sys
import time
from typing import Any

import pytest

from peftkit.errors import OutputError
from peftkit.events import Event, Notice, Saved
from peftkit.formats.open_adapter import open_adapter
from peftkit.recipe import load
from peftkit.record import RunRecord
from peftkit.run import run as run_recipe
from peftkit_cli.render import Renderer
from tests.helpers.children import exit_code, start

TENSORS = "adapter_model.safetensors"


def fail(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("the service is down")


def notices(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice)]


@pytest.mark.covers("peftkit")
def test_a_failed_model_card_is_one_notice(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(RunRecord, "card", fail)
    events: list[Event] = []
    run_recipe(asked, on_event=events.append)
    (text,) = notices(events)
    assert text.startswith("README.md was not written")
    assert "the service is down" in text
    assert Saved("adapter", tmp_path / "run") in events
    open_adapter(tmp_path / "run")


def test_a_paper_that_cannot_be_written_costs_one_notice(asked, tmp_path):
    name = "recipe.yaml"
    (tmp_path / "run" / name).mkdir(parents=True)
    events: list[Event] = []
    run_recipe(asked, on_event=events.append)
    (text,) = notices(events)
    assert text.startswith(f"{name} was not written")
    open_adapter(tmp_path / "run")


def test_an_unwritable_adapter_is_saved_by_resuming(asked, tmp_path):
    place = tmp_path / "run" / "adapter_config.json"
    place.mkdir(parents=True)
    with pytest.raises(OutputError, match=r"adapter_config\.json"):
        run_recipe(asked)
    open_adapter(tmp_path / "run" / "checkpoints" / "step-6")
    place.rmdir()
    run_recipe(asked, resume=True)
    open_adapter(tmp_path / "run")


@pytest.mark.parametrize("screen", ["closed", "full"])
def test_a_lost_screen_loses_nothing(screen, asked, tmp_path, monkeypatch):
    if screen == "full":
        number = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, number = os.pipe()
        os.close(reader)
    with os.fdopen(number, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with Renderer() as on_event:
            run_recipe(asked, on_event=on_event)
        print("a last word", file=sys.stderr)
    open_adapter(tmp_path / "run")


def train_slowly(path: str) -> None:
    """Run a recipe at a pace that leaves time to be killed."""

    def pause(event: Event) -> None:
        time.sleep(0.02)

    run_recipe(load(path), on_event=pause)


@pytest.mark.parametrize("moment", range(int(os.environ.get("PEFTKIT_KILLS", "1"))))
def test_a_killed_recipe_ends_equal(moment, recipe_file, asked, tmp_path):
    """PEFTKIT_KILLS=50 pytest tests/reliability -k killed: for longer."""
    train = asked.train.model_copy(update={"output_dir": tmp_path / "whole"})
    run_recipe(asked.model_copy(update={"train": train}))
    child = start(train_slowly, str(recipe_file))
    while not (tmp_path / "run" / "checkpoints" / "step-1").exists():
        assert child.is_alive()
        time.sleep(0.001)
    time.sleep(random.Random(moment).uniform(0, 0.5))
    child.kill()
    assert exit_code(child) in (0, -signal.SIGKILL)
    run_recipe(asked, resume=True)
    ended = (tmp_path / "run" / TENSORS).read_bytes()
    assert ended == (tmp_path / "whole" / TENSORS).read_bytes()
