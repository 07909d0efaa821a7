"""The teacher's answers: made once, kept in the run's folder, compared with the student's."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peftkit.base.load import Base
from peftkit.data.encode import stop_ids
from peftkit.data.load import DataConfig, read_records
from peftkit.errors import DataError
from peftkit.events import Listener, Progress, Stage, Table
from peftkit.execution.environment import is_main_process
from peftkit.inference.evaluate import MARGIN
from peftkit.inference.generate import generate_ids
from peftkit.inference.text import decoded
from peftkit.inference.watch import NUM_SAMPLES, Metric, TextWatch
from peftkit.run.config import Recipe
from peftkit.tasks.distill.rows import Distilled, Question
from peftkit.tasks.distill.task import Distill
from peftkit.tasks.metrics import rouge_l

FILE = "teacher_answers.jsonl"
BATCH_SIZE = 32
SHOWN = 3
"""Answers of the teacher that are shown before anything is learnt."""


class Teacher:
    """Answers questions as the base does with its prompt in front; each question once per folder.

    Answers are greedy, in batches that depend on the questions alone. Each batch is written as it
    is made, under a hash of the tokens and of all else that the answers depend on.
    """

    def __init__(self, recipe: Recipe, base: Base, task: Distill, on_event: Listener) -> None:
        self._base, self._task, self._on_event = base, task, on_event
        self.max_new_tokens: int = recipe.task.max_new_tokens  # type: ignore[union-attr]
        self._path = recipe.train.output_dir / FILE
        self._known = _kept(self._path)
        self.stops = stop_ids(base.tokenizer, task.row_encoder.style)

    def answers(self, questions: Sequence[Question]) -> list[dict[str, Any]]:
        """Return what the teacher says to each: answer, and whether it was cut."""
        keys = [self._key(question) for question in questions]
        asked = {k: q for k, q in zip(keys, questions, strict=True) if k not in self._known}
        order = sorted(asked, key=lambda key: -len(asked[key].teacher_ids))
        if order:
            self._on_event(Stage(f"The teacher answers {len(order):,} rows"))
        with self._task.reference.state():
            for start in range(0, len(order), BATCH_SIZE):
                self._on_event(Progress("The teacher answers", start, len(order)))
                part = order[start : start + BATCH_SIZE]
                self._known |= self._made({key: asked[key] for key in part})
        return [self._known[key] for key in keys]

    def student_answers(self, questions: Sequence[Question], most: int) -> list[str]:
        """Return what the model says to each as it is now, without the teacher's prompt."""
        self._task.forget_layout()
        asked = [question.student_ids for question in questions]
        return [decoded(self._base.tokenizer, ids) for ids in self._said(asked, most)]

    def _made(self, asked: Mapping[str, Question]) -> dict[str, dict[str, Any]]:
        most = self.max_new_tokens
        said = self._said([question.teacher_ids for question in asked.values()], most)
        made = {
            key: {
                "key": key,
                "source": question.source,
                "answer": decoded(self._base.tokenizer, ids),
                "tokens": len(ids),
                "cut": len(ids) >= most,
            }
            for (key, question), ids in zip(asked.items(), said, strict=True)
        }
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in made.values()]
        if is_main_process():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8", errors="surrogatepass") as file:
                file.write("".join(lines))
        return made

    def _said(self, prompts: Sequence[tuple[int, ...]], most: int) -> list[list[int]]:
        return generate_ids(
            self._base.model,
            self._base.tokenizer,
            prompts,
            stops=self.stops,
            max_new_tokens=most,
            batch_size=BATCH_SIZE,
        )

    def _key(self, question: Question) -> str:
        told = (self._task.reference.key, self.max_new_tokens, self.stops, question.teacher_ids)
        return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def answer_rows(recipe: Recipe, base: Base, task: Distill, on_event: Listener) -> None:
    """Have the teacher answer the rows of a run, where they are learnt, and say how good it is.

    Raises:
        DataError: The teacher's prompt leaves no room for a row, or rows cannot be used.
    """
    if not task.by_teacher:
        return
    teacher = Teacher(recipe, base, task, on_event)
    questions = [q for q in _questions(recipe.data, task) if len(q.teacher_ids) < task.limit]
    said = teacher.answers(questions)
    task.row_encoder.answers = {
        question.teacher_ids: row["answer"] for question, row in zip(questions, said, strict=True)
    }
    on_event(score("The teacher's answers, before anything is learnt", questions, said))
    if said and not any(row["answer"].strip() for row in said):
        raise DataError(
            "the teacher answers nothing.",
            found=f"Each of its {len(said):,} answers is empty.",
            fix="Give its prompt examples (## User, ## Assistant), or take a larger base.",
        )


def score(title: str, questions: Sequence[Question], said: Sequence[Mapping[str, Any]]) -> Table:
    """Return what the teacher's answers are worth: beside the rows' own, where they have any."""
    pairs = [
        (row["answer"], question.reference)
        for question, row in zip(questions, said, strict=True)
        if question.reference is not None
    ]
    rows = [("answers", f"{len(said):,}")]
    rows.append(("cut at the most tokens", f"{sum(row['cut'] for row in said):,}"))
    if pairs:
        exact = sum(answer.strip() == own.strip() for answer, own in pairs)
        likeness = sum(rouge_l(*pair) for pair in pairs) / len(pairs)
        rows.append(("exactly the row's own", f"{exact:,} of {len(pairs):,}"))
        rows.append(("ROUGE-L to the row's own", f"{likeness:.3f}"))
    rows += [(row["source"], " ".join(row["answer"].split())[:200]) for row in said[:SHOWN]]
    return Table(title, ("what", "value"), tuple(rows))


class AgreementWatch(TextWatch):
    """Compares what the student says to eval rows with what the teacher says, and with the rows'.

    Raises:
        DataError: As `answer_rows`.
    """

    def __init__(
        self,
        recipe: Recipe,
        base: Base,
        task: Distill,
        eval_rows: Sequence[Distilled],
        metrics: Mapping[str, Metric] | None,
        on_event: Listener,
    ) -> None:
        number = recipe.train.eval_generate or 0
        rows = [row.documents[0] for row in eval_rows[: max(number, NUM_SAMPLES)]]
        super().__init__(base, task, rows, recipe.train, metrics, on_event)
        self._teacher = Teacher(recipe, base, task, on_event)
        known = {q.source: q for q in _questions(recipe.data, task)} if number else {}
        self._questions = [known[row.source] for row in eval_rows[:number]]
        said = self._teacher.answers(self._questions)
        self._wanted = [row["answer"] for row in said]
        longest = max((row["tokens"] for row in said), default=0)
        self._most = min(math.ceil(MARGIN * longest) + 1, self._teacher.max_new_tokens)
        if number and not task.by_teacher:
            on_event(score("The teacher's answers to eval rows", self._questions, said))

    def metrics(self) -> dict[str, float]:
        """Return agreement: the share of whole answers that are the teacher's; exact_match: of
        those that are the rows' own; and rouge_l and others, to the teacher's."""
        if not self._questions:
            return {}
        answers = self._teacher.student_answers(self._questions, self._most)
        found = self.measured(list(zip(answers, self._wanted, strict=True)), "agreement")
        own = [question.reference for question in self._questions]
        pairs = [(a, b) for a, b in zip(answers, own, strict=True) if b is not None]
        if pairs:
            found["exact_match"] = sum(a.strip() == b.strip() for a, b in pairs) / len(pairs)
        return found


def _questions(data: DataConfig, task: Distill) -> list[Question]:
    files = [source.path for source in data.sources]
    files += [data.eval] if isinstance(data.eval, str) else []
    return [
        question
        for file in dict.fromkeys(files)
        for question in task.row_encoder.questions(read_records(file), file)
    ]


def _kept(path: Path) -> dict[str, dict[str, Any]]:
    """Return the answers that a folder has; a line that was cut off is as if it were not there."""
    found = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="surrogatepass").splitlines():
            try:
                row = json.loads(line)
                found[row["key"]] = row
            except (ValueError, KeyError, TypeError):
                continue
    return found
