"""A row's result does not depend on its batch: on longer, shorter and packed neighbours."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function

from peftkit.data.pack import joined, padded_rows
from peftkit.errors import PeftkitError
from peftkit.events import ignore
from peftkit.forward.attention import MaskKind, kind_of, window_of
from peftkit.forward.loss import head_of
from peftkit.forward.row_lengths import context_length
from peftkit.inference.engine import Limits, Request
from peftkit.inference.open_engine import open_engine
from peftkit.inference.sampling import Sampling
from peftkit.settings import DataConfig
from peftkit.tasks.batches import split_micro_batches
from peftkit.tasks.distill.teacher import other_model
from peftkit.tasks.text.masked_lm import MaskedLM, MaskedLMConfig, MaskedRow
from peftkit.tasks.text.seq2seq import PairRow, Seq2Seq, Seq2SeqConfig
from peftkit.tasks.tokens import CausalLM, TokenTask
from tests.helpers.padding_free import loss_and_gradients, row_of
from tests.helpers.rows_alone import (
    BATCHES,
    BY_LENGTH,
    MODELS,
    added,
    alone,
    assert_equal,
    generated,
    is_causal,
    trained,
)

FAST = ("llama", "gpt2", "opt", "qwen2_moe", *BY_LENGTH)
ROWS = [
    pytest.param(
        n, marks=() if n in ("llama", "phi3_longrope", "llama4_scaled") else pytest.mark.slow
    )
    for n in MODELS
]
PACKED = [
    pytest.param(n, marks=() if n in (*FAST, "gemma3n") else pytest.mark.slow) for n in MODELS
]
GENERATED = [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in MODELS]
ENCODERS = [pytest.param(n, marks=() if n in ("bert", "t5") else pytest.mark.slow) for n in MODELS]
NOT_PACKED = {
    *("opt", "bloom", "mpt", "xglm", "openai_gpt"),  # positions or distances of their own
    "llama4_scaled",
}
"""Packing may be refused for these, with the reason."""
PROMPTS = [[9 + 5 * n for n in range(size)] for size in (27, 11, 6, 14, 11)]
NUM_NEW = 7


def task_of(name: str, model: Any, tokenizer: Any, packing: bool) -> CausalLM:
    """Return the task, or skip the test if the model is known to be refused."""
    try:
        most = context_length(model.config) or 32
        data = DataConfig(train="", max_length=max(min(most, 32), 8), packing=packing)
        return CausalLM(model, tokenizer, data)
    except PeftkitError as error:
        problem = error
    if name != "xlnet" and not (packing and name in NOT_PACKED):  # XLNet is not causal
        raise problem
    pytest.skip(f"is refused: {problem.found}")


@pytest.mark.parametrize("name", ROWS)
def test_the_loss_of_rows_is_the_sum_of_each_alone(name, tokenizer):
    check_loss(name, tokenizer, packing=False)


@pytest.mark.parametrize("name", PACKED)
def test_the_loss_of_packed_rows_is_the_sum_of_each_document_alone(name, tokenizer):
    check_loss(name, tokenizer, packing=True)


def check_loss(name: str, tokenizer: Any, *, packing: bool) -> None:
    """Compare loss and gradients of batches, padding-free and padded, with `alone`."""
    torch.manual_seed(0)
    model: Any = MODELS[name]().eval()
    if not is_causal(model):
        pytest.skip("is no causal language model")
    if name == "gpt2":
        model.set_attn_implementation("eager")  # the others: sdpa
    expected = {
        kind: alone(model, rows) for kind, rows in BATCHES.items() if packing or kind != "packed"
    }
    task = task_of(name, model, tokenizer, packing)
    for context in (task.training(model), nullcontext()):
        with context:
            for kind, sums in expected.items():
                batch = task.collate(BATCHES[kind])
                assert_equal(loss_and_gradients(task, model, batch), sums)


@pytest.mark.parametrize("name", GENERATED)
def test_completions_are_those_of_each_prompt_alone(name, tokenizer):
    torch.manual_seed(0)
    model: Any = MODELS[name]().eval()
    if not is_causal(model):
        pytest.skip("is no causal language model")
    if name == "llama_dynamic":
        pytest.skip("frequencies change after the context's end")
    expected = [generated(model, prompt, NUM_NEW) for prompt in PROMPTS]
    with open_engine(model, tokenizer, Limits(prefill=16)) as engine:
        engine.ends = frozenset()
        sampling = Sampling(max_new_tokens=NUM_NEW, top_logprobs=1)
        requests = [Request(prompt, sampling, log_probs=True) for prompt in PROMPTS]
        completions = [engine.submit(request) for request in requests]
        engine.run()
    for completion, (tokens, log_probs) in zip(completions, expected, strict=True):
        assert completion.ids == tokens
        assert completion.log_probs == pytest.approx(log_probs, abs=1e-3)


@pytest.mark.parametrize("name", ENCODERS)
def test_rows_of_encoders_are_each_alone(name, tokenizer):
    torch.manual_seed(0)
    model: Any = MODELS[name]().eval()
    kind = type(model).__name__
    task: TokenTask
    if "ForMaskedLM" in kind:
        own = copy.deepcopy(tokenizer)
        own.mask_token = "<unk>"
        task = MaskedLM(model, own, MaskedLMConfig(), DataConfig(train="", max_length=32))
        rows = [MaskedRow(ids, tuple(range(len(ids))), "") for ids in map(tuple, PROMPTS)]
    elif model.config.is_encoder_decoder and model.main_input_name == "input_ids":
        task = Seq2Seq(model, tokenizer, Seq2SeqConfig(max_target_length=8), DataConfig(train=""))
        rows = [PairRow(tuple(p), tuple(p[:0:-3]), "", "") for p in PROMPTS]
    else:
        pytest.skip("is no text encoder")
    each = [loss_and_gradients(task, model, task.collate([row])) for row in rows]
    expected = added(each, trained(model))
    for context in (task.training(model), nullcontext()):
        with context:
            parts = split_micro_batches(rows, task.num_positions, 8, bucket_key=task.bucket_key)
            found = [loss_and_gradients(task, model, task.collate(part)) for part in parts]
            assert_equal(added(found, trained(model)), expected)
    if isinstance(task, Seq2Seq):
        texts = task.completions(model, rows)
        assert texts == [task.completions(model, [row])[0] for row in rows]
        assert name != "t5" or len(set(texts)) > 1


def test_another_model_as_teacher_reads_each_row_alone(tokenizer, tmp_path):
    torch.manual_seed(0)
    model: Any = MODELS["phi3_longrope"]().eval()
    expected = [copy.deepcopy(model).model(torch.tensor([prompt]))[0][0] for prompt in PROMPTS]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    teacher = other_model(str(tmp_path), model, tokenizer, head_of(model), ignore)
    ids, mask = padded_rows(PROMPTS, 0)
    index = mask.flatten().nonzero().flatten()
    found = teacher.hidden({"input_ids": ids, "attention_mask": mask, "target_index": index})
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("chunk", "scale", "limit"), [(64, 32, 31), (48, 1 << 13, 48)], ids=["scale", "chunk"]
)
def test_rows_longer_than_a_chunk_or_scale_of_llama_4_are_batched_by_document(
    chunk, scale, limit, tokenizer
):
    model: Any = MODELS["llama4_scaled"]()
    model.config.attention_chunk_size = chunk
    for layer in model.model.layers:
        layer.self_attn.floor_scale = scale
    data = DataConfig(train="", max_length=limit + 1, packing=True)
    task = CausalLM(model, tokenizer, data)
    assert task.rows.by_document
    documents = [row_of(limit - 8), row_of(9)]
    expected = alone(model, documents)
    with task.training(model):
        batch = task.collate([joined(documents)])
        assert_equal(loss_and_gradients(task, model, batch), expected)
    shorter = data.model_copy(update={"max_length": limit})
    assert not CausalLM(model, tokenizer, shorter).rows.by_document


@pytest.mark.parametrize("chunk", [8, 3000, 8192])
def test_chunks_of_any_size_are_recognised(chunk):
    config = MODELS["llama4_chunked"]().config
    config.attention_chunk_size = chunk
    function = chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.long))
    assert kind_of(function, window_of(config)) is None
    assert kind_of(causal_mask_function, window_of(config)) == MaskKind(True, None)


@pytest.mark.slow
def test_documents_beyond_a_long_chunk_are_each_alone(tokenizer):
    torch.manual_seed(0)
    model: Any = MODELS["llama4_chunked"]().eval()
    model.config.attention_chunk_size = 1100
    model.config.max_position_embeddings = 2048
    rows = [row_of(1500), row_of(40)]
    expected = alone(model, rows)
    task = CausalLM(model, tokenizer, DataConfig(train="", max_length=2048, packing=False))
    with task.training(model):
        batch = task.collate(rows)
        assert "grid_tokens" in batch
        assert_equal(loss_and_gradients(task, model, batch), expected)
    prompts = [list(rows[0].input_ids), list(rows[1].input_ids)]
    expected_tokens = [generated(model, prompt, 3) for prompt in prompts]
    with open_engine(model, tokenizer) as engine:
        engine.ends = frozenset()
        groups = engine.answers(prompts, Sampling(max_new_tokens=3), n=2)
    assert [one.ids for of in groups for one in of] == [
        ids for ids, _ in expected_tokens for _ in range(2)
    ]
