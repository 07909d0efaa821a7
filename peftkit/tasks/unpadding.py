"""Batches without padding: all documents one after the other, in one row.

Padding costs all layers as much as tokens do; in a row it is but the few tokens that round its
length. And what several documents begin with, a system prompt or the same question, is the same to
a causal model: it is there once, and learns from all of them. Attention takes the documents apart
(`peftkit.kernels.grid`; on a GPU `peftkit.kernels.varlen`, where that serves the model). A model
may mix tokens elsewhere too (convolutions, states), or count positions its own way: so it is
asked, on a few tokens, before it is trained like this. Rows of an encoder-decoder are padded.

Shapes: B rows, T tokens of the longest, N tokens of the one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from peftkit.kernels.device import forked_generators
from peftkit.kernels.grid import Grid, grid_of, one_of_few
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

PADDED = ("attention_mask", "labels", "token_type_ids")
"""What a batch has no longer once it is in one row."""

GRID = "grid_"
"""How the names of a batch begin that are fields of its `Grid`."""

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

    def tokens(batch: Mapping[str, Tensor], cells: Tensor) -> float:
        return batch["input_ids"].numel() + cells.numel() * cells.shape[1] / CELLS

    alone, together = tokens(padded, padded["input_ids"]), tokens(one_row, one_row[GRID + "tokens"])
    return one_row if together < alone else padded


def unpadded(batch: Mapping[str, Tensor], *, share: bool, spans: bool = False) -> dict[str, Tensor]:
    """Return a padded batch in one row.

    Args:
        batch: input_ids and attention_mask (B, T), 1 where a token is; position_ids (B, T), if
            there are any, which begin anew at each document of a row; target_index, places in the
            flattened (B * T) tokens; and what else there is.
        share: Have what several documents begin with once. The model has to be causal.
        spans: Say where documents begin and end instead of making a grid.

    Returns:
        input_ids and position_ids (1, N); the fields of `Grid`, or of `Spans`; target_index, places
        among these tokens; and what else there is.
    """
    mask = batch["attention_mask"]
    positions = batch.get("position_ids", torch.arange(mask.shape[1]).expand_as(mask))
    real = mask.flatten().nonzero().flatten()
    ids, positions = batch["input_ids"].flatten()[real], positions.flatten()[real]
    begins = (positions == 0).nonzero().flatten()
    lengths: list[int] = begins.diff(append=begins.new_tensor([len(ids)])).tolist()
    documents = [document.tolist() for document in ids.split(lengths)]
    numbers = _numbered(documents, share=share)
    # at least one of padding
    shape = (1, one_of_few(max(map(max, numbers)) + 2, ALIGNMENT, SIZES))
    number = torch.tensor([n for document in numbers for n in document])
    made = {name: tensor for name, tensor in batch.items() if name not in PADDED}
    made |= {  # filled with no token that pads: of all zeros some norms have no gradient
        "input_ids": ids.new_full(shape, int(ids[0])),
        "position_ids": positions.new_zeros(shape),
    }
    made["input_ids"].view(-1)[number] = ids
    made["position_ids"].view(-1)[number] = positions
    if spans:
        made |= _named(SPAN, spans_of(numbers, shape[1]))
    else:
        made |= _named(GRID, grid_of(numbers, shape))
    now = torch.zeros(mask.numel(), dtype=torch.long)
    now[real] = number
    return made | {"target_index": now[batch["target_index"]]}


def _named(start: str, fields: Grid | Spans) -> dict[str, Tensor]:
    return {start + name: tensor for name, tensor in fields._asdict().items()}


def _numbered(documents: Sequence[Sequence[int]], *, share: bool) -> list[list[int]]:
    """Return the number in the row of each document's tokens; the longest has the first.

    A causal model computes of a token what depends on its document up to there. So beginnings are
    numbered: the one that ends here, by the one that ends a token before and by this token.
    """
    number: dict[tuple[int, int], int] = {}
    numbers: list[list[int]] = [[] for _ in documents]
    for which in sorted(range(len(documents)), key=lambda n: -len(documents[n])):
        before = -1 if share else -1 - which
        for token in documents[which]:
            before = number.setdefault((before, token), len(number))
            numbers[which].append(before)
    return numbers


def layout_in(batch: Mapping[str, Tensor]) -> Layout:
    """Return how the documents of a batch lie: in spans, in a grid, or each in a row of its own."""
    for kind, start in ((Spans, SPAN), (Grid, GRID)):
        if start + kind._fields[0] in batch:
            return kind(*(batch[start + name] for name in kind._fields))
    return None


def can_unpad(model: nn.Module, attention: TrainingAttention, *, share: bool) -> bool:
    """Tell whether documents in one row are to this model what they are alone.

    Runs it on a few tokens, without gradients; `attention` then knows what its layers see.

    Args:
        attention: The model's, in use.
        share: As `unpadded` will be told.
    """
    bare = unwrapped(model)
    if num_virtual(model) or bare.config.is_encoder_decoder:
        return False
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
        index = torch.arange(ids.shape[1], ids.shape[1] + len(seen))
        batch = {"input_ids": ids, "attention_mask": mask, "target_index": index}
        one_row = unpadded(batch, share=share, spans=attention.takes_spans)
        return said(one_row)[one_row["target_index"].to(device)]

    def said_as_they_are(ids: Tensor) -> Tensor:
        return said({"input_ids": ids[None]})

    first = len(documents[0])
    _listen(model, attention, seen.to(device))
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
                attention.layout = None
            if are_apart([here], [there], [alone], open_door, bare.dtype):
                return True
    return False


@torch.no_grad()
def _listen(model: nn.Module, attention: TrainingAttention, ids: Tensor) -> None:
    """Have attention find out what layers see, in the mode the model is in: it may drop some."""
    with forked_generators(ids.device), attention.listening():
        logits_of(model, ids[None], {})


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
    if layout is not None and attention is not None and not attention.needs_mask:
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    return batch
