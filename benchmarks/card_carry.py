"""Pack missing packages for a machine without a network into one folder below 64 MiB.

The folder goes on that machine's PYTHONPATH.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

PACKAGES = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "bitsandbytes")
"""Packages that training imports and a machine with torch and transformers often lacks."""
MOST_BYTES = 64 << 20


def is_needed(name: str, cuda: str) -> bool:
    """Return whether a wheel's file is needed: of bitsandbytes' libraries only one CUDA version.

    Args:
        cuda: Version of CUDA without a dot, as 130.
    """
    path = PurePosixPath(name)
    if path.parts[0] != "bitsandbytes" or path.suffix not in {".so", ".dll", ".dylib"}:
        return "tests" not in path.parts
    return path.name in {"libbitsandbytes_cpu.so", f"libbitsandbytes_cuda{cuda}.so"}


def download(packages: Sequence[str], python: str, folder: Path) -> None:
    """Fetch wheels for 64-bit Linux into a folder, by pip."""
    asked = ["--only-binary=:all:", "--no-deps", "--python-version", python, "--dest", str(folder)]
    for platform in ("manylinux2014_x86_64", "manylinux_2_24_x86_64", "manylinux_2_28_x86_64"):
        asked += ["--platform", platform]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *asked, *packages]
    subprocess.run(command, check=True)


def carry(target: Path, packages: Sequence[str], python: str, cuda: str) -> int:
    """Unpack packages into a folder; return its bytes.

    Raises:
        ValueError: They take more than MOST_BYTES.
    """
    wheels = target / "wheels"
    wheels.mkdir(parents=True)
    download(packages, python, wheels)
    for wheel in sorted(wheels.iterdir()):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if is_needed(name, cuda):
                    archive.extract(name, target)
        wheel.unlink()
    wheels.rmdir()
    total = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    if total > MOST_BYTES:
        raise ValueError(
            f"{target} has {total >> 20} MiB, more than {MOST_BYTES >> 20}. Name fewer packages."
        )
    return total
