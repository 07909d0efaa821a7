"""The first hour with a card runs through on the simulated one, and writes its page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import card, shapes
from tests.simulated_gpu.simulation import simulated

SMALL = ["--model", "tiny", "--layers", "2", "--length", "16"]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", shapes._llama(32, 64, 2, 4, 2, 512))


@pytest.mark.parametrize(
    "part",
    [
        *("environment", "operators", "activations"),
        *(pytest.param(part, marks=pytest.mark.slow) for part in ("training", "memory")),
    ],
)
def test_every_part_is_well_and_written(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "card.md"
    if part == "training":  # the CPU's own, without a simulation around it
        job = card.Job(torch.device("cpu"), "tiny", 2, 16)
        known = {kind: card.losses_on_cpu(job, kind) for kind in ("none", "nf4", "int8")}
        monkeypatch.setattr(card, "losses_on_cpu", lambda _, kind: known[kind])
    with simulated():
        assert card.main(["--parts", part, "--out", str(page), *SMALL]) == 0
    text = page.read_text(encoding="utf-8")
    assert f"## {part}" in text
    assert "| NO |" not in text
    assert text.count("\n|") > 3


def test_what_is_not_well_is_said_and_the_other_parts_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "card.md"
    monkeypatch.setitem(card.PARTS, "operators", lambda job: iter([("a", "well"), ("x", "NO")]))

    def broken(job: card.Job) -> None:
        """It breaks."""
        raise ZeroDivisionError("in a part")

    monkeypatch.setitem(card.PARTS, "training", broken)
    with simulated():
        asked = ["--parts", "operators,training,environment", "--out", str(page), *SMALL]
        assert card.main(asked) == 1
    text = page.read_text(encoding="utf-8")
    assert "ZeroDivisionError: in a part" in text
    assert "free for tensors" in text


def test_without_a_card_nothing_is_measured(tmp_path: Path) -> None:
    assert card.main(["--out", str(tmp_path / "card.md")]) == 2
    assert not (tmp_path / "card.md").exists()
