"""The experiment trackers of a run: those of accelerate, with options, continued by a resume.

The ids of a run in MLflow, Weights & Biases and Trackio are kept in `trackers.json`, so a resumed
run continues the same curve. Other trackers begin a new run.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from peftkit.errors import ConfigError, OutputError, PeftkitError, did_you_mean
from peftkit.events import EvalDone, Event, RunStopped, StepDone
from peftkit.files.disk import read_json, write_json
from peftkit.formats.folders import CARD, CONFIG, NOTES, RECIPE, TENSORS, TRACKERS
from peftkit.settings import TrainConfig

Complain = Callable[[str], None]
Options = Mapping[str, Any]

EXPERIMENT = "experiment"
"""The option that every tracker has: the name of the experiment or project."""
INIT = {
    "aim": "aim:Run",
    "clearml": "clearml:Task.init",
    "comet_ml": "comet_ml:start",
    "dvclive": "dvclive:Live",
    "mlflow": "accelerate.tracking:MLflowTracker",
    "swanlab": "swanlab:init",
    "tensorboard": "torch.utils.tensorboard:SummaryWriter",
    "trackio": "trackio:init",
    "wandb": "wandb:init",
}
"""The function of each tracker that receives its options."""
REPLACED = ("project", "project_name", "experiment_name", "config")
"""Parameters that `experiment` and the settings of the run take the place of."""
CONTINUED: Mapping[str, tuple[str, Callable[[Any], str], Options]] = {
    "mlflow": ("run_id", lambda run: run.info.run_id, {}),
    "wandb": ("id", lambda run: run.id, {"resume": "allow"}),
    "trackio": ("name", lambda run: run.name, {"resume": "allow"}),
}
"""Trackers whose runs can be continued: the argument, its value for a run, further arguments."""
_SECRET = re.compile(r"(^|_)(api_?key|key|token|password|secret)$", re.IGNORECASE)
STATUS = {"stopped": "KILLED", "failed": "FAILED"}
"""MLflow's status of a run, by the state of RunStopped."""
UPLOADED = (TENSORS, CONFIG, NOTES, RECIPE, CARD)
_COLUMNS = sorted(
    {field.name for field in fields(StepDone)} - {"step", "num_steps", "seconds_left", "figures"}
)
"""Fields of a step that trackers receive, in addition to the task's figures."""


def trackers_of(config: TrainConfig) -> dict[str, dict[str, object]]:
    """Return the options of each tracker in `train.log_to` and `train.trackers`."""
    options = config.model_dump(mode="json")["trackers"]  # lists, which a config holds as tuples
    return {name: options.get(name) or {} for name in (*config.log_to, *config.trackers)}


def require(trackers: Mapping[str, Options]) -> None:
    """Check, before a run, that trackers are installed and accept their options.

    Raises:
        ConfigError: A tracker is not installed, or has no such option.
    """
    installed = {str(tracker) for tracker in get_available_trackers()}
    for name, options in trackers.items():
        if name not in installed:
            fix = f"Install it: pip install {name}"
            raise ConfigError(f"train.log_to: {name} is not installed", fix=fix)
        if secrets := [option for option in options if _SECRET.search(option)]:
            raise ConfigError(
                f"train.trackers.{name}.{secrets[0]} is a credential.",
                found="Recipes are saved with the adapter, and shared.",
                fix="Set it in the environment, as the tracker documents.",
            )
        given = [option for option in options if option != EXPERIMENT]
        accepted = _accepted(name) if given else None
        for option in given if accepted is not None else ():
            if option not in (accepted or ()):
                raise ConfigError(
                    f"train.trackers.{name} has no option {option!r}.",
                    found=f"{EXPERIMENT}, {', '.join(accepted or ())}",
                    fix=did_you_mean(option, [EXPERIMENT, *(accepted or ())]) or "Leave it out.",
                )


def _accepted(name: str) -> Sequence[str] | None:
    """Return the parameters of a tracker; None if it accepts any, or its library fails to load."""
    module, _, path = INIT[name].partition(":")
    try:
        target: Any = import_module(module)
        for attribute in path.split("."):
            target = getattr(target, attribute)
        parameters = inspect.signature(target).parameters
    except Exception:  # a broken library disables the tracker later, with a notice
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return [name for name in parameters if name not in REPLACED]


class Trackers:
    """The trackers of a run; one that raises is dropped with one Notice."""

    def __init__(self, config: TrainConfig, complain: Complain) -> None:
        self._trackers: list[GeneralTracker] = []
        self._complain, self._folder = complain, config.output_dir
        self._ids = _ids_in(config.output_dir)
        settings = config.model_dump(mode="json", exclude={"log_to", "trackers"})
        # TensorBoard takes plain values only
        plain = {k: v if isinstance(v, int | float | str) else str(v) for k, v in settings.items()}
        for name, options in trackers_of(config).items():
            try:
                with redirect_stdout(sys.stderr):  # stdout is for the data of commands
                    self._start(name, options, plain)
            except Exception as error:  # no account, no network, a broken install
                complain(_failed(name, error))
        with suppress(OutputError, OSError):
            if self._ids:
                write_json(self._ids, self._folder / TRACKERS)

    def on_event(self, event: Event) -> None:
        """Log the figures of a step or an evaluation; report the end of a stopped run."""
        if isinstance(event, StepDone):
            columns = {name: getattr(event, name) for name in _COLUMNS}
            numbers = columns | dict(event.figures)
            values = {f"train/{name}": value for name, value in numbers.items()}
        elif isinstance(event, EvalDone):
            values = {f"eval/{name}": value for name, value in event.metrics.items()}
        elif isinstance(event, RunStopped):
            return self._each(lambda tracker: _end(tracker, event.state))
        else:
            return None
        return self._each(lambda tracker: tracker.log(values, step=event.step))

    def finish(self) -> None:
        """End all trackers."""
        self._each(lambda tracker: tracker.finish())

    def _start(self, name: str, options: Options, settings: Options) -> None:
        kind = LOGGER_TYPE_TO_CLASS[name]
        arguments = {key: value for key, value in options.items() if key != EXPERIMENT}
        if kind.requires_logging_directory:
            arguments.setdefault("logging_dir", self._folder)
        experiment = options.get(EXPERIMENT, "peftkit")
        is_continued = self._continue(name, experiment, arguments)
        tracker = kind(experiment, **arguments)
        tracker.start()
        if not (is_continued and name == "mlflow"):  # MLflow refuses another value of a parameter
            tracker.store_init_configuration(dict(settings))
        self._trackers.append(tracker)
        if name in CONTINUED:
            with suppress(AttributeError):
                id = CONTINUED[name][1](tracker.tracker)
                self._ids[name] = {EXPERIMENT: experiment, "id": id}

    def _continue(self, name: str, experiment: str, arguments: dict[str, object]) -> bool:
        """Add the arguments that continue the recorded run of a tracker, if there is one."""
        saved = self._ids.get(name, {})
        if name not in CONTINUED or saved.get(EXPERIMENT) != experiment:
            return False
        argument, _, further = CONTINUED[name]
        if argument in arguments:
            return False
        arguments.update({argument: saved["id"], **further})
        return True

    def _each(self, call: Callable[[GeneralTracker], object]) -> None:
        for tracker in list(self._trackers):
            try:
                with redirect_stdout(sys.stderr):
                    call(tracker)
            except Exception as error:  # a tracker must not end the run
                self._trackers.remove(tracker)
                self._complain(_failed(tracker.name, error))


def log_adapter(folder: Path, trackers: Mapping[str, Options], complain: Complain) -> None:
    """Log the files of a saved adapter as artifacts of its MLflow run, in the folder `adapter`."""
    id = _ids_in(folder).get("mlflow", {}).get("id")
    if "mlflow" not in trackers or id is None:
        return
    try:
        from mlflow import MlflowClient

        client = MlflowClient()
        for name in UPLOADED:
            if (folder / name).is_file():
                client.log_artifact(id, str(folder / name), "adapter")
    except Exception as error:  # a tracker must not end the run
        complain(f"The adapter is not logged to MLflow: {error}")


def _end(tracker: GeneralTracker, state: str) -> None:
    if tracker.name == "mlflow":
        import mlflow

        mlflow.end_run(STATUS[state])


def _ids_in(folder: Path) -> dict[str, Any]:
    if not (folder / TRACKERS).exists():
        return {}
    try:
        return read_json(folder / TRACKERS, max_bytes=1 << 16)
    except PeftkitError:  # damaged: trackers begin new runs
        return {}


def _failed(name: str, error: Exception) -> str:
    return f"The tracker {name} failed and is disabled: {error}"
