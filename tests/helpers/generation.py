"""Models that generate, and greedy decoding without a cache."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import Request
from tests.helpers.families import ARCHITECTURES, EOS, FAMILIES
from tests.helpers.hybrids import FURTHER, HYBRIDS, RECENT

TOKENIZER: Any = type("T", (), {"eos_token_id": EOS, "pad_token_id": 0})
"""The special tokens of the tiny models, all that an engine reads of a tokenizer."""
MODELS = {**HYBRIDS, **RECENT, **FAMILIES, **ARCHITECTURES, **FURTHER}


def greedy_tokens(
    model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int], num_new: int
) -> list[int]:
    """Return the likeliest tokens after a prompt, if those of an answer stand there so far.

    It is the answer if that is what one full forward pass for each token would choose.
    """
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0]
    likeliest = logits[len(prompt) - 1 :].argmax(-1).tolist()[:num_new]
    return likeliest[: likeliest.index(EOS)] if EOS in likeliest else likeliest


def allocated(engine: CachedEngine) -> int:
    """Return the bytes of all keys, values and states that exist."""
    spans = {id(span): span for span in (*engine._prompts, *engine._prefixes._spans)}.values()
    arenas = list(engine._arenas.values())
    keys = sum(t.nbytes for one in (*arenas, *spans) for pair in one.layers.values() for t in pair)
    rows = sum(state.nbytes for span in spans for state in span.states.values())
    return keys + rows + sum(arena.states.num_bytes for arena in arenas)


def most_allocated(engine: CachedEngine, requests: Sequence[Request]) -> tuple[int, int]:
    """Complete requests; return the maximum of bytes and of concurrent completions."""
    for request in requests:
        engine.submit(request)
    most = num_running = 0
    for _ in range(3000):
        if engine.is_idle:
            return most, num_running
        engine.step()
        num_running = max(num_running, engine.num_running)
        most = max(most, allocated(engine))
    raise AssertionError("a request waits for ever")
