"""Jobs: from what a client asks to a published adapter. All that is acknowledged is in the store.

A job's status is also the client's wish. The run looks at it after each step: whatever it is but
"running", the run saves and stops. A server that is killed leaves jobs "queued" and "running"; the
next one goes on with them.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from peftkit.config.schema import dump_yaml, load
from peftkit.config.strict_yaml import printable
from peftkit.errors import CheckpointError, DataError, PeftkitError
from peftkit.events import ignore
from peftkit.execution.signals import Interrupted
from peftkit.files.disk import is_disk_full, new_folder, write_text
from peftkit.formats.folders import CONFIG, NOTES, RECIPE, TENSORS
from peftkit.recipe import Recipe
from peftkit.report.history import read_history
from peftkit.run import run
from peftkit.serve.requests import RequestError
from peftkit.serve.store import StoreError, new_id
from peftkit.serve.training import Training
from peftkit.serve.tuning.bodies import JobBody
from peftkit.serve.tuning.documents import ENDED, JOB, changing, tell, tell_once
from peftkit.serve.tuning.files import PURPOSE, RESULTS, Files
from peftkit.serve.tuning.progress import JobProgress, results
from peftkit.serve.tuning.recipes import grader_of, recipe_of
from peftkit.serve.tuning.rows import JobError, count_rows, public
from peftkit.settings import BaseConfig
from peftkit.tasks.rewards.graders import fields_of
from peftkit.train.checkpoint_files import Checkpoints
from peftkit.train.metrics import require_trackers

MAY = {
    "cancel": ("cancelled", ("validating_files", "queued", "running", "paused")),
    "pause": ("paused", ("queued", "running")),
    "resume": ("queued", ("paused",)),
}
"""What clients may do with a job: the status that it gets, and those in which they may."""

_LOG = logging.getLogger(__name__)
MAX_JOBS = 64
"""Jobs of one owner that wait or run."""
OF_BASE = tuple(name for name in BaseConfig.model_fields if name not in ("store", "placement"))
"""Settings of a base that a job's weights depend on."""
START = "start"
"""Folder of a job with the adapter that it starts from."""
RETRY_SECONDS, LONGEST_RETRY = 10.0, 600.0
"""After which a job goes on that the disk could not keep; then twice that, up to so long."""


class Jobs:
    """The jobs of a server.

    Args:
        files: Of its clients.
    """

    def __init__(self, training: Training, files: Files) -> None:
        self._training, self._store, self._files = training, training.store, files
        base = training.bank.base
        self._base_here = {"model": base.name, "fingerprint": base.fingerprint}
        self._checking = threading.Lock()  # the rows of one job at a time
        self._queueing, self._queued = threading.Lock(), set[str]()  # ids that the worker has
        self._tries = Counter[str]()  # of jobs that wait for room on the disk

    def folder(self, id: str) -> Path:
        """Return the folder of a job's run."""
        return self._training.folder.resolve() / "jobs" / id

    def get(self, id: str, owner: str) -> dict[str, Any]:
        """Return a job's document.

        Raises:
            RequestError: There is none, or it is another owner's.
        """
        job = self._store.get(JOB, id, owner)
        if job is None:
            text = f"there is no fine-tuning job '{id[:80]}'."
            raise RequestError(text, status=404, code="fine_tune_not_found")
        return job

    def create(self, body: JobBody, owner: str) -> dict[str, Any]:
        """Take a job, and begin to check its files.

        Raises:
            RequestError: It asks for what is not there, or too many jobs wait.
        """
        id = new_id("ftjob-")
        self._training.models.inner(body.model, owner)  # raises where there is none
        for param in ("training_file", "validation_file"):
            if (file := getattr(body, param)) is not None:
                purpose = self._files.get(file, owner, param)["purpose"]
                if purpose != PURPOSE:
                    raise RequestError(f"{file} is a file of the purpose {purpose}.", param=param)
        if body.integrations:
            _require_wandb()
        if body.grader is not None:
            with tempfile.TemporaryDirectory() as folder:  # its own gets it once the job is taken
                grader_of(body.grader, self._training, Path(folder))
        told = body.as_job(id, secrets.randbelow(2**31))
        with self._store.transaction():
            waiting = [one for one in self._store.all(JOB, owner) if not _has_ended(one)]
            if len(waiting) >= MAX_JOBS:
                raise RequestError(
                    "too many jobs wait.",
                    found=f"{len(waiting)} wait or run, of {MAX_JOBS} that may.",
                    fix="Try again when one has ended.",
                    status=429,
                    code="queue_full",
                )
            job = {"told": told, "asked": body.model_dump(), "name": _model_name(body, id)}
            job["base"] = self._base_here
            self._store.put(JOB, id, job, owner=owner)
            tell(self._store, id, f"Created fine-tuning job: {id}")
            tell(self._store, id, f"Validating training file: {body.training_file}")
            if body.validation_file:
                tell(self._store, id, f"Validating validation file: {body.validation_file}")
            self._keep_start(id, body.model, owner)
        self._training.say(f"{id}: created, {body.kind}, over {body.model}")
        self._start(id)
        return told

    def _keep_start(self, id: str, model: str, owner: str) -> None:
        """Keep a client's model that a job starts from: it may be deleted while the job waits."""
        start = self._training.models.folder(model, owner)
        if start is None or not start.is_relative_to(self._training.folder.resolve()):
            return  # the base, or an adapter of the operator's
        with new_folder(self.folder(id) / START, last=CONFIG) as new:
            for name in (CONFIG, TENSORS, NOTES):
                try:
                    os.link(start / name, new / name)
                except OSError:  # not all file systems have links
                    shutil.copyfile(start / name, new / name)

    def change(self, id: str, owner: str, what: str) -> dict[str, Any]:
        """Cancel, pause or resume a job.

        Raises:
            RequestError: There is none, or its status does not allow that.
        """
        self.get(id, owner)
        status, allowed = MAY[what]
        with changing(self._store, id) as job:
            told: dict[str, Any] = job["told"]
            if told["status"] not in allowed:
                text = f"the job is {told['status']}: {what} does not apply."
                raise RequestError(text, code="invalid_status")
            ended = int(time.time()) if status in ENDED else None
            told |= {"status": status, "estimated_finish": None, "finished_at": ended}
            tell(self._store, id, f"The job is {status}")
        self._training.say(f"{id}: {status}")
        if what == "resume":
            self._queue(id)
        return told

    def resume(self) -> None:
        """Go on with the jobs that were under way when the server ended."""
        for job in self._store.all(JOB):
            status, id = job["told"]["status"], job["told"]["id"]
            if status == "validating_files":
                self._start(id)
            elif status in ("queued", "running"):
                self._training.say(f"{id}: goes on")
                self._queue(id)

    # Before the run: files are checked in a thread of their own, so that answers go on.

    def _start(self, id: str) -> None:
        threading.Thread(target=self._check, args=(id,), name=f"rows of {id}", daemon=True).start()

    def _check(self, id: str) -> None:
        """Check a job's files, make its recipe, and queue it."""
        with self._or_later(id, self._start):
            try:
                if self._has_ended(id) or self._waits_for_its_base(id):
                    return
                with self._checking, _full_disk_as_store_error():
                    self._make_recipe(id)
            except StoreError:
                raise
            except JobError as error:
                self._fail(id, error.code, error.problem, error.param)
            except PeftkitError as error:
                told = self._public(id, error)
                self._fail(id, "invalid_hyperparameters", told, "hyperparameters")
            except Exception as problem:
                if not self._training.worker.is_stopping:  # else the next server begins anew
                    self._fail_unexpectedly(id, problem)
            else:
                self._queue(id)

    def _make_recipe(self, id: str) -> None:
        job, folder = self._store.get(JOB, id), self.folder(id)
        assert job is not None
        body, grader = JobBody.model_validate(job["asked"]), None
        if body.grader is not None:
            grader = grader_of(body.grader, self._training, folder)
        fields = fields_of(grader) if grader else ()
        file, valid = self._files.path(body.training_file), None
        num_rows = count_rows(file, body.kind, fields)
        if body.validation_file is not None:
            valid = self._files.path(body.validation_file)
            count_rows(valid, body.kind, fields, param="validation_file")
        start: Path | None = folder / START
        if not (folder / START).exists():
            start = self._training.models.folder(body.model, self._store.owner(JOB, id))
        recipe, numbers = recipe_of(
            body,
            job["told"]["seed"],
            grader,
            self._training,
            files=(file, valid),
            num_rows=num_rows,
            start=start,
            out=folder,
        )
        folder.mkdir(parents=True, exist_ok=True)
        write_text(dump_yaml(recipe), folder / RECIPE)
        with changing(self._store, id) as job:
            if job["told"]["status"] == "validating_files":  # else it was cancelled
                job["told"] |= {"status": "queued", "hyperparameters": numbers}
                job["told"]["method"][body.kind]["hyperparameters"] = numbers
                tell(self._store, id, "Files validated, moving job to queued state")

    # The run, in the thread that has the model.

    def _queue(self, id: str) -> None:
        """Have a job run when its turn comes; one that waits already, waits once."""
        with self._queueing:
            if id not in self._queued:
                self._queued.add(id)
                self._training.worker.queue(partial(self._run, id))

    def _run(self, id: str, give_way: Callable[[], None]) -> None:
        """Run a job from its newest checkpoint, or from its start."""
        with self._queueing:
            self._queued.discard(id)
        with self._or_later(id, self._queue):
            self._run_now(id, give_way)

    @contextmanager
    def _or_later(self, id: str, again: Callable[[str], None]) -> Iterator[None]:
        """Where the store cannot be written, leave a job as it is and try again after a while."""
        try:
            yield
            self._tries.pop(id, None)
        except StoreError as error:
            if not self._tries[id]:
                self._training.say(f"{id}: goes on later: {printable(error.found)}")
                with suppress(StoreError):
                    tell(self._store, id, "The job waits: the server's disk is full", "warn")
            seconds = min(RETRY_SECONDS * 2 ** min(self._tries[id], 9), LONGEST_RETRY)
            self._tries[id] += 1
            timer = threading.Timer(seconds, again, (id,))
            timer.daemon = True
            timer.start()

    def _run_now(self, id: str, give_way: Callable[[], None]) -> None:
        if self._has_ended(id) or self._waits_for_its_base(id):
            return
        with changing(self._store, id) as job:
            if job["told"]["status"] not in ("queued", "running"):
                return  # it was cancelled or paused while it waited
            job["told"]["status"] = "running"
        folder = self.folder(id)
        progress = JobProgress(self._training, id, folder, give_way)
        try:
            with _full_disk_as_store_error():
                self._train(id, progress)
                progress.flush()
                self._finish(id, progress)
        except Interrupted:  # it was cancelled or paused, or the server ends
            progress.flush()
        except StoreError:
            raise
        except DataError as error:
            self._fail(id, "invalid_training_file", self._public(id, error), "training_file")
        except PeftkitError as error:
            self._fail(id, "training_failed", self._public(id, error))
        except Exception as problem:
            self._fail_unexpectedly(id, problem)

    def _train(self, id: str, progress: JobProgress) -> None:
        """Run a job's recipe over the base as it is here, loaded otherwise than before or not."""
        folder, here = self.folder(id), self._training.options.base
        resume, recipe = _has_checkpoint(folder), load(Recipe, folder / RECIPE)
        pairs = {name: (getattr(recipe.base, name), getattr(here, name)) for name in OF_BASE}
        changed = {f"base.{name}": pair for name, pair in pairs.items() if pair[0] != pair[1]}
        if changed and not resume:  # else the run says so itself
            said = "; ".join(f"{key}: {old} -> {new}" for key, (old, new) in changed.items())
            tell_once(self._store, id, f"The base is loaded otherwise than it was: {said}")
        run(
            recipe.model_copy(update={"base": here}),
            resume=resume,
            overwrite=not resume,
            allow_changes=("base.computes_in", *changed) if resume else (),
            base=self._training.bank.base,
            on_event=progress.on_event,
        )

    def _waits_for_its_base(self, id: str) -> bool:
        """Tell whether the base that a job was made over is another than is here; say so."""
        job = self._store.get(JOB, id)
        assert job is not None
        base = job.get("base", self._base_here)  # jobs of earlier versions have none
        if base["fingerprint"] == self._base_here["fingerprint"]:
            return False
        text = f"The job waits for a server with its base: {base['model']}"
        tell_once(self._store, id, text)
        self._training.say(f"{id}: {text}")
        return True

    def _has_ended(self, id: str) -> bool:
        job = self._store.get(JOB, id)
        return job is None or _has_ended(job)

    def _finish(self, id: str, progress: JobProgress) -> None:
        """Publish a job's adapter, unless it was cancelled or paused at the last moment."""
        folder, owner = self.folder(id), self._store.owner(JOB, id)
        history = read_history(folder)
        with changing(self._store, id) as job:
            if job["told"]["status"] != "running":
                return
            file = self._files.add(results(history), "step_metrics.csv", RESULTS, owner)
            progress.publish(name := job["name"], folder, history.step, history)
            job["told"] |= {
                "status": "succeeded",
                "finished_at": int(time.time()),
                "fine_tuned_model": name,
                "result_files": [file],
                "trained_tokens": history.num_tokens,
                "estimated_finish": None,
            }
            tell(self._store, id, f"New fine-tuned model created: {name}")
            tell(self._store, id, "The job has successfully completed")
        progress.forget_old()
        self._training.say(f"{id}: done, {name}")

    def _fail(self, id: str, code: str, message: str, param: str | None = None) -> None:
        with changing(self._store, id) as job:
            if _has_ended(job):
                return
            job["told"] |= {
                "status": "failed",
                "finished_at": int(time.time()),
                "estimated_finish": None,
                "error": {"code": code, "message": message, "param": param},
            }
            tell(self._store, id, f"The job failed: {message}", "error")
        self._training.say(f"{id}: failed: {printable(message)}")

    def _fail_unexpectedly(self, id: str, problem: Exception) -> None:
        _LOG.exception("the job %s", id)
        told = self._public(id, f"{type(problem).__name__}: {problem}")
        self._fail(id, "server_error", told)

    def _public(self, id: str, text: object) -> str:
        job = self._store.get(JOB, id)
        assert job is not None
        names = (job["told"][name] for name in ("training_file", "validation_file"))
        return public(
            str(text),
            *(self._files.path(name) for name in names if name),
            self.folder(id),
            self._training.folder.resolve(),
        )


@contextmanager
def _full_disk_as_store_error() -> Iterator[None]:
    """Raise a full disk as what it is to the store: later there may be room."""
    try:
        yield
    except Exception as problem:
        if isinstance(problem, StoreError) or not is_disk_full(problem):
            raise
        raise StoreError("the server's disk is full.", found=str(problem)) from problem


def _has_ended(job: dict[str, Any]) -> bool:
    return job["told"]["status"] in ENDED


def _has_checkpoint(folder: Path) -> bool:
    try:
        Checkpoints(folder, keep=1).newest_valid(ignore)
    except CheckpointError:
        return False
    return True


def _model_name(body: JobBody, id: str) -> str:
    """Return the public name that a job's model will have."""
    base = body.model.split(":")[1] if body.model.startswith("ft:") else body.model
    base = base.rstrip("/").rpartition("/")[2]
    base, suffix = (re.sub(r"[^\w.-]", "-", text) for text in (base or "base", body.suffix or ""))
    return f"ft:{base}:local:{suffix}:{id[-8:]}"


def _require_wandb() -> None:
    try:
        require_trackers(["wandb"])
    except PeftkitError as error:
        raise RequestError(
            "wandb is not installed beside this server.", fix=error.fix, param="integrations"
        ) from None
