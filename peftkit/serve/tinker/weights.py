"""Saved weights: PEFT folders with names of the server's own, and what is known of each."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from peftkit.serve.requests import RequestError
from peftkit.serve.store import new_id
from peftkit.serve.tinker.bodies import PATH
from peftkit.serve.training import Training

KIND = "tinker.weights"
TYPES = {"weights": "training", "sampler_weights": "sampler"}
MAX_UNNAMED = 16
"""Weights without a name that stay of one model; the oldest go."""


class Weights:
    """All saved weights, by path: tinker://MODEL/weights/NAME, .../sampler_weights/NAME."""

    def __init__(self, training: Training) -> None:
        self._store, self._models = training.store, training.models
        self._folder = training.folder / "tinker" / "weights"
        self._folder.mkdir(parents=True, exist_ok=True)
        for one in self._store.all(KIND):
            if one["is_unnamed"]:  # their samplers ended with the server
                self._remove(one)
        known = {one["folder"] for one in self._store.all(KIND)}
        for folder in self._folder.iterdir():
            if folder.name not in known:  # a save did not end
                shutil.rmtree(folder, ignore_errors=True)

    def save(
        self,
        path: str,
        owner: str,
        write: Callable[[Path], None],
        facts: dict[str, Any],
        *,
        ttl: int | None,
        overwrite: bool = False,
        is_unnamed: bool = False,
    ) -> None:
        """Write weights.

        Args:
            write: Writes them into a folder.
            facts: What is to be known of them besides.

        Raises:
            RequestError: The path is taken.
        """
        before = self.find(path, owner)
        if before is not None and not overwrite:
            raise RequestError(f"there are weights {path} already.", fix="Take another name.")
        folder, now = self._folder / new_id("weights-"), time.time()
        try:
            write(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        model_id, use, name = path.removeprefix("tinker://").split("/")
        body = {
            **facts,
            "path": path,
            "model_id": model_id,
            "use": use,
            "name": name,
            "folder": folder.name,
            "time": now,
            "expires": None if ttl is None else now + ttl,
            "size": sum(file.stat().st_size for file in folder.iterdir()),
            "is_unnamed": is_unnamed,
        }
        with self._store.transaction():
            self._store.put(KIND, path, body, owner=owner, parent=model_id)
            self._models.publish(path, folder, owner, expires=body["expires"])
        if before is not None:
            shutil.rmtree(self._folder / before["folder"], ignore_errors=True)
        if is_unnamed:
            self.drop_unnamed(owner, model_id, keep=MAX_UNNAMED)

    def find(self, path: str, owner: str) -> dict[str, Any] | None:
        """Return what is known of weights; None: there are none, or they are another owner's."""
        saved = self._store.get(KIND, path, owner)
        if saved is not None and saved["expires"] is not None and saved["expires"] < time.time():
            self._remove(saved)
            return None
        return saved

    def get(self, path: str, owner: str, *, with_optimizer: bool = False) -> dict[str, Any]:
        """Return what is known of weights.

        Raises:
            RequestError: The path is none, or there are no such weights, or none with an optimizer.
        """
        if PATH.fullmatch(path) is None:
            raise RequestError(
                f"{path[:80]!r} is no path of weights.", fix="Give tinker://MODEL/weights/NAME."
            )
        saved = self.find(path, owner)
        if saved is None:
            raise RequestError(f"there are no weights {path}.", status=404)
        if with_optimizer and saved["use"] != "weights":
            raise RequestError(
                f"there is no optimizer with {path}.",
                found="Weights for samplers are saved without an optimizer.",
                fix="Load what save_state(NAME) saved, or these without an optimizer.",
            )
        return saved

    def folder(self, saved: dict[str, Any]) -> Path:
        """Return the folder of weights."""
        return self._folder / saved["folder"]

    def all(self, owner: str, model_id: str | None = None) -> list[dict[str, Any]]:
        """Return what is known of all weights of an owner, or of a model; the oldest first."""
        saved = sorted(self._store.all(KIND, owner, model_id), key=lambda one: one["time"])
        return [one for one in saved if self.find(one["path"], owner) is not None]

    def delete(self, path: str, owner: str) -> None:
        """Remove weights.

        Raises:
            RequestError: As `get`.
        """
        self._remove(self.get(path, owner))

    def drop_unnamed(self, owner: str, model_id: str, *, keep: int = 0) -> None:
        """Remove the weights of a model that have no name, but for the newest ones."""
        unnamed = [one for one in self.all(owner, model_id) if one["is_unnamed"]]
        for one in unnamed[: max(len(unnamed) - keep, 0)]:
            self._remove(one)

    def _remove(self, one: dict[str, Any]) -> None:
        with self._store.transaction():
            self._store.delete(KIND, one["path"])
            self._models.withdraw(one["path"])
        shutil.rmtree(self._folder / one["folder"], ignore_errors=True)


def described(one: dict[str, Any]) -> dict[str, Any]:
    """Return weights as clients list them."""
    return {
        "checkpoint_id": f"{one['use']}/{one['name']}",
        "checkpoint_type": TYPES[one["use"]],
        "time": iso(one["time"]),
        "tinker_path": one["path"],
        "size_bytes": one["size"],
        "user_metadata": texts(one["metadata"]),
        "expires_at": None if one["expires"] is None else iso(one["expires"]),
    }


def iso(seconds: float) -> str:
    """Return a time as clients read it."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


def texts(metadata: dict[str, Any]) -> dict[str, str]:
    """Return metadata as clients read it."""
    return {str(key): str(value) for key, value in metadata.items()}
