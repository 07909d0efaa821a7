"""Programs that compile for NVIDIA's cards on a machine without one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
CARDS = (75, 80, 86, 89, 90, 120)
"""Compute capabilities: T4; A100; RTX 3090; RTX 4090; H100 and H200; RTX 5090."""


MOST_REGISTERS = 64
"""Of a thread: with more a multiprocessor holds fewer than half of its threads."""


def output_of(program: str, *args: str, **environment: str) -> Any:
    """Return what a program prints last, as JSON."""
    known = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment}
    done = subprocess.run(
        [sys.executable, "-c", program, *args], env=known, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
