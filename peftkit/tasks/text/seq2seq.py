"""Sequence to sequence: an encoder reads the source, a decoder writes the target.

The decoder reads its start token and all target tokens except the last. The loss covers the whole
target, including its end token, and not the source.

Shapes: B rows, S tokens of the longest source, T of the longest target, n of all targets in total.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Unpack

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from peftkit.data.examples import Completion, Example, Instruction
from peftkit.data.format import FieldNames, ParsedRow, parse
from peftkit.data.pack import padded_rows
from peftkit.data.records import Dropped, Record
from peftkit.data.rows.columns import StoredRows
from peftkit.data.rows.encoder import RowEncoder
from peftkit.data.rows.lazy import tokens_of_each
from peftkit.data.tokens import tokens
from peftkit.errors import BaseError, DataError
from peftkit.events import Listener, Progress, ignore
from peftkit.execution.out_of_memory import NO_ROOM
from peftkit.forward.batch_layout import BatchLayout
from peftkit.forward.loss import in_dtype_of, unwrapped
from peftkit.model.blocks import is_sharded
from peftkit.model.modes import evaluating
from peftkit.tasks.base import Task
from peftkit.tasks.batches import BATCH_SIZE, batches_that_fit, equal_parts
from peftkit.tasks.completions import CompletingTask, Options
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.metrics import exact_match, rouge_l
from peftkit.tasks.row_loader import longest
from peftkit.tasks.texts import SpecialTokens
from peftkit.tasks.tokens import TokenTask

UNLIMITED = 999_999
"""Tokens of a source without a limit: T5 has relative positions."""


@dataclass(frozen=True, slots=True)
class PairRow:
    """A source and its target as tokens.

    Args:
        input_ids: Source tokens, including special tokens.
        labels: Target tokens; the last is the end token unless the target was cut.
        target: Target text.
        source: "train.jsonl:7".
    """

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    target: str
    source: str

    @property
    def num_decoder_tokens(self) -> int:
        """Number of tokens that the decoder reads: its start token replaces the last label."""
        return len(self.labels)


EMPTY = "source or target is empty"
"""Reason to drop a pair; see `RowEncoder.drops`."""


class PairEncoder(RowEncoder):
    """Encoder of pairs; drops those with an empty text.

    Args:
        name: The format, or "auto".
        max_source, max_target: Maximum lengths in tokens; longer texts are cut.
    """

    kind: ClassVar[type[PairRow]] = PairRow
    drops: Mapping[str, str] = {EMPTY: "give these rows both"}

    def __init__(
        self, tokenizer: Any, config: Seq2SeqConfig, name: Any, max_source: int, max_target: int
    ) -> None:
        self.tokenizer, self._config, self._name = tokenizer, config, name
        self._end, self._prefix = tokenizer.eos_token_id, config.prefix
        self._frame = SpecialTokens(tokenizer)
        self._room, self._limits = self._frame.room(max_source), (max_source, max_target)
        self.settings = (name, config.model_dump_json(), self._room, max_target)

    def read(self, records: Sequence[Record], where: str) -> ParsedRow[Example]:
        parsed = parse(records, self._name, where=where, fields=self._config.fields)
        for example in parsed.examples:
            if not isinstance(example, Completion | Instruction):
                raise DataError(
                    f"Cannot make a source and a target from {example.source}.",
                    found=f"It is a {type(example).__name__.lower()}.",
                    fix='Give rows {"prompt": "...", "completion": "..."} or {"instruction": "...",'
                    ' "output": "..."}, or name the fields: task.source and task.target.',
                )
        return parsed

    def row(self, example: Example) -> PairRow | Dropped:
        return self.encode(example, self.counts) or Dropped(example.source, EMPTY)

    def summary(self, rows: StoredRows) -> list[tuple[str, str]]:
        return [
            (f"{side}s cut at {limit:,} tokens", f"{rows.counts[f'cut {side}s']:,}")
            for side, limit in zip(("source", "target"), self._limits, strict=True)
        ]

    def encode(self, example: Example, counts: Counter[str]) -> PairRow | None:
        """Return a row, cut to the limits; None if source or target is empty."""
        if isinstance(example, Instruction):
            example = Completion(example.request, example.output, example.source)
        assert isinstance(example, Completion)
        ids, target = tokens(self.tokenizer, self._prefix + example.prompt), example.completion
        if not ids or not target.strip():
            return None
        labels = self._frame.put_around(tokens(self.tokenizer, target))
        if self._end is not None and labels[-1] != self._end:
            labels.append(int(self._end))
        counts["cut sources"] += len(ids) > self._room
        counts["cut targets"] += len(labels) > self._limits[1]
        labels = labels[: self._limits[1]]
        counts["targets"] += len(labels)
        return PairRow(
            input_ids=tuple(self._frame.put_around(ids[: self._room])),
            labels=tuple(labels),
            target=target,
            source=example.source,
        )


class EncoderDecoder(CompletingTask, TokenTask):
    """A task of an encoder-decoder that generates text.

    Attributes:
        max_target: Maximum length of a text in tokens.
        max_positions: Number of positions of the decoder.

    Raises:
        BaseError: The model has no encoder, or its config has no decoder start token.
    """

    max_target: int
    max_positions: int = UNLIMITED

    def build(self, model: nn.Module) -> None:
        self._start = decoder_start(unwrapped(model), self.config.type)
        super().build(model)
        self.layout = BatchLayout(padded=True)

    def decoder_batch(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """Return the decoder's part of a batch: each row's labels, shifted by its start token.

        decoder_input_ids (B, T); target_index (n,), the positions of predicted tokens in the
        flattened decoder states (B * T); targets (n,), the predicted tokens.
        """
        shifted = [(self._start, *row.labels[:-1]) for row in rows]
        decoder_input_ids, is_target = padded_rows(shifted, self.pad_id)
        return {
            "decoder_input_ids": decoder_input_ids,
            "target_index": is_target.flatten().nonzero().flatten(),
            "targets": torch.tensor([token for row in rows for token in row.labels]),
        }

    @abstractmethod
    def encoder_batch(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """Return the encoder's part of a batch."""

    def decoder_prefix(self, row: Any) -> tuple[int, ...]:
        """Return the decoder tokens that precede the generated answer to a row."""
        return (self._start,)

    def prompts(self, row: Any) -> Sequence[Any]:
        return [row]

    @torch.no_grad()
    def completions(
        self, model: nn.Module, rows: Sequence[Any], **options: Unpack[Options]
    ) -> list[str]:
        bare, answers = unwrapped(model), [""] * len(rows)
        groups: dict[tuple[int, ...], list[int]] = {}
        for number in tokens_of_each(rows).sort(stable=True).indices.tolist():
            groups.setdefault(self.decoder_prefix(rows[number]), []).append(number)
        longest, num_done = options.get("max_new_tokens") or self.max_target, 0
        with evaluating(model), generation_config_aside(bare) as config:
            for prefix, group in groups.items():
                room = max(min(longest, self.max_positions - len(prefix)), 1)
                greedy = self._greedy(config, room)

                def generated(part: Sequence[int]) -> list[str]:
                    some = [rows[number] for number in part]
                    return self._generated(bare, greedy, prefix, some)  # noqa: B023 - called here

                for part, texts, _ in batches_that_fit(
                    group,
                    BATCH_SIZE,
                    equal_parts,
                    generated,
                    fix=NO_ROOM,
                    on_fewer=options.get("on_fewer", lambda _: None),
                    is_shared=is_sharded(model),
                ):
                    for number, text in zip(part, texts, strict=True):
                        answers[number] = text
                    num_done += len(part)
                    options.get("on_answer", lambda _: None)(num_done)
        return answers

    def measured_texts(
        self, model: nn.Module, rows: Sequence[object], on_event: Listener
    ) -> list[str]:
        """Return `completions` for metrics; events report the progress."""

        def report(number: int) -> None:
            on_event(Progress("Answering", number, len(rows)))

        return self.completions(model, rows, on_answer=report)

    def _generated(
        self, bare: Any, greedy: Any, prefix: Sequence[int], rows: Sequence[Any]
    ) -> list[str]:
        """Return the answers of a batch, each generated after the same prefix."""
        from transformers import GenerationMixin  # slow to import

        prefixes = torch.tensor([prefix] * len(rows))
        batch = self.encoder_batch(rows)
        batch = in_dtype_of(bare, {**batch, "decoder_input_ids": prefixes})
        inputs: dict[str, Any] = {n: tensor.to(bare.device) for n, tensor in batch.items()}
        # not Whisper's method, which cuts long audio and guesses languages
        ids = GenerationMixin.generate(bare, generation_config=greedy, **inputs)
        return [self.text(one, special=False).strip() for one in ids[:, len(prefix) :].tolist()]

    def _greedy(self, config: Any, max_new_tokens: int) -> Any:
        """Return a greedy config with the end and suppressed tokens of the model's config."""
        from transformers import GenerationConfig

        end, ends = self.tokenizer.eos_token_id, config.eos_token_id
        all_ends = {end, *(ends if isinstance(ends, list) else [ends])} - {None}
        return GenerationConfig(
            do_sample=False,
            use_cache=True,
            max_new_tokens=max_new_tokens,
            decoder_start_token_id=self._start,
            eos_token_id=sorted(all_ends),
            pad_token_id=self.pad_id,
            suppress_tokens=getattr(config, "suppress_tokens", None),
            begin_suppress_tokens=getattr(config, "begin_suppress_tokens", None),
        )

    def prompt_row(self, model: nn.Module, text: str, where: str) -> Any:
        raise DataError("it is a text.", found=f"{type(self).__name__} does not read text.")


class Seq2Seq(EncoderDecoder):
    """A loss over the targets of pairs of texts.

    Raises:
        BaseError: The model has no encoder, or its config has no decoder start token.
        DataError: A configured length exceeds the model's limit.
    """

    input_names = ("input_ids", "attention_mask", "decoder_input_ids")
    """The decoder needs no mask: tokens do not attend to the padding on their right."""

    def build(self, model: nn.Module) -> None:
        super().build(model)
        tokenizer, config, data = self.tokenizer, self.config, self.rows.data
        self.max_source = longest(model, tokenizer, data.max_length or UNLIMITED)
        self.max_target = longest(model, tokenizer, config.max_target_length)
        self.encoder = self.rows.encoder = PairEncoder(
            tokenizer, config, data.format, self.max_source, self.max_target
        )

    def collate(self, rows: Sequence[PairRow]) -> dict[str, Tensor]:
        """Return input_ids and attention_mask (B, S), padded on the right, and `decoder_batch`."""
        return self.encoder_batch(rows) | self.decoder_batch(rows)

    def encoder_batch(self, rows: Sequence[PairRow]) -> dict[str, Tensor]:
        input_ids, attention_mask = padded_rows([row.input_ids for row in rows], self.pad_id)
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def spans(self, row: PairRow) -> list[tuple[str, str]]:
        source, target = self.tokenizer.decode(row.input_ids), self.tokenizer.decode(row.labels)
        return [("source", source), ("learnt", target)]

    def metrics(
        self, model: nn.Module, rows: Sequence[PairRow], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return loss, perplexity, and exact_match and mean rouge_l of greedy answers."""
        losses = super().metrics(model, rows, on_event=on_event)
        texts = self.measured_texts(model, rows, on_event)
        pairs = [(text, row.target) for text, row in zip(texts, rows, strict=True)]
        return {
            **losses,
            "exact_match": exact_match(pairs),
            "rouge_l": sum(rouge_l(*pair) for pair in pairs) / len(pairs),
        }

    def prompt_text(self, row: PairRow) -> str:
        return str(self.tokenizer.decode(row.input_ids, skip_special_tokens=True))

    def reference_text(self, row: PairRow) -> str | None:
        return row.target or None

    def prompt_row(self, model: nn.Module, text: str, where: str) -> PairRow:
        counts = Counter[str]()
        row = self.encoder.encode(Completion(text, ".", where), counts)
        if row is None:
            raise DataError("it is empty.")
        if counts["cut sources"]:
            raise DataError("it is too long.", found=f"The encoder reads {self.max_source} tokens.")
        return replace(row, target="")


class Seq2SeqConfig(TaskConfig):
    """Sequence to sequence: summaries, translations, answers, with an encoder and a decoder."""

    task_type: ClassVar[str] = "SEQ_2_SEQ_LM"
    auto_class: ClassVar[str] = "AutoModelForSeq2SeqLM"
    task: ClassVar[Callable[..., Task]] = Seq2Seq
    writes_text: ClassVar[bool] = True
    data_fields: ClassVar[frozenset[str]] = frozenset({"format", "max_length"})

    type: Literal["seq2seq"] = "seq2seq"
    max_target_length: Annotated[int, Field(ge=2)] = 256
    """Longest target in tokens, longer ones are cut; data.max_length limits the source."""
    prefix: str = ""
    """Prefix of every source; for example, T5 was trained with "summarize: "."""
    source: str | None = None
    """Field with the source; null: the fields of data.format."""
    target: str | None = None
    """Field with the target; set both or neither."""

    @model_validator(mode="after")
    def _both(self) -> Seq2SeqConfig:
        _ = self.fields
        return self

    @property
    def fields(self) -> FieldNames | None:
        """The two named fields."""
        return FieldNames.of(source=self.source, target=self.target)


def decoder_start(model: Any, task: str) -> int:
    """Return the decoder's start token.

    Raises:
        BaseError: The model has no encoder, or its config has no decoder start token.
    """
    config = model.config
    if not getattr(config, "is_encoder_decoder", False):
        raise BaseError(
            f"{type(model).__name__} cannot be trained for {task}.",
            found="It is not an encoder-decoder.",
            fix="Give a base such as T5, BART or Whisper; for a decoder-only model use "
            "task: causal_lm.",
        )
    start = getattr(config, "decoder_start_token_id", None)
    if start is None and model.generation_config is not None:
        start = model.generation_config.decoder_start_token_id
    if start is None:
        raise BaseError(
            f"{type(model).__name__} has no decoder start token.",
            found="Its config has no decoder_start_token_id.",
            fix="Add it to the base's config.json.",
        )
    return int(start)


@contextmanager
def generation_config_aside(model: Any) -> Iterator[object]:
    """Replace the model's generation config, which `generate` would mix in, and yield it."""
    from transformers import GenerationConfig

    config = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield config
    finally:
        model.generation_config = config
