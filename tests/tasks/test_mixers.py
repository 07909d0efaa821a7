"""Mixers of tokens other than attention isolate the documents of a padding-free batch."""

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peftkit.adapter import attach, prepared_for_training
from peftkit.execution.plan import ExecutionPlan
from peftkit.forward import mixer_kernels
from peftkit.forward.blocks import Blocks
from peftkit.forward.mixers import grid_of_spans, into, out_of
from peftkit.kernels import varlen
from peftkit.kernels.varlen import Grid, grid_of, spans_of
from peftkit.methods.lora import LoRA
from peftkit.methods.lora_linear import LoRALinear
from peftkit.train import metrics
from peftkit_server.tinker import rows
from tests.helpers.adapters import perturb
from tests.helpers.cell import own_warnings, tiny_model
from tests.helpers.families import ARCHITECTURES
from tests.helpers.padding_free import (
    MODELS,
    PACKED,
    ROWS,
    SHARED_PREFIXES,
    assert_same,
    loss_and_gradients,
    task_on,
)
from tests.helpers.varlen_reference import reference_varlen_attn

BATCHES = (ROWS, SHARED_PREFIXES, PACKED)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, build in MODELS.items():
        monkeypatch.setitem(ARCHITECTURES, name, build)


def adapted(name: str, **settings: Any) -> nn.Module:
    """Return a model with a trained adapter on all layers."""
    model = tiny_model(name).requires_grad_(False)
    perturb(attach(model, LoRA(rank=3, alpha=6, **settings)).parameters(), 0.1, seed=7)
    return model


def isolated(model: nn.Module, tokenizer: Any, field: str, batches: Any = BATCHES) -> str:
    """Compare with each document alone; return how mixers isolate documents."""
    task = task_on(model, tokenizer, packing=True)
    (mixers,) = {assert_same(task, model, rows, field)["mixers"] for rows in batches}
    return mixers


# ------------------------------------------------------------------- kernels of a GPU, imitated


def split_at(x: Any, sizes: list[int]) -> list[Any]:
    is_sequence = isinstance(x, Tensor) and x.dim() > 2 and x.shape[1] == sum(sizes)
    return list(x.split(sizes, 1)) if is_sequence else [x] * len(sizes)


def by_bounds(rule: Callable[..., Any], name: str, calls: Counter[str]) -> Callable[..., Any]:
    """Return a rule that takes consecutive documents, as kernels of fla and mamba-ssm do."""
    known = ("g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")

    def run(*args: Any, cu_seqlens: Any = None, seq_idx: Any = None, **named: Any) -> Any:
        if "mamba" in name:  # it has other bounds
            ends = None if seq_idx is None else torch.bincount(seq_idx[0]).cumsum(0)
            cu_seqlens = None if ends is None else functional_pad(ends)
        else:
            named = {key: value for key, value in named.items() if key in known}
        if cu_seqlens is None:
            return rule(*args, **named)
        calls["rule"] += 1
        sizes = cu_seqlens.diff().tolist()
        parts = [split_at(x, sizes) for x in args]
        more = {key: split_at(value, sizes) for key, value in named.items()}
        outs = [
            rule(*(part[n] for part in parts), **{key: value[n] for key, value in more.items()})
            for n in range(len(sizes))
        ]
        if isinstance(outs[0], tuple):
            return torch.cat([out[0] for out in outs], 1), None
        return torch.cat(outs, 1)

    return run


def functional_pad(ends: Tensor) -> Tensor:
    return nn.functional.pad(ends, (1, 0))


def conv_by_index(conv: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def run(x: Tensor, *args: Any, seq_idx: Any = None, **named: Any) -> Tensor:
        own = {k: v for k, v in named.items() if k in ("weight", "bias", "activation")}
        if seq_idx is None:
            return conv(x, *args, **own)
        calls["conv"] += 1
        sizes = torch.bincount(seq_idx[0]).tolist()
        return torch.cat([conv(part, *args, **own) for part in x.split(sizes, -1)], -1)

    return run


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch's varlen kernel here, by its reference."""
    monkeypatch.setattr(varlen, "is_available", lambda device: True)
    monkeypatch.setattr(varlen, "DTYPES", (torch.float32,))
    monkeypatch.setattr(varlen, "kernel", lambda: reference_varlen_attn)


RULES = {
    "qwen3_5": ("torch_chunk_gated_delta_rule", "bounds by cu_seq_lens_q and seq_idx"),
    "granitemoehybrid": ("mamba2_chunk_scan", "bounds by cu_seq_lens_q and seq_idx"),
    "lfm2": ("", "bounds by cu_seq_lens_q and seq_idx"),
}


@pytest.mark.parametrize("name", RULES)
def test_kernels_take_the_bounds_of_documents(name, on_gpu, monkeypatch, tokenizer):
    rule, way = RULES[name]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    calls: Counter[str] = Counter()
    conv = module.causal_conv1d_fn
    monkeypatch.setattr(module, "causal_conv1d_fn", conv_by_index(conv, calls))
    if rule:
        replacement = by_bounds(getattr(module, rule), rule, calls)
        monkeypatch.setattr(module, rule, replacement)
    if name == "qwen3_5":  # its mixer passes one name on to the rule as another
        inner = replacement
        monkeypatch.setattr(module, rule, lambda *a, cu_seq_lens_q=None, **k: inner(*a, **k))
    assert isolated(adapted(name), tokenizer, "span_queries").endswith(way)
    assert calls["conv"]
    assert bool(calls["rule"]) == bool(rule)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "name", ["qwen3_5", pytest.param("granitemoehybrid", marks=pytest.mark.slow)]
)
def test_without_kernels_spans_become_a_grid(name, on_gpu, tokenizer):
    assert isolated(adapted(name), tokenizer, "span_queries").endswith("padded row per document")


def test_a_kernel_that_ignores_bounds_is_not_used(on_gpu, monkeypatch, tokenizer):
    """transformers drops an argument that a kernel lacks: documents would leak."""
    module = importlib.import_module("transformers.models.lfm2.modeling_lfm2")
    conv = module.causal_conv1d_fn

    def ignores(x: Tensor, *args: Any, seq_idx: Any = None, **named: Any) -> Tensor:
        return conv(x, *args, **named)

    monkeypatch.setattr(module, "causal_conv1d_fn", ignores)
    mixers = isolated(adapted("lfm2"), tokenizer, "span_queries")
    assert mixers.endswith("padded row per document")


@pytest.mark.smoke
@pytest.mark.parametrize("documents", [[[0, 1, 2], [0, 1, 3, 4], [5]], [[0, 1, 2, 3], [4, 5]]])
def test_a_grid_from_spans_is_the_grid(documents):
    ordered = sorted(documents, key=len, reverse=True)
    relabelled: dict[int, int] = {}
    places = [[relabelled.setdefault(t, len(relabelled)) for t in one] for one in ordered]
    spans, grid = spans_of(places, 16), grid_of(places, (1, 16))
    made = grid_of_spans(spans)
    x = torch.randn(1, 16, 3, requires_grad=True)
    longest = len(places[0])
    a, b = (into(x, one)[:, :longest] for one in (made, grid))
    assert torch.equal(a, b)
    assert torch.equal(out_of(into(x, made), made)[:, :6], x[:, :6])
    weights = torch.randn(a.shape)
    assert torch.equal(*(torch.autograd.grad((y * weights).sum(), x)[0] for y in (a, b)))


# ------------------------------------------------------------------- a model's forward pass


def mixer_of(model: nn.Module) -> nn.Module:
    return next(m for m in model.modules() if type(m).__name__ == "Qwen3_5GatedDeltaNet")


def test_layers_inside_of_a_mixer_compute_no_padding(monkeypatch, tokenizer):
    model = adapted("qwen3_5")
    task, plan = task_on(model, tokenizer), ExecutionPlan.for_model(model)
    shapes: dict[nn.Module, torch.Size] = {}
    forward = LoRALinear.forward

    def recorded(layer: LoRALinear, x: Tensor) -> Tensor:
        shapes[layer] = x.shape[:-1]
        return forward(layer, x)

    monkeypatch.setattr(LoRALinear, "forward", recorded)
    with prepared_for_training(model, plan), task.training(model, plan):
        batch = task.collate(ROWS)
        task.loss(model, batch)
        mixer: Any = mixer_of(model)
        layers = (mixer.in_proj_qkv, mixer.in_proj_z, mixer.out_proj)
        assert {shapes[layer] for layer in layers} == {batch["input_ids"].shape}
        # a LoRA group compares inputs by identity, and would be separated
        assert mixer.in_proj_qkv.group is mixer.in_proj_z.group is not None


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("qwen3_5", "recompute"),
        pytest.param("falcon_h1", "recompute", marks=pytest.mark.slow),
        pytest.param("qwen3_5", "offload", marks=pytest.mark.slow),
    ],
)
def test_recomputed_blocks_find_their_documents(name, way, tokenizer):
    model = adapted(name).train()
    blocks = Blocks(model)
    blocks.set_activations(way)
    isolated(model, tokenizer, "grid_tokens", [SHARED_PREFIXES])
    blocks.restore()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "granitemoehybrid", "lfm2"])
def test_compiled_blocks_find_their_documents(name, tokenizer):
    model = adapted(name)
    torch._dynamo.reset()
    task = task_on(model, tokenizer)
    with task.training(model):
        wanted, expected = loss_and_gradients(task, model, task.collate(ROWS))
        for layer in model.get_decoder().layers:
            layer.compile(backend="aot_eager")
        with own_warnings():
            loss, gradients = loss_and_gradients(task, model, task.collate(ROWS))
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-4)
    for a, b in zip(gradients, expected, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_in_16_bits_losses_agree(tokenizer):
    model = adapted("qwen3_5").bfloat16()
    task = task_on(model, tokenizer)
    wanted = task.loss(model, task.collate(ROWS))[0]
    with task.training(model):
        batch = task.collate(ROWS)
        assert "grid_tokens" in batch
        loss = task.loss(model, batch)[0]
    torch.testing.assert_close(loss, wanted, rtol=5e-3, atol=0)


def test_a_model_that_trains_for_one_request_at_a_time_is_probed_once(monkeypatch, tokenizer):
    model = adapted("lfm2")
    probes: list[int] = []
    probe = rows.can_unpad
    monkeypatch.setattr(
        rows, "can_unpad", lambda *args, **named: probes.append(1) or probe(*args, **named)
    )
    task, sft = rows.DatumTask(model, tokenizer), task_on(model, tokenizer)
    wanted = sft.loss(model, sft.collate(ROWS))[0]
    for _ in range(2):
        with task.training(model):
            sft.layout.attention = task.layout.attention
            batch = sft.collate(ROWS)
            assert "grid_tokens" in batch
            torch.testing.assert_close(sft.loss(model, batch)[0], wanted)
        sft.layout.attention = None
        assert not [module for module in model.modules() if "forward" in vars(module)]
    assert probes == [1]


def test_generating_meanwhile_leaves_mixers_alone(tokenizer):
    model: Any = adapted("qwen3_5")
    ids = torch.tensor([[3, 4, 5, 6, 7], [9, 8, 7, 6, 5]])
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, **settings)
    task = task_on(model, tokenizer)
    with task.training(model):
        task.loss(model, task.collate(ROWS))[0].backward()
        task.layout.forget()
        assert torch.equal(model.generate(ids, **settings), wanted)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the lengths that our delta rule receives."""
    found: list[Any] = []
    rule = mixer_kernels.gated_delta_rule

    def recorded(*args: Any, lengths: Any = None, **named: Any) -> Tensor:
        found.append(lengths)
        return rule(*args, lengths=lengths, **named)

    mixer_kernels._computes_delta_rule(delta_rule_of("qwen3_5"))
    monkeypatch.setattr(mixer_kernels, "gated_delta_rule", recorded)
    return found


def delta_rule_of(name: str) -> Callable[..., Any]:
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    return module.torch_chunk_gated_delta_rule


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
def test_our_delta_rule_knows_the_lengths(name, calls, tokenizer):
    model = adapted(name)
    task = task_on(model, tokenizer)
    mixer_kernels._computes_delta_rule(delta_rule_of(name))
    with task.training(model):
        batch = task.collate(ROWS)
        calls.clear()
        task.loss(model, batch)
    assert calls == [[9, 25, 4, 17]]


def test_another_rule_is_not_replaced(calls, monkeypatch, tokenizer):
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    rule = module.torch_chunk_gated_delta_rule

    def doubled(*args: Any, **named: Any) -> Any:
        out, state = rule(*args, **named)
        return 2 * out, state

    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", doubled)
    isolated(adapted("qwen3_5"), tokenizer, "grid_tokens", [ROWS])
    assert all(lengths is None for lengths in calls)  # the comparison with ours alone


@pytest.mark.smoke
def test_the_layout_reaches_all_documents_of_a_grid():
    grid: Grid = grid_of([[0, 1, 2], [3, 4]], (1, 16))
    x = torch.arange(16.0)[None, :, None]
    assert into(x, grid)[:, :3, 0].tolist() == [[0, 1, 2], [3, 4, 15]]


def test_missing_kernels_are_reported_once_on_a_gpu(monkeypatch):
    event = metrics._mixers(tiny_model("qwen3_5"))
    assert event is not None
    assert event.fix.endswith(
        "pip install --no-build-isolation causal-conv1d flash-linear-attention"
    )
    assert not metrics._mixers(tiny_model("llama"))
    with_mamba = tiny_model("granitemoehybrid")
    event = metrics._mixers(with_mamba)
    assert event is not None
    assert "mamba-ssm" in event.cause
    monkeypatch.setattr(mixer_kernels, "find_spec", lambda name: name)  # installed
    assert not metrics._mixers(with_mamba)
