"""The training loop: micro-batches and interruptions do not change the weights.

A step's rows depend only on the seed and the step (batches.py), its learning rate only on the step
(optim.py). Checkpoints hold everything else: weights, optimizer, generators, State.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from peftkit.adapter import prepared_for_training, refresh_copies, separate_wrong_groups
from peftkit.errors import EndedTogetherError, PeftkitError
from peftkit.events import Listener, Notice, RunDone, Stage, StepDone, ignore
from peftkit.execution import rng
from peftkit.execution.signals import Interrupted, stop_requests
from peftkit.execution.state import Result, State, StepFacts
from peftkit.execution.world import Rows
from peftkit.figures import RECENT_STEPS, recent_mean
from peftkit.formats.folders import set_aside
from peftkit.forward.attention_trials import TRIALS
from peftkit.kernels.device import PINNING, gpu_of, keep_freed_memory, trim_malloc
from peftkit.kernels.fused import TRITON
from peftkit.model.modes import begin_training, modes_kept
from peftkit.settings import TrainConfig
from peftkit.tasks.base import Task
from peftkit.tasks.batches import RowTooLarge
from peftkit.tasks.run_hooks import Run
from peftkit.train.batches import StatelessSampler
from peftkit.train.checkpoint import Saver, TrainableWeights, Weights
from peftkit.train.checkpoint_files import Checkpoints
from peftkit.train.diagnosis import NonFiniteError, written_error
from peftkit.train.memory import plan_memory_and_compile
from peftkit.train.metrics import (
    check_services,
    fallbacks_of,
    peak_bytes,
    recording,
    reporting_a_stop,
    run_started,
)
from peftkit.train.optim import learning_rate
from peftkit.train.resume import identity_of
from peftkit.train.start import delete_checkpoints, locked, new_run, prepare_output, shared_tensors
from peftkit.train.step import Step
from peftkit.train.validation import Validation

if TYPE_CHECKING:
    from peftkit.evaluation.drift import Drift
    from peftkit.evaluation.text_watch import TextWatch

GIVE_BACK_EVERY = 16
"""Steps between calls that return free memory to the system or check a GPU's allocator."""


def fit(
    model: nn.Module,
    task: Task,
    train_rows: Rows,
    eval_rows: Rows = (),
    config: TrainConfig | None = None,
    *,
    weights: Weights | None = None,
    identity: Mapping[str, object] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: Sequence[str] = (),
    on_event: Listener = ignore,
) -> Result:
    """Train the parameters of a model that require a gradient, on the model's device.

    Seeds the generators of python, numpy and torch. Restores the model's train and eval modes.

    Args:
        task: Collates rows to batches, and computes their losses.
        config: By default `TrainConfig()`.
        weights: Saves the model's weights; by default its trainable parameters.
        identity: Further values that a resumed run must share with its checkpoint, as plain JSON.
        resume: Continue from the newest valid checkpoint in config.output_dir.
        overwrite: Delete the checkpoints in config.output_dir.
        allow_changes: Dotted keys of identity, "train" or "rows" that may have changed.
        on_event: Receives the run's events, on the main process only.

    Raises:
        PeftkitError: The input is invalid; RunError: training failed.
        Interrupted: SIGINT or SIGTERM arrived; the run is saved.
    """
    config = config or TrainConfig()
    folder = config.output_dir
    prepare_output(folder, resume=resume, overwrite=overwrite, allow_changes=allow_changes)
    check_services(config)
    with locked(folder), stop_requests() as stop:
        return train(
            new_run(model, task, train_rows, eval_rows, config, stop=stop, on_event=on_event),
            resume=allow_changes if resume else None,
            overwrite=overwrite,
            weights=weights,
            identity=identity or {},
        )


def train(
    run: Run,
    *,
    resume: Sequence[str] | None,
    overwrite: bool,
    identity: Mapping[str, Any],
    weights: Weights | None = None,
    watch: TextWatch | None = None,
    drift: Drift | None = None,
) -> Result:
    """Train a run to its end, in a locked folder; see `fit`.

    Args:
        resume: Changes that a resumed run allows; None: start from the first step.
        watch: Generates samples and completions during training.
        drift: Measures train.drift.
    """
    if overwrite:
        delete_checkpoints(run.config.output_dir)
        if run.world.is_main and (aside := set_aside(run.config.output_dir)):
            run.say(Notice(f"The previous adapter is in {aside} until the new one is saved."))
    run.say(Stage("Trying kernels and memory on the first rows"))
    config, hooks = run.config, run.hooks
    rows_per_step = config.rows_per_step(run.world.world_size)
    sampler = StatelessSampler(len(run.rows), rows_per_step, config.seed)
    step = Step(run)
    validation = Validation(run, step, watch, drift)
    identity, weights = identity_of(run, identity), weights or TrainableWeights(run.model)
    saver = Saver(run, step, sampler, weights, identity)
    with _prepared(run, step) as (begin_quantization, wrong_groups):
        _begin(run, step, saver, resume)
        clock, has_trained = Clock(run.state), run.state.num_tokens > 0
        plan_memory_and_compile(run, step)
        _give_back(run, step)
        with reporting_a_stop(run):
            for fallback in fallbacks_of(run, step.plan, wrong_groups):
                run.say(fallback.notice)
            run.say(run_started(run, step))
            if resume is not None:  # evaluates now if the run was stopped during an evaluation
                if begin_quantization is not None:
                    begin_quantization(run.state.step - 1)
                _do_what_is_due(run, validation, saver, clock)
            elif config.eval_before and run.eval_rows:
                validation.evaluate()
            if resume is None and config.sample_every is not None:
                validation.sample()
            while not run.is_over:
                if begin_quantization is not None:
                    begin_quantization(run.state.step)
                run.indices, run.figures = _indices(run, sampler, run.state.step), {}
                rows = [run.rows[index] for index in run.indices]
                rate = learning_rate(run.state.step, run.num_steps, config)
                began = time.perf_counter()
                with saver.saving_on(PeftkitError), step.eagerly():  # user code may raise
                    batches = hooks.before_step(rows, run)
                if batches:
                    coming = _rows_ahead(run, step, sampler, are_same=batches[0] is rows)
                    facts, has_trained = _take_steps(run, step, saver, batches, rate, coming), True
                else:
                    facts = StepFacts(0.0, run.figures, 0.0, 0, run.agree_to_stop(), "")
                if reason := hooks.stop_reason(facts.figures):
                    run.state.is_ended = True
                    run.say(Notice(reason))
                seconds = time.perf_counter() - began
                _record(run, step, facts, seconds)
                epoch = run.state.step / sampler.steps_per_epoch
                run.say(_step_done(run, facts, rate, epoch, facts.num_tokens / seconds, clock))
                _do_what_is_due(run, validation, saver, clock)
            epochs = run.state.step / sampler.steps_per_epoch
            result = _result(run, validation.figures, epochs, clock.seconds)
            if not has_trained:
                run.say(Notice(f"No step was trained: {hooks.why_nothing}"))
        run.say(RunDone(result.step, result.seconds, result.metrics))
        return result


class Clock:
    """The time of a run, including the time before a resume."""

    def __init__(self, state: State) -> None:
        self._began = time.perf_counter() - state.seconds
        self._first_step, self._seconds_before = state.step, state.seconds

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def seconds_left(self, step: int, num_steps: int) -> float:
        """Return the estimated time of the steps after `step`, by the steps since the start."""
        per_step = (self.seconds - self._seconds_before) / (step - self._first_step)
        return per_step * (num_steps - step)


@contextmanager
def _prepared(run: Run, step: Step) -> Iterator[tuple[Callable[[int], None] | None, str]]:
    """Prepare the model for training and record events within the context.

    Yields the function that begins `train.quantize_for` when it is due (None without it), and the
    result of `separate_wrong_groups`.
    """
    model, plan = run.model, step.fitting.requested
    try:
        step.use(step.plan)
        with recording(run), modes_kept(model), ExitStack() as stack:
            begin_training(model)
            with run.world.autocast():  # the dtype of the adapters' copies
                stack.enter_context(prepared_for_training(model, plan))
                wrong_groups = separate_wrong_groups(model)
            begin_quantization = None
            if run.config.quantize_for != "none":
                from peftkit.train.qat import quantization_aware

                begin_quantization = stack.enter_context(quantization_aware(run, step))
            with run.task.training(model, plan):
                yield begin_quantization, wrong_groups
    finally:
        step.close()


def _begin(run: Run, step: Step, saver: Saver, resume: Sequence[str] | None) -> None:
    """Seed the generators, or load the newest checkpoint; set up the task."""
    device = run.world.device
    if (gpu := gpu_of(device)) is not None:
        gpu.restart(device)
    else:
        keep_freed_memory(large_ones=not step.blocks.are_streamed)
    run.world.wait()  # all processes read the folder before any writes to it
    if resume is None:
        rng.seed_everything(run.config.seed, run.world.rank)
        run.world.broadcast_parameters(shared_tensors(run.model))
    else:
        saver.resume(resume)
    refresh_copies(run.model)
    saver.check_disk()
    before = rng.capture(device)
    run.hooks.setup(run)
    rng.restore(before, device)


def _give_back(run: Run, step: Step) -> None:
    """Return a CPU's free memory to the system; report a GPU that is nearly full."""
    if gpu_of(run.world.device) is None:
        trim_malloc()
    elif run.state.step and (problem := step.retries.report(GIVE_BACK_EVERY)):
        run.say(Notice(problem))


def _indices(run: Run, sampler: StatelessSampler, step: int) -> list[int]:
    """Return the indices of this process's rows in a step; none after the last step."""
    if step >= run.num_steps:
        return []
    return sampler.step_indices(step, run.world.rank, run.world.world_size)


def _rows_ahead(run: Run, step: Step, sampler: StatelessSampler, *, are_same: bool) -> Rows | None:
    """Return the rows that the next step trains on; None: unknown, or not needed in advance.

    Args:
        are_same: Whether the task trains on the sampled rows. Rows that it makes may not exist yet.
    """
    if not step.prefetcher.is_ahead:
        return None
    rows = [run.rows[index] for index in _indices(run, sampler, run.state.step + 1)]
    return rows if are_same else run.hooks.rows_ahead(rows, run)


def _take_steps(
    run: Run, step: Step, saver: Saver, batches: Sequence[Rows], rate: float, coming: Rows | None
) -> StepFacts:
    """Take an optimizer step with each batch of rows; return the facts of the last."""
    began = time.perf_counter()
    try:
        with saver.saving_on(RowTooLarge):
            facts = step(batches[0], rate, coming)
        for batch in batches[1:]:
            facts = step(batch, rate, coming)
    except NonFiniteError as error:
        rank = "" if run.world.is_main else f"rank{run.world.rank}-"
        raise written_error(error.diagnosis, run.config.output_dir, rank, saver.last) from None
    if run.figures:
        run.figures["learn_seconds"] = time.perf_counter() - began
    return replace(facts, figures={**run.figures, **facts.figures})


def _record(run: Run, step: Step, facts: StepFacts, seconds: float) -> None:
    """Add a step to the state, and report what it met."""
    state = run.state
    state.step += 1
    if state.step % GIVE_BACK_EVERY == 0:
        _give_back(run, step)
    state.recent_losses = (*state.recent_losses, facts.loss)[-RECENT_STEPS:]
    state.num_tokens += facts.num_tokens
    state.step_seconds += seconds
    run.agreed_stop = facts.stop
    if facts.notice:
        run.say(Notice(f"Step {state.step}: {facts.notice}"))
    unrecorded = "" if step.passes is None else step.passes.report()
    for problem in filter(None, (TRITON.report(), TRIALS.report(), PINNING.report(), unrecorded)):
        run.say(Notice(problem))


def _step_done(
    run: Run, facts: StepFacts, rate: float, epoch: float, speed: float, clock: Clock
) -> StepDone:
    return StepDone(
        step=run.state.step,
        num_steps=run.num_steps,
        epoch=epoch,
        loss=facts.loss,
        learning_rate=rate,
        grad_norm=facts.grad_norm,
        num_tokens=run.state.num_tokens,
        tokens_per_second=speed,
        peak_bytes=peak_bytes(run.world.device),
        seconds_left=clock.seconds_left(run.state.step, run.num_steps),
        figures=facts.figures,
    )


def _do_what_is_due(run: Run, validation: Validation, saver: Saver, clock: Clock) -> None:
    """Evaluate, sample, save and stop, if due."""
    config, state = run.config, run.state
    is_due = run.is_due(config.eval_every) and state.evaluated_step != state.step
    with saver.saving_on(PeftkitError if run.world.world_size == 1 else EndedTogetherError):
        if is_due and run.eval_rows and not run.stopping:
            validation.evaluate()
        if config.sample_every and run.is_due(config.sample_every) and not run.stopping:
            validation.sample()
    is_best = state.best_step == state.step
    if not (is_best or run.is_due(config.save_every) or run.stopping):
        return  # a later signal stops the next step
    if saver.last_step != state.step:
        state.seconds = clock.seconds
        saver.save()
    if run.is_over:
        run.agree_to_stop()
    if run.stopping:
        raise Interrupted(
            run.stopping,
            f"stopped after step {state.step} of {run.num_steps}; saved {saver.last}. "
            "Continue with --resume.",
        )


def _result(run: Run, figures: Mapping[str, float], epochs: float, seconds: float) -> Result:
    state, path_of = run.state, Checkpoints(run.config.output_dir).path
    metrics = {
        "loss": recent_mean(state.recent_losses) or 0.0,
        "epochs": epochs,
        "num_tokens": float(state.num_tokens),
        "tokens_per_second": state.num_tokens / max(state.step_seconds, 1e-9),
        "peak_bytes": float(peak_bytes(run.world.device)),
    }
    metrics |= {f"eval_{name}": value for name, value in figures.items()}
    if state.best_loss is not None:
        metrics[run.config.name_of_best_loss] = state.best_loss
    best = None if state.best_step is None else path_of(state.best_step)
    last, is_main = path_of(state.step), run.world.is_main
    return Result(state.step, seconds, metrics, last, state.best_step, best, is_main)
