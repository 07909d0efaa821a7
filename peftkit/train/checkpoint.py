"""Save and resume a run: its weights, optimizer, generators and state between two steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from peftkit.errors import CheckpointError, DiskFullError
from peftkit.events import Notice, Saved
from peftkit.execution import rng
from peftkit.execution.out_of_memory import is_out_of_memory
from peftkit.execution.state import state_from_json
from peftkit.files.disk import read_json, write_json
from peftkit.files.tensors import read_tensors, write_tensors
from peftkit.tasks.run_hooks import Run
from peftkit.train import checkpoint_files
from peftkit.train.batches import StatelessSampler
from peftkit.train.checkpoint_files import Checkpoint, Checkpoints, versions
from peftkit.train.optim import STATE_BYTES, load_optimizer_state, optimizer_state
from peftkit.train.resume import check_same_run
from peftkit.train.step import Step


class Weights(Protocol):
    """Saves and loads a model's weights: `TrainableWeights`, or an adapter folder."""

    def save(self, folder: Path) -> None:
        """Write files into an existing folder."""

    def load(self, folder: Path) -> None:
        """Restore the saved values, bit for bit."""


class TrainableWeights:
    """A model's trainable parameters as one safetensors file."""

    FILE = "weights.safetensors"

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def save(self, folder: Path) -> None:
        """Write weights.safetensors."""
        write_tensors({n: p.data for n, p in self._parameters.items()}, folder / self.FILE)

    def load(self, folder: Path) -> None:
        """Read weights.safetensors.

        Raises:
            CheckpointError: Lists every tensor that does not fit the model.
        """
        saved = read_tensors(folder / self.FILE, error=CheckpointError)
        parameters = self._parameters
        problems = [f"missing: {name}" for name in parameters.keys() - saved.keys()]
        problems += [f"unexpected: {name}" for name in saved.keys() - parameters.keys()]
        problems += [
            f"{name} is {saved[name].dtype} {tuple(saved[name].shape)}, "
            f"not {parameters[name].dtype} {tuple(parameters[name].shape)}"
            for name in parameters.keys() & saved.keys()
            if (saved[name].shape, saved[name].dtype)
            != (parameters[name].shape, parameters[name].dtype)
        ]
        if problems:
            raise CheckpointError(
                f"the weights in {folder} do not fit this model", found="\n".join(sorted(problems))
            )
        for name, parameter in parameters.items():
            parameter.data.copy_(saved[name])


OPTIMIZER, RANDOM, STATE = "optimizer.safetensors", "rng.safetensors", "state.json"
TASK = "task.safetensors"  # only of a task with a state
MAX_STATE_BYTES = 1 << 24
SLACK_BYTES = 1 << 20  # generators, manifest, the adapter's own JSON


class Saver:
    """Saves and resumes one run. All processes call its methods; the main one writes.

    Args:
        weights: Saves the model's weights.
        identity: Values that a resumed run must share with the saved one.

    Attributes:
        last_step: The step of the newest checkpoint of this run; None: there is none.
    """

    def __init__(
        self,
        run: Run,
        step: Step,
        sampler: StatelessSampler,
        weights: Weights,
        identity: Mapping[str, Any],
    ) -> None:
        self.run, self.step, self.sampler = run, step, sampler
        self.weights, self.identity = weights, identity
        self.checkpoints = Checkpoints(run.config.output_dir, run.config.keep_checkpoints)
        self.last_step: int | None = None
        state_bytes = STATE_BYTES[run.config.optimizer]
        self.num_bytes = SLACK_BYTES + sum(
            p.numel() * (p.element_size() + state_bytes) for p in step.parameters.values()
        )

    @property
    def last(self) -> Path | None:
        """The newest checkpoint of this run."""
        return None if self.last_step is None else self.checkpoints.path(self.last_step)

    def check_disk(self) -> None:
        """Delete leftovers; emit a notice if the disk may fill up.

        Raises:
            DiskFullError: The disk cannot hold one checkpoint.
        """
        if self.run.world.is_main:
            self.checkpoints.remove_leftovers()
        free, folder = self.checkpoints.free_bytes, self.checkpoints.folder
        size = f"A checkpoint takes about {self.num_bytes:,} bytes; {free:,} are free in {folder}."
        number = self.run.config.keep_checkpoints + 2  # the best one, and the one being written
        if free < self.num_bytes:
            fix = "Free some space, or train into another folder."
            raise DiskFullError("the disk is too full to train", found=size, fix=fix)
        if free < self.num_bytes * number:
            self.run.say(Notice(f"{size} Up to {number} exist at a time: the disk may fill up."))

    @contextmanager
    def saving_on(self, *errors: type[Exception]) -> Iterator[None]:
        """Save the completed steps if one of these errors, or a lack of memory, ends the run.

        Processes save together, so all of them have to raise the error.
        """
        try:
            yield
        except Exception as error:
            step, is_alone = self.run.state.step, self.run.world.world_size == 1
            is_reason = isinstance(error, errors) or (is_alone and is_out_of_memory(error))
            if is_reason and step and self.last_step != step:
                self.save()
            raise

    def save(self) -> None:
        """Write a checkpoint.

        Raises:
            RunError: The disk is full, or the weights are not finite.
        """
        generators = self._generators()
        if self.run.world.is_main:
            self._write(generators)
        self.run.world.wait()

    def _write(self, generators: Mapping[str, Tensor]) -> None:
        state, scale = self.run.state, self.step.fitting.scale
        state.loss_scale, state.good_steps = scale.factor, scale.good_steps
        epoch, position = self.sampler.position(state.step)
        of_task = self.run.hooks.state()
        num_bytes = self.num_bytes + sum(tensor.nbytes for tensor in of_task.values())
        facts = {
            "epoch": epoch,
            "sampler": {"seed": self.sampler.seed, "epoch": epoch, "position": position},
            "num_processes": self.run.world.world_size,
            "identity": self.identity,
        }
        with self.checkpoints.writing(
            state.step, facts, best_step=state.best_step, num_bytes=num_bytes
        ) as folder:
            self.weights.save(folder)
            checkpoint_files.failpoint("weights")
            tensors, numbers = optimizer_state(self.step.optimizer, self.step.parameters)
            write_tensors(tensors, folder / OPTIMIZER)
            checkpoint_files.failpoint("optimizer")
            if of_task:
                write_tensors(of_task, folder / TASK)
            write_tensors(generators, folder / RANDOM)
            checkpoint_files.failpoint("rng")
            write_json({"run": asdict(state), "optimizer": numbers}, folder / STATE)
            checkpoint_files.failpoint("state")
        self.last_step = state.step
        self.run.say(Saved("checkpoint", self.checkpoints.path(state.step)))

    def resume(self, allow_changes: Sequence[str]) -> None:
        """Continue from the newest valid checkpoint.

        Raises:
            CheckpointError: There is none, or it belongs to another run.
        """
        newest = self._newest()
        changes = check_same_run(newest.manifest["identity"], self.identity, allow_changes)
        if changes:
            self.run.say(Notice("Resumed with these changes, not bit-equal: " + "; ".join(changes)))
        self._compare_versions(newest.manifest["versions"])
        self._load(newest.folder, is_exact=not changes)
        self.last_step = newest.step

    def _newest(self) -> Checkpoint:
        """Return the main process's newest valid checkpoint, on all processes."""
        world, error, newest = self.run.world, None, None
        if world.is_main:
            try:
                newest = self.checkpoints.newest_valid(self.run.say)
            except CheckpointError as problem:
                error = problem  # raised after all processes have the step
        step = world.max(-1 if newest is None else newest.step)
        if step < 0:
            raise error or self.checkpoints.nothing_to_resume()
        return newest or self.checkpoints.verified(step)

    def _load(self, folder: Path, *, is_exact: bool) -> None:
        step, world = self.step, self.run.world
        saved = read_json(folder / STATE, max_bytes=MAX_STATE_BYTES, error=CheckpointError)
        tensors = read_tensors(folder / OPTIMIZER, error=CheckpointError)
        generators = read_tensors(folder / RANDOM, error=CheckpointError)
        state = state_from_json(saved["run"])
        self.weights.load(folder)
        load_optimizer_state(step.optimizer, step.parameters, tensors, saved["optimizer"])
        step.load_state(state, is_exact=is_exact)
        if (file := folder / TASK).is_file():
            tensors = read_tensors(file, error=CheckpointError)
            self.run.hooks.load_state(self.run.model, tensors)
        num_saved = 1 + max(int(name.split(".")[0]) for name in generators)
        prefix = f"{world.rank % num_saved}."
        rng.restore(
            {n.removeprefix(prefix): t for n, t in generators.items() if n.startswith(prefix)},
            world.device,
        )

    def _generators(self) -> dict[str, Tensor]:
        """Return the generators' state of every process, named "rank.generator"."""
        world = self.run.world
        return {
            f"{rank}.{name}": row.clone()
            for name, state in rng.capture(world.device).items()
            for rank, row in enumerate(world.gather(state))
        }

    def _compare_versions(self, before: Mapping[str, str]) -> None:
        now = versions()
        changed = [
            f"{name} {before.get(name)} -> {now.get(name)}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        ]
        if changed:
            text = f"Library versions have changed; not bit-equal: {', '.join(changed)}"
            self.run.say(Notice(text))
