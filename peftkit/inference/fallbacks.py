"""The fallbacks of this machine and its libraries, found with a tiny model."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peftkit.events import Fallback
from peftkit.execution.gpu_support import gpu_fallbacks
from peftkit.forward.compiler import no_compiler, uncompiled
from peftkit.inference.open_engine import generation_fallbacks
from peftkit.kernels.device import PINNING, pinned_empty
from peftkit.kernels.fused import TRITON


def fallbacks_here() -> list[Fallback]:
    """Return what every run or server on this machine computes by a slower path."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config).eval()
    fallbacks = generation_fallbacks(model, SimpleNamespace(pad_token_id=0, eos_token_id=1))
    fallbacks += gpu_fallbacks()
    if not torch.cuda.is_available():
        why = no_compiler()
        return [*fallbacks, uncompiled(why)] if why else fallbacks
    pinned_empty([1], torch.uint8)
    return [*fallbacks, *filter(None, (PINNING.fallback, TRITON.missing))]
