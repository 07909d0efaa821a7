"""Routes of OpenAI's fine-tuning API."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from peftkit.data.generation import prompt_ids, stop_ids
from peftkit.data.style import Style
from peftkit.errors import RunError
from peftkit.inference.engine import Request as EngineRequest
from peftkit.inference.sampling import Sampling, seed_of
from peftkit.tasks.rewards.grading import Answered, Grading
from peftkit_server.body import bounded_body
from peftkit_server.generation import Collected, Generation
from peftkit_server.refusals import RequestError
from peftkit_server.threads import DaemonThreads
from peftkit_server.training import Dialect, Training
from peftkit_server.tuning.bodies import GraderBody, GraderRun, JobBody
from peftkit_server.tuning.files import Files, page_of
from peftkit_server.tuning.grader_process import ProcessCode
from peftkit_server.tuning.jobs import ACTIONS, Jobs
from peftkit_server.tuning.progress import CHECKPOINT, EVENT, JOB
from peftkit_server.tuning.recipes import grader_of
from peftkit_server.validation import Strict, read_body

JOBS = "/v1/fine_tuning/jobs"
GRADERS = "/v1/fine_tuning/alpha/graders"
M = TypeVar("M", bound=Strict)
T = TypeVar("T")


def dialect(training: Training) -> Dialect:
    """Return OpenAI's fine-tuning API."""
    files = Files(training)
    jobs = Jobs(training, files)
    api = _Api(training, jobs)

    def on_start() -> None:
        files.tidy()
        jobs.resume()

    routes = [
        Route("/v1/files", files.upload, methods=["POST"]),
        Route("/v1/files", files.listed),
        Route("/v1/files/{id}", files.retrieve),
        Route("/v1/files/{id}", files.delete, methods=["DELETE"]),
        Route("/v1/files/{id}/content", files.content),
        Route(JOBS, api.create, methods=["POST"]),
        Route(JOBS, api.jobs),
        Route(JOBS + "/{id}", api.job),
        Route(JOBS + "/{id}/events", api.events),
        Route(JOBS + "/{id}/checkpoints", api.checkpoints),
        *(Route(f"{JOBS}/{{id}}/{action}", api.change, methods=["POST"]) for action in ACTIONS),
        Route(GRADERS + "/validate", api.validate, methods=["POST"]),
        Route(GRADERS + "/run", api.grade, methods=["POST"]),
    ]
    return Dialect(routes, on_start, api.close)


class _Api:
    def __init__(self, training: Training, jobs: Jobs) -> None:
        self._training, self._store, self._jobs = training, training.store, jobs
        self._limits = training.limits
        self._threads = training.threads
        self._graders = DaemonThreads(
            training.limits.graders,
            "peftkit-graders",
            training.limits.share,
            max_calls=2 * training.limits.graders,
            kind="graders",
            code="graders",
        )

    def close(self) -> None:
        """Drop graders and jobs' rows that wait."""
        self._graders.shutdown()
        self._jobs.close()

    async def _body(self, request: Request, kind: type[M]) -> M:
        """Return the validated body of a request.

        Raises:
            RequestError: The body is too long, or as `read_body`.
        """
        data = await bounded_body(request, self._limits.max_body)
        return await self._threads.call(partial(read_body, data, kind), request)

    async def create(self, request: Request) -> Response:
        body = await self._body(request, JobBody)
        owner = request.state.owner
        create = partial(self._jobs.create, body, owner)
        return JSONResponse(await self._threads.result(create, owner))

    def jobs(self, request: Request) -> Response:
        jobs = [job["response"] for job in self._store.all(JOB, request.state.owner)]
        return page_of(request, jobs[::-1])

    def job(self, request: Request) -> Response:
        return JSONResponse(self._job(request))

    def events(self, request: Request) -> Response:
        events = self._store.all(EVENT, parent=self._job(request)["id"])
        return page_of(request, events[::-1])

    def checkpoints(self, request: Request) -> Response:
        checkpoints = self._store.all(CHECKPOINT, parent=self._job(request)["id"])
        return page_of(request, [each["response"] for each in checkpoints[::-1]], default=10)

    def change(self, request: Request) -> Response:
        action = request.url.path.rpartition("/")[2]
        id = request.path_params["id"]
        return JSONResponse(self._jobs.change(id, request.state.owner, action))

    def _job(self, request: Request) -> dict[str, Any]:
        job = self._jobs.get(request.path_params["id"], request.state.owner)
        response: dict[str, Any] = job["response"]
        return response

    # Graders.

    async def validate(self, request: Request) -> Response:
        body = await self._body(request, GraderBody)
        await self._graders.call(partial(self._check_grader, body.grader), request)
        return JSONResponse({"grader": body.grader})

    def _check_grader(self, grader: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            grader_of(grader, self._training, Path(folder))

    async def grade(self, request: Request) -> Response:
        body = await self._body(request, GraderRun)
        graded = partial(self._graded, request.state.owner, body)
        return JSONResponse(await self._graders.call(graded, request))

    def _graded(self, owner: str, body: GraderRun) -> dict[str, Any]:
        """Return the grade of an answer in OpenAI's format."""
        began = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                grader = grader_of(body.grader, self._training, Path(folder))
                seconds = float(self._limits.grader_seconds)
                complete = partial(self._complete, owner=owner, until=began + seconds)
                grading = Grading(grader, complete, seconds, ProcessCode())
                (grade,) = grading.grades([Answered(body.model_sample, body.item, "the item")])
        except RunError as error:
            raise RequestError(error.problem, found=error.found, fix=error.fix) from None
        scores = dict(grade.parts)
        metadata = {
            "errors": {name: name == grade.problem for name in PROBLEMS},
            "execution_time": time.monotonic() - began,
            "name": grader.name,
            "sampled_model_name": None,
            "scores": scores,
            "token_usage": None,
            "type": grader.type,
        }
        return {
            "reward": grade.value or 0.0,
            "sub_rewards": scores,
            "metadata": metadata,
            "model_grader_token_usage_per_model": {},
        }

    def _complete(
        self, conversations: Any, settings: Any, *, owner: str, until: float
    ) -> list[str]:
        """Return the base's completion of a conversation, from the worker's shared batch.

        Args:
            until: When `time.monotonic()` ends it.
        """
        (turns,), worker = conversations, self._training.worker
        tokenizer, style = self._training.bank.base.tokenizer, Style("chat")
        seconds = self._limits.grader_seconds

        def waited(future: Future[T], cancel: Callable[[], object]) -> T:
            try:
                return future.result(max(0.0, until - time.monotonic()))
            except FutureTimeout:
                cancel()
                raise RequestError(
                    "the grader took too long.",
                    found=f"It may take {seconds} seconds; the server may be busy.",
                    fix="Try again later.",
                    status=429,
                    code="grader_seconds",
                ) from None

        prompt = worker.call(lambda: prompt_ids(tokenizer, turns, style), owner)
        ids = waited(prompt, prompt.cancel)
        sampling = Sampling(**settings, stops=stop_ids(tokenizer, style))
        completed, request = Collected(1), EngineRequest(ids, sampling, seed_of(sampling, 0))
        generation = Generation(request, partial(completed.take, 0), owner=owner)
        worker.submit([generation])
        try:
            (output,) = waited(completed, generation.cancel)
        except RunError as error:  # of the model, not of the grader
            fields = {"found": error.found, "fix": error.fix}
            raise RequestError(error.problem, **fields, status=500) from None
        return [output.text]


PROBLEMS = (
    *("formula_parse_error", "invalid_variable_error", "model_grader_parse_error"),
    *("model_grader_refusal_error", "model_grader_server_error", "other_error"),
    *("python_grader_runtime_error", "python_grader_server_error", "sample_parse_error"),
    *("truncated_observation_error", "unresponsive_reward_error"),
)
"""Error flags of OpenAI's response; this server reports most of them as request errors."""
