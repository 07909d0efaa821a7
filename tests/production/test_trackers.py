"""Trackers that are installed beside peftkit: a real MLflow server, wandb and trackio offline."""

import json
import sys
from pathlib import Path

import pytest

from peftkit.errors import ConfigError
from peftkit.events import Notice
from peftkit.run import run
from peftkit.settings import Tracker, TrainConfig
from peftkit.train.trackers import CONTINUED, INIT, require, trackers_of
from tests.helpers.children import free_port
from tests.helpers.small_run import logged, service, small_recipe

pytestmark = pytest.mark.filterwarnings("default")  # of the trackers' own libraries


def test_every_tracker_of_accelerate_is_one_of_ours():
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert set(LOGGER_TYPE_TO_CLASS) <= set(Tracker.__args__)
    assert set(INIT) == set(Tracker.__args__)


def test_log_to_and_trackers_are_one_list():
    config = TrainConfig(log_to=("wandb",), trackers={"mlflow": {"tags": {"a": "b"}}, "aim": None})
    assert trackers_of(config) == {"wandb": {}, "mlflow": {"tags": {"a": "b"}}, "aim": {}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """An MLflow server over SQLite, with its artifacts in a folder."""
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    options = ("--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--workers", "1")
    artifacts = ("--artifacts-destination", str(folder / "artifacts"), "--serve-artifacts")
    command = [sys.executable, "-m", "mlflow", "server", "--port", port, *options, *artifacts]
    with service(command, f"http://127.0.0.1:{port}/health", folder):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.slow
def test_mlflow_receives_parameters_metrics_and_the_adapter(
    server, tmp_path, model_folder, monkeypatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    from mlflow import MlflowClient

    options = {"experiment": "orders", "run_name": "first", "tags": {"team": "a"}}
    recipe = small_recipe(tmp_path, model_folder, trackers={"mlflow": options})
    events = []

    def stop_after_two_steps(event):
        events.append(event)
        if getattr(event, "step", 0) == 2 and type(event).__name__ == "StepDone":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, on_event=stop_after_two_steps)
    client = MlflowClient()
    experiment = client.get_experiment_by_name("orders")
    (stopped,) = client.search_runs([experiment.experiment_id])
    assert stopped.info.status == "KILLED"
    run(recipe, resume="auto", on_event=events.append)
    assert not [
        event.text for event in events if isinstance(event, Notice) and "track" in event.text
    ]

    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.info.status == "FINISHED"
    assert tracked.info.run_id == stopped.info.run_id
    assert tracked.data.tags["team"] == "a"
    assert tracked.data.tags["mlflow.runName"] == "first"
    assert tracked.data.params["learning_rate"] == "0.0002"
    assert tracked.data.params["max_steps"] == "4"
    history = client.get_metric_history(tracked.info.run_id, "train/loss")
    by_step = {metric.step: metric.value for metric in history}
    losses = {line["step"]: line["loss"] for line in logged(tmp_path / "run", "StepDone")}
    assert by_step == pytest.approx(losses)
    assert sorted(by_step) == [1, 2, 3, 4]
    assert tracked.data.metrics["eval/loss"] == pytest.approx(
        logged(tmp_path / "run", "EvalDone")[-1]["metrics"]["loss"]
    )
    files = {f.path for f in client.list_artifacts(tracked.info.run_id, "adapter")}
    assert {"adapter/adapter_model.safetensors", "adapter/recipe.yaml"} <= files
    copy = client.download_artifacts(
        tracked.info.run_id, "adapter/adapter_model.safetensors", str(tmp_path)
    )
    saved = (tmp_path / "run" / "adapter_model.safetensors").read_bytes()
    assert Path(copy).read_bytes() == saved


@pytest.mark.slow
def test_an_unknown_option_of_mlflow_is_refused_before_the_run():
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    with pytest.raises(ConfigError, match=r"(?s)no option 'tag'.*Did you mean 'tags'"):
        require({"mlflow": {"tag": {"team": "a"}}})
    with pytest.raises(ConfigError, match=r"(?s)no option 'run_nam'.*Did you mean 'run_name'"):
        require({"mlflow": {"run_nam": "x"}})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard", "dvclive", "swanlab", "aim"])
def test_a_tracker_records_a_run_without_a_network(
    name, tmp_path, model_folder, monkeypatch, capsys
):
    pytest.importorskip("torch.utils.tensorboard" if name == "tensorboard" else name)
    monkeypatch.chdir(tmp_path)
    for variable, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "SWANLAB_MODE": "offline",
    }.items():
        monkeypatch.setenv(variable, value)
    options = {
        "wandb": {"experiment": "orders", "name": "first", "tags": ["a"]},
        "trackio": {"experiment": "orders", "name": "first"},
        "dvclive": {"dir": str(tmp_path / "live"), "save_dvc_exp": False},
    }
    events = []
    recipe = small_recipe(tmp_path, model_folder, trackers={name: options.get(name)})
    run(recipe, on_event=events.append)
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert not [text for text in notices if name in text]
    if name in CONTINUED:
        (saved,) = json.loads((tmp_path / "run" / "trackers.json").read_text()).values()
        assert saved["experiment"] == "orders"
        assert saved["id"]
    assert not capsys.readouterr().out, "stdout is for the data of commands"
    if name == "trackio":  # its folder is chosen when it is imported
        from trackio.utils import TRACKIO_DIR

        assert list(TRACKIO_DIR.glob("orders*"))
        return
    places = {"wandb": "wandb/offline-run-*/*.wandb", "tensorboard": "run/peftkit/events*"}
    places |= {"dvclive": "live/metrics.json", "swanlab": "swanlog/*run*", "aim": "run/.aim/**/*"}
    assert list(tmp_path.glob(places[name]))
