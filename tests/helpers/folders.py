"""Rows written as JSON Lines, and JSON files with changed fields."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_rows(file: Path, rows: Iterable[object]) -> str:
    """Write JSON Lines; return the file's name."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def change_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
