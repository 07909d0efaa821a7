"""What a request waits for: the answers as the engine tells them, whole or as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request

from peftkit.errors import PeftkitError, RunError
from peftkit.inference.rows import Whole
from peftkit.serve.answers import ReplyFormat, error_fields, event
from peftkit.serve.engine import Job, Told
from peftkit.serve.requests import RequestError

SECONDS_BETWEEN_LOOKS = 1.0
"""How often a request that is not streamed looks whether its client has gone."""


async def whole_answers(
    request: Request, jobs: Sequence[Job], told: asyncio.Queue[tuple[int, Told]]
) -> list[Whole]:
    """Return the whole answers, in order; if the client goes away, nobody works on."""
    found: dict[int, Whole] = {}
    try:
        while len(found) < len(jobs):
            try:
                index, what = await asyncio.wait_for(told.get(), SECONDS_BETWEEN_LOOKS)
            except asyncio.TimeoutError:
                if await request.is_disconnected():
                    raise RequestError("the client has gone.", status=499) from None
                continue
            if isinstance(what, Exception):
                raise what
            if isinstance(what, Whole):
                found[index] = what
    finally:
        for job in jobs:
            job.cancelled.set()
    return [found[index] for index in range(len(jobs))]


async def streamed(
    form: ReplyFormat,
    jobs: Sequence[Job],
    told: asyncio.Queue[tuple[int, Told]],
    num_prompt: int,
    wants_usage: bool,
) -> AsyncIterator[str]:
    """Yield the events of a streamed answer; an error after the first comes as an event too."""
    found: list[Whole] = []
    try:
        for index in range(len(jobs)):
            if first := form.begin(index):
                yield event(first)
        while len(found) < len(jobs):
            index, what = await told.get()
            if isinstance(what, Exception):
                problem = what if isinstance(what, PeftkitError) else RunError(str(what))
                yield event(error_fields(problem))
                return
            if isinstance(what, str):
                yield event(form.piece(index, what))
            else:
                found.append(what)
                yield event(form.end(index, what.reason))
        if wants_usage:
            yield event(form.used(found, num_prompt))
        yield event(None)
    finally:
        for job in jobs:
            job.cancelled.set()
