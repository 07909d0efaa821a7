"""Commands that the page starts. Each is a process that outlives the page and its server.

A process runs the command that the page shows, as a shell in the folder would. Therefore runs that
were started in a terminal can be stopped and resumed as well.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from peftkit.execution.children import python
from peftkit.files.disk import CLOCK_SECONDS, started_at, trainer_of, write_json
from peftkit_server.refusals import RequestError
from peftkit_studio.folder import Folder

MAX_PROCESSES = 8
LOG_BYTES, SHORT_LOG_BYTES = 64_000, 1_000
"""Bytes of a log in its view, and in the list of processes."""
LOST = -1
"""Exit code of a process that ended while no server watched it."""


class Processes:
    """The processes that this server or an earlier one started in a folder."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, arguments: Sequence[str]) -> dict[str, Any]:
        """Start `peftkit ARGUMENTS` in the folder, with its output in a log.

        Raises:
            RequestError: The process of this name runs, or too many run.
        """
        self.refuse_running(name)
        if len(self._running) >= MAX_PROCESSES:
            raise RequestError(f"{MAX_PROCESSES} processes run already.", status=429)
        with open(self._log_file(name), "wb") as log:
            process = subprocess.Popen(
                python("-m", "peftkit_cli", *arguments),
                cwd=self.folder.path,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the server's terminal does not reach it
                env=_environment(),
            )
        self._running[name] = process
        facts = {"command": command_line(arguments), "pid": process.pid, "began": time.time()}
        write_json({**facts, "code": None}, self._facts_file(name))
        return self.get(name)

    def refuse_running(self, name: str) -> None:
        """Raise RequestError if the process of this name runs."""
        if self._pid(name) is not None:
            raise RequestError(f"{name} is already running.", status=409, code="is_running")

    def _pid(self, name: str) -> int | None:
        """Return the id of a running process, which may be of an earlier server; None: it ended."""
        process = self._running.get(name)
        if process is not None:
            return process.pid if process.poll() is None else None
        with suppress(OSError, ValueError, KeyError):
            facts = self.get(name, 0)
            return int(facts["pid"]) if facts["code"] is None else None
        return None

    def poll(self) -> None:
        """Record the exit codes of processes that have ended."""
        for name, process in list(self._running.items()):
            if process.poll() is not None:
                del self._running[name]
                facts = json.loads(self._facts_file(name).read_bytes())
                write_json({**facts, "code": process.returncode}, self._facts_file(name))

    def get(self, name: str, log_bytes: int = LOG_BYTES) -> dict[str, Any]:
        """Return name, command, pid, start, exit code (None: it runs) and end of the log."""
        facts = json.loads(self._facts_file(name).read_bytes())
        if facts["code"] is None and name not in self._running:
            started = started_at(facts["pid"])
            if started is None or started > facts["began"] + CLOCK_SECONDS:
                facts["code"] = LOST
        text = ""
        with suppress(OSError), open(self._log_file(name), "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - log_bytes))
            text = log.read().decode("utf-8", "replace")
        return {"name": name, **facts, "log": text}

    def all(self) -> list[dict[str, Any]]:
        """Return all processes, with short logs."""
        names = sorted(path.stem for path in (self.folder.path / ".studio").glob("*.json"))
        found = []
        for name in names:
            with suppress(OSError, ValueError, KeyError):  # a damaged file hides one process only
                found.append(self.get(name, SHORT_LOG_BYTES))
        return found

    def stop(self, run_folder: Path, name: str) -> None:
        """Ask a run to save and stop after its current step, wherever it was started.

        Raises:
            RequestError: No process of this machine and user trains there.
        """
        trainer = trainer_of(run_folder)
        # without a trainer, the process has not begun to train
        pid = trainer.pid if trainer is not None and trainer.is_local else self._pid(name)
        if pid is None:
            raise RequestError(f"{name} is not running on this machine.", status=409)
        try:
            os.kill(pid, signal.SIGTERM)
        except OSError as error:
            raise RequestError(f"cannot stop {name}.", found=str(error), status=409) from None

    def _log_file(self, name: str) -> Path:
        return self.folder.path / ".studio" / f"{name}.log"

    def _facts_file(self, name: str) -> Path:
        return self.folder.path / ".studio" / f"{name}.json"


def command_line(arguments: Sequence[str]) -> str:
    """Return a command in the syntax of a shell."""
    return shlex.join(["peftkit", *arguments])


def _environment() -> dict[str, str]:
    """Return the environment of commands; they do not need the key of the page."""
    kept = {name: value for name, value in os.environ.items() if name != "PEFTKIT_API_KEY"}
    return {**kept, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
