"""Without a network, a base from a folder trains, evaluates, generates and merges."""

import shutil
import socket
import subprocess
import sys

import pytest

from tests.helpers.command_line import environment, write_project

STEPS = (
    ("check", "recipe.yaml"),
    ("train", "recipe.yaml", "--resume", "auto", "--set", "train.max_steps=2"),
    ("eval", "runs/demo", "--data", "eval.jsonl"),
    ("generate", "runs/demo", "--prompt", "what is it?", "--max-new-tokens", "4"),
    ("merge", "runs/demo", "--out", "merged"),
    ("report", "runs/demo"),
)


def test_no_command_looks_up_or_connects_to_another_machine(peftkit, tmp_path, model_folder):
    write_project(tmp_path, model_folder)
    calls = []

    def refuse(*args, **options):
        calls.append(args)
        raise OSError("there is no network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket.socket, "connect_ex", refuse)
        for name in ("getaddrinfo", "gethostbyname", "create_connection"):
            patch.setattr(socket, name, refuse)
        with pytest.raises(OSError, match="no network"):
            socket.create_connection(("192.0.2.1", 443))
        calls.clear()
        for step in STEPS:
            done = peftkit(*step)
            assert done.code == 0, done.err
    assert calls == []
    assert (tmp_path / "merged" / "model.safetensors").exists()


@pytest.mark.slow
def test_training_works_in_a_namespace_without_a_network(tmp_path, model_folder):
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this system does not allow namespaces")
    write_project(tmp_path, model_folder)
    for step in STEPS[:2]:
        command = [*alone, sys.executable, "-m", "peftkit_cli", *step]
        variables = environment() | {"HF_HOME": str(tmp_path / "cache")}
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "demo" / "finished.json").exists()
