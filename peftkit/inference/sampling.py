"""Sampling of the next token, with separate settings for each row of a batch.

A row's random numbers are a function of its seed and its number of tokens: they depend neither on
other rows of the batch nor on the order of requests.

Shapes: B rows, V tokens of the vocabulary, K likeliest tokens that are reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peftkit.errors import DataError, RunError
from peftkit.kernels.device import near_float64

MAX_NEW_TOKENS = 256
COLDEST = 1e-6
"""Minimum temperature, by which float32 logits can be divided."""
LIKELY = 1024
"""Number of likeliest tokens that are sorted first: sorting all takes 18 times as long."""
ALL = 1 << 30
"""More tokens than any vocabulary has."""
DRAWS = 64
"""Tokens of a row whose random numbers are computed together."""
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as SplitMix64 steps
_MIX = (-4658895280553007687, -7723592293110705685)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The settings of an answer.

    Attributes:
        max_new_tokens: Maximum; an answer also ends at the model's context length.
        temperature: 0: greedy; above: sample from softmax(logits / temperature).
        top_p: Sample only from the most likely tokens with this total probability.
        top_k: Sample only from this many of the most likely tokens; 0: from all.
        min_p: Sample only from tokens with this share of the likeliest token's probability.
        seed: Random seed; None: drawn from torch's global generator.
        stops: Further token ids that end an answer, like the tokenizer's and model's end tokens.
        top_logprobs: Number of likeliest tokens to report with each chosen one.
        penalties: Changes to the logits; None: none.

    Raises:
        DataError: A value is out of range.
    """

    max_new_tokens: int = MAX_NEW_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stops: Sequence[int] = ()
    top_logprobs: int = 0
    min_p: float = 0.0
    penalties: Penalties | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stops", tuple(self.stops))
        if self.max_new_tokens < 1:
            raise DataError(
                f"max_new_tokens is {self.max_new_tokens}.", fix="Give a number above 0."
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise DataError(
                f"the temperature is {self.temperature}.",
                fix="Use 0 for greedy decoding, or a number such as 0.7 to sample.",
            )
        if not 0 < self.top_p <= 1:
            raise DataError(f"top_p is {self.top_p}.", fix="Give a number above 0, at most 1.")
        if not 0 <= self.min_p <= 1:
            raise DataError(f"min_p is {self.min_p}.", fix="Give a number from 0 to 1.")
        if self.top_k < 0 or self.top_logprobs < 0:
            low = min(self.top_k, self.top_logprobs)
            raise DataError(f"top_k or top_logprobs is {low}.", fix="Give 0 or more.")

    @property
    def is_cut(self) -> bool:
        """Whether tokens are drawn from the most likely ones only."""
        return bool(self.temperature and (self.top_p < 1 or self.top_k or self.min_p))


class Constraint:
    """Restricts one answer to a grammar.

    Args:
        matcher: A `llguidance.LLMatcher` at the beginning of an answer.
        vocab_size: Of the model's logits.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> Tensor:
        """Return the allowed tokens: (V,) bool, on the CPU; raises RunError at a limit."""
        biases = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
        size = min(len(biases), self._vocab_size)
        allowed[:size] = biases[:size] != 0
        self._check()
        return allowed

    def take(self, token: int) -> None:
        """Advance by a token; errors as in `allowed`."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():  # llguidance then allows the end token only
            raise RunError(
                "the completion cannot continue by its grammar.",
                found=f"llguidance: {self._matcher.get_error().splitlines()[0]}",
                fix="Use a simpler schema, with fewer optional properties and alternatives.",
            )


class Chosen(NamedTuple):
    """The next token of one row.

    Attributes:
        log_prob: Log-probability by softmax(logits / temperature), before top_p and top_k; for
            greedy answers by softmax(logits).
        top: The likeliest tokens with their log-probabilities, if requested; fewer where a
            constraint allows no more.
    """

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...]


def seed_of(sampling: Sampling, number: int) -> int:
    """Return the seed of one of several answers that share their settings, by its number."""
    if sampling.seed is None:
        return int(torch.randint(1 << 62, ()).item()) if sampling.temperature > 0 else 0
    return _wrapped(sampling.seed * 6364136223846793005 + number)


def _wrapped(value: int) -> int:
    """Return the int64 with the last 64 bits of a number."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


class SamplingTable:
    """The settings of the rows of a batch, as tensors on the model's device.

    Apple's GPUs have no float64: there, the logits are copied to the CPU and tokens drawn on it.

    Args:
        seeds, counts: The seed of each row, and its number of tokens.
        wants_log_probs: Whether any row needs log-probabilities.
    """

    def __init__(
        self,
        settings: Sequence[Sampling],
        seeds: Sequence[int],
        counts: Sequence[int],
        device: torch.device | str,
        *,
        wants_log_probs: bool = False,
    ) -> None:
        self._device = device = near_float64(torch.device(device))
        self.is_greedy = all(one.temperature == 0 for one in settings)
        cut = [one.is_cut for one in settings]
        self.is_cut, self._all_cut = any(cut), all(cut)
        cutting = [one for one, is_cut in zip(settings, cut, strict=True) if is_cut]
        self._few = all(0 < one.top_k <= LIKELY for one in cutting)
        self._cut = torch.tensor(cut, device=device)
        self.top = max((one.top_logprobs for one in settings), default=0)
        self._greedy = torch.tensor([one.temperature == 0 for one in settings], device=device)
        temperature = [max(one.temperature or 1.0, COLDEST) for one in settings]
        self._temperature = torch.tensor(temperature, device=device)[:, None]
        self._top_p = torch.tensor([one.top_p for one in settings], device=device)[:, None]
        self._min_p = torch.tensor([one.min_p for one in settings], device=device)[:, None]
        top_k = [min(one.top_k or ALL, ALL) for one in settings]
        self._top_k = torch.tensor(top_k, device=device)[:, None]
        self._seeds = torch.tensor(seeds, device=device)
        self._counts, self._num_drawn = torch.tensor(counts, device=device), 0
        self._draws = torch.arange(DRAWS, device=device)
        self._wants_log_probs = wants_log_probs

    def choose(self, logits: Tensor) -> Tensor:
        """Choose a token for each row; synchronises with the device only for top_p without top_k.

        Args:
            logits: (B, V).

        Returns:
            (B, 2 + 2K) float64: token, its log-probability (0 if no row needs it), the K likeliest
            tokens, their log-probabilities. `choices` reads it.
        """
        logits = logits.to(self._device)
        if self.is_greedy and not (self._wants_log_probs or self.top):
            tokens = logits.max(-1).indices  # argmax is slow in 16 bits on a CPU
            return torch.stack([tokens.double(), torch.zeros_like(tokens).double()], 1)
        scaled = logits.float() / self._temperature
        tokens = scaled.argmax(-1)
        if not self.is_greedy:
            tokens = torch.where(self._greedy, tokens, self._drawn(scaled))
        total = scaled.logsumexp(-1)
        log_probs = scaled.gather(1, tokens[:, None])[:, 0] - total
        chosen = torch.stack([tokens.double(), log_probs.double()], 1)
        if not self.top:
            return chosen
        values, ids = scaled.topk(self.top)
        return torch.cat([chosen, ids.double(), (values - total[:, None]).double()], 1)

    def _drawn(self, scaled: Tensor) -> Tensor:
        """Return (B,) tokens drawn from all, or from the likeliest ones."""
        at, self._num_drawn = self._num_drawn % DRAWS, self._num_drawn + 1
        if not at:  # the numbers of several tokens take as many kernels as those of one
            self._numbers = uniform(self._seeds[:, None], self._counts[:, None] + self._draws)
            self._counts += DRAWS
        self._random = self._numbers[:, at : at + 1]
        probabilities = scaled.softmax(-1)
        if not self.is_cut:
            return self._inverse(probabilities)
        likely, order = self._likeliest(probabilities)
        before = likely.cumsum(-1) - likely
        rank = torch.arange(likely.shape[1], device=likely.device)
        keep = (before < self._top_p) & (rank < self._top_k)
        keep &= likely >= self._min_p * likely[:, :1]
        tokens = order.gather(1, self._inverse(likely * keep)[:, None])[:, 0]
        if self._all_cut:
            return tokens
        return torch.where(self._cut, tokens, self._inverse(probabilities))

    def _inverse(self, probabilities: Tensor) -> Tensor:
        """Return (B,) places drawn by the inverse of the cumulative probabilities (B, N)."""
        cumulative = probabilities.cumsum(-1, dtype=torch.float64)
        tokens = torch.searchsorted(cumulative, self._random * cumulative[:, -1:], right=True)
        return tokens.clamp_max(probabilities.shape[1] - 1)[:, 0]

    def _likeliest(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens, at least all that top_p and top_k keep.

        Returns:
            Their probabilities, descending, and their ids: (B, N).
        """
        if probabilities.shape[1] > LIKELY:
            likely, order = probabilities.topk(LIKELY)
            within = (likely.cumsum(-1)[:, -1:] >= self._top_p) | (self._top_k <= LIKELY)
            if self._few or bool((within[:, 0] | ~self._cut).all()):
                return likely, order
        return probabilities.sort(-1, descending=True)

    def choices(self, chosen: Sequence[Sequence[float]]) -> list[Chosen]:
        """Return the result of `choose`, as a list, row by row."""
        return [
            Chosen(int(row[0]), row[1], tuple(_pairs(row[2 : 2 + self.top], row[2 + self.top :])))
            for row in chosen
        ]


def _pairs(ids: Sequence[float], log_probs: Sequence[float]) -> list[tuple[int, float]]:
    """Return tokens with log-probabilities, without those that a constraint rules out."""
    pairs = zip(ids, log_probs, strict=True)
    return [(int(token), value) for token, value in pairs if value > -math.inf]


def uniform(seeds: Tensor, counts: Tensor) -> Tensor:
    """Return a number in [0, 1) for each seed and count (int64), by SplitMix64; float64."""
    state = seeds + (counts + 1) * _GOLDEN
    state = _mixed(_mixed(state, 30, _MIX[0]), 27, _MIX[1])
    state = state ^ _shifted(state, 31)
    return _shifted(state, 11).double() * 2.0**-53


def _mixed(state: Tensor, bits: int, factor: int) -> Tensor:
    return (state ^ _shifted(state, bits)) * factor


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end every answer: the model's and the tokenizer's."""
    config = model.generation_config
    ends = config.eos_token_id if config is not None else None
    of_model = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    of_tokenizer = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return frozenset(int(token) for token in (*of_model, *of_tokenizer))


@dataclass(frozen=True, slots=True)
class Penalties:
    """Changes to the logits before each token, in this order.

    Attributes:
        repetition: Divide the positive logits of tokens in the prompt or the completion by this
            factor, and multiply the negative ones; 1: no change. Source: CTRL (2019), section 4.1.
        frequency: Subtract this for each occurrence of a token in the completion.
        presence: Subtract this for tokens that occur in the completion. Source of both: OpenAI's
            API reference.
        bias: Numbers to add to the logits of tokens.

    Raises:
        DataError: A value is out of range.
    """

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.repetition) and self.repetition > 0):
            raise DataError(
                f"the repetition penalty is {self.repetition}.",
                fix="Give a number above 0; 1 changes nothing.",
            )
        if not all(map(math.isfinite, (self.frequency, self.presence, *self.bias.values()))):
            raise DataError("a penalty or bias is not finite.", fix="Give a finite number.")

    def applied(self, logits: Tensor, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Return changed logits (V,) in float32.

        Args:
            prompt, ids: Tokens of the prompt and of the completion so far.
        """
        out, device = logits.float(), logits.device
        if self.repetition != 1:
            seen = torch.tensor(sorted({*prompt, *ids}), device=device)
            values = out[seen]
            factor = torch.where(values > 0, 1 / self.repetition, self.repetition)
            out = out.index_copy(0, seen, values * factor)
        if ids and (self.frequency or self.presence):
            tokens, counts = torch.tensor(ids, device=device).unique(return_counts=True)
            out = out.index_add(0, tokens, -(self.frequency * counts + self.presence).to(out))
        if self.bias:
            tokens = torch.tensor([*self.bias], device=device)
            out = out.index_add(0, tokens, torch.tensor([*self.bias.values()]).to(out))
        return out
