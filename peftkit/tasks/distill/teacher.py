"""The teacher: its settings, another model or an average as teacher, and stored answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from peftkit.adapter import refresh_copies
from peftkit.base.request import DTYPES
from peftkit.config.schema import Config, Location
from peftkit.errors import BaseError, CheckpointError, ConfigError, DataError
from peftkit.events import Listener, Notice, Progress, Stage, Table
from peftkit.execution.signals import Interrupted
from peftkit.formats.folders import TEACHER_ANSWERS
from peftkit.forward.loss import Head, accepted, head_of, target_rows
from peftkit.forward.row_lengths import keep_lengths_apart, limits_of
from peftkit.inference.generate import SampledAnswer
from peftkit.tasks.distill.rows import Distilled
from peftkit.tasks.metrics import exact_match, rouge_l
from peftkit.tasks.run_hooks import Run


class TeacherConfig(Config):
    """The teacher: the base without the adapter, with another adapter, or another model."""

    prompt: Location | None = None
    """A file that precedes each row in the teacher's prompt: instructions as text (.md, .txt), with
    examples under the headings "## User" and "## Assistant"; or messages with role and content
    (.json, .jsonl)."""
    adapter: Location | None = None
    """Folder of a LoRA on the same base; null: the base without an adapter."""
    model: Location | None = None
    """Another model with the same tokenizer: hub id, folder, .gguf file or short name."""
    answer: bool | Literal["other"] = False
    """The teacher's prompt includes an answer as an example: true, the row's own (SDFT,
    arXiv:2601.19897); other, another training row with its answer (OP2SD, arXiv:2608.09228). Needs
    a base that learns in context: about 1.5B parameters or more."""
    min_match: Annotated[float, Field(ge=0, le=1)] = 0.5
    """With answer: true, minimum share of rows that the teacher must answer exactly as the row
    does, measured on 16 rows before the first step."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed that chooses the rows of answer: other."""
    follow: Annotated[float, Field(gt=0, le=1)] | None = None
    """The teacher is an exponential moving average of the student's weights: after each step, it
    moves by this share towards them; null: it stays the model before training."""

    @model_validator(mode="after")
    def _has_one_teacher(self) -> TeacherConfig:
        if self.adapter and self.model:
            raise ConfigError(
                "task.teacher has an adapter and a model.",
                found="A teacher is an adapter on the base, or another model.",
                fix="Remove one of them; merge the adapter if it belongs to that model.",
            )
        if self.follow is not None and (self.adapter or self.model):
            kind = "adapter" if self.adapter else "model"
            raise ConfigError(
                f"task.teacher.follow does not go with task.teacher.{kind}.",
                found=f"A teacher that follows averages the student's weights, not another {kind}.",
                fix=f"Remove task.teacher.follow or task.teacher.{kind}.",
            )
        if not (self.prompt or self.adapter or self.model or self.answer):
            raise ConfigError(
                "task.teacher is empty.",
                found="Without any of them, the teacher equals the untrained student.",
                fix="Set a prompt, an adapter or a model, or answer: true or other.",
            )
        return self


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A teacher model other than the base.

    Attributes:
        head: Its language head.
        fingerprint: Fingerprint of its weights.
    """

    model: Any
    head: Head
    fingerprint: str

    @property
    def hidden_size(self) -> int:
        """Width of its hidden states."""
        return int(self.model.config.get_text_config().hidden_size)

    @torch.no_grad()
    def hidden(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return its hidden states before the head (n, H) at the targets of a padded batch."""
        inputs = {"input_ids": batch["input_ids"], "use_cache": False}
        if limits_of(self.model).document:
            inputs["attention_mask"] = batch["attention_mask"]  # where a row ends
        return target_rows(self.model, accepted(self.model, inputs), batch["target_index"])


def other_model(
    name: str, student: Any, tokenizer: Any, head: Head | None, say: Listener
) -> OtherModel:
    """Load a teacher with the student's tokenizer.

    Args:
        student: The trained model.
        head: The trained model's head.

    Raises:
        BaseError: The tokenizers differ, or the head cannot be called separately.
    """
    from peftkit.base.load import load_base  # slow to import, and most teachers are the base

    dtype = next((name for name, each in DTYPES.items() if each == student.dtype), "auto")
    loaded = load_base(name, dtype=dtype, device=student.device, on_event=say)
    refusal = f"{name} cannot teach this base token by token"
    if loaded.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise BaseError(
            refusal,
            found="Their tokenizers differ.",
            fix="Generate its answers (peftkit generate) and train on them with task: causal_lm; "
            "or use a teacher of the same family.",
        )
    teacher_head = head_of(loaded.model)
    if teacher_head is None or head is None or teacher_head.vocab_size != head.vocab_size:
        sizes = [each.vocab_size if each else "none" for each in (teacher_head, head)]
        raise BaseError(
            refusal,
            found=f"Rows of their heads: {sizes[0]} and {sizes[1]}.",
            fix="Use a teacher whose head has as many rows.",
        )
    keep_lengths_apart(loaded.model)
    return OtherModel(loaded.model, teacher_head, loaded.fingerprint)


class MovingAverage:
    """An exponential moving average of a model's trained weights: a teacher that follows them.

    After each optimizer step, average = (1 - rate) average + rate weights, in float32. It starts
    with the current weights. All processes have the same weights, and so the same average.

    Args:
        rate: Share of the new weights in each update; 1: the average equals the weights.

    Attributes:
        values: The averages in float32, by parameter name.
    """

    def __init__(self, model: nn.Module, rate: float) -> None:
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._model, self._rate = model, rate
        self._parameters: list[Tensor] = list(trained.values())
        self.values = {n: p.detach().to(torch.float32, copy=True) for n, p in trained.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights."""
        weights = [parameter.float() for parameter in self._parameters]
        torch._foreach_lerp_(list(self.values.values()), weights, self._rate)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Replace the weights by their average within the context."""
        weights = [parameter.detach().clone() for parameter in self._parameters]
        try:
            self._set(list(self.values.values()))
            yield
        finally:
            self._set(weights)

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Restore saved averages, bit for bit.

        Raises:
            CheckpointError: They do not fit the model.
        """
        shapes, found = ({n: tuple(t.shape) for n, t in s.items()} for s in (self.values, saved))
        if shapes != found:
            differing = sorted(n for n, _ in shapes.items() ^ found.items())
            raise CheckpointError(
                "the saved average of the weights does not fit this model",
                found=f"These tensors differ: {', '.join(differing[:4])}",
                fix="Continue with the recipe of the saved run, or start a new run.",
            )
        for name, value in self.values.items():
            value.copy_(saved[name])

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        # in place: compiled code and CUDA graphs read these addresses
        torch._foreach_copy_(self._parameters, values)
        refresh_copies(self._model)


MEASURED = 16
"""Rows on which a teacher that is shown answers is measured."""


def check_demonstrations(
    rows: Sequence[Distilled],
    answer: Callable[[Sequence[Sequence[int]]], list[SampledAnswer]],
    text: Callable[[Sequence[int]], str],
    min_match: float,
    say: Listener,
) -> None:
    """Check that the teacher uses the row's answer in its prompt; otherwise it teaches noise.

    Args:
        rows: The training rows; the first 16 are answered.
        answer, text: As in `teacher_answers`.

    Raises:
        DataError: Fewer than min_match of its answers equal the rows'.
    """
    rows = [rows[n] for n in range(min(len(rows), MEASURED))]
    prompts = [row.teacher_ids[: len(row.teacher_ids) - row.num_targets // 2] for row in rows]
    say(Stage(f"The teacher answers {len(rows)} rows with their answers as examples"))
    texts = [text(one.ids) for one in answer(prompts)]
    share = exact_match([(t, row.reference or "") for t, row in zip(texts, rows, strict=True)])
    if share < min_match:
        raise DataError(
            "the teacher does not use the answers that it is shown.",
            found=f"{share:.0%} of its answers to {len(rows)} rows equal the rows' answers, "
            f"for example: {texts[0][:200]!r}",
            fix="Use a larger instruction-tuned base, or task: causal_lm with an anchor; "
            "task.teacher.min_match sets the threshold.",
        )
    say(Notice(f"The teacher repeats the answers that it is shown: {share:.0%} exactly."))


# The teacher's answers: generated before the first step, and stored in the run's folder.


FILE = TEACHER_ANSWERS
AT_ONCE, AT_ONCE_ON_CPU = 64, 16
"""Prompts per batch of generated and stored answers; fewer on a CPU, for frequent progress."""
SHOWN = 3
Answers = dict[tuple[int, ...], SampledAnswer]
"""Answers by the teacher's prompt."""


def teacher_answers(
    rows: Sequence[Distilled],
    key: str,
    answer: Callable[[Sequence[Sequence[int]]], list[SampledAnswer]],
    text: Callable[[Sequence[int]], str],
    longest: int,
    run: Run,
) -> Answers:
    """Return the teacher's answers: read them from the run's folder and generate missing ones.

    Unless the base is sharded, the processes divide the rows.

    Args:
        key: Identifies the teacher and its settings.
        answer: Generates the teacher's answers to prompts.
        text: Decodes tokens.
        longest: Maximum tokens of an answer.

    Raises:
        Interrupted: A signal arrived; the answers so far are stored.
        DataError: All answers are empty.
    """
    path, world = run.config.output_dir / FILE, run.world
    row_of = {row.teacher_ids: row for row in rows}
    keys = {
        ids: hashlib.blake2b(repr((key, ids)).encode(), digest_size=16).hexdigest()
        for ids in row_of
    }
    stored = _stored(path)
    world.wait()  # all processes read the file before one writes
    answers = {ids: stored[digest] for ids, digest in keys.items() if digest in stored}
    missing = sorted(row_of.keys() - answers.keys(), key=lambda ids: (-len(ids), ids))
    if missing:
        run.say(Stage(f"The teacher answers {len(missing):,} rows"))
    at_once = AT_ONCE_ON_CPU if world.device.type == "cpu" else AT_ONCE
    for start in range(0, len(missing), at_once):
        if run.stop.signum and world.world_size == 1:
            stopped = "stopped before the first step; the teacher's answers so far are stored."
            raise Interrupted(run.stop.signum, stopped)
        run.say(Progress("The teacher answers", start, len(missing)))
        part = missing[start : start + at_once]
        new_answers = _on_all(part, answer, longest, run)
        answers |= zip(part, new_answers, strict=True)
        lines = []
        for ids, one in zip(part, new_answers, strict=True):
            fields: dict[str, object] = {
                "key": keys[ids],
                "source": row_of[ids].source,
                "answer": text(one.ids),
            }
            fields |= {"ids": one.ids, "cut": one.is_cut}
            lines.append(json.dumps(fields, ensure_ascii=False) + "\n")
        if world.is_main:
            with open(path, "a", encoding="utf-8", errors="surrogatepass") as file:
                file.write("".join(lines))
    _report([*row_of.values()], answers, text, run)
    return answers


def _on_all(
    prompts: Sequence[tuple[int, ...]],
    answer: Callable[[Sequence[Sequence[int]]], list[SampledAnswer]],
    longest: int,
    run: Run,
) -> list[SampledAnswer]:
    """Divide the prompts between the processes; return all answers in each."""
    world = run.world
    if world.world_size == 1 or run.parallel.in_lockstep:
        return answer(prompts)
    table = torch.zeros(len(prompts), longest + 3, dtype=torch.long, device=world.device)
    numbers = range(world.rank, len(prompts), world.world_size)
    for n, one in zip(numbers, answer([prompts[n] for n in numbers]), strict=True):
        fields = [len(one.ids), int(one.is_cut), *one.ids]
        table[n, : len(fields)] = torch.tensor(fields, device=world.device)
    return [
        SampledAnswer(tuple(ids[:size]), bool(cut)) for size, cut, *ids in world.sum(table).tolist()
    ]


def _report(
    rows: Sequence[Distilled], answers: Answers, text: Callable[[Sequence[int]], str], run: Run
) -> None:
    """Report the teacher's answers, and their similarity to the answers of the rows."""
    answered = [(row, text(answers[row.teacher_ids].ids)) for row in rows]
    if answered and not any(answer.strip() for _, answer in answered):
        raise DataError(
            "the teacher's answers are empty.",
            found=f"All {len(answered):,} answers are empty.",
            fix="Give its prompt examples (## User, ## Assistant), or use a larger base.",
        )
    cut = sum(answers[row.teacher_ids].is_cut for row in rows)
    lines = [("answers", f"{len(answered):,}"), ("cut at task.max_new_tokens", f"{cut:,}")]
    pairs = [(answer, row.reference) for row, answer in answered if row.reference is not None]
    if pairs:
        exact = round(exact_match(pairs) * len(pairs))
        likeness = sum(rouge_l(*pair) for pair in pairs) / len(pairs)
        lines.append(("equal to the row's answer", f"{exact:,} of {len(pairs):,}"))
        lines.append(("ROUGE-L to the row's answer", f"{likeness:.3f}"))
    lines += [(row.source, " ".join(answer.split())[:200]) for row, answer in answered[:SHOWN]]
    title = "The teacher's answers, before training"
    run.say(Table(title, ("what", "value"), tuple(lines)))
    if 2 * cut > len(answered):
        more = "raise task.max_new_tokens, or give the teacher shorter examples."
        run.say(Notice(f"Most of the teacher's answers are cut: {more}"))


def _stored(path: Path) -> dict[str, SampledAnswer]:
    """Return the stored answers; skip damaged lines."""
    stored = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="surrogatepass").split("\n"):
            try:
                row = json.loads(line)
                stored[row["key"]] = SampledAnswer(tuple(map(int, row["ids"])), bool(row["cut"]))
            except (ValueError, KeyError, TypeError):
                continue
    return stored
