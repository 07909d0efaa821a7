"""Routes of OpenAI's fine-tuning API."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from peftkit.data.generation import prompt_ids, stop_ids
from peftkit.data.style import Style
from peftkit.errors import PeftkitError, RunError
from peftkit.inference.engine import Request as EngineRequest
from peftkit.inference.sampling import Sampling, seed_of
from peftkit.serve.answers import status_of
from peftkit.serve.generation import Generation, Output
from peftkit.serve.requests import RequestError
from peftkit.serve.training import Dialect, Training
from peftkit.serve.tuning.bodies import GraderBody, GraderRun, JobBody
from peftkit.serve.tuning.documents import CHECKPOINT, JOB
from peftkit.serve.tuning.files import Files
from peftkit.serve.tuning.jobs import ACTIONS, Jobs
from peftkit.serve.tuning.pages import Page, body_of
from peftkit.serve.tuning.recipes import grader_of
from peftkit.tasks.rewards.grading import Answered, Grading
from peftkit.tasks.user_code import UserCode

JOBS = "/v1/fine_tuning/jobs"
GRADERS = "/v1/fine_tuning/alpha/graders"
CODE_SECONDS = 60.0
"""Time limit of a client's grader function on one answer."""


def dialect(training: Training) -> Dialect:
    """Return OpenAI's fine-tuning API."""
    files = Files(training)
    jobs = Jobs(training, files)

    def on_start() -> None:
        files.tidy()
        jobs.resume()

    return Dialect(_routes(files, _Api(training, jobs)), on_start)


def _routes(files: Files, api: _Api) -> list[BaseRoute]:
    return [
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


class _Api:
    def __init__(self, training: Training, jobs: Jobs) -> None:
        self._training, self._store, self._jobs = training, training.store, jobs

    async def create(self, request: Request) -> Response:
        body = await body_of(request, JobBody)
        job = await asyncio.to_thread(self._jobs.create, body, request.state.owner)
        return JSONResponse(job)

    def jobs(self, request: Request) -> Response:
        jobs = [job["response"] for job in self._store.all(JOB, request.state.owner)]
        return Page.of(request).response(jobs[::-1])

    def job(self, request: Request) -> Response:
        return JSONResponse(self._job(request))

    def events(self, request: Request) -> Response:
        page, id = Page.of(request), self._job(request)["id"]
        return page.response(self._store.entries(id)[::-1])

    def checkpoints(self, request: Request) -> Response:
        page, id = Page.of(request, default=10), self._job(request)["id"]
        checkpoints = [each["response"] for each in self._store.all(CHECKPOINT, parent=id)]
        return page.response(checkpoints[::-1])

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
        body = await body_of(request, GraderBody)
        with tempfile.TemporaryDirectory() as folder:
            await asyncio.to_thread(grader_of, body.grader, self._training, Path(folder))
        return JSONResponse({"grader": body.grader})

    async def grade(self, request: Request) -> Response:
        body = await body_of(request, GraderRun)
        return JSONResponse(await asyncio.to_thread(self._graded, body))

    def _graded(self, body: GraderRun) -> dict[str, Any]:
        """Return the grade of an answer in OpenAI's format."""
        began = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                grader = grader_of(body.grader, self._training, Path(folder))
                grading = Grading(grader, self._complete, CODE_SECONDS, UserCode())
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

    def _complete(self, conversations: Any, settings: Any) -> list[str]:
        """Return the base's completion of a conversation, from the worker's shared batch."""
        (turns,), worker = conversations, self._training.worker
        tokenizer, style = self._training.bank.base.tokenizer, Style("chat")
        ids = worker.call(lambda: prompt_ids(tokenizer, turns, style)).result()
        sampling = Sampling(**settings, stops=stop_ids(tokenizer, style))
        outputs: SimpleQueue[Output | Exception] = SimpleQueue()
        request = EngineRequest(ids, sampling, seed_of(sampling, 0))
        worker.submit([Generation(request, outputs.put)])
        text, has_ended = "", False
        while not has_ended:
            output = outputs.get()
            if isinstance(output, Exception):  # an error of the model, not of the grader
                assert isinstance(output, PeftkitError)
                raise RequestError(
                    output.problem, found=output.found, fix=output.fix, status=status_of(output)
                )
            text, has_ended = text + output.text, output.reason is not None
        return [text]


PROBLEMS = (
    *("formula_parse_error", "invalid_variable_error", "model_grader_parse_error"),
    *("model_grader_refusal_error", "model_grader_server_error", "other_error"),
    *("python_grader_runtime_error", "python_grader_server_error", "sample_parse_error"),
    *("truncated_observation_error", "unresponsive_reward_error"),
)
"""Error flags of OpenAI's response; this server reports most of them as request errors."""
