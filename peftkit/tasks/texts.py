"""Tasks that read texts whole: for a head of labels or of one number, or for a vector of each.

Shapes: B texts, T tokens of the longest, n targets of the batch, L labels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from peftkit.base.purpose import ClassHead, ProblemType
from peftkit.data.encode import special_tokens_around, tokens
from peftkit.data.pack import padded_rows, rounded_up
from peftkit.data.rows import tokenizer_key
from peftkit.errors import BaseError, DataError
from peftkit.events import Listener, Progress, ignore
from peftkit.tasks.base import Task
from peftkit.tasks.batches import BATCH_SIZE, batches_that_fit, equal_parts
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.labels import RecordEncoder
from peftkit.tasks.loss import accepted, unwrapped
from peftkit.tasks.rows import longest


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a text, or of a pair of texts.

    Args:
        input_ids: Cut to what the model reads.
        types: 0 for the first text of a pair, 1 for the second; () where the model knows no pairs.
        is_cut: Whether something is missing at its end.
        offsets: Where in the text each token begins and ends, if asked for; (0, 0) is nowhere.
    """

    input_ids: tuple[int, ...]
    types: tuple[int, ...]
    is_cut: bool
    offsets: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TextsRow:
    """A row of texts, each read by itself.

    Args:
        input_ids, types, lengths: The tokens of all texts, one after the other, and how many of
            each.
    """

    input_ids: tuple[int, ...]
    types: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def texts(self) -> list[Encoded]:
        """Each text by itself."""
        stops = [*accumulate(self.lengths)]
        parts = [
            slice(stop - length, stop) for stop, length in zip(stops, self.lengths, strict=True)
        ]
        return [Encoded(self.input_ids[part], self.types[part], False) for part in parts]


def joined_texts(texts: Sequence[Encoded]) -> dict[str, tuple[int, ...]]:
    """Return the fields of a `TextsRow`."""
    return {
        "input_ids": tuple(token for text in texts for token in text.input_ids),
        "types": tuple(kind for text in texts for kind in text.types),
        "lengths": tuple(len(text.input_ids) for text in texts),
    }


class SpecialTokens:
    """The tokens that a tokenizer puts before and after every text.

    Attributes:
        lead, tail: Tokens before and after.

    Raises:
        BaseError: The tokenizer does not put the same tokens around every text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.lead, self.tail = special_tokens_around(tokenizer, "a")
        if special_tokens_around(tokenizer, "the 2 of us") != (self.lead, self.tail):
            raise BaseError(
                "Cannot tell what the tokenizer of the base puts around a text.",
                found="It is not the same tokens for every text.",
                fix="Give a base whose tokenizer does so.",
            )

    def room(self, max_length: int) -> int:
        """Return how many tokens of a text fit with them into a row.

        Raises:
            DataError: None do.
        """
        room = max_length - len(self.lead) - len(self.tail)
        if room < 1:
            raise DataError(
                f"Cannot use data.max_length: {max_length}.",
                found=f"The tokenizer alone puts {max_length - room} tokens around a text.",
                fix="Set it to 128, for example.",
            )
        return room

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text alone."""
        return tokens(self._tokenizer, text)

    def put_around(self, ids: Sequence[int]) -> list[int]:
        """Return tokens between `lead` and `tail`."""
        return [*self.lead, *ids, *self.tail]


class Texts:
    """Makes tokens of texts and batches of tokens.

    Attributes:
        max_length: In tokens, those around the text included.

    Raises:
        BaseError: The model cannot tell padding from text.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, asked: int | None) -> None:
        self.tokenizer = tokenizer
        self.max_length = longest(model, tokenizer, asked)
        pad_id = unwrapped(model).config.get_text_config().pad_token_id
        if pad_id is None:
            raise BaseError(
                f"{type(unwrapped(model)).__name__} cannot tell padding from text.",
                found="Its config has no pad_token_id.",
                fix="Load it for this task: load_base(..., purpose=task.purpose).",
            )
        self._pad_id = int(pad_id)

    @property
    def key(self) -> tuple[object, ...]:
        """What the tokens of a text depend on."""
        return (*tokenizer_key(self.tokenizer), self.max_length, self._pad_id)

    def encode(self, text: str, pair: str | None = None, *, offsets: bool = False) -> Encoded:
        """Return the tokens of a text; of a pair, the longer one loses its end first."""
        wish: dict[str, Any] = {"return_offsets_mapping": True} if offsets else {}
        made = self.tokenizer(text, pair, verbose=False, **wish)
        is_cut = len(made["input_ids"]) > self.max_length
        if is_cut:
            wish |= {"truncation": True, "max_length": self.max_length}
            made = self.tokenizer(text, pair, **wish)
        return Encoded(
            tuple(made["input_ids"]) or (self._pad_id,),
            tuple(made.get("token_type_ids", ())),
            is_cut,
            tuple(made.get("offset_mapping", ())),
        )

    def bare(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a part of a text, without those around it."""
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def collate(self, texts: Sequence[Any]) -> dict[str, Tensor]:
        """Return input_ids, attention_mask and, if there are any, token_type_ids (B, T).

        Padded on the right: a decoder reads the class off the last token that is none.

        Args:
            texts: `Encoded`.
        """
        ids, mask = padded_rows([text.input_ids for text in texts], self._pad_id)
        batch = {"input_ids": ids, "attention_mask": mask}
        if texts[0].types:
            batch["token_type_ids"], _ = padded_rows([text.types for text in texts], 0)
        return batch

    def pieces(self, ids: Sequence[int]) -> str:
        """Return tokens as text, special ones too."""
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))


class TextsEncoder(RecordEncoder):
    """Encoder of records with texts.

    Args:
        config: Of the task; names the fields. labels: In the order of the head's outputs.
    """

    def __init__(self, texts: Texts, config: Any, labels: Sequence[str] = ()) -> None:
        self.texts, self.config = texts, config
        self.numbers = {label: number for number, label in enumerate(labels)}

    def key(self, where: str) -> object:
        return (*self.texts.key, self.config.model_dump_json(), tuple(self.numbers))


def head_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return what a model with a head of labels, or of one number, says of a batch, in fp32."""
    logits: Tensor = model(**accepted(model, {**batch, "use_cache": False})).logits
    return logits.float()


class TextTask(Task):
    """A task whose rows are `TextsRow`s.

    Attributes:
        texts: Makes their tokens.
    """

    def build(self, model: nn.Module) -> None:
        super().build(model)
        self.texts = Texts(model, self.tokenizer, self.data.max_length)
        self.max_length = self.texts.max_length

    def num_positions(self, rows: Sequence[Any]) -> int:
        lengths = [length for row in rows for length in row.lengths]
        return len(lengths) * rounded_up(max(lengths))

    def tokens(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """Return the tokens of all texts of the rows as a batch; see `Texts.collate`."""
        return self.texts.collate([text for row in rows for text in row.texts])

    def names(self, row: Any) -> Sequence[str]:
        """Return what each text of a row is."""
        raise NotImplementedError

    def spans(self, row: Any) -> list[tuple[str, str]]:
        pairs = zip(self.names(row), row.texts, strict=True)
        return [(name, self.texts.pieces(text.input_ids)) for name, text in pairs]

    @torch.no_grad()
    def of_each(
        self,
        model: nn.Module,
        encoded: Sequence[Encoded],
        compute: Callable[[nn.Module, Mapping[str, Tensor]], Tensor],
        progress: str,
        on_event: Listener,
    ) -> list[Any]:
        """Return what is computed of each text, as plain numbers; shortest first, in their order.

        Args:
            compute: Makes a number, or several, of each text of a batch.
        """
        device = next(model.parameters()).device
        order = sorted(range(len(encoded)), key=lambda n: len(encoded[n].input_ids))

        def values(part: Sequence[int]) -> list[Any]:
            batch = self.texts.collate([encoded[n] for n in part])
            on_device = {name: tensor.to(device) for name, tensor in batch.items()}
            return list(compute(model, on_device).tolist())

        results: dict[int, Any] = {}
        for part, some, _ in batches_that_fit(order, 2 * BATCH_SIZE, equal_parts, values):
            on_event(Progress(progress, len(results), len(order)))
            results.update(zip(part, some, strict=True))
        return [results[n] for n in range(len(encoded))]


class Classifier(Task):
    """A task whose model's head says something of each target.

    Its batches have `targets`, whose first dimension is n, beside what the model reads.
    """

    progress: ClassVar[str] = "Classifying"
    """What is told while rows are measured."""

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        return batch["targets"].numel()

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return self.loss_of(self.logits(model, batch), batch["targets"])[None]

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return what the head says of each target (n, L), in fp32."""
        return head_logits(model, batch)

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of logits, summed over the targets."""
        return functional.cross_entropy(logits, targets, reduction="sum")

    @torch.no_grad()
    def metrics(
        self, model: nn.Module, rows: Sequence[Any], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the loss, and what is measured of all logits and targets together."""
        said, true, seen, loss = list[Tensor](), list[Tensor](), list[Any](), 0.0
        compute = partial(self.logits, model)
        for some, batch, logits in self.over_batches(model, rows, self.progress, on_event, compute):
            loss += float(self.loss_of(logits, batch["targets"]))
            said.append(logits.cpu())
            true.append(batch["targets"].cpu())
            seen += some
        targets = torch.cat(true)
        return {"loss": loss / targets.numel(), **self.measured(torch.cat(said), targets, seen)}

    @abstractmethod
    def measured(self, logits: Tensor, targets: Tensor, rows: Sequence[Any]) -> dict[str, float]:
        """Return metrics of what was said (n, L) and what is true of these rows."""


class ClassifierConfig(TaskConfig):
    """What configs have whose task finds its labels in the data."""

    data_fields: ClassVar[frozenset[str]] = frozenset({"max_length"})

    labels: tuple[str, ...] = ()
    """Names of all labels, in the order of the head's outputs; by default those in data.train."""
    fresh_head: bool = False
    """Make a new head although the base has one."""

    @property
    def problem_type(self) -> ProblemType | None:
        """What the labels are to the model; None: as its base says."""
        return None

    @property
    def head(self) -> ClassHead:
        return ClassHead(self.labels, self.problem_type, self.fresh_head)
