"""The tokens of a chat template between the end of an answer and the start of the next.

A conversation is never rendered again: the sampled tokens stay unchanged, and the template's next
tokens are appended. Tokenizers do not merge across special tokens, so the text after the end token
of an answer can be tokenised alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from peftkit.data.chat import SENTINEL, Chat, special_texts
from peftkit.data.messages import Message, Tool
from peftkit.data.tokens import tokens
from peftkit.errors import DataError

_ASKED = {"role": "user", "content": "Hello"}
_THOUGHT = "PEFTKITsentinelTHOUGHT"
_ID = "call0000{}"  # nine letters and digits, which Mistral's templates require
_FIX = "Set data.chat_template to a template that does, or leave the tools out."


class Turns:
    """Continues conversations after the model's answers.

    Args:
        template: A chat template's text; None: the tokenizer's own.
        variables: For the template.
    """

    def __init__(
        self, tokenizer: Any, template: str | None, variables: Mapping[str, object] | None = None
    ) -> None:
        self._tokenizer, self._variables = tokenizer, variables
        self._chat = Chat(tokenizer, template)
        self._special = re.compile(
            "|".join(re.escape(text) for text in special_texts(tokenizer)) or r"(?!)"
        )

    def after(
        self,
        replies: Sequence[Message],
        calls: Sequence[tuple[str, str]] = (),
        tools: Sequence[Tool] = (),
        *,
        generation: bool = True,
        ended_by: str | None = None,
    ) -> tuple[int, list[int]]:
        """Return the end token of an answer, and the tokens from there to the next answer.

        The result does not depend on the text of the answer, so a placeholder replaces it.

        Args:
            replies: Messages after the answer, of tools or of the user.
            calls: Names and ids of the tools that the answer calls.
            tools: The functions in the prompt.
            generation: Whether to add the generation prompt of the next answer.
            ended_by: Text of the token that ended the answer; None: the template's end token.

        Raises:
            DataError: The template refuses the conversation, or renders an answer differently if a
                message follows.
        """
        # The placeholder marks the end of the answer even if a template adds or drops an empty
        # thought. Some templates omit the content of an answer with calls, or move it.
        for content in (SENTINEL, ""):
            answer = _answer(content, calls)
            closed = self._written([_ASKED, answer], tools, generation=False)
            whole = self._written([_ASKED, answer, *replies], tools, generation=generation)
            is_marked = closed.count(SENTINEL) == whole.count(SENTINEL) == 1
            if content and not is_marked:
                continue
            if is_marked:
                closed, whole = closed.partition(SENTINEL)[2], whole.partition(SENTINEL)[2]
                if ended_by and ended_by in whole:  # may start the next turn: <|observation|>
                    return self._from(ended_by, whole.partition(ended_by)[2])
            if end := self._end_of(closed, whole, several=is_marked):
                return self._from(end[0], whole[end.end() :])
        raise DataError(
            "the chat template renders an answer differently if a message follows.",
            found=f"As the last turn it ends with {closed[-60:]!r}; otherwise {whole[-120:]!r}",
            fix=_FIX,
        )

    def check(self, tools: Sequence[Tool] = ()) -> None:
        """Check that appending the tokens of `after` equals rendering the whole conversation.

        The check renders two answers with replies of tools or, without tools, of the user. Earlier
        turns, reasoning included, must not change.

        Raises:
            DataError: The template changes or omits earlier turns.
        """
        names = [tool["function"]["name"] for tool in tools[:1]]
        turns: list[Message] = [_ASKED]
        for number in range(2):
            calls = [(name, _ID.format(number)) for name in names]
            answer = _answer("" if calls else f"Answer {number}.", calls, f"{_THOUGHT}{number}")
            if _THOUGHT not in self._written([_ASKED, answer], tools, generation=False):
                answer.pop("reasoning_content")
            replies = [
                {"role": "tool", "name": name, "tool_call_id": key, "content": f"Result {number}."}
                for name, key in calls
            ] or [{"role": "user", "content": f"Question {number}."}]
            prompt = self._written(turns, tools, generation=False)
            closed = self._written([*turns, answer], tools, generation=False)
            turns += [answer, *replies]
            whole = self._written(turns, tools, generation=True)
            _, ids = self.after(replies, calls, tools)
            end = self._end_of(closed, whole)
            appended = [] if end is None else tokens(self._tokenizer, whole[: end.end()]) + ids
            if not whole.startswith(prompt) or appended != tokens(self._tokenizer, whole):
                raise DataError(
                    "the chat template rewrites the turns before a reply.",
                    found=f"An answer ends with {closed[-120:]!r}; with a reply: {whole[-240:]!r}",
                    fix=_FIX,
                )

    def _end_of(self, closed: str, whole: str, *, several: bool = True) -> re.Match[str] | None:
        """Return the special token that ends an answer, as a match in the whole conversation.

        Args:
            closed: The conversation up to the answer.
            several: Whether other special tokens may follow the end token, as in Phi-3.
        """
        rest = len(closed)
        for end in reversed([*self._special.finditer(closed)]):
            if closed[end.end() : rest].strip():
                break  # not at the end
            if whole.startswith(closed[: end.end()]):
                return self._special.match(whole, end.start())
            if not several:
                break
            rest = end.start()
        # GLM ends an answer with the token that starts the next turn
        return self._special.match(whole, len(closed)) if whole.startswith(closed) else None

    def _from(self, end: str, text: str) -> tuple[int, list[int]]:
        (token,) = tokens(self._tokenizer, end)
        both = tokens(self._tokenizer, end + text)
        assert both[0] == token, end
        return token, both[1:]

    def _written(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, generation: bool
    ) -> str:
        def written(turns: Sequence[Message]) -> str:
            where = "a conversation with replies"
            given = self._variables
            return self._chat.render(turns, tools, where, generation=generation, variables=given)

        try:
            return written(messages)
        except DataError:  # DeepSeek's templates take arguments as JSON text
            return written([_with_text_arguments(message) for message in messages])


def _answer(
    content: str, calls: Sequence[tuple[str, str]], thought: str | None = None
) -> dict[str, object]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": key, "type": "function", "function": {"name": name, "arguments": {}}}
            for name, key in calls
        ]
    return message if thought is None else message | {"reasoning_content": thought}


def _with_text_arguments(message: Message) -> dict[str, object]:
    if "tool_calls" not in message:
        return dict(message)
    calls = [
        {**call, "function": {**call["function"], "arguments": "{}"}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
