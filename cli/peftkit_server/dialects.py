"""The training APIs of a server: OpenAI's fine-tuning API and Tinker's."""

from __future__ import annotations

from importlib.util import find_spec

from peftkit.errors import install_extra
from peftkit_server.training import Dialect, Training
from peftkit_server.tuning import api as tuning


def dialects(training: Training) -> list[Dialect]:
    """Return the training APIs; Tinker's requires protobuf."""
    openai = tuning.dialect(training)
    if find_spec("google") is None or find_spec("google.protobuf") is None:
        training.log(f"Tinker's API needs protobuf. {install_extra('train-api')}")
        return [openai]
    from peftkit_server.tinker import api as tinker

    return [openai, tinker.dialect(training)]
