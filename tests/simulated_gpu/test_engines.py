"""Engines on a card: what one leaves behind, and its graphs after the cache has grown."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from peftkit.execution import graphs
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import Request
from peftkit.inference.open_engine import why_plain
from peftkit.inference.plain_engine import PlainEngine
from peftkit.inference.sampling import Sampling
from tests.helpers.families import FAMILIES
from tests.helpers.generation import TOKENIZER
from tests.simulated_gpu.simulation import simulated
from tests.simulated_gpu.tensors import Card


def run(model: Any, *lengths: int) -> CachedEngine:
    """Answer one prompt after the other with answers of these lengths, and close the engine."""
    with CachedEngine(model, TOKENIZER) as engine:
        engine.ends = frozenset()
        for length in lengths:
            engine.submit(Request([7, 8, 9], Sampling(length, 0.0), 0))
            engine.run()
        return engine


def model_on(device: str) -> Any:
    torch.manual_seed(0)
    model: Any = FAMILIES["llama"]().eval().to(device)
    assert why_plain(model, TOKENIZER) is None
    return model


@contextmanager
def without_collection() -> Iterator[None]:
    """Leave cycles to themselves, as Python does between two collections of its oldest objects."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.smoke
def test_an_engine_leaves_nothing_on_the_card():
    with simulated() as card:
        model = model_on("cuda")
        run(model, 12)  # cuBLAS keeps the workspace of the stream
        with without_collection():
            before, alive = card.allocated, []
            for _ in range(4):
                engine = run(model, 12)
                assert engine.graphs.num_recorded == 1
                alive.append(weakref.ref(engine))
                assert card.allocated == before, "while the closed engine is still referenced"
                del engine
            assert [one() for one in alive] == [None] * 4
        assert not any(one.graphs for one in graphs._capture_streams)


def test_an_engine_that_a_run_leaves_early_leaves_nothing_on_the_card():
    with simulated() as card:
        model = model_on("cuda")
        run(model, 12)
        with without_collection():
            before = card.allocated
            with CachedEngine(model, TOKENIZER) as engine:
                engine.submit(Request([7, 8, 9], Sampling(40, 0.0), 0))
                for _ in range(9):
                    engine.step()
                assert card.allocated > before
            assert engine.num_running == 0
            assert card.allocated == before


def test_engines_share_a_stream_one_after_the_other_but_not_while_both_have_graphs(monkeypatch):
    """A freed graph frees the workspace of its stream, which replays of the other would use."""
    with simulated():
        streams: list[Any] = []
        monkeypatch.setattr(graphs, "_capture_streams", streams)
        model = model_on("cuda")
        run(model, 12)
        with CachedEngine(model, TOKENIZER) as engine:
            engine.ends = frozenset()
            engine.submit(Request([7, 8, 9], Sampling(12, 0.0), 0))
            engine.run()
            assert len(streams) == 1
            run(model, 12)
            assert len(streams) == 2
        run(model, 12)
        assert len(streams) == 2


def test_steps_are_recorded_after_all_graphs_are_gone():
    """Each longer answer needs a larger arena; the graphs of the smaller ones are dropped."""
    with simulated():
        model = model_on("cuda")
        with CachedEngine(model, TOKENIZER) as engine:
            engine.ends = frozenset()
            for length in (12, 120, 300):
                engine.submit(Request([7, 8, 9], Sampling(length, 0.0), 0))
                engine.run()
                engine.forget("any")  # as when an adapter is unloaded
            assert engine.graphs.is_able
            assert engine.graphs.num_recorded >= 3


def test_each_card_records_on_a_stream_of_its_own():
    with simulated(Card(count=2)):
        for device in ("cuda:0", "cuda:1"):
            found = run(model_on(device), 12).graphs
            assert found is not None
            assert found.num_recorded == 1, device


@pytest.mark.parametrize("kind", [CachedEngine, PlainEngine])
def test_a_card_without_float64_draws_the_tokens_of_a_cpu(kind):
    """Apple's GPUs have none; tokens are drawn on the CPU."""
    settings = Sampling(9, 1.0), Sampling(9, 0.7, top_k=40), Sampling(9, 1.0, top_p=0.9)

    def answers(model: Any) -> list[list[int]]:
        with kind(model, TOKENIZER) as engine:
            completions = [
                engine.submit(Request([7, 8, n], one, n)) for n, one in enumerate(settings)
            ]
            engine.run()
            return [one.ids for one in completions]

    expected = answers(model_on("cpu"))
    with simulated(Card(has_float64=False)):
        with pytest.raises(TypeError, match="float64"):
            torch.ones(3, device="cuda").double()
        assert answers(model_on("cuda")) == expected
