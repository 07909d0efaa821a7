"""Training rows that a model makes: hard negatives, and questions for a teacher.

Hard negatives are wrong answers that an embedding adapter finds similar to their anchors. For each
anchor these are the closest candidates that are farther than its positive by a margin
(arXiv:2407.15831, "TopK-PercPos"), since closer ones may be right answers, too. Near duplicates of
the positive, and other positives of the same anchor, are no negatives.

Shapes: n anchors of a chunk, M candidates, D width.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from peftkit.base.load import Base
from peftkit.data.format import read_each
from peftkit.data.generation import default_style, prompt_ids, stop_ids
from peftkit.data.messages import Message, full_text
from peftkit.data.records import Record, read_records
from peftkit.data.tokens import decoded
from peftkit.errors import DataError
from peftkit.evaluation.evaluate import trained_length
from peftkit.evaluation.predict import build_task
from peftkit.events import Listener, Progress, Stage, Table, ignore
from peftkit.formats.open_adapter import Opened
from peftkit.inference.generate import generate_ids
from peftkit.tasks.distill.rows import TeacherPrompt
from peftkit.tasks.retrieval.embedding import Embedding, EmbeddingConfig
from peftkit.tasks.retrieval.reranker import RerankerConfig

CHUNK = 1_024
"""Anchors whose similarities to all candidates exist at a time."""
SLACK = 8
"""Extra candidates per anchor, of which near duplicates of the positive are dropped."""

REQUEST = "Write one message that a user sends."
INSTRUCTIONS = (
    "You write messages that users send to an assistant which has these instructions:\n\n{}"
)
MAX_TOKENS, BATCH_SIZE, TEMPERATURE, TOP_P = 96, 16, 1.0, 0.95
ROUNDS = 4
"""Draws per requested question: some are drawn twice, or are empty."""
SHOWN_EXAMPLES = 4
"""Examples of the prompt that one draw sees, others each time."""
FEWEST_QUESTIONS = 8


@dataclass(frozen=True, slots=True)
class HardNegatives:
    """Rows with negatives.

    Attributes:
        rows: In the fields of the task that is to train on them.
        num_read: Rows of the file.
        counts: Number of candidates rejected for each reason.
        num_few: Rows left out for too few negatives.
    """

    rows: list[dict[str, Any]]
    num_read: int
    counts: dict[str, int]
    num_few: int

    def table(self) -> Table:
        """Return the counts as a table."""
        lines = [("rows read", self.num_read), ("rows with negatives", len(self.rows))]
        lines += [("rows with too few", self.num_few), *self.counts.items()]
        rows = tuple((name, f"{number:,}") for name, number in lines)
        return Table("Hard negatives", ("what", "how many"), rows)


def find_hard_negatives(
    opened: Opened,
    data: str,
    *,
    candidates: str | None = None,
    number: int = 5,
    margin: float = 0.05,
    task: Literal["embedding", "reranker"] = "embedding",
    on_event: Listener = ignore,
) -> HardNegatives:
    """Mine hard negatives for the rows of a file.

    Args:
        opened: An embedding adapter.
        data: Rows with an anchor and a positive, in the fields of the adapter's task.
        candidates: Rows with a field `text`: candidates besides all positives.
        number: Negatives of each row.
        margin: How much less similar to the anchor than the positive a negative is, as a share of
            the positive's similarity; also its least distance from the positive, 1 - similarity.
        task: The task that is to train on the rows.

    Raises:
        AdapterError: The adapter makes no embeddings.
        DataError: The rows cannot be read, or no candidate is left for any of them.
    """
    fix = "Give an adapter that was trained with task: embedding."
    is_embedding = isinstance(opened.task, EmbeddingConfig)
    length = trained_length(opened.file.folder)
    embedder = build_task(opened, is_embedding, "makes no embeddings", fix, length)
    names = (embedder.config.anchor, embedder.config.positive)
    on_event(Stage(f"Reading {data}"))
    pairs = _texts(data, names)
    texts = [positive for _, positive in pairs]
    texts += [text for (text,) in _texts(candidates, ("text",))] if candidates else []
    texts = list(dict.fromkeys(text.strip() for text in texts))
    anchors = list(dict.fromkeys(anchor.strip() for anchor, _ in pairs))
    model = opened.base.model
    chosen, counts = _closest_negatives(
        [(anchor.strip(), positive.strip()) for anchor, positive in pairs],
        (anchors, embedded(embedder, model, anchors, on_event)),
        (texts, embedded(embedder, model, texts, on_event)),
        number,
        margin,
        on_event,
    )
    first, second, third = names[0], names[1], embedder.config.negatives
    if task == "reranker":
        fields = RerankerConfig()
        first, second, third = fields.query, fields.positive, fields.negatives
    rows = [
        {first: anchor, second: positive, third: negatives}
        for (anchor, positive), negatives in zip(pairs, chosen, strict=True)
        if len(negatives) == number or (task == "reranker" and negatives)
    ]
    if not rows:
        raise DataError(
            f"No row of {data} has {number} negatives.",
            found=", ".join(f"{name}: {count:,}" for name, count in counts.items()),
            fix="Ask for fewer, lower the margin, or give more texts to choose from.",
        )
    result = HardNegatives(rows, len(pairs), dict(counts), len(pairs) - len(rows))
    on_event(result.table())
    return result


def embedded(task: Embedding, model: Any, texts: Sequence[str], on_event: Listener) -> Tensor:
    """Return the normalised vectors of texts (n, D), in fp32 on the CPU."""
    parts = [
        torch.tensor(task.vectors(model, texts[start : start + CHUNK], on_event))
        for start in range(0, len(texts), CHUNK)
    ]
    return normalize(torch.cat(parts), dim=-1)


def _texts(where: str, names: Sequence[str]) -> Sequence[tuple[str, ...]]:
    def read(record: Record) -> tuple[tuple[str, ...], Sequence[str]]:
        return tuple(full_text(record.fields, name) for name in names), names

    return read_each(read_records(where), read, " and ".join(names), where).examples


def _closest_negatives(
    pairs: Sequence[tuple[str, str]],
    anchors: tuple[Sequence[str], Tensor],
    texts: tuple[Sequence[str], Tensor],
    number: int,
    margin: float,
    on_event: Listener,
) -> tuple[list[list[str]], Counter[str]]:
    """Return the negatives of each pair, the closest first, and counts of rejected candidates."""
    anchor_at = {text: n for n, text in enumerate(anchors[0])}
    text_at = {text: n for n, text in enumerate(texts[0])}
    answers: defaultdict[str, set[str]] = defaultdict(set)
    for anchor, positive in pairs:
        answers[anchor].add(positive)
    counts: Counter[str] = Counter()
    chosen: list[list[str]] = []
    for start in range(0, len(pairs), CHUNK):
        on_event(Progress("Searching", start, len(pairs)))
        chunk = pairs[start : start + CHUNK]
        queries = anchors[1][[anchor_at[anchor] for anchor, _ in chunk]]
        positives = texts[1][[text_at[positive] for _, positive in chunk]]
        similarity = (queries * positives).sum(-1)
        limit = similarity - margin * similarity.abs()
        scores = queries @ texts[1].T  # (n, M)
        for row, (anchor, _) in enumerate(chunk):
            right = [text_at[text] for text in {*answers[anchor], anchor} if text in text_at]
            scores[row, right] = -torch.inf
        above = scores > limit[:, None]
        counts["closer than the margin"] += int(above.sum())
        scores = scores.masked_fill(above, -torch.inf)
        scores, indices = scores.topk(min(number + SLACK, scores.shape[1]), dim=1)
        alike = (texts[1][indices] @ positives[:, :, None]).squeeze(-1) > 1 - margin
        for row in range(len(chunk)):
            allowed = scores[row] > -torch.inf
            counts["nearly the positive"] += int((allowed & alike[row]).sum())
            closest = indices[row][allowed & ~alike[row]][:number].tolist()
            chosen.append([texts[0][index] for index in closest])
    return chosen, counts


def make_questions(
    base: Base, prompt: TeacherPrompt, number: int, *, on_event: Listener = ignore
) -> list[str]:
    """Return different messages that users may send, as the base imagines them.

    Args:
        prompt: The examples in it, if any, are shown as messages of users.
        number: The most that are returned.

    Raises:
        DataError: The base makes none, or has no chat template.
    """
    on_event(Stage(f"Making up to {number:,} questions"))
    style, rng = default_style(base.tokenizer), random.Random(0)
    stops = stop_ids(base.tokenizer, style)
    questions = dict.fromkeys(prompt.examples)  # in order, without duplicates
    num_examples = len(questions)
    for draw in range(ROUNDS * -(-number // BATCH_SIZE)):
        if len(questions) - num_examples >= number:
            break
        on_event(Progress("Making questions", len(questions) - num_examples, number))
        requests = (_question_request(prompt, rng) for _ in range(BATCH_SIZE))
        answers = generate_ids(
            base.model,
            base.tokenizer,
            [prompt_ids(base.tokenizer, messages, style) for messages in requests],
            stops=stops,
            max_new_tokens=MAX_TOKENS,
            temperature=TEMPERATURE,
            top_p=TOP_P,
            seed=draw,
        )
        lines = (decoded(base.tokenizer, ids).strip().splitlines() for ids in answers)
        questions |= dict.fromkeys(line[0] for line in lines if line)
    new_questions = list(questions)[num_examples:][:number]
    if len(new_questions) < FEWEST_QUESTIONS:
        raise DataError(
            "the base makes no questions from this prompt.",
            found=f"{len(new_questions)} different ones came of {ROUNDS * number} draws.",
            fix='Write some yourself, one {"prompt": ...} a line, and give them: --data FILE.jsonl',
        )
    return new_questions


def _question_request(prompt: TeacherPrompt, rng: random.Random) -> Sequence[Message]:
    """Return a request for a question, with some of the prompt's examples as earlier answers."""
    examples = rng.sample(prompt.examples, min(SHOWN_EXAMPLES, len(prompt.examples)))
    turns = [
        {"role": role, "content": text}
        for example in examples
        for role, text in (("user", REQUEST), ("assistant", example))
    ]
    system = {"role": "system", "content": INSTRUCTIONS.format(prompt.system)}
    return [*([system] if prompt.system else []), *turns, {"role": "user", "content": REQUEST}]
