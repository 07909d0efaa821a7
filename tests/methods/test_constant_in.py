"""A of a LoRA that is constant in blocks of columns (QA-LoRA)."""

import pytest
import torch
from torch import nn

from peftkit.adapter import attach
from peftkit.errors import TargetError
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.methods.dora import DoRA
from peftkit.methods.lora import LoRA
from peftkit.methods.lora_linear import LoRAGroup
from tests.helpers.adapters import perturb
from tests.helpers.families import ARCHITECTURES

IDS = torch.arange(36).remainder(23).view(3, 12) + 3
METHOD = LoRA(rank=3, alpha=6, constant_in=8)


def gradients(model: nn.Module, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(input_ids=IDS, labels=IDS).loss, parameters))


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_gradients_are_summed_over_blocks(family, monkeypatch):
    """Alone and in a group, compared with a plain LoRA that has the same A."""
    torch.manual_seed(0)
    model = ARCHITECTURES[family]().train()
    adapter = attach(model, METHOD)
    perturb(adapter.parameters(), 0.1, seed=7)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    parameters = [model.get_parameter(name) for name in names]
    torch.manual_seed(3)
    alone = gradients(model, parameters)
    adapter.prepare_training()
    torch.manual_seed(3)
    grouped = gradients(model, parameters)
    assert any(isinstance(m.group, LoRAGroup) for m in adapter.modules.values())
    state = adapter.state()
    adapter.detach()
    plain = attach(model, METHOD.model_copy(update={"constant_in": None}))
    with torch.no_grad():
        for path, module in plain.modules.items():
            module.load({n: state[f"{path}.{n}"] for n in ("lora_A.weight", "lora_B.weight")})
    torch.manual_seed(3)
    expected = gradients(model, [model.get_parameter(name) for name in names])
    for name, *found, want in zip(names, alone, grouped, expected, strict=True):
        if "lora_A" in name:
            want = want.view(len(want), -1, 8).sum(2)
        for grad in found:  # float32 sums in another order
            torch.testing.assert_close(grad, want, rtol=1e-3, atol=1e-6)


def test_the_file_is_an_ordinary_lora(tmp_path):
    torch.manual_seed(0)
    model = ARCHITECTURES["llama"]()
    adapter = attach(model, METHOD)
    before = {path: m.lora_A.detach().clone() for path, m in adapter.modules.items()}
    whole = attach(ARCHITECTURES["llama"](), METHOD.model_copy(update={"constant_in": None}))
    for path, a in before.items():  # the bound of the initial values is that of the whole A
        assert torch.equal(a, whole.modules[path].lora_A[:, ::8])
    perturb(adapter.parameters(), 0.1, seed=7)
    logits = model(input_ids=IDS).logits
    state = adapter.state()
    save_adapter(adapter, tmp_path / "adapter", Provenance())
    adapter.detach()
    assert all(t.shape[1] == 32 or "down" in n for n, t in state.items() if "lora_A" in n)
    again = load_adapter(model, tmp_path / "adapter")
    assert again.method.constant_in == 8
    assert torch.equal(model(input_ids=IDS).logits, logits)
    again.detach()
    (tmp_path / "adapter" / "peftkit.json").unlink()  # as PEFT reads it
    plain = load_adapter(model, tmp_path / "adapter")
    assert plain.method.constant_in is None
    torch.testing.assert_close(model(input_ids=IDS).logits, logits)


def test_impossible_settings_are_refused():
    for method in (LoRA(constant_in=8, init="pissa"), DoRA(constant_in=8)):
        with pytest.raises(TargetError, match="constant_in 8 is not possible"):
            attach(ARCHITECTURES["llama"](), method)
    with pytest.raises(TargetError, match="constant_in 7 does not divide"):
        attach(ARCHITECTURES["llama"](), LoRA(rank=2, constant_in=7))
    with pytest.raises(TargetError, match="constant_in 8"):
        attach(ARCHITECTURES["mixtral"](), METHOD)
