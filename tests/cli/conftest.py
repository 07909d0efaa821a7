"""A project to run commands in, as it is and trained."""

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from peftkit_cli.app import run
from tests.helpers.command_line import Run, peftkit, write_project

__all__ = ["peftkit"]  # a fixture of all tests here


@pytest.fixture
def project(peftkit: Run, tmp_path: Path, model_folder: Path) -> Path:
    """A folder with data and a recipe; commands run in it."""
    return write_project(tmp_path, model_folder)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A project whose recipe has been trained, into runs/demo. Do not write into it."""
    folder = write_project(tmp_path_factory.mktemp("trained"), model_folder)
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        code = run(["train", "recipe.yaml"])
    assert code == 0, err.getvalue()
    (folder / "out.txt").write_text(out.getvalue(), encoding="utf-8")
    (folder / "err.txt").write_text(err.getvalue(), encoding="utf-8")
    return folder
