"""Ways to run the command line: in this process, or as its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import IO, NamedTuple

import pytest
import typer

from peftkit_cli.app import app, run
from tests.helpers.folders import write_rows

ROOT = Path(__file__).parents[2]


class Done(NamedTuple):
    """What a command left: exit code, data, remarks."""

    code: int
    out: str
    err: str

    def succeeded(self) -> "Done":
        """Return itself, if the command succeeded."""
        assert self.code == 0, self.err
        return self

    def refusal(self) -> str:
        """Return the message of a command that refused its input and printed no data."""
        assert (self.code, self.out) == (2, ""), self
        return self.err


Run = Callable[..., Done]


@pytest.fixture
def peftkit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Run a command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def call(*args: object) -> Done:
        capsys.readouterr()
        code = run([str(arg) for arg in args])
        return Done(code, *capsys.readouterr())

    return call


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Let the next command read lines from stdin."""
    monkeypatch.setattr("sys.stdin", StringIO("".join(line + "\n" for line in lines)))


def commands() -> dict[str, typer.core.TyperCommand]:
    """Return all commands by name, also those of groups."""
    found: dict[str, typer.core.TyperCommand] = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        below = getattr(command, "commands", None)
        found |= {f"{name} {n}": c for n, c in below.items()} if below else {name: command}
    return found


def environment() -> dict[str, str]:
    """Return the environment in which a process finds this tree."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "cli")])
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


COMMAND = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("peftkit_cli", run_name="__main__", alter_sys=True)
"""
"""`python -m peftkit_cli`, where SIGINT ends it though the parent ignores that."""
STARTED: list[subprocess.Popen[str]] = []
"""Processes that tests started; tests/conftest.py ends them with their test."""


def start(
    *args: object, cwd: Path, stdout: int | IO[str] = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Start a command as a process of its own, with pipes to it; it ends with the test."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *map(str, args)],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(process)
    return process


RECIPE = """\
base: {{model: {model}, quantize: none}}
method: {{type: lora, rank: 4, alpha: 8, targets: [q, v]}}
data: {{train: train.jsonl, eval: eval.jsonl, max_length: 64}}
train: {{output_dir: runs/demo, max_steps: 8, batch_size: 2, learning_rate: 0.05, eval_every: 4}}
"""


def turn(question: str, answer: str) -> dict[str, list[dict[str, str]]]:
    """Return a row of one question and its answer."""
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def write_project(folder: Path, model: Path) -> Path:
    """Write data and a recipe, as a user has them; return the folder."""
    rows = [turn(f"what is the {word}?", f"the {word} dog") for word in ("quick", "brown", "lazy")]
    write_rows(folder / "train.jsonl", rows * 4)
    write_rows(folder / "eval.jsonl", rows)
    (folder / "recipe.yaml").write_text(RECIPE.format(model=model), encoding="utf-8")
    return folder
