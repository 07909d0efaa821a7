"""What a bare machine lacks, in one folder to put on its PYTHONPATH, of less than 64 MiB."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

PACKAGES = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "bitsandbytes")
"""What a machine with torch and transformers often lacks of what training imports."""
MOST_BYTES = 64 << 20


def is_needed(name: str, cuda: str) -> bool:
    """Return whether a file of a wheel is needed: of bitsandbytes' libraries one kind of CUDA's.

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
