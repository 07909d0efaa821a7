"""A row's result does not depend on its batch: on longer, shorter and packed neighbours."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from peftkit.errors import PeftkitError
from peftkit.inference.engine import Limits, Request
from peftkit.inference.open_engine import open_engine
from peftkit.inference.sampling import Sampling
from peftkit.settings import DataConfig
from peftkit.tasks.tokens import CausalLM
from tests.helpers.padding_free import loss_and_gradients
from tests.helpers.rows_alone import (
    BATCHES,
    BY_LENGTH,
    MODELS,
    alone,
    assert_equal,
    generated,
    is_causal,
)

FAST = ("llama", "gpt2", "opt", "qwen2_moe", *BY_LENGTH)
EACH = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MODELS]
PROMPTS = [[9 + 5 * n for n in range(size)] for size in (27, 11, 6, 14, 11)]
NUM_NEW = 7


def task_of(model: Any, tokenizer: Any, packing: bool) -> CausalLM:
    try:
        most = getattr(model.config, "max_position_embeddings", 32)
        data = DataConfig(train="", max_length=32 if most < 0 else min(most, 32), packing=packing)
        return CausalLM(model, tokenizer, data)
    except PeftkitError as error:
        reason = error.found
    assert reason, "refused without a reason"
    pytest.skip(reason)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packed"])
def test_loss_and_gradients_are_the_sum_of_each_row_alone(name, packing, tokenizer):
    torch.manual_seed(0)
    model: Any = MODELS[name]().eval()
    if not is_causal(model):
        pytest.skip("is no causal language model")
    expected = {
        kind: alone(model, rows) for kind, rows in BATCHES.items() if packing or kind != "packed"
    }
    task = task_of(model, tokenizer, packing)
    for context in (task.training(model), nullcontext()):
        with context:
            for kind, sums in expected.items():
                batch = task.collate(BATCHES[kind])
                assert_equal(loss_and_gradients(task, model, batch), sums)


@pytest.mark.parametrize("name", EACH)
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
