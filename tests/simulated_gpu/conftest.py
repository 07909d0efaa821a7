"""The simulated card, and the same work on it and on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulated_gpu.simulation import simulated
from tests.simulated_gpu.tensors import Card


@pytest.fixture
def card() -> Iterator[Card]:
    """An H200 that computes on the CPU, while the test runs."""
    with simulated() as found:
        yield found
