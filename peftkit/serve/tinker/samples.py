"""Answers of samplers: tokens in, tokens with their log-probabilities out.

Shapes: N tokens of a prompt, K likeliest tokens, n rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from peftkit.errors import PeftkitError
from peftkit.forward.loss import Head, target_logits, target_rows
from peftkit.inference.engine import Request as AnswerRequest
from peftkit.inference.sampling import Sampling, seed_of
from peftkit.model.modes import evaluating
from peftkit.serve.generation import Generation, Output, resolve_seed
from peftkit.serve.requests import MAX_TOKENS, RequestError
from peftkit.serve.tinker.bodies import RequestContext, Sample
from peftkit.serve.tinker.futures import Futures, PendingResult, ReplyCache
from peftkit.serve.tinker.learner import Learner
from peftkit.serve.tinker.rows import check_tokens
from peftkit.serve.tinker.weights import Weights
from peftkit.serve.tinker.wire import LENGTH, MESSAGES, STOP, bytes_of, set_topk
from peftkit.serve.tokens import vocabulary
from peftkit.serve.training import Training

SAMPLER = "tinker.sampler"
"""Kind of the store's documents."""
Reply = dict[str, Any]

NOTHING = -99999.0
"""Log-probability of a token that is none, as clients read it."""
ROWS = 512
"""Tokens of a prompt whose logits are made at once."""


class Answers:
    """The answers to one request, as they end.

    Attributes:
        message: `Sampled`; the answers are added when all have ended.
    """

    def __init__(self, body: Sample, pending: PendingResult) -> None:
        self._num_top, self._pending = body.topk_sample_logprobs, pending
        self.message = MESSAGES["Sampled"]()
        self._parts: list[list[Output]] = [[] for _ in range(body.num_samples)]

    def sender(self, index: int) -> Callable[[Output | Exception], None]:
        """Return what takes the pieces of an answer."""

        def send(piece: Output | Exception) -> None:
            if isinstance(piece, Exception):
                self._pending.finish(piece)
                return
            self._parts[index].append(piece)
            if all(of and of[-1].reason for of in self._parts):
                self._pending.finish(self._whole())

        return send

    def _whole(self) -> bytes:
        for pieces in self._parts:
            chosen = [one for piece in pieces for one in piece.chosen]
            sequence = self.message.sequences.add(
                stop_reason=STOP if pieces[-1].reason == "stop" else LENGTH,
                tokens=bytes_of((one.token for one in chosen), torch.int32),
                log_probs=bytes_of(one.log_prob for one in chosen),
            )
            if self._num_top:
                top = torch.tensor([one.top[: self._num_top] for one in chosen])  # (N, K, 2)
                set_topk(sequence.topk, top[..., 0], top[..., 1])
        return bytes(self.message.SerializeToString())


class Samplers:
    """What answers are sampled from: the base, or saved weights."""

    def __init__(
        self, training: Training, weights: Weights, learner: Learner, futures: Futures
    ) -> None:
        self._training, self._store, self._weights = training, training.store, weights
        self._learner, self._futures = learner, futures
        self._known: ReplyCache[Reply] = ReplyCache()

    def add(self, session: str, number: int, owner: str, base_model: str, path: str | None) -> str:
        """Make a sampler, or find it again; return its id.

        Args:
            path: Of weights; None: the base.

        Raises:
            RequestError: There is another one with this number.
        """
        id = f"{session}:sample:{number}"
        facts = {"sampler_id": id, "base_model": base_model, "model_path": path}
        if self._store.get(SAMPLER, id) not in (None, facts):
            raise RequestError(f"there is another sampler {id} already.", status=409)
        self._store.put(SAMPLER, id, facts, owner=owner, parent=session)
        return id

    def get(self, owner: str, id: str) -> Reply:
        """Say what a sampler is.

        Raises:
            RequestError: There is none.
        """
        facts = self._store.get(SAMPLER, id, owner)
        if facts is None:
            raise RequestError(f"there is no sampler {id[:80]}.", status=404)
        return facts

    def sample(self, body: Sample, context: RequestContext) -> Reply:
        """Have answers sampled."""
        key, adapter = (body.sampling_session_id, body.seq_id), None
        path = self.get(context.owner, body.sampling_session_id)["model_path"]
        if (reply := self._known.reply(key, context.digest)) is not None:
            return reply
        if path is not None:
            self._weights.get(path, context.owner)
            adapter = self._training.models.inner(path, context.owner)
        pending = self._futures.new(context.owner)
        try:
            self._submit(body, adapter, pending)
        except PeftkitError as error:
            if getattr(error, "status", 400) in (429, 503):
                self._futures.forget(pending)
                raise
            pending.finish(error)
        names = [f"{pending.id}:{number}" for number in range(body.num_samples)]
        reply = {"request_id": pending.id, "sample_sequence_ids": names}
        self._known.keep(key, context.digest, reply)
        return reply

    def _submit(self, body: Sample, adapter: str | None, pending: PendingResult) -> None:
        """Have a request answered; the result is a message `Sampled`."""
        worker, bank, models = self._training.worker, self._training.bank, self._training.models
        answers = Answers(body, pending)
        jobs = _jobs(self._training, body, adapter, answers)

        def cancel() -> None:
            pending.finish(RequestError("the request was cancelled."))
            for job in jobs:
                job.cancel()

        def scored() -> None:
            models.load(adapter)
            with bank.returned(), bank.use(adapter), evaluating(bank.base.model):
                _score(bank.base.model, self._learner.head(), body, answers.message)

        pending.cancel = cancel
        is_scored = body.prompt_logprobs or body.topk_prompt_logprobs
        worker.submit(jobs, scored if is_scored else None)


def _jobs(
    training: Training, body: Sample, adapter: str | None, answers: Answers
) -> list[Generation]:
    worker, model = training.worker, training.bank.base.model
    settings, ids = body.sampling_params, body.prompt.ids
    check_tokens(torch.tensor(ids, dtype=torch.long), model, "the prompt")
    if max(body.topk_sample_logprobs, body.topk_prompt_logprobs) > vocabulary(model):
        raise RequestError(f"the base has {vocabulary(model)} tokens.", fix="Ask for fewer top k.")
    if body.num_samples > worker.max_waiting:
        raise RequestError(
            f"the request asks for {body.num_samples} answers.",
            fix=f"Ask for 1 to {worker.max_waiting} at once.",
        )
    sampling = Sampling(
        max_new_tokens=worker.room_for(ids, settings.max_tokens or MAX_TOKENS),
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=max(settings.top_k, 0),
        seed=resolve_seed(settings.seed),
        top_logprobs=body.topk_sample_logprobs,
    )
    stop = [settings.stop] if isinstance(settings.stop, str) else settings.stop
    ends = None if stop is None else frozenset(one for one in stop if isinstance(one, int))
    texts = tuple(one for one in stop or () if isinstance(one, str))
    if texts and ends is not None:  # special tokens have no text of their own
        added = training.bank.base.tokenizer.get_added_vocab()
        ends |= {added[text] for text in texts if text in added}
    seeds = [seed_of(sampling, number) for number in range(body.num_samples)]
    return [
        Generation(
            AnswerRequest(ids, sampling, seed, adapter, log_probs=True, ends=ends),
            answers.sender(number),
            texts,
            keeps_end=True,
        )
        for number, seed in enumerate(seeds)
    ]


def _score(model: Any, head: Head | None, body: Sample, message: Any) -> None:
    """Compute the log-probabilities of a prompt's tokens, in the thread that has the model."""
    ids, k = torch.tensor(body.prompt.ids), body.topk_prompt_logprobs
    first = max(1, len(ids) - (body.prompt_logprobs_last_n or len(ids)))
    own = [torch.full((first,), torch.nan)]
    likeliest, theirs = [torch.zeros(first, k)], [torch.full((first, k), NOTHING)]
    for logits, targets in _logits(model, head, ids, first):
        log_probs = logits.float().log_softmax(-1)
        own.append(log_probs.gather(1, targets.to(log_probs.device)[:, None])[:, 0].cpu())
        if k:
            top = log_probs.topk(k)
            likeliest.append(top.indices.cpu())
            theirs.append(top.values.cpu())
    if body.prompt_logprobs:
        message.prompt_log_probs = bytes_of(torch.cat(own))
    if k:
        set_topk(message.topk_prompt, torch.cat(likeliest), torch.cat(theirs))


def _logits(
    model: Any, head: Head | None, ids: Tensor, first: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits (n, V) and the tokens that follow, from a token on."""
    if first >= len(ids):
        return
    places = torch.arange(first - 1, len(ids) - 1, device=model.device)
    inputs = {"input_ids": ids[None].to(model.device), "use_cache": False}
    if head is None:
        parts: Iterator[Tensor] = iter(target_logits(model, inputs, places).split(ROWS))
    else:
        parts = map(head, target_rows(model, inputs, places).split(ROWS))
    yield from zip(parts, ids[first:].split(ROWS), strict=True)
