"""Prefix tuning alone; the laws that it shares with prompt tuning are in test_virtual.py."""

import pytest
import torch
from transformers.utils import generic

from peftkit.adapter import attach
from peftkit.errors import TargetError
from peftkit.forward.blocks import Blocks
from peftkit.forward.compat import cache_in
from peftkit.methods.prefix import Prefix, PrefixTuning
from tests.helpers.cell import tiny_model as build
from tests.helpers.families import ARCHITECTURES
from tests.helpers.virtual_tokens import IDS

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # PEFT asks by an old name
)
PREFIX = PrefixTuning(num_virtual_tokens=4)


def prefix_of(model, method: PrefixTuning = PREFIX) -> Prefix:
    (module,) = attach(model, method).modules.values()
    assert isinstance(module, Prefix)
    return module


def test_each_layer_has_the_keys_and_values_that_the_file_has_for_it():
    model = build("llama")
    module = prefix_of(model)
    with torch.no_grad():
        module.prompt_embeddings.copy_(torch.randn(4, 64))
    cache = cache_in(model(input_ids=IDS, use_cache=True))
    rows = module.prompt_embeddings.view(4, 2, 2, 2, 8)  # tokens, layers, k and v, heads, size
    for index, layer in enumerate(cache.layers):
        assert layer.keys.shape == (2, 2, 13, 8)
        for row in range(2):
            assert torch.equal(layer.keys[row, :, :4].transpose(0, 1), rows[:, index, 0])
            assert torch.equal(layer.values[row, :, :4].transpose(0, 1), rows[:, index, 1])


def test_an_output_without_a_cache_is_not_asked_for_the_old_name(monkeypatch):
    warned = []
    monkeypatch.setattr(generic.logger, "warning_once", warned.append)
    assert cache_in(build("llama")(input_ids=IDS, use_cache=False)) is None
    assert not warned


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("deepseek_v3", r"of the sizes \(1, 16\), \(1, 8\)"),
        ("minimax", "Its cache is of another kind"),
        ("distilbert", "It takes no past keys and values"),
        ("modernbert", "It takes no past keys and values"),
    ],
)
def test_models_that_keep_something_else_are_refused(family, why):
    with pytest.raises(TargetError, match=why):
        attach(ARCHITECTURES[family](), PREFIX)


def test_the_decoder_of_a_speech_model_takes_a_prefix():
    model = build("whisper")
    inputs = {"input_features": torch.ones(1, 8, 64), "decoder_input_ids": IDS[:1]}
    before = model(**inputs).logits
    attach(model, PREFIX)
    after = model(**inputs).logits
    assert not torch.allclose(after, before)
    # its decoder hands no cache to its blocks unless it is to be used
    assert torch.equal(model(**inputs, use_cache=False).logits, after)
    assert cache_in(model(**inputs, use_cache=False)) is None
    Blocks(model).set_activations("recompute")
    torch.testing.assert_close(model.train()(**inputs).logits, after, atol=1e-5, rtol=0)
