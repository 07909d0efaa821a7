"""Padding-free batches: documents of several rows in one sequence, without padding.

Padding costs all layers as much as tokens; a padding-free sequence pads only its rounded length. A
causal model also computes shared prefixes of documents (a system prompt, a repeated question) once
and trains them with the gradients of all documents. Attention isolates the documents
(`peftkit.kernels.varlen`: a grid, or spans on a GPU if the kernel supports the model). probes.py
tests whether a model supports this; otherwise its rows are padded, as for encoder-decoders.

Shapes: B rows, T tokens of the longest, N tokens of the padding-free sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from peftkit.data.tokens import num_common
from peftkit.forward.attention import Layout, TrainingAttention
from peftkit.kernels.varlen import Grid, Spans, grid_of, rounded_size, spans_of

ALIGNMENT, SIZES = 16, 16
"""N is a multiple of ALIGNMENT, and one of SIZES sizes between two powers of two."""
FEW_SIZES = 8
"""The same for recorded passes, plus ALIGNMENT: packed rows of nearly a power of two have one size.
Of chats, N has 5 % padding; SIZES gives 2.7 %, and twice as many graphs."""

CELLS = 1000
"""Query-key pairs that cost as much as one token in all other layers."""

PADDED = ("attention_mask", "labels", "token_type_ids")
"""Keys of a padded batch that a padding-free batch lacks."""

GRID, SPAN = "grid_", "span_"
"""Prefixes of batch keys that hold the fields of a `Grid` or of `Spans`."""


def num_positions(lengths: Sequence[int]) -> int:
    """Return the cost of a padding-free sequence of documents with these lengths, in tokens.

    It is the number of tokens plus attention's padding in the grid.
    """
    cells = len(lengths) * max(lengths) ** 2 - sum(length**2 for length in lengths)
    return sum(lengths) + cells // CELLS


def faster(padded: dict[str, Tensor], padding_free: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the faster of two batches of the same rows."""

    def tokens(batch: Mapping[str, Tensor], cells: Tensor) -> float:
        return batch["input_ids"].numel() + cells.numel() * cells.shape[1] / CELLS

    cost = tokens(padding_free, padding_free[GRID + "tokens"])
    return padding_free if cost < tokens(padded, padded["input_ids"]) else padded


def unpadded(
    batch: Mapping[str, Tensor], *, share: bool, spans: bool = False, rounds: bool = False
) -> dict[str, Tensor]:
    """Convert a padded batch to a padding-free batch.

    Args:
        batch: input_ids and attention_mask (B, T), 1 for a token; optionally position_ids (B, T),
            which restart at each document of a row; target_index, positions in the flattened
            (B * T) tokens; other entries are passed through.
        share: Whether to store shared prefixes of documents once. The model must be causal.
        spans: Whether to describe documents by their bounds instead of by a grid.
        rounds: Whether all sizes are rounded up to few ones; see `spans_of`.

    Returns:
        input_ids and position_ids (1, N); the fields of `Grid` or of `Spans`; target_index into
        these tokens; the other entries.
    """
    mask = batch["attention_mask"]
    positions = batch.get("position_ids", torch.arange(mask.shape[1]).expand_as(mask))
    real = mask.flatten().nonzero().flatten()
    ids, positions = batch["input_ids"].flatten()[real], positions.flatten()[real]
    begins = (positions == 0).nonzero().flatten()
    lengths: list[int] = begins.diff(append=begins.new_tensor([len(ids)])).tolist()
    documents = [document.tolist() for document in ids.split(lengths)]
    places = _places_in_row(documents, share=share)
    used = max(map(max, places)) + 1
    size = rounded_size(used + 1, ALIGNMENT, SIZES)  # at least one token of padding
    if rounds:
        size = rounded_size(used, ALIGNMENT, FEW_SIZES) + ALIGNMENT
    shape = (1, size)
    place = torch.tensor([n for document in places for n in document])
    padding_free = {name: tensor for name, tensor in batch.items() if name not in PADDED}
    padding_free |= {  # filled with a real token: of zeros some norms have no gradient
        "input_ids": ids.new_full(shape, int(ids[0])),
        "position_ids": positions.new_zeros(shape),
    }
    padding_free["input_ids"].view(-1)[place] = ids
    padding_free["position_ids"].view(-1)[place] = positions
    layout: Grid | Spans = (
        spans_of(places, shape[1], rounds=rounds) if spans else grid_of(places, shape)
    )
    prefix = SPAN if spans else GRID
    padding_free |= {prefix + name: tensor for name, tensor in layout._asdict().items()}
    new_index = torch.zeros(mask.numel(), dtype=torch.long)
    new_index[real] = place
    return padding_free | {"target_index": new_index[batch["target_index"]]}


def _places_in_row(documents: Sequence[list[int]], *, share: bool) -> list[list[int]]:
    """Return the positions of each document's tokens in the sequence, the longest document first.

    A causal model computes the same for all documents with a prefix, so they share its tokens: each
    document takes the positions of the longest prefix that an earlier document also has. That one
    is a neighbour of it in alphabetical order. A loop over tokens would hold Python's lock while
    the training thread launches kernels.
    """
    places: list[list[int]] = [[] for _ in documents]
    earlier: list[tuple[list[int], int]] = []  # alphabetical
    used = 0
    for number in sorted(range(len(documents)), key=lambda n: -len(documents[n])):
        document = documents[number]
        place = bisect_left(earlier, (document, number)) if share else 0
        near = earlier[max(place - 1, 0) : place + 1]
        size, source = max(((num_common(document, d), n) for d, n in near), default=(0, number))
        end = used + len(document) - size
        places[number] = [*places[source][:size], *range(used, end)]
        used = end
        if share:
            earlier.insert(place, (document, number))
    return places


def layout_in(batch: Mapping[str, Tensor]) -> Layout:
    """Return the layout of a batch's documents; None if each row is one document."""
    for kind, prefix in ((Spans, SPAN), (Grid, GRID)):
        if prefix + kind._fields[0] in batch:
            return kind(*(batch[prefix + name] for name in kind._fields))
    return None


def laid_out(
    batch: Mapping[str, Tensor], attention: TrainingAttention | None
) -> Mapping[str, Tensor]:
    """Set the layout of a batch's documents in `attention`; return the model's inputs.

    A mask of ones is added if attention needs none. Without a mask, transformers searches the
    positions for documents, which synchronises the GPU with the host. With mixers, it has four
    dimensions: transformers passes it on, instead of searching it for padding.
    """
    layout = layout_in(batch)
    if attention is not None:
        attention.layout = layout
    if layout is not None and attention is not None and not attention.needs_mask:
        mask = torch.ones_like(batch["input_ids"])
        return {**batch, "attention_mask": mask if attention.mixers is None else mask[None, None]}
    return batch
