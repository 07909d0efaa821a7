"""Rows written as JSON Lines; JSON files with changed fields; files with changed tensors."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def write_rows(file: Path, rows: Iterable[object]) -> str:
    """Write JSON Lines; return the file's name."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all files of a model's folder."""
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def change_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a file in place."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
