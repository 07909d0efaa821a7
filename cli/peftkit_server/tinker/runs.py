"""Listings of Tinker's training runs (models, in memory or not) and their saved weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peftkit_server.refusals import RequestError
from peftkit_server.store import Store
from peftkit_server.tinker.bodies import OfPath, RequestContext
from peftkit_server.tinker.weights import Weights, described, iso, texts

MODEL = "tinker.model"
"""Kind of the store's documents."""
Reply = dict[str, Any]


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
        return [self._described(run, owner) for run in self._store.all(MODEL, owner)[::-1]]

    def get(self, owner: str, id: str) -> Reply:
        """Return a run.

        Raises:
            RequestError: The run does not exist, or has another owner.
        """
        run = self._store.get(MODEL, id, owner)
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
        self._weights.delete(f"tinker://{id}/{use}/{name}", owner)
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
