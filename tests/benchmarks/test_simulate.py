"""The count of a step on a card that is not there: its FLOPs are those of the shape."""

import argparse
import json

import pytest

from benchmarks import shapes, simulate
from tests.helpers.families import TINY

LENGTH, LAYERS = 256, 7
SIZES = {**TINY, "hidden_size": 96, "intermediate_size": 224, "head_dim": 16, "vocab_size": 1009}


@pytest.fixture
def shape(monkeypatch: pytest.MonkeyPatch) -> shapes.Shape:
    sizes = {**SIZES, "num_hidden_layers": LAYERS, "pad_token_id": 0}
    tiny = shapes.Shape("LlamaForCausalLM", "LlamaConfig", sizes)
    for known in (shapes.LARGE, shapes.SHAPES):
        monkeypatch.setitem(known, "tiny", tiny)
    return tiny


@pytest.mark.slow
def test_matmuls_match_the_shape_and_wait_once(shape, tmp_path, capsys):
    file = tmp_path / "figures.json"
    words = ["--model", "tiny", "--rank", "4", "--length", str(LENGTH), "--json", str(file)]
    assert simulate.main(words) == 0
    told = capsys.readouterr().out
    found = json.loads(file.read_text())["figures"]
    head = SIZES["hidden_size"] * SIZES["vocab_size"]
    blocks = shapes.matmul_parameters(shape) - head
    # forward, recomputed, gradient of the input; of the head no recomputing
    most = 2 * LENGTH * (3 * blocks + 2 * head)
    for kinds in found.values():
        # the lowest block's inputs need no gradient, and the last product is not always redone
        assert 0.8 * most < kinds["products"]["flops"] <= 1.02 * most
        assert kinds["attention"]["flops"] == pytest.approx(
            LAYERS * (4 + 4 + 10) * LENGTH**2 / 2 * 6 * 16
        )
        assert all(kinds[kind]["launches"] > 0 for kind in ("LoRA's products", "the loss"))
    assert found["nf4"]["unpacking"]["launches"] >= 2 * 7 * LAYERS
    assert "unpacking" not in found["none"]
    assert "waits for the device: 1" in told or "waits for the device: 2" in told


@pytest.mark.slow
def test_what_the_third_block_adds_every_other_one_adds(shape):
    asked = simulate.arguments(["--model", "tiny", "--rank", "4", "--length", "64"])
    args = argparse.Namespace(**{**vars(asked), "quantize": "none", "layers": 4, "rows": 0})
    reckoned, *_ = simulate.whole(args, "operators")
    counted, _ = simulate.step(4, args)
    for name, count in counted.operators.items():
        assert reckoned[name].launches == count.launches, name
        assert reckoned[name].bytes == pytest.approx(count.bytes)
