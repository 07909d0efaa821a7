"""Changes to files of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def change_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
