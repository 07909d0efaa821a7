"""What a forward pass saves is counted, and what fits is chosen before the first step."""

import json
import mmap
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from peftkit.adapter import attach
from peftkit.errors import RunError
from peftkit.events import Event, StepDone
from peftkit.execution import environment
from peftkit.execution.environment import used_bytes
from peftkit.execution.plan import Activations
from peftkit.forward.blocks import Blocks
from peftkit.methods.lora import LoRA
from peftkit.train import memory
from peftkit.train.fitting import ActivationBytes, saved_by
from tests.helpers.families import FAMILIES, llama
from tests.helpers.toy import (
    CausalTask,
    Deep,
    Played,
    Row,
    Toy,
    ToyTask,
    crash_after,
    make_rows,
    play,
    same,
    step_of,
)


def counted(model: nn.Module, num_tokens: int) -> ActivationBytes:
    ids = torch.arange(num_tokens)[None] % 31
    return saved_by(lambda: model(ids).sum(), Blocks(model).blocks)


def test_saved_tensors_are_counted_where_they_are_saved():
    saved = counted(Deep(), 5)
    # four tanh's of (5, 8) in each block; the products need the frozen factors alone
    assert saved.inside == (4 * 5 * 8 * 4, 4 * 5 * 8 * 4)
    assert saved.inputs == (5 * 8 * 4, 5 * 8 * 4)
    # outside: x for lora_A, what that gives for lora_B, and their sum for the magnitude
    assert saved.outside == 4 * 5 * (8 + 4 + 31)


def test_counting_keeps_nothing():
    alive: list[Any] = []

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(x)
            alive.append(weakref.ref(y))
            return y * 2

    layers = nn.Sequential(*(Noting() for _ in range(4)))
    x = torch.ones(3, requires_grad=True)
    saved_by(lambda: layers(x).sum(), [])
    assert not any(ref() is not None for ref in alive)


def test_what_is_needed_under_each_way():
    saved = ActivationBytes(outside=7, inside=(100, 300, 200), inputs=(10, 30, 20))
    assert saved.needed("keep") == 7 + 600 + 300
    assert saved.needed("recompute") == 7 + 60 + 2 * 300
    assert saved.needed("offload") == 7 + 50 + 2 * 300
    assert ActivationBytes(7, (), ()).needed("keep") == 7


def test_feed_forward_layers_alone_are_recomputed_one_after_the_other():
    saved = ActivationBytes(7, (100, 300, 200), (10, 30, 20), (80, 200, 160), (), (20, 100, 40))
    assert saved.needed("selective") == 7 + 160 + 2 * 200
    assert replace(saved, tiled=(1, 2, 3)).needed("selective") == 7 + 160 + 100


def test_tiles_spare_the_feed_forward_of_recomputed_blocks():
    saved = ActivationBytes(7, (100, 300, 200), (10, 30, 20), tiled=(80, 200, 160))
    assert saved.needed("keep", 0.25) == saved.needed("keep")
    assert saved.needed("recompute", 0.25) == 7 + 60 + 2 * 150
    assert saved.needed("recompute", 1.0) == 7 + 60 + 2 * 300


def test_what_feed_forward_modules_save_is_counted_within_their_block():
    model = FAMILIES["llama"]()
    attach(model, LoRA(rank=3))
    blocks, ids = Blocks(model), torch.arange(5, 45)[None]
    saved = saved_by(
        lambda: model(input_ids=ids, use_cache=False).logits.sum(),
        blocks.blocks,
        blocks.feed_forward,
    )
    assert len(saved.tiled) == len(saved.inside) == 2
    for tiled, inside in zip(saved.tiled, saved.inside, strict=True):
        assert 0.4 * inside < tiled < 0.9 * inside


def test_the_memory_in_use_is_that_of_this_process():
    before = used_bytes(torch.device("cpu"))
    with mmap.mmap(-1, 32 << 20) as pages:  # past torch, which may use freed memory again
        pages.write(b"x" * (32 << 20))
        assert 30 << 20 < used_bytes(torch.device("cpu")) - before < 70 << 20


# --- whole runs

ROWS = make_rows(14)  # of 3 to 9 tokens: of 8 or 16 with padding


def bytes_per_token(way: Activations) -> float:
    """Return those of the row of median length, which has 6 tokens of 8."""
    step = step_of(Deep(), ToyTask())
    row = next(row for row in ROWS if len(row.input_ids) == 6)
    return saved_by(lambda: step.loss([row]), step.blocks.blocks).needed(way) / 8


KEEP, RECOMPUTE = bytes_per_token("keep"), bytes_per_token("recompute")


def planned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: float, **changes: Any
) -> Played:
    """Run with so many bytes for activations."""
    monkeypatch.setattr(memory, "_available", lambda *_: num_bytes)
    changes = {"batch_size": 4, "gradient_accumulation": 1, "memory": 1.0, **changes}
    return play(folder, **{"model": Deep(), "rows": ROWS, **changes})


def state_of(folder: Path, step: int = 12) -> dict[str, Any]:
    path = folder / "checkpoints" / f"step-{step}" / "state.json"
    run: dict[str, Any] = json.loads(path.read_text())["run"]
    return run


@pytest.mark.parametrize(
    ("each", "tokens", "way", "words"),
    [
        (1000, None, "keep", "So all activations are kept, of at most 4 rows at a time."),
        (20, 20, "keep", "all activations are kept, of at most 20 tokens at a time. The"),
        (15, 16, "recompute", "So activations are recomputed, of at most 16 tokens at a time"),
    ],
)
def test_the_plan_is_said_and_kept_to(each, tokens, way, words, tmp_path, monkeypatch):
    run = planned(tmp_path, monkeypatch, each * KEEP)
    assert run.error is None
    (notice,) = run.notices
    assert words in notice
    assert "of train.memory's 1 GB for activations" in notice
    state = state_of(tmp_path)
    assert (state["plan"]["tokens"], state["plan"]["activations"]) == (tokens, way)


def test_a_plan_changes_no_more_than_the_order_of_sums(tmp_path, monkeypatch):
    plain = planned(tmp_path / "a", monkeypatch, 1e9, model=Deep())
    small = planned(tmp_path / "b", monkeypatch, 15 * KEEP, model=Deep())
    assert small.losses == pytest.approx(plain.losses, rel=1e-4)


def test_a_resumed_run_keeps_its_memory_plan(tmp_path, monkeypatch):
    whole = planned(tmp_path / "a", monkeypatch, 15 * KEEP)
    planned(tmp_path / "b", monkeypatch, 15 * KEEP, on_event=crash_after(5))
    rest = planned(tmp_path / "b", monkeypatch, 1e9, resume=True)
    assert rest.losses == whole.losses[5:]
    assert same(rest.weights, whole.weights)
    assert rest.notices == []


def test_another_memory_budget_is_another_plan(tmp_path, monkeypatch):
    planned(tmp_path, monkeypatch, 15 * KEEP, on_event=crash_after(5))
    refused = planned(tmp_path, monkeypatch, 1e9, resume=True, memory=2.0)
    assert "train.memory: 1.0 -> 2.0" in str(refused.error)
    rest = planned(tmp_path, monkeypatch, 1e9, resume=True, memory=2.0, allow_changes=["train"])
    assert "all activations are kept, of at most 4 rows" in rest.notices[-1]


def test_where_no_row_fits_it_is_told_before_training(tmp_path, monkeypatch):
    run = planned(tmp_path, monkeypatch, 10 * RECOMPUTE)
    run.failed(RunError)
    assert run.losses == []
    text = str(run.error)
    assert "The longest row, train.jsonl:14, has 9 tokens." in text
    assert "B if activations are recomputed." in text
    assert "Rows of 10 tokens would fit" in text
    kept = planned(tmp_path, monkeypatch, 15 * KEEP, gradient_checkpointing=False)
    assert "Rows of 15 tokens would fit" in str(kept.error)


def test_auto_takes_a_share_of_what_is_free_on_a_cpu(tmp_path, monkeypatch):
    settings: dict[str, Any] = {"batch_size": 4, "gradient_accumulation": 1, "rows": ROWS}
    plenty = play(tmp_path / "a", model=Deep(), **settings)
    assert plenty.notices == []
    assert state_of(tmp_path / "a")["plan"]["tokens"] is None
    trained = sum(p.numel() * 12 for p in Deep().parameters() if p.requires_grad)
    free = (20 * KEEP + trained) / memory.AUTO_SHARE + 1
    monkeypatch.setattr(environment, "free_bytes", lambda: free)
    little = play(tmp_path / "b", model=Deep(), **settings)
    (notice,) = little.notices
    assert "B of free memory for activations" in notice
    assert state_of(tmp_path / "b")["plan"]["tokens"] == 20
    assert little.losses == pytest.approx(plenty.losses, rel=1e-4)


def test_counting_before_the_first_step_leaves_no_trace(tmp_path):
    class Normed(Toy):
        def __init__(self) -> None:
            super().__init__(dropout=0.3)
            self.norm = nn.BatchNorm1d(31)  # trained, so that it learns its means too

        def forward(self, ids: Tensor) -> Tensor:
            return self.norm(super().forward(ids).transpose(1, 2)).transpose(1, 2)

    model = Normed()
    play(tmp_path, model=model, max_steps=3, eval_every=None)
    assert int(model.norm.num_batches_tracked) == 6, "3 steps of 2 batches"


def test_what_is_planned_for_a_transformer_covers_what_its_batches_save(monkeypatch):
    torch.manual_seed(0)
    model = FAMILIES["llama"]()
    attach(model, LoRA(rank=3, dropout=0.1))
    rows = [Row(tuple(range(3, 3 + n)), (0,) * n, "") for n in (5, 12, 30, 40, 64)]
    step = step_of(model, CausalTask(), memory=1.0, max_steps=1)
    monkeypatch.setattr(memory, "_available", lambda *_: 2_000_000)
    model.train()
    step.run.rows = rows
    memory.plan_memory_and_compile(step.run, step)
    assert step.plan.tokens is not None
    parts = step.run.micro_batches(rows)
    assert 1 < len(parts) < len(rows)
    for part in parts:
        saved = saved_by(lambda: step.loss(part), step.blocks.blocks)  # noqa: B023
        assert saved.needed(step.plan.activations) <= 2_000_000


def test_memory_between_two_modes_recomputes_half_of_the_blocks_also_after_a_resume(monkeypatch):
    rows, found = [Row(tuple(range(3, 67)), (0,) * 64, "")] * 2, []
    modes: tuple[Activations, ...] = ("keep", "selective", "recompute")
    for number in range(3):
        torch.manual_seed(0)
        model = LlamaForCausalLM(llama(num_hidden_layers=6))
        attach(model, LoRA(rank=3, dropout=0.1))
        step = step_of(model.train(), CausalTask(), memory=1.0, max_steps=1)
        saved = memory._saved(step.run, step, rows[0])
        assert saved is not None
        costs = [saved.needed(mode) for mode in modes]
        free = 2 * costs[0] if number == 0 else sum(costs[number - 1 : number + 1]) / 2 + 64
        step.run.rows = rows
        monkeypatch.setattr(memory, "_available", lambda *_, free=free: int(free))
        memory.plan_memory_and_compile(step.run, step)
        expected = modes[number], 3 if number else None
        assert (step.plan.activations, step.plan.num_recomputed) == expected
        resumed = step_of(model, CausalTask(), memory=1.0, max_steps=1)
        resumed.load_state(step.run.state, is_exact=True)
        assert (resumed.blocks.activations, resumed.blocks.num_recomputed) == expected
        torch.manual_seed(1)
        facts = resumed(rows[:1], 0.1)
        found.append((facts.loss, facts.grad_norm))
    assert found[0] == found[1] == found[2]


def test_streamed_blocks_are_recomputed_under_auto(tmp_path):
    class Stream:
        def around(self, block: nn.Module) -> AbstractContextManager[None]:
            return nullcontext()

    model = Deep()
    model.block_stream = Stream()  # type: ignore[assignment]
    recomputed: list[bool] = []

    def on_event(event: Event) -> None:
        if isinstance(event, StepDone):
            recomputed.append(model.blocks[0].gradient_checkpointing)

    run = play(tmp_path, model=model, max_steps=2, on_event=on_event)
    assert run.error is None
    assert recomputed == [True, True], "kept activations would hold the weights of all blocks"
