"""Constrained decoding by llguidance: JSON with a schema, forced tool calls.

Schemas come from clients, and some take exponential time and memory to compile, such as `allOf`
over patterns. llguidance's own limits do not bound that. A grammar is therefore compiled in a
subprocess with limits first, and in this process only if that succeeded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from peftkit.errors import install_extra
from peftkit.inference.sampling import Constraint
from peftkit_server.limits import DEFAULTS, Limits
from peftkit_server.refusals import RequestError

KEPT = 256
"""Grammars whose check is remembered."""
WALL_SECONDS = 10
"""Wall-clock limit of a check, in multiples of its CPU limit: the machine may be busy."""
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""White space between the tokens of JSON; without a bound, small models write nothing else."""
_FIX = "Use another schema."
_CHILD = """
import json, sys
seconds, size, states, folder = *map(int, sys.argv[1:4]), sys.argv[4]
try:
    import resource
except ImportError:  # Windows
    pass
else:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.path.append(folder)
from llguidance import LLMatcher, LLParserLimits
is_lark, text = json.load(sys.stdin)
try:
    grammar = (LLMatcher.grammar_from_lark if is_lark else LLMatcher.grammar_from_json_schema)(text)
    problem = LLMatcher.validate_grammar(grammar, limits=LLParserLimits(max_lexer_states=states))
except ValueError as error:
    problem = str(error)
json.dump(problem, sys.stdout)
"""


class Grammar(NamedTuple):
    """The grammar of a completion.

    Attributes:
        text: A JSON schema, or Lark.
        param: The request field that requires it, for errors.
    """

    text: str
    param: str = "response_format"
    is_lark: bool = False


def json_grammar(schema: Mapping[str, Any]) -> Grammar:
    """Return the grammar of a JSON schema, with bounded white space."""
    return Grammar(json.dumps({"x-guidance": {"whitespace_pattern": WHITE_SPACE}, **schema}))


class Grammars:
    """Factory of the constraints of completions (the extra `json`).

    Args:
        vocab_size: Size of the model's logits.
        ends: Tokens that may end a completion.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, ends: list[int], limits: Limits = DEFAULTS
    ) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, ends
        self._limits = limits
        self._guidance_tokenizer: Any = None  # slow to build: created on first use

    def constraint(self, grammar: Grammar) -> Constraint:
        """Return the constraint of one completion; errors as in `check_grammar`."""
        check_grammar(grammar, self._limits)  # remembered
        from llguidance import LLMatcher, LLParserLimits
        from llguidance.hf import from_tokenizer

        text, param, is_lark = grammar
        limits = LLParserLimits(max_lexer_states=self._limits.lexer_states)
        try:
            if self._guidance_tokenizer is None:
                self._guidance_tokenizer = from_tokenizer(
                    self._tokenizer, n_vocab=len(self._tokenizer), eos_token=self._ends
                )
            of_text = LLMatcher.grammar_from_lark if is_lark else LLMatcher.grammar_from_json_schema
            matcher = LLMatcher(self._guidance_tokenizer, of_text(text), limits=limits)
        except ValueError as problem:
            raise _no_grammar(str(problem).splitlines()[0], _FIX, param) from None
        if matcher.is_error():
            raise _no_grammar(matcher.get_error().splitlines()[0], _FIX, param)
        return Constraint(matcher, self._vocab_size)


def check_grammar(grammar: Grammar, limits: Limits = DEFAULTS) -> None:
    """Compile a grammar in a subprocess with limits; any thread may call this.

    Raises:
        RequestError: llguidance is not installed or refuses the grammar, or a limit is exceeded.
    """
    text, param, is_lark = grammar
    spec = find_spec("llguidance")
    if spec is None or spec.origin is None:
        reason = "llguidance is not installed on the server."
        raise _no_grammar(reason, install_extra("json"), param)
    if len(text) > limits.schema_bytes:
        reason = f"It has {len(text):,} characters; the limit is {limits.schema_bytes:,}."
        raise _no_grammar(reason, "Use a smaller schema.", param)
    try:
        problem = _compiled(text, is_lark, str(Path(spec.origin).parents[1]), limits)
    except TimeoutError as error:
        raise _no_grammar(str(error), _FIX, param) from None
    if problem:
        raise _no_grammar(problem.splitlines()[0], _FIX, param)


@lru_cache(KEPT)
def _compiled(text: str, is_lark: bool, folder: str, limits: Limits) -> str:
    """Return what is wrong with a grammar; "": nothing.

    Args:
        folder: The site-packages folder of llguidance.

    Raises:
        TimeoutError: It takes too long by the clock, perhaps because the machine is busy.
    """
    numbers = limits.grammar_seconds, limits.grammar_bytes, limits.lexer_states
    too_slow = f"It takes more than {limits.grammar_seconds} seconds to compile."
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD, *map(str, numbers), folder],
            input=json.dumps([is_lark, text]),
            capture_output=True,
            text=True,
            timeout=limits.grammar_seconds * WALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(too_slow) from None
    if done.returncode in (-24, -9):  # SIGXCPU, SIGKILL: `signal` has neither on Windows
        return too_slow
    if done.returncode > 0 and "MemoryError" not in done.stderr:
        return done.stderr.strip().rpartition("\n")[2] or "llguidance failed."
    if done.returncode:
        return f"It takes more than {limits.grammar_bytes >> 20} MiB to compile."
    problem: str = json.loads(done.stdout)
    return problem


def _no_grammar(reason: str, fix: str, param: str) -> RequestError:
    return RequestError(
        f"the completion cannot be constrained to this {param}.", found=reason, fix=fix, param=param
    )
