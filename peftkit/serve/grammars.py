"""Constrained decoding by llguidance: JSON with a schema, forced tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from peftkit.inference.sampling import Constraint
from peftkit.serve.requests import RequestError


class Grammars:
    """Factory of the constraints of completions (the extra `json`).

    Args:
        vocab_size: Size of the model's logits.
        ends: Tokens that may end a completion.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: list[int]) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, ends
        self._guidance_tokenizer: Any = None  # slow to build: created on first use

    def of_json(self, schema: Mapping[str, Any], param: str = "response_format") -> Constraint:
        """Return the constraint of one completion to a JSON schema.

        Args:
            param: The request field with the schema, for errors.

        Raises:
            RequestError: llguidance is not installed, or refuses the schema or the tokenizer.
        """
        return self._constraint(json.dumps(schema), param, is_lark=False)

    def of_lark(self, grammar: str, param: str) -> Constraint:
        """Return the constraint of one completion to a Lark grammar; errors as in `of_json`."""
        return self._constraint(grammar, param, is_lark=True)

    def _constraint(self, text: str, param: str, *, is_lark: bool) -> Constraint:
        if find_spec("llguidance") is None:
            reason = "llguidance is not installed on the server."
            raise _no_grammar(reason, "pip install 'peftkit[json]'", param)
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        try:
            if self._guidance_tokenizer is None:
                self._guidance_tokenizer = from_tokenizer(
                    self._tokenizer, n_vocab=len(self._tokenizer), eos_token=self._ends
                )
            of_text = LLMatcher.grammar_from_lark if is_lark else LLMatcher.grammar_from_json_schema
            grammar = of_text(text)
        except ValueError as problem:
            reason = str(problem).splitlines()[0]
            raise _no_grammar(reason, "Use another schema.", param) from None
        if problems := LLMatcher.validate_grammar(grammar, self._guidance_tokenizer):
            raise _no_grammar(problems.splitlines()[0], "Use another schema.", param)
        return Constraint(LLMatcher(self._guidance_tokenizer, grammar), self._vocab_size)


def _no_grammar(reason: str, fix: str, param: str) -> RequestError:
    return RequestError(
        f"the completion cannot be constrained to this {param}.", found=reason, fix=fix, param=param
    )
