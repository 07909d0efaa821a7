"""The processes of a run, over accelerate: one alone, or several under `accelerate launch`.

Before a run they compare their settings. When a process dies, the launcher stops those of its
machine; others fail in their next collective, on the lost connection or after PATIENCE.

The model is not wrapped in DistributedDataParallel: adapters are small, so their gradients are
summed once per step, in one buffer. A process may then take its own number of micro-batches (after
running out of memory, or of rows in a small last group), and a task may call any part of the model.
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

from peftkit.errors import ConfigError, OutputError, PeftkitError, RunError, silence
from peftkit.execution.environment import default_device, local_rank, world_size
from peftkit.files.disk import writable_folder

PATIENCE = timedelta(hours=4)
"""Timeout of a collective: the main process may generate, or pack a base, for longer than NCCL's
default of ten minutes."""


class World:
    """This process among all.

    Args:
        device: Where the model is.

    Raises:
        RunError: The model is not on the device that the launcher gave this process.
    """

    def __init__(self, device: torch.device) -> None:
        from accelerate import Accelerator  # slow to import
        from accelerate.utils import InitProcessGroupKwargs

        launched = world_size()
        # Without cpu=True, accelerate on a machine without GPU would let each process train alone.
        self._accelerator = Accelerator(
            cpu=device.type == "cpu" and launched > 1,
            gradient_accumulation_steps=1,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
        )
        self.rank = self._accelerator.process_index
        self.world_size = self._accelerator.num_processes
        self.device = device
        self._check(launched)

    def _check(self, launched: int) -> None:
        device = self._accelerator.device
        if self.world_size != launched:
            raise RunError(
                f"{launched} processes were launched, and accelerate has joined {self.world_size}",
                fix="Launch with: accelerate launch --num_processes N -m peftkit_cli train ...",
            )
        same = device.type == self.device.type and (device.type == "cpu" or device == self.device)
        if self.world_size > 1 and not same:
            raise RunError(
                f"process {self.rank} of {self.world_size} has its model on the wrong device",
                found=f"It is on {self.device}; accelerate gives this process {device}.",
            )

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and emits events."""
        return self.rank == 0

    @property
    def is_first_here(self) -> bool:
        """Whether this is the first process of its machine."""
        return local_rank() == 0

    @property
    def precision(self) -> str | None:
        """The launcher's mixed precision, "bf16" or "fp16"; None without."""
        precision = str(self._accelerator.mixed_precision)
        return None if precision == "no" else precision

    def autocast(self) -> AbstractContextManager[None]:
        """Return a context with the launcher's mixed precision, if any."""
        return self._accelerator.autocast()

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.world_size == 1:
            return tensor
        return self._accelerator.reduce(tensor, reduction="sum")

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Replace each gradient by its sum over all processes."""
        if self.world_size == 1:
            return
        total = self.sum(torch.cat([gradient.reshape(-1).float() for gradient in gradients]))
        parts = total.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def broadcast_parameters(self, tensors: Iterable[Tensor]) -> None:
        """Copy the main process's values into the tensors of all processes."""
        if self.world_size > 1:
            for tensor in tensors:
                tensor.data.copy_(self.from_main(tensor.data))

    def from_main(self, tensor: Tensor) -> Tensor:
        """Return the main process's tensor on this tensor's device; shapes are equal on all."""
        if self.world_size == 1:
            return tensor
        from accelerate.utils import broadcast

        sent = tensor.to(self.device, copy=True)
        broadcast(sent, from_process=0)
        return sent.to(tensor.device)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the vectors of all processes on the CPU: (world_size, length)."""
        if self.world_size == 1:
            return tensor.cpu()[None]
        gathered: Tensor = self._accelerator.gather(tensor.to(self.device))
        return gathered.cpu().view(self.world_size, -1)

    def max(self, value: int) -> int:
        """Return the largest value of all processes."""
        return int(self.gather(torch.tensor([value], device=self.device)).max())

    def all_gather(self, value: Any) -> list[Any]:
        """Return every process's value, in the order of ranks; waits for all."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def check_equal_across_ranks(self, **settings: Mapping[str, Any]) -> None:
        """Check that every rank has the same settings.

        Raises:
            ConfigError: Lists what differs.
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
                "ranks have different settings",
                found="\n".join(differing[:8]),
                fix="Give all of them the same recipe, files and versions.",
            )
            raise self.of_all(error)

    def check_shared(self, folder: Path) -> None:
        """Check that all processes see the same folder.

        Raises:
            OutputError: They do not, or it is not writable.
        """
        if self.world_size == 1:
            return
        mark = folder / f".{self.all_gather(secrets.token_hex(8))[0]}"
        if self.is_main:
            writable_folder(folder)
            mark.touch()
        try:
            self.wait()
            seen = self.all_gather(mark.exists())
        finally:
            if self.is_main:
                mark.unlink()
        if not all(seen):
            blind = ", ".join(str(rank) for rank, sees in enumerate(seen) if not sees)
            error = OutputError(
                f"the output folder {folder} is not the same for all processes.",
                found=f"What process 0 writes there is not seen by process {blind}.",
                fix="Give --out a folder that all machines share, by its whole path.",
            )
            raise self.of_all(error)

    def of_all(self, error: PeftkitError) -> PeftkitError:
        """Return an error that every process raises and the main one prints."""
        if not self.is_main:
            silence(error)
        return error

    def wait(self) -> None:
        """Wait for all processes.

        By a sum on this process's device: accelerate's barrier names a device by its LOCAL_RANK,
        which is not there where each process sees one GPU alone.
        """
        self.max(0)


@contextmanager
def joined_ranks() -> Iterator[World]:
    """Join the processes that were launched together, each on its device.

    Raises:
        RunError: They do not find each other, or one is gone.
    """
    world = World(default_device())
    try:
        yield world
        world.wait()  # others may still read from a process that leaves first
    except PeftkitError:
        raise
    except Exception as error:
        # a lost connection is a plain RuntimeError from gloo, which only its message names
        if world.world_size == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise RunError(
            "another process terminated unexpectedly.",
            found=f"It was killed, or its machine or the network is gone. {_short(error)}",
            fix="Its own output may say more. Go on from the newest checkpoint with --resume.",
        ) from None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 100 else f"{text[:97]}..."
