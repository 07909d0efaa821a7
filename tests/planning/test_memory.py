"""What is reckoned of a base that is not all on one device is what the device then has."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.plan import reckoner_of
from peftkit.adapter import attach
from peftkit.base import streaming
from peftkit.base.sharding import sharded_footprint
from peftkit.base.streaming import AT_ONCE, BlockStream, streamed_footprint
from peftkit.forward.blocks import Blocks
from peftkit.methods.lora import LoRA
from peftkit.quant.quantize import quantize_model
from tests.helpers.children import exit_code, start_ranks
from tests.helpers.families import ARCHITECTURES, FAMILIES, llama


def reckoned(config: Any, quantize: str = "nf4") -> Any:
    return reckoner_of(config, quantize, on_gpu=True).whole


def real(config: Any, quantize: str = "nf4") -> Any:
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.requires_grad_(False)
    if quantize != "none":
        quantize_model(made, quantize)
    return made


def bytes_of(model: Any) -> int:
    return sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_streamed_base_is_held_as_reckoned(quantize):
    config = llama()
    held, model = streamed_footprint(reckoned(config, quantize)), real(config, quantize)
    total = bytes_of(model)
    assert held.resident + held.elsewhere == total == bytes_of(reckoned(config, quantize))
    stream = BlockStream(model, torch.device("cpu"))
    attach(model, LoRA(rank=2))
    each = [sum(t.nbytes for t in block.host) for block in stream._blocks]
    assert held.elsewhere == sum(each)
    assert held.passing == AT_ONCE * max(each)
    assert moved_in_a_step(model, stream) == pytest.approx(
        held.moved, rel=0.01
    )  # where each begins
    assert stream.buffer.most_resident == AT_ONCE


def moved_in_a_step(model: Any, stream: BlockStream) -> int:
    """Return the bytes that the second of two steps moves."""
    Blocks(model).set_activations("recompute")
    model.train()
    ids, moved = torch.arange(200).remainder(41)[None], 0
    for _ in range(2):
        before = stream.buffer.bytes_moved + stream.experts.bytes_moved
        model(input_ids=ids, use_cache=False).logits.float().sum().backward()
        moved = stream.buffer.bytes_moved + stream.experts.bytes_moved - before
    return moved


@pytest.mark.covers("peftkit")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_streamed_experts_are_held_as_reckoned(size, monkeypatch):
    config = FAMILIES["mixtral"]().config
    config.num_hidden_layers = 4
    monkeypatch.setattr(streaming, "EXPERT_BYTES", size * 1024)  # of 1024 and 2048 for an expert
    held, model = streamed_footprint(reckoned(config)), real(config)
    stream = BlockStream(model, torch.device("cpu"))
    attach(model, LoRA(rank=2))
    assert moved_in_a_step(model, stream) == held.moved
    assert stream.experts.most_resident == AT_ONCE


def test_more_devices_have_less_each_and_all_of_it_together():
    model = reckoned(llama())
    total, found = bytes_of(model), [sharded_footprint(model, n) for n in (2, 3, 4)]
    for number, held in zip((2, 3, 4), found, strict=True):
        assert total / number <= held.resident < 1.02 * total / number + 100
        assert held.passing == found[0].passing
    offloaded = sharded_footprint(model, 2, offload=True)
    assert offloaded.resident + offloaded.elsewhere == found[0].resident


def config_of(family: str) -> Any:
    return llama() if family == "llama" else ARCHITECTURES[family]().config


def at_work(family: str, out: Path) -> None:
    """Write what a process has of a sharded base, and what it gets in a step."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from peftkit.base.sharding import local_bytes, shard_base

    torch.distributed.init_process_group("gloo")
    model = real(config_of(family))
    attach(model, LoRA(rank=2, targets=("q", "v")))
    shard_base(model, torch.device("cpu"))
    gathered = 0
    gather = FSDPParamGroup.unshard

    def counted(group: Any, *args: Any, **more: Any) -> None:
        nonlocal gathered
        if group.is_sharded and group._all_gather_result is None:
            gathered += sum(p._sharded_param_data.nbytes for p in group.fsdp_params)
        gather(group, *args, **more)

    FSDPParamGroup.unshard = counted  # type: ignore[method-assign]
    Blocks(model).set_activations("recompute")
    model.train()
    ids = torch.arange(24)[None] + 3
    model(input_ids=ids, use_cache=False).logits.float().sum().backward()
    if os.environ["RANK"] == "0":
        held = {"base": local_bytes(model)["base"], "gathered": gathered}
        out.write_text(json.dumps(held))
    torch.distributed.barrier()
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_sharded_base_is_held_and_moved_as_reckoned(family, tmp_path):
    children = start_ranks(at_work, family, tmp_path / "found.json")
    assert [exit_code(child) for child in children] == [0, 0]
    found = json.loads((tmp_path / "found.json").read_text())
    held = sharded_footprint(reckoned(config_of(family)), 2)
    assert held.resident == pytest.approx(found["base"], rel=0.01)
    assert held.moved == pytest.approx(found["gathered"], rel=0.01)
