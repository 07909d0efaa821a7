"""One completion of a request: its settings, its tool calls, its output, and its state."""

from __future__ import annotations

import logging
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

from peftkit.errors import RunError
from peftkit.inference.call_formats import Call, dumped
from peftkit.inference.calls import AnswerPiece, CallStyle
from peftkit.inference.engine import Completion, Request
from peftkit.inference.generate import TextStream
from peftkit.inference.sampling import Chosen

_LOG = logging.getLogger(__name__)


class AnswerCalls:
    """Streaming parser of the tool calls of one completion.

    Args:
        prompt: Token ids before the completion.
        tools: Tools in the format of chat templates.
        is_single: Whether the completion ends after one call.
    """

    def __init__(
        self,
        style: CallStyle,
        prompt: Sequence[int],
        tools: Sequence[Mapping[str, object]],
        *,
        is_single: bool,
    ) -> None:
        self._reader = style.reader(prompt, tools)
        self._special, self._is_single = style.special, is_single

    def take(self, text: str, completion: Completion) -> AnswerPiece:
        """Parse new text; return its complete text, reasoning and calls.

        Args:
            text: New text of the completion, with special tokens.
        """
        parts: list[AnswerPiece] = []
        for part in self._reader.feed(text, over=completion.ended_by is not None):
            if part.calls and self._is_single:
                parts.append(part._replace(calls=part.calls[:1]))
                completion.finish("stop")
                break
            parts.append(part)
        return AnswerPiece(
            self._special.sub("", "".join(part.text for part in parts)),
            "".join(part.thought for part in parts),
            tuple(call for part in parts for call in part.calls),
        )


def call_fields(call: Call) -> dict[str, Any]:
    """Return a call in OpenAI's format, with an id of nine letters and digits for templates."""
    return {
        "id": call.id or uuid.uuid4().hex[:9],
        "type": "function",
        "function": {"name": call.name, "arguments": dumped(call)},
    }


@dataclass(frozen=True, slots=True)
class Output:
    """New output of a completion; `Collected` joins them.

    Attributes:
        chosen: Tokens with their log-probabilities, if requested.
        reason: Why the completion ended, in its last output. stop: an end token or a stop text;
            length: the maximum length, or the model's context.
        num_tokens: Tokens of the whole completion with its end token, in its last output.
        stop_text: The stop text that ended it, in its last output.
        thought, calls: Reasoning and tool calls, if the completion is parsed for them.
    """

    text: str
    chosen: tuple[Chosen, ...] = ()
    reason: Literal["stop", "length"] | None = None
    num_tokens: int = 0
    thought: str = ""
    calls: tuple[Call, ...] = ()
    stop_text: str | None = None


class Collected(Future[list[Output]]):
    """The whole completions of a request, in order; or the first error.

    Args:
        number: Number of completions.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # cannot be cancelled while an output arrives
        self._parts: list[list[Output]] = [[] for _ in range(number)]

    def take(self, index: int, output: Output | Exception) -> None:
        """Add an output of a completion, in the worker's thread."""
        if self.done():
            return
        if isinstance(output, Exception):
            self.set_exception(output)
            return
        self._parts[index].append(output)
        if all(parts and parts[-1].reason for parts in self._parts):
            self.set_result([*map(_joined, self._parts)])


def _joined(parts: Sequence[Output]) -> Output:
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        thought="".join(part.thought for part in parts),
        calls=tuple(call for part in parts for call in part.calls),
        chosen=tuple(token for part in parts for token in part.chosen),
    )


@dataclass(eq=False, slots=True)
class Generation:
    """One completion for a client.

    Args:
        send: Receives the outputs of the completion, or an error; the worker's thread calls it.
        stop_texts: Texts that end the completion.
        calls: Parser of tool calls; None: the completion is plain text.
        keeps_end: Whether the reported tokens include the end token.
        owner: Owner of the request.
    """

    request: Request
    send: Callable[[Output | Exception], None]
    stop_texts: tuple[str, ...] = ()
    calls: AnswerCalls | None = None
    keeps_end: bool = False
    owner: str = ""
    completion: Completion | None = None
    is_cancelled: bool = False
    is_done: bool = False

    @property
    def is_running(self) -> bool:
        """Whether the engine generates tokens for it."""
        return self.completion is not None and self.completion.ended_by is None

    @property
    def num_tokens(self) -> int:
        """Largest number of its tokens, with the prompt."""
        return len(self.request.ids) + self.request.sampling.max_new_tokens

    def cancel(self) -> None:
        """Stop the completion at the next token."""
        self.is_cancelled = True
        if self.completion is not None:
            self.completion.finish()

    def sender(self, tokenizer: Any) -> Callable[[Completion], None]:
        """Return the engine's callback, which sends the output of each new token."""
        parser = self.calls
        stream = TextStream(tokenizer, self.stop_texts, special=parser is not None)
        num_sent = 0

        def send_new(completion: Completion) -> None:
            nonlocal num_sent
            text = stream.take(completion)
            number = len(completion.chosen if self.keeps_end else completion.ids)
            new = AnswerPiece(text) if parser is None else parser.take(text, completion)
            chosen = tuple(completion.chosen[num_sent:number]) if self.request.log_probs else ()
            num_sent += len(chosen)
            if completion.ended_by in ("stop", "length"):
                self.is_done = True
                reason = "stop" if stream.is_stopped else completion.ended_by
                number = len(completion.chosen)
                stop = stream.stop_text
                self.send(Output(new.text, chosen, reason, number, *new[1:], stop_text=stop))
            elif new != AnswerPiece() or chosen:
                self.send(Output(new.text, chosen, None, 0, *new[1:]))

        def on_token(completion: Completion) -> None:
            if self.is_done:
                return
            try:
                send_new(completion)
            except Exception as problem:  # fails this completion alone
                _LOG.exception("a completion cannot be parsed")
                self.is_done = True
                completion.finish()
                self.send(failure("the completion cannot be parsed", problem))

        return on_token


def failure(summary: str, problem: BaseException) -> RunError:
    """Return the error that reports an unexpected exception to a client."""
    return RunError(f"{summary}: {type(problem).__name__}: {problem}")


def resolve_seed(seed: int | None) -> int:
    """Return the seed, or a random one drawn outside torch's generator.

    A training run in the same process draws from torch's generator and must stay reproducible.
    """
    return secrets.randbits(62) if seed is None else seed
