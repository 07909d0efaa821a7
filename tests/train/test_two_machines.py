"""The guide's commands for two machines: two launchers on one machine, a process each."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.helpers.children import free_port
from tests.helpers.sharded import logged_losses, ragged_recipe

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "several-gpus.md").read_text(encoding="utf-8")
PAGE = GUIDE.partition("## Two machines")[2]
MODULES = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}

pytestmark = pytest.mark.slow


def commands(launcher: str) -> list[str]:
    """Return the page's commands that begin with a launcher, each in one line."""
    blocks = [text.strip() for text in re.findall(r"```bash\n(.*?)```", PAGE, re.S)]
    return [text.replace("\\\n", " ") for text in blocks if text.startswith(launcher)]


def changed(command: str, port: str, machine: int) -> list[str]:
    """Return a command of the page for a process a machine, both machines this one."""
    for theirs, ours in {
        "HOST:29500": f"127.0.0.1:{port}",
        "--nproc_per_node 4": "--nproc_per_node 1",
        "--machine_rank 0": f"--machine_rank {machine}",
        "/shared/runs/demo": "run",
    }.items():
        command = command.replace(theirs, ours)
    launcher, *words = shlex.split(command)
    return [sys.executable, "-m", MODULES[launcher], *words]


@contextmanager
def two_machines(command: str, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a command on both, in the folder that they share."""
    port = free_port()
    if config := re.search(r"```yml\n(.*?)```", PAGE, re.S):
        settings = yaml.safe_load(config[1])
        settings |= {"main_process_ip": "127.0.0.1", "main_process_port": int(port)}
        text = yaml.safe_dump(settings | {"num_processes": 2})
        (folder / "two-machines.yml").write_text(text)
    paths = f"{ROOT}{os.pathsep}{ROOT / 'cli'}"
    environ = {
        **os.environ,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    machines = [
        subprocess.Popen(
            changed(command, port, machine),
            cwd=folder,
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for machine in range(2)
    ]
    try:
        yield machines
    finally:
        for machine in machines:
            machine.terminate()  # a launcher ends what it started
            machine.wait(60)


def prepared(folder: Path, model: Path, **train: object) -> None:
    settings = ragged_recipe(folder, model, train={"shard": "base", **train})
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings))


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_machines_train_one_adapter(launcher, tmp_path, model_folder):
    prepared(tmp_path, model_folder)
    with two_machines(commands(launcher)[0], tmp_path) as machines:
        outputs = [machine.communicate(timeout=300) for machine in machines]
        assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert len(logged_losses(tmp_path / "run")) == 5
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    spoke = [out + err for out, err in outputs if "step 1/5" in out + err]
    assert len(spoke) == 1
    assert spoke[0].count("step 5/5") == spoke[0].count("rows read") // 2 == 1
    assert [out for out, _ in outputs].count("") == 1  # of a launcher there is at most a warning
