"""Tinker's client and its cookbook, unmodified, with `peftkit serve --train`."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_line import ROOT, start
from tests.peers.environment import PEERS, UnavailableError, ask, python_of

pytest.importorskip("google.protobuf", reason="the extra peftkit[train-api] is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KEY = "tml-tests"
NAME = "Qwen/Qwen3-8B"
PAGE = ROOT / "docs" / "tinker.md"


@contextmanager
def server(model: Path, folder: Path) -> Iterator[str]:
    """Start a server; yield its address."""
    command = ("serve", model, "--train", "state", "--as", NAME, "--port", 0, "--api-key", KEY)
    process = start(*command, "--max-waiting", 512, cwd=folder)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:"), process.communicate()
    yield url.removesuffix("/v1")


def asked(peer: str, driver: str, **request: Any) -> Any:
    try:
        return ask(peer, driver, request)
    except UnavailableError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("peer", ["tinker", "tinker 0.25"])
def test_tinker_s_client_trains_and_samples(peer, model_folder, tmp_path):
    with server(model_folder, tmp_path) as url:
        found = asked(peer, "tinker", url=url)
    assert found["version"] == ("0.25.0" if peer == "tinker 0.25" else "0.38.0")
    assert found["info"] == 4
    assert found["losses"][-1] < 0.5 * found["losses"][0]
    assert found["chunks"] == [20, pytest.approx(found["alone"], rel=1e-4)]
    assert all(difference < 1e-4 for _, difference in found["drawn"])
    losses = found["rewarded"]
    assert losses["importance_sampling"] == pytest.approx(losses["ppo"], abs=1e-3)
    assert found["interleaved"]
    assert found["resumed"]
    assert found["named"]
    assert sorted(found["listed"]) == ["sampler_weights/named", "weights/half-way"]
    assert found["left"] == len(found["listed"])  # a named one is deleted, an unnamed one is listed
    assert re.match(r"RequestFailedError: .*importance_sampling", found["error"], re.DOTALL)


@pytest.mark.parametrize("number", [0, 1], ids=["loop", "environment"])
def test_programs_of_the_guide_run(number, model_folder, tmp_path):
    try:
        python = python_of("tinker")
    except UnavailableError as reason:
        pytest.skip(str(reason))
    program = PAGE.read_text(encoding="utf-8").split("```python\n")[1 + number].split("```")[0]
    with server(model_folder, tmp_path) as url:
        variables = {"TINKER_BASE_URL": url, "HF_HUB_OFFLINE": "1", "STEPS": "2"}
        ran = subprocess.run(
            [python, "-W", "error::FutureWarning", "-c", program],
            env={**os.environ, **PEERS["tinker"].variables, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
        )
    assert ran.returncode == 0, ran.stderr
    assert "tinker://" in ran.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("sl_loop", {"batch_size": 4, "max_length": 128}),
        (
            "rl_loop",
            {"batch_size": 4, "group_size": 4, "max_tokens": 8, "loss_fn": "importance_sampling"},
        ),
    ],
)
def test_the_cookbook_s_loops_run_unchanged(recipe, settings, model_folder, tmp_path):
    settings |= {"max_steps": 3, "save_every": 2, "lora_rank": 4, "learning_rate": 1e-3}
    model = Path(shutil.copytree(model_folder, tmp_path / "model"))  # with a longer context
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    with server(model, tmp_path) as url:
        request = {"url": url, "name": NAME, "folder": str(model_folder)}
        found = asked(
            *("tinker cookbook", "tinker_cookbook"),
            **request,
            recipe=recipe,
            settings=settings,
            log=str(tmp_path / "log"),
        )
    assert len(found["metrics"]) == 3
    assert found["checkpoints"][-1]["state_path"].endswith("/weights/final")
