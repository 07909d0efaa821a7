"""Are documents that share a row isolated from each other? Asked of the model itself.

transformers isolates packed documents where position_ids restart, for some architectures, some
attention implementations, some batch sizes. No table is trusted: the model in hand is run on two
documents, packed and alone; where positions do not isolate them, packing is refused.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from peftkit.errors import BaseError, DataError
from peftkit.model.modes import evaluating
from peftkit.tasks.loss import accepted, unwrapped


def are_apart(
    here: Sequence[Tensor],
    other: Sequence[Tensor],
    alone: Sequence[Tensor],
    open_door: float,
    dtype: torch.dtype,
) -> bool:
    """Tell whether documents that stand together say what they say alone.

    What another document changes is computed by the same kernels on the same shapes: nothing is
    left but a mixture of experts' grouping. Together against alone differ in shapes, and so in
    rounding.

    Args:
        here, other, alone: Logits of documents: together; where another document is another one;
            each by itself.
        open_door: By how much they change where nothing keeps them apart (root mean square).
        dtype: Of the model.
    """
    narrow = dtype not in (torch.float32, torch.float64)
    leak, apart = (2e-2, 0.15) if narrow else (1e-3, 1e-2)
    scale = max(open_door, 8 * torch.finfo(dtype).eps * rms_difference(alone, None))
    # written so that NaN is no success
    return (
        rms_difference(here, other) <= leak * scale and rms_difference(here, alone) <= apart * scale
    )


def check_causal(model: nn.Module) -> None:
    """Make sure that no token sees a later one, as next-token training and right padding need.

    Raises:
        BaseError: One does; or the model is an encoder-decoder; or it makes no finite numbers.
    """
    bare = unwrapped(model)
    asked = f"Cannot train {type(bare).__name__} as a causal language model."
    if bare.config.is_encoder_decoder:
        raise BaseError(asked, found="It is an encoder-decoder.", fix="Choose another base.")
    ids, changed = _probe_ids(bare, [(9, 8)])
    with evaluating(model):
        both = logits_of(model, torch.cat([ids, changed]).flip(1), {})[:, :8]
    before, after = both
    if not bool(before.isfinite().all()):
        found = "Its logits are not finite numbers."
        raise BaseError(
            asked, found=found, fix="Its weights are damaged, or base.dtype is too narrow."
        )
    if not rms_difference([before], [after]) <= 2e-2 * rms_difference([before], None):
        found = "What it says of a token changes with the tokens after it."
        raise BaseError(asked, found=found, fix="Choose a base that was made for generation.")


def check_causal_answer(
    model: nn.Module, inputs: Mapping[str, Any], place: int, other: int
) -> None:
    """Make sure that the tokens before a learnt one say the same whichever it is.

    Asked with a row of the data: over a prompt, or an image, some models see in both directions.

    Args:
        inputs: Of one row, as the model takes them.
        place: Of a learnt token. other: What it might have been.

    Raises:
        BaseError: They do not, or are not finite.
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
    here, other = _seconds(logits_of(model, ids, packed), splits)
    documents = [ids[row, first:] for row, (first, _) in enumerate(splits)]
    padded = logits_of(model, pad_sequence(documents, batch_first=True), {})
    alone = [padded[row, : len(document)] for row, document in enumerate(documents)]
    joined, joined_changed = _seconds(logits_of(model, ids, {}), splits)
    return are_apart(here, other, alone, rms_difference(joined, joined_changed), bare.dtype)


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
    found = [row[first:] for row, (first, _) in zip(logits, [*splits, *splits], strict=True)]
    return found[: len(splits)], found[len(splits) :]


def rms_difference(tensors: Sequence[Tensor], others: Sequence[Tensor] | None) -> float:
    """Return the root mean square of all differences; of the tensors themselves without others."""
    if others is not None:
        tensors = [a - b for a, b in zip(tensors, others, strict=True)]
    return torch.cat([tensor.flatten() for tensor in tensors]).square().mean().sqrt().item()
