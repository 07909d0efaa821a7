"""Runs in separate processes, whose peak memory is the run's.

A worker is started as `python -m benchmarks.workers.NAME JOB`, possibly in another environment. It
reads the job (JSON) and prints a last line of JSON: its measurements (see meter.py), or that memory
ran out.

Keys of a job: source (folder of a model) or shape (see benchmarks/shapes.py), num_layers, dtype,
quantize, rank, device, task, rows, batch_size, learning_rate, cold (without compiled code of
earlier runs), output, and further settings of one worker.
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
    """A worker failed; holds the end of its output."""


def work(
    worker: str,
    job: Mapping[str, Any],
    folder: Path,
    *,
    python: str = sys.executable,
    seconds: float | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """Run a worker on a job; return its measurements, or {"failed": why} if memory or time ran out.

    Args:
        worker: Name of a file in this folder.
        folder: For the job and the worker's files; a run's output is deleted afterwards.
        python: Interpreter of the environment with the worker's libraries.
        seconds: Time limit.
        processes: Number of processes of torchrun; the first one prints the measurements.

    Raises:
        WorkerFailed: It failed for another reason than memory or time.
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
    """Run a command in a new process group; return its exit code, stdout and stderr.

    A time limit, Ctrl-C or SIGTERM ends all processes of the group.
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
        os.killpg(process.pid, signal.SIGKILL)  # not reaped yet: the number is still valid
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return process.returncode, out, err
