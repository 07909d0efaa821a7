"""Comparisons as rows of two documents, and the reference model's log-probabilities of them."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.data.encode import Encoder
from peftkit.data.examples import Example
from peftkit.data.pack import IGNORE, Labels, Row, cut_document
from peftkit.data.preferences import NOTHING_TO_COMPARE
from peftkit.data.rows.columns import row_digest
from peftkit.data.rows.encoder import RowEncoder
from peftkit.data.rows.lazy import View, tokens_of_each
from peftkit.data.style import Style
from peftkit.data.tokens import num_common
from peftkit.errors import PeftkitError
from peftkit.events import Notice, Progress, Stage
from peftkit.execution.signals import Interrupted
from peftkit.execution.world import Part
from peftkit.files.tensors import read_tensors, write_tensors
from peftkit.model.modes import evaluating
from peftkit.tasks.batches import batches_that_fit, equal_parts
from peftkit.tasks.documents import DocumentTask
from peftkit.tasks.run_hooks import Run


@dataclass(frozen=True, slots=True)
class Compared(Row):
    """Two documents, one after the other: of a pair the chosen and the rejected one.

    Of a judged answer (KTO) the second is its prompt with another prompt's answer. Labels count in
    the answers.

    Args:
        common: Length of the common prefix, before any answer.
        is_cut: Whether an answer was cut.
        wanted: Label of a judged answer; None for a pair.
    """

    common: int
    is_cut: bool
    wanted: bool | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """A prompt and an answer that is wanted or not.

    Args:
        input_ids, labels: As of a `Row`; labels count in the answer.
        start: Position of the answer. is_cut: Whether it was cut.
        source: "train.jsonl:7".
    """

    input_ids: tuple[int, ...]
    labels: Labels
    start: int
    is_cut: bool
    wanted: bool
    source: str

    def compared_with(self, other: Judged, max_length: int) -> Compared:
        """Return the row of this document, and of its prompt with another row's answer."""
        ids = self.input_ids[: self.start] + other.input_ids[other.start :]
        labels = (IGNORE,) * self.start + other.labels[other.start :]
        document = Row(self.input_ids, self.labels, (len(self.input_ids),), self.source)
        mixed = Row(ids, labels, (len(ids),), self.source)
        both = compared(document, mixed, max_length, wanted=self.wanted)
        assert both is not None, self.source
        return replace(both, is_cut=self.is_cut or other.is_cut or both.is_cut)


NOTHING_LEFT = "no answer, or no difference, before the cut"
"""Reason to drop a row; see `RowEncoder.drops`."""


class AnswerEncoder(RowEncoder):
    """Base of the encoders of prompts with answers, of at most `max_length` tokens."""

    drops: Mapping[str, str] = {**NOTHING_TO_COMPARE, NOTHING_LEFT: "raise data.max_length"}

    def __init__(self, tokenizer: Any, template: str | None, max_length: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        self.settings = (template, max_length)
        self._encoder = Encoder(tokenizer, template)  # its rows are uncut

    def style_of(self, example: Example) -> Style:
        return self._encoder.style(example)


def compared(first: Row, second: Row, max_length: int, **more: Any) -> Compared | None:
    """Return two documents, cut to a length; None where no answer, or no difference, is left.

    Both have the same prompt, so both answers are cut at the same length.

    Args:
        more: Other fields of `Compared`.
    """
    a, b = (cut_document(document, max_length) for document in (first, second))
    is_pair = more.get("wanted") is None  # another prompt's answer may be the same one
    if not (a.num_targets and b.num_targets) or (is_pair and a.input_ids == b.input_ids):
        return None
    start = min(map(answer_start, (a, b)))
    return Compared(
        input_ids=a.input_ids + b.input_ids,
        labels=a.labels + b.labels,
        lengths=(a.lengths[0], b.lengths[0]),
        common=num_common(a.input_ids[:start], b.input_ids[:start]),
        is_cut=max(first.lengths[0], second.lengths[0]) > max_length,
        source=first.source,
        **more,
    )


def answer_start(row: Row) -> int:
    """Return the position of an answer's first token."""
    return next((n for n, label in enumerate(row.labels) if label != IGNORE), len(row.labels))


def after_common_tokens(a: Row, b: Row) -> tuple[Row, Row]:
    """Return two texts with their common prefix as the prompt."""
    shared = num_common(a.input_ids, b.input_ids)
    labels = [(IGNORE,) * shared + row.labels[shared:] for row in (a, b)]
    return replace(a, labels=labels[0]), replace(b, labels=labels[1])


# The reference's log-probabilities: computed once, before training, and stored with the run.
#
# The reference is the model without its adapter, or with its values before training. The key of a
# row's values is a hash of its tokens and of everything that the reference depends on, which
# excludes values of another run, base or data set.


FILE = "reference_log_probs.safetensors"
KEYS, VALUES = "keys", "values"
BATCH_SIZE = 8
"""Rows of a batch, without gradients."""
FIX = "Lower data.max_length, or quantise the base."


class ReferencedTask(DocumentTask):
    """A task whose loss compares the log-probabilities of answers with the reference's."""

    _stored: tuple[str, Tensor, Tensor] | None = None
    """The key of the reference, and in order the keys of rows and their values: 16 bytes a row."""

    @abstractmethod
    def batch_of(self, rows: Sequence[Compared]) -> dict[str, Tensor]:
        """Return a batch of rows, without reference values."""

    @abstractmethod
    def log_probs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probabilities of both answers of each row (rows, 2)."""

    def stored_reference(self, rows: Sequence[Compared]) -> Tensor | None:
        """Return the reference's values (rows, 2); None where one of them is missing."""
        if self._stored is None:
            return None
        reference, known, values = self._stored
        keys = torch.tensor([_key(reference, row) for row in rows])
        places, is_computed = _lookup(known, keys)
        return values[places] if bool(is_computed.all()) else None

    def find_reference(self, run: Run) -> None:
        """Find the values of all rows of a run: in the run's file, else computed now.

        Raises:
            Interrupted: A signal came; values computed so far are stored.
        """
        world, rows, reference = run.world, run.all_rows, self.reference
        each = torch.tensor(array("q", (_key(reference.key, row) for row in rows)))
        keys, places = each.unique(return_inverse=True)
        numbers = torch.arange(len(rows))
        first = torch.full_like(keys, len(rows)).scatter_reduce(0, places, numbers, "amin")
        values, is_computed = torch.zeros(len(keys), 2), torch.zeros(len(keys), dtype=torch.bool)
        path = run.config.output_dir / FILE
        if reference.key and world.is_main:
            values, is_computed = _read_values(path, keys)
        values = world.sum(values.to(world.device)).cpu()
        is_computed = world.sum(is_computed.float().to(world.device)).cpu() > 0
        missing = (~is_computed).nonzero().flatten()
        if len(missing):
            run.say(Stage(f"Computing the reference of {len(missing):,} rows"))
            computed = self._missing(View([rows], first[missing]), run)
            values[missing], is_computed[missing] = computed[:, :2], computed[:, 2] > 0
            if reference.key and world.is_main:
                _write_values(path, keys[is_computed], values[is_computed], run)
        if not bool(is_computed.all()):
            raise Interrupted(
                run.stop.signum,
                "stopped before the first step; the reference's values so far are stored.",
            )
        self._stored = reference.key, keys, values

    def _missing(self, rows: View, run: Run) -> Tensor:
        """Return (rows, 3): values, and 1 where computed, from all processes."""
        model, world = run.model, run.world
        order = tokens_of_each(rows).sort(descending=True, stable=True).indices
        places = order[world.rank :: world.world_size]
        rows_here = View([rows], places)
        values, done = torch.zeros(len(rows), 3, device=world.device), 0

        def compute(part: Part) -> Tensor:
            batch = {name: tensor.to(world.device) for name, tensor in self.batch_of(part).items()}
            with world.autocast():
                return self.log_probs(model, batch)

        with evaluating(model), self.reference.state():
            for part, computed, is_own in batches_that_fit(
                rows_here, BATCH_SIZE, equal_parts, compute, parallel=run.parallel, fix=FIX
            ):
                if is_own:
                    index = places[done : done + len(part)].to(world.device)
                    values[index, :2], values[index, 2] = computed.float(), 1.0
                    done += len(part)
                    run.say(Progress("Computing the reference", done, len(rows_here)))
                if run.stop.signum and world.world_size == 1:
                    break
        return world.sum(values).cpu()  # the only wait for the device


def _key(reference: str, row: Compared) -> int:
    content = f"{reference} {row_digest(row)}".encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def _lookup(sorted_keys: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of keys among sorted ones, and whether each is there."""
    if not len(sorted_keys):
        return torch.zeros_like(keys), torch.zeros_like(keys, dtype=torch.bool)
    places = torch.searchsorted(sorted_keys, keys).clamp(max=len(sorted_keys) - 1)
    return places, sorted_keys[places] == keys


def _read_values(path: Path, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values (rows, 2) of keys in a file, and whether it has each (rows,)."""
    nothing = torch.zeros(len(keys), 2), torch.zeros(len(keys), dtype=torch.bool)
    if not path.is_file():
        return nothing
    try:
        saved = read_tensors(path)
        stored_keys, stored = saved[KEYS], saved[VALUES]
    except (PeftkitError, KeyError):  # damaged: it is computed again
        return nothing
    is_whole = stored_keys.dtype == torch.int64 and stored.shape == (len(stored_keys), 2)
    if not is_whole or stored_keys.ndim != 1 or not bool(torch.isfinite(stored).all()):
        return nothing
    sorted_keys, order = stored_keys.sort()
    places, is_stored = _lookup(sorted_keys, keys)
    return torch.where(is_stored[:, None], stored[order][places].float(), 0.0), is_stored


def _write_values(path: Path, keys: Tensor, values: Tensor, run: Run) -> None:
    """Write values; a failure costs the file, not the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors({KEYS: keys, VALUES: values}, path)
    except (PeftkitError, OSError) as problem:
        run.say(Notice(f"{path} was not written; a resume computes it again. {problem}"))
