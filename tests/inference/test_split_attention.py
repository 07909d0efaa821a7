"""Decoding steps of a GPU over long keys: the keys in parts, and prefixes within CUDA graphs."""

import weakref
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.simulate import Counting, without_data
from peftkit.inference import cached_attention, cached_engine
from peftkit.inference import partial_attention as split
from peftkit.inference.cache import Span
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import Limits, Request
from peftkit.inference.partial_attention import (
    Scores,
    decode_attention,
    num_parts,
    partial_attention,
)
from peftkit.inference.sampling import Sampling
from tests.helpers.generation import MODELS, TOKENIZER
from tests.simulated_gpu.simulation import simulated
from tests.simulated_gpu.tensors import Card

PROMPTS = [[7 + n % 2, *range(20, 170), 8 + n] for n in range(5)]
"""Two prefixes, of three and two prompts."""
LENGTHS = (14, 18, 13, 16, 24)


def case(rows: int, heads: int, group: int, window: int) -> tuple[Tensor, ...]:
    """Return queries, keys, values in a longer arena, and a mask of rows of different lengths."""
    torch.manual_seed(rows)
    q = torch.randn(rows, heads, group, 16)
    keys, values = (torch.randn(rows, heads, 288, size)[:, :, :256] for size in (16, 24))
    key, length = torch.arange(256), torch.linspace(1, 256, rows + 1).long()[1:, None]
    seen = (key < length) & (key >= length - window)
    mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
    return q, keys, values, mask[:, None, None]


@pytest.mark.parametrize("window", [20, 256])
@pytest.mark.parametrize(("rows", "heads", "group"), [(1, 2, 1), (3, 2, 4), (2, 1, 3)])
def test_keys_in_parts_have_the_attention_of_all_keys(rows, heads, group, window, monkeypatch):
    monkeypatch.setattr(split, "SHORTEST_SPLIT_BY_TORCH", 256)
    tensors = case(rows, heads, group, window)
    sinks = torch.randn(heads * group)
    for softcap, sink, parts in product((None, 5.0), (None, sinks), (2, 4, 8, 7)):
        scores = Scores(0.3, softcap, sink)  # 256 keys are not 7 equal parts
        expected = decode_attention(*tensors, scores, 0)
        torch.testing.assert_close(decode_attention(*tensors, scores, parts), expected)
        whole = partial_attention(*tensors, scores)
        for found, right in zip(partial_attention(*tensors, scores, parts), whole, strict=True):
            torch.testing.assert_close(found, right)


def test_parts_fill_the_card():
    card = torch.device("cuda", 0)
    assert num_parts(torch.device("cpu"), 8, 1 << 15) == 0
    with simulated(Card(capability=(7, 5))):
        assert num_parts(card, 8, 1 << 15) == 0
    with simulated():  # 132 multiprocessors
        assert [num_parts(card, 8, length) for length in (512, 1024, 8192, 32768)] == [1, 4, 32, 32]
        assert [num_parts(card, 8 * rows, 8192) for rows in (2, 8, 16, 64)] == [16, 4, 2, 1]
        assert num_parts(card, 1, 1 << 17) == 64


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Split all keys of a card; return the numbers of parts."""
    monkeypatch.setattr(split, "SHORTEST_SPLIT", 32)
    monkeypatch.setattr(split, "SHORTEST_SPLIT_BY_TORCH", 32)
    monkeypatch.setattr(split, "SHORTEST_PART", 32)
    used: list[int] = []

    def noted(*args: Any) -> int:
        used.append(num_parts(*args))
        return used[-1]

    monkeypatch.setattr(cached_attention, "num_parts", noted)
    return used


def test_without_triton_long_keys_take_more_kernels_of_more_blocks():
    """One row of an 8B model: the second product is over parts, and scores are stored."""
    counts = []
    for length, is_split in ((2048, True), (8192, True), (8192, False)):
        counting = Counting(1)
        with without_data(), simulated(kernels=lambda counting=counting: counting) as card:
            device = torch.device("cuda", 0)
            like = {"dtype": torch.bfloat16, "device": device}
            q, mask = torch.empty(1, 8, 4, 128, **like), torch.empty(1, 1, 1, length, **like)
            keys, values = (torch.empty(1, 8, length, 128, **like) for _ in range(2))
            parts = num_parts(device, 8, length) if is_split else 1
            counting.operators.clear()
            decode_attention(q, keys, values, mask, Scores(0.1, None, None), parts)
        counts.append(
            (
                sum(count.launches for count in counting.operators.values()),
                round(sum(count.bytes for count in counting.operators.values()) / 1e6),
            )
        )
        assert not card.waits
    assert counts == [(1, 8), (15, 51), (1, 34)]


def answers(
    model: Any, watch: Callable[[CachedEngine], None] = lambda engine: None
) -> list[list[int]]:
    with CachedEngine(model, TOKENIZER, Limits(prefix_tokens=0)) as engine:
        engine.ends = frozenset()
        completions = [
            engine.submit(Request(ids, Sampling(size, 0.0), 0))
            for ids, size in zip(PROMPTS, LENGTHS, strict=True)
        ]
        while not engine.is_idle:
            engine.step()
            watch(engine)
        return [one.ids for one in completions]


FAST = (("llama", False), ("gemma2", True))
NAMES = ("llama", "gemma2", "mistral_swa", "gpt_oss", "qwen3_5")


@pytest.mark.parametrize(
    ("name", "in_place"),
    [
        pytest.param(*each, marks=() if each in FAST else pytest.mark.slow)
        for each in product(NAMES, (True, False))
    ],
)
def test_a_card_answers_like_a_cpu(name, in_place, parts, monkeypatch):
    monkeypatch.setattr(cached_engine, "MIN_READ", 1 if in_place else 1 << 30)
    model: Any = MODELS[name]().eval()
    expected = answers(model)
    assert not any(parts)
    with simulated():
        assert answers(model.to("cuda")) == expected
    assert max(parts) > 1


def test_rows_that_read_a_prefix_in_place_are_recorded(monkeypatch):
    """A token is a few launches, while other rows end; without graphs it is hundreds."""
    monkeypatch.setattr(cached_engine, "MIN_READ", 1)
    counts: list[int] = []
    readers: list[int] = []
    model: Any = MODELS["llama"]().eval()
    expected = answers(model)
    with simulated() as card:

        def watch(engine: CachedEngine) -> None:
            counts.append(card.launches)
            readers.append(sum(row.base is not None for row in engine._growing()))

        assert answers(model.to("cuda"), watch) == expected
    launches = [after - before for before, after in pairwise(counts)]
    recorded = [n for n, reading in zip(launches, readers[1:], strict=True) if reading and n < 20]
    assert len(recorded) > 3
    assert max(readers) == 5


def test_a_graph_does_not_keep_a_dropped_prefix(monkeypatch):
    monkeypatch.setattr(cached_engine, "MIN_READ", 1)
    spans: weakref.WeakSet[Span] = weakref.WeakSet()

    def watch(engine: CachedEngine) -> None:
        prefixes = [step.decode.prefixes for step in engine.graphs._steps.values()]
        spans.update(span for of_step in prefixes for span in of_step)
        assert not (engine.is_idle and any(prefixes))

    with simulated():
        answers(MODELS["llama"]().eval().to("cuda"), watch)
        assert not spans
