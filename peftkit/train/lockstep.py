"""Passes of the model that all processes make together.

Where each keeps a part of the weights, or of a row's tokens, a pass gathers the others'. So all
processes have to run the model equally often, and the same parts of it: a batch with images runs
the vision tower too. Who has fewer batches of a kind runs a short row of that kind, from which
nothing is learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any

import torch

from peftkit.data.lengths import num_tokens
from peftkit.errors import RunError
from peftkit.train.world import World

LOOKED_AT = 1000
"""Rows of which the shortest is taken, where all are of one kind."""

Part = Sequence[Any]
Pass = tuple[Part, bool]
"""Rows that go through the model at once, and whether they are this process's own."""


class LockstepForward:
    """Keeps the processes of a run in step.

    Args:
        bucket_key: As `Task.bucket_key`.
        rows: Those of the run, the same on every process; one of each kind at least.

    Attributes:
        needed: Whether processes depend on each other in every pass.
    """

    def __init__(
        self, ranks: World, bucket_key: Callable[[Any], Any], *rows: Sequence[Any], needed: bool
    ) -> None:
        self._ranks, self._bucket_key, self.needed = ranks, bucket_key, needed
        self._idle: dict[Any, Part] = {}
        if not needed:
            return
        is_one = bucket_key(rows[0][0]) is None
        for row in islice(rows[0], LOOKED_AT) if is_one else chain(*rows):
            known = self._idle.get(bucket_key(row))
            if known is None or num_tokens(row) < num_tokens(known[0]):
                self._idle[bucket_key(row)] = [row]

    def ordered(self, parts: Sequence[Part]) -> list[Part]:
        """Return parts in the order of their kinds, which is the same on all processes."""
        if not self.needed:
            return [*parts]
        return sorted(parts, key=lambda part: str(self._bucket_key(part[0])))

    def padded_passes(self, parts: Sequence[Part]) -> list[Pass]:
        """Return this process's ordered parts, and between them what it runs for the others.

        All processes have to ask.
        """
        if not self.needed:
            return [(part, True) for part in parts]
        kinds = sorted(self._idle, key=str)
        own = {kind: [(p, True) for p in parts if self._bucket_key(p[0]) == kind] for kind in kinds}
        counts = torch.tensor([len(own[kind]) for kind in kinds], device=self._ranks.device)
        most = self._ranks.gather(counts).amax(0).tolist()
        found: list[Pass] = []
        for kind, number in zip(kinds, most, strict=True):
            found += own[kind] + [(self._idle[kind], False)] * (number - len(own[kind]))
        return found

    def out_of_memory(self) -> RunError:
        """Return the error of a process that cannot go on, nor be left out."""
        return RunError(
            "memory ran out on one process, and the others wait for it in every pass",
            fix="Lower train.tokens_per_batch or train.batch_size, or set "
            "train.gradient_checkpointing: true.",
        )
