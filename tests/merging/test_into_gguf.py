"""Merged into a GGUF file it is what merging first and converting then gives; the rest is copied.

Files are written and read by the gguf library, and converted by hand (tests/formats/gguf/written),
so that no code under test checks itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from peftkit.adapter import Adapter, attach
from peftkit.errors import AdapterError, MergeError, OutputError, PeftkitError, RunError
from peftkit.events import Event, Notice, Progress, Table
from peftkit.files import disk
from peftkit.formats.gguf import tensors as gguf_tensors
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.merging import into_gguf
from peftkit.merging.fold import merge_into
from peftkit.merging.into_gguf import MergedGGUF, merge_into_gguf
from peftkit.methods.ia3 import IA3
from peftkit.methods.lora import DoRA, LoRA
from peftkit.methods.own_parameters import LNTuning
from peftkit.methods.prompt import PromptTuning
from peftkit.methods.protocol import Method
from peftkit.methods.vera import VeRA
from tests.families import ARCHITECTURES

gguf = pytest.importorskip("gguf")
from tests.formats.gguf.written import converted, raw, values, write_gguf  # noqa: E402

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
STEPS = {"Q8_0": 127, "Q5_0": 16, "Q4_0": 8, "Q5_1": 31 / 2, "Q4_1": 15 / 2}
_Q4_0 = gguf.GGMLQuantizationType.Q4_0
PATTERNS: dict[str, Any] = {"rank_pattern": {"o": 2}, "alpha_pattern": {"v": 5}}
ATTENTION: dict[str, Any] = {"targets": ("q", "k", "v", "o")}
# family and llama.cpp's name of it; a method
CASES: dict[str, tuple[str, str, Method]] = {
    "llama": ("llama", "llama", LoRA(rank=4, alpha=8)),
    "patterns": ("llama", "llama", LoRA(rank=4, rslora=True, **PATTERNS)),
    "whole-head": ("llama", "llama", LoRA(rank=4, train_fully=("lm_head",))),
    "rows-of-tokens": ("llama", "llama", LoRA(rank=4, token_rows=(5, 9))),
    "dora": ("mistral", "llama", DoRA(rank=4)),
    "vera": ("llama", "llama", VeRA(rank=8, targets=("q", "k"))),
    "biases": ("qwen2", "qwen2", IA3()),
    "fused": ("phi3", "phi3", LoRA(rank=4, targets=("q", "up", "down"))),
    "transposed": ("gpt2", "gpt2", LoRA(rank=4)),
    "experts": ("mixtral", "llama", LoRA(rank=4, targets=("q", "expert_gate", "expert_down"))),
    "shared-experts": ("qwen2_moe", "qwen2moe", LoRA(rank=4, targets=("experts", "shared_up"))),
}


def saved(
    folder: Path, model: PreTrainedModel, method: Method, *, size: float = 0.3, weights: bool = True
) -> Adapter:
    """Save the base, and an adapter as training leaves it."""
    base, hold = folder / "base", torch.Generator().manual_seed(7)
    if weights:
        model.save_pretrained(base)
    else:
        model.config.save_pretrained(base)
    adapter = attach(model, method)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter += size * torch.randn(parameter.shape, generator=hold)
    save_adapter(adapter, folder / "adapter", Provenance(base=str(base)))
    return adapter


def merge(folder: Path, **options: Any) -> MergedGGUF:
    out = options.pop("out", folder / "out.gguf")
    return merge_into_gguf(folder / "adapter", folder / "base.gguf", out, **options)


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_merging_and_converting_gives(case: str, tmp_path: Path) -> None:
    family, arch, method = CASES[case]
    model = ARCHITECTURES[family]().eval()
    write_gguf(tmp_path / "base.gguf", converted(model, arch), arch)
    expected = converted(merge_into(saved(tmp_path, model, method)), arch)
    merged = merge(tmp_path)
    found, before = values(merged.path), values(tmp_path / "base.gguf")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # float32 on both sides, the same products in another order of rows
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=name)
    changed = [name for name in found if not torch.equal(found[name], before[name])]
    assert merged.tally.num_weights == len(changed) > 0
    assert merged.compared == 0.0
    assert merged.tally.kept == pytest.approx(1.0)


@pytest.fixture(scope="module")
def exact() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A tiny Llama with wide rows, and updates that float32 holds exactly."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 40}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False)).eval()
    return model, converted(model, "llama")


def with_coarse_adapter(folder: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """Save an adapter of small whole numbers; return its updates by llama.cpp's name."""
    copy = LlamaForCausalLM(model.config)
    copy.config.save_pretrained(folder / "base")
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.zero_()
    adapter = attach(copy, LoRA(rank=4, alpha=1, targets=("q", "down")))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
    save_adapter(adapter, folder / "adapter", Provenance(base=str(folder / "base")))
    return {n: t for n, t in converted(merge_into(adapter), "llama").items() if t.any()}


@pytest.mark.parametrize("kind", gguf_tensors.PACKED)
def test_each_type_is_packed_in_itself_and_nothing_else_moves(
    kind: str, exact: tuple[PreTrainedModel, dict[str, Tensor]], tmp_path: Path
) -> None:
    model, tensors = exact
    base = write_gguf(tmp_path / "base.gguf", tensors, "llama", lambda name: kind)
    updates = with_coarse_adapter(tmp_path, model)
    merged = merge(tmp_path)
    before, after, old = raw(base), raw(merged.path), values(base)
    for name, (type_name, data) in before.items():
        if name not in updates:
            assert after[name] == (type_name, data), name
            continue
        expected = old[name] + updates[name]
        found = values(merged.path)[name]
        assert after[name][0] == type_name
        # small whole numbers: float32 has them exactly, and what follows is one rounding to a float
        if kind in FLOATS:
            assert torch.equal(found, expected.to(FLOATS[kind]).float())
        else:  # to one of the two steps beside it; float16 scales add a little
            blocks = (found - expected).view(-1, 32).abs().amax(1)
            assert (blocks <= 1.1 * expected.view(-1, 32).abs().amax(1) / STEPS[kind]).all()
    assert merged.tally.kept == pytest.approx(1.0, abs=0.02)
    first = min(each.data_offset for each in gguf.GGUFReader(base).tensors)
    assert merged.path.read_bytes()[:first] == base.read_bytes()[:first]
    assert merged.path.stat().st_size == base.stat().st_size
    assert merged.types == {kind: 2}


def test_blocks_that_no_update_reaches_keep_their_bytes(tmp_path: Path) -> None:
    """Packing what was unpacked gives other bytes where scales were chosen more cleverly."""
    model = ARCHITECTURES["phi3"]().eval()
    tensors: dict[str, Any] = converted(model, "phi3")
    fused = torch.randint(0, 256, (64, 18), dtype=torch.uint8)  # Q4_0: a scale, 32 half bytes
    fused[:, :2] = torch.tensor([0.05], dtype=torch.float16).view(torch.uint8)
    tensors["blk.0.attn_qkv.weight"] = (fused.numpy(), "Q4_0")
    base = write_gguf(tmp_path / "base.gguf", tensors, "phi3")
    saved(tmp_path, model, LoRA(rank=4, targets=("q",)), weights=False)
    (_, old), (_, new) = (
        raw(path)["blk.0.attn_qkv.weight"] for path in (base, merge(tmp_path).path)
    )
    rows = [old[18 * i : 18 * i + 18] == new[18 * i : 18 * i + 18] for i in range(64)]
    assert not any(rows[:32])
    assert all(rows[32:])
    again = gguf.quants.quantize(values(base)["blk.0.attn_qkv.weight"].numpy(), _Q4_0)
    assert again[32:].tobytes() != old[18 * 32 :]


def k_quants(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Replace two tensors by ones in Q6_K: 210 bytes for 256 numbers, the last two a scale."""
    rows = torch.randint(0, 256, (256, 210), dtype=torch.uint8)
    rows[:, 208:] = torch.tensor([0.001], dtype=torch.float16).view(torch.uint8)
    names = ("blk.0.ffn_down.weight", "blk.0.attn_v.weight")
    return tensors | {n: (rows[: len(tensors[n])].numpy(), "Q6_K") for n in names}


@pytest.mark.parametrize("dtype", ["q8_0", "fp16", "q4_0"])
def test_asked_for_another_type_the_others_move_and_stay_as_they_are(
    dtype: str, exact: tuple[PreTrainedModel, dict[str, Tensor]], tmp_path: Path
) -> None:
    model, tensors = exact
    base = write_gguf(tmp_path / "base.gguf", k_quants(tensors), "llama", lambda name: "Q5_0")
    updates = with_coarse_adapter(tmp_path, model)
    with pytest.raises(MergeError, match=r"1 in Q6_K.*\n.*--dtype q8_0"):
        merge(tmp_path)
    merged = merge(tmp_path, dtype=dtype)
    kind = {"fp16": "F16"}.get(dtype, dtype.upper())
    assert merged.types == {kind: 2}
    before, after, old, new = raw(base), raw(merged.path), values(base), values(merged.path)
    for name in before:
        if name in updates:
            assert after[name][0] == kind
            assert gguf_tensors.is_rounded(old[name] + updates[name], new[name], kind)
        else:
            assert after[name] == before[name], name
    assert all(each.data_offset % 32 == 0 for each in gguf.GGUFReader(merged.path).tensors)


def test_rounding_is_told_from_other_numbers() -> None:
    values_ = torch.randn(64, 96) * torch.logspace(-6, 3, 64)[:, None]
    for kind in gguf_tensors.PACKED:
        quant = gguf.GGMLQuantizationType[kind]
        back = gguf.quants.dequantize(gguf.quants.quantize(values_.numpy(), quant), quant)
        stored = torch.from_numpy(back.copy())
        assert gguf_tensors.is_rounded(values_, stored, kind), kind
        worst = values_[40, :32].abs().argmax()
        stored[40, worst] += 0.3 * values_[40, worst]
        assert not gguf_tensors.is_rounded(values_, stored, kind), kind


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q4_0"])
def test_an_update_below_half_a_step_is_kept_in_the_mean(kind: str, tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"]().eval()
    write_gguf(tmp_path / "base.gguf", converted(model, "llama"), "llama", lambda name: kind)
    adapter = saved(tmp_path, model, LoRA(rank=4), size=0.0002)
    deltas = {
        p: m.merged_weight(torch.zeros(m.weight.shape)).detach() for p, m in adapter.modules.items()
    }
    largest = max(float(delta.abs().max()) for delta in deltas.values())
    assert largest < 0.5 / STEPS[kind] * 0.4  # of a block's largest number
    merged = merge(tmp_path)
    # the mean over 45,000 weights, each off by up to a step
    assert merged.tally.kept == pytest.approx(1.0, abs=0.25)
    again = merge(tmp_path, out=tmp_path / "again.gguf")
    assert again.path.read_bytes() == merged.path.read_bytes()


def test_an_update_that_the_type_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"]().eval()
    write_gguf(tmp_path / "base.gguf", converted(model, "llama"), "llama", lambda name: "BF16")
    saved(tmp_path, model, LoRA(rank=4), size=0.00005)
    with pytest.raises(MergeError, match=r"% of the update would be lost\.?\n.*BF16.*\n.*fp32"):
        merge(tmp_path)
    assert not list(tmp_path.glob("*out*"))
    told: list[Event] = []
    assert merge(tmp_path, dtype="fp32", on_event=told.append).tally.kept > 0.9
    assert [e.rows for e in told if isinstance(e, Table)]
    written = [e for e in told if isinstance(e, Progress)]
    assert written[-1].done == written[-1].total == (tmp_path / "out.gguf").stat().st_size
    merge(tmp_path, force=True, overwrite=True)


def test_weights_of_another_model_or_order_are_refused(tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"]().eval()
    tensors = converted(model, "llama")
    saved(tmp_path, model, LoRA(rank=4, targets=("q",)))
    tensors["blk.1.attn_q.weight"] = tensors["blk.1.attn_q.weight"].flip(0)
    write_gguf(tmp_path / "base.gguf", tensors, "llama")
    with pytest.raises(MergeError, match=r"layers\.1\.self_attn\.q_proj\.weight differs by 1\."):
        merge(tmp_path)
    assert not list(tmp_path.glob("*out*"))
    assert merge(tmp_path, force=True).compared > 1  # type: ignore[operator]


def test_without_the_base_s_weights_it_says_so(tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"]().eval()
    write_gguf(tmp_path / "base.gguf", converted(model, "llama"), "llama")
    saved(tmp_path, model, LoRA(rank=4), weights=False)
    told: list[Event] = []
    assert merge(tmp_path, on_event=told.append).compared is None
    assert any("are not on this machine" in e.text for e in told if isinstance(e, Notice))


def llama_file(folder: Path, method: Method | None = None, **changed: Any) -> None:
    """Make a base, an adapter, and the base as a file with something wrong with it."""
    model = ARCHITECTURES["llama"]().eval()
    if changed.pop("tied", False):
        model.config.tie_word_embeddings = True
        model.tie_weights()
    tensors: dict[str, Any] = converted(model, "llama")
    for name in changed.pop("without", ()):
        del tensors[name]
    for name, tensor in changed.pop("replaced", {}).items():
        tensors[name] = tensor
    write_gguf(folder / "base.gguf", tensors, changed.pop("arch", "llama"), **changed)
    saved(folder, model, method or LoRA(rank=4, targets=("q", "down")), weights=False)


Q, HEAD = "blk.0.attn_q.weight", "output.weight"
BAD: dict[str, tuple[dict[str, Any], type[PeftkitError], str]] = {
    "missing": ({"without": [Q]}, AdapterError, f"the file has no {Q}"),
    "misshapen": ({"replaced": {Q: torch.ones(16, 32)}}, AdapterError, r"\(32, 32\).*\(16, 32\)"),
    "architecture": ({"arch": "qwen2"}, AdapterError, "The file says 'qwen2'"),
    "split": ({"split__count": 3}, AdapterError, "one of 3 files of a split model"),
    "tied": (
        {"tied": True, "method": LoRA(token_rows=(3,)), "replaced": {HEAD: torch.ones(384, 32)}},
        *(AdapterError, "ties it to its head, and the file has both"),
    ),
    "tied-head": (
        {"tied": True, "method": LoRA(targets=("head",))},
        *(PeftkitError, "tied"),
    ),
    "norms": ({"method": LNTuning()}, AdapterError, "no such weight to merge into"),
    "prompt": ({"method": PromptTuning(num_virtual_tokens=4)}, MergeError, "cannot be merged"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_merged_is_refused_by_name(case: str, tmp_path: Path) -> None:
    changed, error, message = BAD[case]
    llama_file(tmp_path, **changed)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(error, match=message):
        merge(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_the_place_to_write_to_is_checked_first(tmp_path: Path) -> None:
    llama_file(tmp_path)
    (tmp_path / "taken.gguf").write_bytes(b"x")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "base.gguf")
    for name, message in {
        "base.gguf": "the base itself",
        "link.gguf": "the base itself",
        "taken.gguf": "it exists",
        "base": "it is a folder",
    }.items():
        with pytest.raises(OutputError, match=message):
            merge(tmp_path, out=tmp_path / name)
    with pytest.raises(OutputError, match="the base itself"):
        merge(tmp_path, out=tmp_path / "base.gguf", overwrite=True)
    merge(tmp_path, out=tmp_path / "taken.gguf", overwrite=True)
    with pytest.raises(MergeError, match=r"no type 'q6_k'.*\n?.*q8_0"):
        merge(tmp_path, dtype="q6_k")


def test_files_that_are_no_base_are_refused(tmp_path: Path) -> None:
    from peftkit.formats.gguf.convert import export_gguf

    llama_file(tmp_path)
    whole = (tmp_path / "base.gguf").read_bytes()
    export_gguf(tmp_path / "adapter", tmp_path / "lora.gguf")
    for data, message in {
        (tmp_path / "lora.gguf").read_bytes(): "general.type is 'adapter', not 'model'",
        b'{"a": 1}': "It is JSON text",
        whole[:-5000]: "ends at byte",
        whole[:200]: "It ends within its header",
    }.items():
        (tmp_path / "base.gguf").write_bytes(data)
        with pytest.raises(AdapterError, match=message):
            merge(tmp_path)


def test_tokens_and_starts_that_need_the_base_are_refused(tmp_path: Path) -> None:
    llama_file(tmp_path)
    (tmp_path / "adapter" / "tokenizer.json").write_text("{}")
    with pytest.raises(AdapterError, match="tokens of its own"):
        merge(tmp_path)
    (tmp_path / "adapter" / "tokenizer.json").unlink()
    (tmp_path / "adapter" / "peftkit.json").unlink()
    config = tmp_path / "adapter" / "adapter_config.json"
    fields = json.loads(config.read_text()) | {"init_lora_weights": "pissa"}
    config.write_text(json.dumps(fields))
    with pytest.raises(AdapterError, match="its initial value is computed from the base"):
        merge(tmp_path)


def test_what_comes_out_otherwise_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama_file(tmp_path)
    packed = into_gguf.pack
    with monkeypatch.context() as patch:
        patch.setattr(into_gguf, "pack", lambda values, kind: packed(values * 1.1, kind))
        with pytest.raises(RunError, match="is not what it was given"):
            merge(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "free_bytes", lambda folder: 1000)
        with pytest.raises(RunError, match="The disk is full"):
            merge(tmp_path)
    opened = disk.open_regular

    def damaged(path: Path, **how: Any) -> Any:
        if ".out.gguf.tmp-" in path.name:
            with open(path, "r+b") as file:
                file.seek(-40, 2)
                file.write(b"\xff")
        return opened(path, **how)

    monkeypatch.setattr(disk, "open_regular", damaged)
    with pytest.raises(RunError, match="came out otherwise"):
        merge(tmp_path)
    assert not list(tmp_path.glob("*out*"))


def test_one_weight_is_in_memory_at_a_time(tmp_path: Path) -> None:
    model = nn.Module()  # the hollow base: no tensor of it takes memory
    model.layer = nn.Linear(1 << 20, 1 << 12, device="meta")
    from peftkit.merging.gguf_changes import _hollow

    weight = _hollow(model).get_parameter("layer.weight")
    assert weight.shape == (1 << 12, 1 << 20)
    assert weight.device.type == "cpu"
    assert weight.untyped_storage().nbytes() == 4
