"""A base's own weights, beside those of a file that should be the same model."""

from __future__ import annotations

import torch
from torch import Tensor

from peftkit.errors import BaseError, MergeError
from peftkit.files import disk
from peftkit.formats.shards import Shards
from peftkit.merging.stream import on_disk
from peftkit.methods.protocol import AdapterModule
from peftkit.model.places import is_conv1d

SAME = 0.8
"""How far quantising may take a weight from the original, relative to its size: a twelfth in 4
bits, a third in 2. Another model's, or rows in another order, are off by more than 1."""


class Originals:
    """Compares weights with those of the base, one at a time.

    Args:
        base: Its name, for messages. shards: Its weights; None where they are not on this machine.
        force: Accept others.

    Attributes:
        largest: The largest relative difference so far; None before the first.
    """

    def __init__(self, base: str, shards: Shards | None, force: bool) -> None:
        self.base, self.shards, self.force = base, shards, force
        self.largest: float | None = None

    def compare(self, module: AdapterModule, parameter: str, weight: Tensor) -> None:
        """Compare a weight as its module multiplies, (out, in), in float32.

        Raises:
            MergeError: It is another one.
        """
        name = f"{module.site.path}.{parameter}"
        original = self._read(name, transposed=is_conv1d(module.base))
        if original is None or original.shape != weight.shape:
            return
        size = float(torch.linalg.vector_norm(original))
        difference = float(torch.linalg.vector_norm(weight - original)) / size if size else 0.0
        self.largest = max(difference, self.largest or 0.0)
        if not difference <= SAME and not self.force:
            raise MergeError(
                f"the file does not hold the weights of {self.base}",
                found=f"{name} differs by {difference:.2f} of its size",
                fix="Give the GGUF of the base that the adapter was trained on, or accept this one "
                "with --force.",
            )

    def _read(self, name: str, *, transposed: bool) -> Tensor | None:
        if self.shards is None or (own := on_disk(name, self.shards.entries)) is None:
            return None
        for file, header in self.shards.headers.items():
            if own in header.tensors:
                with disk.open_tensors(self.shards.folder / file, error=BaseError) as opened:
                    tensor = opened.tensor(own).float()
                return tensor.t() if transposed and tensor.ndim == 2 else tensor
        return None
