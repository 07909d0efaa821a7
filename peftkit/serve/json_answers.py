"""Answers that are JSON, or JSON of a schema: which tokens may come next, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from peftkit.serve.requests import RequestError


class JsonAnswers:
    """Makes constraints of schemas; what the tokenizer's words are is worked out once.

    Args:
        vocab_size: Of the model's logits.
        ends: Tokens that end an answer, which may come when the JSON is whole.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: list[int]) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, ends
        self._words: Any = None

    def constraint(self, schema: Mapping[str, Any]) -> JsonConstraint:
        """Return what holds one answer to a schema.

        Raises:
            RequestError: llguidance is not installed, or does not take the schema or tokenizer.
        """
        if find_spec("llguidance") is None:
            raise _refused("this server has no grammars.", "pip install 'peftkit[json]'")
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        try:
            if self._words is None:
                self._words = from_tokenizer(
                    self._tokenizer, n_vocab=len(self._tokenizer), eos_token=self._ends
                )
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        except ValueError as problem:
            raise _refused(str(problem).splitlines()[0], "Use another schema.") from None
        if wrong := LLMatcher.validate_grammar(grammar, self._words):
            raise _refused(wrong.splitlines()[0], "Use another schema.")
        return JsonConstraint(LLMatcher(self._words, grammar), self._vocab_size)


class JsonConstraint:
    """Holds one answer to a grammar (`peftkit.inference.sampling.Constraint`)."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> Tensor:
        """Return (V,) bool: the tokens that may come next."""
        biases = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        found = torch.zeros(self._vocab_size, dtype=torch.bool)
        size = min(len(biases), self._vocab_size)
        found[:size] = biases[:size] != 0
        return found

    def take(self, token: int) -> None:
        """Go on by a token."""
        self._matcher.consume_token(token)


def _refused(found: str, fix: str) -> RequestError:
    return RequestError(
        "the answer cannot be held to this response_format.",
        found=found,
        fix=fix,
        param="response_format",
    )
