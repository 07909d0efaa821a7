"""What the reference says of every row: computed once, before training, and kept with the run.

The reference is the model in another state: without its adapter, or with the values that it had.
Each row's values are kept under a hash of its tokens and of what the reference is made of, so that
a file of another run, base or data simply does not have them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.data.pack import View, tokens_of_each
from peftkit.data.rows import row_digest
from peftkit.errors import PeftkitError
from peftkit.events import Notice, Progress, Stage
from peftkit.execution.parallel import Part
from peftkit.execution.signals import Interrupted
from peftkit.files.tensors import read_tensors, write_tensors
from peftkit.model.modes import evaluating
from peftkit.tasks.base import Reference, Run
from peftkit.tasks.batches import batches_that_fit

FILE = "reference_log_probs.safetensors"
KEYS, VALUES = "keys", "values"
BATCH_SIZE = 8
"""Rows at once; as inference they need a part of what a step needs."""
FIX = "Lower data.max_length, or quantise the base."


Values = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
"""Returns (rows, 2) of a batch: the log-probabilities of the answers of each row."""


class ReferenceValues:
    """What the reference says of rows.

    Args:
        collate: Makes a batch of rows, without reference values in it.
        values: What is computed of a batch.
    """

    def __init__(self, collate: Callable[[Sequence[Any]], dict[str, Tensor]], values: Values):
        self._collate, self._values = collate, values
        self._reference = ""
        self._keys = torch.empty(0, dtype=torch.int64)  # in order, 16 bytes a row with its values
        self._known = torch.empty(0, 2)

    def of(self, rows: Sequence[Any]) -> Tensor | None:
        """Return (rows, 2); None where one of them is not known yet."""
        keys = torch.tensor([_key(self._reference, row) for row in rows])
        places, known = _found(self._keys, keys)
        return self._known[places] if bool(known.all()) else None

    @torch.no_grad()
    def compute(
        self, model: nn.Module, reference: Reference, batch: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the values of one batch now."""
        with evaluating(model), reference.state():
            return self._values(model, batch)

    def find(self, reference: Reference, run: Run) -> None:
        """Know all rows of a run: as the run's file says, computed where that does not.

        Raises:
            Interrupted: A signal came; what was computed is kept.
        """
        world, rows = run.world, run.all_rows
        each = torch.tensor(array("q", (_key(reference.key, row) for row in rows)))
        keys, places = each.unique(return_inverse=True)
        numbers = torch.arange(len(rows))
        first = torch.full_like(keys, len(rows)).scatter_reduce(0, places, numbers, "amin")
        values, known = torch.zeros(len(keys), 2), torch.zeros(len(keys), dtype=torch.bool)
        path = run.config.output_dir / FILE
        if reference.key and world.is_main:
            values, known = _kept(path, keys)
        values = world.sum(values.to(world.device)).cpu()
        known = world.sum(known.float().to(world.device)).cpu() > 0
        missing = (~known).nonzero().flatten()
        if len(missing):
            run.say(Stage(f"Asking the reference about {len(missing):,} rows"))
            computed = self._missing(reference, View([rows], first[missing]), run)
            values[missing], known[missing] = computed[:, :2], computed[:, 2] > 0
            if reference.key and world.is_main:
                _keep(path, keys[known], values[known], run)
        if not bool(known.all()):
            raise Interrupted(
                run.stop.signum,
                "stopped before the first step; what the reference said so far is kept.",
            )
        self._reference, self._keys, self._known = reference.key, keys, values

    def _missing(self, reference: Reference, rows: View, run: Run) -> Tensor:
        """Return (rows, 3): values, and 1 where there are any, computed by all processes."""
        model, world = run.model, run.world
        order = tokens_of_each(rows).sort(descending=True, stable=True).indices
        places = order[world.rank :: world.world_size]
        own = View([rows], places)
        values, done = torch.zeros(len(rows), 3, device=world.device), 0

        def compute(part: Part) -> Tensor:
            batch = {name: tensor.to(world.device) for name, tensor in self._collate(part).items()}
            with world.autocast():
                return self._values(model, batch)

        with evaluating(model), reference.state():
            for part, some, is_own in batches_that_fit(
                own, BATCH_SIZE, _split, compute, parallel=run.parallel, fix=FIX
            ):
                if is_own:
                    index = places[done : done + len(part)].to(world.device)
                    values[index, :2], values[index, 2] = some.float(), 1.0
                    done += len(part)
                    run.say(Progress("Asking the reference", done, len(own)))
                if run.stop.signum and world.world_size == 1:
                    break
        return world.sum(values).cpu()  # the only wait for the device


def _split(rows: Sequence[Any], size: int) -> list[Part]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _key(reference: str, row: Any) -> int:
    told = f"{reference} {row_digest(row)}".encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little", signed=True)


def _found(sorted_keys: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return where among sorted keys others stand, and which of them do."""
    if not len(sorted_keys):
        return torch.zeros_like(keys), torch.zeros_like(keys, dtype=torch.bool)
    places = torch.searchsorted(sorted_keys, keys).clamp(max=len(sorted_keys) - 1)
    return places, sorted_keys[places] == keys


def _kept(path: Path, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values (rows, 2) that a file holds under keys, and which (rows,) it has."""
    nothing = torch.zeros(len(keys), 2), torch.zeros(len(keys), dtype=torch.bool)
    if not path.is_file():
        return nothing
    try:
        saved = read_tensors(path)
        there, kept = saved[KEYS], saved[VALUES]
    except (PeftkitError, KeyError):  # damaged: it is computed again
        return nothing
    is_whole = there.dtype == torch.int64 and kept.shape == (len(there), 2)
    if not is_whole or there.ndim != 1 or not bool(torch.isfinite(kept).all()):
        return nothing
    there, order = there.sort()
    places, known = _found(there, keys)
    return torch.where(known[:, None], kept[order][places].float(), 0.0), known


def _keep(path: Path, keys: Tensor, values: Tensor, run: Run) -> None:
    """Write what is known; a disk that refuses costs the file, not the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors({KEYS: keys, VALUES: values}, path)
    except (PeftkitError, OSError) as problem:
        run.say(Notice(f"{path} was not written; a resume asks again. {problem}"))
