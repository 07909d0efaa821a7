"""Samplers: token ids in, token ids with log-probabilities out.

Shapes: N prompt tokens, K top tokens, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from peftkit.errors import PeftkitError
from peftkit.forward.loss import Head, target_logits, target_rows
from peftkit.inference.engine import Request as EngineRequest
from peftkit.inference.sampling import Sampling, seed_of
from peftkit.model.modes import evaluating
from peftkit_server.generation import Collected, Generation, Output, resolve_seed
from peftkit_server.quotas import SAMPLER
from peftkit_server.refusals import RequestError
from peftkit_server.requests import MAX_TOKENS
from peftkit_server.tinker.bodies import RequestContext, Sample, Targets
from peftkit_server.tinker.futures import Futures, PendingResult, ReplyCache
from peftkit_server.tinker.learner import Learner
from peftkit_server.tinker.rows import check_tokens
from peftkit_server.tinker.weights import Weights
from peftkit_server.tinker.wire import LENGTH, MESSAGES, NUMBERS, STOP, bytes_of, set_topk
from peftkit_server.tokens import vocabulary
from peftkit_server.training import Training

Reply = dict[str, Any]

NO_TOKEN = -99999.0
"""Log-probability of padding in Tinker's top-k lists."""
NO_TARGET = -1
"""A position without a token to score."""
ROWS = 512
"""Prompt tokens in one chunk of logits."""


class Samplers:
    """The samplers of all clients; each samples from the base, or from saved weights."""

    def __init__(
        self, training: Training, weights: Weights, learner: Learner, futures: Futures
    ) -> None:
        self._training, self._store, self._weights = training, training.store, weights
        self._learner, self._futures = learner, futures
        self._replies: defaultdict[str, ReplyCache[Reply]] = defaultdict(ReplyCache)

    def add(self, session: str, number: int, owner: str, base_model: str, path: str | None) -> str:
        """Create a sampler, unless a retry has created it; return its id.

        Args:
            path: Path of saved weights; None: the base.

        Raises:
            RequestError: Another sampler has this number.
        """
        id = f"{session}:sample:{number}"
        sampler = {"sampler_id": id, "base_model": base_model, "model_path": path}
        with self._store.lock:
            if (previous := self._store.get(SAMPLER, id)) not in (None, sampler):
                raise RequestError(f"another sampler has the id {id}.", status=409)
            if previous is None:
                self._training.quotas.check_record(owner)
            self._store.put(SAMPLER, id, sampler, owner=owner, parent=session)
        return id

    def get(self, owner: str, id: str) -> Reply:
        """Return a sampler's document.

        Raises:
            RequestError: The sampler does not exist, or has another owner.
        """
        sampler = self._store.get(SAMPLER, id, owner)
        if sampler is None:
            raise RequestError(f"there is no sampler {id[:80]}.", status=404)
        return sampler

    def sample(self, body: Sample, context: RequestContext) -> Reply:
        """Start to sample; return the id of the pending result."""
        key, adapter = (body.sampling_session_id, body.seq_id), None
        path = self.get(context.owner, body.sampling_session_id)["model_path"]
        replies = self._replies[context.owner]
        if (reply := replies.get(key, context.digest)) is not None:
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
        replies.put(key, context.digest, reply)
        return reply

    def _submit(self, body: Sample, adapter: str | None, pending: PendingResult) -> None:
        """Submit a request's completions; the pending result becomes a message `Sampled`."""
        worker, bank, models = self._training.worker, self._training.bank, self._training.models
        completions, message = Collected(body.num_samples), MESSAGES["Sampled"]()
        generations = _generations(self._training, body, adapter, completions, pending.owner)

        def finish(done: Future[list[Output]]) -> None:
            try:
                pending.finish(_serialized(message, done.result(), body.topk_sample_logprobs))
            except Exception as error:
                pending.finish(error)

        def cancel() -> None:
            pending.finish(RequestError("the request was cancelled."))
            for generation in generations:
                generation.cancel()

        def score_prompt() -> None:
            models.load(adapter)
            with bank.returned(), bank.use(adapter), evaluating(bank.base.model):
                _score(bank.base.model, self._learner.head(), body, message)

        completions.add_done_callback(finish)
        pending.cancel = cancel
        is_scored = body.prompt_logprobs or body.topk_prompt_logprobs or body.target_prompt_logprobs
        worker.submit(generations, score_prompt if is_scored else None)


def _serialized(message: Any, outputs: Sequence[Output], num_top: int) -> bytes:
    """Add whole completions to a message `Sampled`; return its bytes."""
    for output in outputs:
        sequence = message.sequences.add(
            stop_reason=STOP if output.reason == "stop" else LENGTH,
            tokens=bytes_of((token.token for token in output.chosen), torch.int32),
            log_probs=bytes_of(token.log_prob for token in output.chosen),
        )
        if num_top:
            top = torch.tensor([token.top[:num_top] for token in output.chosen])
            set_topk(sequence.topk, top[..., 0], top[..., 1])  # both (tokens, K)
    return bytes(message.SerializeToString())


def _generations(
    training: Training, body: Sample, adapter: str | None, completions: Collected, owner: str
) -> list[Generation]:
    worker, model = training.worker, training.bank.base.model
    settings, ids = body.sampling_params, body.prompt.ids
    check_tokens(torch.tensor(ids, dtype=torch.long), model, "the prompt")
    if (targets := body.target_prompt_logprobs) is not None:
        check_targets(targets, len(ids), model)
    if max(body.topk_sample_logprobs, body.topk_prompt_logprobs) > vocabulary(model):
        raise RequestError(
            f"the vocabulary has {vocabulary(model)} tokens.", fix="Request fewer top tokens."
        )
    if body.num_samples > worker.max_waiting:
        raise RequestError(
            f"the request is for {body.num_samples} completions.",
            fix=f"Request 1 to {worker.max_waiting}.",
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
    ends = None if stop is None else frozenset(end for end in stop if isinstance(end, int))
    texts = tuple(end for end in stop or () if isinstance(end, str))
    if texts and ends is not None:  # decoding removes special tokens from the text
        added = training.bank.base.tokenizer.get_added_vocab()
        ends |= {added[text] for text in texts if text in added}
    seeds = [seed_of(sampling, number) for number in range(body.num_samples)]
    return [
        Generation(
            EngineRequest(ids, sampling, seed, adapter, log_probs=True, ends=ends),
            partial(completions.take, number),
            texts,
            keeps_end=True,
            owner=owner,
        )
        for number, seed in enumerate(seeds)
    ]


def check_targets(targets: Targets, num_tokens: int, model: object) -> None:
    """Check the tokens to score at the positions of a prompt.

    Raises:
        RequestError: Their rows do not match the prompt, or a token is not in the vocabulary.
    """
    if targets.shape[0] != num_tokens - 1:
        raise RequestError(
            f"target_prompt_logprobs has {targets.shape[0]:,} rows.",
            found=f"The prompt has {num_tokens:,} tokens.",
            fix="Send one row for each token but the first.",
        )
    tokens = torch.tensor(targets.data, dtype=torch.long)
    check_tokens(tokens[tokens != NO_TARGET], model, "target_prompt_logprobs")


def _score(model: Any, head: Head | None, body: Sample, message: Any) -> None:
    """Add the log-probabilities of a prompt's tokens to a message, in the worker's thread."""
    ids, k = torch.tensor(body.prompt.ids), body.topk_prompt_logprobs
    begin = max(1, len(ids) - (body.prompt_logprobs_last_n or len(ids)))
    first = 1 if body.target_prompt_logprobs else begin
    scored = _TargetScores(body.target_prompt_logprobs) if body.target_prompt_logprobs else None
    prompt_log_probs = [torch.full((first,), torch.nan)]
    top_ids, top_log_probs = [torch.zeros(first, k)], [torch.full((first, k), NO_TOKEN)]
    for logits, targets in _logits(model, head, ids, first):
        log_probs = logits.float().log_softmax(-1)
        targets = targets.to(log_probs.device)
        if scored is not None:
            scored.add(log_probs)
        prompt_log_probs.append(log_probs.gather(1, targets[:, None])[:, 0].cpu())
        if k:
            top = log_probs.topk(k)
            top_ids.append(top.indices.cpu())
            top_log_probs.append(top.values.cpu())
    if body.prompt_logprobs:
        values = torch.cat(prompt_log_probs)
        values[:begin] = torch.nan
        message.prompt_log_probs = bytes_of(values)
    if k:
        tokens, values = torch.cat(top_ids), torch.cat(top_log_probs)
        tokens[:begin], values[:begin] = 0, NO_TOKEN
        set_topk(message.topk_prompt, tokens, values)
    if scored is not None:
        scored.fill(message.targets)


class _TargetScores:
    """Log-probabilities of a client's tokens at the positions of a prompt."""

    def __init__(self, targets: Targets) -> None:
        self._targets, self._start = targets, 0
        self._rows = torch.tensor(targets.rows, dtype=torch.long)
        self._tokens = torch.tensor(targets.data, dtype=torch.long)
        self._values = torch.zeros(len(self._tokens))

    def add(self, log_probs: Tensor) -> None:
        """Read the log-probabilities (n, V) of the next n positions."""
        rows = self._rows - self._start
        chosen = (rows >= 0) & (rows < len(log_probs)) & (self._tokens != NO_TARGET)
        self._start += len(log_probs)
        places = rows[chosen].to(log_probs.device), self._tokens[chosen].to(log_probs.device)
        self._values[chosen] = log_probs[places].cpu()

    def fill(self, message: Any) -> None:
        """Fill a `Tensor` message in the layout of the request."""
        message.dtype = NUMBERS[torch.float32]
        message.shape.extend(self._targets.shape)
        starts, columns = self._targets.sparse_crow_indices, self._targets.sparse_col_indices
        if starts is None or columns is None:
            message.dense = bytes_of(self._values)
            return
        message.sparse.values = bytes_of(self._values)
        message.sparse.rows = bytes_of(starts, torch.int64)
        message.sparse.columns = bytes_of(columns, torch.int64)


def _logits(
    model: Any, head: Head | None, ids: Tensor, first: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield chunks of logits (n, V) and of their next tokens (n,), from token `first`."""
    if first >= len(ids):
        return
    positions = torch.arange(first - 1, len(ids) - 1, device=model.device)
    inputs = {"input_ids": ids[None].to(model.device), "use_cache": False}
    if head is None:
        chunks: Iterator[Tensor] = iter(target_logits(model, inputs, positions).split(ROWS))
    else:
        chunks = map(head, target_rows(model, inputs, positions).split(ROWS))
    yield from zip(chunks, ids[first:].split(ROWS), strict=True)
