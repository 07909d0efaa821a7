"""A step of training waits for the device once, where it reads its figures; nothing else does."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from peftkit.events import Event, StepDone
from peftkit.methods.dora import DoRA
from peftkit.methods.lora import LoRA
from peftkit.tasks.batches import OnDevice
from peftkit.train.batches import BatchPrefetcher
from tests.helpers.families import FAMILIES
from tests.helpers.hybrids import HYBRIDS
from tests.helpers.toy import ToyTask, make_rows
from tests.simulated_gpu import same
from tests.simulated_gpu.same import train
from tests.simulated_gpu.simulation import simulated
from tests.simulated_gpu.tensors import Card, Wait

pytestmark = pytest.mark.needs_simulation

IN_TRANSFORMERS = "transformers/masking_utils.py"
"""It looks whether positions restart, once a forward pass, and asks the device for the answer."""
WAYS: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"gradient_checkpointing": True},
    "packed": {"packed": True},
    "nf4": {"quantize": "nf4"},
    "int8": {"quantize": "int8"},
    "dora": {"method": DoRA(rank=3)},
    "dropout": {"method": LoRA(rank=3, dropout=0.1)},
    "no clipping": {"max_grad_norm": None},
    "hybrid": {"family": "qwen3_5"},
}


class Steps(same.Heard):
    """Keeps the waits of each step apart."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self.card, self.waits, self._before = card, list[list[Wait]](), 0

    def __call__(self, event: Event) -> None:
        """Listen."""
        super().__call__(event)
        if isinstance(event, StepDone):
            self.waits.append(self.card.waits[self._before :])
            self._before = len(self.card.waits)


FAST = ("kept", "packed", "nf4")


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("packed", marks=pytest.mark.smoke),
        *(way for way in FAST if way != "packed"),
        *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way not in FAST),
    ],
)
def test_a_step_waits_only_once(way, card, tmp_path, monkeypatch):
    steps = Steps(card)
    monkeypatch.setattr(same, "Heard", lambda: steps)
    monkeypatch.setitem(FAMILIES, "qwen3_5", HYBRIDS["qwen3_5"])
    train("cuda", tmp_path, eval_every=None, max_steps=3, **WAYS[way])
    for waits in steps.waits[1:]:  # before the first the model is looked at
        ours = [wait for wait in waits if IN_TRANSFORMERS not in wait.where]
        assert len(ours) == 1, "\n".join(map(str, ours))
        assert ours[0].where.startswith("peftkit/train/step.py:")
        assert len(waits) - len(ours) <= 2  # of two micro-batches
    assert way != "hybrid" or "rows: without padding" in str(steps.paths)


@pytest.mark.smoke
def test_a_wait_beyond_that_is_told_with_file_and_line(card, tmp_path):
    loss = torch.ones((), device="cuda")
    card.reset()
    float(loss)
    assert str(card.waits[0]).startswith("_local_scalar_dense() at tests/simulated_gpu/test_waits")


class Collating(ToyTask):
    """Notes when rows are collated."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []

    def collate(self, rows: Sequence[Any]) -> Any:
        self.seen.append(tuple(row.source for row in rows))
        return super().collate(rows)


def test_the_rows_of_the_next_step_are_collated_ahead_and_once(card):
    task, rows = Collating(), make_rows(6)
    feed = BatchPrefetcher(task, torch.device("cuda", 0))
    now, coming = [rows[:2], rows[2:4]], [rows[4:]]
    feed.prefetch(coming)
    first = feed.batches(coming)
    assert len(task.seen) == 1
    assert all(tensor.is_pinned() for batch in first for tensor in batch.values())
    feed.prefetch(coming)
    assert len(feed.batches(now)) == 2  # other rows than expected: memory ran out, perhaps
    feed.close()
    assert task.seen.count(tuple(row.source for row in now[0])) == 1


def test_the_thread_pins_memory_for_the_card_of_its_process():
    seen: list[int] = []

    class Looking(ToyTask):
        def collate(self, rows: Sequence[Any]) -> Any:
            seen.append(torch.cuda.current_device())
            return super().collate(rows)

    with simulated(Card(count=2)):
        feed, parts = BatchPrefetcher(Looking(), torch.device("cuda", 1)), [make_rows(2)]
        feed.prefetch(parts)
        feed.batches(parts)
        feed.close()
    assert seen == [1]


def test_what_draws_random_numbers_is_collated_when_it_is_its_turn(card):
    task = Collating()
    task.collates_ahead = False
    BatchPrefetcher(task, torch.device("cuda", 0)).prefetch([make_rows(2)])
    assert task.seen == []
    BatchPrefetcher(Collating(), torch.device("cpu")).prefetch([make_rows(2)])


def test_an_error_of_the_thread_is_raised_where_the_rows_are_needed(card):
    feed = BatchPrefetcher(Collating(), torch.device("cuda", 0))
    feed.prefetch([[object()]])
    with pytest.raises(AttributeError):
        feed.batches([[object()]])
    feed.close()


@pytest.mark.smoke
def test_only_what_is_read_is_moved(card):
    batch: dict[str, Tensor] = {name: torch.ones(3).pin_memory() for name in ("read", "unread")}
    moved = OnDevice(batch, torch.device("cuda", 0))
    card.reset()
    assert moved["read"].is_cuda
    assert moved["read"] is moved["read"]
    assert card.launches == 1
    assert card.waits == []
    assert set(moved) == set(batch)
