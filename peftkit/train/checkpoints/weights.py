"""What a checkpoint holds of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import nn

from peftkit.errors import CheckpointError
from peftkit.files.disk import read_tensors, write_tensors


class Weights(Protocol):
    """What a checkpoint holds of the model, and how: an adapter's files, for example."""

    def save(self, folder: Path) -> None:
        """Write files into an existing folder."""

    def load(self, folder: Path) -> None:
        """Take back, to the bit, what `save` wrote."""


class TrainableWeights:
    """A model's trainable parameters as one safetensors file."""

    FILE = "weights.safetensors"

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def save(self, folder: Path) -> None:
        """Write weights.safetensors."""
        write_tensors({n: p.data for n, p in self._parameters.items()}, folder / self.FILE)

    def load(self, folder: Path) -> None:
        """Read weights.safetensors; CheckpointError lists all that does not fit."""
        saved = read_tensors(folder / self.FILE, error=CheckpointError)
        own = self._parameters
        problems = [f"missing: {name}" for name in own.keys() - saved.keys()]
        problems += [f"unexpected: {name}" for name in saved.keys() - own.keys()]
        problems += [
            f"{name} is {saved[name].dtype} {tuple(saved[name].shape)}, "
            f"not {own[name].dtype} {tuple(own[name].shape)}"
            for name in own.keys() & saved.keys()
            if (saved[name].shape, saved[name].dtype) != (own[name].shape, own[name].dtype)
        ]
        if problems:
            raise CheckpointError(
                f"the weights in {folder} do not fit this model", found="\n".join(sorted(problems))
            )
        for name, parameter in own.items():
            parameter.data.copy_(saved[name])
