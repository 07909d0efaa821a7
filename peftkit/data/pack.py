"""Packed sequences and padded batches of token rows.

Shapes: B rows, T tokens of the longest row, rounded up, n targets of the whole batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate, groupby, pairwise
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

from peftkit.data.rows.lazy import LazyRows, row_lengths

IGNORE = -100
MULTIPLE = 8
"""Rows are padded to a multiple of this: few shapes, fast matrix products."""
Labels = Annotated[tuple[int, ...], "the input_ids of targets, elsewhere IGNORE"]


@dataclass(frozen=True, slots=True)
class Row:
    """One or several whole documents, one after the other.

    Args:
        input_ids: Tokens.
        labels: The same tokens for targets, IGNORE elsewhere. A document's first token is never a
            target, because no token of its document precedes it.
        lengths: Tokens of each document.
        source: "train.jsonl:7", or "train.jsonl:7,12,31" for several.
    """

    input_ids: tuple[int, ...]
    labels: Labels
    lengths: tuple[int, ...]
    source: str

    def __post_init__(self) -> None:
        assert len(self.input_ids) == len(self.labels) == sum(self.lengths), self.source

    @property
    def num_targets(self) -> int:
        """Tokens that the loss counts."""
        return sum(label != IGNORE for label in self.labels)

    @property
    def documents(self) -> tuple[Row, ...]:
        """Each document as a row."""
        ids, labels = self.input_ids, self.labels
        bounds = pairwise(accumulate(self.lengths, initial=0))
        return tuple(Row(ids[a:b], labels[a:b], (b - a,), self.source) for a, b in bounds)


AnyRow = TypeVar("AnyRow", bound=Row)


def cut_document(row: AnyRow, max_length: int) -> AnyRow:
    """Return a row of one document, truncated to a length."""
    if len(row.input_ids) <= max_length:
        return row
    return replace(
        row,
        input_ids=row.input_ids[:max_length],
        labels=row.labels[:max_length],
        lengths=(max_length,),
    )


def packing(lengths: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    """Pack documents of these lengths (n,) into rows of at most `max_length` tokens.

    Best-fit decreasing: the longest document first, each into the row where it leaves the least
    room. No document is split or lost, and the same lengths give the same packing. Documents keep
    their order within a row, and rows are in the order of their first documents. Needs 16 bytes of
    memory for each document.

    Returns:
        The indices of all documents (n,), row by row, and the number of documents of each row
        (rows,).
    """
    with_room: defaultdict[int, list[int]] = defaultdict(list)  # tokens left -> rows, a heap
    rooms = num_rows = 0  # bit n: a row has n tokens left
    row_of = torch.empty(len(lengths), dtype=torch.int64)
    for places in lengths.sort(descending=True, stable=True).indices.split(1 << 16):
        rows = []
        for length in lengths[places].tolist():
            fitting = rooms >> length
            if fitting:
                left = length + (fitting & -fitting).bit_length() - 1
                row = heappop(with_room[left])
                if not with_room[left]:
                    rooms &= ~(1 << left)
            else:
                left, row = max_length, num_rows
                num_rows += 1
            if left > length:
                heappush(with_room[left - length], row)
                rooms |= 1 << (left - length)
            rows.append(row)
        row_of[places] = torch.tensor(rows, dtype=torch.int64)
    members = row_of.sort(stable=True).indices
    sizes = row_of.bincount(minlength=num_rows)
    # rows in the order of their first documents
    first = members[sizes.cumsum(0) - sizes]
    order = first.sort().indices
    place = torch.empty_like(order).scatter_(0, order, torch.arange(num_rows))
    return place[row_of].sort(stable=True).indices, sizes[order]


def collate(rows: Sequence[Row], pad_id: int, limit: int | None = None) -> dict[str, Tensor]:
    """Return a batch, padded on the right.

    input_ids and labels (B, T); attention_mask (B, T), 1 for a token; position_ids (B, T),
    restarting at each document and at the padding; target_index (n,), the positions in the
    flattened (B * T) hidden states whose next token is a target; targets (n,), these next tokens.
    The last two are computed on the CPU, because counting labels on a GPU would synchronise it with
    the host. Any token can serve as padding: labels are masked by position, and no real token
    attends to the right.

    Args:
        limit: Maximum of the rounded T: the model's number of positions.
    """
    longest = max(len(row.input_ids) for row in rows)
    rounded = -(-longest // MULTIPLE) * MULTIPLE
    width = rounded if limit is None else max(longest, min(rounded, limit))
    input_ids, attention_mask = padded_rows([row.input_ids for row in rows], pad_id, width)
    labels, _ = padded_rows([row.labels for row in rows], IGNORE, width)
    segments = [size for row in rows for size in (*row.lengths, width - len(row.input_ids))]
    position_ids = torch.cat([torch.arange(size) for size in segments]).view(len(rows), width)
    is_target = labels[:, 1:] != IGNORE  # (B, T - 1), for the token after position t
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "labels": labels,
        "target_index": torch.nn.functional.pad(is_target, (0, 1)).flatten().nonzero().flatten(),
        "targets": labels[:, 1:][is_target],
    }


def padded_rows(
    rows: Sequence[Sequence[int]], pad: int, width: int | None = None, *, left: bool = False
) -> tuple[Tensor, Tensor]:
    """Return rows of tokens, padded (B, T), and their mask: 1 for a token.

    Args:
        width: T; None: the length of the longest row.
        left: Pad on the left instead of the right.
    """
    width = max(map(len, rows)) if width is None else width
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        start = width - len(row) if left else 0
        ids[number, start : start + len(row)] = torch.tensor(row)
        mask[number, start : start + len(row)] = 1
    return ids, mask


def joined(rows: Sequence[Row]) -> Row:
    """Return the documents of rows, one after the other, in one row."""
    if len(rows) == 1:
        return rows[0]
    return Row(
        input_ids=tuple(token for row in rows for token in row.input_ids),
        labels=tuple(label for row in rows for label in row.labels),
        lengths=tuple(length for row in rows for length in row.lengths),
        source=_joined_sources([row.source for row in rows]),
    )


def _joined_sources(sources: Sequence[str]) -> str:
    """Return "a.jsonl:1,4 b.jsonl:2" for a.jsonl:1, a.jsonl:4, b.jsonl:2."""
    split = [source.rpartition(":") for source in sources]
    groups = groupby(split, key=lambda parts: parts[0])
    return " ".join(f"{name}:{','.join(line for *_, line in group)}" for name, group in groups)


def padded(*rows: object) -> int:
    """Return the padded length of these rows in one batch, at least 1.

    For an encoder-decoder, the longer side: it determines the size of matrix products.
    """
    longest = map(max, zip(*map(row_lengths, rows), strict=True))
    return max(rounded_up(max(longest)), 1)


def rounded_up(length: int) -> int:
    """Return the padded length of a row of this length."""
    return -(-length // MULTIPLE) * MULTIPLE


def answered_row(prompt: Sequence[int], answer: Sequence[int], source: str) -> Row:
    """Return a prompt and its answer as one document, whose targets are the answer."""
    tokens = (*prompt, *answer)
    return Row(tokens, (*[IGNORE] * len(prompt), *answer), (len(tokens),), source)


def last_answer_span(row: Row) -> tuple[int, int]:
    """Return the token indices [start, stop) of a document's last response."""
    stop = max(n for n, label in enumerate(row.labels) if label != IGNORE) + 1
    start = stop
    while start > 0 and row.labels[start - 1] != IGNORE:
        start -= 1
    return start, stop


def last_answer(tokenizer: Any, row: Row) -> tuple[list[int], str]:
    """Return the tokens before a document's last response, and the response's text."""
    start, stop = last_answer_span(row)
    answer = tokenizer.decode(row.input_ids[start:stop], skip_special_tokens=True)
    return list(row.input_ids[:start]), str(answer)


def labelled_segments(
    row: Row, text: Callable[[list[int]], str], name: str
) -> list[tuple[str, str]]:
    """Return a row's text in segments (label, text): `name` for targets, "" for others."""
    pairs = zip(row.input_ids, row.labels, strict=True)
    return [
        (name if is_target else "", text([token for token, _ in segment]))
        for is_target, segment in groupby(pairs, key=lambda pair: pair[1] != IGNORE)
    ]


# ------------------------------------------------------------------- rows on demand


class PackedRows(LazyRows):
    """Rows of packed documents, at most `max_length` tokens each; see `packing`."""

    def __init__(self, rows: LazyRows, max_length: int) -> None:
        self.documents = rows
        self._members, sizes = packing(rows.num_tokens, max_length)
        self._stops = sizes.cumsum(0)
        stops = torch.cat([torch.zeros(1, dtype=torch.int64), self._stops])
        tokens = rows.num_tokens[self._members].cumsum(0)
        lengths = torch.cat([torch.zeros(1, dtype=torch.int64), tokens])[stops].diff()
        super().__init__(lengths.int(), f"{rows.fingerprint} in rows of {max_length}")

    @property
    def document_lengths(self) -> Tensor:
        """Tokens of each document (n,)."""
        return self.documents.num_tokens

    def row(self, place: int) -> Any:
        start, stop = int(self._stops[place - 1]) if place else 0, int(self._stops[place])
        members = self._members[start:stop].tolist()
        return joined([self.documents.row(member) for member in members])
