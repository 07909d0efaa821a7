"""Blocks and experts on their way to a card: two at a time, on a stream of their own."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from peftkit.adapter import attach
from peftkit.base import streaming, transfer
from peftkit.base.load import load_base
from peftkit.base.stored import pack_base
from peftkit.errors import BaseError
from peftkit.forward.blocks import Blocks
from peftkit.methods.lora import LoRA
from peftkit.quant import layers
from tests.helpers.families import ARCHITECTURES, FAMILIES, tiny_tokenizer
from tests.simulated_gpu.simulation import on_cpu, simulated

LAYERS = 4


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(layers, "COPY_SHARE", 0.0)
    monkeypatch.setattr(transfer, "SLOT", 1024)  # of which a block takes several
    monkeypatch.setattr(transfer, "NUM_SLOTS", 3)
    monkeypatch.setattr(streaming, "EXPERT_BYTES", 2 * 32 * 64)  # two matrices (64, 64) in 4 bits
    monkeypatch.setenv("PEFTKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family in ("llama", "mixtral"):
        torch.manual_seed(0)
        config = (FAMILIES | ARCHITECTURES)[family]().config
        config.num_hidden_layers = LAYERS
        found[family] = tmp_path_factory.mktemp(family)
        type(FAMILIES[family]())(config).save_pretrained(found[family])
        tiny_tokenizer().save_pretrained(found[family])
    return found


def steps(folder: Path, device: str, way: str, stored: bool, count: int = 2) -> Iterator[Any]:
    """Yield the model before the first step, and the gradients after each."""
    store = "auto" if stored else "off"
    place = "device" if device == "cpu" else "stream"
    how: dict[str, Any] = {"dtype": "fp32", "quantize": "nf4", "store": store, "device": device}
    model = load_base(str(folder), placement=place, **how).model
    attach(model, LoRA(rank=2, targets=("q", "v")))
    Blocks(model.train()).set_activations(way)  # type: ignore[arg-type]
    yield model
    rows = (torch.arange(48).remainder(290).view(2, 24) + 5).to(device)
    for _ in range(count):
        model.zero_grad(set_to_none=True)
        model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        named = model.named_parameters()
        yield {n: on_cpu(p.grad).clone() for n, p in named if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "way", "stored"),
    [
        pytest.param("llama", "recompute", True, marks=pytest.mark.slow),
        ("llama", "offload", False),
        ("mixtral", "recompute", True),
        pytest.param("mixtral", "offload", False, marks=pytest.mark.slow),
    ],
)
def test_steps_of_a_streamed_base_equal_a_resident_base(folders, family, way, stored):
    if stored:
        pack_base(str(folders[family]), dtype="fp32")
    _, *expected = steps(folders[family], "cpu", "recompute", stored)
    with simulated() as card:
        ran = steps(folders[family], "cuda", way, stored)
        stream = next(ran).block_stream
        found = [next(ran)]
        card.reset()
        before = stream.buffer.bytes_moved
        found += ran
        waits = Counter(wait.why for wait in card.waits if "peftkit/base/" in wait.where)
        del waits["Event.synchronize()"]  # of the thread of the ring, for a buffer
        # once for each pass over a block with experts, which have to be known
        assert waits == ({"tolist()": 2 * LAYERS} if family == "mixtral" else {})
        assert not [wait for wait in card.waits if "not pinned" in wait.why]
        assert card.recorded_streams == 0
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, gradient in theirs.items():
            torch.testing.assert_close(mine[name], gradient, atol=1e-5, rtol=1e-4)
    size = sum(t.nbytes for t in stream._blocks[0].host)
    assert stream.buffer.bytes_moved - before == (2 * LAYERS - 4) * size
    assert stream.buffer.most_resident == 2
    assert stream.experts.most_resident == (2 if family == "mixtral" else 0)


@pytest.mark.smoke
@pytest.mark.needs_simulation  # cuBLAS' workspace is larger than the blocks
def test_two_blocks_are_all_that_the_card_holds_of_them(folders):
    with simulated() as card:
        ran = steps(folders["llama"], "cuda", "recompute", False, count=1)
        model = next(ran)
        held, size = card.allocated, model.block_stream._blocks[0].unit.num_bytes
        with torch.no_grad():
            model(input_ids=torch.arange(1)[None].to("cuda") + 5, use_cache=False)
        assert 2 * size <= card.allocated - held < 3 * size


@pytest.mark.needs_simulation  # a real copy may be in time
@pytest.mark.parametrize("stored", [False, True])
def test_a_missing_wait_is_detected(folders, stored, monkeypatch):
    """The simulation would show copies that are not waited for, and so does a real run."""
    if stored:
        pack_base(str(folders["llama"]), dtype="fp32")
    monkeypatch.setattr(transfer.CopyStream, "wait", lambda self, arrival: None)
    with simulated(), pytest.raises(BaseError, match="change on their way"):
        list(steps(folders["llama"], "cuda", "recompute", stored, count=1))
    monkeypatch.setattr(streaming, "_has_bits_of", lambda copy, host: True)
    with simulated():
        _, gradients = steps(folders["llama"], "cuda", "recompute", stored, count=1)
    assert not all(bool(gradient.isfinite().all()) for gradient in gradients.values())


def test_a_unit_goes_through_a_ring_that_is_smaller(card):
    host = [torch.arange(n, dtype=torch.float32) for n in (1500, 3, 777)]
    host.append(torch.tensor(3.5))
    unit = transfer.Unit(0, host)
    shelf = transfer.DeviceBuffer(transfer.CopyStream(torch.device("cuda", 0)))
    for copy, tensor in zip(unit.views(shelf.take(unit)), host, strict=True):
        assert torch.equal(on_cpu(copy), tensor)
    assert card.pinned.held == transfer.NUM_SLOTS * transfer.SLOT
    assert shelf.bytes_moved == sum(t.nbytes for t in host) < unit.num_bytes


def test_weights_share_pinned_memory_instead_of_being_rounded_up_each(card):
    """torch pins powers of two: 41 MB would take 64."""
    sizes = [41_000, 1_300, 70_000, 33_000, 3] * 40
    tensors = [torch.randn(n) for n in sizes]
    expected = [tensor.clone() for tensor in tensors]
    assert transfer.PinnedArena().pin(tensors)
    total = sum(tensor.nbytes for tensor in tensors)
    assert total <= card.pinned.held < 1.25 * total
    assert all(tensor.is_pinned() for tensor in tensors)
    for tensor, values in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, values)


def test_mapped_weights_are_pinned_if_main_memory_has_room(folders, monkeypatch):
    """The second run opens the base from the cache; it is as fast as the first one."""
    pack_base(str(folders["llama"]), dtype="fp32")
    _, expected = steps(folders["llama"], "cpu", "recompute", True, count=1)
    numbers = []
    for room in (1 << 30, 30_000, 0):
        with simulated() as card:
            monkeypatch.setattr(
                transfer, "free_bytes", lambda room=room, card=card: room - card.pinned.held
            )
            ran = steps(folders["llama"], "cuda", "recompute", True, count=1)
            units = [block.unit for block in next(ran).block_stream._blocks]
            numbers.append(sum(unit.is_pinned for unit in units))
            assert card.pinned.held <= room / 2
            found = next(ran)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
    assert numbers[0] == LAYERS > numbers[1] > numbers[2] == 0


def test_a_streamed_base_is_packed_on_the_card(folders, card):
    model = next(steps(folders["llama"], "cuda", "recompute", False))
    assert card.operators["quantize_4bit"] == LAYERS * 7
    host = model.block_stream._blocks[0].host
    assert all(tensor.device.type == "cpu" for tensor in host)


def test_an_unpinnable_streamed_base_uses_the_ring_buffer(folders):
    _, expected = steps(folders["llama"], "cpu", "recompute", False, count=1)
    with simulated() as card:
        card.pinned.limit = 3 * transfer.SLOT
        _, gradients = steps(folders["llama"], "cuda", "offload", False, count=1)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-4)
