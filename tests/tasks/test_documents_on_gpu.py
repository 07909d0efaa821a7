"""The ways that documents of one row take on a GPU, walked on a CPU: they teach what rows teach."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from peftkit.forward import attention as attention
from peftkit.forward import attention_kernels
from peftkit.forward.attention import MaskKind, TrainingAttention, kind_of
from peftkit.forward.blocks import Blocks
from peftkit.forward.padding_free import layout_in
from peftkit.kernels import varlen
from peftkit.settings import DataConfig
from peftkit.tasks.text.masked_lm import MaskedLM, MaskedLMConfig, MaskedRow
from tests.helpers.families import ARCHITECTURES
from tests.helpers.padding_free import (
    MODELS,
    PACKED,
    ROWS,
    SHARED_PREFIXES,
    assert_same,
    row_of,
    task_on,
)
from tests.helpers.varlen_reference import reference_varlen_attn

Tokenizer = PreTrainedTokenizerFast
SPANS = ["llama", "gemma3_text", "mistral_swa", "gpt_neox", "qwen3_moe"]
GRID = ["gemma2", "gpt_oss", "bloom"]
"""Capped scores; sinks; distances over the bounds of documents, for which rows are padded."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Have the GPU's kernel here, by its reference; count what attention takes."""
    found: Counter[str] = Counter()
    monkeypatch.setattr(varlen, "is_available", lambda device: True)
    monkeypatch.setattr(varlen, "DTYPES", (torch.float32,))
    monkeypatch.setattr(varlen, "kernel", lambda: reference_varlen_attn)
    for n, kernel in enumerate(attention_kernels.KERNELS):

        def counted(
            call: Any, name: str = kernel.name, run: Callable[..., Tensor] = kernel.run
        ) -> Tensor:
            found[name] += 1
            return run(call)

        table = list(attention_kernels.KERNELS)
        table[n] = kernel._replace(run=counted)
        monkeypatch.setattr(attention_kernels, "KERNELS", tuple(table))
    return found


@pytest.mark.parametrize("name", SPANS)
def test_spans_teach_what_rows_teach(name, calls, tokenizer):
    model = MODELS[name]().eval()
    task = task_on(model, tokenizer)
    for rows in (ROWS, SHARED_PREFIXES):
        calls.clear()
        assert_same(task, model, rows, "span_queries")
        assert calls["varlen"] > 0
    with task.training(model):
        assert task.paths["attention"] == "varlen"
        assert task.paths["rows"].startswith("without padding")
        calls.clear()
        task.loss(model, task.collate(SHARED_PREFIXES))[0]
        assert set(calls) == {"varlen"}  # all layers, windows too


@pytest.mark.parametrize("name", ["llama", "mistral_swa"])
def test_packing_needs_no_mask(name, calls, tokenizer):
    model = MODELS[name]().eval()
    assert_same(task_on(model, tokenizer, packing=True), model, PACKED, "span_queries")


def test_of_an_encoder_all_is_seen(calls, tokenizer):
    own = copy.deepcopy(tokenizer)
    own.mask_token = "<unk>"
    model: Any = ARCHITECTURES["bert"]().eval()
    task = MaskedLM(model, own, MaskedLMConfig(), DataConfig(train="", max_length=64))
    rows = [MaskedRow(row.input_ids, tuple(range(len(row.input_ids))), "") for row in ROWS]
    assert_same(task, model, rows, "span_queries")
    assert calls["varlen"]


@pytest.mark.parametrize("way", ["recompute", "keep"])
def test_recomputed_blocks_keep_spans(way, calls, tokenizer):
    model = MODELS["llama"]().train()
    blocks = Blocks(model)
    blocks.set_activations(way)
    assert_same(task_on(model, tokenizer), model, SHARED_PREFIXES, "span_queries")
    blocks.restore()


@pytest.mark.parametrize("name", GRID)
def test_unsupported_spans_fall_back(name, calls, tokenizer):
    model = MODELS[name]().eval()
    task = task_on(model, tokenizer)
    with task.training(model):
        calls.clear()
        batch = task.collate(ROWS)
        assert "span_queries" not in batch
        assert ("grid_tokens" in batch) == (name != "bloom")
        task.loss(model, batch)[0]
        assert not calls["varlen"]


def test_attention_dropout_excludes_spans(calls, tokenizer):
    model = MODELS["llama"]()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    task = task_on(model, tokenizer)
    before = torch.get_rng_state()
    with task.training(model.train()):
        assert "grid_tokens" in task.collate(ROWS)
    assert torch.equal(torch.get_rng_state(), before)
    with task.training(model.eval()):
        assert "span_queries" in task.collate(ROWS)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_causal_documents_in_separate_rows_need_no_mask(name, monkeypatch, tokenizer):
    masks: list[Tensor | None] = []
    monkeypatch.setattr(
        TrainingAttention, "needs_mask", property(lambda self: not self.is_causal)
    )  # as on a GPU
    attend = attention.attend

    def heard(call: Any) -> Tensor:
        masks.append(call.mask)
        return attend(call)

    monkeypatch.setattr(attention, "attend", heard)
    model = MODELS[name]().eval()
    task = task_on(model, tokenizer)
    for rows in (ROWS, SHARED_PREFIXES):
        assert_same(task, model, rows, "grid_tokens")
    with task.training(model):
        masks.clear()
        task.loss(model, task.collate(SHARED_PREFIXES))[0]
    windows = name in ("mistral_swa", "gemma2")
    assert all(mask is None for mask in masks) == (not windows)


def test_generating_meanwhile_sees_its_own_masks(calls, tokenizer):
    model: Any = MODELS["llama"]().eval()
    ids = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]])
    mask = (ids > 0).long()
    settings: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    wanted = model.generate(ids, **settings)
    task = task_on(model, tokenizer)
    with task.training(model):
        task.loss(model, task.collate(ROWS))[0].backward()
        task.layout.attention.layout = None
        assert torch.equal(model.generate(ids, **settings), wanted)


@pytest.mark.parametrize(
    ("function", "window", "kind"),
    [
        (causal_mask_function, None, MaskKind(True, None)),
        (causal_mask_function, 4096, MaskKind(True, None)),
        (bidirectional_mask_function, None, MaskKind(False, None)),
        (sliding_window_causal_mask_function(4), 4, MaskKind(True, 4)),
        (sliding_window_causal_mask_function(3000), 3000, MaskKind(True, 3000)),
        (chunked_causal_mask_function(512, torch.zeros(1, dtype=torch.long)), 512, None),
        (chunked_causal_mask_function(7, torch.zeros(1, dtype=torch.long)), None, None),
        (lambda b, h, q, k: (k <= q) & (k % 2 == 0), None, None),
        (lambda b, h, q, k: torch.zeros(1, 9)[b, q] > 0, None, None),
    ],
)
def test_masks_are_recognised(function, window, kind):
    assert kind_of(function, window) == kind


def test_tokens_of_spans_are_counted_as_they_are(calls, tokenizer):
    model = MODELS["llama"]()
    task = task_on(model, tokenizer)
    with task.training(model):
        assert task.num_positions(ROWS) == sum(len(row.input_ids) for row in ROWS)
        one = task.collate([row_of(16), row_of(16)])
        assert one["input_ids"].shape[0] == 1
    assert layout_in({}) is None
