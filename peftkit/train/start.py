"""Start a run: check and lock its output folder, set up its processes and its plan."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from peftkit.errors import CheckpointError, DataError, OutputError
from peftkit.events import Listener, ignore
from peftkit.execution.environment import is_main_process
from peftkit.execution.plan import ExecutionPlan, plan_of
from peftkit.execution.signals import StopRequest
from peftkit.execution.state import State
from peftkit.execution.world import Parallel, Rows, World
from peftkit.files.disk import HOLDER, LOCKS, RUN_LOCK, alone, writable_folder, write_holder
from peftkit.formats.folders import (
    ADAPTER_FILES,
    CONFIG,
    MARKS,
    OVERWRITTEN,
    RECIPE,
    RECORDS,
    TEACHER_ANSWERS,
)
from peftkit.model.blocks import is_sharded, is_streamed
from peftkit.settings import TrainConfig
from peftkit.tasks.base import Task
from peftkit.tasks.run_hooks import Run
from peftkit.train.batches import Lockstep
from peftkit.train.checkpoint_files import Checkpoints
from peftkit.train.step import trainable_parameters


def prepare_output(
    output_dir: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: Sequence[str] = (),
) -> None:
    """Check early that a run can write its results and overwrites no other run.

    Args:
        resume: Continue from the newest valid checkpoint of the folder.
        overwrite: Delete its checkpoints and move its adapter aside, when the new run begins.
        allow_changes: Dotted keys of the identity, "train" or "rows" that may have changed.

    Raises:
        OutputError: The folder cannot be written to, holds a run, or holds files of another origin
            that have names of a run's files.
        CheckpointError: There is nothing to resume, or the arguments contradict each other.
    """
    if resume and overwrite:
        raise CheckpointError("a run is either resumed or overwritten, not both")
    if allow_changes and not resume:
        fix = "Add --resume, or leave out --allow-changes."
        raise CheckpointError("--allow-changes has an effect only on a resumed run", fix=fix)
    checkpoints = Checkpoints(output_dir)
    results = [f"step-{step}" for step in checkpoints.steps()]
    if resume and not results:
        raise checkpoints.nothing_to_resume()
    writable_folder(output_dir)
    moved = {f"{OVERWRITTEN}/{name}" for name in (CONFIG, *MARKS)}  # all that a killed run has
    if not (results or any((output_dir / name).exists() for name in (CONFIG, *MARKS, *moved))):
        names = {*ADAPTER_FILES, *RECORDS} - {TEACHER_ANSWERS}  # which a run checks and continues
        if checkpoints.folder.exists():  # a server's job has its recipe before the run
            names.remove(RECIPE)
        # folders of these names are never replaced
        found = {name for name in names if (output_dir / name).is_file()}
        if foreign := sorted(found | ({OVERWRITTEN} & {p.name for p in output_dir.iterdir()})):
            raise OutputError(
                f"{output_dir} holds files that the run would replace",
                found=f"No run wrote them: {', '.join(foreign)}",
                fix="Train into another folder (--out DIR).",
            )
    results += sorted(path.name for path in output_dir.glob("*.safetensors"))
    if results and not (resume or overwrite):
        raise OutputError(
            f"{output_dir} already holds a run",
            found=", ".join(results[-4:]),
            fix="Resume it (--resume), train into another folder (--out DIR), or start again in "
            "this one (--overwrite).",
        )
    writable_folder(checkpoints.folder)


@contextlib.contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Lock a folder against other runs, on the main process.

    Raises:
        OutputError: Another run holds the lock; the message names its process.
    """
    if not is_main_process():
        yield
        return
    holder = output_dir / LOCKS / HOLDER

    def refuse() -> None:
        process = ""
        with contextlib.suppress(OSError):
            process = holder.read_text(encoding="utf-8").strip()
        raise OutputError(
            f"another process is training into {output_dir}",
            found=process,
            fix="Wait until it ends, or train into another folder (--out DIR).",
        )

    with alone(output_dir / RUN_LOCK, on_wait=refuse):
        write_holder(output_dir)
        try:
            yield
        finally:
            holder.unlink(missing_ok=True)


@contextlib.contextmanager
def removed_if_empty(output_dir: Path) -> Iterator[None]:
    """Remove a folder if its run fails before writing a file."""
    try:
        yield
    except BaseException:
        inside = [path for path in output_dir.rglob("*") if not path.is_dir()]
        if is_main_process() and all(path.parent.name == LOCKS for path in inside):
            shutil.rmtree(output_dir, ignore_errors=True)
        raise


def delete_checkpoints(output_dir: Path) -> None:
    """Delete the checkpoints of a run.

    Raises:
        OutputError: A checkpoint cannot be deleted.
    """
    checkpoints = Checkpoints(output_dir)
    checkpoints.delete_all()
    if checkpoints.steps():
        raise OutputError(f"cannot delete the run in {output_dir}", fix="Delete the folder.")
    writable_folder(checkpoints.folder)


def new_run(
    model: nn.Module,
    task: Task,
    rows: Rows,
    eval_rows: Rows,
    config: TrainConfig,
    *,
    stop: StopRequest,
    on_event: Listener = ignore,
    plan: ExecutionPlan | None = None,
    world: World | None = None,
) -> Run:
    """Return a run before its first step.

    Args:
        on_event: Receives the run's events, on the main process only.
        plan: By default the requested plan, for the loaded model.
        world: The processes that train together; by default all that were launched.

    Raises:
        DataError: There are no rows.
        ConfigError: The model has nothing to train.
    """
    if not rows:
        raise DataError("there are no rows to train on")
    device = next(iter(trainable_parameters(model).values())).device
    if world is None or world.device != device:  # the base may be on the CPU to save GPU memory
        world = World(device)
    plan = plan or plan_of(
        config,
        device.type,
        world.world_size,
        placement="stream" if is_streamed(model) else "device",
        shard="base" if is_sharded(model) else "none",
        dtype=ExecutionPlan.for_model(model).dtype,
    )
    parallel = Parallel(world)
    if is_sharded(model):
        parallel = Lockstep(world, task, rows, eval_rows)
    return Run(
        model=model,
        task=task,
        rows=rows,
        eval_rows=eval_rows,
        config=config,
        world=world,
        parallel=parallel,
        state=State(replace(plan, autocast=world.precision or "")),
        stop=stop,
        listeners=[on_event] if world.is_main else [],
    )


def shared_tensors(model: nn.Module) -> list[Tensor]:
    """Return trainable parameters and the buffers of their modules, such as PiSSA's start."""
    tensors: list[Tensor] = []
    for module in model.modules():
        trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
        tensors += [*trained, *(module.buffers(recurse=False) if trained else ())]
    return tensors
