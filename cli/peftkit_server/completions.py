"""Completions over HTTP: requests become prompts, settings and grammars of the worker's batch."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from peftkit.data.chat_template import own_template
from peftkit.data.generation import prompt_ids, stop_ids
from peftkit.data.style import Style
from peftkit.files.strict_json import JsonMap
from peftkit.forward.row_lengths import context_length
from peftkit.inference.bank import AdapterBank
from peftkit.inference.calls import CallStyle
from peftkit.inference.engine import Request as EngineRequest
from peftkit.inference.open_engine import generation_fallbacks
from peftkit.inference.sampling import Constraint, Sampling, end_tokens, seed_of
from peftkit.model.places import linear_shape, unwrap_adapter
from peftkit_server.answers import OpenAIReply, OutputQueue, Reply
from peftkit_server.body import bounded_body
from peftkit_server.call_grammar import call_grammar
from peftkit_server.endpoints import COMPLETING
from peftkit_server.generation import AnswerCalls, Collected, Generation, Output, resolve_seed
from peftkit_server.grammars import Grammar, Grammars, check_grammar, json_grammar
from peftkit_server.limits import Limits
from peftkit_server.models import BARE, Models
from peftkit_server.refusals import RequestError
from peftkit_server.requests import Body, ChatBody, TextBody
from peftkit_server.threads import DaemonThreads, awaited
from peftkit_server.tokens import TokenBody, token_answers, token_bytes, unknown_token, vocabulary
from peftkit_server.tool_fields import ToolUse
from peftkit_server.validation import read_body
from peftkit_server.worker import Worker

B = TypeVar("B", bound=Body)
T = TypeVar("T")

GRAMMAR_THREADS = 4
"""Grammars that are compiled for a check simultaneously."""


class ParsedRequest(NamedTuple):
    """A validated request.

    Attributes:
        adapter: Name in the bank; None: the base.
        style: Prompt style of the adapter.
        prompts: Token ids.
        num_top: Number of top tokens to report with each token; None: no log-probabilities.
        schema: JSON schema of the completions, if any.
        calls: Syntax of tool calls; None: the request uses no tools.
        reply: Format of the response; None: chat or text completions.
        stop_ids: End tokens in addition to the model's.
        keeps_end: Whether the reported tokens include the end token.
    """

    body: Body
    adapter: str | None
    style: Style
    prompts: list[list[int]]
    num_top: int | None = None
    schema: JsonMap | None = None
    calls: CallStyle | None = None
    tools: ToolUse | None = None
    reply: Reply | None = None
    stop_ids: Sequence[int] = ()
    keeps_end: bool = False

    def call_parser(self, prompt: Sequence[int]) -> AnswerCalls | None:
        """Return the parser of tool calls in a completion; None: the completion is plain text."""
        if self.calls is None or self.tools is None:
            return None
        tools, is_single = self.tools.offered, self.tools.is_single
        return AnswerCalls(self.calls, prompt, tools, is_single=is_single)

    def grammar(self, tokenizer: Any) -> Grammar | None:
        """Return the grammar of the completions; None: they are free.

        Raises:
            RequestError: The model's call format has no grammar.
        """
        if self.schema is not None:
            return json_grammar(self.schema)
        if self.calls is None or self.tools is None or not self.tools.forced:
            return None
        thinks = self.calls.thinks(self.prompts[0])
        grammar = call_grammar(self.calls, tokenizer, self.tools.forced, thinks=thinks)
        if grammar is None:
            raise RequestError(
                "this model does not support forced tool calls.",
                found=f"It writes calls in the format {self.calls.form.name}, which is not JSON.",
                fix='Use "tool_choice": "auto".',
                param="tool_choice",
            )
        return Grammar(grammar, "tool_choice", is_lark=True)


class ChatService:
    """The endpoints of models that complete prompts."""

    def __init__(self, bank: AdapterBank, models: Models, worker: Worker, limits: Limits) -> None:
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
        self._grammar_threads = DaemonThreads(GRAMMAR_THREADS, "peftkit-grammars", limits.share)

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

    # Bodies, read in the thread that prepares prompts.

    def tokens(self, data: bytes, owner: str) -> ParsedRequest:
        body = self._parse(data, TokenBody)
        prompt, stop_ids = self._ids(body.token_ids), body.stop_token_ids or ()
        request = ParsedRequest(body, *self._model(body, owner), [prompt], num_top=0)
        return request._replace(stop_ids=stop_ids, keeps_end=True)

    def text(self, data: bytes, owner: str) -> ParsedRequest:
        body = self._parse(data, TextBody)
        prompts = [self._ids(prompt) for prompt in body.prompts()]
        return ParsedRequest(body, *self._model(body, owner), prompts, body.logprobs)

    def chat(self, data: bytes, owner: str) -> ParsedRequest:
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
        num_top = body.top_logprobs or 0 if body.logprobs else None
        ids = render()
        request = ParsedRequest(body, adapter, style, [ids], num_top, body.schema_of_answer)
        if tools is None or not tools.offered:
            return request
        with_tools = render(tools.offered)
        if with_tools == ids:
            raise RequestError("the model's chat template ignores tools.", param="tools")
        return request._replace(prompts=[with_tools], calls=calls, tools=tools)

    def _parse(self, data: bytes, kind: type[B]) -> B:
        """Parse a request body; refuse more completions than the server allows.

        Raises:
            RequestError: As `read_body`, or the request has no prompt, or too many completions.
        """
        body = read_body(data, kind)
        copies = body.n or 1
        number = copies * (len(body.prompts()) if isinstance(body, TextBody) else 1)
        if not 0 < number <= self._limits.max_batch:
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
        loop, owner = asyncio.get_running_loop(), request.state.owner

        def read() -> tuple[ParsedRequest, Grammar | None]:
            parsed = parse(data, owner)
            return parsed, parsed.grammar(self._bank.base.tokenizer)

        parsed, grammar = await self._thread.call(read, request)
        if grammar is not None:  # it may take seconds
            check = partial(check_grammar, grammar, self._limits)
            await self._grammar_threads.call(check, request)
        body, num_prompt = parsed.body, sum(map(len, parsed.prompts))
        collected = Collected(len(parsed.prompts) * (body.n or 1))
        queue: OutputQueue = asyncio.Queue()

        def send(index: int, output: Output | Exception) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, (index, output))

        take = send if body.stream else collected.take
        prepare = partial(self._generations, parsed, grammar, owner, take)
        generations = await self._thread.call(prepare, request)
        self._worker.submit(generations)
        reply = parsed.reply or OpenAIReply(
            isinstance(body, ChatBody),
            body.model,
            len(generations),
            self._token_text,
            partial(token_bytes, self._bank.base.tokenizer),
            self._fingerprint,
            body.wants_usage,
            parsed.num_top,
            parsed.tools is not None and parsed.tools.is_named,
        )
        if body.stream:
            return reply.streamed(generations, queue, num_prompt)
        try:
            answers = await awaited(collected, request)
        finally:
            for generation in generations:
                generation.cancel()
        if isinstance(body, TokenBody):
            return JSONResponse(token_answers(body.model, answers, num_prompt))
        return JSONResponse(reply.whole(answers, num_prompt))

    def _generations(
        self,
        parsed: ParsedRequest,
        grammar: Grammar | None,
        owner: str,
        take: Callable[[int, Output | Exception], None],
    ) -> list[Generation]:
        body, prompts, calls = parsed.body, parsed.prompts, parsed.calls
        copies, temperature = body.n or 1, body.temperature
        length = body.max_new_tokens or self._limits.max_new_tokens
        size = vocabulary(self._bank.base.model)
        if unknown := [token for token in body.biases if token >= size]:
            raise unknown_token("logit_bias", unknown[0], size, param="logit_bias")
        generations: list[Generation] = []
        for index in range(len(prompts) * copies):
            ids = prompts[index // copies]
            sampling = Sampling(
                max_new_tokens=self._worker.room_for(ids, length),
                temperature=self._limits.temperature if temperature is None else temperature,
                top_p=body.top_p or 1.0,
                seed=resolve_seed(body.seed),
                top_k=max(body.top_k or 0, 0),  # 0: all tokens
                stops=[*(calls.stops if calls else self._stops(parsed.style)), *parsed.stop_ids],
                top_logprobs=parsed.num_top or 0,
                min_p=body.min_p or 0.0,
                penalties=body.penalties,
            )
            engine_request = EngineRequest(
                ids,
                sampling,
                seed_of(sampling, index),
                parsed.adapter,
                log_probs=parsed.num_top is not None,
                constraint=self._constraint(grammar, tuple(sampling.stops)),
            )
            parser = parsed.call_parser(ids)
            send = partial(take, index)
            generations.append(
                Generation(engine_request, send, body.stop_texts, parser, parsed.keeps_end, owner)
            )
        return generations

    def _constraint(self, grammar: Grammar | None, stops: tuple[int, ...]) -> Constraint | None:
        if grammar is None:
            return None
        base = self._bank.base
        size = linear_shape(unwrap_adapter(base.model.get_output_embeddings()))[1]
        if (key := (stops, size)) not in self._grammars:
            ends = sorted({*end_tokens(base.model, base.tokenizer), *stops})
            self._grammars[key] = Grammars(base.tokenizer, size, ends, self._limits)
        return self._grammars[key].constraint(grammar)

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


def template_variables(body: ChatBody, tokenizer: Any, style: Style) -> Mapping[str, Any] | None:
    """Return the variables of a request for the chat template; None: as in training.

    Raises:
        RequestError: The request has an effort, and the template no variable for it.
    """
    if body.reasoning_effort is None:
        return body.chat_template_kwargs
    effort = body.reasoning_effort
    template = (style.chat_template or own_template(tokenizer)) if style.kind == "chat" else ""
    variables: dict[str, Any] = {}
    if re.search(r"\benable_thinking\b", template):
        variables["enable_thinking"] = effort != "none"
    if re.search(r"\breasoning_effort\b", template):
        variables["reasoning_effort"] = effort
    if not variables:
        raise RequestError(
            "this model does not support reasoning_effort.",
            found="Its chat template has no variable reasoning_effort or enable_thinking.",
            fix="Remove the field.",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    return {**variables, **(body.chat_template_kwargs or {})}
