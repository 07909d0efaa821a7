"""The server as an ASGI application: routes, limits and access."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from peftkit.data.generation import prompt_ids, stop_ids
from peftkit.data.style import Style
from peftkit.errors import PeftkitError
from peftkit.forward.row_lengths import context_length
from peftkit.inference.bank import AdapterBank
from peftkit.inference.calls import CallStyle
from peftkit.inference.engine import Limits as EngineLimits
from peftkit.inference.engine import Request as EngineRequest
from peftkit.inference.open_engine import generation_fallbacks, tokens_that_fit
from peftkit.inference.sampling import Constraint, Sampling, end_tokens, seed_of
from peftkit.model.places import linear_shape, unwrap_adapter
from peftkit_server.access import Gate
from peftkit_server.answers import OutputQueue, ReplyFormat, streamed, whole_answers
from peftkit_server.body import bounded_body
from peftkit_server.clients.api import client_routes
from peftkit_server.clients.reasoning import template_variables
from peftkit_server.dialects import dialects
from peftkit_server.endpoints import COMPLETING
from peftkit_server.generation import Generation, Output, resolve_seed
from peftkit_server.grammars import Grammars, check_grammar, schema_text
from peftkit_server.handlers import refuse, refuse_route, wrong_routes
from peftkit_server.limits import Limits
from peftkit_server.metrics import PATH, Measure, ServerMetrics
from peftkit_server.models import BARE, Models
from peftkit_server.parsed_request import ParsedRequest
from peftkit_server.quotas import Intake, Quotas
from peftkit_server.refusals import RequestError, hide
from peftkit_server.requests import Body, ChatBody, TextBody, read_body
from peftkit_server.schedule import Share
from peftkit_server.store import Store, StoreError
from peftkit_server.threads import DaemonThreads, in_own_thread
from peftkit_server.tokens import TokenBody, token_answers, token_bytes, unknown_token, vocabulary
from peftkit_server.training import Dialect, Training, TrainingOptions
from peftkit_server.worker import Worker

B = TypeVar("B", bound=Body)
T = TypeVar("T")

PREFILL_TOKENS = 256
"""Prompt tokens to compute between two decoding steps."""
LEFT_TO_TRAIN = 0.5
"""Share of the free memory that a training server reserves for training steps."""
PREFIX_TOKENS = 8192
"""Tokens of shared prefixes to keep in the KV cache for later prompts."""
GRAMMAR_THREADS = 4
"""Grammars that are compiled for a check simultaneously."""
BODY_THREADS = 4
"""Bodies of training APIs that are parsed simultaneously."""
SWEEP_SECONDS = 60.0
"""Time between two removals of expired models."""


def make_app(
    bank: AdapterBank,
    *,
    keys: Sequence[str] = (),
    limits: Limits | None = None,
    training: TrainingOptions | None = None,
) -> Starlette:
    """Return the application that serves a bank's adapters and its base.

    Args:
        keys: Accepted keys; every path except /health requires one. Without keys, the server
            accepts requests from this machine only.
        training: Settings of a training server, which stores its clients' files, jobs and weights.

    Raises:
        OutputError: The folder of `training` cannot be used.
    """
    limits = limits or Limits()
    store = Store(training.folder) if training else None
    models = Models(bank, store, training.names if training else ())
    hide(bank.base.name, *(bank.file(name).folder for name in bank.names))
    if training:
        hide(training.folder)
    share = partial(limits.share, num_keys=len(keys))
    worker = Worker(
        bank,
        limits=EngineLimits(
            rows=limits.max_batch,
            tokens=tokens_that_fit(
                bank.base.model, bank.base.tokenizer, left=LEFT_TO_TRAIN if training else 0.0
            ),
            prefill=PREFILL_TOKENS,
            prefix_tokens=PREFIX_TOKENS,
        ),
        max_waiting=limits.max_waiting,
        share=share,
        ready=models.load,
    )
    service, metrics = ChatService(bank, models, worker, limits, share), ServerMetrics(worker)
    threads = DaemonThreads(BODY_THREADS, "peftkit-bodies", share)
    training_apis: Sequence[Dialect] = ()
    if training and store:
        training_apis = dialects(
            Training(
                options=training,
                bank=bank,
                worker=worker,
                store=store,
                models=models,
                quotas=Quotas(limits, store, len(keys), models.sweep),
                threads=threads,
            )
        )

    async def sweep() -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            with suppress(StoreError):  # the disk is full
                await threads.result(models.sweep, "")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        worker.start()
        sweeping = asyncio.create_task(sweep())
        try:
            for dialect in training_apis:
                dialect.on_start()
            yield
        finally:
            sweeping.cancel()
            service.close()
            threads.shutdown()
            for dialect in training_apis:
                dialect.on_stop()
            await in_own_thread(worker.stop)
            if store is not None:
                store.close()

    routes: list[BaseRoute] = [
        Route("/health", service.health),
        Route(PATH, metrics.respond),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/v1/models/{name:path}", service.delete_model, methods=["DELETE"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.complete, methods=["POST"]),
        Route("/inference/v1/generate", service.generate, methods=["POST"]),
        *wrong_routes(COMPLETING),
        *client_routes(service, limits, len(keys)),
        *(route for dialect in training_apis for route in dialect.routes),
    ]
    # with keys, web pages cannot use a visitor's access: browsers do not add the key
    cors = [Middleware(CORSMiddleware, allow_origins="*", allow_methods="*", allow_headers="*")]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Measure, metrics=metrics, routes=routes),
            *(cors if keys else ()),
            Middleware(Gate, keys=keys),
            Middleware(Intake, limits=limits),
        ],
        exception_handlers={PeftkitError: refuse, HTTPException: refuse_route},
        lifespan=lifespan,
    )
    app.state.worker = worker
    return app


class ChatService:
    """The endpoints of models that complete prompts."""

    def __init__(
        self, bank: AdapterBank, models: Models, worker: Worker, limits: Limits, share: Share
    ) -> None:
        self._bank, self._models, self._worker, self._limits = bank, models, worker, limits
        self._began, self._context = time.time(), context_length(bank.base.model.config)
        digest = hashlib.sha256(repr(bank.base.fingerprint).encode()).hexdigest()
        self._fingerprint = f"fp_{digest[:12]}"
        slower = generation_fallbacks(bank.base.model, bank.base.tokenizer)
        self._fallbacks = [fallback.text for fallback in (*slower, *bank.fallbacks)]
        self._grammars: dict[tuple[tuple[int, ...], int], Grammars] = {}
        self._call_styles = cache(lambda style: CallStyle(bank.base.tokenizer, style))
        self._stops = cache(lambda style: tuple(stop_ids(bank.base.tokenizer, style)))
        # prompts are slow to prepare, and tokenizers are not thread-safe: one thread
        self._thread = DaemonThreads(1, "peftkit-requests")
        self._grammar_threads = DaemonThreads(GRAMMAR_THREADS, "peftkit-grammars", share)

    def close(self) -> None:
        """Drop requests that are not parsed yet."""
        self._thread.shutdown()
        self._grammar_threads.shutdown()

    async def health(self, request: Request) -> Response:
        alive = self._worker.is_alive
        facts = {"status": "ok" if alive else "stopped", "fallbacks": self._fallbacks}
        return JSONResponse(facts, 200 if alive else 503)

    def models(self, request: Request) -> Response:
        names = self._models.listed(request.state.owner)
        return JSONResponse({"object": "list", "data": [self._described(name) for name in names]})

    def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._models.inner(name, request.state.owner)
        return JSONResponse(self._described(name))

    def delete_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._models.delete(name, request.state.owner)
        return JSONResponse({"id": name, "object": "model", "deleted": True})

    async def chat(self, request: Request) -> Response:
        return await self.respond(request, self._chat_prompts)

    async def complete(self, request: Request) -> Response:
        return await self.respond(request, self._text_prompts)

    async def generate(self, request: Request) -> Response:
        return await self.respond(request, self._token_prompt)

    def _token_prompt(self, data: bytes, owner: str) -> ParsedRequest:
        body = self._parse(data, TokenBody)
        return ParsedRequest(body, *self._model(body, owner), [self._ids(body.token_ids)])

    def _chat_prompts(self, data: bytes, owner: str) -> ParsedRequest:
        return self.chat_request(self._parse(data, ChatBody), owner)

    def chat_request(self, body: ChatBody, owner: str) -> ParsedRequest:
        """Render the prompt of a chat; call this by `in_turn` or as the `parse` of `respond`.

        Raises:
            RequestError: The model does not exist, or does not support a field.
            DataError: The chat template cannot render the conversation.
        """
        adapter, style = self._model(body, owner)
        tools = body.tool_use
        needs_calls = body.has_calls or (tools is not None and tools.offered)
        calls = self._call_styles(style) if needs_calls else None
        turns = body.conversation(calls.form if calls else None)
        single = style.kind != "chat" and [turn["role"] for turn in turns] == ["user"]
        prompt = turns[0]["content"] if single else turns
        tokenizer = self._bank.base.tokenizer
        variables = template_variables(body, tokenizer, style)
        render = partial(
            prompt_ids, tokenizer, prompt, style, variables=variables, limit=self._context
        )
        ids = render()
        if tools is None or not tools.offered:
            return ParsedRequest(body, adapter, style, [ids])
        with_tools = render(tools.offered)
        if with_tools == ids:
            raise RequestError("the model's chat template ignores tools.", param="tools")
        return ParsedRequest(body, adapter, style, [with_tools], calls, tools)

    def _text_prompts(self, data: bytes, owner: str) -> ParsedRequest:
        body = self._parse(data, TextBody)
        prompts = [self._ids(prompt) for prompt in body.prompts()]
        return ParsedRequest(body, *self._model(body, owner), prompts)

    def _parse(self, data: bytes, kind: type[B]) -> B:
        """Parse a request body; refuse more completions than the server allows.

        Raises:
            RequestError: As `read_body`, or the request has no prompt, or too many completions.
        """
        body = read_body(data, kind)
        copies = body.n or 1
        if not 0 < (number := body.num_prompts * copies) <= self._limits.max_batch:
            raise RequestError(
                f"the request is for {number} completions.",
                fix=f"Request 1 to {self._limits.max_batch}.",
                param="n" if copies > 1 else "prompt",
            )
        return body

    def _model(self, body: Body, owner: str) -> tuple[str | None, Style]:
        models = self._models
        return models.inner(body.model, owner), models.style(body.model, owner)

    async def in_turn(self, function: Callable[[], T], request: Request) -> T:
        """Return the result of a function in the thread that prepares prompts.

        Raises:
            RequestError: 499: the client disconnected.
        """
        return await self._thread.call(function, request)

    async def respond(
        self, request: Request, parse: Callable[[bytes, str], ParsedRequest]
    ) -> Response:
        """Return the response to a request that `parse` reads from its body and its owner."""
        data = await bounded_body(request, self._limits.max_body)
        loop = asyncio.get_running_loop()
        owner = request.state.owner
        queue: OutputQueue = asyncio.Queue()

        def read() -> tuple[ParsedRequest, Callable[[], None] | None]:
            parsed = parse(data, owner)
            return parsed, self._grammar_check(parsed)

        parsed, check = await self._thread.call(read, request)
        if check is not None:
            await self._grammar_threads.call(check, request)
        prepare = partial(self._generations, parsed, owner, queue, loop)
        generations = await self._thread.call(prepare, request)
        body, is_named = parsed.body, parsed.tools is not None and parsed.tools.is_named
        is_chat = isinstance(body, ChatBody)
        form = ReplyFormat(
            is_chat,
            body.model,
            self._token_text,
            partial(token_bytes, self._bank.base.tokenizer),
            self._fingerprint,
            body.wants_usage,
            body.num_top,
            is_named,
        )
        num_prompt = sum(map(len, parsed.prompts))
        self._worker.submit(generations)
        if (reply := parsed.reply) is not None:
            is_streamed = bool(body.stream)
            return await reply.respond(
                request, generations, queue, num_prompt, is_streamed=is_streamed
            )
        if body.stream:
            return StreamingResponse(
                streamed(form, generations, queue, num_prompt),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache"},
            )
        answers = await whole_answers(request, generations, queue)
        if isinstance(body, TokenBody):
            return JSONResponse(token_answers(body.model, answers, num_prompt))
        return JSONResponse(form.whole(answers, num_prompt))

    def _generations(
        self,
        parsed: ParsedRequest,
        owner: str,
        queue: OutputQueue,
        loop: asyncio.AbstractEventLoop,
    ) -> list[Generation]:
        body, adapter, style, prompts, calls, *_ = parsed
        copies, temperature = body.n or 1, body.temperature
        length = body.max_new_tokens or self._limits.max_new_tokens
        size = vocabulary(self._bank.base.model)
        if unknown := [token for token in body.biases if token >= size]:
            raise unknown_token("logit_bias", unknown[0], size, param="logit_bias")
        generations: list[Generation] = []
        for index in range(len(prompts) * copies):
            ids = prompts[index // copies]

            def send(output: Output | Exception, index: int = index) -> None:
                with suppress(RuntimeError):  # the event loop is closed
                    loop.call_soon_threadsafe(queue.put_nowait, (index, output))

            sampling = Sampling(
                max_new_tokens=self._worker.room_for(ids, length),
                temperature=self._limits.temperature if temperature is None else temperature,
                top_p=body.top_p or 1.0,
                seed=resolve_seed(body.seed),
                top_k=body.num_likeliest,
                stops=[*(calls.stops if calls else self._stops(style)), *body.stop_ids],
                top_logprobs=body.num_top or 0,
                min_p=body.min_p or 0.0,
                penalties=body.penalties,
            )
            engine_request = EngineRequest(
                ids,
                sampling,
                seed_of(sampling, index),
                adapter,
                log_probs=body.num_top is not None,
                constraint=self._constraint(parsed, ids, sampling),
            )
            parser = parsed.call_parser(ids)
            generations.append(
                Generation(engine_request, send, body.stop_texts, parser, body.keeps_end, owner)
            )
        return generations

    def _grammar_check(self, parsed: ParsedRequest) -> Callable[[], None] | None:
        """Return the check of a request's grammar, which may take seconds; None: it has none."""
        schema, limits = parsed.body.schema_of_answer, self._limits
        if schema is not None:
            return partial(check_grammar, schema_text(schema), "response_format", limits)
        if parsed.tools is None or not parsed.tools.forced:
            return None
        grammar = parsed.grammar(self._bank.base.tokenizer, parsed.prompts[0])
        return partial(check_grammar, grammar, "tool_choice", limits, is_lark=True)

    def _constraint(
        self, parsed: ParsedRequest, ids: list[int], sampling: Sampling
    ) -> Constraint | None:
        schema, forced = parsed.body.schema_of_answer, parsed.tools and parsed.tools.forced
        if schema is None and not forced:
            return None
        base = self._bank.base
        stops = tuple(sampling.stops)
        size = linear_shape(unwrap_adapter(base.model.get_output_embeddings()))[1]
        if (key := (stops, size)) not in self._grammars:
            ends = sorted({*end_tokens(base.model, base.tokenizer), *stops})
            self._grammars[key] = Grammars(base.tokenizer, size, ends, self._limits)
        if schema is not None:
            return self._grammars[key].of_json(schema)
        grammar = parsed.grammar(base.tokenizer, ids)
        return self._grammars[key].of_lark(grammar, "tool_choice")

    def _token_text(self, token: int) -> str:
        return str(self._bank.base.tokenizer.decode([token]))

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            tokenizer, style = self._bank.base.tokenizer, Style("plain")
            return prompt_ids(tokenizer, prompt, style, limit=self._context)
        size = vocabulary(self._bank.base.model)
        if unknown := [token for token in prompt if not 0 <= token < size]:
            raise unknown_token("the prompt", unknown[0], size, param="prompt")
        return prompt

    def _described(self, name: str) -> dict[str, Any]:
        base = self._bank.base
        described = {
            "id": name,
            "object": "model",
            "created": int(self._began),
            "owned_by": "peftkit",
            "root": base.hub_id or base.name,
            "max_model_len": self._context,
            "endpoints": list(COMPLETING),
        }
        is_base = name in self._models.base_names
        return described if is_base else {**described, "parent": BARE}
