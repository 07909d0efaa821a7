"""What a request waits for: the answers as the engine tells them, whole or as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request

from peftkit.errors import PeftkitError, RunError
from peftkit.serve.answers import ReplyFormat, error_fields, event
from peftkit.serve.requests import RequestError
from peftkit.serve.worker import Job, Piece, Told, Whole


async def whole_answers(
    request: Request, jobs: Sequence[Job], told: asyncio.Queue[tuple[int, Told]]
) -> list[Whole]:
    """Return the whole answers, in order; if the client goes away, nobody works on."""
    found: dict[int, Whole] = {}
    gone = asyncio.create_task(_gone(request))
    try:
        while len(found) < len(jobs):
            coming = asyncio.create_task(told.get())
            await asyncio.wait((coming, gone), return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                raise RequestError("the client has gone.", status=499)
            index, what = coming.result()
            if isinstance(what, Exception):
                raise what
            if isinstance(what, Whole):
                found[index] = what
    finally:
        gone.cancel()
        for job in jobs:
            job.cancel()
    return [found[index] for index in range(len(jobs))]


async def _gone(request: Request) -> None:
    """Return when the client has gone; its body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
            if isinstance(what, Piece):
                yield event(form.piece(index, what))
            else:
                found.append(what)
                yield event(form.end(index, what.reason))
        if wants_usage:
            yield event(form.used(found, num_prompt))
        yield event(None)
    finally:
        for job in jobs:
            job.cancel()
