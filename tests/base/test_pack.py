"""Loading weight by weight: the same base to the bit, and no more memory than what is kept."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from peftkit.base.build import build, cast, load_model
from peftkit.base.load import load_base
from peftkit.base.locate import Location
from peftkit.base.pack import fingerprint
from peftkit.base.request import BaseRequest, request_of
from peftkit.errors import BaseError
from peftkit.quant.audit import audit
from peftkit.quant.quantize import quantize_model, tower_paths
from peftkit.settings import BaseConfig
from tests.helpers.bases import assert_same_state, purpose_of
from tests.helpers.families import ARCHITECTURES
from tests.helpers.folders import change_tensors

CPU = torch.device("cpu")
FAST = (*("llama", "gpt2", "t5", "vit", "gpt_oss", "deepseek_v3"),)
"""Plain, transposed, tied, shared, fused and stacked weights; the others are in the whole grid."""


def whole_then_quantised(request: BaseRequest) -> tuple[nn.Module, str]:
    """Load all in 16 bits first, then quantise in place."""
    model, _ = load_model(request)
    model.requires_grad_(False).eval()
    identity = fingerprint(model)
    cast(model, request.dtype)
    settings = request.settings
    if settings.quantize != "none":
        kind, double_quant, towers = settings.quantize, settings.double_quant, tower_paths(model)
        quantize_model(model, kind, double_quant=double_quant, keep=towers)
    return model, identity


@pytest.mark.parametrize(
    "family", [f if f in FAST else pytest.param(f, marks=pytest.mark.slow) for f in ARCHITECTURES]
)
def test_streamed_base_equals_one_that_was_loaded_whole(family, tmp_path):
    model = ARCHITECTURES[family]()
    model.save_pretrained(tmp_path)
    where = Location(str(tmp_path), str(tmp_path))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    purpose = purpose_of(config)
    if purpose is None:
        pytest.skip("no task loads a model of this class")
    for settings in (
        BaseConfig(model="x", quantize="nf4", dtype="bf16"),
        BaseConfig(model="x", quantize="int8", dtype="fp16"),
        BaseConfig(model="x", dtype="bf16"),
    ):
        expected, identity = whole_then_quantised(request_of(settings, purpose, where, CPU))
        built = build(request_of(settings, purpose, where, CPU))
        assert built.fingerprint == identity
        assert_same_state(built.model, expected)
        assert audit(built.model) == audit(expected)
        modules = {n: type(m).__name__ for n, m in expected.named_modules()}
        assert {n: type(m).__name__ for n, m in built.model.named_modules()} == modules


def test_weight_that_is_not_finite_is_named(llama, tokenizer, tmp_path):
    llama.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(tmp_path / "model.safetensors", lambda all: all[name][3, 4].fill_(float("nan")))
    with pytest.raises(BaseError) as error:
        load_base(str(tmp_path), quantize="nf4")
    assert name in str(error.value)


PEAK = """
import sys, threading, time
import torch
import transformers
from peftkit.base.build import build
from peftkit.settings import BaseConfig
from peftkit.base.request import request_of
from peftkit.base.locate import Location
from peftkit.base.purpose import CAUSAL_LM
from peftkit.base.pretrained import config_for
from peftkit.quant.quantize import quantize_model

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

folder, file = sys.argv[1], (*sys.argv[2:], None)[0]
where = Location(folder, folder, gguf=file)
settings = BaseConfig(model=folder, quantize="nf4", dtype="fp32")
torch.set_num_threads(1)
# what only a first model loads
quantize_model(torch.nn.Sequential(torch.nn.Linear(64, 64)), "nf4")
with torch.device("meta"):
    transformers.AutoModelForCausalLM.from_config(config_for(where, CAUSAL_LM))
before, most, done = anonymous(), 0, False
def watch():
    global most
    while not done:
        most = max(most, anonymous())
        time.sleep(0.001)
thread = threading.Thread(target=watch, daemon=True)
thread.start()
kept = build(request_of(settings, CAUSAL_LM, where, torch.device("cpu")))
done = True
thread.join()
print(most - before)
"""


def peak_of(folder: Path, *file: str) -> int:
    """Return the anonymous bytes that a process takes to load a folder, or a GGUF file in it."""
    command = [sys.executable, "-c", PEAK, str(folder), *file]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's figures")
@pytest.mark.slow
def test_peak_is_what_is_kept_and_the_weight_in_hand(tmp_path):
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        vocab_size=512,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    size = sum(p.nbytes for p in model.parameters())
    del model
    kept = size * 0.6 / 4 + 2 * 512 * 512 * 4
    assert peak_of(tmp_path) < kept + 80e6 < 0.8 * size
