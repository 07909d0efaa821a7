"""Documents in one row: batches without padding, packed rows, and whether a model keeps them apart.

Padding costs all layers as much as tokens do; in one row it is but the few tokens that round its
length. And what several documents begin with, a system prompt or the same question, is the same to
a causal model: it is there once, and learns from all of them. Attention takes the documents apart
(`peftkit.kernels.varlen`: a grid; on a GPU spans, where the kernel supports the model). A model
may mix tokens elsewhere too (convolutions, states), or count positions its own way; transformers
isolates packed documents for some architectures, attention implementations and batch sizes. No
table is trusted: the model in hand is probed with a few tokens, and where documents change each
other, rows are padded and packing is refused. Rows of an encoder-decoder are padded.

Shapes: B rows, T tokens of the longest, N tokens of the one row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from peftkit.errors import BaseError, DataError
from peftkit.execution.plan import compute_dtype
from peftkit.forward.attention import Layout, TrainingAttention
from peftkit.forward.loss import accepted, unwrapped
from peftkit.kernels.device import forked_generators
from peftkit.kernels.varlen import Grid, Spans, grid_of, rounded_size, spans_of
from peftkit.model.modes import evaluating
from peftkit.model.places import num_virtual

ALIGNMENT, SIZES = 16, 16
"""N is a multiple of ALIGNMENT, one of SIZES sizes from a power of two to the next."""

CELLS = 1000
"""Pairs of a query and a key that cost as much as a token in all other layers."""

PADDED = ("attention_mask", "labels", "token_type_ids")
"""Entries of a padded batch that a batch in one row lacks."""

GRID, SPAN = "grid_", "span_"
"""Prefixes of a batch's entries that are fields of its `Grid`, or of its `Spans`."""

LENGTHS = (11, 9, 2)
"""Of the documents that a model is probed with."""


def num_positions(lengths: Sequence[int]) -> int:
    """Return the cost of documents of these lengths in one row, in tokens.

    Their own tokens, and attention's padding in the grid.
    """
    cells = len(lengths) * max(lengths) ** 2 - sum(length**2 for length in lengths)
    return sum(lengths) + cells // CELLS


def faster(padded: dict[str, Tensor], one_row: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the faster one of two batches of the same rows."""

    def tokens(batch: Mapping[str, Tensor], cells: Tensor) -> float:
        return batch["input_ids"].numel() + cells.numel() * cells.shape[1] / CELLS

    alone, together = tokens(padded, padded["input_ids"]), tokens(one_row, one_row[GRID + "tokens"])
    return one_row if together < alone else padded


def unpadded(batch: Mapping[str, Tensor], *, share: bool, spans: bool = False) -> dict[str, Tensor]:
    """Return a padded batch in one row.

    Args:
        batch: input_ids and attention_mask (B, T), 1 where a token is; position_ids (B, T), if
            there are any, which begin anew at each document of a row; target_index, positions in
            the flattened (B * T) tokens; other entries are passed on.
        share: Put common beginnings of documents there once. The model has to be causal.
        spans: Describe documents by where they begin and end instead of by a grid.

    Returns:
        input_ids and position_ids (1, N); the fields of `Grid`, or of `Spans`; target_index among
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
    # at least one of padding
    shape = (1, rounded_size(max(map(max, places)) + 2, ALIGNMENT, SIZES))
    place = torch.tensor([n for document in places for n in document])
    one_row = {name: tensor for name, tensor in batch.items() if name not in PADDED}
    one_row |= {  # filled with no token that pads: of all zeros some norms have no gradient
        "input_ids": ids.new_full(shape, int(ids[0])),
        "position_ids": positions.new_zeros(shape),
    }
    one_row["input_ids"].view(-1)[place] = ids
    one_row["position_ids"].view(-1)[place] = positions
    if spans:
        one_row |= _entries(SPAN, spans_of(places, shape[1]))
    else:
        one_row |= _entries(GRID, grid_of(places, shape))
    new_index = torch.zeros(mask.numel(), dtype=torch.long)
    new_index[real] = place
    return one_row | {"target_index": new_index[batch["target_index"]]}


def _entries(prefix: str, layout: Grid | Spans) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in layout._asdict().items()}


def _places_in_row(documents: Sequence[Sequence[int]], *, share: bool) -> list[list[int]]:
    """Return where in the row each document's tokens go; the longest document comes first.

    A prefix trie: a node is a beginning of documents, and its number is the place of the token that
    ends it. A causal model computes the same for all documents that go through a node, so they
    share its token. Without sharing each document has a root of its own.
    """
    trie: dict[tuple[int, int], int] = {}  # (parent node, token) -> node
    places: list[list[int]] = [[] for _ in documents]
    for number in sorted(range(len(documents)), key=lambda n: -len(documents[n])):
        node = -1 if share else -1 - number
        for token in documents[number]:
            node = trie.setdefault((node, token), len(trie))
            places[number].append(node)
    return places


def layout_in(batch: Mapping[str, Tensor]) -> Layout:
    """Return the layout of a batch's documents; None: each is a row of its own."""
    for kind, prefix in ((Spans, SPAN), (Grid, GRID)):
        if prefix + kind._fields[0] in batch:
            return kind(*(batch[prefix + name] for name in kind._fields))
    return None


def can_unpad(model: nn.Module, attention: TrainingAttention, *, share: bool) -> bool:
    """Return whether documents in one row are to this model what they are alone.

    Runs it on a few tokens, without gradients; `attention` then knows what its layers see.

    Args:
        attention: The model's, in use.
        share: As `unpadded` is given it.
    """
    bare = unwrapped(model)
    if num_virtual(model) or bare.config.is_encoder_decoder:
        return False
    documents, others = _probe_documents(bare.config.get_text_config().vocab_size, share)
    first, probed = documents[0], documents[1]
    with torch.no_grad(), forked_generators(bare.device), attention.observing():
        # in the mode that the model is in: attention may have dropout
        logits_of(model, probed[None].to(bare.device), {})
    with evaluating(model):
        alone = _probe_logits(model, attention, {"input_ids": probed[None]})
        joined = _probe_logits(model, attention, {"input_ids": torch.cat(documents)[None]})
        mixed = rms_difference([joined[len(first) :][: len(probed)]], [alone])
        for spans in (True, False) if attention.takes_spans else (False,):
            attention.takes_spans = spans
            try:
                together, changed = (
                    _probed_in_one_row(model, attention, rows, share)
                    for rows in (documents, others)
                )
            except Exception:  # a model's own way to say that it takes no such row
                continue
            finally:
                attention.layout = None
            if are_apart([together], [changed], [alone], mixed, compute_dtype(bare)):
                return True
    return False


def _probe_documents(vocab_size: int, share: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return three documents, and the same with another first and last one.

    With `share`, the second begins like the first.
    """
    tokens = torch.arange(3, 3 + sum(LENGTHS)).mul(7).remainder(vocab_size)
    documents = list(tokens.split(LENGTHS))
    common = len(documents[1]) // 2 if share else 0
    documents[1][:common] = documents[0][:common]
    others = [document.clone() for document in documents]
    for document in (others[0], others[2]):
        document[common:] = document[common:].add(vocab_size // 2).remainder(vocab_size)
    return documents, others


def _probe_logits(
    model: nn.Module, attention: TrainingAttention, batch: Mapping[str, Tensor]
) -> Tensor:
    """Return the logits of a batch's tokens (B * T, V)."""
    device = unwrapped(model).device
    on_device = {name: tensor.to(device) for name, tensor in batch.items()}
    inputs = laid_out(on_device, attention)
    return logits_of(model, inputs["input_ids"], inputs).flatten(0, 1)


def _probed_in_one_row(
    model: nn.Module, attention: TrainingAttention, documents: Sequence[Tensor], share: bool
) -> Tensor:
    """Return the logits of the second document, in one row with the others."""
    ids = pad_sequence(list(documents), batch_first=True)
    lengths = torch.tensor([len(document) for document in documents])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    index = torch.arange(ids.shape[1], ids.shape[1] + len(documents[1]))
    batch = {"input_ids": ids, "attention_mask": mask, "target_index": index}
    one_row = unpadded(batch, share=share, spans=attention.takes_spans)
    logits = _probe_logits(model, attention, one_row)
    return logits[one_row["target_index"].to(logits.device)]


def laid_out(
    batch: Mapping[str, Tensor], attention: TrainingAttention | None
) -> Mapping[str, Tensor]:
    """Tell attention the layout of a batch's documents; return the batch as the model reads it.

    A mask of ones is added where attention needs none: without any, transformers looks for
    documents in the positions, and waits for a GPU to do so.
    """
    layout = layout_in(batch)
    if attention is not None:
        attention.layout = layout
    if layout is not None and attention is not None and not attention.needs_mask:
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    return batch


def are_apart(
    together: Sequence[Tensor],
    changed: Sequence[Tensor],
    alone: Sequence[Tensor],
    mixed: float,
    dtype: torch.dtype,
) -> bool:
    """Return whether documents that share a row have the logits that they have alone.

    The effect of another document is computed by the same kernels on the same shapes: nothing is
    left but a mixture of experts' grouping. Together and alone differ in shapes, and so in
    rounding.

    Args:
        together, changed, alone: Logits of documents: in a row with others; with other ones;
            each by itself.
        mixed: By how much they change where nothing keeps them apart (root mean square).
        dtype: Of the model.
    """
    narrow = dtype not in (torch.float32, torch.float64)
    leak, apart = (2e-2, 0.15) if narrow else (1e-3, 1e-2)
    scale = max(mixed, 8 * torch.finfo(dtype).eps * rms_difference(alone, None))
    # written so that NaN is no success
    return (
        rms_difference(together, changed) <= leak * scale
        and rms_difference(together, alone) <= apart * scale
    )


def check_causal(model: nn.Module) -> None:
    """Make sure that no token sees a later one, as next-token training and right padding need.

    Raises:
        BaseError: One does; or the model is an encoder-decoder; or it makes no finite numbers.
    """
    bare = unwrapped(model)
    message = f"Cannot train {type(bare).__name__} as a causal language model."
    if bare.config.is_encoder_decoder:
        raise BaseError(message, found="It is an encoder-decoder.", fix="Choose another base.")
    ids, changed = _probe_ids(bare, [(9, 8)])
    with evaluating(model):
        both = logits_of(model, torch.cat([ids, changed]).flip(1), {})[:, :8]
    before, after = both
    if not bool(before.isfinite().all()):
        raise BaseError(
            message,
            found="Its logits are not finite numbers.",
            fix="Its weights are damaged, or base.dtype is too narrow.",
        )
    if not rms_difference([before], [after]) <= 2e-2 * rms_difference([before], None):
        raise BaseError(
            message,
            found="What it says of a token changes with the tokens after it.",
            fix="Choose a base that was made for generation.",
        )


def check_causal_answer(
    model: nn.Module, inputs: Mapping[str, Any], place: int, other: int
) -> None:
    """Make sure that no token before a target token depends on it.

    Probed with a row of the data: over a prompt, or an image, some models see in both directions.

    Args:
        inputs: Of one row, as the model takes them.
        place: Of a target token. other: Another token to put there.

    Raises:
        BaseError: One does, or logits are not finite.
    """
    ids = inputs["input_ids"]
    changed = ids.clone()
    changed[:, place] = other
    more = {name: value for name, value in inputs.items() if name != "input_ids"}
    with evaluating(model):
        before, after = (logits_of(model, each, more)[:, :place] for each in (ids, changed))
    # written so that NaN is no success
    if not rms_difference([before], [after]) <= 2e-2 * rms_difference([before], None):
        raise BaseError(
            f"Cannot train {type(unwrapped(model)).__name__} on answers.",
            found="What it says of a token changes with the answer's tokens after it.",
            fix="Choose a base that was made to write text after images.",
        )


def check_packing(model: nn.Module) -> None:
    """Make sure that position_ids which restart keep packed documents apart in this model.

    Raises:
        DataError: They do not.
    """
    with evaluating(model):
        if not _isolates(model):
            raise DataError(
                f"Cannot pack documents for {type(unwrapped(model)).__name__}.",
                found="One document of a row changes what the model says of the next.",
                fix="Set data.packing: false.",
            )


def _isolates(model: nn.Module) -> bool:
    """Run two rows of two documents each, packed and alone, and compare the second documents."""
    bare = unwrapped(model)
    splits = ((9, 8), (6, 11))  # two rows: some kernels isolate only one
    ids = torch.cat(_probe_ids(bare, splits))  # (4, T): the rows, and the same rows changed
    each = [torch.cat([torch.arange(n, device=ids.device) for n in split]) for split in splits]
    packed = {"position_ids": torch.stack(each * 2)}
    together, changed = _seconds(logits_of(model, ids, packed), splits)
    documents = [ids[row, first:] for row, (first, _) in enumerate(splits)]
    padded = logits_of(model, pad_sequence(documents, batch_first=True), {})
    alone = [padded[row, : len(document)] for row, document in enumerate(documents)]
    joined, joined_changed = _seconds(logits_of(model, ids, {}), splits)
    mixed = rms_difference(joined, joined_changed)
    return are_apart(together, changed, alone, mixed, compute_dtype(bare))


def _probe_ids(model: Any, splits: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return ids (B, T), and the same with other tokens in the first document of each row."""
    vocab = model.config.get_text_config().vocab_size
    length = sum(splits[0])
    device = next(model.get_input_embeddings().parameters()).device
    count = torch.arange(len(splits) * length, device=device).view(len(splits), length)
    ids = count.mul(7).add(3).remainder(vocab)  # no generator is touched
    changed = ids.clone()
    for row, (first, _) in enumerate(splits):
        changed[row, :first] = changed[row, :first].add(vocab // 2).remainder(vocab)
    return ids, changed


def logits_of(model: nn.Module, ids: Tensor, extra: Mapping[str, Any]) -> Tensor:
    """Return the logits (B, T, V) of tokens (B, T) in float32, given what else the model takes."""
    inputs = accepted(model, {"input_ids": ids, "use_cache": False, **extra})
    logits: Tensor = model(**inputs).logits
    return logits.float()


def _seconds(
    logits: Tensor, splits: Sequence[tuple[int, int]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the second documents of the rows, and of the rows changed."""
    seconds = [row[first:] for row, (first, _) in zip(logits, [*splits, *splits], strict=True)]
    return seconds[: len(splits)], seconds[len(splits) :]


def rms_difference(tensors: Sequence[Tensor], others: Sequence[Tensor] | None) -> float:
    """Return the root mean square of all differences; of the tensors themselves without others."""
    if others is not None:
        tensors = [a - b for a, b in zip(tensors, others, strict=True)]
    return torch.cat([tensor.flatten() for tensor in tensors]).square().mean().sqrt().item()
