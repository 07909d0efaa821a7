"""The meter of all workers: the same clock, the same peak memory.

Requires only torch, because it also runs in the peers' environments.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.report import versions


def read_job() -> dict[str, Any]:
    """Return the job that this process was started for."""
    return json.loads(Path(sys.argv[1]).read_text())


def device_of(job: dict[str, Any]) -> torch.device:
    """Return the device; cap the process's GPU memory if the job sets a cap."""
    name = job.get("device", "auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and job.get("cap_gb"):
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job["cap_gb"] * 1e9 / total))
    return device


class Meter:
    """Measures the time of a training run since the start of its process.

    On a shared machine, a job with `clock: cpu` measures the process's CPU time.

    Args:
        started: When the process was started, by time.time().
    """

    def __init__(self, job: dict[str, Any], device: torch.device) -> None:
        self._clock = time.process_time if job.get("clock") == "cpu" else time.time
        self.device, self._started = device, 0.0 if job.get("clock") == "cpu" else job["started"]
        self._steps: list[float] = []
        self._began = 0.0
        self._own = 0

    def init_from(self) -> None:
        """Note that the training call begins."""
        self._began = self._clock()

    def step(self) -> None:
        """Note that an optimizer step is over."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._steps.append(self._clock())
        self._own = max(self._own, status("RssAnon"))

    def finish(self, losses: list[float], model: nn.Module, **more: Any) -> None:
        """Print the measurements, with the maximum of sizes over processes, at the end of a worker.

        seconds: time of the training call; whole_seconds: since the process was started;
            first_step: by the latter clock. step_seconds: times between steps. own_bytes: maximum
            of anonymous memory (RssAnon) after a step.
        """
        ended = self._clock()
        sizes = largest({**peak(self.device), "own_bytes": self._own, **held(model)})
        if os.environ.get("RANK", "0") != "0":
            return  # in peftkit only the first process receives events
        times = [self._began, *self._steps]
        facts = {
            "seconds": self._steps[-1] - self._began,
            "whole_seconds": ended - self._started,
            "first_step_seconds": self._steps[0] - self._started,
            "step_seconds": [b - a for a, b in itertools.pairwise(times)],
            "losses": losses,
            "num_trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "versions": versions(),
            **sizes,
            **more,
        }
        print("\n" + json.dumps(facts), flush=True)


def largest(sizes: dict[str, int]) -> dict[str, int]:
    """Return the largest of each size, of all processes that train together."""
    several = torch.distributed.is_initialized()
    told = [sizes] * (torch.distributed.get_world_size() if several else 1)
    if several:
        torch.distributed.all_gather_object(told, sizes)
    return {name: max(each[name] for each in told) for name in sizes}


def held(model: nn.Module) -> dict[str, int]:
    """Return the bytes of parameters that this process keeps: base_bytes and trained_bytes."""
    sizes = {"base_bytes": 0, "trained_bytes": 0}
    for parameter in model.parameters():
        own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        kind = "trained_bytes" if parameter.requires_grad else "base_bytes"
        sizes[kind] += own.numel() * own.element_size()
    return sizes


def peak(device: torch.device) -> dict[str, int]:
    """Return peak_bytes: memory allocated by torch on a GPU, otherwise the process's peak.

    The latter is VmHWM, which starts at zero with each program: ru_maxrss also counts the memory of
    the parent when it started this process.
    """
    if device.type == "cuda":
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        }
    high = status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak_bytes": high}


def status(name: str) -> int:
    """Return a value in bytes from Linux's status of this process; 0 if it is missing."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


@contextmanager
def telling_of_memory() -> Iterator[None]:
    """Turn an error that means "memory ran out" into {"failed": ...}; others pass."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
            raise
        print("\n" + json.dumps({"failed": f"out of memory: {error}"[:500]}), flush=True)
