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
from dataclasses import replace
from itertools import chain
from time import process_time
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.report import Spread, table
from benchmarks.shapes import HYBRID_SIZES, HYBRIDS, Shape, build
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import Engine, Limits, Request
from peftkit.inference.open_engine import why_plain
from peftkit.inference.plain_engine import PlainEngine
from peftkit.inference.sampling import Sampling

_KIMI = {  # without experts
    "mlp_layer_types": ["dense"] * 8,
    "kv_lora_rank": 128,
}
SHAPES: dict[str, Shape] = {
    **{name: HYBRIDS[name] for name in ("qwen3_5", "lfm2", "granitemoehybrid")},
    "kimi_linear": replace(
        HYBRIDS["kimi_linear"], settings={**HYBRIDS["kimi_linear"].settings, **_KIMI}
    ),
    "llama": Shape("LlamaForCausalLM", "LlamaConfig", HYBRID_SIZES),
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
    ids: list[int] = torch.randint(
        3, HYBRID_SIZES["vocab_size"], (number,), generator=generator
    ).tolist()
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
