"""What a checkpoint of a run is made of, and how a run takes it up again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from peftkit.errors import CheckpointError, OutputError
from peftkit.events import Notice, Saved
from peftkit.execution import rng
from peftkit.execution.state import state_from_json
from peftkit.files.disk import free_bytes, read_json, write_json
from peftkit.files.tensors import read_tensors, write_tensors
from peftkit.train.batches import StatelessSampler
from peftkit.train.checkpoints.checkpoint import Checkpoint, Checkpoints
from peftkit.train.checkpoints.identity import check_same_run
from peftkit.train.checkpoints.manifest import versions
from peftkit.train.optim import STATE_BYTES, load_optimizer_state, optimizer_state
from peftkit.train.step import Trainer


class Weights(Protocol):
    """What a checkpoint holds of the model, and how: an adapter's files, for example."""

    def save(self, folder: Path) -> None:
        """Write files into an existing folder."""

    def load(self, folder: Path) -> None:
        """Take back, to the bit, what `save` wrote."""


class TrainableWeights:
    """A model's trainable parameters as one safetensors file."""

    FILE = "weights.safetensors"

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def save(self, folder: Path) -> None:
        """Write weights.safetensors."""
        write_tensors({n: p.data for n, p in self._parameters.items()}, folder / self.FILE)

    def load(self, folder: Path) -> None:
        """Read weights.safetensors; CheckpointError lists all that does not fit."""
        saved = read_tensors(folder / self.FILE, error=CheckpointError)
        own = self._parameters
        problems = [f"missing: {name}" for name in own.keys() - saved.keys()]
        problems += [f"unexpected: {name}" for name in saved.keys() - own.keys()]
        problems += [
            f"{name} is {saved[name].dtype} {tuple(saved[name].shape)}, "
            f"not {own[name].dtype} {tuple(own[name].shape)}"
            for name in own.keys() & saved.keys()
            if (saved[name].shape, saved[name].dtype) != (own[name].shape, own[name].dtype)
        ]
        if problems:
            raise CheckpointError(
                f"the weights in {folder} do not fit this model", found="\n".join(sorted(problems))
            )
        for name, parameter in own.items():
            parameter.data.copy_(saved[name])


OPTIMIZER, RANDOM, STATE = "optimizer.safetensors", "rng.safetensors", "state.json"
MAX_STATE_BYTES = 1 << 24
SLACK_BYTES = 1 << 20  # generators, manifest, the adapter's own JSON


class Saver:
    """Saves and resumes one run; on several processes all must call, and the main one writes.

    Args:
        weights: What is saved of the model.
        identity: What a resumed run must have in common with the saved one.

    Attributes:
        last: The newest checkpoint of this run.
        resumed_step: The step it was resumed at, None for a run from the start.
    """

    def __init__(
        self,
        trainer: Trainer,
        sampler: StatelessSampler,
        weights: Weights,
        identity: Mapping[str, Any],
    ) -> None:
        self.trainer, self.run, self.sampler = trainer, trainer.run, sampler
        self.config, self.weights, self.identity = trainer.run.config, weights, identity
        config = self.config
        self.checkpoints = Checkpoints(config.output_dir, config.keep_checkpoints, free_bytes)
        self.last: Path | None = None
        self.resumed_step: int | None = None
        trained = trainer.parameters.values()
        self.num_bytes = SLACK_BYTES + sum(
            p.numel() * (p.element_size() + STATE_BYTES[config.optimizer]) for p in trained
        )

    @property
    def last_step(self) -> int | None:
        """The step of the newest checkpoint."""
        return None if self.last is None else int(self.last.name.rpartition("-")[2])

    def check_disk(self) -> None:
        """Say so if the disk may not suffice; OutputError if it cannot hold one checkpoint."""
        free, folder = self.checkpoints.free(self.checkpoints.folder), self.checkpoints.folder
        each = f"A checkpoint takes about {self.num_bytes:,} bytes; {free:,} are free in {folder}."
        most = self.config.keep_checkpoints + 2  # the best one, and the one being written
        if free < self.num_bytes:
            fix = "Make room, or train into another folder."
            raise OutputError("the disk is too full to train", found=each, fix=fix)
        if free < self.num_bytes * most:
            self.run.say(Notice(f"{each} Up to {most} are there at once: the disk may fill up."))

    def save(self) -> None:
        """Write a checkpoint of this moment.

        Raises:
            RunError: The disk is full, or the weights are not finite.
        """
        trainer, state, world = self.trainer, self.run.state, self.run.world
        generators = self._generators()
        if world.is_main:
            state.loss_scale, state.good_steps = trainer.scale.factor, trainer.scale.good_steps
            tensors, numbers = optimizer_state(trainer.optimizer, trainer.parameters)
            epoch, position = self.sampler.position(state.step)
            self.last = self.checkpoints.save(
                state.step,
                {
                    "weights": self.weights.save,
                    "optimizer": lambda folder: write_tensors(tensors, folder / OPTIMIZER),
                    "rng": lambda folder: write_tensors(generators, folder / RANDOM),
                    "state": lambda folder: write_json(
                        {"run": state.as_json(), "optimizer": numbers}, folder / STATE
                    ),
                },
                {
                    "epoch": epoch,
                    "sampler": {"seed": self.sampler.seed, "epoch": epoch, "position": position},
                    "num_processes": world.world_size,
                    "identity": self.identity,
                },
                best_step=state.best_step,
                num_bytes=self.num_bytes,
            )
            self.run.say(Saved("checkpoint", self.last))
        world.wait()

    def resume(self, allow_changes: Sequence[str]) -> None:
        """Make this run what the newest valid checkpoint says.

        Raises:
            CheckpointError: There is none, or it is of another run.
        """
        found = self._found()
        changes = check_same_run(found.manifest["identity"], self.identity, allow_changes)
        if changes:
            self.run.say(Notice("No exact continuation; accepted changes: " + "; ".join(changes)))
        self._compare_versions(found)
        self._load(found.folder, exact=not changes)
        self.last, self.resumed_step = found.folder, found.step

    def _found(self) -> Checkpoint:
        """Return the newest valid checkpoint that the main process sees, on all processes."""
        world, error, found = self.run.world, None, None
        if world.is_main:
            try:
                found = self.checkpoints.newest_valid(self.run.say)
            except CheckpointError as problem:
                error = problem  # the others must hear of it before this one ends
        step = world.max(-1 if found is None else found.step)
        if step < 0:
            raise error or self.checkpoints.nothing_to_resume([])
        return found or self.checkpoints.verified(step)

    def _load(self, folder: Path, *, exact: bool) -> None:
        trainer, world = self.trainer, self.run.world
        saved = read_json(folder / STATE, max_bytes=MAX_STATE_BYTES, error=CheckpointError)
        tensors = read_tensors(folder / OPTIMIZER, error=CheckpointError)
        generators = read_tensors(folder / RANDOM, error=CheckpointError)
        state = state_from_json(saved["run"])
        self.weights.load(folder)
        load_optimizer_state(trainer.optimizer, trainer.parameters, tensors, saved["optimizer"])
        if not exact:
            state.plan, state.measured = trainer.requested, False
        trainer.load_state(state)
        saved_ranks = 1 + max(int(name.split(".")[0]) for name in generators)
        own = f"{world.rank % saved_ranks}."
        device = world.device
        rng.restore(
            {n.removeprefix(own): t for n, t in generators.items() if n.startswith(own)}, device
        )

    def _generators(self) -> dict[str, Tensor]:
        """Return the generators' state of every process, named "rank.generator"."""
        world = self.run.world
        return {
            f"{rank}.{name}": row.clone()
            for name, own in rng.capture(world.device).items()
            for rank, row in enumerate(world.gather(own))
        }

    def _compare_versions(self, found: Checkpoint) -> None:
        before, now = found.manifest["versions"], versions()
        changed = [
            f"{name} {before.get(name)} -> {now.get(name)}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        ]
        if changed:
            text = f"Other versions than before, so not to the bit: {', '.join(changed)}"
            self.run.say(Notice(text))
