"""Clients' grader functions, called in a process that ends at a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from peftkit.execution.children import python
from peftkit.tasks.user_code import UserCode, file_of

_CHILD = """
import importlib.util, json, os, sys
path, name, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3])
try:
    import resource
except ImportError:  # Windows
    pass
else:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
reply = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # the function may print
try:
    spec = importlib.util.spec_from_file_location("client_grader", path)
    module = sys.modules["client_grader"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    value = getattr(module, name)(*json.load(sys.stdin))
    is_number = isinstance(value, (int, float))
    answer = {"value": value if is_number else f"{value!r:.80}"}
except BaseException as error:
    answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
reply.write(json.dumps(answer))
"""
MAX_REPLY = 1 << 16
"""Most characters of a reply that are parsed."""


class ProcessCode(UserCode):
    """Loads functions like `UserCode`; a call runs in a process, which ends at its time limit."""

    def load(self, use: str, seconds: float | None = None) -> Callable[..., object]:
        """Return a function that calls one of the user's functions in a process."""
        return partial(_call, file_of(use), use.rpartition(":")[2], seconds or 60.0)


def _call(path: Path, name: str, seconds: float, *arguments: object) -> Any:
    process = subprocess.Popen(
        python("-c", _CHILD, str(path), name, str(int(seconds) + 1)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=path.parent,
        start_new_session=True,
    )
    try:
        data = json.dumps(arguments).encode()
        reply, _ = process.communicate(data, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"It took longer than {seconds:g} seconds.") from None
    finally:
        _end(process)
    try:
        answer = json.loads(reply[:MAX_REPLY])
    except ValueError:
        raise RuntimeError(f"its process ended with status {process.returncode}") from None
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["value"]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants."""
    with suppress(OSError):
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
