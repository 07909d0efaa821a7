"""Packing is allowed where restarted positions isolate documents; elsewhere it is refused."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from peftkit.data.pack import IGNORE, PackedRows, Row
from peftkit.data.rows.lazy import View
from peftkit.errors import BaseError, DataError
from peftkit.forward.probes import check_causal, check_packing
from peftkit.settings import DataConfig
from peftkit.tasks.tokens import CausalLM
from tests.helpers.families import ARCHITECTURES, FAMILIES, VOCAB, tiny_tokenizer
from tests.helpers.hybrids import FURTHER

MODELS: dict[str, Callable[[], PreTrainedModel]] = {**ARCHITECTURES, **FURTHER}


def documents() -> list[Row]:
    draw = torch.Generator().manual_seed(3)
    rows = []
    for number, length in enumerate((9, 7, 21, 3, 13, 11)):
        ids = tuple(torch.randint(3, VOCAB, (length,), generator=draw).tolist())
        rows.append(Row(ids, (IGNORE, IGNORE, *ids[2:]), (length,), f"a:{number}"))
    return rows


def test_a_model_that_cannot_isolate_documents_is_refused_by_name():
    model = MODELS["bloom"]()
    with pytest.raises(DataError, match=rf"(?s){type(model).__name__}.*data\.packing: false"):
        check_packing(model)
    with pytest.raises(DataError, match=r"data\.packing: false"):
        CausalLM(model, tiny_tokenizer(), DataConfig(train="", packing=True, max_length=64))
    told: list[object] = []
    task = CausalLM(  # nobody asked for the default
        model, tiny_tokenizer(), DataConfig(train="", max_length=64), on_event=told.append
    )
    assert [event for event in told if "not packed" in getattr(event, "text", "")]
    assert not task.rows.data.packing
    row = documents()[2]
    loss = task.loss(model, task.collate([row, documents()[3]]))[0]
    apart = [task.loss(model, task.collate([one]))[0] for one in (row, documents()[3])]
    torch.testing.assert_close(loss, sum(apart), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["lfm2", "mamba"])
def test_a_model_whose_mixers_isolate_documents_packs_them(name):
    """Restarted positions do not isolate them: the batch holds each document separately."""
    model = MODELS[name]().eval()
    with pytest.raises(DataError, match=r"data\.packing: false"):
        check_packing(model)
    settings = DataConfig(train="", packing=True, max_length=32)
    task = CausalLM(model, tiny_tokenizer(), settings)
    rows, first = documents(), next(model.parameters())
    packed = list(PackedRows(View([rows]), 31))
    alone = torch.stack([task.loss(model, task.collate([row]))[0] for row in rows]).sum()
    (alone_gradient,) = torch.autograd.grad(alone, first)
    with task.training(model):
        assert task.num_positions(packed) < 80
        batch = task.collate(packed)
        assert batch["input_ids"].shape == (1, 80)  # 64 tokens and padding
        together = task.loss(model, batch)[0]
        (gradient,) = torch.autograd.grad(together, first)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(gradient, alone_gradient, rtol=1e-3, atol=1e-3)
    padded = task.loss(model, task.collate(packed))[0]  # outside of training
    torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("mixtral", torch.float32)])
def test_the_probe_holds_in_16_bit_and_changes_nothing(name, dtype):
    model = FAMILIES[name]().train()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.lm_head.eval()
    before = torch.get_rng_state()
    check_packing(model)
    check_causal(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert not model.lm_head.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_is_not_causal_is_refused():
    with pytest.raises(BaseError, match=r"(?s)BertForMaskedLM.*with the tokens after it"):
        check_causal(FAMILIES["bert"]())
    with pytest.raises(BaseError, match=r"(?s)T5ForConditionalGeneration.*encoder-decoder"):
        check_causal(FAMILIES["t5"]())


def test_a_model_that_makes_no_numbers_is_refused():
    model = FAMILIES["llama"]()
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(BaseError, match="not finite"):
        check_causal(model)
