"""The ranks of a run beside what they compute: equal settings, and one end for all.

A rank that waits for another in a collective waits forever if that one is gone or hangs, or fails
with an error that does not name the cause. So each rank sends a heartbeat through the launcher's
store every second, from a thread, and checks the others'. The first to fail notes it there, and
only that one prints a message. Values go through the store too, not through the process group,
whose timeout of minutes is shorter than a download of the base.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from peftkit.errors import ConfigError, OutputError, PeftkitError, RunError, silence
from peftkit.execution.environment import local_rank, world_size
from peftkit.files.disk import writable_folder
from peftkit.train.signals import Interrupted
from peftkit.train.world import World

HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, GRACE = 1.0, 40.0, 10.0
"""Seconds: between heartbeats; without one until a rank counts as gone; for a rank to end by itself
after another has ended."""
LONG = timedelta(days=2)
_runs = count()
"""The same in all processes: they do the same runs."""


@contextmanager
def monitored_ranks(device: Callable[[], torch.device]) -> Iterator[RankMonitor | None]:
    """Join the other processes that were launched, and end when one of them ends; None: none were.

    Args:
        device: Returns this process's.

    Raises:
        RunError: The processes do not find each other, or one is gone.
    """
    if world_size() < 2:
        yield None
        return
    monitor = RankMonitor(World(device()))
    stop = threading.Event()
    thread = threading.Thread(target=monitor.watch, args=(stop,), daemon=True)
    thread.start()
    try:
        yield monitor
    except Exception as error:
        raise monitor.final_error(error) from None
    finally:
        stop.set()
        thread.join()
        monitor.leave()


class RankMonitor:
    """Watches the ranks of a run.

    Attributes:
        is_first_here: Whether it is the first of its machine.
    """

    def __init__(self, ranks: World) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.is_first_here = local_rank() == 0
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix, self._asked = f"peftkit/{again}/{next(_runs)}", count()
        self._store = _connected(self._prefix)
        self._has_heard = self._has_lost = False

    def all_gather(self, own: Any) -> list[Any]:
        """Return every rank's value, as plain JSON, in rank order; waits for all."""
        name = f"said/{next(self._asked)}"
        self._store.set(f"{name}/{self.rank}", json.dumps(own))
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        self._store.wait(keys, LONG)
        return [json.loads(self._store.get(key)) for key in keys]

    def wait(self) -> None:
        """Wait until every process has come here, however long that takes."""
        self.all_gather(None)

    def check_equal_across_ranks(self, **own: Mapping[str, Any]) -> None:
        """Make sure that every rank has the same values under all names.

        Raises:
            ConfigError: They do not; lists what differs.
        """
        first, *others = self.all_gather(own)
        differing = [
            f"{kind}: {name} is {_short(first[kind].get(name))} in process 0 and "
            f"{_short(other[kind].get(name))} in process {rank}"
            for rank, other in enumerate(others, 1)
            for kind in own
            for name in sorted(first[kind].keys() | other[kind].keys())
            if first[kind].get(name) != other[kind].get(name)
        ]
        if differing:
            raise ConfigError(
                "ranks have different settings",
                found="\n".join(differing[:8]),
                fix="Give all of them the same recipe, files and versions.",
            )

    def check_shared(self, folder: Path) -> None:
        """Make sure that all processes see one folder.

        Raises:
            OutputError: They do not, or it is not writable.
        """
        mark = folder / f".{self.all_gather(secrets.token_hex(8))[0]}"
        if self.rank == 0:
            writable_folder(folder)
            mark.touch()
        try:
            self.wait()
            seen = self.all_gather(mark.exists())
        finally:
            if self.rank == 0:
                mark.unlink()
        if not all(seen):
            blind = ", ".join(str(rank) for rank, sees in enumerate(seen) if not sees)
            raise OutputError(
                f"the output folder {folder} is not the same for all processes.",
                found=f"What process 0 writes there is not seen by process {blind}.",
                fix="Give --out a folder that all machines share, by its whole path.",
            )

    def final_error(self, error: Exception) -> Exception:
        """Return the error to end with; it is silent if another rank has printed one."""
        if not isinstance(error, PeftkitError | Interrupted) and _is_lost(error):
            error, self._has_lost = _gone("another process", str(error)), True
        if not self._is_first_to_end():
            silence(error)
        return error

    def leave(self) -> None:
        """Leave; rank 0, which may host the store, waits until the others have heard of the end."""
        until = time.monotonic() + (0 if self._has_lost else 3 * HEARTBEAT_INTERVAL)
        try:
            self._store.set(f"heard/{self.rank}", "")
            keys = [f"heard/{rank}" for rank in range(self.world_size)]
            while self.rank == 0 and time.monotonic() < until and not self._store.check(keys):
                time.sleep(HEARTBEAT_INTERVAL / 10)
        except RuntimeError:
            return  # the store is gone

    def _is_first_to_end(self) -> bool:
        own = str(self.rank)
        if self._has_heard:
            return False
        try:
            return self._store.compare_set("ended", "", own).decode() == own
        except RuntimeError:  # the store went with the process that had it, which was the first
            return self.rank == 1

    def watch(self, stop: threading.Event) -> None:
        """Send heartbeats until told to stop; end this process if another has ended."""
        store = _connected(self._prefix)  # the process's own may be waiting
        began = time.monotonic()
        seen = {rank: ("", began) for rank in range(self.world_size) if rank != self.rank}
        ended, beats = float("inf"), 0
        while not stop.wait(HEARTBEAT_INTERVAL):
            beats, now = beats + 1, time.monotonic()
            try:
                store.set(f"alive/{self.rank}", str(beats))
                for rank, (before, _) in seen.items():
                    key = f"alive/{rank}"
                    sign = store.get(key).decode() if store.check([key]) else ""
                    if sign != before or sign == "done":
                        seen[rank] = sign, now
                if store.check(["ended"]):
                    store.set(f"heard/{self.rank}", "")
                    ended, self._has_heard = min(ended, now), True
            except RuntimeError:
                ended = min(ended, now)
            gone = [str(rank) for rank, (_, at) in seen.items() if now - at > HEARTBEAT_TIMEOUT]
            if gone and now < ended and self._is_first_to_end():
                error = _gone(f"process {', '.join(gone)} of {self.world_size}", "")
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if gone or now - ended > GRACE:
                os._exit(RunError.exit_code)
        try:
            store.set(f"alive/{self.rank}", "done")
        except RuntimeError:
            return  # nobody is left to read it


def _connected(prefix: str) -> Any:
    """Return a connection of one's own to the store where the processes have found each other."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    stores: Any = dist  # which does not declare them
    return stores.PrefixStore(prefix, stores.TCPStore(host, port, is_master=False))


def _is_lost(error: Exception) -> bool:
    """Tell whether an error is that of talking to another process."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _gone(who: str, found: str) -> RunError:
    return RunError(
        f"{who} terminated unexpectedly.",
        found="It was killed, or its machine or the network is gone."
        + (f" {_short(found)}" if found else ""),
        fix="Its own output may say more. Go on from the newest checkpoint with --resume.",
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 100 else f"{text[:97]}..."
