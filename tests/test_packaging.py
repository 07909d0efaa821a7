"""What pyproject.toml says agrees with what lies in the tree."""

import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from shutil import which
from typing import Any

import pytest

tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")

ROOT = Path(__file__).parent.parent


@pytest.fixture
def pyproject() -> dict[str, Any]:
    loaded: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return loaded


def test_every_package_is_packed(pyproject):
    found = {
        ".".join(init.parent.relative_to(top.parent).parts)
        for top in (ROOT / "peftkit", *(ROOT / "cli").glob("peftkit_*"))
        for init in top.rglob("__init__.py")
    }
    assert set(pyproject["tool"]["setuptools"]["packages"]) == found | {
        "peftkit_cli.recipes",
        "peftkit_cli.recipes.examples",
    }


def test_every_file_that_code_reads_is_packed(pyproject):
    told = pyproject["tool"]["setuptools"]["package-data"]
    for top in (ROOT / "peftkit", *(ROOT / "cli").glob("peftkit_*")):
        for path in top.rglob("*.*"):
            if path.suffix not in (".py", ".pyc"):
                patterns = told[".".join(path.relative_to(top.parent).parent.parts)]
                assert any(path.match(pattern) for pattern in patterns), path


def test_the_container_has_all_that_the_package_is_built_from(pyproject):
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line.split()[0] for line in lines[:2]] == ["ARG", "FROM"]
    known = {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "ENTRYPOINT", "CMD"}
    assert {line.split()[0] for line in lines} == known
    copied = {name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]}
    shown = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line.removeprefix("!") for line in shown if line.startswith("!")} == copied
    tops = {
        Path(place).parts[0] for place in pyproject["tool"]["setuptools"]["package-dir"].values()
    }
    assert copied == {"peftkit", *tops, "constraints.txt", "pyproject.toml", "README.md", "LICENSE"}
    (extras,) = (line.partition("=")[2] for line in lines if line.startswith("ARG EXTRAS"))
    assert set(extras.split(",")) <= set(pyproject["project"]["optional-dependencies"])


def test_the_container_compiles_what_triton_compiles(tmp_path):
    if which("gcc") is None:
        pytest.skip("there is no C compiler")
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if "Python.h" in line and line[:3] == "RUN")
    assert "apt-get install -y --no-install-recommends g++" in line
    # without the packages, which this machine has
    command = line[line.index("echo ") :].replace("/tmp/", f"{tmp_path}/")
    script = command.replace(" && rm ", " && ls ").replace("python3 -c", f"{sys.executable} -c")
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "helper.so").is_file()


def test_run_time_dependencies_are_the_agreed_ones(pyproject):
    names = {re.split(r"[<>=]", text)[0] for text in pyproject["project"]["dependencies"]}
    assert names == {
        "torch", "transformers", "bitsandbytes", "accelerate", "datasets", "huggingface_hub",
        "safetensors", "pydantic", "PyYAML", "typer", "rich",
    }  # fmt: skip


def test_constraints_pin_versions_that_pyproject_allows(pyproject):
    requirements = pytest.importorskip("packaging.requirements")
    project = pyproject["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    allowed = {r.name: r.specifier for r in map(requirements.Requirement, lines)}
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for line in pinned:
        if line.startswith("#"):
            continue
        pin = requirements.Requirement(line)
        (version,) = (specifier.version for specifier in pin.specifier)
        assert allowed[pin.name].contains(version), line
    assert "torch==2.13.0" in pinned


def test_the_oldest_constraints_are_the_floors_of_pyproject(pyproject):
    requirements = pytest.importorskip("packaging.requirements")
    project = pyproject["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    floors = {r.name: str(r.specifier) for r in map(requirements.Requirement, lines)}
    text = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8")
    pins = dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))
    assert set(pins) >= {re.split("[<>=]", text)[0] for text in project["dependencies"]}
    for name in set(pins) - {"click"}:
        floor = floors[name].removeprefix(">=")
        assert f"{pins[name]}.".startswith(f"{floor}."), name


def test_ci_runs_the_tests_and_builds_the_guide():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = script.read_text(encoding="utf-8").splitlines()
    assert commands == [
        *("#!/bin/sh", "set -eu", 'cd "$(dirname "$0")/.."'),
        *("make test", "exec make docs"),
    ]


def test_the_workflow_tests_each_system_as_make_does():
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert {"test", "studio", "clone", "oldest", "newest", "all", "lint"} == set(jobs)
    systems = jobs["test"]["strategy"]["matrix"]["os"]
    assert [name.split("-")[0] for name in systems] == ["ubuntu", "windows", "macos"]
    told = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ('-m "not slow"', "ruff check .", "ruff format --check .", "mypy"):
        assert command in told
        assert command in makefile
    for file in re.findall(r"tests/\S+\.py", told):
        assert (ROOT / file).is_file()


def make(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run make without the variables of a make that runs the tests."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    variables.pop("UPGRADE", None)
    command = ["make", *words]
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("target", ["test", "quickstart", "lint"])
def test_make_refuses_an_old_python_with_a_message(target, tmp_path):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text(encoding="utf-8"))
    for name in ("pyproject.toml", "constraints.txt", "constraints-oldest.txt"):
        (tmp_path / name).touch()
    done = make(target, "PYTHON=false", folder=tmp_path)
    assert done.returncode == 2
    assert "peftkit needs Python 3.11 or newer" in done.stdout
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("versions", "code", "text"),
    [
        ("oldst", 2, "VERSIONS is 'oldst'; it must be oldest, newest, or empty"),
        ("oldest", 0, "install -qq --disable-pip-version-check -c constraints-oldest.txt"),
        ("newest", 0, "--upgrade --upgrade-strategy eager"),
    ],
)
def test_make_installs_the_requested_versions(versions, code, text):
    done = make("--dry-run", "test", f"VERSIONS={versions}")
    assert done.returncode == code
    assert text in done.stdout + done.stderr


def test_a_release_is_published_without_tokens(pyproject, tmp_path):
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert "secrets." not in text
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    assert jobs["pypi"]["permissions"] == {"id-token": "write"}
    (publish,) = (step for step in jobs["pypi"]["steps"] if "pypi-publish" in step["uses"])
    assert "with" not in publish, "a trusted publisher needs no password"
    assert jobs["pypi"]["needs"] == "build"
    assert jobs["github"]["needs"] == ["pypi", "image"]
    (check,) = (s["run"] for s in jobs["build"]["steps"] if s.get("name", "").startswith("The tag"))
    for tag, code in ((f"v{pyproject['project']['version']}", 0), ("v9.9.9", 1)):
        variables = os.environ | {"GITHUB_REF_NAME": tag}
        assert subprocess.run(["bash", "-c", check], cwd=ROOT, env=variables).returncode == code
