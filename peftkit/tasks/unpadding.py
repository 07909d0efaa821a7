"""Batches without padding: all documents one after the other, in one row.

Padding costs all layers as much as tokens do; in a row it is but the few tokens that round its
length. Attention takes the documents apart (`peftkit.kernels.grid`). A model may mix tokens
elsewhere too (convolutions, states), or count positions its own way: so it is asked, on a few
tokens, before it is trained like this.

Shapes: B rows, T tokens of the longest, N tokens of the one row, R documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from peftkit.kernels.grid import Grid, grid_of, width_of
from peftkit.modes import evaluating
from peftkit.tasks.cpu_attention import in_grid
from peftkit.tasks.isolation import are_apart, logits_of, rms_difference
from peftkit.tasks.length import num_virtual
from peftkit.tasks.loss import accepted, unwrapped

MULTIPLE = 16
"""N is one of this: few different shapes, for each of which oneDNN compiles and keeps kernels."""

CELLS = 1000
"""Pairs of a query and a key that take as long as a token in all other layers."""

PADDED = ("attention_mask", "labels", "token_type_ids")
"""What a batch has no longer once it is in one row."""

LENGTHS = (9, 11, 2)
"""Of the documents that a model is asked with."""


def num_positions(lengths: Sequence[int]) -> int:
    """Return how many tokens documents of these lengths are as good as, in one row.

    Their own, and what attention takes for the padding between them.
    """
    cells = len(lengths) * max(lengths) ** 2 - sum(length**2 for length in lengths)
    return sum(lengths) + cells // CELLS


def is_better(batch: Mapping[str, Tensor]) -> bool:
    """Tell whether a padded batch is computed faster in one row."""
    mask = batch["attention_mask"]
    lengths = _lengths(_positions(batch)).tolist()
    in_one_row = _rounded(sum(lengths)) + len(lengths) * width_of(max(lengths)) ** 2 / CELLS
    return in_one_row < mask.numel() + mask.numel() * mask.shape[1] / CELLS


def _rounded(num_tokens: int) -> int:
    return (num_tokens // MULTIPLE + 1) * MULTIPLE  # one of them at least is padding


def _positions(batch: Mapping[str, Tensor]) -> Tensor:
    """Return each token's place in its document, padding left out, of one row after the other."""
    mask = batch["attention_mask"]
    in_row = torch.arange(mask.shape[1]).expand_as(mask)
    return batch.get("position_ids", in_row)[mask.bool()]


def _lengths(positions: Tensor) -> Tensor:
    begins = (positions == 0).nonzero().flatten()
    return begins.diff(append=begins.new_tensor([len(positions)]))


def unpadded(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a padded batch in one row.

    Args:
        batch: input_ids and attention_mask (B, T), 1 where a token is; position_ids (B, T), if
            there are any, which begin anew at each document of a row; target_index, places in the
            flattened (B * T) tokens; and what else there is.

    Returns:
        input_ids and position_ids (1, N); grid_tokens and grid_places, see `Grid`; target_index,
        places among the N; and what else there is.
    """
    mask = batch["attention_mask"]
    real = mask.flatten().nonzero().flatten()
    positions = _positions(batch)
    total = _rounded(len(real))
    extra = total - len(real)
    grid = grid_of(_lengths(positions), total)
    ids = batch["input_ids"].flatten()[real]
    fill = int(ids[0])  # a padding token may be all zeros, of which some norms have no gradient
    number = torch.zeros(mask.numel(), dtype=torch.long)
    number[real] = torch.arange(len(real))
    return {
        **{name: tensor for name, tensor in batch.items() if name not in PADDED},
        "input_ids": pad(ids, (0, extra), value=fill)[None],
        "position_ids": pad(positions, (0, extra))[None],
        "grid_tokens": grid.tokens,
        "grid_places": grid.places,
        "target_index": number[batch["target_index"]],
    }


def grid_in(batch: Mapping[str, Tensor]) -> Grid | None:
    """Return the grid of a batch that is in one row."""
    if "grid_tokens" not in batch:
        return None
    return Grid(batch["grid_tokens"], batch["grid_places"])


def can_unpad(model: nn.Module) -> bool:
    """Tell whether documents in one row are to this model what they are alone.

    Runs it on a few tokens, without gradients. It must be within `cpu_attention`.
    """
    bare = unwrapped(model)
    takes = accepted(model, {"position_ids": None})
    if bare.config.is_encoder_decoder or num_virtual(model) or not takes:
        return False
    vocab = bare.config.get_text_config().vocab_size
    ids = torch.arange(3, 3 + sum(LENGTHS)).mul(7).remainder(vocab)[None]
    first, second = LENGTHS[:2]
    inside = slice(first, first + second)  # the document that is looked at
    other = ids.clone()
    other[:, :first] = other[:, :first].add(vocab // 2).remainder(vocab)
    batch = {
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
        "target_index": torch.arange(0),
    }
    rows = [unpadded({"input_ids": tokens, **batch}) for tokens in (ids, other)]
    with evaluating(model):
        alone = _logits(model, {"input_ids": ids[:, inside]})
        together = _logits(model, {"input_ids": ids})[inside]
        try:
            here, there = (_logits(model, row)[inside] for row in rows)
        except Exception:  # a model's own way of saying that it takes no such row
            return False
        finally:
            in_grid(None)
    open_door = rms_difference([together], [alone])
    return are_apart([here], [there], [alone], open_door, bare.dtype)


def _logits(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    in_grid(grid_in(batch))
    extra = {name: batch[name] for name in ("position_ids",) if name in batch}
    return logits_of(model, batch["input_ids"], extra)[0]
