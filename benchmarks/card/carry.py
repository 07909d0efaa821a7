"""Prepare a folder for a machine without a network: packages, rows, and a checkpoint if requested.

The folder goes on that machine's PYTHONPATH. Its packages take less than 64 MiB. Without a
checkpoint that machine writes the same random weights itself.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from benchmarks.card.disk import checkpoint_of, rows_of_chat, write_rows
from benchmarks.card.job import Job
from benchmarks.workers import ROOT

PACKAGES = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "bitsandbytes")
"""Packages that training imports and a machine with torch and transformers often lacks."""
PLATFORMS = ("manylinux1", "manylinux2014", *(f"manylinux_2_{n}" for n in (17, 24, 27, 28, 31, 34)))
MOST_BYTES = 64 << 20
WHEELS, ROWS, CHECKPOINT, PROJECT = "wheels.txt", "rows.jsonl", "checkpoint", "project.tar.gz"
"""Files of the folder: the wheels, and how to carry the packages of the peers; this code."""
PEER_COMMANDS = (
    "# The peers, for a machine with torch and transformers, each in a folder for PYTHONPATH:",
    "# python -m benchmarks.card --carry PEERS --packages trl peft liger-kernel datasets dill "
    "xxhash multiprocess bitsandbytes",
    "# python -m benchmarks.card --carry UNSLOTH --packages unsloth unsloth_zoo trl==1.15.0 peft "
    "datasets==4.8.4 dill xxhash multiprocess bitsandbytes tyro json5 hf_transfer diffusers "
    "torchao cut_cross_entropy msgspec structlog nest-asyncio docstring_parser shtab typeguard "
    "xformers pydantic pydantic-core annotated-types typing-inspection",
)


def is_needed(name: str, cuda: str) -> bool:
    """Return whether a wheel's file is needed: of bitsandbytes' libraries only one CUDA version.

    Args:
        cuda: Version of CUDA without a dot, as 130.
    """
    path = PurePosixPath(name)
    if path.parts[0] != "bitsandbytes" or path.suffix not in {".so", ".dll", ".dylib"}:
        return not {"tests", "studio"} & set(path.parts)
    return path.name in {"libbitsandbytes_cpu.so", f"libbitsandbytes_cuda{cuda}.so"}


def download(packages: Sequence[str], python: str, folder: Path) -> None:
    """Fetch wheels for 64-bit Linux into a folder, by pip."""
    asked = ["--only-binary=:all:", "--no-deps", "--python-version", python, "--dest", str(folder)]
    for platform in PLATFORMS:
        asked += ["--platform", f"{platform}_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *asked, *packages]
    subprocess.run(command, check=True)


def carry(target: Path, packages: Sequence[str], python: str, cuda: str) -> int:
    """Unpack packages into a folder, with this code and a list of their wheels; return its bytes.

    Raises:
        ValueError: They take more than MOST_BYTES.
    """
    wheels = target / "wheels"
    wheels.mkdir(parents=True)
    download(packages, python, wheels)
    names = sorted(wheel.name for wheel in wheels.iterdir())
    (target / WHEELS).write_text("\n".join([*names, *PEER_COMMANDS, ""]), encoding="utf-8")
    for wheel in sorted(wheels.iterdir()):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if is_needed(name, cuda):
                    archive.extract(name, target)
        wheel.unlink()
    wheels.rmdir()
    archive = ["git", "archive", "--output", str((target / PROJECT).resolve()), "HEAD"]
    subprocess.run(archive, cwd=ROOT, check=True)
    total = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    if total > MOST_BYTES:
        raise ValueError(
            f"{target} has {total >> 20} MiB, more than {MOST_BYTES >> 20}. Name fewer packages."
        )
    return total


def carry_run(target: Path, job: Job, *, with_weights: bool) -> list[str]:
    """Write the rows of runs from the checkpoint, and the checkpoint; return the options for them.

    Args:
        with_weights: Whether to write the checkpoint, 16 GB for an 8B shape.
    """
    rows = [{"input_ids": ids} for ids in rows_of_chat(job)]
    write_rows(target / ROWS, rows)
    options = ["--rows", f"{target.name}/{ROWS}"]
    if with_weights:
        checkpoint_of(replace(job, checkpoint=target / CHECKPOINT))
        options += ["--checkpoint", f"{target.name}/{CHECKPOINT}"]
    return options
