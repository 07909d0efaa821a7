"""Rerankers: score the relevance of a text to a query.

A head with one output scores query and text together, as sentence-transformers' CrossEncoder does.
A decoder's head can start as the difference of two words' rows in its language head (`answers`).
Its sigmoid is then the probability of "yes" over "no", as in Qwen3-Reranker (arXiv:2506.05176).

| loss      | for the texts of a query with scores s and relevances r                              |
| pointwise | binary cross entropy of each text, sigmoid(s) against r                              |
| pairwise  | -log sigmoid(s_i - s_j) of each pair with r_i > r_j (RankNet, Burges et al., 2005)   |
| listwise  | cross entropy of softmax(s) against r / sum(r) (ListNet, Cao et al., 2007)           |

Shapes: B rows, n texts of all rows in total.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional

from peftkit.base.heads import ClassHead
from peftkit.data.messages import WrongField, full_text, texts_of
from peftkit.data.records import Record
from peftkit.data.rows.columns import StoredRows
from peftkit.data.tokens import tokens
from peftkit.errors import ConfigError, DataError
from peftkit.events import Listener, ignore
from peftkit.tasks.base import Task, over_batches
from peftkit.tasks.classes.labels import as_number, values_in
from peftkit.tasks.config import Predicts, TaskConfig
from peftkit.tasks.metrics import ranking_metrics
from peftkit.tasks.texts import (
    Encoded,
    Texts,
    TextsEncoder,
    TextsRow,
    TextTask,
    head_logits,
    joined_texts,
)

OUTPUT = "relevance"
"""Name of the head's output."""
QUERY, TEXT = "{query}", "{text}"
"""Placeholders of a template."""


@dataclass(frozen=True, slots=True)
class RerankRow(TextsRow):
    """A query and its texts.

    Args:
        relevance: Relevance of each text, from 0 to 1.
        query: Hash of the query.
        source: "train.jsonl:7".
    """

    relevance: tuple[float, ...]
    query: int
    source: str


class RerankEncoder(TextsEncoder):
    """Encoder of records with a query and its texts."""

    kind: ClassVar[type[RerankRow]] = RerankRow
    what = "a query and its texts"

    def __init__(self, texts: Texts, config: RerankerConfig) -> None:
        super().__init__(texts, config)
        self._before, _, self._after = (config.template or "").partition(TEXT)

    def parse(self, record: Record, where: str) -> tuple[RerankRow, Sequence[str]]:
        query = full_text(record.fields, self.config.query)
        texts, relevance, used = self._ranked(record.fields)
        if self.config.loss != "pointwise" and not max(relevance) > min(relevance):
            raise WrongField(
                "", f"all texts are equally relevant, and the loss {self.config.loss} compares them"
            )
        encoded = [self.encode(query, text) for text in texts]
        self.counts.update(cut=sum(text.is_cut for text in encoded), texts=len(encoded))
        digest = hashlib.sha256(query.strip().encode("utf-8", "replace")).digest()
        row = RerankRow(
            **joined_texts(encoded),
            relevance=tuple(relevance),
            query=int.from_bytes(digest[:8], "big") >> 1,
            source=record.source,
        )
        return row, (self.config.query, *used)

    def _ranked(self, fields: Mapping[str, object]) -> tuple[list[str], list[float], Sequence[str]]:
        """Return a record's texts, the relevance of each, and the fields that were read."""
        config = self.config
        if config.positive in fields:
            positives = texts_of(fields, config.positive)
            negatives = texts_of(fields, config.negatives) if fields.get(config.negatives) else []
            if both := set(positives) & set(negatives):
                raise WrongField(config.negatives, f"holds a positive: {min(both)!r:.60}")
            relevance = [1.0] * len(positives) + [0.0] * len(negatives)
            return [*positives, *negatives], relevance, (config.positive, config.negatives)
        texts, scores = texts_of(fields, config.text), fields.get(config.score)
        listed = [as_number(value) for value in (scores if isinstance(scores, list) else [scores])]
        relevances = [value for value in listed if value is not None and 0 <= value <= 1]
        if len(relevances) < len(listed):
            raise WrongField(config.score, f"expected numbers from 0 to 1, found {scores!r:.40}")
        if len(relevances) != len(texts):
            raise WrongField(config.score, f"{len(relevances)} scores of {len(texts)} texts")
        return texts, relevances, (config.text, config.score)

    def summary(self, rows: StoredRows) -> list[tuple[str, str]]:
        return [("texts", f"{rows.counts['texts']:,}")]

    def encode(self, query: str, text: str) -> Encoded:
        """Return the tokens of a query and a text; the text is cut to the maximum length."""
        if not self.config.template:
            return self.texts.encode(query, text)
        parts = (self._before.replace(QUERY, query), text, self._after.replace(QUERY, query))
        before, ids, after = (tokens(self.tokenizer, part) for part in parts)
        room = self.texts.max_length - len(before) - len(after)
        if room < 1:
            raise DataError(
                f"Cannot use data.max_length: {self.texts.max_length}.",
                found=f"The template and a query already have {len(before) + len(after)} tokens.",
                fix="Raise data.max_length, or shorten task.template.",
            )
        return Encoded((*before, *ids[:room], *after), (), len(ids) > room)


class Reranker(TextTask):
    """Ranking loss over the scores of query-text pairs, by a head of one output."""

    def build(self, model: nn.Module) -> None:
        super().build(model)
        self.encoder = self.rows.encoder = RerankEncoder(self.texts, self.config)

    def collate(self, rows: Sequence[RerankRow]) -> dict[str, Tensor]:
        """Return tokens (n, T), relevance (n,), and the row index of each text (n,)."""
        sizes = torch.tensor([len(row.lengths) for row in rows])
        return {
            **self.tokens(rows),
            "relevance": torch.tensor([value for row in rows for value in row.relevance]),
            "owner": torch.repeat_interleave(torch.arange(len(rows)), sizes),
        }

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of texts, pairs or queries, depending on the loss."""
        if self.config.loss == "pointwise":
            return batch["relevance"].numel()
        if self.config.loss == "listwise":
            return 1 + int(batch["owner"].cpu()[-1])
        return int(_better(batch["relevance"].cpu(), batch["owner"].cpu()).sum())

    def scores(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the score of each text (n,), in fp32: the log-odds of its relevance."""
        return head_logits(model, batch)[:, 0]

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return self._loss(self.scores(model, batch), batch["relevance"], batch["owner"])[None]

    def _loss(self, scores: Tensor, relevance: Tensor, owner: Tensor) -> Tensor:
        if self.config.loss == "pointwise":
            return functional.binary_cross_entropy_with_logits(scores, relevance, reduction="sum")
        if self.config.loss == "pairwise":
            ahead = scores[:, None] - scores[None]
            return -(functional.logsigmoid(ahead) * _better(relevance, owner)).sum()
        same = owner[:, None] == owner[None]
        log_sums = torch.where(same, scores[None], -torch.inf).logsumexp(1)
        shares = relevance / torch.where(same, relevance[None], 0.0).sum(1)
        return -(shares * (scores - log_sums)).sum()

    def names(self, row: RerankRow) -> Sequence[str]:
        return [f"{value:g}" for value in row.relevance]

    @torch.no_grad()
    def metrics(
        self, model: nn.Module, rows: Sequence[RerankRow], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the loss, nDCG@10 and MRR@10 over the texts of each query."""
        loss, targets = 0.0, 0
        ranked: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        compute = partial(self.scores, model)
        for part, batch, scores in over_batches(self, model, rows, "Ranking", on_event, compute):
            loss += float(self._loss(scores, batch["relevance"], batch["owner"]))
            targets += self.num_targets(batch)
            left = iter(scores.tolist())
            for row in part:
                ranked[row.query] += [(next(left), value) for value in row.relevance]
        return {"loss": loss / targets, **ranking_metrics(ranked.values())}

    def predict(
        self, model: nn.Module, pairs: Sequence[tuple[str, str]], on_event: Listener = ignore
    ) -> list[float]:
        """Return the probability that each text answers its query."""
        encoded = [self.encoder.encode(*pair) for pair in pairs]

        def probabilities(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
            return self.scores(model, batch).sigmoid()

        return self.for_each(model, encoded, probabilities, "Ranking", on_event)

    def predict_texts(
        self, model: nn.Module, texts: Sequence[str | tuple[str, str]]
    ) -> list[dict[str, float]]:
        """Return the score of each pair of a query and a text."""
        pairs = []
        for pair in texts:
            if isinstance(pair, str) or not all(part.strip() for part in pair):
                raise DataError(
                    "Cannot rank a text without a query.", fix="Give pairs of a query and a text."
                )
            pairs.append(pair)
        return [{"score": score} for score in self.predict(model, pairs)]

    def predict_rows(
        self, model: nn.Module, records: Sequence[Record], on_event: Listener = ignore
    ) -> list[dict[str, object]]:
        """Return each row's `prediction`: the score of its text, or of each text in its list."""
        name, query_name = self.config.text, self.config.query

        def read(fields: Mapping[str, object]) -> tuple[str, list[str]]:
            return full_text(fields, query_name), texts_of(fields, name)

        rows = [row for row, _ in values_in(records, read)]
        pairs = [(query, text) for query, texts in rows for text in texts]
        left = iter(self.predict(model, pairs, on_event))
        scores = [[next(left) for _ in texts] for _, texts in rows]
        lists = (isinstance(record.fields[name], list) for record in records)
        return [
            {"prediction": of_row if is_list else of_row[0]}
            for of_row, is_list in zip(scores, lists, strict=True)
        ]


def _better(relevance: Tensor, owner: Tensor) -> Tensor:
    """Return (n, n): whether text i is more relevant than text j to the same query."""
    return (owner[:, None] == owner[None]) & (relevance[:, None] > relevance[None])


class RerankerConfig(TaskConfig):
    """Rerankers: scores of texts for a query."""

    task_type: ClassVar[str] = "SEQ_CLS"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    task: ClassVar[Callable[..., Task]] = Reranker
    command: ClassVar[str] = "peftkit predict {folder} --data FILE --out ranked.jsonl"
    measures_before: ClassVar[bool] = True
    num_texts: ClassVar[int] = 2
    predicts: ClassVar[frozenset[Predicts]] = frozenset({"texts", "rows"})
    data_fields: ClassVar[frozenset[str]] = frozenset({"max_length"})

    type: Literal["reranker"] = "reranker"
    loss: Literal["pointwise", "pairwise", "listwise"] = "pointwise"
    """Unit of the loss: single texts, pairs of a query's texts, or all texts of a query."""
    query: str = "query"
    """Field with the query."""
    positive: str = "positive"
    """Field with a text that answers the query, or a list of them."""
    negatives: str = "negatives"
    """Field with texts that do not answer the query."""
    text: str = "text"
    """Field with the text of a scored pair, or a list of texts."""
    score: str = "score"
    """Field with the relevance of the text, from 0 to 1, or a list for several texts."""
    template: str | None = None
    """Prompt of a decoder: a text with {query} and {text}, without special tokens; null:
    the pair, as the tokenizer encodes it."""
    answers: tuple[str, str] | None = None
    """Two words of one token each, ["yes", "no"]: a decoder's new head starts as the difference of
    their rows in its language head; null: random."""

    @model_validator(mode="after")
    def _template(self) -> RerankerConfig:
        if self.template is not None:
            places = [self.template.find(mark) for mark in (QUERY, TEXT)]
            if min(places) < 0 or self.template.count(TEXT) != 1:
                raise ConfigError(
                    "task.template lacks {query} or {text}, or repeats {text}.",
                    fix="Write it as: 'Query: {query}\\nText: {text}\\nRelevant:'",
                )
        return self

    @property
    def head(self) -> ClassHead:
        return ClassHead((OUTPUT,), "regression", words=self.answers)
