"""Latency of a server with sixteen concurrent clients, for prompts and completions of mixed
lengths.

    python -m benchmarks.serving                            # peftkit serve with an adapter
    python -m benchmarks.serving --peers PEERS/bin/python   # and transformers serve, the base alone

Each client streams one completion after another; all servers receive the same requests in the same
order. The table has tokens (received chunks) per second, the time to the first chunk, and the
processor time of the server and its children per token, which is more stable than wall time on a
shared machine. `--command` measures any other server with OpenAI's API and the model `--model`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple
from urllib.request import Request, urlopen

import psutil

from benchmarks.generation import random_adapter
from benchmarks.limits import Sizes, limits
from benchmarks.orders import make_rows
from benchmarks.report import table
from peftkit.base.load import load_base
from peftkit.base.locate import locate
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance

WAIT = 600
"""Time limit for a server's start, in seconds."""


class Answered(NamedTuple):
    """A completion: seconds to its first chunk, and the number of chunks."""

    first: float
    num_pieces: int


def ask(url: str, model: str, text: str, num_new: int) -> Answered:
    """Stream one answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": num_new,
        "temperature": 0,
        "stream": True,
    }
    headers = {"Content-Type": "application/json"}
    start, first, number = perf_counter(), 0.0, 0
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=WAIT) as lines:
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            choices = json.loads(line[6:]).get("choices")
            if choices and choices[0].get("delta", {}).get("content"):
                first = first or perf_counter() - start
                number += 1
    return Answered(first, number)


@contextmanager
def server(command: str) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server; yield its address, once it responds, and its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen(shlex.split(command.format(port=port)), stdout=subprocess.DEVNULL) as run:
        url, end = f"http://127.0.0.1:{port}", perf_counter() + WAIT
        try:
            while not _answers(f"{url}/health"):
                if run.poll() is not None or perf_counter() > end:
                    raise SystemExit(f"it does not start: {command}")
                time.sleep(0.5)
            yield f"{url}/v1/chat/completions", psutil.Process(run.pid)
        finally:
            run.terminate()


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5):
            return True
    except OSError:  # not listening yet, or loading its model
        return False


def processor_time(process: psutil.Process) -> float:
    """Return the processor seconds of a process and its children."""
    everyone = [process, *process.children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in everyone)


def share(args: argparse.Namespace, texts: list[str], num_new: int, seconds: float) -> str:
    """Return the time at the machine's limits, measured now, as a share of the seconds."""
    base, best = load_base(args.base, dtype="fp32"), limits()
    prompts = [len(base.tokenizer(text)["input_ids"]) for text in texts]
    sizes = Sizes.of(base.model, args.rank)
    least = sizes.answer_seconds(prompts, num_new, args.clients, best, "fp32")
    limit = f"the machine's limit in this run: {best.show()}"
    return f"{limit}; our answers came at {least / seconds:.0%} of it"


def ours(args: argparse.Namespace, folder: Path) -> str:
    """Return the command of peftkit's server, with an adapter that changes the output."""
    base = load_base(args.base, dtype="fp32")
    known = Provenance(base=args.base, fingerprint=base.fingerprint, loading={"dtype": "fp32"})
    save_adapter(random_adapter(base.model, args.rank), folder / "adapter", known)
    return (
        f"{sys.executable} -m peftkit_cli serve {args.model}={folder / 'adapter'} --port {{port}}"
    )


def theirs(args: argparse.Namespace) -> tuple[str, str]:
    """Return the command of transformers' own server, and the name of the model there."""
    folder = locate(args.base).source
    program = Path(args.peers).with_name("transformers")
    return f"{program} serve {folder} --port {{port}} --dtype float32", folder


class Asked(NamedTuple):
    """The requests to each server: prompts, lengths of completions, number of clients."""

    texts: list[str]
    lengths: list[int]
    num_clients: int


def measure(name: str, command: str, model: str, asked: Asked) -> tuple[tuple[str, ...], float]:
    """Return a server's row, and the seconds of its completions."""
    with server(command) as (url, process):
        ask(url, model, "Hello", 2)  # warm
        begun, before = perf_counter(), processor_time(process)
        with ThreadPoolExecutor(asked.num_clients) as clients:
            pairs = zip(asked.texts, asked.lengths, strict=True)
            jobs = [clients.submit(ask, url, model, *pair) for pair in pairs]
            found = [job.result() for job in jobs]
        seconds, spent = perf_counter() - begun, processor_time(process) - before
    pieces = sum(one.num_pieces for one in found)
    waits = sorted(one.first for one in found)
    first = (f"{median(waits):.1f} s", f"{waits[-1]:.1f} s")
    rate = f"{pieces / seconds:.1f}"
    return (name, str(pieces), rate, *first, f"{1000 * spent / pieces:.1f}"), seconds


def main() -> int:
    """Measure a server, or two, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default="smollm2-135m")
    parser.add_argument("--peers", help="python of an environment with transformers[serving]")
    parser.add_argument("--command", help="of another server, with {port}")
    parser.add_argument("--model", default="adapter")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("--longest", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    number = args.clients * args.requests
    with tempfile.TemporaryDirectory() as folder:
        lines = make_rows(Path(folder), number).read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["instruction"] * (1 + n % 4) for n, line in enumerate(lines)]
        lengths = [args.longest * (1 + 5 * n % 8) // 8 for n in range(number)]
        asked = Asked(texts, lengths, args.clients)
        name, command = args.command or "peftkit serve", args.command or ours(args, Path(folder))
        row, seconds = measure(name, command, args.model, asked)
        rows, told = [row], "" if args.command else share(args, texts, int(row[1]), seconds)
        if args.peers:
            rows.append(measure("transformers serve", *theirs(args), asked)[0])
    head = ("server", "tokens", "tokens/s", "first token, median", "worst", "processor ms a token")
    print(table(head, rows))
    print(told)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
