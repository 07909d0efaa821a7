"""Runs whose failures are collected soon, and one that nothing interrupts."""

import gc
from types import SimpleNamespace

import pytest
import torch

from peftkit.execution import out_of_memory
from tests.helpers.toy import Played, Toy, play


@pytest.fixture(autouse=True)
def quick_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a failed attempt leaves the youngest alone: all that is here takes a second."""
    monkeypatch.setattr(out_of_memory, "gc", SimpleNamespace(collect=lambda: gc.collect(0)))


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """An uninterrupted run without evaluations."""
    torch.manual_seed(0)
    return play(tmp_path_factory.mktemp("whole"), model=Toy(dropout=0.3), eval_every=None)
