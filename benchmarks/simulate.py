"""Launches, bytes and FLOPs of a training step on a GPU, and a lower bound of its time.

    python -m benchmarks.simulate
    python -m benchmarks.simulate --quantize nf4 --length 1024 --cards H200 --by operator
    python -m benchmarks.simulate --quantize nf4 --length 131072 --activations offload
    python -m benchmarks.simulate --rows 1 8 64 --by operator

No GPU is needed: the training code runs on the simulated card of tests/simulated_gpu, on tensors
without data. LoRA on all linears, one row, all of its tokens targets, blocks recomputed; with
--rows a decoding step of so many completions over keys of --length tokens, by operator. Models of
two and three blocks are counted; the difference is the cost of each further block.

A kernel's time is the larger of its FLOPs by 75 % of the card's dense bf16 rate and its bytes by
85 % of its bandwidth, and at least 2 microseconds: a lower bound. Attention counts as one
fused kernel, as do SiLU's gradient and the optimizer's step. `addmm` with a matrix copies it first.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import shapes
from benchmarks.report import table, write_json
from peftkit.adapter import attach, prepared_for_training
from peftkit.data.pack import Row, collate
from peftkit.execution.plan import GPU_CHUNK_BYTES
from peftkit.execution.signals import StopRequest
from peftkit.execution.world import World
from peftkit.forward import blocks
from peftkit.forward.loss import Head, token_loss
from peftkit.inference.cache import Arena
from peftkit.inference.cache import Row as SlotRow
from peftkit.inference.cached_attention import Block, CachedAttention, Decode, cached_attention
from peftkit.inference.engine import Completion, Request
from peftkit.inference.ready import ready_for_tokens
from peftkit.inference.sampling import Sampling
from peftkit.kernels import checked
from peftkit.methods.lora import LoRA
from peftkit.planning.counter import flops_of
from peftkit.quant.quantize import quantize_model
from peftkit.settings import TrainConfig
from peftkit.tasks.base import Task
from peftkit.train.start import new_run
from peftkit.train.step import Step, trainable_parameters
from tests.simulated_gpu.simulation import simulated
from tests.simulated_gpu.tensors import Card, CudaTensor, Kernels

RATES = {"RTX 4090": (165e12, 1.008e12), "H200": (989e12, 4.8e12)}
"""Dense bf16 FLOP/s and bytes/s, from the manufacturers."""
OF_PRODUCTS, OF_BANDWIDTH, SHORTEST = 0.75, 0.85, 2e-6
FREE = {"detach", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty", "_unsafe_view"}
"""Operators that launch no kernel, in addition to views."""
KINDS = ("products", "LoRA's products", "attention", "unpacking", "the loss", "all else")


@dataclass
class Count:
    """Counts of several kernels."""

    launches: float = 0
    flops: float = 0
    bytes: float = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(RATES, 0.0))

    def add(self, other: Count, times: float = 1.0) -> None:
        """Add a multiple of another count."""
        self.launches += times * other.launches
        self.flops += times * other.flops
        self.bytes += times * other.bytes
        for card, seconds in other.seconds.items():
            self.seconds[card] += times * seconds


class Counting(Kernels):
    """Counts every kernel, by kind and by operator."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.kinds: dict[str, Count] = defaultdict(Count)
        self.operators: dict[str, Count] = defaultdict(Count)

    def launched(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Count one."""
        if func.is_view or name in FREE:
            return
        read, written = _each(args) + _each(kwargs), _each(out)
        flops = _flops(func, name, args, kwargs, out)
        moved = sum(map(_bytes, read)) + sum(map(_bytes, written))
        if name in ("embedding", "index_select", "gather"):
            moved = 2 * sum(map(_bytes, written))
        if name == "index_put_":
            moved = 2 * _bytes(args[2])
        launches = 1
        if name == "addmm" and args[0].dim() == 2:  # cuBLAS adds in place
            launches, moved = 2, moved + 2 * _bytes(out)
        one = Count(launches, flops, moved)
        for card, (rate, bandwidth) in RATES.items():
            by_flops, by_bytes = flops / (OF_PRODUCTS * rate), moved / (OF_BANDWIDTH * bandwidth)
            one.seconds[card] = max(by_flops, by_bytes, SHORTEST)
        self.kinds[self._kind(name, flops, read)].add(one)
        self.operators[name].add(one)

    def _kind(self, name: str, flops: float, read: Sequence[Tensor]) -> str:
        if "attention" in name:
            return "attention"
        if "4bit" in name or "blockwise" in name:
            return "unpacking"
        if flops:
            # one product has all ranks of a group
            skinny = any(size <= 4 * self.rank for t in read for size in t.shape if t.dim() == 2)
            return "LoRA's products" if skinny else "products"
        return "the loss" if _in_loss() else "all else"


def _each(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _each(item)]
    return []


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that are read of a tensor; expanded values count once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    number = 1
    for size, stride in sizes:
        number *= size if stride else 1
    return number * tensor.element_size() * (tensor.numel() > 0)


def _flops(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> float:
    if "scaled_dot_product" in name:
        backward = "backward" in name
        query, key = (args[1], args[2]) if backward else args[:2]
        pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] / 2  # causal
        return (10.0 if backward else 4.0) * pairs * query.shape[3]
    if name in ("matmul", "linear"):  # full, inside an operator of ours
        return 2.0 * args[0].numel() * out.shape[-1]
    count = flops_of(func._overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=out))


def _in_loss() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("kernels/cross_entropy.py"):
            return True
        frame = frame.f_back
    return False


class Tokens(Task):
    """Rows with all tokens as targets, through the chunked loss."""

    predicts_tokens = True

    def __init__(self, model: Any) -> None:
        self.head = Head(model.get_output_embeddings(), 1.0, None, GPU_CHUNK_BYTES)

    def training(
        self, model: nn.Module, plan: Any = None
    ) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def spans(self, row: Any) -> list[tuple[str, str]]:
        return [("", str(row.input_ids))]

    def num_positions(self, rows: Sequence[Any]) -> int:
        return sum(len(row.input_ids) for row in rows)

    def collate(self, rows: Sequence[Any]) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return collate(rows, 0)

    def num_targets(self, batch: Any) -> int:
        return batch["targets"].numel()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs = {"input_ids": batch["input_ids"], "use_cache": False}
        return token_loss(model, self.head, inputs, batch["target_index"], batch["targets"])[None]


@contextlib.contextmanager
def without_data() -> Iterator[None]:
    """Use tensors without data: no random draws of blocks to observe, no results to compare."""
    compared = checked.CheckedProduct
    with (
        mock.patch.object(blocks._Recompute, "_generators", return_value=[]),
        mock.patch.object(blocks, "_are_tiles_right", return_value=True),
        mock.patch.object(compared, "product", lambda self, key, compute, expected: compute()),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def adapted(layers: int, args: argparse.Namespace, device: torch.device) -> Any:
    """Return a model of so many blocks with LoRA, on the simulated card."""

    def pack(block: nn.Module) -> None:
        if args.quantize != "none":
            quantize_model(block, args.quantize, device=device)

    model = shapes.build(
        shapes.SHAPES[args.model],
        dtype=torch.bfloat16,
        device=device,
        each_block=pack,
        num_hidden_layers=layers,
    ).requires_grad_(False)
    attach(model, LoRA(rank=args.rank, alpha=2 * args.rank))
    return model


def decoding(layers: int, args: argparse.Namespace) -> tuple[Counting, Card]:
    """Count a decoding step of `args.rows` completions, without the choice of tokens."""
    counting, card = Counting(args.rank), Card()
    with without_data(), simulated(card, lambda: counting):
        device = torch.device("cuda", 0)
        model, arena = adapted(layers, args, device).eval(), Arena()
        arena.resize(args.rows, args.length)
        for slot in range(args.rows):
            request = Request([1] * (args.length - 2), Sampling(2))
            owner = Completion(request, 2, frozenset())
            arena.rows.append(SlotRow(owner, None, args.length - 1, arena, slot))
        with torch.no_grad(), ready_for_tokens(model):
            attention = CachedAttention.of(model)
            with cached_attention(model, attention):
                decode = Decode([Block(arena, args.rows, args.length)], device)
                for _ in range(2):  # the first allocates the cache
                    counting.kinds.clear()
                    counting.operators.clear()
                    card.reset()
                    attention.run(model, decode)
    return counting, card


def step(layers: int, args: argparse.Namespace) -> tuple[Counting, Card]:
    """Count a model's second step: the first makes the optimizer's state."""
    counting, card = Counting(args.rank), Card()
    with without_data(), simulated(card, lambda: counting):
        device = torch.device("cuda", 0)
        model = adapted(layers, args, device)
        parameters = trainable_parameters(model)
        assert all(isinstance(parameter, CudaTensor) for parameter in parameters.values())
        task = Tokens(model)
        config, rows = TrainConfig(batch_size=1), [Row((1,), (1,), (1,), "row")]
        run = new_run(model, task, rows, [], config, stop=StopRequest(), world=World(device))
        take = Step(run)
        tiles = args.activations != "keep"
        take.use(replace(take.plan, activations=args.activations, tiles=tiles))
        model.train()
        ids = tuple(range(10, 10 + args.length))
        with prepared_for_training(model, take.plan):
            for length in (16, args.length):
                counting.kinds.clear()
                counting.operators.clear()
                card.reset()
                take([Row(ids[:length], ids[:length], (length,), "row")], 1e-4)
    return counting, card


def whole(args: argparse.Namespace, by: str) -> tuple[dict[str, Count], int, int]:
    """Return the counts of a step of all blocks, by kind or operator, its waits and its peak."""
    count_step = decoding if args.rows else step
    (two, card_of_two), (three, card) = count_step(2, args), count_step(3, args)
    layers = args.layers or shapes.SHAPES[args.model].settings["num_hidden_layers"]
    found: dict[str, Count] = {}
    few, more = getattr(two, by), getattr(three, by)
    for name in dict.fromkeys([*few, *more]):
        count = Count()
        count.add(few[name], 1 - (layers - 2))
        count.add(more[name], layers - 2)
        found[name] = count
    peak = card.peak + (layers - 3) * (card.peak - card_of_two.peak)
    return found, len(card.waits), peak


def show(found: dict[str, Count], cards: Sequence[str]) -> str:
    """Return a table: a line for each kind, and their sum."""
    total = Count()
    for count in found.values():
        total.add(count)
    lines = []
    ordered = sorted(found.items(), key=lambda item: -item[1].seconds[cards[0]])
    for name, count in [*ordered, ("the step", total)]:
        times = [
            f"{count.seconds[card]:.3f} s ({count.seconds[card] / total.seconds[card]:.0%})"
            for card in cards
        ]
        figures = [
            f"{count.launches:,.0f}",
            f"{count.flops / 1e12:.1f}",
            f"{count.bytes / 1e9:.1f}",
        ]
        lines.append([name, *figures, *times])
    return table(("", "launches", "TFLOP", "GB", *cards), lines)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(shapes.LARGE), default="llama-3.1-8b")
    parser.add_argument("--quantize", nargs="+", default=["nf4", "none"])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, help="other than the model has")
    parser.add_argument("--activations", default="recompute")
    parser.add_argument("--rows", type=int, nargs="+", help="count decoding steps instead")
    parser.add_argument("--cards", nargs="+", choices=tuple(RATES), default=list(RATES))
    parser.add_argument("--by", choices=("kind", "operator"), default="kind")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Count a step in 16 and in 4 bits and print the tables."""
    args, figures = arguments(words), {}
    for quantize, rows in product(args.quantize, args.rows or [0]):
        asked = argparse.Namespace(**{**vars(args), "quantize": quantize, "rows": rows})
        found, waits, peak = whole(asked, "operators" if rows else f"{args.by}s")
        name = f"{quantize}, {rows} rows" if rows else quantize
        figures[name] = {kind: vars(count) for kind, count in found.items()}
        told = f"{args.model}, {name}, {args.length:,} tokens, r{args.rank}"
        told += "" if rows else f", {args.activations}"
        told += f"; waits for the device: {waits}; peak: {peak / 1e9:.2f} GB"
        print(f"\n{told}\n\n{show(found, args.cards)}")
    write_json(args.json, {"figures": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
