"""Streamed blocks: the numbers of a resident base to the bit, and two blocks on the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peftkit import LoRA, Recipe, attach, fit, load_base
from peftkit.base import streaming
from peftkit.base.load import Base
from peftkit.base.stored import pack_base
from peftkit.config.schema import from_dict
from peftkit.data.pack import Row
from peftkit.errors import BaseError, ConfigError
from peftkit.events import Event, Saved
from peftkit.forward.blocks import Blocks
from peftkit.quant import layers
from peftkit.settings import DataConfig, TrainConfig
from peftkit.tasks.tokens import CausalLM
from tests.helpers.families import ARCHITECTURES, FAMILIES, tiny_tokenizer

LAYERS = 4


@pytest.fixture(autouse=True)
def no_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(layers, "COPY_SHARE", 0.0)  # no unpacked copies of weights
    monkeypatch.setenv("PEFTKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module", params=["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
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


def trained(
    folder: Path, placement: str, out: Path, break_at: int = 0, **more: Any
) -> tuple[Base, dict[str, Tensor]]:
    """Train a run of two steps, evaluated twice, with two rows twice in a step.

    Args:
        break_at: At which pass through a layer memory runs out, once.
        more: For fit, and the settings of the run.
    """
    base = based(folder, placement)
    adapter = attach(base.model, LoRA(rank=2, targets=("q", "v")))
    data = DataConfig(train="", packing=False, max_length=32)
    task = CausalLM(base.model, base.tokenizer, data)
    settings: dict[str, Any] = {"max_steps": 2, "batch_size": 2, "gradient_accumulation": 2}
    settings |= {"eval_every": 1, "gradient_checkpointing": True, "compile": False}
    settings |= {name: more.pop(name) for name in [*more] if name in TrainConfig.model_fields}
    config = TrainConfig(output_dir=out, save_every=1, **settings)
    passes = 0

    def run_out(*args: object) -> None:
        nonlocal passes
        passes += 1
        if passes == break_at:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    base.model.model.layers[2].post_attention_layernorm.register_forward_hook(run_out)
    fit(base.model, task, rows(), rows(3), config, **more)
    assert passes >= break_at
    return base, adapter.state()


def assert_two_at_most(base: Base) -> None:
    stream = stream_of(base)
    assert stream.buffer.most_resident == 2
    assert stream.experts.most_resident <= 2
    assert stream.buffer.resident <= 2


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_streamed_run_is_the_resident_one_to_the_bit(folder, tmp_path):
    _, resident = trained(folder, "device", tmp_path / "a")
    base, streamed = trained(folder, "stream", tmp_path / "b")
    assert_same(streamed, resident)
    assert_two_at_most(base)

    def crash(event: Event) -> None:
        if isinstance(event, Saved) and event.path.name == "step-1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(folder, "stream", tmp_path / "c", on_event=crash)
    base, resumed = trained(folder, "stream", tmp_path / "c", resume=True)
    assert_same(resumed, resident)
    assert_two_at_most(base)


def test_rows_are_padded_if_memory_runs_out_while_padding_free_batches_are_tried(folder, tmp_path):
    events = list[Any]()
    trained(folder, "device", tmp_path / "a", break_at=4, on_event=events.append)
    assert any("Memory ran out while padding-free batches" in str(event) for event in events)


@pytest.mark.parametrize(  # where a forward pass is repeated, and in one
    "break_at", [5, pytest.param(6, marks=pytest.mark.slow)]
)
def test_memory_that_runs_out_is_had_with_smaller_batches(folder, break_at, tmp_path):
    _, resident = trained(folder, "device", tmp_path / "a", break_at, max_steps=1)
    base, streamed = trained(folder, "stream", tmp_path / "b", break_at, max_steps=1)
    assert_same(streamed, resident)
    assert_two_at_most(base)


@pytest.mark.parametrize(
    ("family", "how", "way"),
    [
        ("mixtral", "grouped_mm", "offload"),
        ("qwen3_moe", "batched_mm", "recompute"),
        pytest.param("gpt_oss", "grouped_mm", "recompute", marks=pytest.mark.slow),
        pytest.param("granitemoe", "eager", "recompute", marks=pytest.mark.slow),
    ],
)
def test_experts_come_a_group_at_a_time(family, how, way, monkeypatch, tmp_path):
    monkeypatch.setattr(streaming, "EXPERT_BYTES", 5000)  # of a few experts
    torch.manual_seed(0)
    model: Any = (FAMILIES | ARCHITECTURES)[family]()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    results = []
    for placement in ("device", "stream"):
        base = load_base(str(tmp_path), dtype="fp32", quantize="nf4", placement=placement)
        if family != "granitemoe":  # whose experts are a loop
            base.model.set_experts_implementation(how)
        targets = ("q", "expert_gate", "expert_up") if family == "mixtral" else ("q",)
        attach(base.model, LoRA(rank=2, targets=targets))
        Blocks(base.model.train()).set_activations(way)
        out = base.model(input_ids=ids(), use_cache=False).logits
        out.square().mean().backward()
        named = base.model.named_parameters()
        results.append({"out": out} | {n: p.grad for n, p in named if p.grad is not None})
    assert_same(results[1], results[0])
    assert_two_at_most(base)
    assert stream_of(base).experts.most_resident == 2
    assert stream_of(base).experts.bytes_moved > 0


def test_inference_is_the_same_with_two_blocks_on_the_device(folder):
    resident, streamed = based(folder, "device"), based(folder, "stream")
    with torch.no_grad():
        expected, found = (b.model(input_ids=ids()).logits for b in (resident, streamed))
    assert torch.equal(expected, found)
    stream = stream_of(streamed)
    assert stream.buffer.most_resident == 2
    made = [
        base.model.generate(ids(), max_new_tokens=4, do_sample=False, pad_token_id=0)
        for base in (resident, streamed)
    ]
    assert torch.equal(*made)
    assert stream.buffer.most_resident == 2


def test_pass_that_breaks_off_leaves_the_weights_in_main_memory(folder):
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


def test_stored_base_is_streamed_from_its_file(folder):
    plain = based(folder, "device", store="off")
    pack_base(str(folder), dtype="fp32")
    streamed = based(folder, "stream")
    with torch.no_grad():
        expected, found = (b.model(input_ids=ids()).logits for b in (plain, streamed))
    assert torch.equal(expected, found)


def test_what_cannot_be_streamed_is_refused(folder):
    with pytest.raises(BaseError):
        load_base(str(folder), placement="stream")
    with pytest.raises(ConfigError):
        load_base(str(folder), placement="moon")
    given = {"base": {"model": "x", "quantize": "nf4", "placement": "stream"}}
    kept = {"train": {"gradient_checkpointing": False}, "data": {"train": "x.jsonl"}}
    with pytest.raises(ConfigError):
        from_dict(Recipe, given | kept, "test")
