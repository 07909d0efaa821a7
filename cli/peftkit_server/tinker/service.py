"""Tinker's training service: models and their operations, samplers, saved weights.

Requests for work return the id of a pending result, which clients poll. An invalid operation of a
model fails with a result; it uses up its number, and later operations run.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from peftkit.errors import PeftkitError
from peftkit.forward.row_lengths import context_length
from peftkit_server.refusals import RequestError
from peftkit_server.tinker import bodies
from peftkit_server.tinker.bodies import Lora, RequestContext, check_metadata
from peftkit_server.tinker.futures import Futures, OperationQueue, PendingResult, Result, Run
from peftkit_server.tinker.losses import loss_of, settings_of
from peftkit_server.tinker.rows import datums_of
from peftkit_server.tinker.samples import Samplers
from peftkit_server.tinker.sessions import Sessions
from peftkit_server.tinker.tenants import Tenants
from peftkit_server.tinker.weights import RUN, Runs, Weights
from peftkit_server.tinker.wire import output_of
from peftkit_server.training import Training

IDLE_SECONDS = 3600.0
"""Seconds without requests or heartbeats after which a model may be dropped."""
Reply = dict[str, Any]
SizedRun = tuple[Run, int]
"""An operation, and its bytes while it waits."""


@dataclass(eq=False, slots=True)
class Model:
    """A model in training.

    Attributes:
        last_request: Time of the last request for it.
    """

    id: str
    owner: str
    base_model: str
    config: Lora
    operations: OperationQueue
    last_request: float

    @property
    def metadata(self) -> Reply:
        """Metadata saved with its weights."""
        return {"base_model": self.base_model, "config": self.config.model_dump()}


class Service:
    """The sessions, models, samplers and results of all clients."""

    def __init__(self, training: Training) -> None:
        self._training, self._store = training, training.store
        self.limits, self._quotas = training.limits, training.quotas
        self._futures = Futures(self.limits)
        self.sessions = Sessions(training.store, training.quotas)
        self._weights, self._tenants = Weights(training), Tenants(training)
        learner = self._tenants.learner
        self.samplers = Samplers(training, self._weights, learner, self._futures)
        self._models: dict[str, Model] = {}
        self.runs = Runs(training.store, self._weights, self._last_request)

    # ------------------------------------------------------------- models

    def _check_base(self, name: str) -> None:
        names = self._training.models.base_names
        if name not in names:
            raise RequestError(
                f"this server has no base model {name[:80]}.",
                found=f"Names of its base: {', '.join(names)}.",
                fix="Use one of these names, or start the server with --as NAME.",
            )

    def capabilities(self, owner: str) -> Reply:
        """Return the supported models: the names of the base."""
        limit = context_length(self._training.bank.base.model.config)
        fields = {"max_context_length": limit, "trainable": True, "sampleable": True}
        names = self._training.models.base_names
        return {"supported_models": [{"model_name": name, **fields} for name in names]}

    def create_model(self, body: bodies.NewModel, context: RequestContext) -> Reply:
        """Create a model with a new adapter."""
        self._check_base(body.base_model)
        seed = body.lora_config.seed
        seed = secrets.randbelow(1 << 31) if seed is None else seed
        config = body.lora_config.model_copy(update={"seed": seed})
        return self._new_model(body, context, body.base_model, config, None)

    def load_weights(self, body: bodies.Load, context: RequestContext) -> Reply:
        """Load saved weights into a new model, or into one without operations so far."""
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
                    "weights can only be loaded as a model's first operation.",
                    fix="Create a new model: create_training_client_from_state(PATH).",
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
        self.sessions.check(session, owner)
        id = f"{session}:train:{body.model_seq_id}"
        if id not in self._models:
            if self._store.get(RUN, id) is not None:
                raise self._missing(id, owner)
            self._make_room(owner)
            check_metadata(body.user_metadata, self.limits)
            # without the queue limit: a model has one operation at a time in the worker's queue
            call = partial(self._training.worker.call, owner=owner, is_accepted=True)
            operations, now = OperationQueue(call, self._futures), time.time()
            model = Model(id, owner, base_model, config, operations, now)
            document = {"model_id": id, "created": now, "metadata": body.user_metadata}
            with self._store.lock:
                self._quotas.check_record(owner)
                self._store.put(RUN, id, document | model.metadata, owner=owner, parent=session)
            self._models[id] = model
        config = self._models[id].config

        def run() -> Result:
            try:
                self._tenants.add(id, config, fresh=load is None, owner=owner)
                if load is not None:
                    load(id)
            except BaseException:
                self._tenants.drop(id)
                raise
            return {"model_id": id, "type": "create_model" if load is None else "load_weights"}

        return self.submit(bodies.OperationBody(model_id=id, seq_id=0), context, lambda model: run)

    def _make_room(self, owner: str) -> None:
        """At a limit, drop the model that has been idle for longest.

        Raises:
            RequestError: No model is idle.
        """
        limit, models = self.limits.tinker_models, [*self._models.values()]
        own, share = [each for each in models if each.owner == owner], self.limits.share(limit)
        if len(own) >= share:
            models, limit = own, share
        elif len(models) < limit:
            return

        def last_activity(model: Model) -> float:
            session = model.id.partition(":")[0]
            return max(model.last_request, self.sessions.last_heartbeat(session))

        oldest = min(models, key=last_activity)
        if time.time() - last_activity(oldest) < IDLE_SECONDS:
            whose = "of this key " if models is own else ""
            raise RequestError(
                "there is no room for another model.",
                found=f"{limit} models {whose}are in training; the limit is tinker_models.",
                fix="Unload a model first, or try again later.",
                status=429,
            )
        self.unload(bodies.OfModel(model_id=oldest.id), RequestContext(oldest.owner, "", 0))

    def _model(self, id: str, owner: str) -> Model:
        model = self._models.get(id)
        if model is None or model.owner != owner:
            raise self._missing(id, owner)
        model.last_request = time.time()
        return model

    def _missing(self, id: str, owner: str) -> RequestError:
        """Return the error for a model that does not exist or is no longer in memory."""
        if self._store.get(RUN, id, owner) is None:
            return RequestError(f"there is no model {id}.", status=404)
        paths = [each["path"] for each in self._weights.all(owner, id) if each["use"] == "weights"]
        saved = f"Its last saved weights: {paths[-1]}." if paths else "It was never saved."
        fix = "Create it again, and save it regularly: save_state(NAME)."
        if paths:
            fix = "Continue from them: create_training_client_from_state_with_optimizer(PATH)."
        return RequestError(
            f"the model {id} is no longer in memory.",
            found=f"It was unloaded, or the server restarted. {saved}",
            fix=fix,
            status=404,
        )

    def _last_request(self, id: str) -> float | None:
        model = self._models.get(id)
        return None if model is None else model.last_request

    def get_info(self, body: bodies.OfModel, context: RequestContext) -> Reply:
        """Return the base and the rank of a model."""
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
        """Drop a model from memory; its saved weights remain."""
        if self._store.get(RUN, body.model_id, context.owner) is None:
            raise self._missing(body.model_id, context.owner)

        def run() -> Result:
            self._tenants.drop(body.model_id)
            self._weights.drop_unnamed(context.owner, body.model_id)
            return {"type": "unload_model", "model_id": body.model_id}

        future = self._training.worker.call(run, context.owner)
        pending = self._futures.new(context.owner)
        future.add_done_callback(lambda done: pending.finish(done.exception() or done.result()))
        if (model := self._models.pop(body.model_id, None)) is not None:
            model.operations.close(self._missing(model.id, context.owner))
        return {"request_id": pending.id, "model_id": body.model_id}

    # ------------------------------------------------------------- operations

    def submit(
        self,
        place: bodies.OperationBody,
        context: RequestContext,
        prepare: Callable[[Model], Run | SizedRun],
    ) -> Reply:
        """Queue an operation of a model; if it is invalid, its result is the error."""
        model = self._model(place.model_id, context.owner)
        try:
            prepared = prepare(model)
        except PeftkitError as error:
            prepared = _raising(error)
        run, size = prepared if isinstance(prepared, tuple) else (prepared, context.size)
        for other in [*self._models.values()]:
            other.operations.give_up_lost()  # a disconnected client no longer polls its results
        id = model.operations.submit(place.seq_id, context.digest, model.owner, run, size)
        return {"request_id": id, "model_id": model.id}

    def forward(self, message: Any, model: Model) -> SizedRun:
        """Return the operation of a message `ForwardBackward`, and its bytes."""
        loss = loss_of(message.loss)
        config = {name: value.text or value.number for name, value in message.config.items()}
        settings = settings_of(message.loss, config or dict(message.old_config))
        base = self._training.bank.base.model
        rows = datums_of(message.data, loss, base, self.limits.tensor_bytes)
        forward, backward = self._tenants.learner.forward, not message.forward_only

        def run() -> Result:
            outputs, total = self._tenants.run(
                model.id, lambda tenant: forward(tenant, rows, loss, settings, backward)
            )
            return output_of(outputs, {"loss:sum": total})

        return run, sum(row.num_bytes for row in rows)

    def step(self, body: bodies.Step, model: Model) -> Run:
        """Return the operation of an optimizer step."""

        def run() -> Result:
            norm = self._tenants.run(model.id, lambda tenant: tenant.step(body.adam_params))
            return {"metrics": {"grad_norm:mean": norm}}

        return run

    def save(self, body: bodies.Save, model: Model) -> Run:
        """Return the operation that saves a model with its optimizer."""
        path = f"tinker://{model.id}/weights/{body.path or f'step-{body.seq_id}'}"

        def run() -> Result:
            self._write(path, body, model)
            return {"type": "save_weights", "path": path}

        return run

    def save_for_sampler(self, body: bodies.SaveForSampler, model: Model) -> Run:
        """Return the operation that saves a model for sampling, with or without a name."""
        number = body.sampling_session_seq_id
        name = body.path or f"-ephemeral-{body.seq_id}"  # clients' names cannot start with "-"
        path = f"tinker://{model.id}/sampler_weights/{name}"

        def run() -> Result:
            self._write(path, body, model)
            if number is None:
                return {"type": "save_weights_for_sampler", "path": path}
            session = model.id.partition(":")[0]
            id = self.samplers.add(session, number, model.owner, model.base_model, path)
            return {"type": "save_weights_for_sampler", "sampling_session_id": id}

        return run

    def _write(self, path: str, body: bodies.Save | bodies.SaveForSampler, model: Model) -> None:
        """Save a model's current weights; those for samplers have no optimizer."""
        check_metadata(body.user_metadata, self.limits)
        self._quotas.check_model(model.owner)
        of_training = isinstance(body, bodies.Save)
        self._weights.save(
            path,
            model.owner,
            lambda folder: self._tenants.save(model.id, folder, with_optimizer=of_training),
            {**model.metadata, "metadata": body.user_metadata},
            ttl=body.ttl_seconds,
            overwrite=isinstance(body, bodies.Save) and body.overwrite,
            is_unnamed=not of_training and body.path is None,
        )

    # ------------------------------------------------------------- samplers

    def create_sampler(self, body: bodies.NewSampler, context: RequestContext) -> Reply:
        """Create a sampler of the base, or of saved weights."""
        self.sessions.check(body.session_id, context.owner)
        base_model, path = body.base_model, body.model_path
        if path is not None:
            base_model = self._weights.get(path, context.owner)["base_model"]
        elif base_model is None:
            raise RequestError("a sampler requires base_model or model_path.")
        else:
            self._check_base(base_model)
        number = body.sampling_session_seq_id
        id = self.samplers.add(body.session_id, number, context.owner, str(base_model), path)
        return {"type": "create_sampling_session", "sampling_session_id": id}

    # ------------------------------------------------------------- results

    def pending(self, body: bodies.OfFuture, context: RequestContext) -> PendingResult:
        """Return a pending result."""
        return self._futures.get(body.request_id, context.owner)

    def cancel(self, body: bodies.OfFuture, context: RequestContext) -> Reply:
        """Cancel a request."""
        self.pending(body, context).cancel()
        return {}


def _raising(error: PeftkitError) -> Run:
    def run() -> Result:
        raise error

    return run
