"""Decoding of a released shape on a card: long keys, growing caches, closed engines."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.card.job import (
    LIMITS,
    Job,
    Line,
    apart,
    judged,
    left_clean,
    made_large,
    used_bytes,
    verdict,
)
from benchmarks.shapes import SHAPES, tokenizer
from peftkit.execution.out_of_memory import one_line
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import Limits, Request
from peftkit.inference.open_engine import open_engine, tokens_that_fit
from peftkit.inference.partial_attention import Scores, decode_attention, num_parts
from peftkit.inference.sampling import Sampling
from peftkit.kernels.device import gpu_of
from peftkit.kernels.fused import TRITON

NO_END = SimpleNamespace(eos_token_id=None, pad_token_id=0)
NUM_ENGINES = 5
LEFT_BYTES = 1 << 20
"""Bytes that may be left of a closed engine: torch's own workspaces."""


NUM_CALLS, COLD_BYTES = 20, 1 << 28
"""Timed calls of attention, over keys that no cache of a card holds."""


def split(job: Job) -> Iterator[Line]:
    """Attention of one layer in a decoding step: SDPA with a mask, and keys in parts."""
    figures = ("SDPA us", "in parts us", "GB/s", "difference")
    yield "rows", "context", "parts", "used", *figures, "well"
    sizes = SHAPES[job.large].settings
    queries, heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    size = sizes["hidden_size"] // queries
    for rows in job.answer_rows:
        for context in job.contexts:
            parts = num_parts(job.device, rows * heads, context)
            shown = (str(rows), f"{context:,}", str(max(parts, 2)), verdict(parts > 1).lower())
            with left_clean():
                try:
                    shape = (rows, heads, queries // heads, context, size)
                    yield *shown, *_compared(job, shape, max(parts, 2))
                except Exception as error:
                    yield *shown, one_line(error)[:100], "", "", "", verdict(False)
    problem = TRITON.report()
    yield "Triton's kernel", problem or "runs", *[""] * 6, verdict(not problem)


def _compared(job: Job, shape: tuple[int, int, int, int, int], parts: int) -> Line:
    rows, heads, group, context, size = shape
    torch.manual_seed(0)
    like = {"dtype": job.dtype, "device": job.device}
    num_bytes = 2 * rows * heads * context * size * job.dtype.itemsize
    copies = 2 + min(COLD_BYTES // num_bytes, 8)
    q = torch.randn(rows, heads, group, size, **like)
    caches = [torch.randn(2, rows, heads, context, size, **like) for _ in range(copies)]
    mask, scores = torch.zeros(rows, 1, 1, context, **like), Scores(size**-0.5, None, None)
    found = []
    for number in (0, parts):

        def run(cache: torch.Tensor, number: int = number) -> torch.Tensor:
            return decode_attention(q, *cache, mask, scores, number)

        found.append((run(caches[0]), _seconds(job, run, caches)))
    (expected, before), (out, after) = found
    speeds = (f"{before * 1e6:.0f}", f"{after * 1e6:.0f}", f"{num_bytes / after / 1e9:.0f}")
    return *speeds, *judged(apart(out, expected), LIMITS[job.dtype])


def _seconds(
    job: Job, run: Callable[[torch.Tensor], torch.Tensor], caches: Sequence[torch.Tensor]
) -> float:
    """Return the seconds of one call, on a card within a CUDA graph."""

    def calls() -> torch.Tensor:
        return torch.stack([run(caches[n % len(caches)]).sum() for n in range(NUM_CALLS)]).sum()

    repeat: Callable[[], object] = calls
    out = calls()
    if job.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = calls()
        repeat = graph.replay
    seconds = []
    for _ in range(3):
        float(out)  # synchronises
        began = time.perf_counter()
        repeat()
        float(out)
        seconds.append(time.perf_counter() - began)
    return min(seconds) / NUM_CALLS


def random_prompts(rows: int, length: int) -> list[list[int]]:
    """Return prompts without a shared prefix."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(5, 300, (rows, length), generator=generator).tolist()


def _decode(engine: CachedEngine, prompts: Sequence[Sequence[int]], new: int) -> dict[str, float]:
    """Answer prompts; return seconds of the prompts, and tokens/s of all rows afterwards."""
    requests = [Request(ids, Sampling(new, 0.0), number) for number, ids in enumerate(prompts)]
    running = [engine.submit(request) for request in requests]
    began = time.perf_counter()
    while any(not one.ids for one in running):  # each has its first token
        engine.step()
    read, before = time.perf_counter(), sum(len(one.ids) for one in running)
    while any(one.ended_by is None for one in running):
        engine.step()
    seconds = max(time.perf_counter() - read, 1e-9)
    made = sum(len(one.ids) for one in running)
    return {"reading": read - began, "speed": (made - before) / seconds, "tokens": float(made)}


def growth(job: Job) -> Iterator[Line]:
    """Answers of the shape in nf4 at several sizes, whose caches grow while they run."""
    columns = ("context", "prompt s", "tokens/s", "per row", "graphs", "still able")
    yield "answers at once", *columns, "cache GB", "peak GB", "well"
    model, gpu = made_large(job).eval(), gpu_of(job.device)
    for rows in job.answer_rows:
        for context in job.contexts:
            shown = (str(rows), f"{context:,}")
            room = tokens_that_fit(model, tokenizer())
            needed = rows * _slot(context + job.new_tokens)
            if room is not None and needed > room:
                told = f"not tried: {needed:,} tokens, {room:,} fit"
                yield *shown, told, *[""] * 6, "yes"
                continue
            before = used_bytes(job)
            if gpu is not None:
                gpu.restart(job.device)
            with left_clean():
                try:
                    yield *shown, *_grown(job, model, rows, context, before)
                except Exception as error:
                    yield *shown, one_line(error)[:100], *[""] * 6, verdict(False)


def _slot(length: int) -> int:
    """Return the tokens of a slot: the next power of two."""
    return 1 << (length - 1).bit_length()


def _grown(job: Job, model: Any, rows: int, context: int, before: int) -> Line:
    gpu = gpu_of(job.device)
    with open_engine(model, NO_END, Limits(rows=rows)) as engine:
        assert isinstance(engine, CachedEngine)
        engine.ends = frozenset()
        found = _decode(engine, random_prompts(rows, context), job.new_tokens)
        graphs, cache = engine.graphs, used_bytes(job) - before
    able = verdict(graphs.is_able) if graphs.records else "not recorded"
    peak = 0 if gpu is None else gpu.peak(job.device)
    well = found["tokens"] == rows * job.new_tokens and able != "NO"
    speed, memory = found["speed"], (f"{max(cache, 0) / 1e9:.3f}", f"{peak / 1e9:.2f}")
    figures = (f"{found['reading']:.2f}", f"{speed:.0f}", f"{speed / rows:.1f}")
    return (*figures, str(graphs.num_recorded), able, *memory, verdict(well))


def engines(job: Job) -> Iterator[Line]:
    """Five engines one after the other without garbage collection: each leaves nothing."""
    yield "engine", "graphs", "still able", "MB in it", "MB left after it", "well"
    model = made_large(job).eval()
    rows, context = max(job.answer_rows), min(job.contexts)
    _grown(job, model, rows, context, 0)  # workspaces of libraries are allocated once
    gc.collect()
    gc.disable()
    try:
        before = _allocated(job)
        for number in range(1, NUM_ENGINES + 1):
            with open_engine(model, NO_END, Limits(rows=rows)) as engine:
                assert isinstance(engine, CachedEngine)
                engine.ends = frozenset()
                _decode(engine, random_prompts(rows, context), job.new_tokens)
                inside, graphs = _allocated(job) - before, engine.graphs
            del engine
            left = _allocated(job) - before
            well = verdict(left <= LEFT_BYTES and graphs.is_able)
            memory = (f"{inside / 1e6:.1f}", f"{left / 1e6:.1f}")
            yield str(number), str(graphs.num_recorded), verdict(graphs.is_able), *memory, well
    finally:
        gc.enable()


def _allocated(job: Job) -> int:
    """Return the bytes of live tensors; 0 on a CPU."""
    return torch.cuda.memory_allocated(job.device) if job.device.type == "cuda" else 0
