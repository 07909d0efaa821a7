"""Streamed blocks: the numbers of a resident base to the bit, and two blocks on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peftkit import LoRA, Recipe, attach, fit, load_base
from peftkit.base.load import Base
from peftkit.base.pack import pack_base
from peftkit.config.schema import from_dict
from peftkit.data.load import DataConfig
from peftkit.data.pack import Row
from peftkit.errors import BaseError, ConfigError
from peftkit.kernels import packing
from peftkit.tasks.causal_lm import CausalLM
from peftkit.train.config import TrainConfig
from peftkit.train.memory.blocks import Blocks
from tests.families import ARCHITECTURES, FAMILIES, tiny_tokenizer

LAYERS = 5


@pytest.fixture(autouse=True)
def no_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packing, "COPY_SHARE", 0.0)  # of unpacked weights, beside the packed ones
    monkeypatch.setenv("PEFTKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = (FAMILIES | ARCHITECTURES)[request.param]().config
    config.num_hidden_layers = LAYERS
    type((FAMILIES | ARCHITECTURES)[request.param]())(config).save_pretrained(found)
    tiny_tokenizer().save_pretrained(found)
    return found


def based(folder: Path, placement: str, **more: Any) -> Base:
    return load_base(str(folder), dtype="fp32", quantize="nf4", placement=placement, **more)


def stream_of(base: Base) -> Any:
    return base.model.block_stream


def ids() -> Tensor:
    return torch.arange(24).remainder(23).view(2, 12) + 3


def rows(count: int = 6) -> list[Row]:
    found = []
    for number in range(count):
        tokens = tuple((number * 7 + n) % 50 + 5 for n in range(9 + number))
        found.append(Row(tokens, (-100, *tokens[1:]), (len(tokens),), f"row {number}"))
    return found


def trained(folder: Path, placement: str, out: Path, **more: Any) -> tuple[Base, dict[str, Tensor]]:
    base = based(folder, placement)
    adapter = attach(base.model, LoRA(rank=2, targets=("q", "v")))
    data = DataConfig(train="", packing=False, max_length=32)
    task = CausalLM(base.model, base.tokenizer, data)
    config = TrainConfig(
        output_dir=out, max_steps=3, batch_size=2, gradient_accumulation=2, eval_every=2,
        gradient_checkpointing=True, compile=False, save_every=None,
    )  # fmt: skip
    fit(base.model, task, rows(), rows(3), config, **more)
    return base, adapter.state()


def test_streamed_run_is_the_resident_one_to_the_bit(folder, tmp_path) -> None:
    _, resident = trained(folder, "device", tmp_path / "a")
    base, streamed = trained(folder, "stream", tmp_path / "b")
    assert resident.keys() == streamed.keys()
    for name, tensor in resident.items():
        assert torch.equal(streamed[name], tensor), name
    assert stream_of(base).shelf.most_resident == 2
    assert stream_of(base).shelf.resident <= 2


def test_inference_is_the_same_with_two_blocks_on_the_device(folder) -> None:
    resident, streamed = based(folder, "device"), based(folder, "stream")
    with torch.no_grad():
        expected, found = (b.model(input_ids=ids()).logits for b in (resident, streamed))
    assert torch.equal(expected, found)
    stream = stream_of(streamed)
    assert stream.shelf.most_resident == 2
    made = [
        base.model.generate(ids(), max_new_tokens=4, do_sample=False, pad_token_id=0)
        for base in (resident, streamed)
    ]
    assert torch.equal(*made)
    assert stream.shelf.most_resident == 2


def test_a_step_moves_what_is_not_there_yet(folder) -> None:
    base = based(folder, "stream")
    attach(base.model, LoRA(rank=2, targets=("q", "v")))
    stream = stream_of(base)
    size = stream._blocks[0].unit.num_bytes
    with torch.no_grad():
        base.model(input_ids=ids())
    assert stream.shelf.bytes_moved == LAYERS * size
    base.model.train()
    Blocks(base.model).set_activations("recompute")
    for _ in range(2):
        before = stream.shelf.bytes_moved
        base.model(input_ids=ids(), use_cache=False).logits.sum().backward()
    # the last two blocks are there for the backward pass, and the first two for the forward pass
    assert stream.shelf.bytes_moved - before == (2 * LAYERS - 4) * size
    assert stream.shelf.most_resident == 2


def test_pass_that_breaks_off_leaves_the_weights_in_main_memory(folder) -> None:
    base = based(folder, "stream")
    before = {n: p.data_ptr() for n, p in base.model.named_parameters()}
    expected = base.model(input_ids=ids()).logits

    def fail(*args: object) -> None:
        raise RuntimeError("in the middle")

    layer = base.model.model.layers[2].post_attention_layernorm
    hook = layer.register_forward_hook(fail)
    with pytest.raises(RuntimeError):
        base.model(input_ids=ids())
    hook.remove()
    assert {n: p.data_ptr() for n, p in base.model.named_parameters()} == before
    with torch.no_grad():
        assert torch.equal(base.model(input_ids=ids()).logits, expected)


def test_stored_base_is_streamed_from_its_file(folder) -> None:
    plain = based(folder, "device", store="off")
    pack_base(str(folder), dtype="fp32")
    streamed = based(folder, "stream")
    with torch.no_grad():
        expected, found = (b.model(input_ids=ids()).logits for b in (plain, streamed))
    assert torch.equal(expected, found)


def test_what_cannot_be_streamed_is_refused(folder) -> None:
    with pytest.raises(BaseError):
        load_base(str(folder), placement="stream")
    with pytest.raises(ConfigError):
        load_base(str(folder), placement="moon")
    given = {"base": {"model": "x", "quantize": "nf4", "placement": "stream"}}
    kept = {"train": {"gradient_checkpointing": False}, "data": {"train": "x.jsonl"}}
    with pytest.raises(ConfigError):
        from_dict(Recipe, given | kept, "test")
