"""The training loop: micro-batches and interruptions do not change the weights.

A step's rows depend only on the seed and the step (batches.py), its learning rate only on the step
(optim.py). Checkpoints hold everything else: weights, optimizer, generators, State.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from peftkit.adapter import prepared_for_training, refresh_copies, separate_wrong_groups
from peftkit.errors import EndedTogetherError, PeftkitError
from peftkit.events import Listener, Notice, RunDone, StepDone, ignore
from peftkit.execution import rng
from peftkit.execution.out_of_memory import RetryWatch, is_out_of_memory
from peftkit.execution.signals import Interrupted, stop_requests
from peftkit.execution.state import Result, StepFacts
from peftkit.figures import RECENT_STEPS, recent_mean
from peftkit.formats.folders import set_aside
from peftkit.kernels.device import PINNING, gpu_of, keep_freed_memory, trim_malloc
from peftkit.kernels.fused import TRITON
from peftkit.model.modes import begin_training, modes_kept
from peftkit.settings import TrainConfig
from peftkit.tasks.base import Task
from peftkit.tasks.batches import RowTooLarge
from peftkit.train.batches import StatelessSampler
from peftkit.train.checkpoint import Saver, TrainableWeights, Weights, identity_of
from peftkit.train.diagnosis import NonFiniteError, written_error
from peftkit.train.memory import plan_memory_and_compile
from peftkit.train.metrics import (
    check_services,
    peak_bytes,
    recording,
    reporting_a_stop,
    run_started,
)
from peftkit.train.optim import learning_rate
from peftkit.train.run import Run
from peftkit.train.start import (
    delete_checkpoints,
    locked,
    new_run,
    prepare_output,
    shared_tensors,
)
from peftkit.train.step import Trainer
from peftkit.train.validation import Validation

if TYPE_CHECKING:
    from peftkit.evaluation.drift import Drift
    from peftkit.evaluation.text_watch import TextWatch

GIVE_BACK_EVERY = 16
"""Steps between calls that return free memory to the system or check a GPU's allocator."""


def fit(
    model: nn.Module,
    task: Task,
    train_rows: Sequence[Any],
    eval_rows: Sequence[Any] = (),
    config: TrainConfig | None = None,
    *,
    weights: Weights | None = None,
    identity: Mapping[str, Any] | None = None,
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
            resume=resume,
            overwrite=overwrite,
            allow_changes=allow_changes,
            weights=weights,
            identity=identity or {},
        )


def train(
    run: Run,
    *,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: Sequence[str] = (),
    weights: Weights | None = None,
    identity: Mapping[str, Any],
    watch: TextWatch | None = None,
    drift: Drift | None = None,
) -> Result:
    """Train a run to its end, in a locked folder; see `fit`.

    Args:
        watch: Generates samples and completions during training.
        drift: Measures train.drift.
    """
    if overwrite:
        delete_checkpoints(run.config.output_dir)
        if run.world.is_main and (aside := set_aside(run.config.output_dir)):
            run.say(Notice(f"The previous adapter is in {aside} until the new one is saved."))
    loop = Loop(run, weights or TrainableWeights(run.model), identity, watch, drift)
    with loop.prepared():
        return loop.train(allow_changes if resume else None)


class Loop:
    """Steps, evaluations and checkpoints of a run, on one process."""

    def __init__(
        self,
        run: Run,
        weights: Weights,
        identity: Mapping[str, Any],
        watch: TextWatch | None,
        drift: Drift | None,
    ) -> None:
        self.run, self.config, self.world = run, run.config, run.world
        size = self.world.world_size
        rows_per_step = run.config.rows_per_step(size)
        self.sampler = StatelessSampler(len(run.rows), rows_per_step, run.config.seed)
        self.num_steps = run.config.num_steps(len(run.rows), size)
        self.trainer = Trainer(run)
        self.validation = Validation(self.trainer, self.num_steps, watch, drift)
        self.saver = Saver(self.trainer, self.sampler, weights, identity_of(run, identity))
        self._agreed_stop = 0
        self._retries = RetryWatch(self.world.device)
        self._has_trained = False
        self._wrong_groups = ""
        self._began = time.perf_counter()  # less the seconds before a resume
        self._resumed = (0, 0.0)  # steps and seconds before a resume

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Prepare the model for training and record events within the context."""
        from peftkit.train.qat import quantization_aware

        trainer, model = self.trainer, self.run.model
        try:
            trainer.use(trainer.plan)
            with recording(self.run), modes_kept(model), ExitStack() as stack:
                begin_training(model)
                with self.world.autocast():  # the dtype of the adapters' copies
                    stack.enter_context(prepared_for_training(model, trainer.fitting.requested))
                    self._wrong_groups = separate_wrong_groups(model)
                quantizing = quantization_aware(trainer, self.num_steps)
                self._begin_quantization = stack.enter_context(quantizing)
                with self.run.task.training(model, trainer.fitting.requested):
                    yield
        finally:
            trainer.prefetcher.close()
            trainer.blocks.restore()

    def train(self, resume: Sequence[str] | None) -> Result:
        """Train to the end.

        Args:
            resume: Changes that a resumed run allows; None: start from the first step.
        """
        self._start(resume)
        plan_memory_and_compile(self.trainer, self.num_steps)
        self._give_back()
        with reporting_a_stop(self.run):
            from peftkit.train.fallbacks import fallbacks_of

            for fallback in fallbacks_of(self.trainer, self._wrong_groups):
                self.run.say(fallback.notice)
            self.run.say(run_started(self.trainer, self.num_steps))
            if resume is not None:
                self._after_step()  # evaluates now if the run was stopped during an evaluation
            elif self.config.eval_before and self.run.eval_rows:
                self._evaluate()
            if resume is None and self.config.sample_every is not None:
                self.validation.sample()
            while not self.validation.is_over:
                self._step()
                self._after_step()
            result = self._result()
            if not (self._has_trained or self.run.state.num_tokens):
                self.run.say(Notice(f"No step was trained: {self.run.hooks.why_nothing}"))
        self.run.say(RunDone(result.step, result.seconds, result.metrics))
        return result

    def _start(self, resume: Sequence[str] | None) -> None:
        """Seed the generators, or load the newest checkpoint; see `train`."""
        run, device = self.run, self.world.device
        if (gpu := gpu_of(device)) is not None:
            gpu.restart(device)
        else:
            keep_freed_memory(large_ones=not self.trainer.blocks.are_streamed)
        self.world.wait()  # all processes read the folder before any writes to it
        if resume is None:
            rng.seed_everything(self.config.seed, self.world.rank)
            self.world.broadcast_parameters(shared_tensors(run.model))
        else:
            self.saver.resume(resume)
        refresh_copies(run.model)
        if self.world.is_main:
            self.saver.checkpoints.remove_leftovers()
        self.saver.check_disk()
        before = rng.capture(device)
        run.hooks.setup(run)
        rng.restore(before, device)
        self._began = time.perf_counter() - run.state.seconds
        self._resumed = (run.state.step, run.state.seconds)

    def _give_back(self) -> None:
        """Return a CPU's free memory to the system; report a GPU that is nearly full."""
        if not self.trainer.plan.on_gpu:
            trim_malloc()
        elif self.run.state.step and (problem := self._retries.report(GIVE_BACK_EVERY)):
            self.run.say(Notice(problem))

    def _step(self) -> None:
        run = self.run
        self._begin_quantization()
        run.indices = self._indices(run.state.step)
        rows = [run.rows[index] for index in run.indices]
        rate = learning_rate(run.state.step, self.num_steps, self.config)
        began = time.perf_counter()
        try:
            facts = self._take_steps(rows, rate)
        except NonFiniteError as error:
            rank = "" if self.world.is_main else f"rank{self.world.rank}-"
            folder = self.config.output_dir
            raise written_error(error.diagnosis, folder, rank, self.saver.last) from None
        if reason := run.hooks.stop_reason(facts.figures):
            run.state.is_ended = True
            run.say(Notice(reason))
        self._record(facts, rate, time.perf_counter() - began)

    def _indices(self, step: int) -> list[int]:
        """Return the indices of this process's rows in a step; none after the last step."""
        if step >= self.num_steps:
            return []
        return self.sampler.step_indices(step, self.world.rank, self.world.world_size)

    def _take_steps(self, rows: Sequence[Any], rate: float) -> StepFacts:
        """Take the optimizer steps that the task makes of rows, possibly none."""
        run, trainer = self.run, self.trainer
        run.figures = {}
        with self._saving_on(PeftkitError), trainer.blocks.eagerly():  # user code may raise
            batches = run.hooks.before_step(rows, run)
        if not batches:
            signum = self.world.max(run.stop.signum)
            return StepFacts(0.0, run.figures, 0.0, num_tokens=0, stop=signum, notice="")
        self._has_trained = True
        began = time.perf_counter()
        coming: Sequence[Any] | None = None
        # if `before_step` makes rows, the next ones may not exist yet
        if trainer.prefetcher.is_ahead:
            coming = [run.rows[index] for index in self._indices(run.state.step + 1)]
            coming = coming if batches[0] is rows else run.hooks.rows_ahead(coming, run)
        with self._saving_on(RowTooLarge):
            facts = trainer.step(batches[0], rate, coming)
        for batch in batches[1:]:
            facts = trainer.step(batch, rate, coming)
        if run.figures:
            run.figures["learn_seconds"] = time.perf_counter() - began
        return replace(facts, figures={**run.figures, **facts.figures})

    @contextmanager
    def _saving_on(self, *errors: type[Exception]) -> Iterator[None]:
        """Save the completed steps if one of these errors, or a lack of memory, ends the run.

        Processes save together, so all of them have to raise the error.
        """
        try:
            yield
        except Exception as error:
            step, is_alone = self.run.state.step, self.world.world_size == 1
            is_reason = isinstance(error, errors) or (is_alone and is_out_of_memory(error))
            if is_reason and step and self.saver.last_step != step:
                self.saver.save()
            raise

    def _record(self, facts: StepFacts, rate: float, seconds: float) -> None:
        run, state = self.run, self.run.state
        state.step += 1
        if state.step % GIVE_BACK_EVERY == 0:
            self._give_back()
        state.recent_losses = (*state.recent_losses, facts.loss)[-RECENT_STEPS:]
        state.num_tokens += facts.num_tokens
        state.step_seconds += seconds
        self._agreed_stop = facts.stop
        if facts.notice:
            run.say(Notice(f"Step {state.step}: {facts.notice}"))
        for problem in filter(None, (TRITON.report(), PINNING.report())):
            run.say(Notice(problem))
        first_step, seconds_before = self._resumed
        elapsed = time.perf_counter() - self._began - seconds_before
        run.say(
            StepDone(
                step=state.step,
                num_steps=self.num_steps,
                epoch=state.step / self.sampler.steps_per_epoch,
                loss=facts.loss,
                learning_rate=rate,
                grad_norm=facts.grad_norm,
                num_tokens=state.num_tokens,
                tokens_per_second=facts.num_tokens / seconds,
                peak_bytes=peak_bytes(self.world.device),
                seconds_left=elapsed / (state.step - first_step) * (self.num_steps - state.step),
                figures=facts.figures,
            )
        )

    def _after_step(self) -> None:
        """Evaluate, sample, save and stop, if due."""
        run, state = self.run, self.run.state
        is_due = self._is_due(self.config.eval_every) and state.evaluated_step != state.step
        is_alone = self.world.world_size == 1
        with self._saving_on(PeftkitError if is_alone else EndedTogetherError):
            if is_due and run.eval_rows and not self._stopping:
                self._evaluate()
            every = self.config.sample_every
            if every is not None and self._is_due(every) and not self._stopping:
                self.validation.sample()
        is_best = state.best_step == state.step
        if not (is_best or self._is_due(self.config.save_every) or self._stopping):
            return  # a later signal stops the next step
        if self.saver.resumed_step != state.step:
            state.seconds = time.perf_counter() - self._began
            self.saver.save()
        if self.validation.is_over:
            self._agreed_stop = self.world.max(run.stop.signum)
        if self._stopping:
            raise Interrupted(
                self._stopping,
                f"stopped after step {state.step} of {self.num_steps}; saved {self.saver.last}. "
                "Continue with --resume.",
            )

    def _evaluate(self) -> None:
        if not self.validation.evaluate():
            self._agreed_stop = self.world.max(self.run.stop.signum)

    @property
    def _stopping(self) -> int:
        """The signal to stop on, or 0; several processes stop once they agree."""
        return self.run.stop.signum if self.world.world_size == 1 else self._agreed_stop

    def _is_due(self, every: int | None) -> bool:
        step = self.run.state.step
        return self.validation.is_over or (every is not None and step % every == 0)

    def _result(self) -> Result:
        seconds = time.perf_counter() - self._began
        state, folder = self.run.state, self.saver.checkpoints.folder
        metrics = {
            "loss": recent_mean(state.recent_losses) or 0.0,
            "epochs": state.step / self.sampler.steps_per_epoch,
            "num_tokens": float(state.num_tokens),
            "tokens_per_second": state.num_tokens / max(state.step_seconds, 1e-9),
            "peak_bytes": float(peak_bytes(self.world.device)),
        }
        metrics |= {f"eval_{name}": value for name, value in self.validation.figures.items()}
        if state.best_loss is not None:
            metrics[self.config.name_of_best_loss] = state.best_loss
        best = None if state.best_step is None else folder / f"step-{state.best_step}"
        last = folder / f"step-{state.step}"
        is_main = self.world.is_main
        return Result(state.step, seconds, metrics, last, state.best_step, best, is_main)
