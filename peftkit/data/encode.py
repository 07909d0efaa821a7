"""Examples as tokens and labels. Generation builds its prompts with the same code (generation.py).

The prompt is tokenised alone, and the response's tokens continue it. A response therefore has the
same context tokens in training and in generation. Targets are the tokens that the loss counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from peftkit.data.chat import Chat, Rendered, Span, special_texts
from peftkit.data.examples import Completion, Conversation, Example, Instruction, Text
from peftkit.data.format import FieldNames, ParsedRow, parse
from peftkit.data.messages import without_reasoning
from peftkit.data.pack import IGNORE, Row, cut_document
from peftkit.data.records import Dropped, Record
from peftkit.data.rows.encoder import RowEncoder
from peftkit.data.style import ALPACA, ALPACA_INPUT, Style
from peftkit.data.tokens import continuation, segmentwise, tokens, with_bos
from peftkit.errors import DataError
from peftkit.settings import FormatName


class Encoder:
    """Encoder of examples as rows of tokens, one document each.

    Args:
        template: A chat template's text, used instead of the tokenizer's template.
        reasoning: See `DataConfig.reasoning`.

    Attributes:
        has_template: Whether conversations can be rendered.
        counts: Over all examples. off_prompt: conversations whose last turn does not begin at the
            end of the generation prompt. thoughts, unwritten: target turns whose reasoning the
            template renders, or omits.
    """

    def __init__(
        self, tokenizer: Any, template: str | None = None, reasoning: str = "learn"
    ) -> None:
        self._tokenizer, self._template, self._reasoning = tokenizer, template, reasoning
        self.has_template = template is not None or bool(tokenizer.chat_template)
        self._chat = Chat(tokenizer, template, trains_reasoning=reasoning == "learn")
        special = "|".join(re.escape(text) for text in special_texts(tokenizer)) or r"(?!)"
        self._special = re.compile(special)
        self._added = set(getattr(tokenizer, "added_tokens_decoder", {}))
        self._headers: dict[str, list[int]] = {}
        self.counts = Counter[str]()

    def style(self, example: Example) -> Style:
        """Return the prompt format for generation after training on this kind of example.

        Raises:
            DataError: A conversation, and a tokenizer without a chat template.
        """
        if isinstance(example, Conversation):
            require_template(self._tokenizer, self._template)
            return Style("chat", self._template)
        if isinstance(example, Instruction):
            return Style("chat", self._template) if self.has_template else Style("alpaca")
        return Style("plain")

    def encode(self, example: Example) -> Row:
        """Return an example's tokens, untruncated; without targets if its response is empty.

        Raises:
            DataError: The template refuses the example, or its targets cannot be located exactly.
        """
        if isinstance(example, Instruction) and self.has_template:
            example = example.conversation
        if isinstance(example, Conversation):
            return self._conversation(example)
        if isinstance(example, Instruction):
            frame = ALPACA_INPUT if example.input.strip() else ALPACA
            prompt = frame.format(example.instruction, example.input)
            example = Completion(prompt, example.output, example.source)
        if isinstance(example, Completion):
            return self._completion(example)
        return self._text(example)

    def _text(self, example: Text) -> Row:
        ids = with_bos(self._tokenizer, example.text)
        if not example.text.strip():
            return row_of(ids, [False] * len(ids), example.source)
        ids = self._with_eos(ids, example.source)
        return row_of(ids, [True] * len(ids), example.source)

    def _completion(self, example: Completion) -> Row:
        prompt = with_bos(self._tokenizer, example.prompt)
        if not example.completion.strip():
            return row_of(prompt, [False] * len(prompt), example.source)
        if not prompt:
            return self._text(Text(example.completion, example.source))
        text, source = example.completion, example.source
        completion = continuation(self._tokenizer, example.prompt, text, source)
        completion = self._with_eos(completion, source)
        is_target = [False] * len(prompt) + [True] * len(completion)
        return row_of(prompt + completion, is_target, source)

    def _with_eos(self, ids: list[int], source: str) -> list[int]:
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise DataError(
                f"Cannot end {source}.",
                found="The tokenizer has no end-of-sequence token: the model would not learn to "
                "stop.",
                fix="Set tokenizer.eos_token in the base's tokenizer_config.json.",
            )
        return ids if ids and ids[-1] == eos else [*ids, eos]

    def _conversation(self, example: Conversation) -> Row:
        if self._reasoning == "drop":
            example = replace(example, messages=tuple(map(without_reasoning, example.messages)))
        rendered = self._chat.spans(example)
        self.counts["off_prompt"] += not rendered.as_generated
        self.counts["thoughts"] += sum(rendered.thoughts)
        self.counts["unwritten"] += len(rendered.thoughts) - sum(rendered.thoughts)
        last = example.target_turns[-1] if example.target_turns else -1
        return self.rendered(rendered, example.source, ends=last == len(example.messages) - 1)

    def rendered(self, rendered: Rendered, source: str, *, ends: bool) -> Row:
        """Return the tokens of a text with target spans.

        Args:
            ends: Whether the last span ends the document.

        Raises:
            DataError: Its targets cannot be located exactly.
        """
        text, spans = rendered.text, rendered.spans
        ids, is_target = self._joint(text, spans) or segmentwise(
            self._tokenizer, text, spans, self._special, source
        )
        if ends and spans and not spans[-1].ended:
            # the template has no end-of-turn token: eos ends the response
            longer = self._with_eos(ids, source)
            ids, is_target = longer, is_target + [True] * (len(longer) - len(ids))
        return row_of(ids, is_target, source)

    def _joint(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]] | None:
        """Tokenise the whole text; None if a token crosses the beginning or end of a span."""
        if not self._tokenizer.is_fast:
            return None
        encoding = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids: list[int] = encoding["input_ids"]
        offsets: list[tuple[int, int]] = encoding["offset_mapping"]
        is_target = [False] * len(ids)
        at = 0
        for span in spans:
            while at < len(ids) and offsets[at][0] < span.start:
                at += 1
            if not self._is_prompt(text[: span.start], ids[:at], offsets):
                return None
            while at < len(ids) and offsets[at][0] < span.end:
                is_target[at] = True
                at += 1
            if offsets[at - 1][1] > span.end and ids[at - 1] not in self._added:
                return None  # a token merges the turn's end with the following text
        return ids, is_target

    def _is_prompt(self, prompt: str, ids: list[int], offsets: Sequence[tuple[int, int]]) -> bool:
        """Return whether these are the tokens of a prompt alone.

        Only tokens after the last added token are compared: tokenizers never merge across it.
        """
        first = next((n for n in reversed(range(len(ids))) if ids[n] in self._added), 0)
        header = prompt[offsets[first][0] if first else 0 :]
        if len(header) > 200:  # longer than a recurring header such as "<|im_start|>assistant"
            return tokens(self._tokenizer, header) == ids[first:]
        if header not in self._headers:
            self._headers[header] = tokens(self._tokenizer, header)
        return self._headers[header] == ids[first:]


def require_template(tokenizer: Any, template: str | None) -> None:
    """Raise DataError if there is neither `template` nor a template of the tokenizer."""
    if template is None and not tokenizer.chat_template:
        raise DataError(
            "Cannot render a conversation for this base.",
            found=f"Its {type(tokenizer).__name__} has no chat template.",
            fix='Set data.chat_template to "chatml", or to a .jinja file.',
        )


def row_of(ids: Sequence[int], is_target: Sequence[bool], source: str) -> Row:
    """Return a document's row up to its last target. Its first token is never a target."""
    labels = [token if target else IGNORE for token, target in zip(ids, is_target, strict=True)]
    if labels:
        labels[0] = IGNORE
    stop = next((n for n in range(len(labels), 0, -1) if labels[n - 1] != IGNORE), len(labels))
    return Row(tuple(ids[:stop]), tuple(labels[:stop]), (stop,), source)


NOTHING, BEYOND = "nothing to learn", "the answer is beyond the cut"
"""Reasons to drop a record; see `RowEncoder.drops`."""


class DocumentEncoder(RowEncoder):
    """Encoder of records for causal language modelling: one document each, cut to a length.

    Args:
        template, reasoning: See `Encoder`.
        fields: Names of the fields with prompt and completion. With the format "auto" and a
            template these are a user's message and the response.
    """

    kind: ClassVar[type[Row]] = Row
    drops: Mapping[str, str] = {
        NOTHING: "give these rows an answer",
        BEYOND: "raise data.max_length",
    }

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        format: Literal["auto"] | FormatName,
        max_length: int,
        fields: FieldNames | None = None,
        reasoning: str = "learn",
    ) -> None:
        self._encoder = Encoder(tokenizer, template, reasoning)
        self.counts = self._encoder.counts
        self._format, self._max_length, self._fields = format, max_length, fields
        self.tokenizer = tokenizer
        self.settings = (template, format, max_length, fields, reasoning)

    def read(self, records: Sequence[Record], where: str) -> ParsedRow[Example]:
        parsed = parse(records, self._format, where=where, fields=self._fields)
        if self._fields is None or self._format != "auto" or not self._encoder.has_template:
            return parsed
        turns = (e.conversation if isinstance(e, Completion) else e for e in parsed.examples)
        return parsed._replace(examples=tuple(turns))

    def row(self, example: Example) -> Row | Dropped:
        row = self._encoder.encode(example)
        cut = cut_document(row, self._max_length)
        if cut.num_targets == 0:
            return Dropped(row.source, BEYOND if row.num_targets else NOTHING)
        self.counts.update(cut=len(row.input_ids) > self._max_length, targets=cut.num_targets)
        return cut

    def style_of(self, example: Example) -> Style:
        return self._encoder.style(example)


def agreed_style(
    first: Style | None, style: Style, where: str, *, of_adapter: bool = False
) -> Style:
    """Check that rows have the style of earlier rows; return the common style.

    If the system prompts differ, the common style has none.

    Args:
        first: The style of earlier rows, or of the adapter; None for the first rows.
        of_adapter: Whether `first` is the adapter's style.

    Raises:
        DataError: The styles differ.
    """
    if first is not None and replace(first, system=style.system) != style:
        raise _other_style(first, style, where, of_adapter)
    return style if first is None or first.system == style.system else replace(style, system=None)


def _other_style(first: Style, style: Style, where: str, of_adapter: bool) -> DataError:
    others = "the adapter was trained on" if of_adapter else "the other rows have"
    suffix = " with another chat template" * (first.kind == style.kind)
    fix = "Give rows of one format, or set data.format and data.chat_template."
    if of_adapter:
        fix = (
            "Give rows in that style, or set data.format or data.chat_template to change it. "
            "peftkit eval --row-style evaluates rows in their own style."
        )
    return DataError(
        f"Cannot use {where} here.",
        found=f"Its rows have the prompt style '{style.kind}', {others} '{first.kind}'{suffix}.",
        fix=fix,
    )
