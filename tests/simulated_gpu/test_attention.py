"""Documents of one row on a card: which kernel takes them apart, and what that waits for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import shapes
from peftkit.data.load import DataConfig
from peftkit.kernels import varlen
from peftkit.kernels.varlen import reference_varlen_attn
from peftkit.tasks.causal_lm import CausalLM
from tests.families import ARCHITECTURES
from tests.simulated_gpu.same import make_rows
from tests.simulated_gpu.tensors import Card


def missing(*args: Any, **more: Any) -> Any:
    raise RuntimeError("no kernel image is available for execution on the device")


def task_on(device: str, family: str) -> tuple[Any, CausalLM]:
    torch.manual_seed(0)
    model: Any = ARCHITECTURES[family]().eval().to(torch.bfloat16).to(device)
    data = DataConfig(train="", packing=False, max_length=64)
    return model, CausalLM(model, shapes.tokenizer(), data)


@pytest.mark.parametrize(
    ("family", "kernel", "name"),
    [
        ("llama", reference_varlen_attn, "varlen"),
        ("mistral_swa", reference_varlen_attn, "varlen"),
        ("llama", missing, "sdpa"),
    ],
)
def test_documents_are_taken_apart_by_the_kernel_that_the_header_names(
    family: str, kernel: Any, name: str, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(varlen, "is_available", lambda device: device.type == "cuda")
    model, task = task_on("cuda", family)
    rows = make_rows()
    with task.training(model), torch.no_grad():
        assert task.paths["attention"] == name
        assert task.paths["rows"] == "without padding, common beginnings once"
        batch = {n: t.to("cuda") for n, t in task.collate(rows).items()}
        assert ("span_queries" in batch) == (name == "varlen")
        found = float(task.loss_sum(model, batch))
    alone, own = task_on("cpu", family)
    with torch.no_grad():
        assert found == pytest.approx(float(own.loss_sum(alone, own.collate(rows))), rel=0.01)


def test_nothing_waits_for_where_documents_begin(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, int]] = []

    def passing(query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        sizes.append(rest[2:4])
        return query.clone()

    monkeypatch.setattr(varlen, "varlen_attn", reference_varlen_attn)
    monkeypatch.setattr(varlen, "is_available", lambda device: device.type == "cuda")
    model, task = task_on("cuda", "llama")
    with task.training(model), torch.no_grad():
        batch = {n: t.to("cuda") for n, t in task.collate(make_rows(packed=True)).items()}
        monkeypatch.setattr(varlen, "varlen_attn", passing)
        card.reset()
        task.loss_sum(model, batch)
        assert [str(wait) for wait in card.waits] == []
    assert len(set(sizes)) == 1  # numbers of Python, read off a shape
    assert all(type(size) is int for pair in sizes for size in pair)
