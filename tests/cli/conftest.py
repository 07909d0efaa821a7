"""Ways to run the command line: in this process, or as its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from peftkit_cli.app import run

ROOT = Path(__file__).parents[2]


class Done(NamedTuple):
    """What a command left: exit code, data, remarks."""

    code: int
    out: str
    err: str


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


def environment() -> dict[str, str]:
    """Return the environment in which a process finds this tree."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "cli")])
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def start(*args: object, cwd: Path, **options: int) -> subprocess.Popen[str]:
    """Start a command as a process of its own, with pipes to it."""
    return subprocess.Popen(
        [sys.executable, "-m", "peftkit_cli", *map(str, args)],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture
def peftkit_process(tmp_path: Path) -> Run:
    """Run a command as a process of its own."""

    def call(*args: object, cwd: Path = tmp_path, stdin: str = "") -> Done:
        process = start(*args, cwd=cwd)
        out, err = process.communicate(stdin, timeout=120)
        return Done(process.returncode, out, err)

    return call
