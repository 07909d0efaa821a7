"""One run each, in a process of its own, so that peak memory is the run's alone.

A worker is started as `python -m benchmarks.workers.NAME JOB`, possibly in another environment. It
reads the job (JSON) and prints one line of JSON last: what it measured (see meter.py), or that
memory ran out.

What a job holds: source (folder of a model) or shape (see benchmarks/shapes.py), num_layers, dtype,
quantize, rank, device, task, rows, batch_size, learning_rate, cold (nothing compiled before is
found again), output, and what is one worker's own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


class WorkerFailed(Exception):
    """A worker broke; carries the end of what it said."""


def work(
    worker: str,
    job: Mapping[str, Any],
    folder: Path,
    *,
    python: str = sys.executable,
    seconds: float | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """Run a worker on a job; return what it measured, or {"failed": why} if memory or time ran out.

    Args:
        worker: Name of a file beside this one.
        folder: For the job and what the worker writes; a run's output is deleted afterwards.
        python: Of the environment that has the worker's libraries.
        seconds: Time limit.
        processes: How many train together, by torchrun; the first one tells what it measured.

    Raises:
        WorkerFailed: It broke for another reason than memory or time.
    """
    output, file = folder / f"{worker}-output", folder / f"{worker}.json"
    file.write_text(json.dumps({**job, "output": str(output), "started": time.time()}))
    settings = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | job.get("environ", {})
    if job.get("cold"):
        settings["TORCHINDUCTOR_CACHE_DIR"] = str(output / "inductor")
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "-m"]
    launched = launcher if processes > 1 else []
    command = [python, "-m", *launched, f"benchmarks.workers.{worker}", str(file)]
    try:
        code, out, err = run_group(command, os.environ | settings, seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {seconds:.0f} s"}
    finally:
        shutil.rmtree(output, ignore_errors=True)
    lines = out.decode(errors="replace").strip().splitlines()
    if code == -signal.SIGKILL:
        return {"failed": "killed: out of memory"}
    if code != 0 or not lines:
        said = err.decode(errors="replace")[-3000:]
        raise WorkerFailed(f"{worker} failed ({code}):\n{said}")
    return json.loads(lines[-1])


def run_group(
    command: Sequence[str], environ: Mapping[str, str], seconds: float | None
) -> tuple[int, bytes, bytes]:
    """Run a command in a process group of its own; return its exit code, stdout and stderr.

    Whatever ends the wait (a time limit, Ctrl-C, SIGTERM) also ends all processes of the group.
    """
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # not reaped yet: the number is still its own
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return process.returncode, out, err
