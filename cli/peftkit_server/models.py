"""Model registry of a server: the base, the operator's adapters, and clients' adapters.

Clients' adapters have public names ("ft:base:local::3f0c9a1b"), which only their owner sees and
which are not valid in the bank. The first request for an adapter loads it; the bank drops the
least recently used ones.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from peftkit.base.new_tokens import style_over
from peftkit.data.style import Style
from peftkit.errors import AdapterError, did_you_mean
from peftkit.files.strict_json import Json
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.peft.load import read_adapter
from peftkit.inference.bank import AdapterBank
from peftkit_server.quotas import MODEL, WEIGHTS
from peftkit_server.refusals import RequestError
from peftkit_server.store import Store, new_id

BARE = "base"
"""Model name of the base without an adapter."""
KIND = MODEL
"""Kind of the store's documents of published adapters."""
MAX_LOADED = 16
"""Published adapters in memory."""


class Models:
    """The models that clients may request.

    Args:
        store: Store of published adapters; None: clients cannot publish adapters.
        names: Further names of the base.
    """

    def __init__(
        self, bank: AdapterBank, store: Store | None = None, names: Sequence[str] = ()
    ) -> None:
        self.bank, self._store = bank, store
        self._operator_names = bank.names  # without clients' adapters
        self.base_names = [*dict.fromkeys((BARE, *names))]
        self._loaded: OrderedDict[str, str] = OrderedDict()
        self._style = cache(_style_of)
        self._expires = 0.0  # when the next model may expire
        self.sweep()

    def sweep(self) -> None:
        """Delete the models that have expired; free of cost until one does.

        It runs at the start, by a timer, and before all that lists, loads or counts models, so
        that no other code looks at their times.
        """
        if self._store is None or (now := time.time()) < self._expires:
            return
        self._expires = math.inf
        for model in self._store.all(KIND):
            if (expires := model.get("expires")) is None:
                continue
            if expires <= now:
                self.discard(model["name"], Path(model["folder"]))
            else:
                self._expires = min(self._expires, expires)

    def publish(self, name: str, folder: Path, owner: str, *, expires: float | None = None) -> None:
        """Register an adapter folder under a public name of its owner; restarts keep it.

        Args:
            expires: When the model is removed, in seconds since 1970.
        """
        assert self._store is not None
        inner = new_id("published-")
        body = {
            "name": name,
            "inner": inner,
            "folder": str(folder.resolve()),
            "expires": expires,
            "size": size_of(folder),
        }
        self._store.put(KIND, name, body, owner=owner, parent=inner)
        if expires is not None:
            self._expires = min(self._expires, expires)

    def delete(self, name: str, owner: str) -> None:
        """Delete a client's model and its files; running completions continue.

        Raises:
            RequestError: The model does not exist, has another owner, or is the operator's.
        """
        if name in (*self.base_names, *self._operator_names):
            raise RequestError(
                f"'{name[:80]}' is a model of the server's operator.",
                fix="Delete models that your jobs and programs saved.",
                status=403,
                param="model",
            )
        self.discard(name, Path(self._published(name, owner)["folder"]))

    def discard(self, name: str, folder: Path, *documents: tuple[str, str]) -> None:
        """Remove a published model with its folder; running completions continue.

        Args:
            documents: Further documents of the store that describe it, by kind and id.
        """
        assert self._store is not None
        documents = (KIND, name), (WEIGHTS, name), *documents
        self._store.discard(documents, lambda: shutil.rmtree(folder, ignore_errors=True))

    def inner(self, name: str, owner: str = "") -> str | None:
        """Return a model's adapter name in the bank; None: the base.

        Raises:
            RequestError: The model does not exist, or has another owner.
        """
        if name in self.base_names:
            return None
        if name in self._operator_names:
            return name
        return str(self._published(name, owner)["inner"])

    def folder(self, name: str, owner: str = "") -> Path | None:
        """Return a model's adapter folder; None: the base.

        Raises:
            RequestError: As `inner`.
        """
        if name in self.base_names:
            return None
        if name in self._operator_names:
            return self.bank.file(name).folder
        return Path(self._published(name, owner)["folder"])

    def style(self, name: str, owner: str = "") -> Style:
        """Return a model's prompt style.

        Raises:
            RequestError: As `inner`.
        """
        folder = self.folder(name, owner)
        if folder is None or name in self._operator_names:
            return self.bank.style(None if folder is None else name)
        try:
            return self._style(folder, self.bank.base.tokenizer)
        except AdapterError as error:
            raise _unusable(name, folder, error) from None

    def listed(self, owner: str = "") -> list[str]:
        """Return the model names that an owner may request."""
        self.sweep()
        published = self._store.all(KIND, owner) if self._store else []
        names = (model["name"] for model in published)
        return [*self._operator_names, *self.base_names, *names]

    def load(self, inner: str | None) -> None:
        """Load an adapter into the bank, in the worker's thread.

        Raises:
            RequestError: Its files are not readable, or it was withdrawn.
        """
        if inner is None or inner in self._operator_names:
            return
        if inner in self._loaded:
            self._loaded.move_to_end(inner)
            return
        assert self._store is not None
        published = self._store.all(KIND, parent=inner)
        if not published:
            raise RequestError("the model was deleted.", status=404, code="model_not_found")
        (model,) = published
        try:
            self.bank.add(inner, model["folder"])
        except AdapterError as error:
            raise _unusable(model["name"], Path(model["folder"]), error) from None
        self._loaded[inner] = model["name"]
        self._make_room()

    def _make_room(self) -> None:
        for inner in [*self._loaded][: max(0, len(self._loaded) - MAX_LOADED)]:
            try:
                self.bank.drop(inner)
            except AdapterError:  # a completion uses it
                continue
            del self._loaded[inner]

    def _published(self, name: str, owner: str) -> Json:
        self.sweep()
        model = self._store.get(KIND, name, owner) if self._store else None
        if model is not None:
            return model
        names = self.listed(owner)
        first_names = ", ".join(names[:16]) + (", ..." if len(names) > 16 else "")
        raise RequestError(
            f"there is no model '{name[:80]}'.",
            found=f"The models are: {first_names}. {did_you_mean(name, names)}".rstrip(),
            status=404,
            code="model_not_found",
            param="model",
        )


def size_of(folder: Path) -> int:
    """Return the bytes of a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _unusable(name: str, folder: Path, error: AdapterError) -> RequestError:
    """Return the error for a model whose files are damaged."""
    found = str(error).replace(f"{folder}{os.sep}", "")
    return RequestError(f"the model '{name}' cannot be loaded.", found=found, status=404)


def _style_of(folder: Path, tokenizer: object) -> Style:
    recorded = read_adapter(adapter_folder(folder)).provenance.prompt_style
    return style_over(folder, recorded, tokenizer)
