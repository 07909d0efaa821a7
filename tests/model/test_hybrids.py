"""Hybrids of attention and other mixers, and recent families: kernels and roles."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

from peftkit.adapter import attach, prepared_for_training
from peftkit.errors import TargetError
from peftkit.execution.plan import ExecutionPlan
from peftkit.formats.card import small_reach
from peftkit.forward.mixer_kernels import adapters_applied
from peftkit.methods.lora import LoRA
from peftkit.model.targets import find_roles, resolve
from peftkit.quant.audit import audit
from tests.helpers import grid, laws
from tests.helpers.adapters import perturb
from tests.helpers.cell import tiny_model
from tests.helpers.families import ARCHITECTURES
from tests.helpers.hybrids import HYBRIDS, RECENT
from tests.helpers.padding_free import ROWS, loss_and_gradients, task_on

FAMILIES = {**HYBRIDS, **RECENT}
README_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
FUSED = {
    *("mamba", "mamba2", "falcon_mamba", "bamba", "granitemoehybrid", "granitehybrid_dense"),
    *("falcon_h1", "nemotron_h", "zamba2"),
}
"""In training mode their mixers read the weight of out_proj (and x_proj)."""
LORA = LoRA(rank=3, alpha=6)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, build in FAMILIES.items():
        monkeypatch.setitem(ARCHITECTURES, name, build)
    monkeypatch.setitem(grid.UNUSED, "zamba2", ("adapter_list",))  # each use has its own


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "granitemoehybrid"])
def test_compiled_blocks_compute_the_same(name):
    outcome = laws.check_method(LORA, name, "none", (laws.compiling_changes_nothing,))
    assert not outcome.failures, "\n".join(outcome.failures)


# ------------------------------------------------------------------- fused kernels of Mamba


def fused_kernel(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    *,
    D: Tensor,
    chunk_size: int,
    outproj_weight: Tensor,
    outproj_bias: Tensor | None,
    rmsnorm_weight: Tensor,
    rmsnorm_eps: float,
    headdim: int,
    ngroups: int,
    **_: Any,
) -> Tensor:
    """Compute what mamba-ssm's `mamba_split_conv1d_scan_combined` does, by transformers' parts."""
    inner, channels = len(rmsnorm_weight), len(conv_weight)
    state = (channels - inner) // (2 * ngroups)
    gate, mixed, dt = projected.split([inner, channels, inner // headdim], -1)
    mixed = granite.causal_conv1d_fn(
        mixed.transpose(1, 2), conv_weight, conv_bias, activation="silu"
    ).transpose(1, 2)
    x, b, c = mixed.split([inner, ngroups * state, ngroups * state], -1)
    rows, tokens = x.shape[:2]
    y = granite.mamba2_chunk_scan(
        x.reshape(rows, tokens, -1, headdim),
        dt,
        A,
        b.reshape(rows, tokens, ngroups, state),
        c.reshape(rows, tokens, ngroups, state),
        chunk_size=chunk_size,
        D=D,
        z=None,
        dt_bias=dt_bias,
        dt_softplus=True,
        dt_limit=(0.0, float("inf")),
    )
    y = (y.reshape(rows, tokens, inner) * functional.silu(gate)).unflatten(-1, (ngroups, -1))
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + rmsnorm_eps)).flatten(-2)
    return functional.linear(y * rmsnorm_weight, outproj_weight, outproj_bias)


@pytest.fixture
def calls(monkeypatch):
    """Calls of the fused kernel, which torch computes."""
    found = []
    monkeypatch.setattr(
        granite,
        "mamba2_split_conv1d_scan_combined",
        lambda *args, **named: found.append(1) or fused_kernel(*args, **named),
    )
    return found


@pytest.mark.parametrize("padded", [True, False])
def test_a_fused_kernel_does_not_pass_over_an_adapter(padded, calls, tokenizer):
    model = tiny_model("granitehybrid_dense").requires_grad_(False)
    adapter = attach(model, LoRA(rank=3, alpha=6, targets=("mixer_out",)))
    perturb(adapter.parameters(), 0.1, seed=7)
    task = task_on(model, tokenizer)
    task.layout.padded = padded
    wanted, expected = loss_and_gradients(task, model, task.collate(ROWS))
    plan = ExecutionPlan.for_model(model)
    with prepared_for_training(model.train(), plan), task.training(model, plan):
        loss, gradients = loss_and_gradients(task, model, task.collate(ROWS))
    assert not calls
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-4)
    for value, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-3, atol=1e-3)
    assert all(module.training for module in model.modules())


def test_a_fused_kernel_runs_where_no_layer_of_its_mixer_is_adapted(calls, tokenizer):
    model = tiny_model("granitehybrid_dense").requires_grad_(False)
    adapter = attach(model, LoRA(rank=3, alpha=6, targets=("q", "v", "mixer_in")))
    perturb(adapter.parameters(), 0.1, seed=7)
    task = task_on(model, tokenizer)
    task.layout.padded = True
    wanted, _ = loss_and_gradients(task, model, task.collate(ROWS))
    with adapters_applied(model.train()):
        loss, _ = loss_and_gradients(task, model, task.collate(ROWS))
    assert calls  # it reads in_proj's output: the adapter is applied
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_mixers_with_fused_kernels_are_recognised(name):
    model = tiny_model(name).requires_grad_(False)
    attach(model, LORA)
    with adapters_applied(model):
        found = [m for m in model.modules() if m._forward_pre_hooks]
    assert bool(found) == (name in FUSED)
    assert not any(module._forward_pre_hooks for module in model.modules())


# ------------------------------------------------------------------- roles


MIXERS = {
    "qwen3_next": (["in_proj_qkvz", "in_proj_ba"], ["out_proj"]),
    "qwen3_5": (["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"], ["out_proj"]),
    "lfm2": (["in_proj"], ["out_proj"]),
    "nemotron_h": (["in_proj"], ["out_proj"]),
    "granitemoehybrid": (["in_proj"], ["out_proj"]),
    "falcon_h1": (["in_proj", "in_proj"], ["out_proj", "out_proj"]),
    "recurrent_gemma": (["linear_y", "linear_x"], ["linear_out"]),
}


@pytest.mark.parametrize("name", MIXERS)
def test_projections_of_mixers_have_roles(name):
    roles = find_roles(FAMILIES[name]())
    names = [
        [site.path.rpartition(".")[2] for site in roles[role]] for role in ("mixer_in", "mixer_out")
    ]
    assert tuple(names) == MIXERS[name]
    for group in ("attention", "self_attention", "all-linear"):
        paths = {site.path for site in resolve(FAMILIES[name](), group)}
        assert {site.path for role in ("mixer_in", "mixer_out") for site in roles[role]} <= paths


def test_a_family_without_other_mixers_has_no_such_role():
    with pytest.raises(TargetError, match="mixer_in"):
        resolve(ARCHITECTURES["llama"](), ["mixer_in"])
    assert not {"mixer_in", "mixer_out"} & find_roles(FAMILIES["olmo_hybrid"]()).keys()  # q, k, v


@pytest.mark.parametrize(
    ("name", "targets", "expected"),
    [
        ("qwen3_5", README_TARGETS, "leaves out 5 of 5 layers"),
        ("falcon_h1", (*README_TARGETS, "mixer_in"), "leaves out 2 of 4 layers"),
        ("falcon_h1", (*README_TARGETS, "mixer_in", "mixer_out"), ""),
        ("qwen3_5", ("attention", "ffn"), ""),
        ("llama", README_TARGETS, ""),
    ],
)
def test_targets_that_leave_out_mixers_are_reported(name, targets, expected):
    model = tiny_model(name)
    report = audit(model)
    warning = small_reach(attach(model, LoRA(rank=2, targets=targets)), report)
    assert (expected in warning) if expected else not warning
    assert ("add mixer_out, or use all-linear" in warning) == ("2 of 4" in expected)


def test_a_grouped_projection_is_no_linear_layer():
    model = tiny_model("deepseek_v4")
    assert not any("o_a_proj" in site.path for site in resolve(model, "all-linear"))
    assert any("o_b_proj" in site.path for site in resolve(model, "all-linear"))
