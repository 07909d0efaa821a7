"""The interfaces of a server that trains, in the words of other services' clients."""

from __future__ import annotations

from importlib.util import find_spec

from peftkit.serve.training import Dialect, Training
from peftkit.serve.tuning import api as tuning


def dialects(training: Training) -> list[Dialect]:
    """Return the interfaces that a server has; Tinker's needs protobuf."""
    spoken = [tuning.dialect(training)]
    if find_spec("google") is None or find_spec("google.protobuf") is None:
        training.log("Tinker's clients are not answered: pip install 'peftkit[train-api]'")
        return spoken
    from peftkit.serve.tinker import api as tinker

    return [*spoken, tinker.dialect(training)]
