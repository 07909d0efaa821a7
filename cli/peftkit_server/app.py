"""The server as an ASGI application: routes, limits and access."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route

from peftkit.errors import PeftkitError, install_extra
from peftkit.inference.bank import AdapterBank
from peftkit.inference.engine import Limits as EngineLimits
from peftkit.inference.open_engine import tokens_that_fit
from peftkit_server.access import Gate
from peftkit_server.clients.api import client_routes
from peftkit_server.completions import ChatService
from peftkit_server.endpoints import COMPLETING
from peftkit_server.limits import Limits
from peftkit_server.metrics import PATH, Measure, ServerMetrics
from peftkit_server.models import Models
from peftkit_server.quotas import Intake, Quotas
from peftkit_server.refusals import hide, refuse, refuse_route, wrong_routes
from peftkit_server.store import Store, StoreError
from peftkit_server.threads import DaemonThreads
from peftkit_server.training import Dialect, Training, TrainingOptions
from peftkit_server.tuning import api as tuning
from peftkit_server.worker import Worker

PREFILL_TOKENS = 256
"""Prompt tokens to compute between two decoding steps."""
LEFT_TO_TRAIN = 0.5
"""Share of the free memory that a training server reserves for training steps."""
PREFIX_TOKENS = 8192
"""Tokens of shared prefixes to keep in the KV cache for later prompts."""
BODY_THREADS = 4
"""Bodies of training APIs that are parsed simultaneously."""
SWEEP_SECONDS = 60.0
"""Time between two removals of expired models."""


def make_app(
    bank: AdapterBank,
    *,
    keys: Sequence[str] = (),
    limits: Limits | None = None,
    training: TrainingOptions | None = None,
) -> Starlette:
    """Return the application that serves a bank's adapters and its base.

    Args:
        keys: Accepted keys; every path except /health requires one. Without keys, the server
            accepts requests from this machine only.
        training: Settings of a training server, which stores its clients' files, jobs and weights.

    Raises:
        OutputError: The folder of `training` cannot be used.
    """
    limits = replace(limits or Limits(), num_keys=len(keys))
    store = Store(training.folder) if training else None
    models = Models(bank, store, training.names if training else ())
    hide(bank.base.name, *(bank.file(name).folder for name in bank.names))
    if training:
        hide(training.folder)
    worker = Worker(
        bank,
        limits=EngineLimits(
            rows=limits.max_batch,
            tokens=tokens_that_fit(
                bank.base.model, bank.base.tokenizer, left=LEFT_TO_TRAIN if training else 0.0
            ),
            prefill=PREFILL_TOKENS,
            prefix_tokens=PREFIX_TOKENS,
        ),
        max_waiting=limits.max_waiting,
        share=limits.share,
        ready=models.load,
    )
    service, metrics = ChatService(bank, models, worker, limits), ServerMetrics(worker)
    threads = DaemonThreads(BODY_THREADS, "peftkit-bodies", limits.share)
    training_apis: Sequence[Dialect] = ()
    if training and store:
        training_apis = _dialects(
            Training(
                options=training,
                bank=bank,
                worker=worker,
                store=store,
                models=models,
                quotas=Quotas(limits, store, models.sweep),
                threads=threads,
            )
        )

    async def sweep() -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            with suppress(StoreError):  # the disk is full
                await threads.result(models.sweep, "")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        worker.start()
        sweeping = asyncio.create_task(sweep())
        try:
            for dialect in training_apis:
                dialect.on_start()
            yield
        finally:
            sweeping.cancel()
            service.close()
            threads.shutdown()
            for dialect in training_apis:
                dialect.on_stop()
            await asyncio.to_thread(worker.stop)
            if store is not None:
                store.close()

    routes: list[BaseRoute] = [
        Route("/health", service.health),
        Route(PATH, metrics.respond),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/v1/models/{name:path}", service.delete_model, methods=["DELETE"]),
        *(
            Route(path, partial(service.respond, parse=parse), methods=["POST"])
            for path, parse in (
                ("/v1/chat/completions", service.chat),
                ("/v1/completions", service.text),
                ("/inference/v1/generate", service.tokens),
            )
        ),
        *wrong_routes(COMPLETING),
        *client_routes(service, limits),
        *(route for dialect in training_apis for route in dialect.routes),
    ]
    # with keys, web pages cannot use a visitor's access: browsers do not add the key
    cors = [Middleware(CORSMiddleware, allow_origins="*", allow_methods="*", allow_headers="*")]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Measure, metrics=metrics, routes=routes),
            *(cors if keys else ()),
            Middleware(Gate, keys=keys),
            Middleware(Intake, limits=limits),
        ],
        exception_handlers={PeftkitError: refuse, HTTPException: refuse_route},
        lifespan=lifespan,
    )
    app.state.worker = worker
    return app


def _dialects(training: Training) -> list[Dialect]:
    """Return the training APIs; Tinker's requires protobuf."""
    openai = tuning.dialect(training)
    if find_spec("google") is None or find_spec("google.protobuf") is None:
        training.log(f"Tinker's API needs protobuf. {install_extra('train-api')}")
        return [openai]
    from peftkit_server.tinker import api as tinker

    return [openai, tinker.dialect(training)]
