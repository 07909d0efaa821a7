"""A validated request for completions, in the form that the worker's requests are made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from peftkit.data.style import Style
from peftkit.inference.calls import CallStyle
from peftkit_server.answer_calls import AnswerCalls
from peftkit_server.call_grammar import call_grammar
from peftkit_server.clients.replies import EventReply
from peftkit_server.refusals import RequestError
from peftkit_server.requests import Body
from peftkit_server.tool_fields import ToolUse


class ParsedRequest(NamedTuple):
    """A validated request.

    Attributes:
        adapter: Name in the bank; None: the base.
        style: Prompt style of the adapter.
        prompts: Token ids.
        calls: Syntax of tool calls; None: the request uses no tools.
        reply: Format of the response; None: that of chat or text completions.
    """

    body: Body
    adapter: str | None
    style: Style
    prompts: list[list[int]]
    calls: CallStyle | None = None
    tools: ToolUse | None = None
    reply: EventReply | None = None

    def call_parser(self, prompt: Sequence[int]) -> AnswerCalls | None:
        """Return the parser of tool calls in a completion; None: the completion is plain text."""
        if self.calls is None or self.tools is None:
            return None
        tools, is_single = self.tools.offered, self.tools.is_single
        return AnswerCalls(self.calls, prompt, tools, is_single=is_single)

    def grammar(self, tokenizer: Any, prompt: Sequence[int]) -> str:
        """Return the grammar of a forced call.

        Raises:
            RequestError: The model's call format has no grammar.
        """
        assert self.calls is not None
        assert self.tools is not None
        thinks = self.calls.thinks(prompt)
        grammar = call_grammar(self.calls, tokenizer, self.tools.forced, thinks=thinks)
        if grammar is None:
            raise RequestError(
                "this model does not support forced tool calls.",
                found=f"It writes calls in the format {self.calls.form.name}, which is not JSON.",
                fix='Use "tool_choice": "auto".',
                param="tool_choice",
            )
        return grammar
