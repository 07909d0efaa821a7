"""Saved weights (PEFT folders under generated names, with metadata), and listings of them.

A training run is a model, in memory or not, with its saved weights.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from peftkit.files.strict_json import Json
from peftkit_server.models import size_of
from peftkit_server.quotas import WEIGHTS
from peftkit_server.refusals import RequestError
from peftkit_server.store import Store, new_id
from peftkit_server.tinker.bodies import PATH, OfPath, RequestContext
from peftkit_server.training import Training

KIND, RUN = WEIGHTS, "tinker.model"
"""Kinds of the store's documents."""
Reply = Json
TYPES = {"weights": "training", "sampler_weights": "sampler"}
MAX_UNNAMED = 16
"""Most unnamed weights of one model; the oldest are deleted first."""


class Weights:
    """All saved weights, by path: tinker://MODEL/weights/NAME, .../sampler_weights/NAME."""

    def __init__(self, training: Training) -> None:
        self._store, self._models = training.store, training.models
        self._folder = training.folder / "tinker" / "weights"
        self._folder.mkdir(parents=True, exist_ok=True)
        for saved in self._store.all(KIND):
            if saved["is_unnamed"]:  # their samplers do not survive a restart
                self.discard(saved)
        complete = {saved["folder"] for saved in self._store.all(KIND)}
        for folder in self._folder.iterdir():
            if folder.name not in complete:
                shutil.rmtree(folder, ignore_errors=True)

    def save(
        self,
        path: str,
        owner: str,
        write: Callable[[Path], None],
        metadata: Json,
        *,
        ttl: int | None,
        overwrite: bool = False,
        is_unnamed: bool = False,
    ) -> None:
        """Save weights and publish them as a model.

        Args:
            write: Writes the adapter into a folder.
            metadata: Fields of their document: the base, the adapter's settings, the client's.
            ttl: Seconds until they expire; None: never.

        Raises:
            RequestError: The path exists, and `overwrite` is False.
        """
        previous = self.find(path, owner)
        if previous is not None and not overwrite:
            raise RequestError(f"the weights {path} exist already.", fix="Use another name.")
        folder, now = self._folder / new_id("weights-"), time.time()
        try:
            write(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        model_id, use, name = path.removeprefix("tinker://").split("/")
        body = {
            **metadata,
            "path": path,
            "model_id": model_id,
            "use": use,
            "name": name,
            "folder": folder.name,
            "time": now,
            "expires": None if ttl is None else now + ttl,
            "size": size_of(folder),
            "is_unnamed": is_unnamed,
        }
        with self._store.transaction():
            self._store.put(KIND, path, body, owner=owner, parent=model_id)
            self._models.publish(path, folder, owner, expires=body["expires"])
        if previous is not None:
            shutil.rmtree(self._folder / previous["folder"], ignore_errors=True)
        if is_unnamed:
            self.drop_unnamed(owner, model_id, keep=MAX_UNNAMED)

    def find(self, path: str, owner: str) -> Json | None:
        """Return a document; None: the weights do not exist, or have another owner."""
        self._models.sweep()
        return self._store.get(KIND, path, owner)

    def get(self, path: str, owner: str, *, with_optimizer: bool = False) -> Json:
        """Return the document of weights.

        Raises:
            RequestError: The path is invalid, or the weights do not exist, or have no optimizer
                state.
        """
        if PATH.fullmatch(path) is None:
            raise RequestError(
                f"{path[:80]!r} is not a path of weights.", fix="Use tinker://MODEL/weights/NAME."
            )
        saved = self.find(path, owner)
        if saved is None:
            raise RequestError(f"there are no weights {path}.", status=404)
        if with_optimizer and saved["use"] != "weights":
            raise RequestError(
                f"{path} has no optimizer state.",
                found="Weights for samplers are saved without an optimizer.",
                fix="Load weights of save_state(NAME), or load these without the optimizer.",
            )
        return saved

    def folder(self, saved: Json) -> Path:
        return self._folder / saved["folder"]

    def all(self, owner: str, model_id: str | None = None) -> list[Json]:
        """Return the documents of all weights of an owner, or of a model, oldest first."""
        self._models.sweep()
        return sorted(self._store.all(KIND, owner, model_id), key=lambda saved: saved["time"])

    def drop_unnamed(self, owner: str, model_id: str, *, keep: int = 0) -> None:
        """Delete the unnamed weights of a model, except the newest `keep`."""
        unnamed = [saved for saved in self.all(owner, model_id) if saved["is_unnamed"]]
        for saved in unnamed[: max(len(unnamed) - keep, 0)]:
            self.discard(saved)

    def discard(self, saved: Json) -> None:
        self._models.discard(saved["path"], self.folder(saved))


def described(saved: Json) -> dict[str, object]:
    """Return weights as an entry of Tinker's checkpoint lists."""
    return {
        "checkpoint_id": f"{saved['use']}/{saved['name']}",
        "checkpoint_type": TYPES[saved["use"]],
        "time": iso(saved["time"]),
        "tinker_path": saved["path"],
        "size_bytes": saved["size"],
        "user_metadata": texts(saved["metadata"]),
        "expires_at": None if saved["expires"] is None else iso(saved["expires"]),
    }


def iso(seconds: float) -> str:
    """Return a time in ISO 8601, UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def texts(metadata: Json) -> dict[str, str]:
    """Return metadata with all values as texts."""
    return {str(key): str(value) for key, value in metadata.items()}


class Runs:
    """The training runs of all clients.

    Args:
        last_request: Returns the time of the last request for a model; None: it is not in memory.
    """

    def __init__(
        self, store: Store, weights: Weights, last_request: Callable[[str], float | None]
    ) -> None:
        self._store, self._weights, self._last_request = store, weights, last_request

    def all(self, owner: str) -> list[Reply]:
        """Return all runs of an owner, newest first."""
        return [self._described(run, owner) for run in self._store.all(RUN, owner)[::-1]]

    def get(self, owner: str, id: str) -> Reply:
        """Return a run.

        Raises:
            RequestError: The run does not exist, or has another owner.
        """
        run = self._store.get(RUN, id, owner)
        if run is None:
            raise RequestError(f"there is no training run {id[:80]}.", status=404)
        return self._described(run, owner)

    def _described(self, run: Reply, owner: str) -> Reply:
        id = run["model_id"]
        saved = {each["use"]: described(each) for each in self._weights.all(owner, id)}
        return {
            "training_run_id": id,
            "base_model": run["base_model"],
            "model_owner": owner or "local",
            "is_lora": True,
            "lora_rank": run["config"]["rank"],
            "last_request_time": iso(self._last_request(id) or run["created"]),
            "last_checkpoint": saved.get("weights"),
            "last_sampler_checkpoint": saved.get("sampler_weights"),
            "user_metadata": texts(run["metadata"]),
        }

    def checkpoints(self, owner: str, id: str | None = None) -> list[Reply]:
        """Return the saved weights of an owner, or of a run, newest first."""
        if id is not None:
            self.get(owner, id)
        return [described(each) for each in self._weights.all(owner, id)[::-1]]

    def delete_checkpoint(self, owner: str, id: str, use: str, name: str) -> Reply:
        """Delete saved weights."""
        self._weights.discard(self._weights.get(f"tinker://{id}/{use}/{name}", owner))
        return {}

    def weights_info(self, body: OfPath, context: RequestContext) -> Reply:
        """Return the base and the adapter settings of saved weights."""
        saved = self._weights.get(body.tinker_path, context.owner)
        config = saved["config"]
        names = ("train_attn", "train_mlp", "train_unembed")
        return {
            "base_model": saved["base_model"],
            "is_lora": True,
            "lora_rank": config["rank"],
            **{name: config[name] for name in names},
        }
