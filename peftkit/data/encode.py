"""Examples as tokens and labels; generation builds its prompts with the same code.

A prompt is tokenised alone and the answer's tokens continue it, so that the context of an answer
has the same tokens in training and in generation. Targets are the tokens that the loss counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from peftkit.data.chat import (
    Chat,
    Rendered,
    Span,
    own_template,
    special_texts,
    system_of,
    with_system,
)
from peftkit.data.format import (
    Completion,
    Conversation,
    Example,
    FieldNames,
    Instruction,
    ParsedRow,
    Text,
    parse,
)
from peftkit.data.messages import Message, without_reasoning
from peftkit.data.pack import IGNORE, Row, cut_document
from peftkit.data.records import Dropped, Record
from peftkit.data.rows.encoder import EncodedRows, RowEncoder, tokenizer_key
from peftkit.errors import DataError
from peftkit.settings import FormatName

# the prompts of Stanford Alpaca, for tokenizers without a chat template
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{}\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n"
)


StyleName = Literal["chat", "alpaca", "plain"]
STYLES: tuple[StyleName, ...] = get_args(StyleName)


@dataclass(frozen=True, slots=True)
class Style:
    """Prompt format of a model; saved with an adapter, so that generation prompts as training did.

    Args:
        kind: chat: by a chat template; alpaca: by Alpaca's prompts; plain: unchanged.
        chat_template: The template's text; None: the tokenizer's own.
        reasoning: See `DataConfig.reasoning`.
        system: The system prompt that all rows had; a conversation without one begins with it.
    """

    kind: StyleName
    chat_template: str | None = None
    reasoning: str = "learn"
    system: str | None = None

    def opened(self, messages: Sequence[Message]) -> list[Message]:
        """Return a conversation with its system turn: its own, or that of the style."""
        if not self.system or system_of(messages):
            return list(messages)
        return [{"role": "system", "content": self.system}, *messages]


def default_style(tokenizer: Any) -> Style:
    """Return the prompt format of a model whose training is unknown."""
    return Style("chat" if tokenizer.chat_template else "plain")


def prompt_ids(
    tokenizer: Any,
    prompt: str | Sequence[Message],
    style: Style,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the tokens that generation starts from.

    Args:
        prompt: The user's text, or a conversation (chat only).
        variables: For the chat template, in place of those of training.

    Raises:
        DataError: The style or the template cannot render it.
    """
    if style.kind == "chat":
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        require_template(tokenizer, style.chat_template)
        chat = Chat(tokenizer, style.chat_template)
        turns = style.opened(messages)
        text = chat.render(turns, tools, "the prompt", generation=True, variables=variables)
        return tokens(tokenizer, text)
    if not isinstance(prompt, str):
        raise DataError(
            "Cannot prompt this model with a conversation.",
            found=f"Its adapter was trained on single prompts (style '{style.kind}').",
            fix="Give one prompt as text.",
        )
    return with_bos(tokenizer, ALPACA.format(prompt) if style.kind == "alpaca" else prompt)


def template_of(tokenizer: Any, style: Style) -> str | None:
    """Return the template that renders as a style says; None: the tokenizer's own."""
    if style.kind != "chat" or not style.system:
        return style.chat_template
    return with_system(style.chat_template or own_template(tokenizer), style.system)


def style_with_system(tokenizer: Any, style: Style, system: str) -> Style:
    """Return a style with another system prompt; "": none.

    Raises:
        DataError: The style is of single prompts, or its chat template leaves the text out.
    """
    asked = "Cannot use a system prompt here."
    if style.kind != "chat":
        found = f"The adapter was trained on single prompts (style '{style.kind}')."
        raise DataError(asked, found=found, fix="Write it into the prompt.")
    bare, changed = replace(style, system=None), replace(style, system=system or None)
    if system and prompt_ids(tokenizer, "Hello", bare) == prompt_ids(tokenizer, "Hello", changed):
        found = "The chat template leaves it out."
        raise DataError(asked, found=found, fix="Write it into the first message.")
    return changed


def stop_ids(tokenizer: Any, style: Style) -> list[int]:
    """Return the tokens that end an answer: the last target of a row of this style, and eos."""
    stops = {int(tokenizer.eos_token_id)} if tokenizer.eos_token_id is not None else set()
    if style.kind == "chat":
        hello = Instruction("Hello", "", "Hello", "the chat template").conversation
        row = Encoder(tokenizer, style.chat_template).encode(hello)
        stops.add(next(label for label in reversed(row.labels) if label != IGNORE))
    return sorted(stops)


class Encoder:
    """Encoder of examples as rows of tokens, one document each.

    Args:
        template: A chat template's text, used instead of the tokenizer's own.
        reasoning: See `DataConfig.reasoning`.

    Attributes:
        has_template: Whether conversations can be rendered.
        counts: Over all examples. off_prompt: conversations whose last turn does not begin where
            the generation prompt ends. thoughts, unwritten: target turns whose reasoning the
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
        """Return the prompt format of generation after training on such an example.

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
        """Return an example's tokens, uncut; without targets where there is nothing to learn.

        Raises:
            DataError: A template refuses it, or its targets cannot be located with certainty.
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
        answer = self._continuation(example.prompt, example.completion, example.source)
        answer = self._with_eos(answer, example.source)
        is_target = [False] * len(prompt) + [True] * len(answer)
        return row_of(prompt + answer, is_target, example.source)

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
            DataError: Its targets cannot be located with certainty.
        """
        text, spans = rendered.text, rendered.spans
        ids, is_target = self._joint(text, spans) or self._segmentwise(text, spans, source)
        if ends and spans and not spans[-1].ended:
            # the template has no end-of-turn token: eos has to end the answer
            longer = self._with_eos(ids, source)
            ids, is_target = longer, is_target + [True] * (len(longer) - len(ids))
        return row_of(ids, is_target, source)

    def _joint(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]] | None:
        """Tokenise the text at once; None where a token crosses the beginning or end of a span."""
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
                return None  # the turn's end is merged with what follows
        return ids, is_target

    def _is_prompt(self, prompt: str, ids: list[int], offsets: Sequence[tuple[int, int]]) -> bool:
        """Return whether these are the tokens of a prompt alone.

        Only those after its last added token are compared: tokenizers never merge across one.
        """
        first = next((n for n in reversed(range(len(ids))) if ids[n] in self._added), 0)
        header = prompt[offsets[first][0] if first else 0 :]
        if len(header) > 200:  # no recurring "<|im_start|>assistant"
            return tokens(self._tokenizer, header) == ids[first:]
        if header not in self._headers:
            self._headers[header] = tokens(self._tokenizer, header)
        return self._headers[header] == ids[first:]

    def _segmentwise(
        self, text: str, spans: Sequence[Span], source: str
    ) -> tuple[list[int], list[bool]]:
        """Tokenise context and targets apart, each continuing the segment before."""
        cuts = [cut for span in spans for cut in (span.start, span.end)]
        ids: list[int] = []
        is_target: list[bool] = []
        for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(text)], strict=True)):
            special = [match.start() for match in self._special.finditer(text, 0, start)]
            head = text[special[-1] if special else 0 : start]
            segment = self._continuation(head, text[start:end], source)
            ids += segment
            is_target += [number % 2 == 1] * len(segment)
        return ids, is_target

    def _continuation(self, head: str, tail: str, source: str) -> list[int]:
        """Return tokens of `tail` that follow those of `head` alone.

        Tokenised together, the two may share a token ("\\n" + "\\n"); tokenised apart, some
        tokenizers put a space before `tail`. An anchor that merges with nothing avoids both.
        """
        before, joint = tokens(self._tokenizer, head), tokens(self._tokenizer, head + tail)
        if joint[: len(before)] == before:
            return joint[len(before) :]
        text = self._text_of(joint)
        for anchor in ("", "\n", ":", "."):
            lead, both = tokens(self._tokenizer, anchor), tokens(self._tokenizer, anchor + tail)
            ids = both[len(lead) :]
            if both[: len(lead)] == lead and self._text_of(before + ids) == text:
                return ids
        raise DataError(
            f"Cannot separate the tokens of the prompt and the answer of {source}.",
            found=f"The prompt ends in {head[-20:]!r}, the answer begins with {tail[:20]!r}; this "
            "tokenizer makes one token of both.",
            fix="Begin the answer with a space or a line break, or end the prompt with one.",
        )

    def _text_of(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


def require_template(tokenizer: Any, template: str | None) -> None:
    """Check that there is a chat template.

    Raises:
        DataError: `template` is None, and the tokenizer, or processor, has none of its own.
    """
    if template is None and not tokenizer.chat_template:
        raise DataError(
            "Cannot render a conversation for this base.",
            found=f"Its {type(tokenizer).__name__} has no chat template.",
            fix='Set data.chat_template to "chatml", or to a .jinja file.',
        )


def tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text alone."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def with_bos(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of the beginning of a document, with bos where the tokenizer adds it."""
    ids = tokens(tokenizer, text)
    lead, _ = special_tokens_around(tokenizer, "a")
    return ids if ids[: len(lead)] == lead else lead + ids


def special_tokens_around(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer puts before and after a text."""
    bare, full = tokens(tokenizer, text), list(tokenizer(text)["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], full  # never the same for two texts


def row_of(ids: Sequence[int], is_target: Sequence[bool], source: str) -> Row:
    """Return a document's row, up to its last target; its first token is never a target."""
    labels = [token if target else IGNORE for token, target in zip(ids, is_target, strict=True)]
    if labels:
        labels[0] = IGNORE
    stop = next((n for n in range(len(labels), 0, -1) if labels[n - 1] != IGNORE), len(labels))
    return Row(tuple(ids[:stop]), tuple(labels[:stop]), (stop,), source)


NOTHING, BEYOND = 0, 1
"""Indices into `DocumentEncoder.drops`."""


class DocumentEncoder(RowEncoder):
    """Encoder of records for causal language modelling: one document each, cut to a length.

    Args:
        template, reasoning: See `Encoder`.
        fields: Names of the fields with prompt and completion. With the format "auto" and a
            template they are a user's message and its answer.
    """

    kind: ClassVar[type[Row]] = Row
    drops: Mapping[str, str] = {
        "nothing to learn": "give these rows an answer",
        "the answer is beyond the cut": "raise data.max_length",
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
        self._tokenizer, self._template, self._reasoning = tokenizer, template, reasoning
        self._format, self._max_length, self._fields = format, max_length, fields

    def key(self, where: str) -> object:
        settings = (self._template, self._format, self._max_length, self._fields, self._reasoning)
        return (*tokenizer_key(self._tokenizer), *settings)

    def read(self, records: Sequence[Record], where: str) -> ParsedRow:
        parsed = parse(records, self._format, where=where, fields=self._fields)
        if self._fields is None or self._format != "auto" or not self._encoder.has_template:
            return parsed
        turns = (e.conversation if isinstance(e, Completion) else e for e in parsed.examples)
        return replace(parsed, examples=tuple(turns))

    def rows(self, read: ParsedRow) -> EncodedRows:
        encoder, counts = self._encoder, Counter[str]()
        encoder.counts.clear()
        rows: list[Row | Dropped] = []
        for example in read.examples:
            row = encoder.encode(example)
            cut = cut_document(row, self._max_length)
            if cut.num_targets == 0:
                why = NOTHING if all(label == IGNORE for label in row.labels) else BEYOND
                rows.append(Dropped(row.source, why))
                continue
            counts["cut"] += len(row.input_ids) > self._max_length
            counts["targets"] += cut.num_targets
            rows.append(cut)
        counts.update(encoder.counts)
        style: str = encoder.style(read.examples[0]).kind
        agreed, shared = {"format": str(read.format), "style": style}, shared_system(read.examples)
        return EncodedRows(rows, agreed, counts, read.unused, shared)


def shared_system(examples: Iterable[object]) -> dict[str, str]:
    """Return the system prompt that all examples have, for `EncodedRows.shared`; else nothing."""
    systems = {system_of(getattr(example, "messages", ())) for example in examples}
    return {"system": systems.pop()} if len(systems) == 1 and "" not in systems else {}


def agreed_style(
    first: Style | None, style: Style, where: str, *, of_adapter: bool = False
) -> Style:
    """Check that rows have the style of all rows before; return that of all.

    Their system prompts may differ: the style of all then has none.

    Args:
        first: Of the rows before, or of the adapter; None: these are the first rows.
        of_adapter: Whether it is the adapter's.

    Raises:
        DataError: These rows have another style.
    """
    if first is not None and replace(first, system=style.system) != style:
        others = "the adapter learnt" if of_adapter else "the others have"
        same = " with another chat template" * (first.kind == style.kind)
        fix = "Give rows of one format, or set data.format and data.chat_template."
        if of_adapter:
            fix = "Give rows in that style, or set data.format or data.chat_template to change it."
        raise DataError(
            f"Cannot use {where} here.",
            found=f"Its rows have the prompt style '{style.kind}', {others} '{first.kind}'{same}.",
            fix=fix,
        )
    return style if first is None or first.system == style.system else replace(style, system=None)
