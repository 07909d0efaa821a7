"""The table of models by cards says what a plan says."""

import pytest

from benchmarks import fits, shapes
from peftkit.execution.environment import gpu_of_size
from peftkit.planning.memory import MemoryEstimator
from peftkit.planning.step import StepCount
from peftkit.planning.step_estimator import StepEstimator

TINY = {
    "hidden_size": 64,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1 << 20,
}


def estimator_of(model: str, tokens: int, card: float) -> MemoryEstimator:
    recipe = fits.recipe_of(model, "nf4", tokens, "none")
    config = shapes.SHAPES[model].make_config()
    return MemoryEstimator(recipe, config, gpu_of_size(int(card * fits.GB)))


@pytest.mark.slow
def test_a_card_without_room_is_told_and_another_has_the_longest_row_of_its_plan():
    resident, inputs, streamed, weights = fits.rows_of(["gpt2"], (0, 1), "nf4", 256)
    assert resident[:2] == ["gpt2", "no"]
    assert streamed[:2] == ["gpt2, streamed", "no"]
    assert inputs[1] == weights[1] == ""
    assert float(inputs[2]) == pytest.approx(
        int(resident[2].replace(",", "")) * 12 * 768 * 2 / 1e9, abs=0.05
    )
    assert weights[2]
    estimator = estimator_of("gpt2", 256, 1)
    assert resident[2] == f"{max(way.longest_row for way in estimator.strategies()):,}"


@pytest.mark.parametrize("tokens", [512, 4096, 65536])
def test_long_rows_are_extrapolated_from_near(monkeypatch, tokens):
    """Of a step that grows ten times as fast from 2,048 tokens on."""

    def bytes_of(length: int) -> int:
        return 4_000 * length + 36_000 * max(length - 2048, 0)

    def count(steps: StepEstimator, rows: int, length: int, mode: str, *, tiles: bool) -> StepCount:
        return StepCount({"activations": rows * bytes_of(length)}, 1, 0)

    def bytes_per_token(
        steps: StepEstimator, rows: int, length: int, mode: str, *, tiles: bool
    ) -> float:
        return (bytes_of(length) - bytes_of(length // 4)) / (length - length // 4)

    monkeypatch.setitem(
        shapes.SHAPES, "tiny", shapes.Shape("LlamaForCausalLM", "LlamaConfig", TINY)
    )
    monkeypatch.setattr(StepEstimator, "count", count)
    monkeypatch.setattr(StepEstimator, "bytes_per_token", bytes_per_token)
    monkeypatch.setattr(StepEstimator, "main_bytes_per_token", lambda *_: 0.0)
    longest = []
    for card in (2, 4, 8):
        estimator = estimator_of("tiny", tokens, card)
        room = estimator.environment.room - estimator.environment.process
        ways = list(estimator.placed("device"))
        for way in ways:
            used = bytes_of(way.longest_row) + way.by_category["optimizer"]
            assert 0.85 * room < used <= room
        longest.append(min(way.longest_row for way in ways))
    assert longest == sorted(set(longest)), "more memory, longer rows"
