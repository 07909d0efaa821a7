"""A run, from its first step or the checkpoint it resumes to its last step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from peftkit.base.sharding import is_sharded
from peftkit.data.pack import View
from peftkit.errors import PeftkitError, RunError
from peftkit.events import (
    Event,
    Listener,
    Notice,
    RunDone,
    RunStarted,
    RunStopped,
    StepDone,
    ignore,
)
from peftkit.execution import rng
from peftkit.execution.plan import ExecutionPlan
from peftkit.execution.signals import Interrupted, StopRequest
from peftkit.execution.state import Result, StepFacts
from peftkit.execution.world import World
from peftkit.kernels.device import gpu_of, keep_freed_memory, trim_malloc
from peftkit.model.modes import (
    begin_training,
    modes_kept,
    prepared_for_training,
    refresh_layouts,
)
from peftkit.quant.audit import audit
from peftkit.settings import TrainConfig
from peftkit.tasks.lockstep import LockstepForward
from peftkit.tasks.training import GenerationEvaluator, Sampler, SetupContext, Task
from peftkit.train.batches import StatelessSampler
from peftkit.train.checkpoints.identity import identity_of
from peftkit.train.diagnosis import NonFiniteError, written_error
from peftkit.train.memory.prepare import plan_memory_and_compile
from peftkit.train.metrics import (
    peak_bytes,
    recording,
)
from peftkit.train.model import device_name, paths, same_everywhere, trainable_parameters
from peftkit.train.optim import learning_rate
from peftkit.train.rollouts import Rollouts
from peftkit.train.saving import Saver, TrainableWeights, Weights
from peftkit.train.trainer import Trainer
from peftkit.train.validation import Evaluator, Validation

GIVE_BACK_EVERY = 16
"""On a CPU, steps between calls that return fragmented memory to the system."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a run trains, on what, and how.

    Attributes:
        weights: What checkpoints hold of the model; by default its trainable parameters.
        identity: What a resumed run must have in common with the saved one, as plain JSON.
        on_event: Hears what happens, on the main process alone.
        plan: How it is carried out; by default as the model is found.
        watch: Asked for samples and metrics of generated answers, on the main process.
        sampler: Has the model answer prompts, for a task that learns from its own answers.
    """

    model: nn.Module
    task: Task
    train_rows: Sequence[Any]
    eval_rows: Sequence[Any]
    config: TrainConfig
    weights: Weights | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    on_event: Listener = ignore
    plan: ExecutionPlan | None = None
    watch: GenerationEvaluator | None = None
    sampler: Sampler | None = None


class Run:
    """One run, on one of its processes: what `fit` does, step by step."""

    def __init__(self, job: Job, stop: StopRequest) -> None:
        self.model, self.config, self.stop = job.model, job.config, stop
        self.rows, self.eval_rows = job.train_rows, job.eval_rows
        model, config, task, train_rows = job.model, job.config, job.task, job.train_rows
        parameters = trainable_parameters(model)
        self.ranks = ranks = World(next(iter(parameters.values())).device, config.context_parallel)
        self.order = StatelessSampler(
            len(train_rows), config.rows_per_step(ranks.dp_size), config.seed
        )
        self.num_steps = config.num_steps(len(train_rows), ranks.dp_size)
        if ranks.context is not None:
            task = task.in_parts(ranks.context)
        needed = is_sharded(model) or ranks.context is not None
        in_step = LockstepForward(ranks, task.bucket_key, train_rows, job.eval_rows, needed=needed)
        plan = job.plan and replace(job.plan, autocast=ranks.precision or "")
        self.learner = Trainer(model, task, parameters, config, ranks, stop, in_step, plan)
        evaluator = Evaluator(self.learner, job.eval_rows)
        known = identity_of(
            config,
            train_rows,
            job.eval_rows,
            ranks.world_size,
            job.identity,
            sharded=is_sharded(model),
        )
        self.sampler, self.rollouts = job.sampler, None
        if task.makes_rows:
            self.rollouts = Rollouts(self.learner, job.sampler, config.seed, self.say)
        judged = self.rollouts if self.rollouts and self.rollouts.task.evaluates_answers else None
        self.validation = Validation(
            self.learner, evaluator, self.num_steps, job.watch, self.say, judged
        )
        weights = job.weights or TrainableWeights(model)
        self.saver = Saver(self.learner, self.order, config, weights, known, self.say)
        self._agreed_stop = 0
        self._is_going = False  # from its header to its end
        self._listeners = [job.on_event] if self.ranks.is_main else []
        self._began = time.perf_counter()  # less what earlier parts of the run took
        self._resumed = (0, 0.0)  # steps and seconds of these

    def say(self, event: Event) -> None:
        """Send an event to all listeners."""
        for listener in self._listeners:
            listener(event)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Put the model into training mode, and leave it as it was; record events meanwhile."""
        blocks, wish = self.learner.blocks, self.config.gradient_checkpointing
        try:
            if wish != "auto":
                blocks.set_activations(self.learner.plan.activations)
            with self.recorded(), modes_kept(self.model), ExitStack() as stack:
                begin_training(self.model)
                with self.ranks.autocast():  # layers are laid out for what they will compute in
                    stack.enter_context(prepared_for_training(self.model, self.learner.asked))
                with self.learner.task.training(self.model, self.learner.asked):
                    yield
        finally:
            self.learner.feed.close()
            blocks.restore()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Let metrics.jsonl and the trackers hear of events meanwhile."""
        with ExitStack() as stack:
            for user in self._listeners[:1]:  # on the main process
                self._listeners += stack.enter_context(recording(self.config, user))
            try:
                yield
            except BaseException as error:
                self.stopped(error)
                raise

    def stopped(self, error: BaseException) -> None:
        """Tell that the run ends here, unless it came to its end before or never began."""
        asked = isinstance(error, Interrupted | KeyboardInterrupt | SystemExit)
        if self._is_going:
            state = "stopped" if asked else "failed"
            self.say(RunStopped(self.learner.state.step, state, str(error)))
        self._is_going = False

    def train(self, resume: Sequence[str] | None) -> Result:
        """Train to the end.

        Args:
            resume: None to start; else resume, with these changes allowed.
        """
        self.start(resume)
        plan_memory_and_compile(self.learner, self.rows, self.num_steps, self.say)
        self._give_back()
        self.say(self.header())
        if resume is not None:
            self.after_step()  # a run that was stopped during an evaluation owes it still
        else:
            self.before_steps()
        while not self.is_done:
            self._step()
            self.after_step()
        return self.result()

    @property
    def is_done(self) -> bool:
        """Whether the last step is done, or early stopping has seen enough."""
        return self.validation.is_over

    def start(self, resume: Sequence[str] | None) -> None:
        """Seed the generators, or take up the newest checkpoint; see `train`."""
        device = self.ranks.device
        if (gpu := gpu_of(device)) is not None:
            gpu.restart(device)
        else:
            keep_freed_memory(large_ones=not self.learner.blocks.are_streamed)
        self.ranks.wait()  # nobody writes before everybody has looked at the folder
        if resume is None:
            rng.seed_everything(self.config.seed, self.ranks.rank)
            self.ranks.broadcast_parameters(same_everywhere(self.model))
        else:
            self.saver.resume(resume)
        refresh_layouts(self.model)
        if self.ranks.is_main:
            self.saver.checkpoints.remove_leftovers()
        self.saver.check_disk()
        self._begin()
        state = self.learner.state
        self._began = time.perf_counter() - state.seconds
        self._resumed = (state.step, state.seconds)

    def _begin(self) -> None:
        """Let the task compute what it needs once; that leaves the generators as they are."""
        before = rng.capture(self.ranks.device)
        context = SetupContext(
            rows=View([self.rows, self.eval_rows]),
            num_train=len(self.rows),
            ranks=self.ranks,
            in_step=self.learner.in_step,
            folder=self.config.output_dir,
            stop=self.stop,
            say=self.say,
            sampler=self.sampler,
        )
        self.learner.task.setup(self.model, context)
        rng.restore(before, self.ranks.device)

    def _give_back(self) -> None:
        if not self.learner.plan.on_gpu:
            trim_malloc()

    def _step(self) -> None:
        rows, rate = self.next_step()
        began = time.perf_counter()
        try:
            facts = self._learn(rows, rate)
        except NonFiniteError as error:
            raise self.non_finite_error(error) from None
        self.record_step(facts, rate, time.perf_counter() - began)

    def _learn(self, rows: list[Any], rate: float) -> StepFacts:
        step = self.learner.state.step
        if self.rollouts is None:
            return self.learner.step(rows, rate, self._rows_of(step + 1))
        try:
            return self.rollouts.step(rows, self._indices(step), rate)
        except PeftkitError:  # of a reward function: nothing that was learnt is lost
            if step and self.saver.last_step != step:
                self.saver.save()
            raise

    def next_step(self) -> tuple[list[Any], float]:
        """Return this process's rows of the next step, and its learning rate."""
        step = self.learner.state.step
        return self._rows_of(step), learning_rate(step, self.num_steps, self.config)

    def _rows_of(self, step: int) -> list[Any]:
        """Return this process's rows of a step; none after the last."""
        if step >= self.num_steps:
            return []
        return [self.rows[index] for index in self._indices(step)]

    def _indices(self, step: int) -> list[int]:
        return self.order.step_indices(step, self.ranks.dp_rank, self.ranks.dp_size)

    def record_step(self, facts: StepFacts, rate: float, seconds: float) -> None:
        """Count a step that was done, and tell of it."""
        state = self.learner.state
        state.step += 1
        if state.step % GIVE_BACK_EVERY == 0:
            self._give_back()
        state.loss = facts.loss
        state.num_tokens += facts.num_tokens
        state.step_seconds += seconds
        self._agreed_stop = facts.stop
        if facts.notice:
            self.say(Notice(f"Step {state.step}: {facts.notice}"))
        self.say(self._done(facts, rate, seconds))

    def before_steps(self) -> None:
        """Evaluate and sample before the first step, as far as asked for."""
        if self.config.eval_before and self.eval_rows:
            self.evaluate()
        if self.config.sample_every is not None:
            self.validation.sample()

    def after_step(self) -> None:
        """Evaluate, sample, save and stop, as far as each is due."""
        state = self.learner.state
        due = self._is_due(self.config.eval_every) and state.evaluated_step != state.step
        if due and self.eval_rows and not self._stopping:
            self.evaluate()
        every = self.config.sample_every
        if every is not None and self._is_due(every) and not self._stopping:
            self.validation.sample()
        best = state.best_step == state.step
        if not (best or self._is_due(self.config.save_every) or self._stopping):
            return  # and a signal that comes right now is one of the next step
        if self.saver.resumed_step != state.step:
            state.seconds = time.perf_counter() - self._began
            self.saver.save()
        if self.is_done:
            self._agreed_stop = self.ranks.max(self.stop.signum)
        if self._stopping:
            raise Interrupted(
                self._stopping,
                f"stopped after step {state.step} of {self.num_steps}; saved {self.saver.last}. "
                "Go on with --resume.",
            )

    def evaluate(self) -> None:
        """Evaluate, and emit EvalDone."""
        if not self.validation.evaluate():
            self._agreed_stop = self.ranks.max(self.stop.signum)

    @property
    def _stopping(self) -> int:
        """The signal to stop on, or 0; several processes only stop once they agree."""
        return self.stop.signum if self.ranks.world_size == 1 else self._agreed_stop

    def _is_due(self, every: int | None) -> bool:
        step = self.learner.state.step
        return self.is_done or (every is not None and step % every == 0)

    def non_finite_error(self, error: NonFiniteError) -> RunError:
        """Write diagnosis.json and return the error that ends the run."""
        rank = "" if self.ranks.is_main else f"rank{self.ranks.rank}-"
        return written_error(error.diagnosis, self.config.output_dir, rank, self.saver.last)

    def header(self) -> RunStarted:
        """Return the run's header; it is going from here on."""
        self._is_going = True
        return RunStarted(
            num_steps=self.num_steps,
            start_step=self.learner.state.step,
            num_rows=len(self.rows),
            num_trainable=sum(p.numel() for p in self.learner.parameters.values()),
            num_parameters=audit(self.model).num_parameters,
            device=device_name(self.ranks.device, self.ranks.world_size),
            paths=paths(self.model, self.learner.blocks, self._told_paths()),
            plan=self.learner.plan.describe(),
        )

    def _told_paths(self) -> dict[str, str]:
        """Return how the task computes what, and in which precision if the launcher said it."""
        told = dict(self.learner.task.paths)
        if self.ranks.precision is not None:
            scaled = ", loss scaled" * self.learner.scale.needed
            told["precision"] = f"{self.ranks.precision} by autocast{scaled}"
        return told

    def _done(self, facts: StepFacts, rate: float, seconds: float) -> StepDone:
        state = self.learner.state
        step_before, seconds_before = self._resumed
        per_step = (time.perf_counter() - self._began - seconds_before) / (state.step - step_before)
        return StepDone(
            step=state.step,
            num_steps=self.num_steps,
            epoch=state.step / self.order.steps_per_epoch,
            loss=facts.loss,
            learning_rate=rate,
            grad_norm=facts.grad_norm,
            num_tokens=state.num_tokens,
            tokens_per_second=facts.num_tokens / seconds,
            peak_bytes=peak_bytes(self.ranks.device),
            seconds_left=per_step * (self.num_steps - state.step),
            figures=facts.figures,
        )

    def result(self) -> Result:
        """Return the result, and emit RunDone."""
        seconds = time.perf_counter() - self._began
        state, folder = self.learner.state, self.saver.checkpoints.folder
        metrics = {
            "loss": state.loss,
            "num_tokens": float(state.num_tokens),
            "tokens_per_second": state.num_tokens / max(state.step_seconds, 1e-9),
            "peak_bytes": float(peak_bytes(self.ranks.device)),
        }
        metrics |= {f"eval_{name}": value for name, value in self.validation.figures.items()}
        if state.best_loss is not None:
            metrics["best_eval_loss"] = state.best_loss
        best = None if state.best_step is None else folder / f"step-{state.best_step}"
        last = folder / f"step-{state.step}"
        self._is_going = False
        self.say(RunDone(state.step, seconds, metrics))
        is_main = self.ranks.is_main
        return Result(state.step, seconds, metrics, last, state.best_step, best, is_main)
