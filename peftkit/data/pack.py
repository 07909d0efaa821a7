"""Rows of tokens: their length, packing of several into one, batches.

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

IGNORE = -100
MULTIPLE = 8
"""Rows are padded to a multiple of this: few shapes, good for matrix products."""
Labels = Annotated[tuple[int, ...], "the input_ids of targets, elsewhere IGNORE"]


@dataclass(frozen=True, slots=True)
class Row:
    """One or several whole documents, one after the other.

    Args:
        input_ids: Tokens.
        labels: The same tokens where they are targets, IGNORE elsewhere; a document's first token
            is never a target, since no token of its own comes before it.
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
    """Return a row of one document, cut to a length."""
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

    Best-fit decreasing: the longest first, each where it leaves the least room. No document is
    split or lost, and the same lengths give the same packing. Documents of a row, and rows by their
    first documents, stay in the order given. Takes 16 bytes a document.

    Returns:
        The numbers of all documents (n,), row by row; and how many each row has (rows,).
    """
    # of all rows with some room the one with the least, the first of those
    with_room: defaultdict[int, list[int]] = defaultdict(list)  # tokens left -> rows, a heap
    rooms = num_rows = 0  # bit n: a row has n tokens left
    row_of = torch.empty(len(lengths), dtype=torch.int64)
    for places in lengths.sort(descending=True, stable=True).indices.split(_AT_ONCE):
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


_AT_ONCE = 1 << 16


def collate(rows: Sequence[Row], pad_id: int, limit: int | None = None) -> dict[str, Tensor]:
    """Return a batch, padded on the right.

    input_ids and labels (B, T); attention_mask (B, T), 1 for a token; position_ids (B, T),
    restarting at each document and at the padding; target_index (n,), the positions in the
    flattened (B * T) hidden states whose next token is a target; targets (n,), those tokens. The
    last two are made here, on the CPU, so that the loss never waits for the GPU to count labels.
    Any token may pad: labels are masked by position, and no real token attends to the right.

    Args:
        limit: T is rounded up to this at most: the model's number of positions.
    """
    longest = max(len(row.input_ids) for row in rows)
    rounded = -(-longest // MULTIPLE) * MULTIPLE
    width = rounded if limit is None else max(longest, min(rounded, limit))
    shape = (len(rows), width)
    input_ids = torch.full(shape, pad_id)
    labels = torch.full(shape, IGNORE)
    position_ids, attention_mask = torch.zeros(2, *shape, dtype=torch.long)
    for number, row in enumerate(rows):
        length = len(row.input_ids)
        input_ids[number, :length] = torch.tensor(row.input_ids)
        labels[number, :length] = torch.tensor(row.labels)
        attention_mask[number, :length] = 1
        segments = [*row.lengths, width - length]
        position_ids[number] = torch.cat([torch.arange(segment) for segment in segments])
    is_target = labels[:, 1:] != IGNORE  # (B, T - 1): of the token after position t
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "labels": labels,
        "target_index": torch.nn.functional.pad(is_target, (0, 1)).flatten().nonzero().flatten(),
        "targets": labels[:, 1:][is_target],
    }


def padded_rows(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return rows of tokens padded on the right (B, T), and their mask: 1 for a token."""
    ids = torch.full((len(rows), max(map(len, rows))), pad)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row)] = 1
    return ids, mask


def last_answer(tokenizer: Any, row: Row) -> tuple[list[int], str]:
    """Return the tokens before a document's last answer, and the answer's text."""
    stop = max(n for n, label in enumerate(row.labels) if label != IGNORE) + 1
    start = stop
    while start > 0 and row.labels[start - 1] != IGNORE:
        start -= 1
    answer = tokenizer.decode(row.input_ids[start:stop], skip_special_tokens=True)
    return list(row.input_ids[:start]), str(answer)


def labelled_segments(
    row: Row, text: Callable[[list[int]], str], name: str
) -> list[tuple[str, str]]:
    """Return a row's text in segments: targets with a name before them, others with ""."""
    pairs = zip(row.input_ids, row.labels, strict=True)
    return [
        (name if is_target else "", text([token for token, _ in some]))
        for is_target, some in groupby(pairs, key=lambda pair: pair[1] != IGNORE)
    ]


def joined(rows: Sequence[Row]) -> Row:
    """Return documents one after the other in one row."""
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


def num_tokens(row: Any) -> int:
    """Return a row's length in tokens, of encoder and decoder; 0 if it has none."""
    return sum(_lengths(row))


def tokens_of_each(rows: Sequence[Any]) -> Tensor:
    """Return each row's length in tokens (rows,); lazy rows know it without being made."""
    tokens: Tensor | None = getattr(rows, "num_tokens", None)
    if tokens is not None:
        return tokens
    return torch.tensor([num_tokens(row) for row in rows], dtype=torch.int64)


def padded(*rows: Any) -> int:
    """Return how many tokens each of the rows takes in one batch, at least one.

    Encoder-decoder: of the longer side, which sets the size of matrix products.
    """
    longest = map(max, zip(*map(_lengths, rows), strict=True))
    return max(rounded_up(max(longest)), 1)


def rounded_up(length: int) -> int:
    """Return how many tokens a row of this length takes in a batch."""
    return -(-length // MULTIPLE) * MULTIPLE


def _lengths(row: Any) -> tuple[int, int]:
    """Return a row's tokens, or positions of an encoder, and the tokens of a separate decoder."""
    tokens = len(getattr(row, "input_ids", ())) or getattr(row, "num_encoder_tokens", 0)
    return tokens, getattr(row, "num_decoder_tokens", 0)
