"""The steps of a sweep: all members take one together, until each has come to its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from peftkit.errors import PeftkitError
from peftkit.events import Listener, Notice, Progress, Saved, ignore
from peftkit.execution.signals import Interrupted, StopRequest
from peftkit.execution.state import StepFacts
from peftkit.report.live import LiveReport
from peftkit.run.prepare import Prepared
from peftkit.run.results import save_result
from peftkit.sweeps.joint import JointLearner
from peftkit.sweeps.layers import Mounted
from peftkit.sweeps.members import Member
from peftkit.sweeps.outcomes import Outcome, write_outcomes
from peftkit.tasks.token_task import TokenTask
from peftkit.train.checkpoints.checkpoint import Checkpoints
from peftkit.train.diagnosis import NonFiniteError
from peftkit.train.run import Run


@dataclass(slots=True)
class Live:
    """A member that is being trained."""

    member: Member
    ready: Prepared
    run: Run
    outcome: Outcome
    report: LiveReport


def has_checkpoints(member: Member) -> bool:
    """Tell whether there is something to resume."""
    return bool(Checkpoints(member.recipe.train.output_dir, keep=1).steps())


class Loop:
    """Steps all members until each has come to its end."""

    def __init__(
        self,
        live: dict[str, Live],
        mounted: Mounted,
        out: Path,
        outcomes: Mapping[str, Outcome],
        stop: StopRequest,
        on_event: Listener,
    ) -> None:
        self.live, self.routing, self.out = live, mounted.routing, out
        self.outcomes, self.stop, self.on_event = outcomes, stop, on_event
        first = next(iter(live.values()))
        runs = {name: one.run for name, one in live.items()}
        self.learner = JointLearner(runs, cast(TokenTask, first.ready.task), mounted)
        self.num_steps = max(one.run.num_steps for one in live.values())

    def start(self, resume: bool) -> None:
        """Start or resume every member."""
        for name, one in self.live.items():
            with self.routing.alone(name):
                again = resume and has_checkpoints(one.member)
                one.run.start(() if again else None)
                learner = one.run.learner
                learner.state.plan = replace(learner.plan, compile=False)
                learner.state.measured = True
                one.run.say(one.run.header())
                if again:
                    one.run.after_step()

    def go(self) -> None:
        """Train until no member is left, or a signal comes."""
        self._end_those_done()
        while self.live:
            began = time.perf_counter()
            asked = {name: one.run.next_step() for name, one in self.live.items()}
            done = self.learner.step(asked)
            seconds = (time.perf_counter() - began) / len(asked)
            for name, facts in done.items():
                self._stepped(self.live[name], facts, asked[name][1], seconds)
            self._end_those_done()
            if self.stop.signum:
                write_outcomes(self.out, self.outcomes)
                raise Interrupted(
                    self.stop.signum,
                    f"all members of {self.out} are saved. Go on with --resume.",
                )
            if self.live:
                step = max(one.outcome.steps for one in self.live.values())
                self.on_event(Progress(f"Training {len(self.live)} adapters", step, self.num_steps))

    def _stepped(
        self, one: Live, facts: StepFacts | NonFiniteError, rate: float, seconds: float
    ) -> None:
        """Let a member count its step, evaluate and save; what breaks ends this member alone."""
        try:
            with self.routing.alone(one.member.name):
                if isinstance(facts, NonFiniteError):
                    raise one.run.non_finite_error(facts)
                one.run.record_step(facts, rate, seconds)
                one.run.after_step()
        except Interrupted:
            pass  # it is saved; the others are to be, too
        except PeftkitError as error:
            self._fail(one, error)
        self._note(one)

    def _note(self, one: Live) -> None:
        state = one.run.learner.state
        one.outcome.steps, one.outcome.loss = state.step, state.loss
        one.outcome.eval_loss, one.outcome.seconds = state.eval_loss, state.step_seconds

    def _fail(self, one: Live, error: PeftkitError) -> None:
        one.outcome.state, one.outcome.error = "failed", str(error)
        one.run.stopped(error)
        self.on_event(Notice(f"{one.member.name} has stopped, the others go on. {error}"))
        self._leave(one)

    def _end_those_done(self) -> None:
        for one in [one for one in self.live.values() if one.run.is_done]:
            with self.routing.alone(one.member.name):
                result = one.run.result()
                self._note(one)
                save_result(one.member.recipe, one.ready, result, on_event=ignore)
            one.report.write()
            self.on_event(Saved("adapter", one.member.recipe.train.output_dir))
            one.outcome.state = "done"
            self._leave(one)

    def _leave(self, one: Live) -> None:
        """Take a member out of the steps: the next ones have room for the others."""
        self.live.pop(one.member.name)
        one.run.learner.optimizer.zero_grad(set_to_none=True)
        write_outcomes(self.out, self.outcomes)
