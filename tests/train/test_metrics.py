"""Trackers and metrics.jsonl never cost a run."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
from accelerate import tracking

from peftkit.errors import ConfigError
from peftkit.forward.loss import perplexity
from peftkit.train import trackers
from peftkit.train.trackers import require
from tests.helpers.toy import play


class Recorder:
    """A tracker as accelerate's are made and called."""

    name: str
    requires_logging_directory = False
    instances: ClassVar[list[Recorder]]

    def __init__(self, run_name: str, **options: Any) -> None:
        self.run_name, self.config, self.logged = run_name, dict[str, Any](), list[Any]()
        self.options, self.id = options, f"run-{len(type(self).instances)}"
        self.finished = False
        type(self).instances.append(self)

    @property
    def tracker(self) -> Recorder:
        return self

    def start(self) -> None: ...

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, float], step: int | None) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Recorder]]:
    """Put recorders in the place of accelerate's trackers."""

    names = ("wandb", "trackio")
    made = {name: type(name, (Recorder,), {"name": name, "instances": []}) for name in names}
    for name, kind in made.items():
        monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, kind)
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: [*names])
    return made


def test_trackers_receive_all_figures(tmp_path, kinds):
    run = play(tmp_path, log_to=["wandb", "trackio"])
    for kind in kinds.values():
        (tracker,) = kind.instances
        losses = [values["train/loss"] for _, values in tracker.logged if "train/loss" in values]
        assert losses == run.losses
        assert [step for step, values in tracker.logged if "eval/loss" in values] == [3, 6, 9, 12]
        assert {"train/num_tokens", "train/peak_bytes", "train/epoch"} <= set(tracker.logged[0][1])
        assert tracker.config["learning_rate"] == 0.02
        assert tracker.config["max_steps"] == "None", "TensorBoard refuses None itself"
        assert tracker.finished


def test_options_reach_a_tracker_and_a_resumed_run_continues_its_own(tmp_path, kinds):
    trackers = {"wandb": {"experiment": "orders", "tags": ["a"]}}
    play(tmp_path, trackers=trackers, max_steps=6)
    changes = ["train.max_steps"]
    assert play(tmp_path, trackers=trackers, resume=True, allow_changes=changes).error is None
    other = {"wandb": {"experiment": "other"}}
    assert play(tmp_path, trackers=other, resume=True).error is None
    play(tmp_path, trackers=trackers, overwrite=True)
    instances = kinds["wandb"].instances
    assert [tracker.run_name for tracker in instances] == ["orders", "orders", "other", "orders"]
    assert [tracker.options for tracker in instances] == [
        {"tags": ["a"]},
        {"tags": ["a"], "id": "run-0", "resume": "allow"},
        {},
        {"tags": ["a"]},
    ]


@pytest.mark.parametrize("where", ["__init__", "start", "store_init_configuration"])
def test_a_tracker_that_cannot_start_costs_one_notice(tmp_path, kinds, monkeypatch, where):
    def fail(*args: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(kinds["wandb"], where, fail)
    run = play(tmp_path, log_to=["wandb", "trackio"])
    assert run.error is None
    assert run.notices == ["The tracker wandb failed and is disabled: no network"]
    assert len(kinds["trackio"].instances[0].logged) == 16


def test_a_tracker_that_fails_later_costs_one_notice_and_not_the_others(
    tmp_path, kinds, monkeypatch
):
    def fail(self: Recorder, values: dict[str, float], step: int | None) -> None:
        if step == 4:
            raise RuntimeError("quota")

    monkeypatch.setattr(kinds["wandb"], "log", fail)
    run = play(tmp_path, log_to=["wandb", "trackio"])
    assert run.error is None
    assert len(run.notices) == 1
    assert "quota" in run.notices[0]
    assert len(kinds["trackio"].instances[0].logged) == 16


def test_trackers_end_with_a_failure(tmp_path, kinds):
    def crash(event: object) -> None:
        if getattr(event, "step", 0) == 2:
            raise KeyError

    run = play(tmp_path, log_to=["wandb"], on_event=crash)
    run.failed(KeyError)
    assert kinds["wandb"].instances[0].finished


def test_a_tracker_that_is_not_installed_is_refused_with_the_way_to_get_it(tmp_path):
    with pytest.raises(ConfigError, match="pip install trackio"):
        require({"trackio": {}})
    run = play(tmp_path, log_to=["trackio"])
    run.failed(ConfigError)
    assert run.events == []


def test_credentials_in_a_recipe_are_refused(kinds):
    with pytest.raises(ConfigError, match=r"wandb\.api_key is a credential"):
        require({"wandb": {"experiment": "orders", "api_key": "hunter2"}})


def test_perplexity_has_no_upper_end():
    assert perplexity(0.0) == 1.0
    assert perplexity(1e4) == math.inf
