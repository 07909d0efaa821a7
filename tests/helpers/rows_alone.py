"""What a row computes alone, through transformers, for tests of its neighbours."""

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedModel

from peftkit.data.pack import Row
from tests.helpers.families import ARCHITECTURES, FAMILIES, _causal
from tests.helpers.hybrids import FURTHER, small
from tests.helpers.padding_free import row_of

LIMIT = 16
"""Positions after which numbers depend on the length of a row, in the models below."""
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 3.0, 2.0, 7.0],
    "original_max_position_embeddings": LIMIT,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
LLAMA4: dict[str, Any] = {
    "interleave_moe_layer_step": 2,
    "moe_layers": [1],
    "no_rope_layers": [1, 0],
    "attn_scale": 2.0,
}
_llama4 = partial(small, "Llama4ForCausalLM", **LLAMA4)


BY_LENGTH: dict[str, Callable[[], PreTrainedModel]] = {
    "phi3_longrope": _causal(
        "Phi3",
        rope_parameters=LONGROPE,
        original_max_position_embeddings=LIMIT,
        max_position_embeddings=64,
    ),
    "llama_longrope": _causal("Llama", rope_parameters=LONGROPE, max_position_embeddings=64),
    "llama_dynamic": _causal("Llama", rope_parameters=DYNAMIC, max_position_embeddings=LIMIT),
    "llama4_chunked": _llama4(attention_chunk_size=8, floor_scale=1 << 13),
    "llama4_scaled": _llama4(attention_chunk_size=64, floor_scale=LIMIT),
}
"""Models whose numbers depend on the length or the place of a row."""
llama4_of_48 = _llama4(attention_chunk_size=256, floor_scale=48)
MODELS = {**FAMILIES, **ARCHITECTURES, **FURTHER, **BY_LENGTH}

SHORT, MIDDLE, LONG = row_of(6), row_of(11), row_of(27)
BATCHES: dict[str, list[Row]] = {
    "longer": [MIDDLE, LONG],
    "shorter": [SHORT, MIDDLE],
    "both": [LONG, SHORT, MIDDLE],
    "packed": [row_of(11, 6), row_of(27, 4), MIDDLE],
}
"""A row of 11 tokens next to others; the last ones hold several documents."""


def is_causal(model: nn.Module) -> bool:
    return any(kind in type(model).__name__ for kind in ("CausalLM", "LMHead"))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def alone(model: Any, rows: Iterable[Row]) -> tuple[Tensor, list[Tensor]]:
    """Return the summed loss of documents and its gradients, each in its own forward pass.

    Each pass runs a fresh copy of the model, without anything of peftkit's.
    """
    each = []
    for document in (document for row in rows for document in row.documents):
        fresh = copy.deepcopy(model)
        logits = fresh(input_ids=torch.tensor([document.input_ids]), use_cache=False).logits[0]
        labels = torch.tensor(document.labels[1:])
        loss = functional.cross_entropy(logits[:-1].float(), labels, reduction="sum")
        grads = torch.autograd.grad(loss, trained(fresh), allow_unused=True)
        each.append((loss.detach(), grads))
    return added(each, trained(model))


def added(
    each: Sequence[tuple[Tensor, Sequence[Tensor | None]]], parameters: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return the sums of losses and of gradients."""
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for _, grads in each:
        sums = [s if g is None else s + g for s, g in zip(sums, grads, strict=True)]
    return torch.stack([loss for loss, _ in each]).sum(), sums


def assert_equal(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Compare losses and gradients; float32 sums have another order."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    scale = max(float(grad.abs().max()) for grad in expected[1])
    for one, other in zip(found[1], expected[1], strict=True):
        one = torch.zeros_like(other) if one is None else one
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * scale)


def generated(model: Any, prompt: Sequence[int], num_new: int) -> tuple[list[int], list[float]]:
    """Return the greedy tokens of transformers' `generate` for one row, with log-probabilities."""
    fresh = copy.deepcopy(model)
    fresh.generation_config = GenerationConfig()
    out = fresh.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    tokens = out.sequences[0, len(prompt) :].tolist()
    logits = [step[0].float().log_softmax(-1) for step in out.logits]
    return tokens, [float(step[token]) for step, token in zip(logits, tokens, strict=True)]
