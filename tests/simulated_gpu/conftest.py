"""The simulated card, and the same work on it and on the CPU."""

from collections.abc import Iterator

import pytest
import torch

from tests.simulated_gpu.real import REAL, needs_simulation
from tests.simulated_gpu.simulation import simulated
from tests.simulated_gpu.tensors import Card


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a real card leave out what only a simulation knows."""
    if not REAL:
        return
    if not torch.cuda.is_available():
        pytest.exit("PEFTKIT_REAL_CARD=1, and torch finds no CUDA device.", returncode=2)
    for item in items:
        if "simulated_gpu" in item.nodeid and needs_simulation(item):
            item.add_marker(pytest.mark.skip(reason="only a simulation knows"))


@pytest.fixture(autouse=True)
def _card_still_works() -> Iterator[None]:
    """End a real card's process at the first illegal access, after which all tests would fail."""
    yield
    if REAL:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(f"The card fails: {error}. Run each file in a process of its own.", 3)


@pytest.fixture
def card() -> Iterator[Card]:
    """An H200 that computes on the CPU, while the test runs."""
    with simulated() as found:
        yield found
