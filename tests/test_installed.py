"""What `pip install` gives: a wheel and an sdist, in an environment without the checkout."""

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow
BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)


class Built(NamedTuple):
    wheel: Path
    sdist: Path


def build(kind: str, tree: Path, out: Path) -> Path:
    """Build an sdist or a wheel of a tree."""
    subprocess.run([sys.executable, "-c", BUILD, f"build_{kind}", out], cwd=tree, check=True)
    (made,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist of this tree, and the wheel that is built from the sdist alone."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("built")
    tree, out = folder / "tree", folder / "out"
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listing, cwd=ROOT, text=True).splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    sdist = build("sdist", tree, out)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return Built(build("wheel", unpacked, out), sdist)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment with the wheel; what peftkit needs comes from this one."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    where = {"base": str(folder), "platbase": str(folder)}
    scripts = Path(sysconfig.get_path("scripts", vars=where))
    # its own pip: that of this environment would replace the peftkit that is installed here
    pip = [scripts / "python", "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, built.wheel], check=True)
    needed = Path(sysconfig.get_path("purelib", vars=where)) / "needed.pth"
    needed.write_text(sysconfig.get_path("purelib"))
    return scripts


def call(*command: object, cwd: Path) -> str:
    """Run a command far from the checkout; return its output."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=kept, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_has_the_packages_recipes_types_and_extras(built):
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(wheel.read(about))
    recipes = {f"peftkit_cli/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    code = {
        path.relative_to(top).as_posix()
        for top in (ROOT, ROOT / "cli")
        for path in top.glob("peftkit*/**/*.py")
    }
    assert names >= recipes | code | {"peftkit/py.typed"}
    assert "peftkit_cli/recipes/examples/quickstart.py" in names
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]
    assert {"gguf", "images", "serve"} <= set(metadata.get_all("Provides-Extra"))


@pytest.mark.parametrize("way", ["script", "module"])
def test_the_command_works_without_a_checkout(way, installed, tmp_path):
    peftkit = {"script": ["peftkit"], "module": ["python", "-m", "peftkit_cli"]}[way]
    peftkit[0] = installed / peftkit[0]
    assert call(*peftkit, "--version", cwd=tmp_path).startswith("peftkit 0.")
    assert "quickstart" in call(*peftkit, "recipes", "ls", cwd=tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    init = ("init", "--data", "rows.jsonl", "--task", "causal_lm", "--model", "m")
    assert call(*peftkit, *init, "--memory", "cpu", cwd=tmp_path) == "recipe.yaml\n"


def test_the_installed_library_is_the_wheel(installed, tmp_path):
    code = "import peftkit; print(peftkit.__file__); print(peftkit.LoRA(rank=4).rank)"
    place, rank = call(installed / "python", "-c", code, cwd=tmp_path).splitlines()
    assert Path(place).is_relative_to(installed.parent)
    assert rank == "4"


def test_completions_work(installed, tmp_path, monkeypatch):
    monkeypatch.setenv("_PEFTKIT_COMPLETE", "source_bash")
    assert "complete_bash" in call(installed / "peftkit", cwd=tmp_path)
    monkeypatch.setenv("_PEFTKIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "peftkit tr")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert call(installed / "peftkit", cwd=tmp_path).split() == ["train"]
