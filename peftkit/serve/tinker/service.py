"""What Tinker's clients ask for: sessions, models and their operations, samplers, saved weights.

Work is answered at once with the id of a result, for which clients come back. What is wrong with an
operation of a model is that operation's result: it has had its turn, and the next one can come.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from peftkit.errors import PeftkitError
from peftkit.inference.engine import context_length
from peftkit.serve.requests import RequestError
from peftkit.serve.store import new_id
from peftkit.serve.tinker import bodies
from peftkit.serve.tinker.bodies import Lora, RequestContext
from peftkit.serve.tinker.futures import (
    Futures,
    OperationQueue,
    PendingResult,
    ReplyCache,
    Result,
    Run,
)
from peftkit.serve.tinker.losses import loss_of, settings_of
from peftkit.serve.tinker.rows import datums_of
from peftkit.serve.tinker.samples import Samplers
from peftkit.serve.tinker.tenants import Tenants
from peftkit.serve.tinker.weights import Weights, described, iso, texts
from peftkit.serve.tinker.wire import output_of
from peftkit.serve.training import Training

MAX_MODELS = 256
"""Models that are trained."""
IDLE_SECONDS = 3600.0
"""After which a model that nobody asks for, whose client gives no sign of life, may be dropped."""
SESSION, MODEL = "tinker.session", "tinker.model"
"""Kinds of the store's documents."""
Reply = dict[str, Any]
Sized = tuple[Run, int]
"""An operation, and the bytes that it holds while it waits."""


@dataclass(eq=False, slots=True)
class Model:
    """A model that is trained; `context`: when it was last context for anything."""

    id: str
    owner: str
    base_model: str
    config: Lora
    order: OperationQueue
    context: float

    @property
    def facts(self) -> Reply:
        """What is known of its weights."""
        return {"base_model": self.base_model, "config": self.config.model_dump()}


class Service:
    """The sessions, models, samplers and results of all clients."""

    def __init__(self, training: Training) -> None:
        self._training, self._store = training, training.store
        self._futures, self._sessions = Futures(), ReplyCache[Reply]()
        self._weights, self._tenants = Weights(training), Tenants(training)
        learner = self._tenants.learner
        self.samplers = Samplers(training, self._weights, learner, self._futures)
        self._models: dict[str, Model] = {}
        self._seen: dict[str, float] = {}

    # ------------------------------------------------------------- sessions

    def create_session(self, body: bodies.NewSession, context: RequestContext) -> Reply:
        """Make a session: models and samplers are of one."""
        key = context.owner, context.key or new_id("")
        reply = self._sessions.reply(key, context.digest)
        if reply is None:
            id = new_id("")
            facts = {"session_id": id, "created": time.time(), **body.model_dump()}
            self._store.put(SESSION, id, facts, owner=context.owner)
            reply = {"type": "create_session", "session_id": id}
            self._sessions.keep(key, context.digest, reply)
        return reply

    def heartbeat(self, body: bodies.OfSession, context: RequestContext) -> Reply:
        """Say whether a session is known."""
        self._check_session(body.session_id, context.owner, status=410)
        self._seen[body.session_id] = time.time()
        return {"type": "session_heartbeat"}

    def _check_session(self, id: str, owner: str, *, status: int = 404) -> None:
        if self._store.get(SESSION, id, owner) is None:
            raise RequestError(f"there is no session {id}.", status=status)

    def _check_base(self, name: str) -> None:
        if not self._training.is_base(name):
            raise RequestError(
                f"the base here is not {name[:80]}.",
                found=f"It answers to: {', '.join(self._training.models.base_names)}.",
                fix="Ask for one of these, or start the server with --as NAME.",
            )

    def capabilities(self, owner: str) -> Reply:
        """Return the names of the base."""
        limit = context_length(self._training.bank.base.model)
        facts = {"max_context_length": limit, "trainable": True, "sampleable": True}
        names = self._training.models.base_names
        return {"supported_models": [{"model_name": name, **facts} for name in names]}

    # ------------------------------------------------------------- models

    def create_model(self, body: bodies.NewModel, context: RequestContext) -> Reply:
        """Make a model, with an adapter of its own."""
        self._check_base(body.base_model)
        seed = body.lora_config.seed
        seed = secrets.randbelow(1 << 31) if seed is None else seed
        config = body.lora_config.model_copy(update={"seed": seed})
        return self._new_model(body, context, body.base_model, config, None)

    def load_weights(self, body: bodies.Load, context: RequestContext) -> Reply:
        """Make a model of saved weights, or load them into one that has done nothing yet."""
        if body.base_model is not None:
            self._check_base(body.base_model)

        def saved_weights() -> Reply:
            return self._weights.get(body.path, context.owner, with_optimizer=body.optimizer)

        def load(id: str) -> None:
            folder = self._weights.folder(saved_weights())
            self._tenants.load(id, folder, with_optimizer=body.optimizer)

        if body.session_id is not None:
            saved = saved_weights()
            base_model = body.base_model or saved["base_model"]
            return self._new_model(body, context, base_model, Lora(**saved["config"]), load)

        def prepare(model: Model) -> Run:
            if body.seq_id != 1:
                raise RequestError(
                    "weights are loaded into a model before anything else is done with it.",
                    fix="Create a model from them: create_training_client_from_state(PATH).",
                )

            def run() -> Result:
                load(model.id)
                return {"type": "load_weights", "path": body.path, "model_id": model.id}

            return run

        place = bodies.OperationBody(model_id=str(body.model_id), seq_id=body.seq_id or 0)
        return self.submit(place, context, prepare)

    def _new_model(
        self,
        body: bodies.NewModel | bodies.Load,
        context: RequestContext,
        base_model: str,
        config: Lora,
        load: Callable[[str], None] | None,
    ) -> Reply:
        owner, session = context.owner, str(body.session_id)
        self._check_session(session, owner)
        id = f"{session}:train:{body.model_seq_id}"
        if id not in self._models:
            if self._store.get(MODEL, id) is not None:
                raise self._ended(id, owner)
            self._make_room()
            facts = {"model_id": id, "created": time.time(), "metadata": body.user_metadata}
            call = partial(self._training.worker.call, is_taken=True)  # one of a model at a time
            order = OperationQueue(call, self._futures)
            model = Model(id, owner, base_model, config, order, time.time())
            self._store.put(MODEL, id, {**facts, **model.facts}, owner=owner, parent=session)
            self._models[id] = model
        config = self._models[id].config

        def run() -> Result:
            self._tenants.add(id, config, fresh=load is None)
            try:
                if load is not None:
                    load(id)
            except BaseException:
                self._tenants.drop(id)
                raise
            return {"model_id": id, "type": "create_model" if load is None else "load_weights"}

        return self.submit(bodies.OperationBody(model_id=id, seq_id=0), context, lambda model: run)

    def _make_room(self) -> None:
        """Drop the model that has been idle for longest where there are too many.

        Raises:
            RequestError: All are in use.
        """
        if len(self._models) < MAX_MODELS:
            return
        oldest = min(self._models.values(), key=self._last_sign)
        if time.time() - self._last_sign(oldest) < IDLE_SECONDS:
            found = f"{MAX_MODELS} models are being trained."
            raise RequestError("there is no room for another model.", found=found, status=429)
        self.unload(bodies.OfModel(model_id=oldest.id), RequestContext(oldest.owner, "", 0))

    def _last_sign(self, model: Model) -> float:
        return max(model.context, self._seen.get(model.id.partition(":")[0], 0.0))

    def _model(self, id: str, owner: str) -> Model:
        model = self._models.get(id)
        if model is None or model.owner != owner:
            raise self._ended(id, owner)
        model.context = time.time()
        return model

    def _ended(self, id: str, owner: str) -> RequestError:
        """Return why there is no such model."""
        if self._store.get(MODEL, id, owner) is None:
            return RequestError(f"there is no model {id}.", status=404)
        saved = [one["path"] for one in self._weights.all(owner, id) if one["use"] == "weights"]
        fix = "Create it again, and save now and then: save_state(NAME)."
        if saved:
            fix = "Go on from them: create_training_client_from_state_with_optimizer(PATH)."
        return RequestError(
            f"the model {id} is no longer in memory.",
            found="It was unloaded, or the server was restarted. "
            + (f"Its last saved weights: {saved[-1]}." if saved else "It was never saved."),
            fix=fix,
            status=404,
        )

    def get_info(self, body: bodies.OfModel, context: RequestContext) -> Reply:
        """Say what a model is."""
        model, base = self._model(body.model_id, context.owner), self._training.bank.base
        data = {
            "arch": type(base.model).__name__,
            "model_name": model.base_model,
            "tokenizer_id": base.hub_id or base.name,
        }
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_data": data,
            "is_lora": True,
            "lora_rank": model.config.rank,
            "model_name": model.base_model,
        }

    def unload(self, body: bodies.OfModel, context: RequestContext) -> Reply:
        """Forget a model; its saved weights stay."""
        if self._store.get(MODEL, body.model_id, context.owner) is None:
            raise self._ended(body.model_id, context.owner)

        def run() -> Result:
            self._tenants.drop(body.model_id)
            self._weights.drop_unnamed(context.owner, body.model_id)
            return {"type": "unload_model", "model_id": body.model_id}

        done, pending = self._training.worker.call(run), self._futures.new(context.owner)
        done.add_done_callback(pending.finish_with)
        if (model := self._models.pop(body.model_id, None)) is not None:
            model.order.close(self._ended(model.id, context.owner))
        return {"request_id": pending.id, "model_id": body.model_id}

    # ------------------------------------------------------------- operations

    def submit(
        self,
        place: bodies.OperationBody,
        context: RequestContext,
        prepare: Callable[[Model], Run | Sized],
    ) -> Reply:
        """Queue an operation of a model; what is wrong with it is its result."""
        model = self._model(place.model_id, context.owner)
        try:
            prepared = prepare(model)
        except PeftkitError as error:
            prepared = _raising(error)
        run, size = prepared if isinstance(prepared, tuple) else (prepared, context.size)
        for other in [*self._models.values()]:
            other.order.give_up_lost()  # a client that is gone does not ask for its results
        id = model.order.submit(place.seq_id, context.digest, model.owner, run, size)
        return {"request_id": id, "model_id": model.id}

    def forward(self, message: Any, model: Model) -> Sized:
        """Return the operation of a message `ForwardBackward`, and the bytes that it holds."""
        loss = loss_of(message.loss)
        given = {name: one.text or one.number for name, one in message.config.items()}
        settings = settings_of(message.loss, given or dict(message.old_config))
        rows = datums_of(message.data, loss, self._training.bank.base.model)
        forward, backward = self._tenants.learner.forward, not message.forward_only

        def run() -> Result:
            outputs, total = self._tenants.run(
                model.id, lambda tenant: forward(tenant, rows, loss, settings, backward)
            )
            return output_of(outputs, {"loss:sum": total})

        return run, sum(row.num_bytes for row in rows)

    def step(self, body: bodies.Step, model: Model) -> Run:
        """Return the operation that takes a step."""

        def run() -> Result:
            norm = self._tenants.run(model.id, lambda tenant: tenant.step(body.adam_params))
            return {"metrics": {"grad_norm:mean": norm}}

        return run

    def save(self, body: bodies.Save, model: Model) -> Run:
        """Return the operation that saves a model with its optimizer."""
        path = f"tinker://{model.id}/weights/{body.path or f'step-{body.seq_id}'}"

        def run() -> Result:
            self._write(path, body, model, with_optimizer=True, overwrite=body.overwrite)
            return {"type": "save_weights", "path": path}

        return run

    def save_for_sampler(self, body: bodies.SaveForSampler, model: Model) -> Run:
        """Return the operation that saves a model to be sampled from, with or without a name."""
        number = body.sampling_session_seq_id
        name = body.path or f"-ephemeral-{body.seq_id}"  # a client's begins otherwise
        path = f"tinker://{model.id}/sampler_weights/{name}"

        def run() -> Result:
            self._write(path, body, model, with_optimizer=False, is_unnamed=number is not None)
            if number is None:
                return {"type": "save_weights_for_sampler", "path": path}
            session = model.id.partition(":")[0]
            id = self.samplers.add(session, number, model.owner, model.base_model, path)
            return {"type": "save_weights_for_sampler", "sampling_session_id": id}

        return run

    def _write(
        self,
        path: str,
        body: bodies.Save | bodies.SaveForSampler,
        model: Model,
        *,
        with_optimizer: bool,
        overwrite: bool = False,
        is_unnamed: bool = False,
    ) -> None:
        """Save a model's weights as they are now; see `Weights.save`."""
        self._weights.save(
            path,
            model.owner,
            lambda folder: self._tenants.save(model.id, folder, with_optimizer=with_optimizer),
            {**model.facts, "metadata": body.user_metadata},
            ttl=body.ttl_seconds,
            overwrite=overwrite,
            is_unnamed=is_unnamed,
        )

    # ------------------------------------------------------------- samples

    def create_sampler(self, body: bodies.NewSampler, context: RequestContext) -> Reply:
        """Make a sampler of the base, or of saved weights."""
        self._check_session(body.session_id, context.owner)
        base_model, path = body.base_model, body.model_path
        if path is not None:
            base_model = self._weights.get(path, context.owner)["base_model"]
        elif base_model is None:
            raise RequestError("a sampler needs base_model or model_path.")
        else:
            self._check_base(base_model)
        number = body.sampling_session_seq_id
        id = self.samplers.add(body.session_id, number, context.owner, str(base_model), path)
        return {"type": "create_sampling_session", "sampling_session_id": id}

    # ------------------------------------------------------------- results, weights

    def pending(self, body: bodies.OfFuture, context: RequestContext) -> PendingResult:
        """Return a result to come."""
        return self._futures.get(body.request_id, context.owner)

    def cancel(self, body: bodies.OfFuture, context: RequestContext) -> Reply:
        """Stop what nobody waits for."""
        self.pending(body, context).cancel()
        return {}

    def weights_info(self, body: bodies.OfPath, context: RequestContext) -> Reply:
        """Say what saved weights are."""
        saved = self._weights.get(body.tinker_path, context.owner)
        config = saved["config"]
        parts = {name: config[name] for name in ("train_attn", "train_mlp", "train_unembed")}
        facts = {"base_model": saved["base_model"], "is_lora": True, "lora_rank": config["rank"]}
        return {**facts, **parts}

    def runs(self, owner: str) -> list[Reply]:
        """Return all models of an owner, the newest first."""
        return [self._run(facts, owner) for facts in self._store.all(MODEL, owner)[::-1]]

    def run(self, owner: str, id: str) -> Reply:
        """Return a model, trained now or earlier."""
        facts = self._store.get(MODEL, id, owner)
        if facts is None:
            raise RequestError(f"there is no training run {id[:80]}.", status=404)
        return self._run(facts, owner)

    def _run(self, facts: Reply, owner: str) -> Reply:
        id = facts["model_id"]
        model = self._models.get(id)
        saved = {one["use"]: described(one) for one in self._weights.all(owner, id)}
        return {
            "training_run_id": id,
            "base_model": facts["base_model"],
            "model_owner": owner or "local",
            "is_lora": True,
            "lora_rank": facts["config"]["rank"],
            "last_request_time": iso(facts["created"] if model is None else model.context),
            "last_checkpoint": saved.get("weights"),
            "last_sampler_checkpoint": saved.get("sampler_weights"),
            "user_metadata": texts(facts["metadata"]),
        }

    def checkpoints(self, owner: str, id: str | None = None) -> list[Reply]:
        """Return the saved weights of an owner, or of a model, the newest first."""
        if id is not None:
            self.run(owner, id)
        return [described(one) for one in self._weights.all(owner, id)[::-1]]

    def delete_checkpoint(self, owner: str, id: str, use: str, name: str) -> Reply:
        """Delete saved weights."""
        self._weights.delete(f"tinker://{id}/{use}/{name}", owner)
        return {}


def _raising(error: PeftkitError) -> Run:
    def run() -> Result:
        raise error

    return run
