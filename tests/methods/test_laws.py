"""The laws that every method obeys on every family, as one grid."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from peftkit.adapter import Adapter, attach
from peftkit.errors import AdapterError, MergeError, TargetError
from peftkit.formats.peft import load_adapter, save_adapter
from peftkit.merging.fold import Tally, merge_dequantized, merge_into
from peftkit.methods.dora import DoRA
from peftkit.methods.ia3 import IA3
from peftkit.methods.lora import LoRA
from peftkit.methods.norms import LNTuning
from peftkit.methods.protocol import Method
from peftkit.methods.vera import VeRA
from peftkit.quant import quantize_model
from tests.families import ARCHITECTURES, FAMILIES

METHODS: dict[str, Method] = {
    "lora": LoRA(rank=3, alpha=6),
    "lora-rslora": LoRA(rank=3, alpha=6, rslora=True),
    "lora-patterns": LoRA(rank=3, alpha=6, rank_pattern={"o": 2}, alpha_pattern={"o": 5}),
    "lora-gaussian": LoRA(rank=3, alpha=6, init="gaussian"),
    "lora-bf16": LoRA(rank=3, alpha=6, dtype="bf16"),
    "pissa": LoRA(rank=3, alpha=6, init="pissa"),
    "olora": LoRA(rank=3, alpha=6, init="olora"),
    "dora": DoRA(rank=3, alpha=6),
    "dora-rslora": DoRA(rank=3, alpha=6, rslora=True),
    "ia3": IA3(),
    "vera": VeRA(rank=16, d_initial=1.0),
    "vera-seed-only": VeRA(rank=16, d_initial=1.0, save_projection=False),
    "ln-tuning": LNTuning(),
    "experts": LoRA(rank=3, alpha=6),
    "experts-up": LoRA(rank=3, alpha=6, targets=("expert_up", "q")),
    "experts-patterns": LoRA(rank=3, alpha=6, rank_pattern={"expert_down": 2, "down_proj": 2}),
}
DENSE = [(m, f) for m in METHODS if "experts" not in m for f in ("llama", "gpt2", "qwen2")]
EXPERTS = [
    (m, f)
    for m in METHODS
    if "experts" in m
    for f in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
]
GRID = [(m, f, q) for m, f in DENSE + EXPERTS for q in ("none", "nf4")]


def logits(model: nn.Module) -> Tensor:
    ids = torch.arange(24).remainder(23).view(2, 12) + 3
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def train_a_little(adapter: Adapter, steps: int = 3) -> list[float]:
    """Take a few steps on one batch and return the losses before each and after the last."""
    ids = torch.arange(24).remainder(23).view(2, 12) + 3
    optimizer = torch.optim.AdamW(list(adapter.parameters()), lr=5e-3)
    losses = []
    for step in range(steps + 1):
        loss = adapter.model(input_ids=ids, labels=ids, use_cache=False).loss
        losses.append(float(loss.detach()))
        if step < steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses


@pytest.fixture(params=GRID, ids=lambda cell: "-".join(cell))
def cell(request: pytest.FixtureRequest) -> tuple[Method, nn.Module, Tensor]:
    """A method, a frozen base that it is not yet on, and the base's logits."""
    method, family, kind = request.param
    torch.manual_seed(0)
    model = ARCHITECTURES[family]().eval()
    if kind != "none":
        quantize_model(model, kind, double_quant=True, compute_dtype=torch.float32)
    return METHODS[method], model, logits(model)


def test_fresh_adapter_leaves_the_base_unchanged_to_the_bit(cell) -> None:
    method, model, before = cell
    attach(model, method)
    assert torch.equal(logits(model), before)


def test_only_the_adapter_trains_and_all_of_it(cell) -> None:
    method, model, _ = cell
    adapter = attach(model, method)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    losses = train_a_little(adapter)
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert parameter.grad is None
            assert torch.equal(parameter, frozen[name])
        else:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


def test_disabled_is_the_base_and_detached_is_the_base(cell) -> None:
    method, model, before = cell
    adapter = attach(model, method)
    train_a_little(adapter)
    assert not torch.allclose(logits(model), before)
    with adapter.disabled():
        assert torch.equal(logits(model), before)
    assert not torch.allclose(logits(model), before)
    adapter.detach()
    assert torch.equal(logits(model), before)


def test_saved_and_loaded_is_the_same_to_the_bit(cell, tmp_path) -> None:
    method, model, _ = cell
    adapter = attach(model, method)
    train_a_little(adapter)
    trained, state = logits(model), adapter.state()
    save_adapter(adapter, tmp_path)
    adapter.detach()
    again = load_adapter(model, tmp_path)
    assert torch.equal(logits(model), trained)
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state().items())


def test_an_adapter_without_our_notes_loads_the_same(cell, tmp_path) -> None:
    method, model, _ = cell
    adapter = attach(model, method)
    train_a_little(adapter)
    trained = logits(model)
    save_adapter(adapter, tmp_path)
    (tmp_path / "peftkit.json").unlink()
    adapter.detach()
    load_adapter(model, tmp_path)
    # PiSSA's and OLoRA's start is subtracted within one product of twice the rank: other rounding
    torch.testing.assert_close(logits(model), trained, atol=1e-5, rtol=0)


def test_merged_is_the_same_as_base_and_adapter(cell) -> None:
    method, model, _ = cell
    adapter = attach(model, method)
    train_a_little(adapter)
    trained, modules = logits(model), adapter.modules.values()
    plain = [name in m.base._parameters for m in modules for name in m.stacked or ("weight",)]
    if not all(plain):
        with pytest.raises(MergeError, match="is quantised"):
            merge_into(adapter)
        merged = merge_dequantized(adapter, torch.float32, tally=Tally()).state_dict()
        model = type(model)(model.config).eval().requires_grad_(False)
        model.load_state_dict(merged)
    else:
        assert merge_into(adapter) is model
        assert not any(parameter.requires_grad for parameter in model.parameters())
    # one product where there were two: float32 sums in another order
    torch.testing.assert_close(logits(model), trained, atol=2e-5, rtol=0)


def test_a_second_adapter_on_one_model_is_refused(cell) -> None:
    method, model, _ = cell
    attach(model, method)
    with pytest.raises(AdapterError, match="carries an adapter already"):
        attach(model, method)


@pytest.mark.parametrize(
    "method", [LoRA(rank=4, alpha=8), DoRA(rank=4, alpha=8)], ids=["lora", "dora"]
)
def test_a_role_of_a_fused_layer_adapts_only_its_rows(method, tmp_path) -> None:
    torch.manual_seed(0)
    model = FAMILIES["gpt2"]().eval()
    before = logits(model)
    adapter = attach(model, method.model_copy(update={"targets": ("q", "v")}))
    assert torch.equal(logits(model), before)
    losses = train_a_little(adapter)
    assert losses[-1] < losses[0]
    trained = logits(model)
    module = next(iter(adapter.modules.values()))
    third = module.out_features // 3
    weight = torch.randn(module.out_features, module.in_features)
    if isinstance(method, DoRA):
        weight = module.base.weight.t().detach().clone()
    difference = (module.merged_weight(weight) - weight).abs().amax(1)
    assert (difference[third : 2 * third] < 1e-6).all()  # k; m / ||w|| rounds once for DoRA
    assert (difference[:third] > 0).all()
    save_adapter(adapter, tmp_path)
    adapter.detach()
    load_adapter(model, tmp_path)
    assert torch.equal(logits(model), trained)


def test_a_rank_larger_than_the_matrix_is_refused_by_name() -> None:
    with pytest.raises(TargetError, match=r"rank 4096 is larger than the matrix of .*q_proj"):
        attach(FAMILIES["llama"](), LoRA(rank=4096, targets=("q",)))
