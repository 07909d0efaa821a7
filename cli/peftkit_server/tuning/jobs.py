"""Fine-tuning jobs, from a client's request to a published adapter.

The store holds every acknowledged change. A job's status doubles as the client's request: the run
reads it after each step, and saves and stops unless it is "running". A killed server leaves jobs
"queued" or "running"; the next server resumes them.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from peftkit.base.new_tokens import unknown_tokens
from peftkit.config.schema import dump_yaml, load
from peftkit.config.strict_yaml import printable
from peftkit.errors import CheckpointError, DataError, PeftkitError
from peftkit.events import Listener
from peftkit.execution.signals import Interrupted, pause_points
from peftkit.files.disk import sha256_of, write_text
from peftkit.files.strict_json import Json
from peftkit.formats.folders import RECIPE
from peftkit.recipe import Recipe
from peftkit.report.history import read_history
from peftkit.run import run
from peftkit.settings import BaseConfig
from peftkit.tasks.rewards.graders import fields_of
from peftkit.train.checkpoint_files import Checkpoints
from peftkit_server.refusals import RequestError, public
from peftkit_server.store import StoreError, full_disk_as_store_error, new_id
from peftkit_server.threads import DaemonThreads
from peftkit_server.training import Training
from peftkit_server.tuning.bodies import JobBody
from peftkit_server.tuning.files import PURPOSE, RESULTS, Files
from peftkit_server.tuning.progress import (
    CHECKPOINTS,
    ENDED,
    JOB,
    JobProgress,
    add_event,
    add_warning_once,
    changing,
    copy_adapter,
    results,
)
from peftkit_server.tuning.recipes import grader_of, recipe_of
from peftkit_server.tuning.rows import JobError, count_rows

ACTIONS = {
    "cancel": ("cancelled", ("validating_files", "queued", "running", "paused")),
    "pause": ("paused", ("queued", "running")),
    "resume": ("queued", ("paused",)),
}
"""Actions of clients: the new status of the job, and the statuses that allow the action."""

_LOG = logging.getLogger(__name__)
OF_BASE = tuple(name for name in BaseConfig.model_fields if name not in ("store", "placement"))
"""Base settings that affect a job's weights."""
START = "start"
"""Subfolder of a job with the adapter that it starts from."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 10.0, 600.0
"""Delay before a job that met a full disk is retried; it doubles up to the maximum."""


class Jobs:
    """The jobs of a server.

    Args:
        files: Uploaded files of its clients.
    """

    def __init__(self, training: Training, files: Files) -> None:
        self._training, self._store, self._files = training, training.store, files
        self._limits = training.limits
        base = training.bank.base
        self._server_base = {"model": base.name, "fingerprint": base.fingerprint}
        self._validation = DaemonThreads(1, "peftkit-rows")
        self._queue_lock, self._queued = threading.Lock(), set[str]()  # ids queued at the worker
        self._num_tries = Counter[str]()  # of jobs that met a full disk
        self._tidy()

    def _tidy(self) -> None:
        """Remove incomplete folders of a killed server (`files.disk.new_folder`)."""
        folder = self._training.folder.resolve()
        for path in (*folder.glob(f"jobs/*/.{START}-*"), *folder.glob(f"{CHECKPOINTS}/.*")):
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Validate no further rows; the next server does."""
        self._validation.shutdown()

    def folder(self, id: str) -> Path:
        """Return the folder of a job's run."""
        return self._training.folder.resolve() / "jobs" / id

    def get(self, id: str, owner: str) -> Json:
        """Return a job's document.

        Raises:
            RequestError: The job does not exist, or has another owner.
        """
        job = self._store.get(JOB, id, owner)
        if job is None:
            text = f"there is no fine-tuning job '{id[:80]}'."
            raise RequestError(text, status=404, code="fine_tune_not_found")
        return job

    def create(self, body: JobBody, owner: str) -> Json:
        """Create a job, and start to validate its files; return the response.

        Raises:
            RequestError: The model, a file, the grader or wandb is not available, or too many jobs
                wait.
        """
        id = new_id("ftjob-")
        self._training.models.inner(body.model, owner)  # raises if the model does not exist
        for param in ("training_file", "validation_file"):
            if (file := getattr(body, param)) is not None:
                purpose = self._files.get(file, owner, param)["purpose"]
                if purpose != PURPOSE:
                    raise RequestError(f"{file} has the purpose {purpose}.", param=param)
        if body.integrations:
            try:
                from peftkit.train.trackers import require

                require({"wandb": {}})
            except PeftkitError as error:
                raise RequestError(
                    "wandb is not installed on this server.", fix=error.fix, param="integrations"
                ) from None
        if body.grader is not None:
            with tempfile.TemporaryDirectory() as folder:  # the job's folder does not exist yet
                grader_of(body.grader, self._training, Path(folder))
        response = body.as_job(id, secrets.randbelow(2**31))
        with self._store.lock:
            num_waiting = sum(not _has_ended(job) for job in self._store.all(JOB, owner))
            if num_waiting >= self._limits.key_jobs:
                raise RequestError(
                    "too many jobs wait.",
                    found=f"{num_waiting} jobs wait or run; the limit is {self._limits.key_jobs}.",
                    fix="Try again when a job has ended.",
                    status=429,
                    code="queue_full",
                )
            self._training.quotas.check_model(owner, num_waiting)
            self._training.quotas.check_record(owner)
            with self._store.transaction():
                job = {
                    "response": response,
                    "request": body.model_dump(),
                    "name": body.model_name(id),
                    "base": self._server_base,
                }
                self._store.put(JOB, id, job, owner=owner)
                add_event(self._store, id, f"Created fine-tuning job: {id}")
                add_event(self._store, id, f"Validating training file: {body.training_file}")
                if body.validation_file:
                    add_event(
                        self._store, id, f"Validating validation file: {body.validation_file}"
                    )
                self._copy_start(id, body.model, owner)
        self._training.log(f"{id}: created, {body.kind}, over {body.model}")
        self._start_validation(id)
        return response

    def _copy_start(self, id: str, model: str, owner: str) -> None:
        """Copy a client's model that a job starts from; it may be deleted while the job waits."""
        start = self._training.models.folder(model, owner)
        # not the base, nor an operator's adapter
        if start is not None and start.is_relative_to(self._training.folder.resolve()):
            copy_adapter(start, self.folder(id) / START)

    def change(self, id: str, owner: str, action: str) -> Json:
        """Cancel, pause or resume a job; return the response.

        Raises:
            RequestError: The job does not exist, or its status does not allow the action.
        """
        self.get(id, owner)
        status, allowed = ACTIONS[action]
        with changing(self._store, id) as job:
            response: Json = job["response"]
            if response["status"] not in allowed:
                text = f"the job is {response['status']}: {action} does not apply."
                raise RequestError(text, code="invalid_status")
            ended = int(time.time()) if status in ENDED else None
            response |= {"status": status, "estimated_finish": None, "finished_at": ended}
            add_event(self._store, id, f"The job is {status}")
        self._training.log(f"{id}: {status}")
        if action == "resume":
            self._queue(id)
        return response

    def resume(self) -> None:
        """Resume the jobs that had not ended when the last server stopped."""
        deaths = self._limits.job_deaths
        for job in self._store.all(JOB):
            status, id = job["response"]["status"], job["response"]["id"]
            if status not in ENDED and job.get("attempts", 0) >= deaths:
                text = f"The server's process ended {deaths} times during this job."
                self._fail(id, "server_error", text)
            elif status == "validating_files":
                self._start_validation(id)
            elif status in ("queued", "running"):
                self._training.log(f"{id}: resumed")
                self._queue(id)

    # Before the run: a separate thread validates files, while the worker serves requests.

    def _start_validation(self, id: str) -> None:
        self._validation.submit(partial(self._validate, id), self._store.owner(JOB, id))

    def _validate(self, id: str) -> None:
        """Validate a job's files, write its recipe, and queue it."""
        with self._retrying(id, self._start_validation):
            try:
                if not self._may_run(id):
                    return
                with full_disk_as_store_error(), self._attempt(id):
                    self._make_recipe(id)
            except StoreError:
                raise
            except JobError as error:
                self._fail(id, error.code, error.problem, error.param)
            except PeftkitError as error:
                self._fail(id, "invalid_hyperparameters", error, "hyperparameters")
            except Exception as problem:
                if not self._training.worker.is_stopping:  # the next server validates it again
                    self._fail_unexpectedly(id, problem)
            else:
                self._queue(id)

    def _make_recipe(self, id: str) -> None:
        job, folder = self._store.existing(JOB, id), self.folder(id)
        body, grader = JobBody.model_validate(job["request"]), None
        if body.grader is not None:
            grader = grader_of(body.grader, self._training, folder)
        fields = fields_of(grader) if grader else ()
        file, valid = self._files.path(body.training_file), None
        num_rows = count_rows(file, body.kind, fields, limits=self._limits)
        if body.validation_file is not None:
            valid = self._files.path(body.validation_file)
            count_rows(valid, body.kind, fields, param="validation_file", limits=self._limits)
        start: Path | None = folder / START
        if not (folder / START).exists():
            start = self._training.models.folder(body.model, self._store.owner(JOB, id))
        if start is not None and unknown_tokens(start, self._training.bank.base.tokenizer):
            text = "The model has tokens that the server's base lacks: it cannot be trained here."
            raise JobError("invalid_model", text, "model")
        recipe, hyperparameters = recipe_of(
            body,
            job["response"]["seed"],
            grader,
            self._training,
            files=(file, valid),
            num_rows=num_rows,
            start=start,
            out=folder,
        )
        folder.mkdir(parents=True, exist_ok=True)
        Checkpoints(folder).folder.mkdir(exist_ok=True)  # the run replaces only its own recipe
        write_text(dump_yaml(recipe, only_set=True), folder / RECIPE)
        with changing(self._store, id) as job:
            job["recipe"] = sha256_of(folder / RECIPE)
            response = job["response"]
            if response["status"] == "validating_files":  # a client may have cancelled it
                response |= {"status": "queued", "hyperparameters": hyperparameters}
                response["method"][body.kind]["hyperparameters"] = hyperparameters
                add_event(self._store, id, "Files validated, moving job to queued state")

    # The run, in the worker's thread.

    def _queue(self, id: str) -> None:
        """Queue a job at the worker, unless it is queued already."""
        with self._queue_lock:
            if id not in self._queued:
                self._queued.add(id)
                owner = self._store.owner(JOB, id)
                self._training.worker.queue(partial(self._run, id), owner)

    def _run(self, id: str, yield_model: Callable[[], None]) -> None:
        """Run a job from its newest checkpoint, or from its start."""
        with self._queue_lock:
            self._queued.discard(id)
        with self._retrying(id, self._queue), self._attempt(id):
            self._run_once(id, yield_model)

    @contextmanager
    def _attempt(self, id: str) -> Iterator[None]:
        """Count an attempt at a job in the store, until it ends without ending the process."""
        with changing(self._store, id) as job:
            job["attempts"] = job.get("attempts", 0) + 1
        try:
            yield
        finally:
            # the server may have stopped while it validated
            with suppress(StoreError, sqlite3.ProgrammingError), changing(self._store, id) as job:
                job["attempts"] = 0

    @contextmanager
    def _retrying(self, id: str, retry: Callable[[str], None]) -> Iterator[None]:
        """Call `retry` after a delay if the store is not writable; the job is unchanged."""
        try:
            yield
            self._num_tries.pop(id, None)
        except StoreError as error:
            tries = self._num_tries[id]
            if not tries:
                self._training.log(f"{id}: retried later: {printable(error.found)}")
                with suppress(StoreError):
                    add_event(self._store, id, "The job waits: the server's disk is full", "warn")
            seconds = min(RETRY_SECONDS * 2 ** min(tries, 9), MAX_RETRY_SECONDS)
            self._num_tries[id] += 1
            timer = threading.Timer(seconds, retry, (id,))
            timer.daemon = True
            timer.start()

    def _run_once(self, id: str, yield_model: Callable[[], None]) -> None:
        if not self._may_run(id):
            return
        with changing(self._store, id) as job:
            if job["response"]["status"] not in ("queued", "running"):
                return  # cancelled or paused while it waited
            job["response"]["status"] = "running"
        progress = JobProgress(self._training, id, self.folder(id), yield_model)
        try:
            with full_disk_as_store_error():
                self._train(id, progress)
                progress.flush()
                self._finish(id, progress)
        except Interrupted:  # cancelled or paused, or the server stops
            progress.flush()
        except StoreError:
            raise
        except JobError as error:
            self._fail(id, error.code, error.problem, error.param)
        except DataError as error:
            self._fail(id, "invalid_training_file", error, "training_file")
        except PeftkitError as error:
            self._fail(id, "training_failed", error)
        except Exception as problem:
            self._fail_unexpectedly(id, problem)

    def _train(self, id: str, progress: JobProgress) -> None:
        """Run a job's recipe over the server's base, even if its base settings differ."""
        folder, server_base = self.folder(id), self._training.options.base
        resume = _has_checkpoint(folder, progress.on_event)
        self._check_inputs(id, with_recipe=not resume)
        recipe = load(Recipe, folder / RECIPE)
        pairs = {n: (getattr(recipe.base, n), getattr(server_base, n)) for n in OF_BASE}
        changed = {f"base.{name}": pair for name, pair in pairs.items() if pair[0] != pair[1]}
        if changed and not resume:  # a resumed run reports changed settings itself
            changes = "; ".join(f"{key}: {old} -> {new}" for key, (old, new) in changed.items())
            text = f"The base is loaded with other settings than the job's: {changes}"
            add_warning_once(self._store, id, text)
        with pause_points(progress.pause):
            run(
                recipe.model_copy(update={"base": server_base}),
                resume=resume,
                overwrite=not resume,
                allow_changes=("base.computes_in", *changed) if resume else (),
                base=self._training.bank.base,
                on_event=progress.on_event,
            )

    def _check_inputs(self, id: str, *, with_recipe: bool) -> None:
        """Compare a job's recipe and files with the hashes in the store.

        Args:
            with_recipe: False for a resumed run: a run's end rewrites its recipe, and a resumed
                run compares its settings with the checkpoint.

        Raises:
            JobError: One of them is damaged or missing.
        """
        job, path = self._store.existing(JOB, id), self.folder(id) / RECIPE
        if not path.is_file() or (with_recipe and job["recipe"] != sha256_of(path)):
            problem = "damaged" if path.is_file() else "missing"
            text = f"The job's {RECIPE} is {problem} on the server."
            raise JobError("recipe_damaged", text)
        for name in ("training_file", "validation_file"):
            if (file := job["response"][name]) is not None:
                self._files.check(file)

    def _may_run(self, id: str) -> bool:
        """Return whether a job has not ended and has the server's base; log another base."""
        job = self._store.existing(JOB, id)
        if _has_ended(job):
            return False
        if job["base"]["fingerprint"] == self._server_base["fingerprint"]:
            return True
        text = f"The job waits for a server with its base: {job['base']['model']}"
        add_warning_once(self._store, id, text)
        self._training.log(f"{id}: {text}")
        return False

    def _finish(self, id: str, progress: JobProgress) -> None:
        """Publish a job's adapter, unless the job was cancelled or paused after its last step."""
        folder, owner = self.folder(id), self._store.owner(JOB, id)
        history = read_history(folder)
        with changing(self._store, id) as job:
            if job["response"]["status"] != "running":
                return
            file = self._files.add(results(history), "step_metrics.csv", RESULTS, owner)
            progress.publish(name := job["name"], folder, history.step, history)
            job["response"] |= {
                "status": "succeeded",
                "finished_at": int(time.time()),
                "fine_tuned_model": name,
                "result_files": [file],
                "trained_tokens": history.num_tokens,
                "estimated_finish": None,
            }
            add_event(self._store, id, f"New fine-tuned model created: {name}")
            add_event(self._store, id, "The job has successfully completed")
        progress.delete_old_checkpoints()
        self._training.log(f"{id}: done, {name}")

    def _fail(self, id: str, code: str, problem: object, param: str | None = None) -> None:
        message = " ".join(public(problem).split())
        with changing(self._store, id) as job:
            if _has_ended(job):
                return
            job["response"] |= {
                "status": "failed",
                "finished_at": int(time.time()),
                "estimated_finish": None,
                "error": {"code": code, "message": message, "param": param},
            }
            add_event(self._store, id, f"The job failed: {message}", "error")
        self._training.log(f"{id}: failed: {printable(message)}")

    def _fail_unexpectedly(self, id: str, problem: Exception) -> None:
        _LOG.exception("the job %s", id)
        self._fail(id, "server_error", f"{type(problem).__name__}: {problem}")


def _has_ended(job: Json) -> bool:
    return job["response"]["status"] in ENDED


def _has_checkpoint(folder: Path, on_event: Listener) -> bool:
    """Return whether a run has a valid checkpoint; report damaged ones."""
    try:
        Checkpoints(folder, keep=1).newest_valid(on_event)
    except CheckpointError:
        return False
    return True
