"""What the reference says of every row: computed once, before training, and kept with the run.

The reference is the model in another state: without its adapter, or with the values that it had.
Each row's values are kept under a hash of its tokens and of what the reference is made of, so that
a file of another run, base or data simply does not have them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.data.lengths import num_tokens
from peftkit.errors import PeftkitError
from peftkit.events import Notice, Progress, Stage
from peftkit.files.disk import read_tensors, write_tensors
from peftkit.model.modes import evaluating
from peftkit.train.checkpoints.identity import fingerprint
from peftkit.train.memory.out_of_memory import is_out_of_memory, release_memory, too_large
from peftkit.train.ranks import Ranks
from peftkit.train.signals import Interrupted
from peftkit.train.task import Beginning

FILE = "reference_log_probs.safetensors"
KEYS, VALUES = "keys", "values"
BATCH_SIZE = 8
"""Rows at once; as inference they need a part of what a step needs."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What a model is compared with.

    Attributes:
        state: Makes a context in which the model is the reference.
        key: Tells it from all others: base, precision, values. "": unknown, and nothing is kept.
    """

    state: Callable[[], AbstractContextManager[None]]
    key: str = ""


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
        self._known: dict[Any, Tensor] = {}

    def of(self, rows: Sequence[Any]) -> Tensor | None:
        """Return (rows, 2); None where one of them is not known yet."""
        found = [self._known.get(row) for row in rows]
        return torch.stack(found) if found and all(v is not None for v in found) else None  # type: ignore[arg-type]

    @torch.no_grad()
    def compute(
        self, model: nn.Module, reference: Reference, batch: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the values of one batch now."""
        with evaluating(model), reference.state():
            return self._values(model, batch)

    def find(self, model: nn.Module, reference: Reference, beginning: Beginning) -> None:
        """Know all rows of a run: as the run's file says, computed where that does not.

        Raises:
            Interrupted: A signal came; what was computed is kept.
        """
        rows = list(dict.fromkeys(beginning.rows))
        ranks = beginning.ranks
        keys = [_key(reference.key, row) for row in rows]
        values, known = torch.zeros(len(rows), 2), torch.zeros(len(rows), dtype=torch.bool)
        path = beginning.folder / FILE
        if reference.key and ranks.is_main:
            values, known = _kept(path, keys)
        values = ranks.sum(values.to(ranks.device)).cpu()
        known = ranks.sum(known.float().to(ranks.device)).cpu() > 0
        missing = [n for n in range(len(rows)) if not known[n]]
        if missing:
            beginning.say(Stage(f"Asking the reference about {len(missing):,} rows"))
            made = self._missing(model, reference, [rows[n] for n in missing], beginning)
            index = torch.tensor(missing)
            values[index], known[index] = made[:, :2], made[:, 2] > 0
            if reference.key and ranks.is_main:
                _keep(path, keys, values, known, beginning)
        if not bool(known.all()):
            raise Interrupted(
                beginning.stop.signum,
                "stopped before the first step; what the reference said so far is kept.",
            )
        self._known = dict(zip(rows, values.unbind(), strict=True))

    def take(self, rows: Sequence[Any], values: Tensor) -> None:
        """Know these rows too."""
        self._known |= dict(zip(rows, values.float().cpu().unbind(), strict=True))

    def _missing(
        self, model: nn.Module, reference: Reference, rows: Sequence[Any], beginning: Beginning
    ) -> Tensor:
        """Return (rows, 3): values, and 1 where there are any, computed by all processes."""
        ranks, in_step = beginning.ranks, beginning.in_step
        places = {row: n for n, row in enumerate(rows)}
        own = sorted(rows, key=num_tokens, reverse=True)[ranks.rank :: ranks.world_size]
        made = torch.zeros(len(rows), 3, device=ranks.device)
        done, pending = 0, in_step.passes(_parts(own, BATCH_SIZE))
        with evaluating(model), reference.state():
            while pending:
                if beginning.stop.signum and ranks.world_size == 1:
                    break
                part, is_own = pending.pop(0)
                found = self._try(model, part, ranks)
                if found is None and in_step.needed:
                    raise in_step.out_of_memory()
                if found is None:
                    release_memory()
                    if len(part) == 1:
                        raise too_large(
                            part[0],
                            rows,
                            lambda row: self._try(model, [row], ranks) is not None,
                            fix="Lower data.max_length, or quantise the base.",
                        )
                    pending = in_step.passes(_parts(own[done:], len(part) // 2))
                elif is_own:
                    index = torch.tensor([places[row] for row in part], device=ranks.device)
                    made[index, :2], made[index, 2] = found.float(), 1.0
                    done += len(part)
                    beginning.say(Progress("Asking the reference", done, len(own)))
        return ranks.sum(made).cpu()  # the only wait for the device

    def _try(self, model: nn.Module, rows: Sequence[Any], ranks: Ranks) -> Tensor | None:
        batch = {name: tensor.to(ranks.device) for name, tensor in self._collate(rows).items()}
        try:
            with ranks.autocast():
                return self._values(model, batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None


def _parts(rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _key(reference: str, row: Any) -> str:
    return hashlib.sha256(f"{reference} {fingerprint([row])}".encode()).hexdigest()


def _kept(path: Path, keys: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the values (rows, 2) that a file holds under keys, and which (rows,) it has."""
    values, known = torch.zeros(len(keys), 2), torch.zeros(len(keys), dtype=torch.bool)
    if not path.is_file():
        return values, known
    try:
        saved = read_tensors(path)
        there = {bytes(key.tolist()).hex(): n for n, key in enumerate(saved[KEYS].unbind())}
        kept = saved[VALUES]
        if kept.shape != (len(there), 2) or not bool(torch.isfinite(kept).all()):
            return values, known
    except (PeftkitError, KeyError, ValueError):  # damaged: it is computed again
        return values, known
    for n, key in enumerate(keys):
        if (place := there.get(key)) is not None:
            values[n], known[n] = kept[place].float(), True
    return values, known


def _keep(
    path: Path, keys: Sequence[str], values: Tensor, known: Tensor, beginning: Beginning
) -> None:
    """Write what is known; a disk that refuses costs the file, not the run."""
    there = [n for n in range(len(keys)) if known[n]]
    names = torch.tensor([list(bytes.fromhex(keys[n])) for n in there], dtype=torch.uint8)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors({KEYS: names, VALUES: values[torch.tensor(there)]}, path)
    except (PeftkitError, OSError) as problem:
        beginning.say(Notice(f"{path} was not written; a resume asks again. {problem}"))
