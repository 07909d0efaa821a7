"""GGUF: llama.cpp computes what was trained, what it cannot hold is refused, a round trip is exact.

Files are read back with the gguf library's own reader, and B's rows moved by hand, so that no code
under test checks itself.
"""

import importlib.util
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peftkit.adapter import attach
from peftkit.errors import AdapterError, OutputError
from peftkit.events import Event, Notice
from peftkit.formats.exchange import import_adapter
from peftkit.formats.gguf.convert import export_gguf
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter
from peftkit.formats.peft.low_rank import LowRank, read_low_rank, save_low_rank
from peftkit.formats.peft.notes import Provenance
from peftkit.methods.dora import DoRA
from peftkit.methods.lora import LoRA
from tests.helpers.adapters import logits, perturb
from tests.helpers.families import ARCHITECTURES
from tests.helpers.gguf_files import finish

gguf = pytest.importorskip("gguf")

METHODS = {
    "lora": LoRA(rank=4, alpha=6),
    "odd-rank": LoRA(rank=3, alpha=0.1),
    "rslora": LoRA(rank=3, alpha=7, rslora=True),
    "patterns": LoRA(
        rank=4, alpha=8, rank_pattern={"o": 2}, alpha_pattern={"layers.1.mlp.up_proj": 3}
    ),
}
# transformers' name -> llama.cpp's; whose rows llama.cpp moves, and how many heads these are
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEADS = {"attn_q": 4, "attn_k": 2}
MOVED = ("llama", "mistral")


def saved(folder: Path, family: str, method: LoRA) -> tuple[Path, Path, dict[str, Tensor]]:
    """Save a random adapter: its folder, its base's (config only), its updates scaling * B A."""
    model = ARCHITECTURES[family]().eval()
    model.config.save_pretrained(folder / "base")
    adapter = attach(model, method)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(torch.randn_like(parameter))
    save_adapter(adapter, folder / "adapter", Provenance(base=str(folder / "base")))
    deltas = {p: m.scaling * m.full_b() @ m.full_a() for p, m in adapter.modules.items()}
    return folder / "adapter", folder / "base", {p: d.detach() for p, d in deltas.items()}


def import_gguf(path: Path, out: Path, **how: Any) -> Path:
    """Import a GGUF LoRA; return the adapter's folder."""
    return import_adapter(path, out, **how).folder


def as_llama_cpp_reads(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return the library's reader, and the tensors by name."""
    reader = gguf.GGUFReader(path)
    return reader, {tensor.name: tensor for tensor in reader.tensors}


def theirs(name: str) -> str:
    """Return llama.cpp's name of "model.layers.0.self_attn.q_proj"."""
    _, _, number, rest = name.split(".", 3)
    return f"blk.{number}.{NAMES[rest]}.weight"


def moved(delta: Tensor, heads: int) -> Tensor:
    """Move the rows as llama.cpp's converter moves those of the weight."""
    half = delta.shape[0] // heads // 2
    order = [h * 2 * half + j * half + i for h in range(heads) for i in range(half) for j in (0, 1)]
    return delta[order]


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("llama", method) for method in METHODS),
        *((family, "lora") for family in ("mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")),
    ],
)
def test_llama_cpp_adds_what_was_trained(family, method, tmp_path):
    folder, _, deltas = saved(tmp_path, family, METHODS[method])
    export_gguf(folder, tmp_path / "a.gguf")
    reader, tensors = as_llama_cpp_reads(tmp_path / "a.gguf")
    alpha = reader.get_field("adapter.lora.alpha").contents()
    assert len(tensors) == 2 * len(deltas)
    for path, delta in deltas.items():
        name = theirs(path)
        a, b = (torch.from_numpy(tensors[f"{name}.lora_{x}"].data.copy()) for x in "ab")
        assert tuple(tensors[f"{name}.lora_a"].shape) == (delta.shape[1], a.shape[0])  # ne order
        heads = HEADS.get(name.split(".")[2], 0) if family in MOVED else 0
        expected = moved(delta, heads) if heads else delta
        # float32: alpha and the multiplied B are rounded once each
        torch.testing.assert_close(alpha / b.shape[1] * b @ a, expected, rtol=1e-5, atol=1e-6)


def test_the_metadata_are_those_that_the_loader_checks(tmp_path):
    folder, _, _ = saved(tmp_path, "qwen2", LoRA(rank=4, alpha=6))
    export_gguf(folder, tmp_path / "a.gguf")
    reader, _ = as_llama_cpp_reads(tmp_path / "a.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items() if field.types}
    assert fields["general.type"] == "adapter"
    assert fields["general.architecture"] == "qwen2"
    assert fields["adapter.type"] == "lora"
    assert fields["adapter.lora.alpha"] == 6.0
    assert reader.get_field("adapter.lora.alpha").types == [gguf.GGUFValueType.FLOAT32]
    assert reader.alignment == 32
    assert (tmp_path / "a.gguf").read_bytes()[:8] == b"GGUF\x03\0\0\0"


@pytest.mark.parametrize(
    ("family", "method"),
    [*(("llama", method) for method in METHODS), ("qwen2", "patterns"), ("gemma2", "rslora")],
)
def test_there_and_back_it_is_the_same_adapter(family, method, tmp_path):
    folder, base, deltas = saved(tmp_path, family, METHODS[method])
    export_gguf(folder, tmp_path / "a.gguf")
    back = import_gguf(tmp_path / "a.gguf", tmp_path / "back", base=str(base))
    _, ours = read_low_rank(folder)
    file, modules = read_low_rank(back)
    assert file.provenance.base == str(base)
    assert modules.keys() == deltas.keys()
    for path, module in modules.items():
        assert torch.equal(module.a[: ours[path].rank], ours[path].a)
        if method != "patterns":  # the others need no B multiplied
            assert torch.equal(module.b, ours[path].b)
            assert module.scaling == pytest.approx(ours[path].scaling, rel=1e-7)
        torch.testing.assert_close(module.delta(), deltas[path], rtol=1e-5, atol=1e-6)


def test_imported_it_loads_onto_the_base_and_computes_the_same(tmp_path):
    model = ARCHITECTURES["llama"]().eval()
    model.save_pretrained(tmp_path / "base")
    adapter = attach(model, LoRA(rank=4, alpha=8, targets=("q", "k", "up")))
    perturb(adapter.parameters())
    expected = logits(model)
    save_adapter(adapter, tmp_path / "one")
    export_gguf(tmp_path / "one", tmp_path / "a.gguf", base=str(tmp_path / "base"))
    import_gguf(tmp_path / "a.gguf", tmp_path / "two", base=str(tmp_path / "base"))
    adapter.detach()
    load_adapter(model, tmp_path / "two")
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("fp16", 2**-11), ("bf16", 2**-8), ("q8_0", 1 / 127)]
)
def test_narrower_types_lose_only_precision(dtype, tolerance, tmp_path):
    folder, base, _ = saved(tmp_path, "llama", LoRA(rank=32, alpha=6, targets=("q", "down")))
    notes: list[Event] = []
    export_gguf(folder, tmp_path / "a.gguf", dtype=dtype, on_event=notes.append)
    assert not notes
    import_gguf(tmp_path / "a.gguf", tmp_path / "back", base=str(base))
    _, ours = read_low_rank(folder)
    for path, module in read_low_rank(tmp_path / "back")[1].items():
        for name in ("a", "b"):
            mine, other = getattr(ours[path], name), getattr(module, name)
            assert 0 < (mine - other).abs().max() <= tolerance * mine.abs().max()


def test_rows_too_short_for_blocks_stay_in_f16_and_are_told(tmp_path):
    folder, _, _ = saved(tmp_path, "llama", LoRA(rank=4, targets=("q",)))
    notes: list[Event] = []
    export_gguf(folder, tmp_path / "a.gguf", dtype="q8_0", on_event=notes.append)
    text = "2 of 4 tensors are in fp16: q8_0 takes rows of a multiple of 32 numbers."
    assert notes == [Notice(text)]
    _, tensors = as_llama_cpp_reads(tmp_path / "a.gguf")
    kinds = {name.rpartition(".")[2]: t.tensor_type.name for name, t in tensors.items()}
    assert kinds == {"lora_a": "Q8_0", "lora_b": "F16"}


def test_conv1d_layers_come_back_as_such(tmp_path):
    folder, base, deltas = saved(tmp_path, "gpt2", LoRA(rank=4))
    export_gguf(folder, tmp_path / "a.gguf")
    file, modules = read_low_rank(import_gguf(tmp_path / "a.gguf", tmp_path / "b", base=str(base)))
    assert file.fields["fan_in_fan_out"] is True
    assert file.fields["target_modules"] == sorted(file.fields["target_modules"])
    for path, delta in deltas.items():
        torch.testing.assert_close(modules[path].delta(), delta)


# ------------------------------------------------------------------- what it cannot hold


def refusal(folder: Path, out: Path, **options: Any) -> str:
    with pytest.raises(AdapterError) as caught:
        export_gguf(folder, out, **options)
    assert not out.exists()
    return str(caught.value)


def test_what_the_format_has_no_place_for_is_refused_layer_by_layer(tmp_path):
    folder, _, deltas = saved(tmp_path, "llama", DoRA(rank=2, targets=("q",)))
    message = refusal(folder, tmp_path / "a.gguf")
    assert all(f"{path}: DoRA" in message for path in deltas)
    module = LowRank(torch.ones(2, 32), torch.ones(384, 2), 1.0)
    paths = ("model.embed_tokens", "model.layers.0.self_attn.q_proj")
    save_low_rank(dict.fromkeys(paths, module), tmp_path / "other", Provenance())
    message = refusal(tmp_path / "other", tmp_path / "a.gguf", base=str(tmp_path / "base"))
    assert f"{paths[0]}: no linear layer of this base" in message
    assert f"{paths[1]}: for a layer of shape (384, 32); this base's is (32, 32)" in message


def test_a_file_is_overwritten_only_if_forced(tmp_path):
    folder, _, _ = saved(tmp_path, "llama", LoRA(rank=2, targets=("q",)))
    out = tmp_path / "a.gguf"
    out.write_text("mine")
    with pytest.raises(OutputError, match="It exists"):
        export_gguf(folder, out)
    assert out.read_text() == "mine"
    export_gguf(folder, out, force=True)
    with pytest.raises(OutputError, match="It is a folder"):
        export_gguf(folder, tmp_path, force=True)


@pytest.mark.parametrize(
    ("family", "targets", "words", "count", "absent"),
    [
        ("gpt2", ("head", "o"), "lm_head: the base ties it to its embedding", 1, "attn.c_proj"),
        ("gpt_neox", LoRA().targets, "query_key_value: a fused layer whose rows", 2, "dense"),
    ],
)
def test_what_has_no_place_of_its_own_is_refused(family, targets, words, count, absent, tmp_path):
    folder, _, _ = saved(tmp_path, family, LoRA(rank=2, targets=targets))
    message = refusal(folder, tmp_path / "a.gguf")
    assert message.count(words) == count
    assert absent not in message


def test_numbers_too_large_for_the_type_are_refused(tmp_path):
    folder, _, _ = saved(tmp_path, "llama", LoRA(rank=2, targets=("q",)))
    file, modules = read_low_rank(folder)
    large = {p: LowRank(m.a * 1e6, m.b, m.scaling) for p, m in modules.items()}
    save_low_rank(large, tmp_path / "large", file.provenance)
    assert "Write fp32 or bf16." in refusal(tmp_path / "large", tmp_path / "a.gguf", dtype="fp16")
    export_gguf(tmp_path / "large", tmp_path / "a.gguf", dtype="bf16")


def test_a_missing_library_names_its_pip(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AdapterError, match=r'pip install "gguf'):
        export_gguf(tmp_path, tmp_path / "a.gguf")


# ------------------------------------------------------------------- foreign and hostile files


def write_gguf(path: Path, tensors: dict[str, Tensor], **keys: Any) -> Path:
    """Write a file as another tool might: any keys, any tensors."""
    writer = gguf.GGUFWriter(path, keys.pop("architecture", "llama"))
    for key, value in {"general_type": "adapter", "adapter_type": "lora", **keys}.items():
        name = key.replace("_", ".")
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_string(name, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    finish(writer)
    return path


PAIR = {
    "blk.0.attn_v.weight.lora_a": torch.ones(2, 32),
    "blk.0.attn_v.weight.lora_b": torch.ones(16, 2),
}


@pytest.fixture
def base(tmp_path: Path) -> str:
    ARCHITECTURES["llama"]().config.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [({"adapter_lora_alpha": 3.0}, 1.5), ({"adapter_lora_alpha": 0.0}, 1.0), ({}, 1.0)],
)
def test_without_an_alpha_the_scale_is_one(keys, scaling, base, tmp_path):
    path = write_gguf(tmp_path / "a.gguf", PAIR, **keys)
    _, modules = read_low_rank(import_gguf(path, tmp_path / "out", base=base))
    assert [module.scaling for module in modules.values()] == [scaling]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general_type": "model"}, "general.type is 'model', not 'adapter'"),
        ({"adapter_type": "lokr"}, "adapter.type is 'lokr', not 'lora'"),
        ({"architecture": "qwen2"}, "The file has 'qwen2'; .* is 'llama'"),
        ({"adapter_alora_invocation_tokens": [1, 2]}, "an activated LoRA"),
        ({"adapter_lora_alpha": float("nan")}, "adapter.lora.alpha is nan"),
        ({"adapter_lora_alpha": -1.0}, "adapter.lora.alpha is -1.0"),
        ({"adapter_lora_alpha": "8"}, "adapter.lora.alpha is '8'"),
    ],
)
def test_files_with_contradicting_headers_are_refused(keys, message, base, tmp_path):
    renamed = {k.replace("invocation_tokens", "invocation-tokens"): v for k, v in keys.items()}
    path = write_gguf(tmp_path / "a.gguf", PAIR, **renamed)
    if renamed != keys:  # the helper turns every underscore into a dot
        path.write_bytes(path.read_bytes().replace(b"invocation-tokens", b"invocation_tokens"))
    with pytest.raises(AdapterError, match=message):
        import_gguf(path, tmp_path / "out", base=base)
    assert not (tmp_path / "out").exists()


def test_all_tensors_that_do_not_fit_are_listed(base, tmp_path):
    tensors = {
        **PAIR,
        "blk.0.attn_q.weight.lora_a": torch.ones(2, 32),
        "blk.1.attn_v.weight.lora_a": torch.ones(2, 32),
        "blk.1.attn_v.weight.lora_b": torch.ones(16, 3),
        "blk.7.attn_q.weight.lora_a": torch.ones(2, 32),
        "blk.7.attn_q.weight.lora_b": torch.ones(32, 2),
        "blk.0.ffn_up_exps.weight.lora_a": torch.ones(4, 2, 32),
        "blk.0.ffn_up_exps.weight.lora_b": torch.ones(4, 64, 2),
        "blk.0.ffn_up.weight": torch.ones(64, 32),
    }
    path = write_gguf(tmp_path / "a.gguf", tensors)
    with pytest.raises(AdapterError) as caught:
        import_gguf(path, tmp_path / "out", base=base)
    for line in (
        "missing: blk.0.attn_q.weight.lora_b",
        "blk.1.attn_v.weight: the shapes A (2, 32) and B (16, 3) do not match",
        "blk.7.attn_q.weight: the base has no such layer. Did you mean 'blk.1.attn_q.weight'?",
        "blk.0.ffn_up_exps.weight: an embedding, a norm or a stack of experts",
        "blk.0.ffn_up.weight: no tensor of a LoRA",
    ):
        assert line in str(caught.value)
    assert "blk.0.attn_v" not in str(caught.value)


def test_numbers_that_are_none_are_refused(base, tmp_path):
    tensors = {name: tensor * float("nan") for name, tensor in PAIR.items()}
    path = write_gguf(tmp_path / "a.gguf", tensors)
    with pytest.raises(AdapterError, match="2 of 2 tensors hold NaN"):
        import_gguf(path, tmp_path / "out", base=base)


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


HEAD = b"GGUF" + struct.pack("<I", 3)
TYPE = _string(b"general.type") + struct.pack("<I", 8) + _string(b"adapter")
ARRAY = _string(b"x") + struct.pack("<I", 9)
ONE_KEY = HEAD + struct.pack("<QQ", 1, 1) + TYPE


def _info(name: bytes, dims: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    packed = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return _string(name) + packed + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x04\x95" + b"a" * 50, "a pickle"),
        (b"GGUF", "ends within its header"),
        (b"GGUF" + struct.pack("<I", 1), "GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3) + b"\0" * 64, "big-endian"),
        (HEAD + struct.pack("<QQ", 2**63, 1), "claims 9,223,372,036,854,775,808 tensors"),
        (HEAD + struct.pack("<QQ", 1, 1) + struct.pack("<Q", 2**62), "A string of"),
        (HEAD + struct.pack("<QQ", 1, 1) + ARRAY + struct.pack("<IQ", 0, 2**62), "ends within"),
        (HEAD + struct.pack("<QQ", 1, 1) + ARRAY + struct.pack("<IQ", 9, 5), "unknown type 9"),
        (HEAD + struct.pack("<QQ", 1, 2) + TYPE + TYPE, "'general.type' occurs twice"),
        (HEAD + struct.pack("<QQ", 0, 1) + TYPE, "It holds no tensors"),
        (ONE_KEY + _string(b"t") + struct.pack("<I", 2**31), "2,147,483,648 dimensions"),
        (ONE_KEY + _info(b"t", (2**40, 2**40), 0) + b"\0" * 64, "'t': ends at byte"),
        (ONE_KEY + _info(b"t", (0, 2), 0) + b"\0" * 64, "shape"),
        (ONE_KEY + _info(b"t", (32,), 2) + b"\0" * 64, "ggml's type 2"),
        (ONE_KEY + _info(b"../t", (2,), 0) + b"\0" * 64, "the name"),
        (
            HEAD
            + struct.pack("<QQ", 2, 1)
            + TYPE
            + _info(b"t", (16,), 0)
            + _info(b"u", (16,), 0)
            + b"\0" * 90,
            "tensors that overlap",
        ),
    ],
)
def test_hostile_files_are_refused(data, message, base, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    start = time.perf_counter()
    with pytest.raises(AdapterError, match=message):
        import_gguf(path, tmp_path / "out", base=base)
    assert time.perf_counter() - start < 5


def test_every_cut_and_flipped_file_is_an_error_or_an_adapter(base, tmp_path):
    whole = write_gguf(tmp_path / "a.gguf", PAIR, adapter_lora_alpha=2.0).read_bytes()
    path, generator = tmp_path / "b.gguf", torch.Generator().manual_seed(0)
    header = whole.index(struct.pack("<f", 1.0) * 4)
    outcomes = set()
    for trial in range(40):
        data = bytearray(whole)
        place = int(torch.randint(4, header, (1,), generator=generator))
        if trial % 2:
            data = data[:place]
        else:
            data[place] ^= 1 << int(torch.randint(0, 8, (1,), generator=generator))
        path.write_bytes(data)
        try:
            import_gguf(path, tmp_path / f"out-{trial}", base=base)
            outcomes.add("adapter")
        except AdapterError:
            outcomes.add("error")
    assert "error" in outcomes
