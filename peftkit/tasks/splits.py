"""The rows to learn from and the rows to measure on, as a recipe's data section says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peftkit.data.lazy_rows import LazyRows, weighted
from peftkit.data.load import DataConfig
from peftkit.errors import DataError
from peftkit.tasks.protocol import Task


def load_splits(task: Task, data: DataConfig) -> tuple[LazyRows, Sequence[Any]]:
    """Return the training rows and the eval rows.

    Raises:
        DataError: Rows cannot be used; or the share that is held out is none or all of them.
    """
    sources, share = data.sources, data.eval
    if isinstance(share, str) or share is None:
        trained = [(task.load(source.path), source.weight) for source in sources]
        held = [task.load(share)] if share else []
    else:
        parts = [task.split(source.path, share) for source in sources]
        trained = [(rows, source.weight) for (rows, _), source in zip(parts, sources, strict=True)]
        held = [out for _, out in parts]
        for what, count in (
            ("held out", sum(map(len, held))),
            ("left to learn from", sum(len(rows) for rows, _ in trained)),
        ):
            if not count:
                raise DataError(
                    f"data.eval: {share} is no share of {data.train_name}.",
                    found=f"No row is {what}.",
                    fix="Take another share, or name a file.",
                )
    return weighted(trained), weighted([(rows, 1.0) for rows in held]) if held else []
