"""Published checkpoints: read, they are codes less zeros, times scales, to the bit."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from peftkit.adapter import attach
from peftkit.base.build import LoadedModel, build
from peftkit.base.load import Base, load_base
from peftkit.base.locate import Location
from peftkit.base.pretrained import quiet
from peftkit.base.published.checkpoint import PublishedCheckpoint, described, scheme_of
from peftkit.base.published.codes import read_codes, unpacked
from peftkit.base.purpose import CAUSAL_LM
from peftkit.base.request import BaseRequest, request_of
from peftkit.base.skeleton import weight_bytes
from peftkit.base.streaming import BlockStream
from peftkit.config.schema import from_dict
from peftkit.errors import BaseError
from peftkit.events import Event, Notice
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.formats.serving import served_over
from peftkit.merging.merge import merge
from peftkit.methods.lora import LoRA
from peftkit.quant.audit import audit
from peftkit.quant.layers import QuantizedLinear
from peftkit.quant.weights import weight_of
from peftkit.settings import BaseConfig
from tests.helpers.adapters import perturb
from tests.helpers.bases import in_mxfp4, mark_quantized
from tests.helpers.families import ARCHITECTURES, tiny_tokenizer

CPU = torch.device("cpu")
OUT, IN, GROUP = 48, 64, 16
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Tensors = dict[str, Tensor]


def words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., n) into 32-bit words along the last dimension, the first ones low."""
    fields = codes.long().unflatten(-1, (-1, 32 // bits))
    packed = (fields << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def spread(scale: Tensor, shape: tuple[int, int]) -> Tensor:
    rows, columns = (-(-side // of) for side, of in zip(shape, scale.shape, strict=True))
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


class Integers(NamedTuple):
    codes: Tensor
    zero: Tensor
    scale: Tensor

    @property
    def weight(self) -> Tensor:
        shape = (self.codes.shape[0], self.codes.shape[1])
        return (self.codes.float() - spread(self.zero.float(), shape)) * spread(
            self.scale.float(), shape
        )


def integers(shape: tuple[int, int], bits: int, *, symmetric: bool) -> Integers:
    grid = (shape[0], shape[1] // GROUP)
    zero = torch.full(grid, 1 << bits - 1)
    zero = zero if symmetric else torch.randint(0, 1 << bits, grid)
    scale = (torch.rand(grid) / 100 + 0.005).half()
    return Integers(torch.randint(0, 1 << bits, shape), zero, scale)


Made = tuple[Tensors, Tensor]
"""A layer's tensors, and the weight that they mean."""


def gptq(bits: int, symmetric: bool, v2: bool, desc_act: bool) -> Callable[..., Made]:
    def make(shape: tuple[int, int]) -> Made:
        made = integers(shape, bits, symmetric=symmetric)
        index = torch.arange(shape[1]) // GROUP
        if desc_act:
            index = index[torch.randperm(shape[1])]
        own = made.zero if v2 else (made.zero - 1) % (1 << bits)
        packed = words(own.t().contiguous(), bits)
        if not v2:  # a zero of 0 borrows from its neighbour
            one = sum(1 << at for at in range(0, 32, bits))
            whole = words(made.zero.t().contiguous(), bits).long() - one
            packed = torch.where(whole < -(1 << 31), whole + (1 << 32), whole).int()
        tensors = {
            "qweight": words(made.codes.contiguous(), bits).t().contiguous(),
            "qzeros": packed,
            "scales": made.scale.t().contiguous(),
            "g_idx": index.int(),
        }
        codes, zero, scale = (t.float() for t in made)
        return tensors, (codes - zero[:, index]) * scale[:, index]

    return make


def awq(shape: tuple[int, int]) -> Made:
    made = integers(shape, 4, symmetric=False)

    def along_out(values: Tensor) -> Tensor:
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
        return words(values.t().unflatten(-1, (-1, 8))[..., order].flatten(-2).contiguous(), 4)

    own = {"qweight": along_out(made.codes), "qzeros": along_out(made.zero)}
    return own | {"scales": made.scale.t().contiguous()}, made.weight


def packed(bits: int, symmetric: bool, channel: bool = False) -> Callable[..., Made]:
    def make(shape: tuple[int, int]) -> Made:
        made = integers(shape, bits, symmetric=symmetric)
        if channel:
            made = Integers(made.codes, made.zero[:, :1], made.scale[:, :1].bfloat16())
        tensors = {
            "weight_packed": words(made.codes, bits),
            "weight_scale": made.scale,
            "weight_shape": torch.tensor(shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(made.zero.t().contiguous(), bits).t().contiguous()
        return tensors, made.weight

    return make


def w8a8(shape: tuple[int, int]) -> Made:
    codes = torch.randint(-128, 128, shape, dtype=torch.int8)
    scale = (torch.rand(shape[0], 1) / 100).bfloat16()
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def torchao(name: str) -> Callable[..., Made]:
    """Make int8 as torchao's files have it, with a scale for each group of a row."""

    def make(shape: tuple[int, int]) -> Made:
        codes = torch.randint(-128, 128, shape, dtype=torch.int8)
        scale = torch.rand(shape[0], shape[1] // GROUP) / 100
        tensors = {"_weight_qdata": codes, "_weight_scale": scale}
        if name == "zeros":
            tensors["_weight_zero_point"] = torch.zeros_like(scale, dtype=torch.int8)
        return tensors, codes.float() * spread(scale, shape)

    return make


def fp8(name: str, grid: Callable[[tuple[int, int]], tuple[int, int]]) -> Callable[..., Made]:
    def make(shape: tuple[int, int]) -> Made:
        codes = torch.randn(shape).to(torch.float8_e4m3fn)
        scale = torch.rand(grid(shape)) / 50 + 0.01
        whole = scale
        if name == "weight_scale_inv":
            rows, columns = (torch.arange(side) // 32 for side in shape)
            whole = scale[rows][:, columns]
        return {"weight": codes, name: scale}, codes.float() * whole

    return make


def fp4(kind: str) -> Callable[..., Made]:
    def make(shape: tuple[int, int]) -> Made:
        codes, size = torch.randint(0, 16, shape), 32 if kind == "mxfp4" else 16
        held = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        grid = (shape[0], shape[1] // size)
        if kind == "mxfp4":
            power = torch.randint(115, 125, grid, dtype=torch.uint8)
            scale, tensors = 2.0 ** (power.float() - 127), {"weight_scale": power}
        else:
            small, whole = torch.rand(grid).to(torch.float8_e4m3fn), torch.rand(()) + 0.5
            modelopt = kind == "modelopt"
            scale = small.float() * whole if modelopt else small.float() / whole
            name = "weight_scale_2" if modelopt else "weight_global_scale"
            tensors = {"weight_scale": small, name: whole if modelopt else whole.reshape(1)}
        name = "weight" if kind == "modelopt" else "weight_packed"
        return tensors | {name: held}, E2M1[codes] * spread(scale, shape)

    return make


def compressed(form: str, bits: int, kind: str = "int", **weights: Any) -> dict[str, Any]:
    own = {"num_bits": bits, "type": kind, "symmetric": True, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": own, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


GPTQ = {"quant_method": "gptq", "group_size": GROUP, "bits": 4, "sym": False}
GROUPED = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": GROUP}}
TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {"granularity": GROUPED}}},
}
"""As transformers 5 writes `Int8WeightOnlyConfig(granularity=PerGroup(16))`."""
PACK = "pack-quantized"
FORMATS: dict[str, tuple[dict[str, Any], Callable[..., Made], str]] = {
    "gptq": ({**GPTQ, "sym": True}, gptq(4, True, False, False), "int4"),
    "gptq zeros": (GPTQ, gptq(4, False, False, False), "int4"),
    "gptq v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(4, False, True, False), "int4"),
    "gptq desc_act": ({**GPTQ, "sym": True, "desc_act": True}, gptq(4, True, False, True), "int4"),
    "gptq 8 bits": ({**GPTQ, "bits": 8, "sym": True}, gptq(8, True, False, False), "uint8"),
    "auto-round": (
        {**GPTQ, "quant_method": "auto-round", "sym": True},
        gptq(4, True, False, False),
        "int4",
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP}, awq, "int4"),
    "w4a16": (compressed(PACK, 4, group_size=GROUP, strategy="group"), packed(4, True), "int4"),
    "w4a16 zeros": (
        compressed(PACK, 4, group_size=GROUP, symmetric=False),
        packed(4, False),
        "int4",
    ),
    "w8a16": (compressed(PACK, 8, strategy="channel"), packed(8, True, True), "uint8"),
    "w8a8": (compressed("int-quantized", 8, strategy="channel"), w8a8, "int8"),
    "torchao groups": (TORCHAO, torchao(""), "uint8"),
    "torchao groups, zeros of 0": (TORCHAO, torchao("zeros"), "uint8"),
    "fp8 tensor": (
        compressed("float-quantized", 8, "float", strategy="tensor"),
        fp8("weight_scale", lambda shape: (1, 1)),
        "fp8",
    ),
    "fp8 channel": (
        compressed("float-quantized", 8, "float", strategy="channel"),
        fp8("weight_scale", lambda shape: (shape[0], 1)),
        "fp8",
    ),
    "fp8 block": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        fp8("weight_scale_inv", lambda shape: (-(-shape[0] // 32), -(-shape[1] // 32))),
        "fp8",
    ),
    "nvfp4": (compressed("nvfp4-pack-quantized", 4, "float"), fp4("nvfp4"), "nvfp4"),
    "mxfp4": (compressed("mxfp4-pack-quantized", 4, "float"), fp4("mxfp4"), "mxfp4"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, fp4("modelopt"), "nvfp4"),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_dequantised_to_the_bit(name, dtype):
    settings, make, kind = FORMATS[name]
    tensors, weight = make((OUT, IN))
    codes = read_codes(tensors, scheme_of(settings))
    assert codes.form.kind == kind
    assert torch.equal(unpacked(codes, dtype), weight.to(dtype))


def write(folder: Path, name: str, family: str = "llama") -> dict[str, Tensor]:
    """Write a tiny checkpoint in a format; return the weights that it means."""
    settings, make, _ = FORMATS[name]
    torch.manual_seed(0)
    ARCHITECTURES[family]().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    path, expected = folder / "model.safetensors", {}
    tensors = safetensors.torch.load_file(path)
    for key in [key for key in tensors if "_proj" in key]:
        value = tensors.pop(key)
        own, expected[key] = make((value.shape[0], value.shape[1]))
        tensors |= {f"{key.removesuffix('.weight')}.{leaf}": each for leaf, each in own.items()}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    mark_quantized(folder, **settings)
    return expected


def dense_twin(folder: Path, expected: Mapping[str, Tensor]) -> Any:
    """Return the model of a folder whose quantised weights are these."""
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = safetensors.torch.load_file(folder / "model.safetensors")
    known = {k: v for k, v in state.items() if k in model.state_dict() and k not in expected}
    model.load_state_dict({**known, **expected}, strict=False)
    return model.eval()


def request_for(folder: Path, dtype: str = "fp32", quantize: str = "none") -> BaseRequest:
    given = {"model": str(folder), "dtype": dtype, "quantize": quantize}
    settings = from_dict(BaseConfig, given, "test")
    return request_of(settings, CAUSAL_LM, Location(str(folder), str(folder)), CPU)


def built(folder: Path, dtype: str = "fp32", quantize: str = "none") -> LoadedModel:
    return build(request_for(folder, dtype, quantize))


IDS = torch.arange(8)[None]


@pytest.mark.parametrize(
    "name", ["gptq desc_act", "awq", "w8a8", "fp8 block", "nvfp4", "mxfp4", "w4a16 zeros"]
)
def test_a_model_keeps_its_codes_and_computes_as_its_dense_twin(name, tmp_path):
    expected = write(tmp_path, name)
    found = built(tmp_path)
    assert audit(found.model).quantized_as == FORMATS[name][2]
    for key, weight in expected.items():
        layer = found.model.get_submodule(key.removesuffix(".weight"))
        assert isinstance(layer, QuantizedLinear), key
        assert torch.equal(weight_of(layer), weight), key
    twin = dense_twin(tmp_path, expected)
    torch.testing.assert_close(found.model(input_ids=IDS).logits, twin(input_ids=IDS).logits)
    request = request_for(tmp_path)
    size = weight_bytes(request.config, request.settings, CAUSAL_LM, request.dtype)
    expected_size = sum(p.nbytes for p in found.model.parameters())
    assert abs(size - expected_size) < 0.05 * expected_size  # of which a plan is made


def test_the_fingerprint_is_that_of_the_values_in_any_container(tmp_path):
    folders = [tmp_path / name for name in ("kept", "dense")]
    expected = write(folders[0], "fp8 block")
    rounded = {key: weight.bfloat16() for key, weight in expected.items()}
    dense_twin(folders[0], rounded).save_pretrained(folders[1])
    assert built(folders[0]).fingerprint == built(folders[1]).fingerprint
    assert built(folders[0], quantize="nf4").fingerprint == built(folders[1]).fingerprint


def test_kept_codes_are_streamed_as_they_are(tmp_path):
    write(tmp_path, "awq")
    resident, streamed = built(tmp_path).model, built(tmp_path).model
    BlockStream(streamed, CPU)
    assert torch.equal(streamed(input_ids=IDS).logits, resident(input_ids=IDS).logits)


@pytest.mark.parametrize(("name", "family"), [("awq", "qwen3_moe"), ("w8a8", "mixtral")])
def test_experts_are_stacked_in_their_codes(name, family, tmp_path):
    expected = write_experts(tmp_path, name, family)
    found = built(tmp_path)
    rows = {row.kind: row.stored for row in audit(found.model).rows if row.is_quantized}
    assert rows["stacked experts"] == FORMATS[name][2]
    experts = found.model.get_submodule("model.layers.0.mlp.experts")
    for leaf, parts in expected.items():
        assert torch.equal(getattr(experts, leaf), torch.stack(parts)), leaf


def test_stacks_of_gpt_oss_keep_their_codes(tmp_path):
    in_mxfp4(tmp_path)
    found = built(tmp_path, "bf16").model
    with quiet():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert audit(found).quantized_as == "mxfp4"
    losses = []
    for model in (found, theirs.requires_grad_(False)):
        for leaf in ("gate_up_proj", "down_proj"):
            path = "model.layers.1.mlp.experts"
            weights = [getattr(m.get_submodule(path), leaf) for m in (model, theirs)]
            assert torch.equal(*weights), leaf
        torch.manual_seed(0)
        adapter = attach(model.float(), LoRA(rank=2, targets=("experts",)))
        optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        adapter.detach()
    assert losses[:2] == pytest.approx(losses[2:], abs=1e-4)


LEAVES = {
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}


def write_experts(folder: Path, name: str, family: str) -> dict[str, list[Tensor]]:
    """Write a tiny model with the experts of its first layer in a format."""
    settings, make, _ = FORMATS[name]
    block, *leaves = LEAVES[family]
    model = ARCHITECTURES[family]()
    experts: Any = model.get_submodule("model.layers.0.mlp.experts")
    count, rows, width = experts.gate_up_proj.shape
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    expected: dict[str, list[Tensor]] = {"gate_up_proj": [], "down_proj": []}
    for number in range(count):
        weights = []
        for leaf in leaves:
            stem = f"model.layers.0.{block}.experts.{number}.{leaf}"
            tensors.pop(f"{stem}.weight")
            side = (width, rows // 2) if leaf == leaves[2] else (rows // 2, width)
            own, weight = make(side)
            tensors |= {f"{stem}.{key}": value for key, value in own.items()}
            weights.append(weight)
        expected["gate_up_proj"].append(torch.cat(weights[:2]))
        expected["down_proj"].append(weights[2])
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    mark_quantized(folder, **settings)
    return expected


def test_an_adapter_is_merged_into_dequantised_weights_and_it_is_told(tmp_path):
    expected = write(tmp_path / "base", "awq")
    base: Base = load_base(str(tmp_path / "base"), dtype="fp32", device="cpu")
    assert base.stored == "awq, 4 bits, groups of 16, with zeros"
    adapter = attach(base.model, LoRA(rank=2))
    perturb(adapter.parameters())
    logits = base.model(input_ids=IDS).logits
    origin = Provenance(
        base=base.name, fingerprint=base.fingerprint, loading={"stored": base.stored}
    )
    save_adapter(adapter, tmp_path / "adapter", origin)
    told: list[Any] = []
    merge(tmp_path / "adapter", tmp_path / "merged", dtype="fp32", on_event=told.append)
    assert any("dequantised" in getattr(event, "text", "") for event in told)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(input_ids=IDS).logits, logits, atol=1e-4, rtol=0)
    assert len(expected) == 14


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({**GPTQ, "bits": 3}, "gptq in 3 bits"),
        ({**GPTQ, "bits": 4, "checkpoint_format": "marlin"}, "layout marlin"),
        ({**GPTQ, "bits": 4, "dynamic": {"-:q": {}}}, "dynamic"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "layout gemv"),
        ({"quant_method": "hqq"}, "hqq"),
        (compressed("marlin-24", 4), "marlin-24"),
        (compressed("pack-quantized", 3), "in 3 bits"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "modelopt"),
    ],
)
def test_unsupported_formats_refused(settings, told, tmp_path):
    ARCHITECTURES["llama"]().save_pretrained(tmp_path)
    mark_quantized(tmp_path, **settings)
    with pytest.raises(BaseError, match=told) as caught:
        built(tmp_path)
    assert "compressed-tensors (w4a16" in str(caught.value)


MIXED = compressed("pack-quantized", 8, strategy="channel")
MIXED["config_groups"]["group_1"] = {
    **MIXED["config_groups"]["group_0"],
    "targets": ["re:.*mlp.*"],
    "weights": {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 128},
}
"""Attention in 8 bits, feed-forward layers in 4, as in published W4A16/W8A16 mixtures."""
ROUNDED_MORE = {
    "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True,
    "extra_config": {"lm_head": {"bits": 8}, "model.layers.0.mlp.up_proj": {"bits": 16}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (MIXED, "compressed-tensors, some layers 8 bits and others 4 bits, groups of 128"),
        (
            ROUNDED_MORE,
            "auto-round, some layers 4 bits, groups of 128 and others 8 bits, groups of 128",
        ),
        (TORCHAO, "torchao, 8 bits, groups of 16"),
    ],
)
def test_all_bits_of_a_checkpoint_are_named(settings, words):
    assert described(settings) == words


def test_a_mixture_is_not_rounded_again_and_none_of_its_layers_goes_unread():
    checkpoint = PublishedCheckpoint(MIXED)
    with pytest.raises(BaseError, match="some of the weights of m are in 4 bits already"):
        checkpoint.check("m", "nf4")
    odd = compressed("pack-quantized", 8)
    odd["config_groups"]["group_1"] = {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 3}}
    with pytest.raises(BaseError, match="pack-quantized in 3 bits"):
        PublishedCheckpoint(odd).check("m")


def test_four_bits_are_not_rounded_again(tmp_path):
    write(tmp_path, "awq")
    with pytest.raises(BaseError, match="in 4 bits already"):
        built(tmp_path, quantize="nf4")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda own: own | {"scales": own["scales"][:1]}, "scales for"),
        (lambda own: own | {"scales": own["scales"] * float("nan")}, "not finite"),
        (lambda own: {k: v for k, v in own.items() if k != "qzeros"}, "no 'qzeros'"),
    ],
)
def test_mismatched_fail(change, told, tmp_path):
    write(tmp_path, "awq")
    path = tmp_path / "model.safetensors"
    tensors, stem = safetensors.torch.load_file(path), "model.layers.0.mlp.up_proj."
    own = {key.removeprefix(stem): tensors.pop(key) for key in [*tensors] if key.startswith(stem)}
    tensors |= {f"{stem}{leaf}": value for leaf, value in change(own).items()}
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(BaseError, match=told) as caught:
        built(tmp_path)
    assert "model.layers.0.mlp.up_proj" in str(caught.value)


def test_what_vllm_adds_is_said():
    kept = {name: described(settings) for name, (settings, _, _) in FORMATS.items()}
    assert "does not serve GPTQ with zeros" in served_over(kept["gptq zeros"])
    nvfp4 = FORMATS["nvfp4"][0]
    both = {"input_activations": {"num_bits": 4}}
    group = {"config_groups": {"group_0": {**nvfp4["config_groups"]["group_0"], **both}}}
    weights, inputs = {"quant_type": "Int8WeightOnly"}, {"quant_type": "Int8DynamicActivation"}
    rounded = {
        **{name: name in ("fp8 block", "modelopt") for name in kept if name[:4] != "gptq"},
        described({**nvfp4, **group}): True,
        described({"quant_method": "torchao", **weights}): False,
        described({"quant_method": "torchao", **inputs}): True,
    }
    for name, expected in rounded.items():
        told = served_over(kept.get(name, name))
        assert ("rounds the inputs" in told, "same weights" in told) == (expected, not expected)


def test_unstackable_experts_are_reported(tmp_path, monkeypatch):
    odd = {"quant_method": "fp8", "weight_block_size": [20, 20]}  # which is no whole part of gate
    make = fp8("weight_scale_inv", lambda shape: (-(-shape[0] // 20), -(-shape[1] // 20)))
    monkeypatch.setitem(FORMATS, "fp8 odd", (odd, make, "fp8"))
    write_experts(tmp_path, "fp8 odd", "mixtral")
    seen: list[Event] = []
    model = build(request_for(tmp_path), on_event=seen.append).model
    assert "stacked experts" not in {r.kind for r in audit(model).rows if r.is_quantized}
    (told,) = [event.text for event in seen if isinstance(event, Notice)]
    assert "model.layers.*.mlp.experts.gate_up_proj" in told


def test_an_older_gptq_repository_says_its_format_in_a_file_of_its_own(tmp_path):
    expected = write(tmp_path, "gptq")
    config = json.loads((tmp_path / "config.json").read_text())
    settings = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    del settings["quant_method"]
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
    found = built(tmp_path).model
    for key, weight in expected.items():
        assert torch.equal(weight_of(found.get_submodule(key.removesuffix(".weight"))), weight)
