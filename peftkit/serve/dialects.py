"""The interfaces of a server that trains, in the words of other services' clients."""

from __future__ import annotations

from starlette.routing import BaseRoute

from peftkit.serve.training import Training
from peftkit.serve.tuning import api as tuning


def routes(training: Training) -> list[BaseRoute]:
    """Return the paths of all dialects."""
    return [*tuning.routes(training)]


def begin(training: Training) -> None:
    """Queue the jobs that were under way when the server ended."""
    tuning.begin(training)
