"""Memory on a card: what offloading holds, and what is given up when memory runs out."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.plan import Measured, planned, reckoner_of
from peftkit.errors import RunError
from peftkit.execution import plan
from peftkit.execution.plan import Activations
from peftkit.forward import offload
from peftkit.forward.blocks import Blocks
from peftkit.forward.offload import Offload
from peftkit.train import loop, memory
from peftkit.train.fitting import choose
from peftkit.train.step import Step
from tests.helpers.families import llama
from tests.simulated_gpu import same
from tests.simulated_gpu.same import make_model, train
from tests.simulated_gpu.simulation import on_cpu, simulated
from tests.simulated_gpu.tensors import Card


def gradients(model: Any, device: str, steps: int = 2) -> dict[str, Tensor]:
    ids = torch.arange(96).remainder(290).view(3, 32) + 5
    torch.manual_seed(3)
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        for rows in (ids, ids[:1, :7]):
            rows = rows.to(device)
            model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
    named = model.named_parameters()
    return {n: on_cpu(p.grad).clone() for n, p in named if p.grad is not None}


@pytest.mark.parametrize("quantize", ["nf4"])
def test_offloaded_gradients_are_those_of_kept_activations(quantize):
    expected = gradients(make_model("cpu", quantize)[0].train(), "cpu")
    for way in ("recompute", "offload"):
        with simulated() as card:
            model = make_model("cuda", quantize)[0].train()
            blocks = Blocks(model)
            blocks.set_activations(way)  # type: ignore[arg-type]
            found = gradients(model, "cuda")
            assert card.recorded_streams == 0
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.needs_simulation  # cuBLAS' workspace is larger than the model
@pytest.mark.parametrize("quantize", ["none", pytest.param("nf4", marks=pytest.mark.slow)])
def test_plan_of_a_gpu_is_what_the_card_then_has(quantize):
    config = llama(num_hidden_layers=5 if quantize == "none" else 9)
    steps = reckoner_of(config, quantize, on_gpu=True)
    ways: tuple[tuple[Activations, int], ...] = (
        ("keep", 256),
        ("recompute", 512),
        ("offload", 768),  # of a shorter row the optimizer's step would take the most
        ("offload", 2048),  # the inputs of all blocks would take half as much again
    )
    ways = ways if quantize == "nf4" else ways[1::2]
    with simulated() as card:
        measured = Measured(config, quantize, device="cuda")
        for way, length in ways:
            told = planned(steps, way, length)
            with measured.steps(way, length) as step:
                gc.collect()
                card.reset()
                step()
                assert told == pytest.approx(card.peak, rel=0.02), (way, length)
            measured.optimizer.state.clear()


def chain(offloaded: Offload, num_blocks: int, size: int = 3) -> Tensor:
    hidden = torch.full((2, size), 0.1, device="cuda", requires_grad=True) * 1
    for number in range(num_blocks):
        hidden = offloaded(lambda x, n=number: torch.tanh(x * (1 + 0.1 * n)), hidden)
    return hidden


@pytest.mark.smoke
@pytest.mark.parametrize("num_blocks", [1, 3, 7])
def test_a_chain_of_blocks_gets_its_inputs_back(card, num_blocks):
    x = torch.full((2, 3), 0.1, requires_grad=True)
    expected = x
    for number in range(num_blocks):
        expected = torch.tanh(expected * (1 + 0.1 * number))
    expected.sum().backward()
    offloaded = Offload()
    for _ in range(2):
        leaf = torch.full((2, 3), 0.1, device="cuda", requires_grad=True)
        hidden = leaf
        for number in range(num_blocks):
            hidden = offloaded(lambda x, n=number: torch.tanh(x * (1 + 0.1 * n)), hidden)
        hidden.sum().backward()
        torch.testing.assert_close(on_cpu(leaf.grad), x.grad)  # CUDA's tanh rounds otherwise


@pytest.mark.smoke
def test_two_inputs_at_most_are_on_the_card(card):
    size = 1024
    offloaded, each = Offload(), 2 * size * 4
    chain(offloaded, 2, size).sum().backward()
    gc.collect()
    base = card.allocated
    hidden = chain(offloaded, 12, size)
    assert card.allocated - base <= 4 * each  # the leaf, the last two inputs, the output
    card.reset()
    hidden.sum().backward()
    assert card.peak - base <= 9 * each  # gradients and what one block saves
    del hidden


@pytest.mark.smoke
def test_offloaded_inputs_share_pinned_memory(card):
    """A power of two for each of 12 inputs of 4.5 MiB would be 96 MiB; they take two chunks."""
    size, num_blocks = (9 << 20) // 16, 12
    offloaded = Offload()
    for _ in range(3):
        hidden = chain(offloaded, num_blocks, size)
        hidden.sum().backward()
        del hidden
    assert card.pinned.held == 2 << 25
    chain(offloaded, 2, 3).sum().backward()  # small inputs reuse the chunks
    assert card.pinned.held == 2 << 25


def test_inputs_that_do_not_fit_one_chunk_come_back(card, monkeypatch):
    """Pages of several chunks, some of them adjacent, are one input."""
    monkeypatch.setattr(offload, "PAGE", 64)
    monkeypatch.setattr(offload, "CHUNK", 256)
    memory = offload.PinnedPages()
    stream = offload.TransferStream(torch.device("cuda", 0))
    stream.memory = memory
    values = [torch.randn(size) for size in (40, 3, 200, 64)]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 0, 1, 3)):
        copies = [stream.send(values[n].to("cuda")) for n in order]
        del copies[1]  # its pages lie between those of others
        kept = [order[0], *order[2:]]
        copies.append(stream.send(values[2].to("cuda")))
        for n, copy in zip([*kept, 2], copies, strict=True):
            back, arrived = stream.fetch(copy)
            torch.cuda.current_stream().wait_event(arrived)
            assert torch.equal(on_cpu(back), values[n])
    assert max(len(copy.pieces) for copy in copies) > 1
    # two lists of copies are alive at a time: 54 pages, in chunks of four
    assert memory.num_bytes == card.pinned.held == 14 * 256


@pytest.mark.smoke
@pytest.mark.parametrize("forgotten", ["arriving", "leaving"])
def test_a_missing_wait_is_detected(card, forgotten, monkeypatch):
    """The simulation would show a stream that is not waited for."""
    stream = torch.cuda.Stream
    if forgotten == "arriving":
        monkeypatch.setattr(torch.cuda.Event, "finish", lambda self: None)
    else:
        monkeypatch.setattr(stream, "drain", lambda self: self._tasks.clear())
    leaf = torch.full((2, 3), 0.1, device="cuda", requires_grad=True)
    hidden = leaf
    offloaded = offload.Offload()
    for _ in range(3):
        hidden = offloaded(torch.tanh, hidden)
    hidden.sum().backward()
    assert not bool(on_cpu(leaf.grad).isfinite().all())


def test_a_card_that_is_full_recomputes_before_it_takes_rows_one_by_one(tmp_path):
    peaks, losses = {}, {}
    for keep in ("auto", True):
        with simulated() as card:
            heard, _ = train("cuda", tmp_path, gradient_checkpointing=keep)
            peaks[keep], losses[keep] = card.peak, heard.losses
    between = (peaks["auto"] + 2 * peaks[True]) // 3
    with simulated(Card(memory=between)):
        found, _ = train("cuda", tmp_path)
    assert len(found.notices) == 1
    assert "activations are recomputed" in found.notices[0]
    assert "rows at a time" not in found.notices[0]
    assert found.losses == pytest.approx(losses["auto"], rel=1e-4)


@pytest.mark.needs_simulation  # a CUDA context takes more
def test_memory_that_is_given_is_planned_on_a_card(tmp_path):
    expected, _ = train("cpu", tmp_path)
    with simulated():
        found, _ = train("cuda", tmp_path, memory=0.0012)
    assert "of train.memory's 0.0012 GB" in found.notices[0]
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)


def test_offloaded_inputs_are_planned_within_main_memory(tmp_path, monkeypatch):
    calls: list[tuple[Any, Any]] = []

    def noted(*args: Any, **named: Any) -> Any:
        calls.append((args, named))
        return choose(*args, **named)

    config = llama(num_hidden_layers=5)  # of two blocks, both inputs are on the card
    monkeypatch.setitem(same.FAMILIES, "deep", lambda: LlamaForCausalLM(config))
    monkeypatch.setattr(memory, "choose", noted)
    monkeypatch.setattr(memory, "free_bytes", lambda: 1_000_000)
    with simulated():
        expected, _ = train("cuda", tmp_path, family="deep")
        (_, costs, _, longest), named = calls[0]
        per_token = 5 * config.hidden_size * 4
        most = named["most_offloaded"]  # rows are padded by up to a tenth
        assert 0.9 * 0.8 * 1_000_000 / per_token < most <= 0.8 * 1_000_000 / per_token
        offload = dict(costs)["offload"]
        monkeypatch.setattr(memory, "_available", lambda *_: 1.01 * longest * offload)
        found, _ = train("cuda", tmp_path, family="deep")
        monkeypatch.setattr(memory, "free_bytes", lambda: per_token * longest)  # 0.8 of it is used
        with pytest.raises(RunError) as caught:
            train("cuda", tmp_path, family="deep")
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    assert "recomputed from main memory" in found.notices[0]
    assert f"Main memory has room for the inputs of {most:,} tokens" in found.notices[0]
    assert "Main memory has no room" in str(caught.value)


def test_a_row_that_fits_in_tiles_is_trained(tmp_path, monkeypatch):
    """The run counts what tiles spare; otherwise it refuses rows that its plan says would fit."""
    calls: list[tuple[Any, Any]] = []

    def noted(*args: Any, **named: Any) -> Any:
        calls.append((args, named))
        return choose(*args, **named)

    monkeypatch.setattr(plan, "TILE", 4)
    monkeypatch.setattr(memory, "choose", noted)
    with simulated():
        expected, _ = train("cuda", tmp_path)
        (_, costs, _, longest), named = calls[0]
        needed, in_tiles = (min(c for _, c in each) for each in (costs, named["tiled"]))
        assert in_tiles < 0.8 * needed
        between = longest * (needed + in_tiles) / 2
        monkeypatch.setattr(memory, "_available", lambda *_: between)
        found, _ = train("cuda", tmp_path)
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.smoke
def test_main_memory_that_is_not_pinned_is_not_a_card_that_is_full(tmp_path):
    """Without much main memory, or in WSL2, CUDA refuses: "out of memory", of the host."""
    expected, _ = train("cpu", tmp_path)
    with simulated() as card:
        card.pinned.limit = 0
        found, _ = train("cuda", tmp_path)
        leaf = torch.full((2, 3), 0.1, device="cuda", requires_grad=True)
        hidden, offloaded = leaf, Offload()
        for _ in range(3):
            hidden = offloaded(torch.tanh, hidden)
        hidden.sum().backward()
        assert bool(on_cpu(leaf.grad).isfinite().all())
    (notice,) = found.notices
    assert "pageable memory" in notice
    assert "ulimit -l" in notice
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.parametrize(("in_a_step", "num_notices"), [(1, 1), (0, 0)])
def test_a_card_that_is_nearly_full_is_told_once(in_a_step, num_notices, tmp_path, monkeypatch):
    """The run is right and slow: torch releases its cache to serve an allocation."""
    real = Step.__call__

    def counted(*args: Any) -> Any:
        card.retries += in_a_step
        return real(*args)

    monkeypatch.setattr(Step, "__call__", counted)
    monkeypatch.setattr(loop, "GIVE_BACK_EVERY", 3)
    with simulated() as card:
        card.retries = 50  # of looking for a plan
        found, _ = train("cuda", tmp_path, max_steps=9)
    told = [text for text in found.notices if "flushed its cache 3 times" in text]
    assert len(told) == len(found.notices) == num_notices


@pytest.mark.parametrize("way", ["recompute", "offload"])
def test_generators_are_saved_if_used(way, monkeypatch):
    kept: list[bool] = []
    real = torch.utils.checkpoint.checkpoint

    def noted(*args: Any, preserve_rng_state: bool, **how: Any) -> Any:
        kept.append(preserve_rng_state)
        return real(*args, preserve_rng_state=preserve_rng_state, **how)

    for name in ("blocks", "offload"):
        monkeypatch.setattr(f"peftkit.forward.{name}.checkpoint", noted)
    for dropout, expected in ((0.0, [True, True, False, False]), (0.3, [True] * 4)):
        model, _ = make_model("cpu")
        for block in model.model.layers:
            block.mlp.act_fn = torch.nn.Sequential(block.mlp.act_fn, torch.nn.Dropout(dropout))
        Blocks(model.train()).set_activations(way)
        kept.clear()
        gradients(model, "cpu", steps=1)
        assert kept == expected
