"""Probes of a model with a few tokens: are documents of a sequence isolated, is it causal?

A model may mix tokens outside of attention (convolutions, states), or compute positions in its own
way; transformers isolates packed documents only for some architectures, attention implementations
and batch sizes. Therefore there is no table of models: each model is probed. If its documents
influence each other, its mixers isolate them (mixers.py). If they still do, rows are padded and
packing is refused.

Shapes: B rows, T tokens of the longest, N tokens of the padding-free sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from peftkit.errors import BaseError, DataError
from peftkit.execution.out_of_memory import is_out_of_memory, one_line
from peftkit.forward.attention import TrainingAttention
from peftkit.forward.loss import accepted, unwrapped
from peftkit.forward.noise import Trial
from peftkit.forward.padding_free import laid_out, unpadded
from peftkit.forward.row_lengths import limits_of
from peftkit.kernels.device import forked_generators
from peftkit.model.modes import evaluating
from peftkit.model.places import num_virtual

LENGTHS = (11, 9, 2, 10)
"""Lengths of the documents that a model is probed with. The second and fourth are compared; the
fourth shares no prefix and follows the first in spans."""
LEAK_SHARE = 1 / 8
"""Share of the noise that other documents may cause: a scan that restarts at each document rounds
in their company."""


def can_unpad(model: nn.Module, attention: TrainingAttention, *, share: bool) -> bool:
    """Return whether a padding-free sequence gives each document the logits that it has alone."""
    return not why_padded(model, attention, share=share)


def why_padded(model: nn.Module, attention: TrainingAttention, *, share: bool) -> str:
    """Return why rows of a model must be padded; "" if documents of a row have their own logits.

    Runs the model on a few tokens without gradients; `attention` records the masks of its layers.

    Args:
        attention: The model's active training attention.
        share: See `unpadded`.
    """
    bare = unwrapped(model)
    if num_virtual(model) or bare.config.is_encoder_decoder:
        return "Its rows have virtual tokens, or an encoder and a decoder."
    documents, others = _probe_documents(bare.config.get_text_config().vocab_size, share)
    probed = documents[1::2]
    try:
        with torch.no_grad(), forked_generators(bare.device), attention.observing():
            # in the model's current mode, because attention may have dropout
            logits_of(model, probed[0][None].to(bare.device), {})
    except NotImplementedError as error:  # our attention does not support the model's
        return f"{type(bare).__name__} raises {one_line(error)}"
    mixing = f"Documents of one sequence change each other's logits in {type(bare).__name__}."
    with evaluating(model):
        alone = Trial(
            model,
            lambda: [_probe_logits(model, attention, {"input_ids": ids[None]}) for ids in probed],
        )

        def problem_of(spans: bool) -> str:
            attention.takes_spans = spans
            try:
                together, changed = (
                    _probed_unpadded(model, attention, rows, share) for rows in (documents, others)
                )
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                # the model does not support such sequences
                return f"{type(bare).__name__} raises {one_line(error)}"
            finally:
                attention.layout = None
            return "" if _are_apart(model, together, changed, alone) else mixing

        layouts = (True, False) if attention.takes_spans else (False,)
        problem = ""
        for spans in layouts:
            if not (problem := problem_of(spans)):
                return ""
        from peftkit.forward.find_mixers import isolate_mixers  # a leaf

        if isolate_mixers(bare, attention, layouts, lambda spans: not problem_of(spans)):
            return ""
    return problem


def _probe_documents(vocab_size: int, share: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return four documents, and the same documents with another first and third one.

    With `share`, the first two documents have a common prefix.
    """
    tokens = torch.arange(3, 3 + sum(LENGTHS)).mul(7).remainder(vocab_size)
    documents = list(tokens.split(LENGTHS))
    num_shared = len(documents[1]) // 2 if share else 0
    documents[1][:num_shared] = documents[0][:num_shared]
    others = [document.clone() for document in documents]
    for document in (others[0], others[2]):
        document[num_shared:] = document[num_shared:].add(vocab_size // 2).remainder(vocab_size)
    return documents, others


def _probe_logits(
    model: nn.Module, attention: TrainingAttention, batch: Mapping[str, Tensor]
) -> Tensor:
    """Return the logits of a batch's tokens (B * T, V)."""
    device = unwrapped(model).device
    on_device = {name: tensor.to(device) for name, tensor in batch.items()}
    inputs = laid_out(on_device, attention)
    return logits_of(model, inputs["input_ids"], inputs).flatten(0, 1)


def _probed_unpadded(
    model: nn.Module, attention: TrainingAttention, documents: Sequence[Tensor], share: bool
) -> list[Tensor]:
    """Return the logits of the second and fourth document in a padding-free sequence."""
    ids = pad_sequence(list(documents), batch_first=True)
    lengths = torch.tensor([len(document) for document in documents])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    index = torch.arange(mask.numel()).view_as(mask)[1::2][mask[1::2] > 0]
    batch = {"input_ids": ids, "attention_mask": mask, "target_index": index}
    padding_free = unpadded(batch, share=share, spans=attention.takes_spans)
    logits = _probe_logits(model, attention, padding_free)
    targets = logits[padding_free["target_index"].to(logits.device)]
    return list(targets.split(lengths[1::2].tolist()))


def _are_apart(
    model: nn.Module, together: Sequence[Tensor], changed: Sequence[Tensor], alone: Trial
) -> bool:
    """Return whether documents of one sequence have the logits that they have alone.

    Args:
        together, changed: Logits of documents in a sequence with others, and with different others.
            They come from the same kernels on the same shapes: only a mixture of experts, which
            groups tokens, may round them differently.
    """
    is_equal = all(map(torch.equal, changed, together))
    share = 1.0 if is_equal or _rows_interact(model) else LEAK_SHARE
    return alone.accepts(changed, together, share) and alone.accepts(together)


def _rows_interact(model: nn.Module) -> bool:
    """Return whether a row's logits change with the other rows of its batch, by rounding."""
    row, other = torch.cat(_probe_ids(unwrapped(model), [(9, 8)]))
    pairs = (torch.stack([row, one]) for one in (row, other))
    first, second = (logits_of(model, pair, {})[0] for pair in pairs)
    return not torch.equal(first, second)


def check_causal(model: nn.Module) -> None:
    """Check that no token sees a later one, which next-token training and right padding require.

    Raises:
        BaseError: A token does, the model is an encoder-decoder, or its logits are not finite.
    """
    bare = unwrapped(model)
    message = f"Cannot train {type(bare).__name__} as a causal language model."
    if bare.config.is_encoder_decoder:
        raise BaseError(message, found="It is an encoder-decoder.", fix="Choose another base.")
    ids, changed = _probe_ids(bare, [(9, 8)])
    probes = torch.cat([ids, changed]).flip(1)
    with evaluating(model):
        trial = Trial(model, lambda: list(logits_of(model, probes, {})[:, :8]))
        before, after = trial.expected
        is_causal = trial.accepts([after], [before])
    if not bool(before.isfinite().all()):
        raise BaseError(
            message,
            found="Its logits are not finite.",
            fix="Check the base's files for damage, or set base.dtype to a wider dtype.",
        )
    if not is_causal:
        raise BaseError(
            message,
            found="The logits of a token change with the tokens after it.",
            fix="Choose a base for text generation.",
        )


def check_causal_answer(
    model: nn.Module, inputs: Mapping[str, Any], place: int, other: int
) -> None:
    """Check that no token before a target token depends on the target.

    The probe is a row of the data, because some models attend in both directions within a prompt or
    an image.

    Args:
        inputs: The model's inputs for one row.
        place: Position of a target token. other: Another token for this position.

    Raises:
        BaseError: A token does, or logits are not finite.
    """
    ids = inputs["input_ids"]
    changed = ids.clone()
    changed[:, place] = other
    more = {name: value for name, value in inputs.items() if name != "input_ids"}
    with evaluating(model):
        trial = Trial(model, lambda: [logits_of(model, ids, more)[:, :place]])
        # False for NaN too
        is_causal = trial.accepts([logits_of(model, changed, more)[:, :place]])
    if not is_causal:
        raise BaseError(
            f"Cannot train {type(unwrapped(model)).__name__} on answers.",
            found="The logits of a token change with the response's tokens after it.",
            fix="Choose a base that generates text after images.",
        )


def check_packing(model: nn.Module, max_length: int = 0) -> None:
    """Check that restarting position_ids isolate packed documents in this model.

    Args:
        max_length: Tokens of a packed row.

    Raises:
        DataError: They do not.
    """
    limit = limits_of(model).packed
    if limit is not None and max_length > limit:
        raise DataError(
            f"Cannot pack {type(unwrapped(model)).__name__}'s documents into {max_length} tokens.",
            found=f"After {limit} tokens its attention depends on a token's place in the row.",
            fix=f"Set data.max_length to {limit} or less, or data.packing: false.",
        )
    with evaluating(model):
        if not _isolates(model):
            raise DataError(
                f"Cannot pack documents for {type(unwrapped(model)).__name__}.",
                found="One document of a packed sequence changes the logits of the next document.",
                fix="Set data.packing: false.",
            )


def _isolates(model: nn.Module) -> bool:
    """Run two rows of two documents each, packed and alone, and compare the second documents."""
    bare = unwrapped(model)
    splits = ((9, 8), (6, 11))  # two rows, because some kernels isolate only one
    ids = torch.cat(_probe_ids(bare, splits))  # (4, T): the rows, and the same rows changed
    positions = [torch.cat([torch.arange(n, device=ids.device) for n in split]) for split in splits]
    packed = {"position_ids": torch.stack(positions * 2)}
    together, changed = _seconds(logits_of(model, ids, packed), splits)
    documents = [ids[row, first:] for row, (first, _) in enumerate(splits)]
    padded = pad_sequence(documents, batch_first=True)

    def alone() -> list[Tensor]:
        logits = logits_of(model, padded, {})
        return [row[: len(document)] for row, document in zip(logits, documents, strict=True)]

    return _are_apart(model, together, changed, Trial(model, alone))


def _probe_ids(model: Any, splits: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return ids (B, T), and the same ids with other tokens in each row's first document."""
    vocab = model.config.get_text_config().vocab_size
    length = sum(splits[0])
    device = next(model.get_input_embeddings().parameters()).device
    count = torch.arange(len(splits) * length, device=device).view(len(splits), length)
    ids = count.mul(7).add(3).remainder(vocab)  # without a random generator
    changed = ids.clone()
    for row, (first, _) in enumerate(splits):
        changed[row, :first] = changed[row, :first].add(vocab // 2).remainder(vocab)
    return ids, changed


def logits_of(model: nn.Module, ids: Tensor, extra: Mapping[str, Any]) -> Tensor:
    """Return the logits (B, T, V) of tokens (B, T) in float32, with further inputs `extra`."""
    inputs = accepted(model, {"input_ids": ids, "use_cache": False, **extra})
    logits: Tensor = model(**inputs).logits
    return logits.float()


def _seconds(
    logits: Tensor, splits: Sequence[tuple[int, int]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the second documents of the rows, and of the changed rows."""
    seconds = [row[first:] for row, (first, _) in zip(logits, [*splits, *splits], strict=True)]
    return seconds[: len(splits)], seconds[len(splits) :]
