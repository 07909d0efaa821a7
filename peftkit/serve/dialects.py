"""The interfaces of a server that trains, in the words of other services' clients."""

from __future__ import annotations

from importlib.util import find_spec

from starlette.routing import BaseRoute

from peftkit.serve.training import Training
from peftkit.serve.tuning import api as tuning


def routes(training: Training) -> list[BaseRoute]:
    """Return the paths of all dialects; Tinker's needs protobuf."""
    found = tuning.routes(training)
    if find_spec("google") is None or find_spec("google.protobuf") is None:
        training.say("Tinker's clients are not answered: pip install 'peftkit[train-api]'")
        return found
    from peftkit.serve.tinker import api as tinker

    return [*found, *tinker.routes(training)]


def begin(training: Training) -> None:
    """Queue the jobs that were under way when the server ended."""
    tuning.begin(training)
