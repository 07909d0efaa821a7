"""Merged models in 4 bits: read back by peftkit, with codes by rounding and by GPTQ."""

import json

import pytest
import torch

from peftkit.base.load import load_base
from peftkit.errors import MergeError
from peftkit.kernels.fake_quantize import fake_quantized
from peftkit.merging import quantized
from peftkit.merging.merge import merge
from peftkit.quant.weights import weight_of

TEXTS = ("the quick brown fox", "what is the answer?", "a lazy dog", "three olives", "pizza")


@pytest.mark.covers("peftkit")
def test_a_merged_model_in_4_bits_is_read_back(saved, tmp_path, monkeypatch):
    saved()
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    plain = merge(saved.adapter, tmp_path / "plain", verify=False).folder
    before = load_base(str(plain), dtype="fp32", device="cpu")
    quantized.merge_quantized(saved.adapter, tmp_path / "nearest", "int4_32")
    monkeypatch.setattr(quantized, "GRAM_BYTES", 20_000)  # several passes over the rows
    out = tmp_path / "gptq"
    quantized.merge_quantized(saved.adapter, out, "int4_32", calibrate=str(rows))
    assert not [path.name for path in out.iterdir() if path.is_dir()]
    nearest, ours = (
        load_base(str(tmp_path / name), dtype="fp32", device="cpu") for name in ("nearest", "gptq")
    )
    assert nearest.audit.quantized_as != "none"
    layers = quantized._layers(before.model, "int4_32")
    grams = quantized.inputs_of(before, layers, str(rows), None)
    # the inputs are those of the texts' tokens and end tokens, without padding
    ids = [
        [*each, before.tokenizer.eos_token_id] for each in before.tokenizer([*TEXTS])["input_ids"]
    ]
    last = before.model.model.layers[-1]
    with torch.no_grad():
        outputs = (before.model(torch.tensor([row]), output_hidden_states=True) for row in ids)
        x = torch.cat([last.input_layernorm(out.hidden_states[-2])[0] for out in outputs])
    (gram,) = (grams[path] for path in layers if layers[path] is last.self_attn.q_proj)
    torch.testing.assert_close(gram, x.t() @ x)
    errors = {"nearest": 0.0, "ours": 0.0}
    for path, layer in layers.items():
        weight, gram = layer.weight.detach().float(), grams[path]
        read = weight_of(nearest.model.get_submodule(path)).float()
        assert torch.equal(read, fake_quantized(weight, "int4_32")), path
        for name, base in (("nearest", nearest), ("ours", ours)):
            error = weight_of(base.model.get_submodule(path)).float() - weight
            errors[name] += float(((error @ gram) * error).sum())  # |X (Q - W)'|^2
    assert errors["ours"] < 0.7 * errors["nearest"]


def test_layers_that_do_not_fit_are_refused(saved, tmp_path):
    saved()
    with pytest.raises(MergeError, match="cannot quantise the merged model to int4_128") as refused:
        quantized.merge_quantized(saved.adapter, tmp_path / "out", "int4_128")
    assert "columns" in refused.value.found
    assert not (tmp_path / "out").exists()
