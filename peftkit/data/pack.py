"""Rows of tokens: packing, batches, and sequences that make their rows on demand.

Shapes: B rows, T tokens of the longest row, rounded up, n targets of the whole batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate, groupby, pairwise
from typing import Annotated, Any, TypeVar, overload

import torch
from torch import Tensor

IGNORE = -100
RECENT_TOKENS = 1 << 19
"""Tokens of recently used rows that stay in memory as Python objects."""
OBJECT_TOKENS = 64
"""Memory of a row object besides its tokens, in tokens."""
MULTIPLE = 8
"""Rows are padded to a multiple of this: few shapes, good for matrix products."""
Labels = Annotated[tuple[int, ...], "the input_ids of targets, elsewhere IGNORE"]


@dataclass(frozen=True, slots=True)
class Row:
    """One or several whole documents, one after the other.

    Args:
        input_ids: Tokens.
        labels: The same tokens where they are targets, IGNORE elsewhere; a document's first token
            is never a target, since its document has no token before it.
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
    # best fit: the row with the least sufficient room, the first of those
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
    input_ids, attention_mask = padded_rows([row.input_ids for row in rows], pad_id, width)
    labels, _ = padded_rows([row.labels for row in rows], IGNORE, width)
    segments = [size for row in rows for size in (*row.lengths, width - len(row.input_ids))]
    position_ids = torch.cat([torch.arange(size) for size in segments]).view(len(rows), width)
    is_target = labels[:, 1:] != IGNORE  # (B, T - 1): of the token after position t
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
        width: T; None: as many as the longest row has.
        left: Pad on the left, not on the right.
    """
    width = max(map(len, rows)) if width is None else width
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        start = width - len(row) if left else 0
        ids[number, start : start + len(row)] = torch.tensor(row)
        mask[number, start : start + len(row)] = 1
    return ids, mask


def last_answer_span(row: Row) -> tuple[int, int]:
    """Return where the last answer of a document begins and ends: [start, stop)."""
    stop = max(n for n, label in enumerate(row.labels) if label != IGNORE) + 1
    start = stop
    while start > 0 and row.labels[start - 1] != IGNORE:
        start -= 1
    return start, stop


def last_answer(tokenizer: Any, row: Row) -> tuple[list[int], str]:
    """Return the tokens before a document's last answer, and the answer's text."""
    start, stop = last_answer_span(row)
    answer = tokenizer.decode(row.input_ids[start:stop], skip_special_tokens=True)
    return list(row.input_ids[:start]), str(answer)


def labelled_segments(
    row: Row, text: Callable[[list[int]], str], name: str
) -> list[tuple[str, str]]:
    """Return a row's text in segments: targets with a name before them, others with ""."""
    pairs = zip(row.input_ids, row.labels, strict=True)
    return [
        (name if is_target else "", text([token for token, _ in segment]))
        for is_target, segment in groupby(pairs, key=lambda pair: pair[1] != IGNORE)
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
    """Return each row's length in tokens (rows,); lazy rows have it stored."""
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


# ------------------------------------------------------------------- rows on demand


class LazyRows(Sequence[Any]):
    """Rows made on demand; those used last are the same objects when they are used again.

    Attributes:
        num_tokens: Of each row (rows,), int32.
        fingerprint: Of the rows' content.
    """

    num_tokens: Tensor
    fingerprint: str

    def __init__(self, num_tokens: Tensor, *contents: object) -> None:
        self.num_tokens = num_tokens
        self.fingerprint = fingerprint_of(*contents)
        self._recent: OrderedDict[int, Any] = OrderedDict()
        self._recent_tokens = 0

    def __len__(self) -> int:
        return len(self.num_tokens)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            places = range(len(self))[index]
            return View([self], torch.arange(len(places)) * places.step + places.start)
        place = range(len(self))[index]
        row = self._recent.get(place)
        if row is None:
            row = self._recent[place] = self.row(place)
            self._recent_tokens += OBJECT_TOKENS + num_tokens(row)
            while self._recent_tokens > RECENT_TOKENS and len(self._recent) > 1:
                _, oldest = self._recent.popitem(last=False)
                self._recent_tokens -= OBJECT_TOKENS + num_tokens(oldest)
        return row

    def row(self, place: int) -> Any:
        """Make a row."""
        raise NotImplementedError

    def values(self, name: str) -> Tensor:
        """Return a field of numbers, of all rows one after the other."""
        raise NotImplementedError


class View(LazyRows):
    """Rows of other sequences in an order of its own: a slice, a split, several files as one.

    Args:
        parts: The other sequences.
        places: Of the rows in all parts, one part after the other; None: all rows.
    """

    def __init__(self, parts: Sequence[Sequence[Any]], places: Tensor | None = None) -> None:
        self._parts, self._stops = parts, [*accumulate(map(len, parts))]
        self._places = torch.arange(self._stops[-1]) if places is None else places
        contents = [part.fingerprint for part in parts if isinstance(part, LazyRows)]
        tokens = self._chosen([tokens_of_each(part) for part in parts])
        super().__init__(tokens, *contents, self._places)

    def row(self, place: int) -> Any:
        index = int(self._places[place])
        part = bisect_right(self._stops, index)
        return self._parts[part][index - (self._stops[part - 1] if part else 0)]

    def values(self, name: str) -> Tensor:
        """Return a field of one number of each row."""
        parts = [part for part in self._parts if isinstance(part, LazyRows)]
        return self._chosen([part.values(name) for part in parts])

    def _chosen(self, of_parts: list[Tensor]) -> Tensor:
        return (torch.cat(of_parts) if len(of_parts) > 1 else of_parts[0])[self._places]


class PackedRows(LazyRows):
    """Documents packed into rows of at most `max_length` tokens; see `packing`."""

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
        """Tokens of each document."""
        return self.documents.num_tokens

    def row(self, place: int) -> Any:
        start, stop = int(self._stops[place - 1]) if place else 0, int(self._stops[place])
        members = self._members[start:stop].tolist()
        return joined([self.documents.row(member) for member in members])


def weighted(parts: Sequence[tuple[LazyRows, float]]) -> LazyRows:
    """Return rows of several files as one, each file's as often as its weight says.

    A weight of 2.5 has each row twice, and every second one a third time.
    """
    if [weight for _, weight in parts] == [1.0]:
        return parts[0][0]
    places, start = [], 0
    for rows, weight in parts:
        number = max(1, round(weight * len(rows))) if len(rows) else 0
        places.append(start + torch.arange(number) * len(rows) // max(number, 1))
        start += len(rows)
    return View([rows for rows, _ in parts], torch.cat(places))


def fingerprint_of(*contents: object) -> str:
    """Return a hash of texts and tensors."""
    digest = hashlib.sha256()
    for content in contents:
        if isinstance(content, Tensor):
            digest.update(content.numpy().tobytes())
        else:
            digest.update(str(content).encode())
    return f"sha256:{digest.hexdigest()[:32]}"


def fingerprint(rows: Iterable[Any]) -> str:
    """Return a hash of the rows' contents, without their `source`."""
    stored = getattr(rows, "fingerprint", None)  # of rows that are not in memory
    if isinstance(stored, str):
        return stored
    digest = hashlib.sha256()
    for row in rows:
        _feed(digest, row)
    return f"sha256:{digest.hexdigest()[:32]}"


def _feed(digest: Any, value: Any) -> None:
    """Hash a value with its type and length, so that no two different rows read the same."""
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        value.pop("source", None)
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple):
        digest.update(b"[%d" % len(value))
        if value and all(type(item) is int for item in value):
            digest.update(array("q", value).tobytes())
            return
        for item in value:
            _feed(digest, item)
        return
    text = repr(value).encode()
    digest.update(b"%d:" % len(text) + text)
