"""Models that generate, and greedy decoding without a cache."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from tests.helpers.families import ARCHITECTURES, EOS, FAMILIES, FURTHER
from tests.helpers.hybrids import HYBRIDS, RECENT

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
