"""The simulated card refuses what a real one refuses, and sees what makes the host wait."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.simulated_gpu.real import only_simulated, real_card
from tests.simulated_gpu.simulation import on_cpu, simulated
from tests.simulated_gpu.tensors import Card

pytestmark = [pytest.mark.needs_simulation, pytest.mark.smoke]


def test_tensors_compute_and_say_where_they_are(card):
    x = torch.arange(6.0, device="cuda").view(2, 3).requires_grad_()
    (x * torch.ones(3).cuda()).square().sum().backward()
    assert x.device == torch.device("cuda", 0)
    assert x.is_cuda
    assert x.grad.is_cuda
    assert torch.equal(x.grad.cpu(), 2 * torch.arange(6.0).view(2, 3))


def test_a_module_is_moved_in_place_and_keeps_its_ties(card):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    kept = module[0].weight
    module.to("cuda")
    assert kept.is_cuda
    assert module[1].weight is module[0].weight is kept
    assert module.to("cpu")[0].weight.device.type == "cpu"


MIXES: dict[str, Callable[[Tensor], object]] = {
    "a sum": lambda x: x + torch.ones(3),
    "a product": lambda x: x @ torch.ones(3, 2),
    "an embedding": lambda x: nn.functional.embedding(torch.tensor([1]), x),
    "an index of floats": lambda x: x.index_put((torch.tensor([0]),), torch.ones(1, 3)),
    "another card": lambda x: x + x.to("cuda:1"),
    "numpy": lambda x: x.numpy(),
    "a card that is not there": lambda x: x.to("cuda:2"),
}


@pytest.mark.parametrize("mix", MIXES)
def test_what_cuda_refuses_is_refused_with_file_and_line(mix):
    with simulated(Card(count=2)), pytest.raises((RuntimeError, TypeError)) as caught:
        MIXES[mix](torch.ones(3, 3, device="cuda"))
    if "two devices" in str(caught.value):
        assert "simulated_gpu/test_simulation.py:" in str(caught.value)


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0, 0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x.sum() > 0),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "an index on the CPU": lambda x: x[torch.tensor([0])],
    "a list": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "pageable memory": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "pinned memory, blocking": lambda x: torch.ones(3).pin_memory().to(x.device),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_is_seen_with_file_and_line(card, wait):
    x = torch.ones(3, 3, device="cuda")
    card.reset()
    WAITS[wait](x)
    assert len(card.waits) == 1
    assert card.waits[0].where.startswith("tests/simulated_gpu/test_simulation.py:")


def test_what_need_not_wait_does_not(card):
    x = torch.ones(3, 3, device="cuda")
    card.reset()
    x[0] = 3.0
    y = x[:, torch.tensor([0, 1]).pin_memory().to("cuda", non_blocking=True)] * torch.tensor(2.0)
    torch.full((), 7.0, device="cuda").add_(y.sum()).clamp(min=1)
    assert card.waits == []
    assert card.launches > 5


def test_memory_is_counted_and_runs_out():
    with simulated(Card(memory=10_000)) as card:
        x = torch.ones(500, device="cuda")
        view = x[:10]
        assert card.allocated == torch.cuda.memory_allocated() == 2048
        del x, view
        assert card.allocated == 0
        assert card.peak == 2048
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.ones(5000, device="cuda")


def test_a_copy_on_another_stream_comes_when_it_is_waited_for(card):
    x, stream = torch.ones(3, device="cuda"), torch.cuda.Stream()
    kept = torch.empty(3, pin_memory=True)
    with torch.cuda.stream(stream):
        kept.copy_(x, non_blocking=True)
    assert kept.isnan().all()
    x += 1  # before the copy was waited for: it reads what is there then
    torch.cuda.current_stream().wait_stream(stream)
    assert kept.tolist() == [2.0] * 3


def test_pinned_memory_may_not_change_while_it_is_copied_from(card):
    kept = torch.zeros(3, pin_memory=True)
    moved = kept.to("cuda", non_blocking=True)
    kept.add_(1)
    with pytest.raises(AssertionError, match="pinned memory was overwritten"):
        moved.tolist()
    card.host_tasks.clear()


def test_a_backward_pass_keeps_to_the_card(card):
    x = torch.randn(5, 3, device="cuda", requires_grad=True)
    y = (x * 1).index_select(0, torch.tensor([1, 2], device="cuda")).to("cpu")
    y.square().sum().backward()
    expected = torch.zeros(5, 3)
    expected[1:3] = 2 * on_cpu(x.detach())[1:3]
    assert torch.equal(on_cpu(x.grad), expected)


def test_each_thread_has_a_current_card_of_its_own():
    seen: list[Tensor] = []
    with simulated(Card(count=2)):
        torch.cuda.set_device(1)
        worker = threading.Thread(target=lambda: seen.append(torch.ones(1, device="cuda")))
        worker.start()
        worker.join()
        with torch.cuda.device(0):
            seen.append(torch.ones(1, device="cuda"))
        seen.append(torch.ones(1, device="cuda"))
    assert [tensor.device.index for tensor in seen] == [0, 0, 1]


def test_a_recording_that_breaks_off_leaves_the_thread_on_its_stream(card):
    """As torch.cuda.graph does, whose exit raises before it gives the stream back."""
    before, x = torch.cuda.current_stream(), torch.ones(3, device="cuda")
    with (
        pytest.raises(RuntimeError, match="previous error during capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        x.sum().item()
    assert torch.cuda.current_stream() is not before


def test_a_recording_runs_nothing_until_it_is_replayed(card):
    state, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state.mul_(2)
        state[1:] += 1
    assert on_cpu(state).tolist() == [1, 1, 1]
    graph.replay()
    graph.replay()
    assert on_cpu(state).tolist() == [4, 7, 7]


def test_pinned_memory_is_rounded_up_kept_and_limited(card):
    kept = [torch.empty(300, pin_memory=True)]
    assert card.pinned.held == 2048
    kept.clear()
    kept.append(torch.empty(400, pin_memory=True))
    assert card.pinned.held == 2048  # the same block
    card.pinned.limit = 3000
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.empty(300, pin_memory=True)


def test_a_real_card_answers_what_tests_ask(card):
    """Played by the simulated one: what is asked of torch.cuda, not what a card says."""
    with real_card() as found:
        before = found.allocated
        kept = torch.zeros(1 << 20, device="cuda")
        assert found.allocated - before == found.peak - before == kept.nbytes
        assert found.memory == card.memory
        found.settle()
        found.reset()


USES = """
def helper():
    {}

class Helper:
    def run(self):
        return helper()

@pytest.fixture
def fixture():
    return Helper()

def test_by_a_fixture(fixture):
    pass

def test_alone(card):
    with simulated(), simulated(Card()) as card:
        assert card.peak <= card.memory
    "a list of events"
"""


@pytest.mark.parametrize(
    "use",
    [
        "card.waits",
        "self.card.retries += 1",
        "card.memory = 9",
        "Card(memory=9)",
        "simulated(kernels=counting)",
        "monkeypatch.setattr(torch.cuda.Event, 'finish', None)",
    ],
)
def test_what_uses_a_simulation_is_left_out_on_a_real_card(use):
    uses = {"helper", "Helper", "fixture", "test_by_a_fixture"}
    assert only_simulated(USES.format(use)) == uses
    assert only_simulated(USES.format("card.reset()")) == set()
