"""Steps of decoding that a GPU records: the same answers, by a launch or a few for each token."""

import logging
import threading
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peftkit.inference import cached_engine, open_engine, recorder
from peftkit.inference.bank import AdapterBank
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import Completion, Request
from peftkit.inference.generate import stream
from peftkit.inference.open_engine import generation_fallbacks, why_plain
from peftkit.inference.recorder import Graphs
from peftkit.inference.sampling import Sampling
from peftkit.methods.lora import LoRA
from tests.helpers.bank import tiny_base, write_adapter
from tests.helpers.families import EOS, FAMILIES
from tests.helpers.generation import MODELS, TOKENIZER
from tests.simulated_gpu.simulation import simulated
from tests.simulated_gpu.tensors import Card


class Words:
    """A tokenizer of numbers."""

    eos_token_id, pad_token_id = EOS, 0

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


LENGTHS = (12, 18, 9, 14, 16, 7, 11)
PROMPTS = [[7 + n, 8, 9 + n] * (40 if n == 3 else 1) for n in range(len(LENGTHS))]
SETTINGS = [Sampling(size, 0.0 if n % 2 else 1.0, seed=n) for n, size in enumerate(LENGTHS)]


@pytest.fixture(autouse=True)
def short_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make slots grow, which the engine does for completions of more than 512 tokens."""
    for module in (cached_engine, recorder):
        monkeypatch.setattr(module, "SMALLEST", 128)


def answers(engine: CachedEngine, adapters: tuple[str | None, ...] = (None,)) -> list[list[int]]:
    """Answer seven requests, of which two come later: they join, leave and outgrow their slots."""
    requests = [
        Request(PROMPTS[n], one, n, adapters[n % len(adapters)]) for n, one in enumerate(SETTINGS)
    ]
    completions: list[Completion] = [engine.submit(one) for one in requests[:5]]
    for _ in range(5):
        engine.step()
    completions += [engine.submit(one) for one in requests[5:]]
    engine.run()
    return [one.ids for one in completions]


def on_card(model: Any, record: bool = True) -> CachedEngine:
    assert why_plain(model.to("cuda"), TOKENIZER) is None
    engine = CachedEngine(model, TOKENIZER)
    engine.graphs.is_able = record
    return engine


@pytest.mark.smoke
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gemma2", "lfm2"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("mistral_swa", "gpt2", "gpt_neox", "gpt_oss", "opt", "gemma3_text")
        ),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("qwen3_5", "granitemoehybrid", "falcon_h1", "zamba2", "gemma4")
        ),
    ],
)
def test_recorded_answers_are_those_of_a_cpu(name):
    model: Any = MODELS[name]().eval()
    if name in ("gpt_oss", "granitemoehybrid"):  # experts are recorded in bf16 alone
        model.to(torch.bfloat16)
    with CachedEngine(model, TOKENIZER) as engine:
        expected = answers(engine)
    with simulated(), on_card(model) as engine:
        assert answers(engine) == expected
        assert engine.graphs.is_able
        assert engine.graphs.num_recorded > 0


def test_the_trial_of_an_engine_refuses_a_graph_with_other_logits(monkeypatch):
    model: Any = MODELS["llama"]().eval()
    record, replayed = Graphs._record, []

    def changed(factor: float) -> Callable[..., Any]:
        def recorded(self: Graphs, run: Callable[[], torch.Tensor]) -> Any:
            graph, out = record(self, run)

            def replay() -> None:
                graph.replay()
                out.mul_(factor)
                replayed.append(factor)

            return SimpleNamespace(replay=replay), out

        return recorded

    for factor in (1.0, 1.1):
        monkeypatch.setattr(Graphs, "_record", changed(factor))
        with simulated():
            problem = open_engine._by_trying(model.to("cuda"), TOKENIZER, model.config)
        assert replayed[-1] == factor
        assert bool(problem) == (factor != 1.0)
        model = MODELS["llama"]().eval()
    assert problem == "Its attention computed other logits over the engine's cache."


def test_a_token_is_a_few_launches_and_graphs_are_reused(caplog):
    launches: dict[bool, int] = {}
    for record in (True, False):
        model: Any = FAMILIES["llama"]().eval()
        with simulated() as card, on_card(model, record) as engine:
            assert engine.graphs.records
            if record:
                first = answers(engine)
                before = engine.graphs.num_recorded
                assert answers(engine) == first
                assert engine.graphs.num_recorded - before <= 2  # seldom enough before
            counts = []
            engine.submit(Request([5, 6], Sampling(12)))
            while not engine.is_idle:
                engine.step()
                counts.append(card.launches)
            launches[record] = sorted(b - a for a, b in pairwise(counts))[len(counts) // 2]
    assert launches[True] < 10
    assert launches[False] > 10 * launches[True]
    assert not caplog.records


def test_a_model_that_waits_for_the_host_is_not_recorded(caplog):
    model: Any = FAMILIES["llama"]().eval()
    with CachedEngine(model, TOKENIZER) as engine:
        expected = answers(engine)
    with simulated():
        engine = on_card(model)
        assert generation_fallbacks(model, TOKENIZER) == []
        model.model.norm.register_forward_hook(lambda module, args, out: float(out.sum()) and None)
        with engine, caplog.at_level(logging.WARNING):
            assert answers(engine) == expected
        assert engine.graphs.records
        assert (engine.graphs.is_able, engine.graphs.num_recorded) == (False, 0)
        (fallback,) = generation_fallbacks(model, TOKENIZER)  # for later runs and servers
    assert fallback.path == "Decoding runs without CUDA graphs"
    assert fallback.cause == "Capturing a step has failed."
    (record,) = caplog.records
    assert "without CUDA graphs. CUDA error" in record.message


@pytest.mark.parametrize(
    ("capability", "dtype", "is_recorded"),
    [
        ((7, 5), torch.float16, False),
        ((8, 9), torch.bfloat16, False),
        ((9, 0), torch.bfloat16, True),
        ((9, 0), torch.float16, False),
        ((12, 0), torch.bfloat16, False),
    ],
)
def test_experts_are_recorded_only_without_waits(capability, dtype, is_recorded):
    model: Any = FAMILIES["mixtral"]().eval().to(dtype)
    with simulated(Card(capability=capability)):
        engine = CachedEngine(model.to("cuda"), TOKENIZER)
        assert engine.graphs.records == is_recorded


class Capture:
    """A capture as torch makes it: its end raises, and the thread stays on its stream."""

    def __init__(self, graph: Any, **_: Any) -> None:
        self._stream = torch.cuda.Stream()

    def __enter__(self) -> None:
        self._stream.__enter__()

    def __exit__(self, *_: object) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def test_a_failed_recording_restores_the_stream(caplog, monkeypatch):
    model: Any = FAMILIES["llama"]().eval()
    with CachedEngine(model, TOKENIZER) as engine:
        expected = answers(engine)
    with simulated():
        before = torch.cuda.current_stream()
        engine = on_card(model)
        monkeypatch.setattr(torch.cuda, "graph", Capture)
        with engine, caplog.at_level(logging.WARNING):
            assert answers(engine) == expected
        assert torch.cuda.current_stream() is before
        with CachedEngine(model, TOKENIZER) as engine:
            assert not engine.graphs.records  # it is not tried again
            assert answers(engine) == expected
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_a_thread_uses_the_card_of_the_model(name, monkeypatch):
    class Place(threading.local):
        current = 0

    place, places = Place(), list[int]()

    class At:
        def __init__(self, device: torch.device) -> None:
            self._device, self._before = device, 0

        def __enter__(self) -> None:
            self._before, place.current = place.current, int(self._device.index)

        def __exit__(self, *_: object) -> None:
            place.current = self._before

    with simulated(Card(count=2)):
        monkeypatch.setattr(torch.cuda, "device", At)
        model: Any = MODELS[name]().eval().to("cuda:1")
        model.register_forward_pre_hook(lambda *_: places.append(place.current))
        assert "".join(stream(model, Words(), [7, 8, 9], max_new_tokens=4))
    assert set(places) == {1}


@pytest.mark.slow
def test_each_row_has_its_adapter(llama, tokenizer, tmp_path):
    paths = {
        name: write_adapter(llama, LoRA(rank=rank, alpha=64), tmp_path / name, rank)
        for name, rank in (("one", 4), ("two", 2))
    }
    names = ("one", None, "two")

    def found() -> list[list[int]]:
        bank = AdapterBank(tiny_base(llama, tokenizer), paths)
        with bank.engine() as engine:
            assert isinstance(engine, CachedEngine)
            groups = [answers(engine, names), answers(engine, ("two",))]
            if engine.graphs.records:
                assert engine.graphs.num_recorded > 1
        for name in bank.names:
            bank.drop(name)
        return [ids for of in groups for ids in of]

    expected = found()
    with simulated():
        llama.to("cuda")
        assert found() == expected
