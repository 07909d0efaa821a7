"""Architectures that nothing here was written for: they work, or an error lists what they have."""

import re
from itertools import product

import pytest
import torch

from peftkit.errors import TargetError
from peftkit.methods.lora import LoRA
from peftkit.model.targets import resolve
from tests.helpers import laws
from tests.helpers.families import ARCHITECTURES, FURTHER, WITHOUT_QUERY
from tests.helpers.kinds import inputs, outputs
from tests.helpers.spread import spread


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, build in FURTHER.items():
        monkeypatch.setitem(ARCHITECTURES, name, build)


@pytest.mark.parametrize(("name", "quantize"), spread(product(FURTHER, ("none", "nf4")), 11))
def test_every_linear_layer_is_adapted_and_the_laws_hold(name, quantize):
    chosen_laws = (*laws.CHEAP, laws.peft_agrees, laws.merged_is_the_same)
    outcome = laws.check("lora", name, quantize, chosen_laws)
    assert not outcome.failures, "\n".join(outcome.failures)


@pytest.mark.parametrize("name", sorted(FURTHER.keys() - {"longformer", "led"}))
def test_no_layer_is_adapted_that_is_never_called(name):
    model = FURTHER[name]().eval()
    called = set()
    paths = [site.path for site in resolve(model, "all-linear") if not site.parameter]
    for path in paths:
        model.get_submodule(path).register_forward_hook(lambda *_, path=path: called.add(path))
    outputs(model, inputs(model))
    assert called == set(paths)


@pytest.mark.parametrize("name", FURTHER)
def test_roles_are_found_or_the_error_says_what_there_is(name):
    model = FURTHER[name]()
    if name not in WITHOUT_QUERY:
        targeted = {site.path for site in resolve(model, ["q", "v"])}
        assert targeted <= {site.path for site in resolve(model, "attention")}
        return
    with pytest.raises(TargetError) as error:
        resolve(model, "q")
    text = str(error.value)
    assert "no linear layer matches target 'q'" in text
    found = r"Roles found: .*([kv]|mixer_in)|\w \(32 -> 64\)|_proj \(\d+ -> \d+\)|pwconv1"
    assert re.search(found, text)


def test_a_layer_that_shares_the_weight_of_an_embedding_is_a_head():
    model = FURTHER["blip"]()  # which does not say which its output layer is
    assert model.get_output_embeddings() is None
    head = "text_decoder.cls.predictions.decoder"
    assert [site.path for site in resolve(model, "head")] == [head]
    assert head not in {site.path for site in resolve(model, "all-linear")}


def test_a_layer_whose_weight_is_only_read_is_no_target():
    torch.manual_seed(0)
    for name in ("mamba", "jamba"):
        model = FURTHER[name]()
        assert not any("dt_proj" in site.path for site in resolve(model, "all-linear"))
        with pytest.raises(TargetError, match="'dt_proj'"):
            LoRA(rank=2, targets=("dt_proj",)).sites(model)
