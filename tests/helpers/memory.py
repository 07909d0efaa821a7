"""Memory that runs short, and limits small enough for tiny models."""

from typing import Any

import pytest
import torch

from peftkit.execution import plan
from peftkit.kernels import cross_entropy

SIGN = "CUDA out of memory. Tried to allocate 2.00 GiB"


def limit_memory(model: Any, rows: int, tokens: int = 1 << 30, after: int = 0) -> None:
    """Have a model fail for more rows or tokens at once, after some passes."""
    passes = 0

    def refuse(_: object, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        nonlocal passes
        passes += 1
        ids = inputs["input_ids"]
        if passes > after and (len(ids) > rows or ids.numel() > tokens):
            raise torch.OutOfMemoryError(SIGN)

    model.register_forward_pre_hook(refuse, with_kwargs=True)


def use_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the loss of a few rows in several chunks."""
    for name, value in (("MIN_ROWS", 3), ("ALIGNMENT", 2)):
        monkeypatch.setattr(cross_entropy, name, value)
    for name in ("CPU_CHUNK_BYTES", "GPU_CHUNK_BYTES"):
        monkeypatch.setattr(plan, name, 0)
