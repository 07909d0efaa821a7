"""Functions run in other processes, to be killed there."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

# One process that has imported the slow libraries and never used them; children are forked off it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "accelerate.tracking",
        "pytest",
        "transformers.models.llama",
        "peftkit.run",
        "peftkit_cli.app",
        "tests.helpers.sharded",
        "tests.helpers.toy",
    ]
)
SECONDS = 200


def start(function: Callable[..., object], *args: Any, **environment: str) -> BaseProcess:
    """Start a function of a test module in a new process."""
    child = CONTEXT.Process(target=_run, args=(function, args, environment), daemon=True)
    child.start()
    return child


def start_ranks(
    function: Callable[..., object], *args: Any, world: int = 2, **environment: str
) -> list[BaseProcess]:
    """Start a function in each process of a run, as `accelerate launch` does on one machine."""
    port = free_port()
    return [
        start(
            function,
            *args,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            **environment,
        )
        for rank in range(world)
    ]


def exit_code(child: BaseProcess, seconds: float = SECONDS) -> int | None:
    """Wait for a child and return its exit code; minus the signal that killed it."""
    child.join(seconds)
    if child.is_alive():
        child.kill()
        raise AssertionError(f"still alive after {seconds} s")
    return child.exitcode


def free_port() -> str:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _run(
    function: Callable[..., object], args: tuple[Any, ...], environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    torch.set_num_threads(1)
    function(*args)
