"""Tensors on the disk instead of in memory: pages of a file without a name, which goes with them.

What a process makes of a base that is larger than its memory lies there until it is written down.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peftkit.errors import OutputError
from peftkit.files import disk


class Spill:
    """A file that tensors are moved to; its pages live on when the context ends.

    Args:
        folder: On a disk with room for them all; it is made if need be.
    """

    def __init__(self, folder: Path) -> None:
        disk.writable_folder(folder)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._folder, self._end = folder, 0

    def __enter__(self) -> Spill:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same values, whose memory is the file's pages.

        Raises:
            OutputError: The disk is full.
        """
        if not tensor.numel():
            return tensor
        there = tensor.detach().cpu().contiguous()
        start, size = self._end, there.nbytes
        try:
            # not written by way of the pages: of a full disk these would only tell by a signal
            values: Any = there.view(-1).view(torch.uint8).numpy()
            left = memoryview(values)
            while left:
                left = left[os.pwrite(self._file.fileno(), left, start + size - len(left)) :]
        except OSError as error:
            raise OutputError(f"cannot write into {self._folder}.", found=str(error)) from error
        self._end = -(-(start + size) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        pages = mmap.mmap(self._file.fileno(), size, offset=start)
        return torch.frombuffer(pages, dtype=there.dtype).view(there.shape)
