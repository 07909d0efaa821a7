"""What the machine can do at most, and the products and bytes that are held against it."""

import argparse

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.growth import cells
from benchmarks.limits import Limits, Sizes, limits
from benchmarks.train import least_seconds, num_beginnings, show, summary

CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=80,
)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    built = LlamaForCausalLM(CONFIG)
    built.set_attn_implementation("eager")  # torch counts no FLOP of fused attention on a CPU
    return built


def test_the_limits_are_those_of_products_that_were_timed(monkeypatch):
    monkeypatch.setitem(limits.__globals__["SIDE"], "cpu", 64)
    monkeypatch.setitem(limits.__globals__, "READ_BYTES", 1 << 20)
    found = limits(seconds=0.01)
    assert min(found.bf16, found.fp32, found.read) > 1e6
    higher = Limits(2 * found.bf16, found.fp32 / 2, found.read)
    assert found.best(higher) == Limits(2 * found.bf16, found.fp32, found.read)


def test_flop_of_a_forward_pass_are_those_that_torch_counts(model):
    from torch.utils.flop_counter import FlopCounterMode

    sizes = Sizes.of(model, rank=0)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.ones(1, 24, dtype=torch.long), logits_to_keep=1)
    square = sizes.attention * 24**2 / 2  # torch counts all of it, half is masked
    assert counter.get_total_flops() == pytest.approx(sizes.prefill_flop([24]) + square, rel=0.01)


def test_a_shallower_model_has_its_part_of_the_blocks(model):
    whole, part = Sizes.of(model, 4), Sizes.of(model, 4, num_layers=1)
    assert (3 * part.blocks, 3 * part.adapter) == (whole.blocks, whole.adapter)
    assert part.head == whole.head == 80 * 32
    assert part.decode_bytes(2) == 2 * (part.blocks + part.head) + 4 * part.adapter


def test_what_is_read_twice_or_not_learnt_counts_for_nobody(model):
    args = argparse.Namespace(rank=4, batch_size=2, dtype="fp32")
    rows = [{"input_ids": [1, 2, 3, n], "labels": [-100, -100, -100, n]} for n in (4, 5)]
    least = least_seconds(model, rows, args, Limits(bf16=1.0, fp32=1e3, read=1.0))
    assert num_beginnings(rows, 2) == 5
    assert least == Sizes.of(model, 4).step_flop([4, 4], 5, 2) / 1e3


def test_the_share_of_the_limit_stands_beside_the_speed():
    run = {"seconds": 4.0, "whole_seconds": 5.0, "first_step_seconds": 1.0, "peak_bytes": 10}
    run |= {"step_seconds": [3.0, 1.0], "losses": [2.0, 1.0], "num_trainable": 7}
    figures = summary({"ours": [run]}, [50, 50], {}, least=1.0)
    assert figures["ours"]["share"] == 0.5  # of 2 s at the speed of the later half
    assert " 50% |" in show(figures)
    point = {"tokens_per_second": 9, "step_seconds": 1, "share": 0.25, "peak_bytes": 1e9}
    assert cells(point)[1] == "25%"


def test_answers_take_what_their_products_or_the_reading_of_weights_takes():
    sizes = Sizes(blocks=1000, head=200, adapter=50, attention=0)
    best = Limits(bf16=1e6, fp32=1e5, read=1e4)
    prompts = 2 * 1050 * 7 + 2 * 200 * 2  # FLOP of 3 and 4 tokens, and of the head on the last ones
    by_reading = sizes.answer_seconds([3, 4], 10, 2, best, "fp32")
    assert by_reading == pytest.approx(prompts / 1e5 + 5 * 4 * 1250 / 1e4)
    by_products = sizes.answer_seconds([3, 4], 1000, 1000, best, "fp32")
    assert by_products == pytest.approx(prompts / 1e5 + 2 * 1250 * 1000 / 1e5)
