"""Pythons that peftkit starts import no file of the working folder, whatever its name."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from peftkit.execution.children import python, spawn_context
from peftkit.files.safe_regex import fullmatches, searched
from peftkit_cli.deploy.programs import find_programs
from peftkit_server.grammars import check_grammar, json_grammar
from peftkit_server.tuning.grader_process import ProcessCode
from peftkit_studio.folder import Folder
from peftkit_studio.processes import Processes
from tests.helpers.command_line import ROOT, environment

OURS = ("peftkit", "peftkit_cli", "peftkit_server", "peftkit_studio")
NAMES = {
    name
    for name in (*sys.stdlib_module_names, *metadata.packages_distributions(), *OURS)
    if "/" not in name  # CUDA's wheels list folders
}


@pytest.fixture
def proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a file for every module of Python and of the installed packages.

    Returns the file to which an imported one adds its name.
    """
    folder, proof = tmp_path / "folder", tmp_path / "proof"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open({str(proof)!r}, 'a').write({name!r})\n")
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.chdir(folder)
    return proof


def run_python() -> None:
    code = "import queue, typer, peftkit_cli.app"
    subprocess.run(python("-c", code), check=True, capture_output=True)


def run_a_process() -> None:
    process = spawn_context().Process(target=os.getcwd)
    process.start()
    process.join()
    assert process.exitcode == 0


def run_a_pool() -> None:
    with ProcessPoolExecutor(1, spawn_context()) as pool:
        assert pool.submit(os.getpid).result() != os.getpid()


def run_studio() -> None:
    processes = Processes(Folder(Path.cwd()))
    processes.start("a", ["--version"])
    assert processes._running["a"].wait() == 0


def run_a_module() -> None:
    # Python itself imports these, before any line of peftkit
    code = "import runpy, pkgutil, sys; print(*sys.modules)"
    done = subprocess.run(python("-c", code), check=True, capture_output=True, text=True)
    for name in {"peftkit_cli", *done.stdout.split()} & NAMES:
        Path(f"{name}.py").unlink()
    command = [sys.executable, "-m", "peftkit_cli", "schema"]
    subprocess.run(command, check=True, capture_output=True)


def run_expressions() -> None:
    assert fullmatches("(a+)+b", ["aab"]) == ["aab"]
    assert searched([("(a+)+b", "aab")], 20.0) == [True]


def run_a_grader() -> None:
    Path("grader.py").write_text("import queue\ndef grade(a):\n    return 1.0")
    assert ProcessCode().load(f"{Path('grader.py').absolute()}:grade")({}) == 1.0


def run_a_grammar() -> None:
    pytest.importorskip("llguidance")
    check_grammar(json_grammar({"type": "object"}))


@pytest.mark.parametrize(
    "start",
    [
        *(run_python, run_a_process, run_a_pool, run_studio, run_a_module),
        *(run_expressions, run_a_grader, run_a_grammar, find_programs),
    ],
)
def test_no_file_of_the_working_folder_is_imported(start: Callable[[], object], proof: Path):
    start()
    assert not proof.exists(), proof.read_text()


def test_no_other_file_starts_a_python_that_is_not_isolated():
    """`deploy/programs.py` runs scripts by their path, and Pythons of other environments."""
    pattern = r'sys\.executable(?!, "-I")|get_context\(.(spawn|forkserver)|num_proc='
    found = {
        path.name
        for folder in ("peftkit", "cli")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(pattern, path.read_text("utf-8"))
    }
    assert found == {"programs.py", "children.py"}
