"""The loss is the definition's, whole or in chunks, though only learnt rows reach the head."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftkit.data.pack import IGNORE, Row, collate
from peftkit.forward.loss import Head, accepted, head_of, target_logits, token_loss
from tests.helpers.adapters import gradients
from tests.helpers.families import ARCHITECTURES, VOCAB
from tests.helpers.memory import use_small_chunks

MODELS = (
    *("llama", "gpt2"),  # the second one's head is its embedding
    "gemma2",  # tanh after the head
    *("cohere", "granite"),  # a scale after the head
    "gptj",  # a bias in the head
)


def model_of(name: str) -> Any:
    model: Any = ARCHITECTURES[name]()
    if name == "granite":
        model.config.logits_scaling = model.logits_scaling = 7.0
    if name == "gptj":
        nn.init.normal_(model.lm_head.bias)
    return model


def batch() -> dict[str, Tensor]:
    """Return three rows of unequal lengths, about half of their tokens learnt."""
    draw = torch.Generator().manual_seed(1)
    rows = []
    for number, length in enumerate((41, 9, 23)):
        ids = tuple(torch.randint(0, VOCAB, (length,), generator=draw).tolist())
        keep = torch.rand(length, generator=draw) < 0.5
        labels = tuple(
            t if k and n else IGNORE for n, (t, k) in enumerate(zip(ids, keep, strict=True))
        )
        rows.append(Row(ids, labels, (length,), f"a:{number}"))
    return collate(rows, pad_id=2)


def by_definition(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=data["input_ids"], use_cache=False).logits.float()
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), data["labels"][:, 1:].flatten(), reduction="sum"
    )


def loss(model: nn.Module, data: dict[str, Tensor], head: Head | None = None) -> Tensor:
    inputs = accepted(model, {"input_ids": data["input_ids"], "use_cache": False})
    return token_loss(model, head, inputs, data["target_index"], data["targets"])


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_match_definitions(name, monkeypatch):
    model, data = model_of(name).eval(), batch()  # eval: GPT-2's dropout is on by default
    use_small_chunks(monkeypatch)
    expected = by_definition(model, data)
    wanted = gradients(model, expected)
    head = head_of(model)
    assert head is not None
    ignored = {"target_index": torch.zeros(3).long(), "targets": torch.full((3,), IGNORE)}
    longer = {n: torch.cat([t, ignored[n]]) if n in ignored else t for n, t in data.items()}
    for way, each in product((None, head), (data, longer)):
        found = loss(model, each, way)
        # float32 sums over about 36 tokens in another order
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
        # a trained head must not have ignored targets
        skipped = [*model.get_output_embeddings().parameters()] if each is longer else []
        keys = {n for n, p in model.named_parameters() if all(p is not s for s in skipped)}
        for key, gradient in gradients(model, found).items():
            if key not in keys:
                continue
            torch.testing.assert_close(gradient, wanted[key], rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_only_learnt_rows_reach_the_head(name):
    model, data = model_of(name).eval(), batch()
    seen: list[torch.Size] = []
    model.get_output_embeddings().register_forward_hook(
        lambda module, args, output: seen.append(output.shape)
    )
    with torch.no_grad():
        logits = target_logits(model, {"input_ids": data["input_ids"]}, data["target_index"])
        whole = model(input_ids=data["input_ids"]).logits
    num_targets = len(data["targets"])
    assert seen == [(1, num_targets, VOCAB), (*data["input_ids"].shape, VOCAB)]
    assert logits.shape == (num_targets, VOCAB)
    torch.testing.assert_close(logits, whole.flatten(0, 1)[data["target_index"]])


def test_no_hook_stays_behind_even_after_an_error():
    model, data = model_of("llama"), batch()
    loss(model, data)
    with pytest.raises(IndexError):
        loss(model, {**data, "target_index": torch.tensor([10**6])})
    assert not model.lm_head._forward_pre_hooks


class _NoHead(nn.Module):
    """A model as a user may have built it: its head is no module of its own."""

    def __init__(self, inner: PreTrainedModel, head: nn.Module | None) -> None:
        super().__init__()
        self.inner, self._head = inner, head

    def get_output_embeddings(self) -> nn.Module | None:
        return self._head

    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.inner.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return type("Output", (), {"logits": F.linear(hidden, self.inner.lm_head.weight)})


@pytest.mark.parametrize("called", ["no head", "a head that is never called"])
def test_without_a_head_to_hook_all_logits_are_made(called):
    inner, data = model_of("llama"), batch()
    model = _NoHead(inner, None if called == "no head" else inner.lm_head)
    torch.testing.assert_close(loss(model, data), by_definition(inner, data))


def test_a_head_that_does_more_than_its_config_says_is_not_used():
    model = ARCHITECTURES["llama"]().eval()
    model.lm_head.register_forward_hook(lambda module, args, output: 2 * output)
    assert head_of(model) is not None  # a hook is part of the module
    model = ARCHITECTURES["gemma2"]().eval()
    forward = model.forward

    def other(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        output.logits = output.logits + 1
        return output

    model.forward = other
    assert head_of(model) is None
