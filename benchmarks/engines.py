"""Greedy tokens per second of the engine for hybrids, compared with transformers' generate.

    python -m benchmarks.generation --families                  # all of SHAPES, bf16
    python -m benchmarks.generation --families lfm2 --dtype fp32 --repeats 3

Models of 8 blocks with random weights and a random adapter on all linear layers answer two sets of
prompts: 8 prompts of 12 to 500 tokens with completions of 16 to 200, and 4 completions to each of 4
prompts of 220 tokens, of which the first 200 are equal. `PlainEngine` runs transformers' generate
in batches; both engines run in turn in one process. Processor time is reported, which other
programs disturb less than wall time.
"""

from __future__ import annotations

import argparse
from itertools import chain
from time import process_time
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.report import Spread, table
from benchmarks.shapes import Shape, build
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import Engine, Limits, Request
from peftkit.inference.open_engine import PlainEngine, why_plain
from peftkit.inference.sampling import Sampling

_MIXER, _ATTENTION = "linear_attention", "full_attention"
_LAYERS = [_MIXER, _MIXER, _MIXER, _ATTENTION] * 2
_SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, Shape] = {
    "qwen3_5": Shape(
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {
            **_SIZES,
            "head_dim": 64,
            "layer_types": _LAYERS,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "lfm2": Shape(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {**_SIZES, "layer_types": ["conv", "conv", "conv", _ATTENTION] * 2},
    ),
    "granitemoehybrid": Shape(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **_SIZES,
            "layer_types": _LAYERS,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 1536,
            "mamba_n_heads": 18,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_chunk_size": 64,
        },
    ),
    "kimi_linear": Shape(
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {
            **_SIZES,
            "num_key_value_heads": 9,
            "layer_types": _LAYERS,
            "mlp_layer_types": ["dense"] * 8,
            "linear_num_heads": 9,
            "linear_head_dim": 64,
            "q_lora_rank": None,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
        },
    ),
    "llama": Shape("LlamaForCausalLM", "LlamaConfig", _SIZES),
}
"""Name -> model of 8 blocks; llama has attention alone, for comparison."""
TOKENIZER: Any = SimpleNamespace(eos_token_id=None, pad_token_id=0)
ENGINES = {"PlainEngine": PlainEngine, "peftkit": CachedEngine}
Work = list[tuple[list[int], int]]
"""Each prompt, and the number of tokens of its completion."""


def unlike(generator: torch.Generator) -> Work:
    """Return prompts and completions whose lengths have log-normal distributions."""
    lengths = torch.empty(8).log_normal_(4.6, 0.7, generator=generator).clamp(12, 500)
    further = torch.empty(8).log_normal_(3.9, 0.6, generator=generator).clamp(16, 200)
    return [
        (_tokens(int(length), generator), int(number))
        for length, number in zip(lengths, further, strict=True)
    ]


def shared(generator: torch.Generator) -> Work:
    """Return four completions to each of four prompts with a common prefix."""
    common = _tokens(200, generator)
    prompts = [[*common, *_tokens(20, generator)] for _ in range(4)]
    return list(chain.from_iterable(zip([p] * 4, (12, 40, 20, 16), strict=True) for p in prompts))


def _tokens(number: int, generator: torch.Generator) -> list[int]:
    ids: list[int] = torch.randint(3, _SIZES["vocab_size"], (number,), generator=generator).tolist()
    return ids


def completed(kind: type[Engine], model: Any, work: Work) -> tuple[list[list[int]], float]:
    """Return the completions of an engine, and its processor time in seconds."""
    began = process_time()
    with kind(model, TOKENIZER, Limits()) as engine:
        engine.ends = frozenset()
        answers = [engine.submit(Request(ids, Sampling(number))) for ids, number in work]
        engine.run()
    return [answer.ids for answer in answers], process_time() - began


def compare(args: argparse.Namespace, dtype: torch.dtype, adapt: Any) -> int:
    """Measure the families of `args` and print a table.

    Args:
        adapt: Attaches a random adapter to a model.
    """
    rows = []
    for name in args.families or SHAPES:
        torch.manual_seed(0)
        model = build(SHAPES[name]).to(dtype).eval().requires_grad_(False)
        adapt(model, args.rank)
        if (reason := why_plain(model, TOKENIZER)) is not None:
            raise SystemExit(f"{name}: {reason}")
        for scenario in (unlike, shared):
            work = scenario(torch.Generator().manual_seed(2))
            runs: dict[str, list[tuple[list[list[int]], float]]] = {kind: [] for kind in ENGINES}
            for _ in range(args.repeats):
                for kind, engine in ENGINES.items():
                    runs[kind].append(completed(engine, model, work))
            plain, ours = (runs[kind] for kind in ENGINES)
            tokens = sum(number for _, number in work)
            ratios = [before / after for (_, before), (_, after) in zip(plain, ours, strict=True)]
            equal = sum(a == b for a, b in zip(plain[0][0], ours[0][0], strict=True))
            speeds = [Spread.of([tokens / seconds for _, seconds in of]) for of in (plain, ours)]
            rows.append(
                (
                    f"{name}, {scenario.__name__}",
                    *(speed.show(0) for speed in speeds),
                    Spread.of(ratios).show(2),
                    f"{equal}/{len(work)}",
                )
            )
    header = ("family, prompts", *ENGINES, "ratio", "equal completions")
    print(table(header, rows))
    print("tokens per second of processor time")
    return 0
