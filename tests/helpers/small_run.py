"""A recipe of a few steps over a tiny model, for tests of the services around a run."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peftkit.recipe import Recipe
from tests.helpers.command_line import turn
from tests.helpers.folders import write_rows

ROWS = [turn(f"what is {n}?", f"the {word} {n}") for n in range(2) for word in ("fox", "dog")]


def small_recipe(folder: Path, model: Path, **train: Any) -> Recipe:
    """Return a recipe of four steps with evaluations, whose run goes to `folder/run`."""
    rows = write_rows(folder / "rows.jsonl", ROWS)
    return Recipe(
        base={"model": str(model), "dtype": "fp32"},
        method={"type": "lora", "rank": 2, "targets": ["q", "v"]},
        data={"train": str(rows), "eval": str(rows), "max_length": 64, "packing": False},
        train={
            "output_dir": folder / "run",
            "max_steps": 4,
            "batch_size": 2,
            "eval_every": 2,
            "save_every": 1,
            **train,
        },
    )


def logged(folder: Path, event: str) -> list[dict[str, Any]]:
    """Return the lines of one kind of event in a run's metrics.jsonl."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


@contextmanager
def service(command: Sequence[str], url: str, folder: Path, **environment: str) -> Iterator[None]:
    """Run another program's server until the block ends; wait until `url` responds."""
    with open(folder / "service.log", "wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=log,
            stderr=log,
            env=os.environ | environment,
            start_new_session=True,
        )
        try:
            _wait_for(url, process, folder / "service.log")
            yield
        finally:
            os.killpg(process.pid, 15)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no response of {url}: {log.read_text()}")
