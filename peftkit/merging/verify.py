"""Compares a merged model with base and adapter on a few prompts.

Shapes: T tokens of a prompt, V vocabulary, or labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from peftkit.base.load import Base, load_base
from peftkit.base.purpose import CAUSAL_LM, Purpose
from peftkit.base.request import DTYPES, ROOM
from peftkit.errors import RunError
from peftkit.execution.environment import free_now
from peftkit.execution.plan import compute_dtype
from peftkit.files.tensors import is_finite
from peftkit.formats.open_adapter import Opened
from peftkit.merging.fold import Tally, too_large_values
from peftkit.proof.judge import Verdict
from peftkit.proof.record import prove
from peftkit.tasks.media.speech import INPUTS, Hearing

PROMPTS = (
    "The capital of France is",
    "Question: If I have three apples and eat one, how many are left?\nAnswer:",
    '{"name": "Anna", "order": ["pizza", "salad"], "total":',
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)
"""Default prompts: a fact, a question, data, code."""
LARGEST_DIFFERENCE = 1e-3
"""Allowed difference of logits in float32, relative to the largest; rounding stays below it."""
EXACT = 1e-3
"""Largest relative rounding error at which logits must agree within LARGEST_DIFFERENCE."""
STEPS = 8
"""Allowed rounding error of a logit over all layers, in units of the 16-bit dtype's epsilon."""
SHARE = 0.5
"""Allowed error of a rounded merged model, as a share of the adapter's effect. Without the adapter
the error would be 1, with the adapter subtracted 2."""
FLOAT32_ROOM = 1.3
"""Free memory required to compute in float32, as a multiple of the float32 weights."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How the logits of two models agree.

    Attributes:
        max_difference: Largest absolute difference of a logit.
        largest: Largest absolute logit, as the scale of `max_difference`.
        top1: Share of positions, 0 to 1, with the same most likely token.
        num_positions: Number of compared positions.
        proved: The verdict of the adapter's proof on the merged model; None without a proof.
    """

    max_difference: float
    largest: float
    top1: float
    num_positions: int
    proved: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Reference:
    """Logits on the prompts, with the adapter and without; the device and dtype they come from."""

    adapted: Sequence[Tensor]
    bare: Sequence[Tensor]
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a merge.

    Attributes:
        folder: The new model, which plain transformers loads, or the new GGUF file.
        base: The base that the adapter was merged into.
        tally: The changes of the weights.
        effect: Comparison of the base with and without the adapter; None without `verify`.
        agreement: Comparison of the merged model with base and adapter; None without `verify`.
        other_precision: Quantisation of the base in training if the merge is into its original
            weights; else "".
    """

    folder: Path
    base: str
    tally: Tally
    effect: Agreement | None
    agreement: Agreement | None
    other_precision: str = ""


@torch.no_grad()
def logits_on(base: Base, prompts: Sequence[str], purpose: Purpose = CAUSAL_LM) -> list[Tensor]:
    """Return the logits (positions, V) on each prompt, float32, on the CPU.

    Args:
        purpose: The purpose of the base. A text classifier has one position, or one per token; a
            model of images or audio gets noise instead of prompts.
    """
    if purpose != CAUSAL_LM:
        outputs = (_call(base, number, prompt) for number, prompt in enumerate(prompts))
        return [logits.float().cpu().flatten(0, -2) for logits in outputs]
    ids = [base.tokenizer(prompt)["input_ids"] for prompt in prompts]
    # one batch reads the weights once; a causal model ignores padding on the right
    longest = max(map(len, ids))
    batch = torch.tensor([row + [row[-1]] * (longest - len(row)) for row in ids])
    logits = base.model(input_ids=batch.to(base.device), use_cache=False).logits
    return [rows[: len(row)].float().cpu() for rows, row in zip(logits, ids, strict=True)]


def _call(base: Base, number: int, prompt: str) -> Tensor:
    """Return the logits on one prompt, or on an image or audio of noise."""
    config = base.model.config
    has_decoder = config.is_encoder_decoder and not base.head
    if base.model.main_input_name in INPUTS:
        inputs = Hearing(base.model, base.processor, None).example(number)
        decoder_ids = {"decoder_input_ids": _ids(base, prompt)} if has_decoder else {}
        return base.model(**inputs, **decoder_ids).logits
    if base.image_processor is not None:
        size = config.image_size
        shape = (1, config.num_channels, *([size, size] if isinstance(size, int) else size))
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        return base.model(pixel_values=noise.to(base.device, compute_dtype(base.model))).logits
    ids = _ids(base, prompt)
    decoder = {"decoder_input_ids": ids} if has_decoder else {}
    outputs = base.model(input_ids=ids, **decoder)
    # an embedding model has no head: it returns hidden states
    logits: Tensor = outputs.logits if "logits" in outputs else outputs.last_hidden_state
    return logits


def _ids(base: Base, prompt: str) -> Tensor:
    ids: Tensor = base.tokenizer(prompt, return_tensors="pt")["input_ids"]
    return ids.to(base.device)


def agreement(logits: Sequence[Tensor], reference: Sequence[Tensor]) -> Agreement:
    """Compare the logits of two models on the same prompts; NaN makes the difference infinite."""
    a, b = torch.cat(list(logits)), torch.cat(list(reference))  # (positions, V)
    difference = float((a - b).abs().max())
    return Agreement(
        max_difference=difference if difference == difference else float("inf"),
        largest=float(b.abs().max()),
        top1=float((a.argmax(-1) == b.argmax(-1)).float().mean()),
        num_positions=len(a),
    )


def reference_of(opened: Opened, prompts: Sequence[str]) -> Reference:
    base, purpose = opened.base, opened.task.purpose
    adapted = logits_on(base, prompts, purpose)
    with opened.adapter.disabled():
        bare = logits_on(base, prompts, purpose)
    if all(map(is_finite, bare)) and not all(map(is_finite, adapted)):
        raise too_large_values()
    return Reference(adapted, bare, base.device, compute_dtype(base.model))


def precision(model: nn.Module) -> str:
    """Return the dtype of the comparison: float32, the most sensitive, if there is room.

    A model that does not fit on the GPU in 16 bits is loaded onto the CPU.
    """
    num_values, cpu = sum(p.numel() for p in model.parameters()), torch.device("cpu")
    memory = free_now()
    if memory.on_gpu and 2 * num_values > ROOM * memory.usable:
        memory = free_now(cpu)
    fits = memory.memory is None or FLOAT32_ROOM * 4 * num_values < memory.usable
    return "fp32" if fits else "auto"


def verified(
    folder: Path,
    purpose: Purpose,
    reference: Reference,
    tally: Tally,
    prompts: Sequence[str],
    effect: Agreement,
    proof: Path,
) -> Agreement:
    """Load the merged model like any other model, and compare.

    Args:
        proof: The adapter's proof.json, which need not exist.

    Raises:
        RunError: Its logits do not match the reference.
    """
    computing = next(name for name, kind in DTYPES.items() if kind == reference.dtype)
    if purpose.head is not None:  # the merged model has a head
        purpose = replace(purpose, head=replace(purpose.head, fresh=False))
    base = load_base(str(folder), dtype=computing, purpose=purpose, device=reference.device)
    agreed = agreement(logits_on(base, prompts, purpose), reference.adapted)
    limit = LARGEST_DIFFERENCE * agreed.largest
    if reference.dtype != torch.float32 or tally.relative_rounding >= EXACT:
        step = max(torch.finfo(reference.dtype).eps, 2**-7 if tally.relative_rounding else 0.0)
        limit += STEPS * step * agreed.largest + SHARE * effect.max_difference
    if not agreed.max_difference <= limit:
        raise RunError(
            "the merged model does not match base and adapter",
            found=f"logits differ by up to {agreed.max_difference:.3g}, more than {limit:.3g}; "
            f"{agreed.top1:.1%} of the next tokens agree",
            fix="Use the adapter unmerged, and report this with the output of: peftkit env",
        )
    if not proof.is_file():
        return agreed
    return replace(agreed, proved=prove(base.model, proof, tokenizer=base.tokenizer))


def facts_of(merged: Merged) -> dict[str, str]:
    """Return the facts of a merge for a table and a card."""
    tally = merged.tally
    facts = {
        "base": merged.base,
        "weights changed": f"{tally.num_weights:,}",
        "size of the update": f"{tally.relative_update:.3g} of these weights' own",
        "survives rounding": f"{min(max(tally.survived, 0), 1):.1%} of the update",
        "rounding noise": f"{tally.relative_rounding:.3g} of the update's size",
    }
    if merged.agreement is None or merged.effect is None:
        return facts | {"verified": "no"}
    agreed, effect = merged.agreement, merged.effect
    reference = "base and adapter"
    if merged.other_precision:
        reference = f"the original base (not in {merged.other_precision}) and the adapter"
    return facts | {
        "verified": f"on {agreed.num_positions} positions, against {reference}",
        "largest difference of a logit": f"{agreed.max_difference:.3g} (of {agreed.largest:.3g})",
        "same next token": f"{agreed.top1:.1%}",
        "largest change by the adapter": f"{effect.max_difference:.3g}",
        **({"proof": agreed.proved.line} if agreed.proved else {}),
    }
