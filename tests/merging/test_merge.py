"""A merged model is an ordinary one that computes what base and adapter compute."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaForCausalLM

from peftkit.base.skeleton import skeleton
from peftkit.errors import AdapterError, MergeError, OutputError, RunError
from peftkit.events import Event, Saved, Table
from peftkit.formats.peft.load import read_adapter
from peftkit.merging.fold import Tally, merge_dequantized, merge_into
from peftkit.merging.merge import merge
from peftkit.merging.over_files import changes_of, find_shards
from peftkit.merging.verify import agreement
from peftkit.methods.lora import LoRA
from peftkit.methods.lora_linear import LoRALinear
from peftkit.methods.own_parameters import BitFit
from peftkit.quant.quantize import quantize_model
from tests.helpers.families import FAMILIES
from tests.helpers.folders import change_json, tensors_in
from tests.helpers.hybrids import HYBRIDS
from tests.helpers.merging import METHODS, attach_perturbed, logits

CLOSE = 1e-4
"""Of logits of order ten in float32, whose sums come in another order."""


PAIRS = [("llama", method) for method in METHODS] + [
    ("gpt2", "lora"), ("gpt2", "ia3"), ("gpt2", "vera"), ("phi3", "dora"), ("mixtral", "lora"),
]  # fmt: skip
"""Every method; layers that are transposed, fused, of experts."""


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_merged_equals_base_with_adapter(saved, family, method):
    saved(family, METHODS[method])
    events: list[Event] = []
    merged = merge(saved.adapter, saved.out, on_event=events.append)
    torch.testing.assert_close(logits(saved.merged()), saved.logits, atol=CLOSE, rtol=0)
    assert merged.agreement is not None
    assert merged.agreement.max_difference < CLOSE
    assert merged.agreement.top1 == 1.0
    assert merged.effect is not None
    assert merged.effect.max_difference > 100 * CLOSE
    assert merged.tally.relative_update > 1e-3
    assert Saved("merged model", saved.out) in events
    assert any(isinstance(event, Table) for event in events)


def test_untouched_weights_and_files_are_those_of_the_base_bit_for_bit(saved):
    saved(method=LoRA(rank=4, targets=("q", "down")), dtype=torch.bfloat16, shard="20KB")
    merged = merge(saved.adapter, saved.out, verify=False)
    before, after = tensors_in(saved.base), tensors_in(saved.out)
    assert len(list(saved.out.glob("*.safetensors"))) > 2
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    touched = {name for name in before if name.endswith(("q_proj.weight", "down_proj.weight"))}
    assert changed == touched
    assert merged.tally.num_weights == len(touched)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (saved.out / name).read_bytes() == (saved.base / name).read_bytes()


@pytest.mark.parametrize("spare_rows", [0, 8])
def test_added_tokens_without_training_stay_tokens(saved, spare_rows):
    """As TRL saves them: in the tokenizer of the adapter's folder, with no rows of their own."""
    saved(spare_rows=spare_rows)
    tokenizer = copy.deepcopy(saved.tokenizer)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(saved.adapter)
    merge(saved.adapter, saved.out)
    read = AutoTokenizer.from_pretrained(saved.out)
    assert read.tokenize("<tool>") == ["<tool>"]
    rows = saved.merged().get_input_embeddings().num_embeddings
    assert rows == len(saved.tokenizer) + (spare_rows or 1)


def test_a_dtype_asked_for_is_that_of_the_whole_model(saved):
    saved(dtype=torch.bfloat16)
    merged = merge(saved.adapter, saved.out, dtype="fp16")
    assert {tensor.dtype for tensor in tensors_in(saved.out).values()} == {torch.float16}
    assert saved.merged().dtype == torch.float16
    assert merged.agreement is not None
    assert merged.agreement.top1 > 0.9


def test_tied_embeddings_stay_tied(saved):
    saved(tie=True)
    merge(saved.adapter, saved.out, verify=False)
    model: Any = saved.merged()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in tensors_in(saved.out)


def test_a_base_saved_without_its_head_is_merged_over_its_files(saved):
    saved("gpt2")
    model = AutoModelForCausalLM.from_pretrained(saved.base)
    model.transformer.save_pretrained(saved.base)  # as gpt2 lies on the hub: "h.0.attn..."
    assert "h.0.attn.c_attn.weight" in tensors_in(saved.base)
    merge(saved.adapter, saved.out)
    assert "h.0.attn.c_attn.weight" in tensors_in(saved.out)
    torch.testing.assert_close(logits(saved.merged()), saved.logits, atol=CLOSE, rtol=0)


@pytest.mark.parametrize(
    ("family", "dtype", "method"),
    [
        ("llama", None, METHODS["vera"]),
        ("gpt2", "bf16", BitFit()),
        ("mixtral", "fp32", LoRA(rank=4, targets="attention")),
    ],
)
def test_both_ways_write_the_same_weights_bit_for_bit(saved, family, dtype, method, monkeypatch):
    saved(family, method, dtype=torch.bfloat16)
    merge(saved.adapter, saved.out, dtype=dtype, verify=False)
    monkeypatch.setattr("peftkit.merging.merge.changes_of", lambda *args: None)
    merge(saved.adapter, saved.root / "whole", dtype=dtype, verify=False)
    over_files, whole = tensors_in(saved.out), tensors_in(saved.root / "whole")
    assert over_files.keys() == whole.keys() == tensors_in(saved.base).keys()
    for name, tensor in over_files.items():
        assert tensor.dtype == whole[name].dtype
        assert torch.equal(tensor, whole[name]), name
    modes = {path.stat().st_mode for path in (saved.root / "whole").iterdir()}
    assert modes == {(saved.out / "config.json").stat().st_mode}


@pytest.mark.parametrize("trouble", ["a name of no module", "quantised weights"])
def test_fused_files_are_merged_in_memory(saved, trouble):
    saved()
    stored = tensors_in(saved.base)
    name = "model.layers.1.mlp.up_proj.weight"
    if trouble == "quantised weights":
        stored[name] = torch.zeros(64 * 16, 1, dtype=torch.uint8)
    else:
        stored["model.layers.1.mlp.w3.weight"] = stored.pop(name)
    save_file(stored, saved.base / "model.safetensors")
    shards = find_shards(saved.base)
    assert shards is not None
    file, model = read_adapter(saved.adapter), skeleton(str(saved.base))
    assert changes_of(file, shards, model, None, Tally()) is None


def test_an_adapter_trained_over_4_bits_merges_into_the_original_tensors_in(saved):
    saved(quantize="nf4")
    merge(saved.adapter, saved.out, verify=False)
    before, after = tensors_in(saved.base), tensors_in(saved.out)
    name = "model.layers.0.self_attn.q_proj"
    adapter = load_file(saved.adapter / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    torch.testing.assert_close(after[f"{name}.weight"], before[f"{name}.weight"] + 2 * b @ a)
    assert "over the base in nf4" in (saved.out / "README.md").read_text()


@pytest.mark.parametrize(("family", "kind"), [("llama", "nf4"), ("gpt2", "int8")])
def test_merging_into_the_training_weights_on_request(saved, family, kind):
    saved(family, quantize=kind)
    merge(saved.adapter, saved.out, from_quantized=True)
    torch.testing.assert_close(logits(saved.merged()), saved.logits, atol=CLOSE, rtol=0)
    assert f"dequantised {kind} weights of the base" in (saved.out / "README.md").read_text()


def test_a_base_that_is_quantised_on_disk_is_merged_only_on_request(saved):
    saved()
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(saved.base, quantization_config=config)
    model.save_pretrained(saved.base)
    with pytest.raises(MergeError, match=r"has no 16-bit weights to merge into"):
        merge(saved.adapter, saved.out)
    assert not saved.out.exists()
    merged = merge(saved.adapter, saved.out, from_quantized=True)
    assert merged.agreement is not None
    assert merged.agreement.max_difference < 0.1  # of 16-bit weights
    assert "quantization_config" not in (saved.out / "config.json").read_text()
    assert not torch.allclose(logits(saved.merged()), saved.logits, atol=0.5)


def test_weights_not_trained_on_are_refused_unless_forced(saved):
    saved(fingerprint="sha256:" + "1" * 64)
    with pytest.raises(AdapterError, match="trained on another base"):
        merge(saved.adapter, saved.out)
    assert not saved.out.exists()
    merge(saved.adapter, saved.out, force=True)


def test_an_adapter_that_names_no_base_wants_one(saved):
    saved()
    (saved.adapter / "peftkit.json").unlink()
    change_json(saved.adapter / "adapter_config.json", base_model_name_or_path=None)
    with pytest.raises(AdapterError, match="does not name its base"):
        merge(saved.adapter, saved.out)
    merge(saved.adapter, saved.out, base=str(saved.base), verify=False)
    torch.testing.assert_close(logits(saved.merged()), saved.logits, atol=CLOSE, rtol=0)


def test_the_card_says_what_was_merged_and_how_well(saved):
    saved()
    merged = merge(saved.adapter, saved.out)
    card = (saved.out / "README.md").read_text()
    assert "library_name: transformers" in card
    assert f"| base | {saved.base} |" in card
    assert "| same next token | 100.0% |" in card
    assert merged.agreement is not None
    assert f"{merged.agreement.max_difference:.3g}" in card


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, -1.0), (torch.bfloat16, 0.0)])
def test_a_merge_that_leaves_the_adapter_out_or_subtracts_it_is_found(
    saved, monkeypatch, dtype, factor
):
    saved(dtype=dtype, size=0.2)
    right = LoRALinear.merged_weight

    def wrong(self: LoRALinear, weight: Tensor, name: str = "weight") -> Tensor:
        update = right(self, weight, name) - weight
        return weight + (factor or 1e-2) * update  # a little, or it would be the base

    monkeypatch.setattr(LoRALinear, "merged_weight", wrong)
    with pytest.raises(RunError, match="does not match base and adapter"):
        merge(saved.adapter, saved.out)
    assert not saved.out.exists()


def test_without_verification_nothing_is_loaded_and_the_card_says_so(saved):
    saved()
    (saved.base / "tokenizer.json").unlink()  # loading would miss it
    merged = merge(saved.adapter, saved.out, verify=False)
    assert merged.agreement is None
    assert "| verified | no |" in (saved.out / "README.md").read_text()
    torch.testing.assert_close(logits(saved.merged()), saved.logits, atol=CLOSE, rtol=0)


def test_an_update_lost_in_rounding_is_refused(saved):
    saved(dtype=torch.bfloat16, size=1e-9)
    with pytest.raises(MergeError, match="lost when it is rounded"):
        merge(saved.adapter, saved.out)
    merge(saved.adapter, saved.out, dtype="fp32", verify=False)


@pytest.mark.parametrize(
    ("made", "how", "message"),
    [
        ({}, {"from_quantized": True}, "no quantised weights to merge into"),
        ({"size": 0.0}, {}, "update is zero"),
        ({"size": 1e25}, {}, "so large"),
        ({"size": 1e25}, {"verify": False}, "so large"),
        ({"size": 1000.0}, {"dtype": "fp16", "verify": False}, "too large for float16"),
    ],
)
def test_what_cannot_be_merged_is_refused(made, how, message, saved):
    saved(**made)
    with pytest.raises(MergeError, match=message) as error:
        merge(saved.adapter, saved.out, **how)
    assert error.value.exit_code == 2
    assert not saved.out.exists()


def test_a_folder_that_is_taken_is_left_alone(saved):
    saved()
    saved.out.mkdir()
    (saved.out / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"it holds thesis\.txt"):
        merge(saved.adapter, saved.out, verify=False)
    with pytest.raises(OutputError, match=r"it holds thesis\.txt"):  # there is no model to replace
        merge(saved.adapter, saved.out, overwrite=True, verify=False)
    (saved.out / "thesis.txt").unlink()
    merge(saved.adapter, saved.out, verify=False)
    (saved.out / "thesis.txt").write_text("mine")
    merge(saved.adapter, saved.out, overwrite=True, verify=False)
    assert (saved.out / "thesis.txt").read_text() == "mine"
    saved.merged()
    (saved.out / "other.safetensors").write_text("mine")
    with pytest.raises(OutputError, match=r"it holds other\.safetensors"):
        merge(saved.adapter, saved.out, overwrite=True, verify=False)


@pytest.mark.parametrize("which", ["base", "adapter"])
def test_what_is_read_from_is_never_written_to(saved, which):
    saved()
    before = {p.name: p.read_bytes() for p in saved.root.glob(f"{which}/*")}
    with pytest.raises(OutputError, match="one of the source folders"):
        merge(saved.adapter, saved.root / which, overwrite=True, verify=False)
    assert {p.name: p.read_bytes() for p in saved.root.glob(f"{which}/*")} == before


@pytest.mark.parametrize("whole", [False, True])
def test_space_is_checked_first(saved, whole, monkeypatch):
    saved()
    if whole:
        monkeypatch.setattr("peftkit.merging.merge.changes_of", lambda *args: None)
    monkeypatch.setattr("peftkit.files.disk.free_bytes", lambda folder: 1000)
    with pytest.raises(RunError, match=r"[\d,]+ bytes needed, 1,000 free"):
        merge(saved.adapter, saved.out, verify=False)
    assert not saved.out.exists()


def test_tensors_that_do_not_fit_the_base_are_refused(saved):
    saved()
    config = FAMILIES["llama"]().config
    config.hidden_size = 64
    LlamaForCausalLM(config).save_pretrained(saved.base)
    with pytest.raises(AdapterError, match="does not fit"):
        merge(saved.adapter, saved.out, verify=False)
    assert not saved.out.exists()


# ------------------------------------------------------------------------------ live models


def test_a_shared_weight_is_not_merged_into():
    model = FAMILIES["gpt2"]()  # its head is its embedding
    adapter = attach_perturbed(model, LoRA(rank=4, targets=("q", "lm_head")))
    with pytest.raises(MergeError, match="lm_head alone"):
        merge_into(adapter)


@pytest.mark.parametrize("way", ["live", "dequantised", "over files"])
def test_blocks_that_share_weights_are_not_merged_into(way, saved, monkeypatch):
    """Each use of Zamba's shared block has an adapter of its own."""
    monkeypatch.setitem(FAMILIES, "zamba", HYBRIDS["zamba"])
    method = LoRA(rank=3, alpha=6, targets=("q", "mixer_in"))
    message = r"(?s)q_proj alone.*shared blocks"
    if way == "over files":
        saved("zamba", method)
        with pytest.raises(MergeError, match=message):
            merge(str(saved.adapter), saved.out)
        assert not saved.out.exists()
        return
    torch.manual_seed(0)
    model = HYBRIDS["zamba"]().eval().requires_grad_(False)
    if way == "dequantised":
        quantize_model(model, "nf4", compute_dtype=torch.float32)
    fold: Any = merge_into
    if way == "dequantised":
        fold = partial(merge_dequantized, dtype=torch.float32, tally=Tally())
    adapter = attach_perturbed(model, method)
    before = logits(model)
    with pytest.raises(MergeError, match=message):
        fold(adapter)
    assert torch.equal(logits(model), before)  # the adapter stays
    adapter.detach()
    alone = attach_perturbed(model, LoRA(rank=3, alpha=6, targets=("mixer_in",)))
    wanted = logits(model)
    torch.testing.assert_close(logits(fold(alone)), wanted, rtol=0, atol=CLOSE)


def test_agreement_counts_tokens_and_differences():
    a = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.0, 0.5]])
    b = torch.tensor([[1.0, 2.5], [1.0, 3.0], [0.0, 0.5]])
    compared = agreement([a[:2], a[2:]], [b[:2], b[2:]])
    assert (compared.max_difference, compared.largest, compared.num_positions) == (2.0, 3.0, 3)
    assert compared.top1 == pytest.approx(2 / 3)
    assert agreement([a * math.nan], [b]).max_difference == math.inf
