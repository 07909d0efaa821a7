"""`/metrics` of the server (docs/production.md), through prometheus_client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peftkit.errors import install_extra
from peftkit.kernels.device import gpu_of, resident_bytes
from peftkit_server.refusals import RequestError
from peftkit_server.worker import Worker

PATH = "/metrics"
UNKNOWN = "unknown"
"""The route of requests to paths that the server does not have."""
METHODS = {"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"}
OTHER = "other"
"""The method of requests with any other method: a client may invent names."""
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
"""Upper limits of the histogram of latencies, in seconds."""


class ServerMetrics:
    """The metrics of one server.

    Args:
        worker: Its queue and its counts of tokens are read when Prometheus requests them.
    """

    def __init__(self, worker: Worker) -> None:
        self.is_available = find_spec("prometheus_client") is not None
        if not self.is_available:
            return
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self._registry = CollectorRegistry()
        self._requests = Counter(
            "peftkit_requests",
            "HTTP responses",
            ["method", "route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "peftkit_request_seconds",
            "Time until the last byte of a response",
            ["route"],
            buckets=BUCKETS,
            registry=self._registry,
        )
        self._registry.register(_Gauges(worker))

    async def respond(self, request: Request) -> Response:
        """Return the metrics."""
        if not self.is_available:
            raise RequestError(
                "the server has no metrics.",
                found="Not installed: prometheus_client.",
                fix=install_extra("metrics"),
                status=501,
            )
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def record(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one response."""
        if self.is_available:
            self._requests.labels(method, route, str(status)).inc()
            self._seconds.labels(route).observe(seconds)


class Measure:
    """Middleware that records each response; the paths of a route count together."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, routes: Sequence[BaseRoute]) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and record its status and its duration."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            seconds = time.perf_counter() - began
            route = _route_of(scope, self._routes)
            method = scope["method"] if scope["method"] in METHODS else OTHER
            self._metrics.record(method, route, status, seconds)


def _route_of(scope: Scope, routes: Sequence[BaseRoute]) -> str:
    """Return the pattern of a request's path: ids in paths make no new label."""
    for route in routes:
        if route.matches(scope)[0] is not Match.NONE:
            return str(getattr(route, "path", UNKNOWN))
    return UNKNOWN


class _Gauges:
    """Collector of prometheus_client that reads the worker at each request."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Any]:
        """Yield the metrics that the worker knows."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        worker, batch = self._worker, self._worker.batch
        prompt, generated = batch.num_prompt, batch.num_generated
        for name, text, number in (
            ("peftkit_prompt_tokens", "Tokens of prompts that the engine has begun", prompt),
            ("peftkit_generated_tokens", "Generated tokens of ended completions", generated),
        ):
            yield CounterMetricFamily(name, text, value=number)
        for name, text, number in (
            ("peftkit_prompts_waiting", "Prompts in the queue", batch.num_waiting),
            ("peftkit_prompts_running", "Prompts that generate tokens", batch.num_running),
            ("peftkit_jobs_waiting", "Training jobs in the queue", worker.num_jobs_waiting),
            ("peftkit_jobs_running", "Training jobs that run", int(worker.is_training)),
            ("peftkit_operations_waiting", "Operations in the queue", worker.num_operations),
        ):
            yield GaugeMetricFamily(name, text, value=number)
        memory = GaugeMetricFamily("peftkit_memory_bytes", "Used memory", labels=["of"])
        memory.add_metric(["process"], resident_bytes())
        device = worker.bank.base.device
        if (gpu := gpu_of(device)) is not None:
            memory.add_metric(["gpu"], gpu.used(device))
        yield memory
