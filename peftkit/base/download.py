"""What is told of a download: bytes, of how many.

huggingface_hub does the rest: a connection that breaks is opened again where it broke, and files
that are whole in its cache are not fetched again. Of a process that ends in the middle, the file
that was under way begins anew (files in Xet storage: but for what its own cache of chunks holds).
"""

from __future__ import annotations

import inspect
import io
from typing import Any

from tqdm import tqdm
from transformers.utils import hub

from peftkit.events import Listener, Progress


def told(on_event: Listener) -> dict[str, Any]:
    """Return the argument with which transformers tells of the bytes of weights that it fetches."""
    if "tqdm_class" not in inspect.signature(hub.cached_files).parameters:  # older ones cannot
        return {}
    most = 0

    class Told(tqdm):
        """A bar that is not drawn; of several over the same bytes the furthest counts."""

        monitor_interval = 0  # no thread of its own

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **(more | {"file": io.StringIO(), "disable": False}))

        def display(self, *_: Any, **__: Any) -> bool:
            nonlocal most
            if self.unit == "B" and self.total and self.n >= most:
                most = int(self.n)
                on_event(Progress("Downloading the base", most, int(self.total), "B"))
            return True

    return {"tqdm_class": Told}
