"""The Ray recipe with real Ray: two CPU workers, of which one is killed; Ray restarts them."""

import json
import os
import re
import runpy
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from peftkit.config.schema import dump_yaml
from peftkit.recipe import load
from peftkit.run import run
from tests.helpers.children import exit_code, start_ranks
from tests.helpers.command_line import ROOT, environment
from tests.helpers.small_run import logged, small_recipe

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]
TENSORS = "adapter_model.safetensors"


@pytest.fixture
def cluster(monkeypatch):
    ray = pytest.importorskip("ray", reason="ray is not installed")
    pytest.importorskip("ray.train", reason="ray[train] is not installed")
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    variables = {"PYTHONPATH": environment()["PYTHONPATH"], "CUDA_VISIBLE_DEVICES": ""}
    variables |= {"OMP_NUM_THREADS": "1", "HF_HOME": os.environ["HF_HOME"]}
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": variables},
        logging_level="error",
    )
    yield ray
    ray.shutdown()


def train_alone(recipe: str, out: str) -> None:
    run(load(Path(recipe), [f"train.output_dir={out}"]))


def pid_in(folder: Path) -> int:
    """Return the process that holds the lock of a run."""
    return int(re.match(r"Process (\d+) ", (folder / ".locks" / "holder").read_text())[1])


def test_a_killed_worker_is_restarted_and_the_run_ends_equal(cluster, tmp_path, model_folder):
    recipe = small_recipe(tmp_path, model_folder, max_steps=40, batch_size=1, eval_every=None)
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_yaml(recipe))
    out, results = tmp_path / "run", list[Any]()
    train = runpy.run_path(str(ROOT / "recipes" / "launch" / "ray_train.py"))["train"]
    fitting = threading.Thread(
        target=lambda: results.append(train(file, out, workers=2, cpu=True, restarts=2))
    )
    fitting.start()
    end = time.monotonic() + 300
    while not any((out / "checkpoints").glob("step-[5-9]")):
        assert fitting.is_alive()
        assert time.monotonic() < end
        time.sleep(0.005)
    os.kill(pid_in(out), signal.SIGKILL)
    fitting.join(300)
    (result,) = results
    assert result.error is None
    assert json.loads((out / "finished.json").read_text())["result"]["step"] == 40
    starts = [line["start_step"] for line in logged(out, "RunStarted")]
    assert starts[0] == 0
    assert len(starts) == 2
    assert starts[1] >= 5
    children = start_ranks(train_alone, str(file), str(tmp_path / "whole"))
    assert [exit_code(child) for child in children] == [0, 0]
    assert (out / TENSORS).read_bytes() == (tmp_path / "whole" / TENSORS).read_bytes()
