"""Blocks as a GPU runs them, compiled: one graph for rows of all lengths, and code for every card.

The layout is that of a GPU (LoRA of one input together); see written.py for what is seen of it
without one.
"""

from importlib.util import find_spec

import pytest

from tests.helpers.gpu_code import CARDS, MOST_REGISTERS, output_of

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton: pip install peftkit[gpu-tests]"
)
PROGRAM = "import sys; from tests.cross_compile.written import main; main(*sys.argv[1:])"
SINCE_AMPERE = [str(card) for card in CARDS if card >= 80]
MOST_KERNELS = {
    ("llama", "none"): (6, 13),
    ("llama", "nf4"): (9, 13),
    ("qwen3", "none"): (6, 13),
    ("qwen3", "nf4"): (9, 13),
    ("gemma", "none"): (6, 13),
    ("gemma", "nf4"): (9, 13),
    ("llama", "q4_k"): (6, 13),
}
"""Triton kernels that are written of a block, forward and backward."""


def one_graph(told: dict[str, list[bool]]) -> bool:
    """Tell whether there is a forward and a backward pass, and no more for other lengths."""
    return told["graphs"] == [False, True] and not told["breaks"]


@pytest.mark.parametrize(("family", "kind"), MOST_KERNELS)
def test_a_block_is_one_graph_of_few_kernels(family, kind, tmp_path):
    asked = (family, kind, "bfloat16", *SINCE_AMPERE)
    told = output_of(PROGRAM, *asked, TRITON_CACHE_DIR=str(tmp_path))
    assert one_graph(told)
    assert told["error"] <= 0.05  # a compiled graph rounds to 16 bits elsewhere
    most = MOST_KERNELS[family, kind]
    assert all(found <= limit for found, limit in zip(told["kernels"], most, strict=True))
    assert len(told["used"]) == sum(told["kernels"]) * len(SINCE_AMPERE)
    for used in told["used"]:
        assert used["STACK"] == used["LOCAL"] == 0
        assert 0 < used["REG"] <= MOST_REGISTERS


def test_a_mixtures_kernels_fit_every_card(tmp_path):
    asked = ("qwen3_moe", "none", "bfloat16", *SINCE_AMPERE)
    told = output_of(PROGRAM, *asked, TRITON_CACHE_DIR=str(tmp_path))
    assert told["error"] <= 0.05
    assert told["used"]  # of several graphs: in 16 bits experts' own product breaks them
    assert all(used["STACK"] == used["LOCAL"] == 0 for used in told["used"])


def test_a_block_in_fp16_is_code_for_a_card_before_ampere(tmp_path):
    told = output_of(PROGRAM, "llama", "none", "float16", "75", TRITON_CACHE_DIR=str(tmp_path))
    assert one_graph(told)
    assert told["used"]
    assert all(used["STACK"] == used["LOCAL"] == 0 for used in told["used"])


@pytest.mark.parametrize("kind", ["none", "nf4", "q6_k"])
def test_the_code_computes_what_the_graph_does(kind):
    told = output_of(PROGRAM, "llama", kind, "float32", TRITON_INTERPRET="1")
    assert one_graph(told)
    assert len(told["off"]) == 2
    assert max(told["off"]) < 1e-4
