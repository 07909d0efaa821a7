"""Comparisons as tokens: two documents each, cut alike, with their common beginning known."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.data.encode import Encoder
from peftkit.data.format import Example
from peftkit.data.pack import IGNORE, Labels, Row, View, cut_document, tokens_of_each
from peftkit.data.preferences import NOTHING_TO_COMPARE
from peftkit.data.rows import RowEncoder, row_digest, tokenizer_key
from peftkit.errors import PeftkitError
from peftkit.events import Notice, Progress, Stage
from peftkit.execution.parallel import Part
from peftkit.execution.signals import Interrupted
from peftkit.files.tensors import read_tensors, write_tensors
from peftkit.model.modes import evaluating
from peftkit.tasks.base import Reference, Run
from peftkit.tasks.batches import batches_that_fit, equal_parts


@dataclass(frozen=True, slots=True)
class Compared(Row):
    """Two documents, one after the other: of a pair the chosen and the rejected one.

    Of a judged answer (KTO) the second is its prompt with another prompt's answer. Labels count in
    the answers.

    Args:
        common: Tokens that both begin with, none of them in an answer.
        is_cut: Whether an answer is missing its end.
        wanted: Of a judged answer its label.
    """

    common: int
    is_cut: bool
    wanted: bool | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer that is wanted or not, after its prompt.

    Args:
        input_ids, labels: As of a `Row`; labels count in the answer.
        start: Where the answer begins. is_cut: Whether its end is missing.
        source: "train.jsonl:7".
    """

    input_ids: tuple[int, ...]
    labels: Labels
    start: int
    is_cut: bool
    wanted: bool
    source: str

    def beside(self, other: Judged, max_length: int) -> Compared:
        """Return it, and its prompt with the answer of another."""
        ids = self.input_ids[: self.start] + other.input_ids[other.start :]
        labels = (IGNORE,) * self.start + other.labels[other.start :]
        document = Row(self.input_ids, self.labels, (len(self.input_ids),), self.source)
        mixed = Row(ids, labels, (len(ids),), self.source)
        both = compared(document, mixed, max_length, wanted=self.wanted)
        assert both is not None, self.source
        return replace(both, is_cut=self.is_cut or other.is_cut or both.is_cut)


class AnswerEncoder(RowEncoder):
    """Makes rows of answers after their prompts, of at most `max_length` tokens."""

    drops: Mapping[str, str] = {
        **NOTHING_TO_COMPARE,
        "no answer, or no difference, before the cut": "raise data.max_length",
    }

    def __init__(self, tokenizer: Any, template: str | None, max_length: int) -> None:
        self._tokenizer, self._template, self.max_length = tokenizer, template, max_length
        self._encoder = Encoder(tokenizer, template)

    def key(self, where: str) -> object:
        return (*tokenizer_key(self._tokenizer), self._template, self.max_length)

    def encode(self, example: Example) -> Row:
        """Return an example as tokens, uncut."""
        return self._encoder.encode(example)

    def agreed(self, example: Example) -> dict[str, str]:
        """Return what all rows have in common with this one."""
        return {"style": self._encoder.style(example).kind}


def compared(first: Row, second: Row, max_length: int, **more: Any) -> Compared | None:
    """Return two documents, cut to a length; None where an answer, or their difference, is lost.

    Both have the same prompt, so that as much is left of one answer as of the other, at most.

    Args:
        more: Other fields of `Compared`.
    """
    a, b = (cut_document(document, max_length) for document in (first, second))
    is_pair = more.get("wanted") is None  # another prompt's answer may be the same one
    if not (a.num_targets and b.num_targets) or (is_pair and a.input_ids == b.input_ids):
        return None
    return Compared(
        input_ids=a.input_ids + b.input_ids,
        labels=a.labels + b.labels,
        lengths=(a.lengths[0], b.lengths[0]),
        common=common_beginning(a, b),
        is_cut=max(first.lengths[0], second.lengths[0]) > max_length,
        source=first.source,
        **more,
    )


def common_beginning(a: Row, b: Row) -> int:
    """Return how many tokens both documents begin with, before any answer."""
    most = min(answer_start(a), answer_start(b))
    pairs = zip(a.input_ids[:most], b.input_ids[:most], strict=True)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), most)


def answer_start(row: Row) -> int:
    """Return where the first token of an answer is."""
    return next((n for n, label in enumerate(row.labels) if label != IGNORE), len(row.labels))


def after_common_tokens(a: Row, b: Row) -> tuple[Row, Row]:
    """Return two texts, of which only what follows their common tokens is an answer."""
    pairs = zip(a.input_ids, b.input_ids, strict=False)
    shared = next((n for n, (x, y) in enumerate(pairs) if x != y), min(*a.lengths, *b.lengths))
    labels = [(IGNORE,) * shared + row.labels[shared:] for row in (a, b)]
    return replace(a, labels=labels[0]), replace(b, labels=labels[1])


# The reference's log-probabilities: computed once, before training, and stored with the run.
#
# The reference is the model in another state: without its adapter, or with its values before
# training. A row's values are stored under a hash of its tokens and of all that the reference
# depends on, so that a file of another run, base or data does not have them.


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
        places, is_known = _found(self._keys, keys)
        return self._known[places] if bool(is_known.all()) else None

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
        values, is_known = torch.zeros(len(keys), 2), torch.zeros(len(keys), dtype=torch.bool)
        path = run.config.output_dir / FILE
        if reference.key and world.is_main:
            values, is_known = _kept(path, keys)
        values = world.sum(values.to(world.device)).cpu()
        is_known = world.sum(is_known.float().to(world.device)).cpu() > 0
        missing = (~is_known).nonzero().flatten()
        if len(missing):
            run.say(Stage(f"Asking the reference about {len(missing):,} rows"))
            computed = self._missing(reference, View([rows], first[missing]), run)
            values[missing], is_known[missing] = computed[:, :2], computed[:, 2] > 0
            if reference.key and world.is_main:
                _keep(path, keys[is_known], values[is_known], run)
        if not bool(is_known.all()):
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
        rows_here = View([rows], places)
        values, done = torch.zeros(len(rows), 3, device=world.device), 0

        def compute(part: Part) -> Tensor:
            batch = {name: tensor.to(world.device) for name, tensor in self._collate(part).items()}
            with world.autocast():
                return self._values(model, batch)

        with evaluating(model), reference.state():
            for part, some, is_own in batches_that_fit(
                rows_here, BATCH_SIZE, equal_parts, compute, parallel=run.parallel, fix=FIX
            ):
                if is_own:
                    index = places[done : done + len(part)].to(world.device)
                    values[index, :2], values[index, 2] = some.float(), 1.0
                    done += len(part)
                    run.say(Progress("Asking the reference", done, len(rows_here)))
                if run.stop.signum and world.world_size == 1:
                    break
        return world.sum(values).cpu()  # the only wait for the device


def _key(reference: str, row: Any) -> int:
    content = f"{reference} {row_digest(row)}".encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


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
    places, is_stored = _found(there, keys)
    return torch.where(is_stored[:, None], kept[order][places].float(), 0.0), is_stored


def _keep(path: Path, keys: Tensor, values: Tensor, run: Run) -> None:
    """Write what is known; a disk that refuses costs the file, not the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors({KEYS: keys, VALUES: values}, path)
    except (PeftkitError, OSError) as problem:
        run.say(Notice(f"{path} was not written; a resume asks again. {problem}"))
