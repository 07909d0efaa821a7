"""Each kernel compared with its definition in float64, forward and backward, in each dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from benchmarks.card.job import LIMITS, Job, Line, apart, judged, verdict
from peftkit.execution.out_of_memory import one_line
from peftkit.inference.partial_attention import Scores, decode_attention
from peftkit.kernels import varlen
from peftkit.kernels.cross_entropy import chunked_cross_entropy
from peftkit.kernels.fused import ACTIVATIONS, TRITON, Gated, RMSNorm, Rotary
from peftkit.kernels.gguf_blocks import TYPES, unpack_gguf
from peftkit.kernels.lora import Layer, grouped_lora_linear
from peftkit.kernels.packed import packed_linear
from peftkit.quant.layers import pack

ROWS = (1, 5, 8, 64, 512, 2048)
"""Rows of a product with packed weights: few rows use other kernels."""
NEAR_TIES = 1e-3
"""Share of codes that may differ from the CPU's: values halfway between two."""
DOCUMENTS = (64, 37, 5, 1)
"""Tokens of packed documents, which are numbered from the longest on."""


class Case(NamedTuple):
    """An operator.

    Attributes:
        inputs: In float64, on the CPU.
        num_trained: Number of inputs, from the first, that have a gradient.
        kernel, definition: The function of these inputs, by the kernel and by the formula.
    """

    name: str
    inputs: Sequence[Tensor]
    num_trained: int
    kernel: Callable[..., Tensor]
    definition: Callable[..., Tensor]


def difference(case: Case, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest relative difference of output and gradients."""
    results = []
    for run, place, kind in (
        (case.kernel, device, dtype),
        (case.definition, torch.device("cpu"), torch.float64),
    ):
        inputs = [x.to(dtype).to(place, kind) for x in case.inputs]  # both from rounded inputs
        trained = [x.requires_grad_() for x in inputs[: case.num_trained]]
        out = run(*inputs)
        generator = torch.Generator().manual_seed(2)
        back = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        back = back.to(dtype).to(place, out.dtype)
        gradients = torch.autograd.grad(out, trained, back) if trained else ()
        results.append([out, *gradients])
    return max(apart(ours, theirs) for ours, theirs in zip(*results, strict=True))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def _rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def _decoding(q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor, *, parts: int = 0) -> Tensor:
    """Return the attention of rows of different lengths in a window, with a soft cap and sinks."""
    key = torch.arange(keys.shape[2], device=q.device)
    length = torch.tensor([[1], [200], [512]], device=q.device)
    unseen = (key >= length) | (key < length - 150)
    mask = torch.zeros_like(unseen, dtype=q.dtype).masked_fill_(unseen, torch.finfo(q.dtype).min)
    scores = Scores(q.shape[-1] ** -0.5, 20.0, sinks)
    return decode_attention(q, keys, values, mask[:, None, None], scores, parts)


def _loss(hidden: Tensor, weight: Tensor) -> Tensor:
    targets = (torch.arange(len(hidden)) * 7 % len(weight)).to(hidden.device)
    if hidden.dtype == torch.float64:
        return functional.cross_entropy(hidden @ weight.T, targets, reduction="none")
    return chunked_cross_entropy(hidden, targets, lambda x: x @ weight.T, chunk_rows=100)


def _grouped(x: Tensor, a: Tensor, first: Tensor, second: Tensor, *frozen: Tensor) -> Tensor:
    scales = x.new_full((len(a),), 2.0)
    layer = Layer(None, 0, False)
    parts = (first, second)
    copies = [part.detach() for part in parts]
    outputs = grouped_lora_linear(
        x, None, (layer, layer), frozen, 2 * a.detach(), scales, copies, (*a.chunk(2), *parts)
    )
    return torch.cat(outputs, -1)


def _grouped_definition(
    x: Tensor, a: Tensor, first: Tensor, second: Tensor, *frozen: Tensor
) -> Tensor:
    hidden = 2 * x @ a.T
    halves = hidden.chunk(2, -1)
    pairs = zip(frozen, halves, (first, second), strict=True)
    return torch.cat([x @ weight.T + half @ b.T for weight, half, b in pairs], -1)


def cases() -> Iterator[Case]:
    """Yield the operators that need no packed weights and no documents."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, weight = numbers(64, 256), numbers(256).abs()
    yield Case("RMSNorm", (x, weight), 1, lambda x, w: RMSNorm.apply(x, w, 1e-6), _norm)
    for name, function in ACTIVATIONS.items():
        yield Case(
            f"gated {name}",
            (numbers(3, 341), numbers(3, 341)),
            2,
            lambda gate, up, name=name: Gated.apply(gate, up, name),
            lambda gate, up, function=function: function(gate) * up,
        )
    for size in (64, 80, 128):
        angles = numbers(2, 2, 37, size).unbind(0)
        yield Case(f"rotary {size}", (numbers(2, 3, 37, size), *angles), 1, Rotary.apply, _rotation)
    for parts in (1, 4):
        inputs = (numbers(3, 2, 4, 64), *(numbers(3, 2, 512, 64) for _ in range(2)), numbers(8))
        kernel = partial(_decoding, parts=parts)
        yield Case(f"decoding, {parts} parts of keys", inputs, 0, kernel, _decoding)
    yield Case("loss in chunks", (numbers(600, 128), 0.1 * numbers(1000, 128)), 1, _loss, _loss)
    lora = (numbers(40, 64), 0.1 * numbers(16, 64), numbers(96, 8), numbers(32, 8))
    weights = (0.1 * numbers(96, 64), 0.1 * numbers(32, 64))
    yield Case("grouped update", (*lora, *weights), 4, _grouped, _grouped_definition)
    ends = torch.tensor([8, 8, 24, 40], dtype=torch.int32)  # the second expert has no rows
    yield Case(
        "experts, one empty",
        (numbers(40, 64), 0.1 * numbers(4, 64, 32)),
        1,
        lambda x, stack: functional.grouped_mm(x, stack, offs=ends.to(x.device)),
        lambda x, stack: torch.cat(
            [x[a:b] @ matrix for (a, b), matrix in zip(pairwise([0, *ends]), stack, strict=True)]
        ),
    )


def _documents(window: int | None) -> Case:
    total = sum(DOCUMENTS) + 3  # of padding
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, total, 64), (1, 2, total, 64), (1, 2, total, 64))
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    bounds = [0]
    for size in DOCUMENTS:
        bounds.append(bounds[-1] + size)
    spans = varlen.spans_of([range(*pair) for pair in pairwise(bounds)], total)

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        here = varlen.Spans._make(part.to(query.device) for part in spans)
        out = varlen.spans_attention(
            query, key, value, here, is_causal=True, scale=0.125, window=window
        )
        return out.transpose(1, 2)[:, :, : bounds[-1]]

    def definition(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = []
        for a, b in pairwise(bounds):
            places = torch.arange(b - a)
            seen = places[:, None] >= places
            if window is not None:
                seen &= places[:, None] - places < window
            q, k, v = (x[:, :, a:b] for x in (query, key, value))
            k, v = (x.repeat_interleave(2, 1) for x in (k, v))
            scores = (0.125 * q @ k.mT).masked_fill(~seen, float("-inf"))
            parts.append(scores.softmax(-1) @ v)
        return torch.cat(parts, 2)

    return Case(f"varlen, window {window}", inputs, 3, kernel, definition)


def _packed_lines(job: Job, dtype: torch.dtype) -> Iterator[Line]:
    """Codes compared with the CPU's, and products of few and many rows with packed weights."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 512, generator=generator, dtype=torch.float64).to(dtype)
    name = str(dtype).removeprefix("torch.")
    for kind, nested in (("nf4", False), ("nf4", True), ("fp4", True), ("int8", True)):
        here, packing = pack(weight.to(job.device), kind, double_quant=nested)
        there, _ = pack(weight, kind, double_quant=nested)
        title = f"{kind}{', nested' if nested and kind != 'int8' else ''}"
        share = float((here.cpu() != there).double().mean())
        yield f"{title}: codes that differ", name, *judged(share, NEAR_TIES)
        unpacked = packing(here).detach().cpu().double()
        yield f"{title}: unpacked", name, *judged(apart(unpacked, weight), 0.2)
        worst = 0.0
        for rows in ROWS:
            x = torch.randn(rows, 512, generator=generator, dtype=torch.float64)
            for num_trained in (0, 1):  # without a gradient bitsandbytes multiplies the codes
                case = Case(
                    title,
                    (x,),
                    num_trained,
                    partial(
                        packed_linear,
                        bias=None,
                        weight=packing.weight(here),
                        dtype=dtype,
                    ),
                    lambda x, unpacked=unpacked: x @ unpacked.T,
                )
                worst = max(worst, difference(case, job.device, dtype))
        yield f"{title}: products of {ROWS} rows", name, *judged(worst, LIMITS[dtype])
    for kind, block in TYPES.items():
        codes = torch.randint(256, (64, 2 * block.num_bytes), generator=generator).byte()
        shape = (64, 2 * block.values)
        found, expected = (
            unpack_gguf(each, kind, shape, dtype).cpu().double().nan_to_num()
            for each in (codes.to(job.device), codes)
        )
        share = float((found != expected).double().mean())
        yield f"{kind} blocks: values that differ", name, *judged(share, 0)


def operators(job: Job) -> Iterator[Line]:
    """Each kernel compared with its definition in float64, with gradients if it has them."""
    yield "operator", "dtype", "largest difference", "well"
    for dtype in dict.fromkeys((job.dtype, torch.float16, torch.float32)):
        for case in cases():
            yield from _line(case, job, dtype)
        query = torch.empty(1, 4, 8, 64, dtype=dtype, device=job.device)
        if varlen.serves(query, query, query):
            for window in (None, 7):
                yield from _line(_documents(window), job, dtype)
        else:
            name = str(dtype).removeprefix("torch.")
            yield "varlen", name, f"not served by torch {torch.__version__}", "-"
        yield from _packed_lines(job, dtype)
    problem = TRITON.report()
    yield "Triton's kernels", "", problem or "run", verdict(not problem)


def _line(case: Case, job: Job, dtype: torch.dtype) -> Iterator[Line]:
    name = str(dtype).removeprefix("torch.")
    try:
        yield case.name, name, *judged(difference(case, job.device, dtype), LIMITS[dtype])
    except Exception as error:
        yield case.name, name, one_line(error)[:80], verdict(False)


ATTENTION: dict[str, tuple[int, bool, bool]] = {
    "causal": (4, False, True),
    "causal, grouped heads": (2, False, True),
    "masked": (4, True, False),
    "masked, grouped heads": (2, True, False),
}
"""Key heads of four query heads, whether there is a mask, and whether it is causal without."""


def attention(job: Job) -> Iterator[Line]:
    """Which of torch's attention kernels runs: the MATH kernel takes memory of T x T."""
    yield "attention", "dtype", "kernel"
    for dtype in dict.fromkeys((job.dtype, torch.float32)):
        for name, (heads, has_mask, causal) in ATTENTION.items():
            query = torch.randn(2, 4, 128, 64, device=job.device).to(dtype)
            key = torch.randn(2, heads, 128, 64, device=job.device).to(dtype)
            mask = torch.ones(128, 128, device=job.device, dtype=torch.bool).tril()
            with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
                functional.scaled_dot_product_attention(
                    query,
                    key,
                    key,
                    attn_mask=mask if has_mask else None,
                    is_causal=causal,
                    enable_gqa=heads != 4,
                )
            prefix = "aten::_scaled_dot_product"
            kernels = {event.name for event in seen.events() if event.name.startswith(prefix)}
            short = sorted(kernel.removeprefix("aten::_scaled_dot_product_") for kernel in kernels)
            yield name, str(dtype).removeprefix("torch."), ", ".join(short) or "unknown"
