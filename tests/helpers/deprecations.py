"""What transformers logs when code of peftkit uses a name that it will remove.

Its FutureWarnings are errors in the suite; renamed arguments and outputs are only logged.
"""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers

ROOT = Path(__file__).parents[2]
PASSING = (logging.__file__, f"{Path(transformers.__file__).parent}/utils/", "torch/nn/modules/")
"""Files between a caller and the message that it causes."""


class _Deprecations(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "deprecated" not in record.getMessage():
            return
        files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
        caller = next(f for f in files if f != __file__ and not any(p in f for p in PASSING))
        if caller.startswith((f"{ROOT}/peftkit/", f"{ROOT}/cli/")):
            self.messages.append(f"{caller}: {record.getMessage()}")


@contextmanager
def deprecations() -> Iterator[list[str]]:
    """Collect the messages that code of peftkit causes."""
    handler, logger = _Deprecations(), logging.getLogger("transformers")
    once: Any = logging.Logger.warning_once  # type: ignore[attr-defined]  # transformers adds it
    once.cache_clear()
    logger.addHandler(handler)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)
