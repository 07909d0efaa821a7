"""Memory runs out: smaller micro-batches learn the same from the same rows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from peftkit.adapter import attach, prepared_for_training
from peftkit.errors import PeftkitError, RunError
from peftkit.events import StepDone
from peftkit.execution.out_of_memory import is_compile_error, is_out_of_memory
from peftkit.methods.lora import LoRA
from peftkit.tasks.run_hooks import RunHooks
from peftkit.train import loop as loop_module
from tests.helpers.families import FAMILIES
from tests.helpers.toy import (
    COUNTED,
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

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB."
CPU = "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"


class Small(ToyTask):
    """Memory for so many rows, and so many tokens in a row, at once; half done when it runs out."""

    def __init__(
        self,
        rows: int = 10**9,
        tokens: int = 10**9,
        *,
        in_training: bool = True,
        error: BaseException | None = None,
    ) -> None:
        self.rows, self.tokens, self.in_training = rows, tokens, in_training
        self.error = error or RuntimeError(CUDA)
        self.order: list[int] = []

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        height, width = batch["input_ids"].shape
        loss = super().loss(model, batch)
        if model.training == self.in_training and (height > self.rows or width > self.tokens):
            raise self.error
        if model.training:
            self.order += batch["input_ids"][:, 0].tolist()
        return loss


@pytest.mark.parametrize(
    "error", [RuntimeError(CUDA), torch.OutOfMemoryError(CUDA), RuntimeError(CPU), MemoryError()]
)
def test_memory_runs_out_in_many_words(error):
    assert is_out_of_memory(error)


def test_a_run_short_of_memory_is_the_run_with_smaller_batches(tmp_path):
    task, small = Small(3), Small()

    def played(folder: str, task: Small, rows: int) -> Played:
        size = {"batch_size": rows, "gradient_accumulation": 16 // rows}
        return play(tmp_path / folder, model=Toy(0.3), task=task, rows=make_rows(40), **size)

    run, reference = played("a", task, 16), played("b", small, 2)
    assert run.error is None
    assert run.losses == reference.losses
    assert same(run.weights, reference.weights)
    assert task.order == small.order
    (notice,) = run.notices
    assert notice == (
        "Step 1: Memory ran out. From now on: 2 rows at a time instead of 16. "
        "The rows of a step stay the same."
    )


def test_running_out_of_memory_leaves_no_partial_gradient(tmp_path):
    rows = make_rows(14)
    task = Small()
    plain = task.loss
    calls = -COUNTED

    def once(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:  # the second of the two batches of step 2
            raise RuntimeError(CUDA)
        return plain(model, batch)

    task.loss = once  # type: ignore[method-assign]
    run = play(tmp_path / "a", task=task, rows=rows, batch_size=2)
    reference = play(tmp_path / "b", rows=rows, batch_size=2)
    assert [text.split(":")[0] for text in run.notices] == ["Step 2"]
    # the same gradients from step 2 on, summed in another order
    assert run.losses == pytest.approx(reference.losses, rel=1e-4)


def test_a_resumed_run_stays_with_the_smaller_batches(tmp_path):
    settings: dict[str, Any] = {"batch_size": 4, "gradient_accumulation": 1}
    whole = play(tmp_path / "a", model=Toy(0.3), task=Small(1), **settings)
    play(tmp_path / "b", model=Toy(0.3), task=Small(1), on_event=crash_after(5), **settings)
    rest = play(tmp_path / "b", model=Toy(0.3), task=Small(1), resume=True, **settings)
    assert rest.notices == []
    assert rest.losses == whole.losses[5:]
    assert same(rest.weights, whole.weights)


def test_another_batch_size_that_is_allowed_counts_from_the_resume_on(tmp_path):
    heights: list[int] = []

    class Measuring(ToyTask):
        def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
            heights.append(len(batch["labels"]))
            return super().loss(model, batch)

    play(tmp_path, task=Small(1), on_event=crash_after(5), batch_size=2)
    play(tmp_path, task=Measuring(), resume=True, batch_size=4, allow_changes=["train"])
    assert max(heights) == 4


def test_one_row_too_large_is_an_error_that_says_how_long_a_row_may_be(tmp_path):
    run = play(tmp_path, task=Small(tokens=6), rows=make_rows(14))
    texts = "fit into memory: train.jsonl:", "Rows of 6 tokens would fit.", "data.max_length"
    run.failed(RunError, *texts)


def test_if_no_row_fits_the_error_says_so(tmp_path):
    run = play(tmp_path, task=Small(tokens=2), rows=make_rows(14))
    run.failed(RunError, "Not even the shortest row, of ")


def test_an_evaluation_short_of_memory_shrinks_alone(tmp_path):
    rows = make_rows(7, first=50)
    task = Small(1, in_training=False)
    run = play(tmp_path / "a", task=task, eval_rows=rows, batch_size=4, gradient_accumulation=1)
    reference = play(tmp_path / "b", eval_rows=rows, batch_size=4, gradient_accumulation=1)
    (notice,) = run.notices
    assert "1 rows at a time instead of 4" in notice
    assert run.losses == reference.losses
    assert run.result.metrics["eval_loss"] == pytest.approx(
        reference.result.metrics["eval_loss"], rel=1e-6
    )


def test_an_eval_row_too_large_is_an_error(tmp_path):
    task = Small(tokens=4, in_training=False)
    run = play(tmp_path, task=task, eval_rows=make_rows(7, first=49))
    run.failed(RunError, "Rows of 4 tokens would fit.")


def test_other_errors_are_not_taken_for_a_lack_of_memory(tmp_path):
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not is_out_of_memory(error)
    assert play(tmp_path, task=Small(1, error=error)).error is error
    assert not is_out_of_memory(ValueError("out of memory"))


# --- recomputed activations


class SmallUnlessRecomputed(Small):
    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        self.rows = 2 if model.blocks[0].gradient_checkpointing else 0
        return super().loss(model, batch)


def test_recomputing_changes_no_number_and_is_undone(tmp_path):
    runs: list[Played] = []
    calls: tuple[list[int], list[int]] = [], []
    for recomputes in (False, True):
        model = Deep(dropout=0.3, in_blocks=0.3)
        count = partial(lambda number, *_: number.append(1), calls[recomputes])
        model.blocks[0].drop.register_forward_pre_hook(count)
        folder = tmp_path / str(recomputes)
        runs.append(play(folder, model=model, gradient_checkpointing=recomputes))
        assert not model.blocks[0].gradient_checkpointing
    assert runs[0].losses == runs[1].losses
    assert same(runs[0].weights, runs[1].weights)
    assert len(calls[0]) < len(calls[1])


def test_auto_recomputes_once_not_one_row_fits_and_then_tries_whole_batches_again():
    step = step_of(Deep(), SmallUnlessRecomputed())
    facts = step(make_rows(8), 0.1)
    assert step.blocks.activations == "recompute"
    assert step.plan.activations == "recompute"
    assert step.plan.rows == 2
    assert (
        "activations are recomputed (train.gradient_checkpointing), 2 rows at a time"
        in facts.notice
    )


def test_a_run_that_had_to_recompute_does_so_after_a_resume_unless_told_otherwise():
    first, second = (step_of(Deep(), ToyTask()) for _ in range(2))
    first.use(replace(first.plan, activations="recompute"))
    second.load_state(first.run.state, is_exact=True)
    assert second.blocks.activations == "recompute"
    explicit = step_of(Deep(), ToyTask(), gradient_checkpointing=False)
    explicit.load_state(first.run.state, is_exact=True)
    assert explicit.plan.activations == "keep"


def test_recomputing_a_model_without_marked_blocks_is_refused(tmp_path):
    play(tmp_path, gradient_checkpointing=True).failed(
        PeftkitError, "Toy has no blocks marked for it"
    )


def test_rows_without_a_length_do_not_hide_the_error(tmp_path):
    class Pairs(Small):
        def collate(self, rows: Sequence[Any]) -> Mapping[str, Tensor]:
            return super().collate([Row(ids, labels, "") for ids, labels in rows])

    pairs = [(row.input_ids, row.labels) for row in make_rows(14)]
    run = play(tmp_path, task=Pairs(0), rows=pairs)
    run.failed(RunError, "does not fit into memory")


def test_fragmented_memory_is_released(tmp_path, monkeypatch):
    given: list[int] = []
    steps: list[int] = []
    monkeypatch.setattr(loop_module, "GIVE_BACK_EVERY", 3)
    monkeypatch.setattr(loop_module, "trim_malloc", lambda: given.append(len(steps)))
    played = play(
        tmp_path,
        on_event=lambda event: steps.append(1) if isinstance(event, StepDone) else None,
        max_steps=7,
    )
    assert played.error is None
    assert given == [0, 2, 5]  # a step is told of after it


def test_a_failed_attempt_leaves_nothing_of_its_graph_in_groups_of_layers():
    model = FAMILIES["llama"]().train()
    attach(model, LoRA(rank=2))
    storages: list[StorageWeakRef] = []
    model.model.layers[0].register_forward_hook(
        lambda *seen: storages.append(StorageWeakRef(seen[-1].untyped_storage()))
    )

    class Full(nn.Module):
        """The activation between gate and up, which does not fit the first time."""

        left_behind: bool | None = None

        def forward(self, x: Tensor) -> Tensor:
            if len(storages) == 1:
                raise RuntimeError(CUDA)
            if self.left_behind is None:
                self.left_behind = not storages[0].expired()
            return nn.functional.silu(x)

    model.model.layers[1].mlp.act_fn = full = Full()
    step = step_of(model, CausalTask())
    rows = [Row(tuple(range(3, 12)), (0,) * 9, "") for _ in range(4)]
    with prepared_for_training(model, step.plan):
        facts = step(rows, 1e-3)
    assert full.left_behind is False
    assert "2 rows at a time instead of" in facts.notice


def test_a_kernel_that_does_not_launch_is_an_error_of_the_compiler():
    launch = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})
    assert is_compile_error(launch("shared memory"))
    assert is_compile_error(RuntimeError("Triton Error [CUDA]: invalid argument"))
    assert not is_compile_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


class RunsOut(RunHooks, ToyTask):
    """Memory runs out in one of the phases of step 4, for one row too."""

    def __init__(self, phase: str, error: BaseException) -> None:
        self.phase, self.error, self.step = phase, error, 0

    def before_step(self, rows: Any, run: Any) -> Any:
        self.step = run.state.step
        self._fail("before")
        return super().before_step(rows, run)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        torch.rand(())  # as dropout draws
        self._fail("training" if model.training else "eval")
        return super().loss(model, batch)

    def _fail(self, phase: str) -> None:
        if phase == self.phase and self.step == (4 if phase == "eval" else 3):
            raise self.error


@pytest.mark.parametrize("phase", ["before", "training", "eval"])
@pytest.mark.parametrize("error", [RuntimeError(CUDA), MemoryError()])
def test_a_run_out_of_memory_is_saved(tmp_path, phase, error):
    dropout = 0.0 if phase == "training" else 0.3  # a resumed run keeps the smaller batches
    how: dict[str, Any] = {"save_every": 50, "eval_every": 4}
    run = play(tmp_path, model=Toy(dropout=dropout), task=RunsOut(phase, error), **how)
    assert run.error is error or isinstance(run.error, RunError)
    assert run.saved == ["step-4" if phase == "eval" else "step-3"]
    task = RunsOut("", error)
    resumed = play(tmp_path, model=Toy(dropout=dropout), task=task, resume=True, **how)
    whole = play(tmp_path / "b", model=Toy(dropout=dropout), task=task, **how)
    assert resumed.error is None
    close = {"atol": 1e-6, "rtol": 1e-5} if phase == "training" else {"atol": 0.0, "rtol": 0.0}
    for name, value in whole.weights.items():
        torch.testing.assert_close(resumed.weights[name], value, **close)


def test_memory_that_runs_out_in_the_optimizer_saves_no_half_step(tmp_path):
    def fail(event: Any) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            optimizers[0].register_step_pre_hook(refuse)

    def refuse(*_: object) -> None:
        raise RuntimeError(CUDA)

    optimizers: list[Any] = []
    plain = torch.optim.Optimizer.__init__

    with pytest.MonkeyPatch.context() as patch:

        def seen(self: Any, *args: Any, **named: Any) -> None:
            plain(self, *args, **named)
            optimizers.append(self)

        patch.setattr(torch.optim.Optimizer, "__init__", seen)
        run = play(tmp_path, save_every=50, eval_every=None, on_event=fail)
    run.failed(RunError, "adamw_8bit")
    assert not run.saved
