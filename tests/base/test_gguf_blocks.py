"""Weights of GGUF files that stay in their blocks: the same values, losses, gradients and bytes."""

import os
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import Tensor

from peftkit import LoRA, attach, load_base, merge, plan_run, save_adapter
from peftkit.base import gguf_reader
from peftkit.base.purpose import CAUSAL_LM
from peftkit.base.skeleton import read_config, weight_bytes
from peftkit.errors import BaseError
from peftkit.events import Event, Notice
from peftkit.execution.plan import ExecutionPlan, compute_dtype
from peftkit.kernels.gguf_blocks import TYPES, row_bytes, unpack_gguf
from peftkit.quant.layers import packed_tensors
from peftkit.quant.quantize import QuantizedEmbedding
from peftkit.settings import BaseConfig
from peftkit.tasks.row_loader import check_vocabulary
from tests.helpers.families import VOCAB
from tests.helpers.gguf_files import (
    bits,
    config_of_a_small_llama,
    dense_model,
    finish,
    hostile_rows,
    in_blocks,
    number_of,
    random_rows,
    write_gguf,
)

gguf = pytest.importorskip("gguf", reason="GGUF files need: pip install gguf")


def by_gguf(raw: Any, kind: str) -> Tensor:
    with numpy.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(raw, number_of(kind)))


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_is_dequantised_to_the_bit(kind):
    width = 2 * TYPES[kind].values
    raw = random_rows(kind, 41, width)
    for each in (raw, hostile_rows(kind, 41, width)):
        own = unpack_gguf(torch.from_numpy(each), kind, (41, width), torch.float32)
        assert torch.equal(bits(own), bits(by_gguf(each, kind)))
    assert by_gguf(raw, kind).isfinite().all()
    rounded = unpack_gguf(torch.from_numpy(raw), kind, (41, width), torch.bfloat16)
    assert torch.equal(rounded, by_gguf(raw, kind).bfloat16())


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture") / "mixed.gguf"
    write_gguf(path, transformers.LlamaForCausalLM(config_of_a_small_llama()), in_blocks)
    return path


def test_a_mixture_trains_as_its_dense_twin(mixture):
    base = load_base(str(mixture), dtype="fp32")
    kinds = {packing.form.kind for _, _, packing in packed_tensors(base.model)}
    assert kinds == {"q4_k", "q5_k", "q6_k", "q8_0"}
    ids = torch.randint(1, VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))
    results = []
    for model in (base.model, dense_model(mixture)):
        adapter = attach(model, LoRA(rank=4, targets="all-linear"), seed=1)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, 1e-3)
        losses = []
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            gradients = torch.cat([p.grad.flatten() for p in parameters])
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        results.append((torch.stack(losses), gradients))
        assert len(adapter.modules) == 14
    for own, expected in zip(*results, strict=True):
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)
    assert results[0][0][2] < results[0][0][0]


def test_what_the_plan_counts_is_what_the_base_takes(mixture):
    base = load_base(str(mixture), dtype="bf16")
    settings = BaseConfig(model=str(mixture), dtype="bf16")
    config = read_config(str(mixture), None, CAUSAL_LM)
    assert weight_bytes(config, settings, CAUSAL_LM, torch.bfloat16) == base.audit.num_bytes
    head = config_of_a_small_llama()
    columns = head.hidden_size
    assert base.audit.num_bytes < 2 * row_bytes("q8_0", columns) * base.audit.num_parameters / 256


ONE_WAY = ("train.gradient_checkpointing=false",)


@pytest.mark.covers("peftkit")
def test_a_plan_names_the_blocks_and_does_not_round_them_again(mixture):
    plan = plan_run(str(mixture), memory="1MB", overrides=ONE_WAY, measure=False)
    assert plan.stored.startswith("gguf, ")
    assert "q4_k" in plan.stored
    assert not plan.fits
    assert "quantize" not in plan.change


def notices(path: Path, **settings: Any) -> list[str]:
    events: list[Event] = []
    load_base(str(path), on_event=events.append, **settings)
    return [event.text for event in events if isinstance(event, Notice)]


def test_a_base_says_which_blocks_it_keeps_and_when_it_rounds_twice(mixture):
    kept = "\n".join(notices(mixture, dtype="fp32"))
    assert "The base keeps the bits of its files: gguf, " in kept
    assert "q4_k" in kept
    twice = "\n".join(notices(mixture, quantize="nf4", dtype="fp32"))
    assert "rounded twice" in twice
    assert "base.quantize: none" in twice


def test_a_type_that_is_not_read_in_blocks_is_dequantised_with_a_notice(tmp_path):
    path, ternary = tmp_path / "x.gguf", gguf.GGMLQuantizationType.TQ2_0

    def packed(name: str, tensor: Tensor) -> tuple[Any, Any]:
        if "ffn_up" in name:
            return gguf.quants.quantize(tensor.numpy(), ternary), ternary
        return in_blocks(name, tensor)

    write_gguf(path, transformers.LlamaForCausalLM(config_of_a_small_llama()), packed)
    (text,) = [n for n in notices(path, dtype="fp32") if "dequantised" in n]
    assert text == "2 quantised weights are kept dequantised: TQ2_0."


@pytest.mark.parametrize("damage", ["cut short", "a tensor beyond the end", "a lie", "changed"])
def test_a_damaged_file_is_one_clear_error(mixture, tmp_path, damage):
    path = tmp_path / "damaged.gguf"
    data = mixture.read_bytes()
    if damage == "cut short":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "a tensor beyond the end":
        path.write_bytes(data[:-300])
    elif damage == "a lie":  # about the rows of a tensor
        at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 12
        path.write_bytes(data[:at] + (1 << 40).to_bytes(8, "little") + data[at + 8 :])
    else:
        path.write_bytes(data)
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        if damage == "changed" and len(events) == 4:
            os.utime(path, ns=(1, 1))

    wrong = "changed while it was read" if damage == "changed" else "is not a complete GGUF file"
    with pytest.raises(BaseError, match=rf"damaged\.gguf {wrong}"):
        load_base(str(path), dtype="fp32", on_event=on_event)


def test_a_merged_adapter_has_16_bit_dequantised_weights(mixture, tmp_path):
    base = load_base(str(mixture), dtype="fp32")
    adapter = attach(base.model, LoRA(rank=2, targets=("q", "down")), seed=1)
    for parameter in base.model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    save_adapter(adapter, tmp_path / "adapter")
    ids = torch.arange(1, 12)[None]
    with torch.no_grad():
        expected = base.model(input_ids=ids).logits
    merge(tmp_path / "adapter", tmp_path / "merged", base=str(mixture), dtype="fp32")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_blocks_that_are_streamed_compute_the_same(mixture):
    here, streamed = (
        load_base(str(mixture), dtype="fp32", placement=placement)
        for placement in ("device", "stream")
    )
    assert streamed.fingerprint == here.fingerprint
    ids = torch.arange(1, 12)[None]
    with torch.no_grad():
        expected = here.model(input_ids=ids).logits
        torch.testing.assert_close(streamed.model(input_ids=ids).logits, expected)


@pytest.mark.parametrize("settings", [{}, {"quantize": "nf4", "quantize_embeddings": "nf4"}])
def test_a_base_computes_in_its_own_dtype(mixture, settings):
    model = load_base(str(mixture), dtype="bf16", **settings).model
    attach(model, LoRA(rank=2, targets="all-linear"))
    assert compute_dtype(model) == torch.bfloat16
    assert ExecutionPlan.for_model(model).dtype == "bfloat16"
    assert compute_dtype(model.float()) == torch.float32


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch.compile's own
@pytest.mark.slow
def test_compiled_blocks_are_one_graph_and_compute_the_same(mixture):
    model = load_base(str(mixture), dtype="fp32").model
    layer, hidden = model.model.layers[0].mlp, torch.randn(2, 5, 256)
    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(hidden), layer(hidden), atol=1e-5, rtol=1e-5)


def test_a_file_is_parsed_and_mapped_once(mixture, monkeypatch):
    made: list[str] = []
    for module, name in ((gguf_reader, "ArrayReader"), (gguf, "get_tensor_name_map")):
        plain = getattr(module, name)

        def counted(*args: Any, name: str = name, plain: Any = plain) -> Any:
            made.append(name)
            return plain(*args)

        monkeypatch.setattr(module, name, counted)
    load_base(str(mixture), dtype="fp32")
    assert made == ["ArrayReader", "get_tensor_name_map"]


@pytest.mark.parametrize("endian", list(gguf.GGUFEndian))
def test_arrays_of_keys_are_read_as_by_the_package(endian, tmp_path):
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=endian)
    writer.add_name("a name")
    arrays = (["a", "", "\u2581b"], [1, -2, 3], [0.5, -0.25], [True, False])
    for number, values in enumerate(arrays):
        writer.add_array(f"x.{number}", values)
    writer.add_tensor("t", numpy.ones((2, 32), numpy.float32))
    finish(writer)
    own, expected = gguf_reader.ArrayReader(path), gguf.GGUFReader(path)
    assert own.fields.keys() == expected.fields.keys()
    for name, field in expected.fields.items():
        assert own.fields[name].types == field.types
        assert own.fields[name].contents() == field.contents()
    assert own.data_offset == expected.data_offset
    assert (own.tensors[0].data == expected.tensors[0].data).all()
    data = path.read_bytes()
    for cut in range(24, data.index(b"x.3") + 16, 5):
        path.write_bytes(data[:cut])
        with pytest.raises((ValueError, IndexError, struct.error)):
            gguf_reader.ArrayReader(path)


def test_vocabulary_size_needs_no_unpacking(mixture, monkeypatch):
    base = load_base(str(mixture), dtype="fp32")
    monkeypatch.setattr(QuantizedEmbedding, "weight", property(lambda _: pytest.fail("unpacked")))
    check_vocabulary(base.model, base.tokenizer)
    base.tokenizer.add_tokens([f"new {n}" for n in range(9)])
    base.model.get_input_embeddings().num_embeddings = 3
    with pytest.raises(BaseError, match="3 embeddings"):
        check_vocabulary(base.model, base.tokenizer)
