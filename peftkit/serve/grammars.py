"""Answers that are held to a grammar by llguidance: JSON with a schema, forced tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from peftkit.inference.sampling import Constraint
from peftkit.serve.requests import RequestError


class Grammars:
    """Makes the constraints of answers with llguidance (the extra `json`).

    Args:
        vocab_size: Of the model's logits.
        ends: Tokens that may end a complete answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: list[int]) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, ends
        self._words: Any = None  # llguidance's tokenizer, slow to make

    def of_json(self, schema: Mapping[str, Any], param: str = "response_format") -> Constraint:
        """Return the constraint of one answer in JSON.

        Args:
            param: The field of the request that asks for it.

        Raises:
            RequestError: llguidance is not installed, or refuses the schema or the tokenizer.
        """
        return self._constraint(json.dumps(schema), param, is_lark=False)

    def of_lark(self, grammar: str, param: str) -> Constraint:
        """Return the constraint of one answer by a grammar in Lark; else as `of_json`."""
        return self._constraint(grammar, param, is_lark=True)

    def _constraint(self, text: str, param: str, *, is_lark: bool) -> Constraint:
        if find_spec("llguidance") is None:
            found = "this server has no grammars."
            raise _no_grammar(found, "pip install 'peftkit[json]'", param)
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        try:
            if self._words is None:
                self._words = from_tokenizer(
                    self._tokenizer, n_vocab=len(self._tokenizer), eos_token=self._ends
                )
            of_text = LLMatcher.grammar_from_lark if is_lark else LLMatcher.grammar_from_json_schema
            grammar = of_text(text)
        except ValueError as problem:
            found = str(problem).splitlines()[0]
            raise _no_grammar(found, "Use another schema.", param) from None
        if wrong := LLMatcher.validate_grammar(grammar, self._words):
            raise _no_grammar(wrong.splitlines()[0], "Use another schema.", param)
        return Constraint(LLMatcher(self._words, grammar), self._vocab_size)


def _no_grammar(found: str, fix: str, param: str) -> RequestError:
    return RequestError(
        f"the answer cannot be held to this {param}.", found=found, fix=fix, param=param
    )
