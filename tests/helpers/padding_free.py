"""Rows without padding, packed or with a shared prefix, and their task."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.data.pack import Row
from peftkit.settings import DataConfig
from peftkit.tasks.tokens import CausalLM, TokenTask
from tests.helpers.families import ARCHITECTURES, VOCAB
from tests.helpers.hybrids import FURTHER, HYBRIDS, RECENT

MODELS = {**ARCHITECTURES, **FURTHER, **HYBRIDS, **RECENT}


def row_of(*lengths: int) -> Row:
    ids = [3 + (7 * n + 5 * sum(lengths)) % (VOCAB - 3) for n in range(sum(lengths))]
    firsts = {sum(lengths[:n]) for n in range(len(lengths))}
    labels = [-100 if n in firsts or n % 3 == 1 else token for n, token in enumerate(ids)]
    return Row(tuple(ids), tuple(labels), lengths, f"row of {lengths}")


def with_prefix(row: Row, other: Row, length: int) -> Row:
    """Return a row that begins as another one does."""
    ids = (*other.input_ids[:length], *row.input_ids[length:])
    return replace(
        row, input_ids=ids, labels=tuple(i if n % 3 else -100 for n, i in enumerate(ids))
    )


ROWS = [row_of(9), row_of(25), row_of(4), row_of(17)]
PACKED = [row_of(9, 11), row_of(25), row_of(4, 2, 3)]
FIRST = row_of(9)


SHARED_PREFIXES = [
    *(
        FIRST,
        with_prefix(row_of(25), FIRST, 6),
        with_prefix(row_of(17), FIRST, 6),
        row_of(4),
        FIRST,
    ),
    *(with_prefix(row_of(20), row_of(4), 4), with_prefix(row_of(25), FIRST, 2)),
]
"""Five begin with two tokens, four with six; one is there twice, one is how another begins."""


def task_on(model: nn.Module, tokenizer: Any, packing: bool = False) -> CausalLM:
    return CausalLM(model, tokenizer, DataConfig(train="", max_length=32, packing=packing))


def loss_and_gradients(
    task: TokenTask, model: nn.Module, batch: Any
) -> tuple[Tensor, list[Tensor | None]]:
    loss = task.loss(model, batch)[0]
    own = [p for p in model.parameters() if p.requires_grad]
    return loss.detach(), list(torch.autograd.grad(loss, own, allow_unused=True))


def assert_same(
    task: TokenTask, model: nn.Module, rows: Any, field: str = "grid_tokens"
) -> dict[str, str]:
    """Compare a padding-free batch with its padded rows; return the paths of the former.

    Args:
        field: Entry of the padding-free batch.
    """
    with task.training(model):
        paths, batch = task.paths, task.collate(rows)
        assert field in batch
        if field == "grid_tokens" and task.layout.share:
            assert batch["input_ids"].numel() == (num_distinct(rows) // 16 + 1) * 16
        loss, gradients = loss_and_gradients(task, model, batch)
    wanted, expected = loss_and_gradients(task, model, task.collate(rows))
    # float32 sums in another order
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-4)
    for a, b in zip(gradients, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            atol = 2e-4 * float(b.abs().max()) + 1e-6
            torch.testing.assert_close(a, b, rtol=1e-3, atol=atol)
    return paths


def num_distinct(rows: Sequence[Row]) -> int:
    """Return how many prefixes the rows' documents have."""
    prefixes = set()
    for row in rows:
        start = 0
        for length in row.lengths:
            prefixes |= {row.input_ids[start : start + n + 1] for n in range(length)}
            start += length
    return len(prefixes)
