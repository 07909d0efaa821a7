"""Batches without padding: all documents one after the other, in one row.

Padding costs all layers as much as tokens do; in a row it is but the few tokens that round its
length. And what several documents begin with, a system prompt or the same question, is the same to
a causal model: it is there once, and learns from all of them. Attention takes the documents apart
(`peftkit.kernels.grid`; on a GPU `peftkit.kernels.varlen`, where that serves the model). A model
may mix tokens elsewhere too (convolutions, states), or count positions its own way: so it is
asked, on a few tokens, before it is trained like this.

An encoder-decoder has its sources in rows and its targets in others. They are not one row each, for
T5 makes a bias for all pairs of a row's places; no shorter than the longest document, for that
bias is the document's.

Shapes: B rows, T tokens of the longest, N tokens of the one row, R documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from peftkit.kernels.device import forked_generators
from peftkit.kernels.grid import Grid, grid_of, one_of_few, width_of
from peftkit.kernels.varlen import Spans, spans_of
from peftkit.model.modes import evaluating
from peftkit.tasks.attention import Layout, TrainingAttention
from peftkit.tasks.isolation import are_apart, logits_of, rms_difference
from peftkit.tasks.length import num_virtual
from peftkit.tasks.loss import unwrapped

ALIGNMENT, SIZES = 16, 16
"""N is one of this, and one of so many sizes from a power of two to the next."""

CELLS = 1000
"""Pairs of a query and a key that take as long as a token in all other layers."""

PADDED = ("attention_mask", "labels", "token_type_ids", "decoder_attention_mask")
"""What a batch has no longer once it is in one row."""

HALVES = ("", "decoder_")
"""How the names of a batch begin that are of a decoder beside an encoder; of all others."""

GRID = "grid_"
"""How the names of a batch begin, after that, that are fields of its `Grid`."""

SPAN = "span_"
"""Of its `Spans`."""

LENGTHS = (11, 9, 2)
"""Of the documents that a model is asked with."""


def num_positions(lengths: Sequence[int]) -> int:
    """Return the padded-token-equivalent cost of documents of these lengths in one row.

    Their own, and what attention takes for the padding between them.
    """
    cells = len(lengths) * max(lengths) ** 2 - sum(length**2 for length in lengths)
    return sum(lengths) + cells // CELLS


def faster(padded: dict[str, Tensor], one_row: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the one of two batches that is computed faster, both of the same rows."""

    def tokens(batch: Mapping[str, Tensor], grids: str) -> float:
        found = 0.0
        for half in HALVES:
            if (ids := batch.get(half + "input_ids")) is not None:
                cells = batch[half + grids]
                found += ids.numel() + cells.numel() * cells.shape[1] / CELLS
        return found

    return one_row if tokens(one_row, GRID + "tokens") < tokens(padded, "input_ids") else padded


def unpadded(
    batch: Mapping[str, Tensor],
    *,
    share: bool,
    spans: bool = False,
    owners: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return a padded batch in one row.

    Args:
        batch: input_ids and attention_mask (B, T), 1 where a token is; position_ids (B, T), if
            there are any, which begin anew at each document of a row; the same with "decoder_"
            before, if it is for an encoder and a decoder; target_index, places in the flattened
            (B * T) tokens, of the decoder if there is one; and what else there is.
        share: Have what several documents begin with once. The model has to be causal.
        spans: Say where documents begin and end instead of making a grid; without a decoder.
        owners: (B,) 0, 0, 1, ...: whose each row is, ascending. What is one owner's stands in one
            piece, and is not shared with another's. The longest document is to be the first one's.

    Returns:
        input_ids and position_ids (1, N), or with a decoder's any number of rows; the fields of
        `Grid`, or of `Spans`; target_index, places among the flattened tokens; what else there is;
        and with owners owner_tokens (owners,), how many tokens are whose.
    """
    made = {name: tensor for name, tensor in batch.items() if name not in PADDED}
    halves = {
        half: _half(batch, half, share, owners) for half in HALVES if half + "input_ids" in batch
    }
    # as many rows of each: models read of one half how many there are of the other
    count = 1 if len(halves) == 1 else min(half.most_rows for half in halves.values())
    length = 0
    for name, half in halves.items():
        shape = _shape(half.num_tokens, count, other=length)
        row, number = _in_rows(half, shape)
        if spans:
            row |= _named(SPAN, spans_of(half.numbers, shape[1]))
        else:
            row |= _named(GRID, grid_of(half.numbers, shape))
        made |= {name + field: tensor for field, tensor in row.items()}
        length = row["input_ids"].shape[1]
    if owners is not None:
        made["owner_tokens"] = half.owner_tokens
    return made | {"target_index": number[batch["target_index"]]}  # of the last half


class _Half(NamedTuple):
    """What an encoder or a decoder reads.

    Attributes:
        ids, positions: (D,) of all documents, one after the other.
        numbers: Of each document's tokens, those that stand in the rows.
        old: (D,) where the tokens stood among the padded ones. num_padded: How many these were.
        owner_tokens: (owners,) how many tokens in the rows are whose.
    """

    ids: Tensor
    positions: Tensor
    numbers: list[list[int]]
    old: Tensor
    num_padded: int
    owner_tokens: Tensor

    @property
    def num_tokens(self) -> int:
        return max(map(max, self.numbers)) + 1

    @property
    def most_rows(self) -> int:
        """How many rows, none shorter than the longest document, they fill; a power of two."""
        most = self.num_tokens // width_of(max(map(len, self.numbers)))
        return 1 << max(most.bit_length() - 1, 0)


def _half(
    batch: Mapping[str, Tensor], name: str, share: bool, owners: Tensor | None = None
) -> _Half:
    """Take what is read out of its padding, and number it."""
    mask = batch[name + "attention_mask"]
    positions = batch.get(name + "position_ids", torch.arange(mask.shape[1]).expand_as(mask))
    real = mask.flatten().nonzero().flatten()
    ids, positions = batch[name + "input_ids"].flatten()[real], positions.flatten()[real]
    begins = (positions == 0).nonzero().flatten()
    lengths: list[int] = begins.diff(append=begins.new_tensor([len(ids)])).tolist()
    rows = real[begins] // mask.shape[1]
    whose = [0] * len(lengths) if owners is None else owners[rows].tolist()
    numbers = _numbered(
        [document.tolist() for document in ids.split(lengths)], share=share, owners=whose
    )
    ends = [0] * (max(whose) + 1)
    for owner, document in zip(whose, numbers, strict=True):
        ends[owner] = max(ends[owner], *document)
    sizes = torch.tensor(ends).add(1).diff(prepend=torch.tensor([0]))
    return _Half(ids, positions, numbers, real, mask.numel(), sizes)


def _in_rows(half: _Half, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
    """Return tokens in rows, and the new number of each padded one."""
    number = torch.tensor([n for document in half.numbers for n in document])
    made = {  # filled with no token that pads: of all zeros some norms have no gradient
        "input_ids": half.ids.new_full(shape, int(half.ids[0])),
        "position_ids": half.positions.new_zeros(shape),
    }
    made["input_ids"].view(-1)[number] = half.ids
    made["position_ids"].view(-1)[number] = half.positions
    now = torch.zeros(half.num_padded, dtype=torch.long)
    now[half.old] = number
    return made, now


def _named(start: str, fields: Grid | Spans) -> dict[str, Tensor]:
    return {start + name: tensor for name, tensor in fields._asdict().items()}


def _shape(used: int, count: int, *, other: int) -> tuple[int, int]:
    """Return so many rows for so many tokens, and at least one of padding.

    Args:
        other: Length of the other half's rows, by which attention tells one from the other.
    """
    length, total = other, used
    while length == other:
        total = one_of_few(total + 1, ALIGNMENT, SIZES)
        length = -(-total // count)
    return count, length


def _numbered(
    documents: Sequence[Sequence[int]], *, share: bool, owners: Sequence[int]
) -> list[list[int]]:
    """Return the number in the row of each document's tokens; an owner's longest has the first.

    A causal model computes of a token what depends on its document up to there. So beginnings are
    numbered: the one that ends here, by the one that ends a token before and by this token.
    """
    number: dict[tuple[int, int], int] = {}
    numbers: list[list[int]] = [[] for _ in documents]
    for which in sorted(range(len(documents)), key=lambda n: (owners[n], -len(documents[n]))):
        before = -1 - owners[which] if share else -1 - which
        for token in documents[which]:
            before = number.setdefault((before, token), len(number))
            numbers[which].append(before)
    return numbers


def layout_in(batch: Mapping[str, Tensor]) -> Layout:
    """Return how the documents of a batch lie: in spans; in grids, an encoder's and a decoder's."""
    if SPAN + Spans._fields[0] in batch:
        return Spans(*(batch[SPAN + name] for name in Spans._fields))
    return tuple(
        Grid(*(batch[half + GRID + name] for name in Grid._fields))
        for half in HALVES
        if half + GRID + "tokens" in batch
    )


def can_unpad(model: nn.Module, attention: TrainingAttention, *, share: bool) -> bool:
    """Tell whether documents in one row are to this model what they are alone.

    Runs it on a few tokens, without gradients; `attention` then knows what its layers see.

    Args:
        attention: The model's, in use.
        share: As `unpadded` will be told.
    """
    bare = unwrapped(model)
    if num_virtual(model):
        return False
    halves = HALVES if bare.config.is_encoder_decoder else HALVES[:1]
    vocab, device = bare.config.get_text_config().vocab_size, bare.device
    documents = torch.arange(3, 3 + sum(LENGTHS)).mul(7).remainder(vocab).split(LENGTHS)
    seen, common = documents[1], len(documents[1]) // 2 if share else 0
    seen[:common] = documents[0][:common]
    others = [document.clone() for document in documents]
    for document in (others[0], others[2]):
        document[common:] = document[common:].add(vocab // 2).remainder(vocab)

    def said(inputs: Mapping[str, Tensor]) -> Tensor:
        moved = {name: tensor.to(device) for name, tensor in inputs.items()}
        inputs = laid_out(moved, attention)
        return logits_of(model, inputs["input_ids"], inputs).flatten(0, 1)

    def said_in_one_row(documents: Sequence[Tensor]) -> Tensor:
        ids = torch.zeros(len(documents), max(LENGTHS), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, document in enumerate(documents):
            ids[row, : len(document)], mask[row, : len(document)] = document, 1
        batch = {"target_index": torch.arange(ids.shape[1], ids.shape[1] + len(seen))}
        for half in halves:
            batch |= {half + "input_ids": ids, half + "attention_mask": mask}
        one_row = unpadded(batch, share=share, spans=attention.takes_spans)
        return said(one_row)[one_row["target_index"].to(device)]

    def said_as_they_are(ids: Tensor) -> Tensor:
        return said({half + "input_ids": ids[None] for half in halves})

    first = len(documents[0])
    _listen(model, attention, seen.to(device), halves)
    with evaluating(model):
        alone = said_as_they_are(seen)
        together = said_as_they_are(torch.cat(documents))[first : first + len(seen)]
        open_door = rms_difference([together], [alone])
        for spans in (True, False) if attention.takes_spans else (False,):
            attention.takes_spans = spans
            try:
                here, there = said_in_one_row(documents), said_in_one_row(others)
            except Exception:  # a model's own way of saying that it takes no such row
                continue
            finally:
                attention.layout = ()
            if are_apart([here], [there], [alone], open_door, bare.dtype):
                return True
    return False


@torch.no_grad()
def _listen(
    model: nn.Module, attention: TrainingAttention, ids: Tensor, halves: Sequence[str]
) -> None:
    """Have attention find out what layers see, in the mode the model is in: it may drop some."""
    inputs = {half + "input_ids": ids[None] for half in halves}
    with forked_generators(ids.device), attention.listening():
        logits_of(model, ids[None], inputs)


def laid_out(
    batch: Mapping[str, Tensor], attention: TrainingAttention | None
) -> Mapping[str, Tensor]:
    """Lay the documents of a batch out for attention; return what the model is called with.

    A mask of ones is given where attention needs none: without any, transformers looks for
    documents in the positions, and waits for a GPU to do so.
    """
    layout = layout_in(batch)
    if attention is not None:
        attention.layout = layout
    if layout and attention is not None and not attention.needs_mask:
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    return batch
