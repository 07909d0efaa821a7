"""Are documents that share a row isolated from each other? Asked of the model itself.

transformers isolates packed documents where position_ids restart, for some architectures, some
attention implementations, some batch sizes. No table is trusted: the model in hand is run on two
documents, packed and alone. Where positions do not isolate them, an explicit mask is tried; where
that fails too, packing is refused.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from peftkit.errors import BaseError, DataError
from peftkit.kernels.attention import additive
from peftkit.model.modes import evaluating
from peftkit.tasks.loss import accepted, unwrapped

Isolation = Literal["positions", "mask"]

_MAX_WINDOW = 1024


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


def check_packing(model: nn.Module) -> Isolation:
    """Return how packed documents are kept apart in this model.

    "positions": by position_ids that restart. "mask": by an explicit additive mask besides.

    Raises:
        DataError: By neither.
    """
    bare = unwrapped(model)
    first: Isolation = "positions"
    for mode in (first, "mask"):
        if mode == "mask" and not _mask_can_be_tried(bare):
            continue
        with evaluating(model):
            if _isolates(model, mode):
                return mode
    raise DataError(
        f"Cannot pack documents for {type(bare).__name__}.",
        found="One document of a row changes what the model says of the next, "
        "with restarted positions and with an explicit mask.",
        fix="Set data.packing: false.",
    )


def isolating_mask(model: nn.Module, position_ids: Tensor) -> Tensor | dict[str, Tensor]:
    """Return the additive mask (B, 1, T, T) of documents that begin where position_ids is 0.

    It is float: eager attention adds a mask, and a boolean one would add 0 and 1. Models that mix
    full and sliding-window layers take one mask for each kind.
    """
    bare = unwrapped(model)
    document = (position_ids == 0).cumsum(1)
    place = torch.arange(position_ids.shape[1], device=position_ids.device)
    distance = place[:, None] - place[None, :]  # (T, T), query minus key
    seen = ((document[:, :, None] == document[:, None, :]) & (distance >= 0))[:, None]
    window = _window(bare)
    if window is None:
        return additive(seen, bare.dtype)
    return {
        "full_attention": additive(seen, bare.dtype),
        "sliding_attention": additive(seen & (distance < window), bare.dtype),
    }


def _window(model: Any) -> int | None:
    """Return the attention window of a model that has layers with one."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    return config.sliding_window if "sliding_attention" in kinds else None


def _mask_can_be_tried(model: Any) -> bool:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds:  # a kind of layer that we know no mask for would silently lose its own
        known = kinds <= {"full_attention", "sliding_attention"}
        return known and (_window(model) or 0) <= _MAX_WINDOW
    # one mask would take the place of the model's own window
    return getattr(config, "sliding_window", None) is None


def _isolates(model: nn.Module, mode: Isolation) -> bool:
    """Run two rows of two documents each, packed and alone, and compare the second documents."""
    bare = unwrapped(model)
    # a mask must also keep the model's window, which only a document longer than it can show
    longer = (_window(bare) or 0) if mode == "mask" else 0
    splits = ((9, 8 + longer), (6, 11 + longer))  # two rows: some kernels isolate only one
    ids = torch.cat(_probe_ids(bare, splits))  # (4, T): the rows, and the same rows changed
    each = [torch.cat([torch.arange(n, device=ids.device) for n in split]) for split in splits]
    packed: dict[str, Any] = {"position_ids": torch.stack(each * 2)}
    if mode == "mask":
        packed["attention_mask"] = isolating_mask(model, packed["position_ids"])
    try:
        here, other = _seconds(logits_of(model, ids, packed), splits)
    except Exception:  # a model's own way of saying that it takes no such mask
        if mode == "mask":
            return False
        raise
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
