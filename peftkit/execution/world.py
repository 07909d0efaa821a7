"""The processes of a run, through accelerate, and how they share its rows.

A run has a single process, or several under `accelerate launch`.

Before a run, the processes compare their settings. If a process dies, the launcher stops the others
on its machine; processes on other machines fail in their next collective, because the connection is
lost or after PATIENCE.

The model is not wrapped in DistributedDataParallel: adapters are small, so their gradients are
summed once per step, in one buffer. Processes may therefore run different numbers of micro-batches
(after an out-of-memory error, or for a small last batch), and a task may call any module of the
model.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from peftkit.errors import (
    ConfigError,
    EndedTogetherError,
    OutputError,
    PeftkitError,
    RunError,
    silence,
)
from peftkit.execution.environment import local_rank, select_device, world_size
from peftkit.execution.out_of_memory import is_out_of_memory, one_line
from peftkit.files.disk import writable_folder

PATIENCE = timedelta(hours=4)
"""Timeout of a collective: the main process may generate or pack a base for longer than NCCL's
default of ten minutes."""


class World:
    """The rank of this process, and collectives over all processes.

    Args:
        device: The device of the model.

    Raises:
        RunError: The launcher assigned another device to this process.
    """

    def __init__(self, device: torch.device) -> None:
        from accelerate import Accelerator  # slow to import
        from accelerate.utils import InitProcessGroupKwargs

        launched = world_size()
        # Without cpu=True, processes on a machine without a GPU would train separately.
        self._accelerator = Accelerator(
            cpu=device.type == "cpu" and launched > 1,
            gradient_accumulation_steps=1,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
        )
        self.rank = self._accelerator.process_index
        self.world_size = self._accelerator.num_processes
        self.device = device
        if self.world_size != launched:
            raise RunError(
                f"{launched} processes were launched, but accelerate has joined {self.world_size}.",
                fix="Launch with: accelerate launch --num_processes N -m peftkit_cli train ...",
            )
        assigned = self._accelerator.device
        is_same = assigned.type == device.type and (device.type == "cpu" or assigned == device)
        if self.world_size > 1 and not is_same:
            raise RunError(
                f"process {self.rank} of {self.world_size} has its model on the wrong device.",
                found=f"It is on {device}; accelerate assigned {assigned} to this process.",
            )

    @property
    def is_main(self) -> bool:
        """Whether this process has rank 0, writes files and emits events."""
        return self.rank == 0

    @property
    def is_first_here(self) -> bool:
        """Whether this is the first process on its machine."""
        return local_rank() == 0

    @property
    def precision(self) -> str | None:
        """The mixed precision of the launcher, "bf16" or "fp16", if any."""
        precision = str(self._accelerator.mixed_precision)
        return None if precision == "no" else precision

    def autocast(self) -> AbstractContextManager[None]:
        """Return a context with the mixed precision of the launcher, if any."""
        return self._accelerator.autocast()

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.world_size == 1:
            return tensor
        return self._accelerator.reduce(tensor, reduction="sum")

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Replace each gradient with its sum over all processes."""
        if self.world_size == 1:
            return
        total = self.sum(torch.cat([gradient.reshape(-1).float() for gradient in gradients]))
        parts = total.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def broadcast_parameters(self, tensors: Iterable[Tensor]) -> None:
        """Copy the values of rank 0 into the tensors of all processes."""
        if self.world_size > 1:
            for tensor in tensors:
                tensor.data.copy_(self.from_main(tensor.data))

    def from_main(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor on the device of `tensor`; all ranks have equal shapes."""
        if self.world_size == 1:
            return tensor
        from accelerate.utils import broadcast

        buffer = tensor.to(self.device, copy=True)
        broadcast(buffer, from_process=0)
        return buffer.to(tensor.device)

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather a vector of all processes on the CPU: (world_size, length)."""
        if self.world_size == 1:
            return tensor.cpu()[None]
        gathered: Tensor = self._accelerator.gather(tensor.to(self.device))
        return gathered.cpu().view(self.world_size, -1)

    def max(self, value: int) -> int:
        """Return the maximum over all processes."""
        return int(self.gather(torch.tensor([value], device=self.device)).max())

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in the order of ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def check_equal_across_ranks(self, **settings: Mapping[str, Any]) -> None:
        """Check that all ranks have the same settings.

        Raises:
            ConfigError: Settings differ; the error lists them.
        """
        first, *others = self.all_gather(settings)
        differing = [
            f"{kind}: {name} is {_short(first[kind].get(name))} in process 0 and "
            f"{_short(other[kind].get(name))} in process {rank}"
            for rank, other in enumerate(others, 1)
            for kind in settings
            for name in sorted(first[kind].keys() | other[kind].keys())
            if first[kind].get(name) != other[kind].get(name)
        ]
        if differing:
            error = ConfigError(
                "the processes have different settings.",
                found="\n".join(differing[:8]),
                fix="Give all processes the same recipe, files and versions.",
            )
            raise self.of_all(error)

    def check_shared(self, folder: Path) -> None:
        """Check that all processes see the same folder.

        Raises:
            OutputError: They do not, or the folder is not writable.
        """
        probe = folder / f".{self.all_gather(secrets.token_hex(8))[0]}"
        if self.is_main:
            writable_folder(folder)
            probe.touch()
        try:
            self.wait()
            visible = self.all_gather(probe.exists())
        finally:
            if self.is_main:
                probe.unlink()
        if not all(visible):
            ranks = ", ".join(
                str(rank) for rank, is_visible in enumerate(visible) if not is_visible
            )
            error = OutputError(
                f"the output folder {folder} is not the same for all processes.",
                found=f"A file that process 0 writes there is not visible to process {ranks}.",
                fix="Give --out the absolute path of a folder that all machines share.",
            )
            raise self.of_all(error)

    def of_all(self, error: PeftkitError) -> PeftkitError:
        """Return an error that all processes raise and only rank 0 prints."""
        if not self.is_main:
            silence(error)
        return error

    def wait(self) -> None:
        """Wait for all processes, with a reduction on this process's device.

        The barrier of accelerate picks a device by LOCAL_RANK, which does not exist if each process
        sees one GPU.
        """
        self.max(0)


@contextmanager
def joined_ranks() -> Iterator[World]:
    """Join the launched processes, each on its device.

    Raises:
        RunError: The processes cannot connect, or one has terminated.
    """
    world = World(select_device())
    try:
        yield world
        world.wait()  # other processes may still read from this one
    except PeftkitError:
        raise
    except Exception as error:
        # a lost connection is a plain RuntimeError from gloo, which only its message names
        if world.world_size == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise RunError(
            "another process terminated unexpectedly.",
            found=f"It was killed, or its machine or the network failed. {_short(error)}",
            fix="See its output. Continue from the newest checkpoint with --resume.",
        ) from None


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 100 else f"{text[:97]}..."


Rows = Sequence[Any]
"""Encoded rows of a task."""
Part = Rows
"""Rows of one forward pass (a micro-batch)."""


class Parallel:
    """Data parallelism: processes have different rows and any number of forward passes.

    `Lockstep` overrides this class for sharded weights, where all processes must run the same
    number of forward passes.

    Attributes:
        in_lockstep: Whether every forward pass needs all processes.
    """

    in_lockstep = False

    def __init__(self, world: World) -> None:
        self.world = world

    def align(self, parts: Sequence[Part]) -> list[tuple[Part, bool]]:
        """Return the micro-batches of this process, each with whether it counts.

        The others are padding that keeps the processes in lockstep. All processes must call this.
        """
        return [(part, True) for part in parts]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run independent work of the processes; an error in one is raised in all.

        Otherwise the other processes would hang in the next collective.

        Raises:
            EndedTogetherError: On all processes, if there are several and one failed.
        """
        if self.world.world_size == 1:
            yield
            return
        error = None
        try:
            yield
        except Exception as problem:
            error = problem
        if not self.world.max(error is not None):
            return
        failures = self.world.all_gather(None if error is None else _error_fields(error))
        rank, (message, reason, fix) = next(
            (n, fields) for n, fields in enumerate(failures) if fields
        )
        reason = f"In process {rank} of {len(failures)}. {reason}".rstrip()
        raise self.world.of_all(EndedTogetherError(message, found=reason, fix=fix)) from error

    def ran_out(self, error: Exception) -> bool:
        """Return whether memory ran out and this process may continue with smaller batches.

        Raises:
            RunError: Memory ran out, and the other processes depend on this one.
        """
        return is_out_of_memory(error)


def _error_fields(error: Exception) -> tuple[str, str, str]:
    """Return the problem, `found` and `fix` of an error."""
    if isinstance(error, PeftkitError):
        return error.problem, error.found, error.fix
    if is_out_of_memory(error):
        fix = "Use fewer or shorter answers, base.quantize: nf4, or a smaller base."
        return "memory ran out", one_line(error), fix
    return "a step failed", one_line(error), ""
