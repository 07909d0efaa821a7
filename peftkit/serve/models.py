"""The models that a server has: the base, the operator's adapters, and those that clients made.

Clients' adapters have public names ("ft:base:local::3f0c9a1b"), which the bank does not allow and
which only their owner sees. They are loaded when they are first asked for, and leave the bank when
many others were used since.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from peftkit.data.generation import default_style
from peftkit.data.style import Style
from peftkit.errors import AdapterError, did_you_mean
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.peft.load import read_adapter
from peftkit.inference.bank import AdapterBank
from peftkit.serve.requests import RequestError
from peftkit.serve.store import Store, new_id

BARE = "base"
"""Model name of the base without an adapter."""
KIND = "model"
"""Of the store's documents of published adapters."""
MAX_LOADED = 16
"""Published adapters in memory."""


class Models:
    """What clients may name as a model.

    Args:
        store: Keeps the published adapters; None: none can be published.
        names: Further names of the base.
    """

    def __init__(
        self, bank: AdapterBank, store: Store | None = None, names: Sequence[str] = ()
    ) -> None:
        self.bank, self._store = bank, store
        self._own = bank.names  # the operator's; clients' come and go
        self.base_names = [*dict.fromkeys((BARE, *names))]
        self._loaded: OrderedDict[str, str] = OrderedDict()
        self._style = cache(_style_of)
        if store is not None:
            _give_parents(store)

    def publish(self, name: str, folder: Path, owner: str, *, expires: float | None = None) -> None:
        """Give an adapter folder a public name, for its owner; from a restart on, too.

        Args:
            expires: When it is there no more, in seconds since 1970.
        """
        assert self._store is not None
        inner = new_id("published-")
        body = {"name": name, "inner": inner, "folder": str(folder.resolve()), "expires": expires}
        self._store.put(KIND, name, body, owner=owner, parent=inner)

    def withdraw(self, name: str) -> None:
        """Take a published name back; answers that are under way go on."""
        assert self._store is not None
        self._store.delete(KIND, name)

    def inner(self, name: str, owner: str = "") -> str | None:
        """Return the name of a model in requests to the engine; None: the base.

        Raises:
            RequestError: There is none of this name, or it is another owner's.
        """
        if name in self.base_names:
            return None
        if name in self._own:
            return name
        return str(self._published(name, owner)["inner"])

    def folder(self, name: str, owner: str = "") -> Path | None:
        """Return a model's adapter folder; None: it is the base.

        Raises:
            RequestError: As `inner`.
        """
        if name in self.base_names:
            return None
        if name in self._own:
            return self.bank.file(name).folder
        return Path(self._published(name, owner)["folder"])

    def style(self, name: str, owner: str = "") -> Style:
        """Return how prompts are written for a model.

        Raises:
            RequestError: As `inner`.
        """
        folder = self.folder(name, owner)
        if folder is None or name in self._own:
            return self.bank.style(None if folder is None else name)
        return self._style(folder) or default_style(self.bank.base.tokenizer)

    def listed(self, owner: str = "") -> list[str]:
        """Return the names that an owner may ask for."""
        published = self._store.all(KIND, owner) if self._store else []
        return [*self._own, *self.base_names, *(one["name"] for one in published if _is_there(one))]

    def load(self, inner: str | None) -> None:
        """Have an adapter in the bank; to be called in the thread that has the model.

        Raises:
            RequestError: Its files cannot be read, or were withdrawn.
        """
        if inner is None or inner in self._own:
            return
        if inner in self._loaded:
            self._loaded.move_to_end(inner)
            return
        assert self._store is not None
        published = self._store.all(KIND, parent=inner)
        if not published:
            raise RequestError("the model is gone.", status=404, code="model_not_found")
        (model,) = published
        try:
            self.bank.add(inner, model["folder"])
        except AdapterError as error:
            raise RequestError(
                f"the model '{model['name']}' cannot be loaded.", found=str(error), status=404
            ) from None
        self._loaded[inner] = model["name"]
        self._make_room()

    def _make_room(self) -> None:
        for inner in [*self._loaded][: max(0, len(self._loaded) - MAX_LOADED)]:
            try:
                self.bank.drop(inner)
            except AdapterError:  # an answer has it
                continue
            del self._loaded[inner]

    def _published(self, name: str, owner: str) -> dict[str, Any]:
        model = self._store.get(KIND, name, owner) if self._store else None
        if model is not None and _is_there(model):
            return model
        names = self.listed(owner)
        shown = ", ".join(names[:16]) + (", ..." if len(names) > 16 else "")
        raise RequestError(
            f"there is no model '{name[:80]}' here.",
            found=f"The models are: {shown}. {did_you_mean(name, names)}".rstrip(),
            status=404,
            code="model_not_found",
            param="model",
        )


def _give_parents(store: Store) -> None:
    """Have adapters found by their inner names that were published when those were no parents."""
    with store.transaction():
        for body in store.all(KIND, parent=""):
            name = body["name"]
            store.put(KIND, name, body, owner=store.owner(KIND, name), parent=body["inner"])


def _is_there(model: dict[str, Any]) -> bool:
    expires = model.get("expires")
    return expires is None or time.time() <= expires


def _style_of(folder: Path) -> Style | None:
    return read_adapter(adapter_folder(folder)).provenance.prompt_style
