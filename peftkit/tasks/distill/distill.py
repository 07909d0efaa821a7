"""Distillation: the divergence between student and teacher at each token of an answer.

Unless a teacher model is set, both share one base. The teacher is the base without an adapter or
with another one, and reads its prompt before each row. The student has the trained adapter and
reads only the row. The loss needs only the teacher's hidden states before the head. For fixed
answers they are computed once, before the first step, and stored in main memory if they fit.

Shapes: B rows, n answer tokens in total, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from peftkit.data.generation import stop_ids
from peftkit.data.pack import Row
from peftkit.data.rows.columns import row_digest
from peftkit.errors import AdapterError, ConfigError
from peftkit.events import Listener, Notice, ScoredAnswer, ignore
from peftkit.execution.plan import compute_dtype
from peftkit.execution.signals import Interrupted
from peftkit.figures import size
from peftkit.forward.loss import check_shared_head, divergence_of, unwrapped
from peftkit.inference.generate import ModelSampler, SampledAnswer
from peftkit.kernels.cross_entropy import Divergence, DivergenceName
from peftkit.kernels.device import free_bytes
from peftkit.model.modes import SideAdapter, evaluating
from peftkit.settings import CHAT
from peftkit.tasks.base import mean_loss, over_batches
from peftkit.tasks.distill.rows import (
    DemonstrationEncoder,
    Distilled,
    DistillEncoder,
    DistillLoader,
    TeacherPrompt,
    read_prompt,
    without_first,
)
from peftkit.tasks.distill.teacher import (
    Answers,
    MovingAverage,
    OtherModel,
    TeacherConfig,
    check_demonstrations,
    other_model,
    teacher_answers,
)
from peftkit.tasks.documents import OnPolicyTask, Rollout
from peftkit.tasks.metrics import exact_match
from peftkit.tasks.row_loader import exact_length
from peftkit.tasks.run_hooks import Run
from peftkit.tasks.tokens import AnswerConfig

TEACHER = "teacher_"
"""Prefix of the names of the teacher's tensors in a batch."""
NAN = float("nan")
HIDDEN = "teacher_hidden"
"""Name of the stored hidden states of the teacher before the head (n, H)."""
SHARE = 0.25
"""Maximum share of the free main memory for these hidden states."""
DIVERGENCES = {"forward": "KL(teacher, student)", "reverse": "KL(student, teacher)", "jsd": "JSD"}
"""Names in the run header."""


class Distill(OnPolicyTask):
    """Train the student to match the teacher's token distributions.

    Raises:
        AdapterError: The adapter changes the head, which both share.
    """

    metric_names = ("same_token",)
    """Share of answer tokens at which student and teacher agree on the most likely token."""

    row_loader: ClassVar[type[DistillLoader]] = DistillLoader
    rows: DistillLoader

    def build(self, model: nn.Module) -> None:
        check_shared_head(model, "the task distill")
        super().build(model)
        config, loader = self.config, self.rows
        loader.data = loader.data.without_packing()
        loader.seed, file = config.teacher.seed, config.teacher.prompt
        self.makes_rows = config.answers == "student"
        kind = DemonstrationEncoder if config.teacher.answer == "other" else DistillEncoder
        self.encoder = loader.encoder = kind(
            self.tokenizer,
            loader.template,
            loader.data,
            read_prompt(file) if file else TeacherPrompt(),
            max_length=loader.max_length,
            limit=exact_length(model, self.tokenizer, None),
            room=None if config.answers == "data" else config.max_new_tokens,
            shows_answer=config.teacher.answer is True,
        )
        self.stops = stop_ids(self.tokenizer, self.encoder.style)
        self._student = model
        self._adapter: SideAdapter | None = None
        self._average: MovingAverage | None = None
        self._other: OtherModel | None = None
        self._answers: Answers = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._hidden: Tensor | None = None

    @property
    def paths(self) -> dict[str, str]:
        of_tokens = super().paths
        in_steps = self._hidden is None or self.makes_rows
        loss = f"{DIVERGENCES[self.config.kind]}, {of_tokens['loss']}"
        when = f"computed {'in each step' if in_steps else 'before the first step'}"
        if self.config.teacher.follow is not None:
            when += f", follows the student's weights at {self.config.teacher.follow:g}"
        return {**of_tokens, "loss": loss, "teacher": when}

    # The teacher.

    @property
    def other_adapters(self) -> Sequence[str]:
        """The teacher's adapter, if it has one."""
        return [self.config.teacher.adapter] if self.config.teacher.adapter else []

    def add_adapter(self, folder: str, adapter: SideAdapter) -> None:
        if adapter.head:
            reason = f"it was trained for the task {adapter.task.get('type')}"
            raise AdapterError(f"{folder} cannot teach", found=reason)
        self._adapter = adapter

    @property
    def identity(self) -> Mapping[str, object]:
        """Fingerprint of a teacher other than the base; loads a teacher model."""
        self._load_teacher(self.rows.on_event)
        if self._other is not None:
            return {"teacher": self._other.fingerprint}
        return {"teacher": self._adapter.key} if self._adapter else {}

    def _load_teacher(self, say: Listener) -> None:
        if self.config.teacher.model and self._other is None:
            name, bare = self.config.teacher.model, unwrapped(self._student)
            self._other = other_model(name, bare, self.tokenizer, self.head, say)

    @contextmanager
    def _as_teacher(self, model: nn.Module, average: MovingAverage | None) -> Iterator[None]:
        """Switch the model to the teacher's state; an average replaces that before training."""
        state = self.reference.state() if self._adapter is None else self._adapter.on(model)
        with evaluating(model), state if average is None else average.in_use():
            yield

    def state(self) -> Mapping[str, Tensor]:
        return self._average.values if self._average is not None else {}

    def load_state(self, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
        if (rate := self.config.teacher.follow) is not None:
            self._average = MovingAverage(model, rate)
            self._average.load(saved)

    def after_step(self) -> None:
        if self._average is not None:
            self._average.update()

    def setup(self, run: Run) -> None:
        """Generate the teacher's answers, and store its hidden states before the head.

        If the student generates the answers, only the eval rows are processed.

        Raises:
            Interrupted: A signal arrived; the answers so far are stored.
            DataError: The teacher's answers are empty, or too few are equal to those it is shown.
        """
        self._load_teacher(run.say)
        if (rate := self.config.teacher.follow) is not None and self._average is None:
            self._average = MovingAverage(run.model, rate)
            if run.state.step:  # a resumed run that has changed task.teacher.follow
                text = "The checkpoint has no average of the student's weights: the teacher starts"
                run.say(Notice(f"{text} with the weights of step {run.state.step}."))
        if self.makes_rows:
            self.check_alone(run)
        if self.config.teacher.answer is True and len(run.rows):
            answer = partial(self._teacher_answers, run=run)
            minimum, decode = self.config.teacher.min_match, partial(self.text, special=False)
            check_demonstrations(run.rows, answer, decode, minimum, run.say)
        rows = run.eval_rows if self.makes_rows else run.all_rows
        if self.config.answers != "data" and len(rows):
            self._generate_answers(rows, run)
        is_fixed = rate is None and run.world.world_size == 1
        if self.head is not None and is_fixed and len(rows):
            self._store_hidden(rows, run)

    def before_step(self, rows: Sequence[Distilled], run: Run) -> Sequence[Sequence[Distilled]]:
        is_trained = self.makes_rows and torch.is_grad_enabled()
        return super().before_step(rows, run) if is_trained else [rows]

    def _teacher_answers(self, prompts: Sequence[Sequence[int]], run: Run) -> list[SampledAnswer]:
        """Return the teacher's greedy answers to prompts."""
        other = self._other
        sampler = self.sampler(run.model if other is None else other.model)
        with self._as_teacher(run.model, None) if other is None else nullcontext():
            return [one for (one,) in self.sample(prompts, None, sampler)]

    def _generate_answers(self, rows: Sequence[Distilled], run: Run) -> None:
        longest = self.config.max_new_tokens
        teacher = self.identity.get("teacher", "")
        key = f"{self.reference.key} {teacher} {longest} {self.stops}"
        text = partial(self.text, special=False)
        answer = partial(self._teacher_answers, run=run)
        self._answers = teacher_answers(rows, key, answer, text, longest, run)

    def answered(self, row: Distilled) -> Distilled:
        """Return a row with the teacher's answer, or with one of maximum length to plan memory."""
        if row.num_targets:
            return row
        answer = self._answers.get(row.teacher_ids)
        ids = answer.ids if answer is not None else (self.pad_id,) * self.config.max_new_tokens
        return row.answered(ids[: self.rows.max_length - row.lengths[0]])

    def roll_out(
        self, prompts: Sequence[Distilled], seeds: Sequence[int] | None, sampler: ModelSampler
    ) -> Rollout:
        """Sample the student's answers to rows, for on-policy distillation."""
        ids = [row.documents[0].input_ids for row in prompts]
        sampled = self.sample(ids, seeds, sampler)
        rows, answers = [], []
        for row, (one,) in zip(prompts, sampled, strict=True):
            rows.append(row.answered(one.ids[: self.rows.max_length - row.lengths[0]]))
            prompt = self.text(row.documents[0].input_ids, special=False)
            text = self.text(one.ids, special=False)
            answers.append(ScoredAnswer(prompt, text, NAN, {}, NAN, one.is_cut, row.source))
        number = max(len(rows), 1)
        means = {
            "cut": sum(one.is_cut for one in answers) / number,
            "length": sum(len(one.ids) for (one,) in sampled) / number,
        }
        return Rollout(rows, means, tuple(answers))

    # The loss.

    def _store_hidden(self, rows: Sequence[Distilled], run: Run) -> None:
        """Store the teacher's hidden states before the head if memory suffices."""
        model = run.model
        bare = unwrapped(model)
        number = sum(self._num_counted(self.answered(row)) for row in rows)
        width, other = int(bare.config.get_text_config().hidden_size), self._other
        shape = (number, width if other is None else other.hidden_size)
        dtype: torch.dtype = compute_dtype(bare) if other is None else compute_dtype(other.model)
        needed, free = shape[0] * shape[1] * dtype.itemsize, free_bytes()
        if free is not None and needed > SHARE * free:
            sizes = f"they take {size(needed)}, {size(free)} are free"
            run.say(Notice(f"The teacher's hidden states are computed in each step: {sizes}."))
            return
        hidden, places, start = torch.empty(shape, dtype=dtype), {}, 0
        compute, text = partial(self.teacher_hidden, model), "Running the teacher"
        with run.world.autocast():
            for part, _, computed in over_batches(self, model, rows, text, run.say, compute):
                if run.stop.signum:
                    raise Interrupted(run.stop.signum, "stopped before the first step.")
                hidden[start : start + len(computed)] = computed
                for row in map(self.answered, part):
                    places[row_digest(row)] = (start, start + self._num_counted(row))
                    start += self._num_counted(row)
        self._hidden, self._places = hidden, places

    def num_positions(self, rows: Sequence[Distilled]) -> int:
        pairs = (self.answered(row).documents for row in rows)
        students, teachers = zip(*pairs, strict=True)
        is_stored = self._hidden is not None and not self.makes_rows
        return super().num_positions(students) + (
            0 if is_stored else super().num_positions(teachers)
        )

    def _num_counted(self, row: Distilled) -> int:
        """Return the tokens of a row's answer in the loss."""
        return without_first(row.documents[0], self.config.skip_tokens).num_targets

    def collate(self, rows: Sequence[Distilled]) -> dict[str, Tensor]:
        answered = [self.answered(row) for row in rows]
        skip = self.config.skip_tokens
        pairs = ([without_first(each, skip) for each in row.documents] for row in answered)
        students, teachers = zip(*pairs, strict=True)
        batch = self.documents(students)
        if self._hidden is not None:
            places = [self._places.get(row_digest(row)) for row in answered]
            if None not in places:
                hidden = [self._hidden[slice(*place)] for place in places if place is not None]
                return {**batch, HIDDEN: torch.cat(hidden)}
        teacher_batch = self.documents(teachers) if self._other is None else self.padded(teachers)
        return {**batch, **{TEACHER + name: tensor for name, tensor in teacher_batch.items()}}

    def teacher_hidden(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the teacher's hidden states before the head (n, H), stored or computed now.

        If the head cannot be called separately, these are the logits (n, V).
        """
        if HIDDEN in batch:
            return batch[HIDDEN]
        teacher_batch = {
            n.removeprefix(TEACHER): t for n, t in batch.items() if n.startswith(TEACHER)
        }
        if self._other is not None:
            return self._other.hidden(teacher_batch)
        with self._as_teacher(model, self._average):
            return self.before_head(model, teacher_batch)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the summed divergence and the number of tokens at which both agree."""
        teacher = self.teacher_hidden(model, batch)  # first: recomputed blocks need the last layout
        student = self.before_head(model, batch)
        other = None if self._other is None else self._other.head
        divergence = self.config.divergence
        values, same = divergence_of(student, teacher, self.head, divergence, teacher_head=other)
        return torch.stack([values.sum(), same.sum().to(values)])

    def metrics(
        self, model: nn.Module, rows: Sequence[Distilled], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the loss, same_token, and tokens_saved: prompt tokens saved per row."""
        saved = sum(len(row.teacher_ids) - row.lengths[0] for row in rows) / len(rows)
        return {**mean_loss(self, model, rows, on_event)[0], "tokens_saved": saved}

    def prompts(self, row: Distilled) -> Sequence[Row]:
        return super().prompts(self.answered(row).documents[0])

    def answer_metrics(
        self, pairs: Sequence[tuple[str, str]], rows: Sequence[Distilled]
    ) -> dict[str, float]:
        """Return shares of answers equal to the teacher's, and to the references of the rows."""
        references = [
            (answer, row.reference)
            for (answer, _), row in zip(pairs, rows, strict=True)
            if row.reference is not None
        ]
        exact = {"exact_match": exact_match(references)} if references else {}
        return {**exact, "agreement": exact_match(pairs)}

    def spans(self, row: Distilled) -> list[tuple[str, str]]:
        student, teacher = row.documents
        prompt = [text for kind, text in super().spans(teacher) if not kind]
        return [*super().spans(student), ("the teacher reads", "".join(prompt))]


class DistillConfig(AnswerConfig):
    """Distillation: train the adapter to match the base with a prompt, or another teacher."""

    data_fields: ClassVar[frozenset[str]] = frozenset({"format", "max_length", *CHAT})

    task: ClassVar = Distill

    type: Literal["distill"] = "distill"
    teacher: TeacherConfig
    """The teacher: a prompt, an adapter, a model."""
    answers: Literal["teacher", "data", "student"] = "teacher"
    """Source of the answers in the loss. teacher: generated greedily before the first step and
    stored in the run's folder, so rows need no answers. data: the last answer of each row. student:
    sampled in each step (on-policy), usually with kind: reverse."""
    kind: DivergenceName = "forward"
    """Divergence at each token of an answer, over the whole vocabulary: forward is
    KL(teacher, student), which covers all modes of the teacher; reverse is
    KL(student, teacher), which seeks its main mode; jsd is a compromise."""
    beta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The teacher's weight in the mixture of jsd; null: 0.5."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divisor of the logits of teacher and student."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """Longest generated answer, in tokens."""
    skip_tokens: Annotated[int, Field(ge=0)] = 0
    """First tokens of each answer without a loss, as num_loss_tokens_to_skip of TRL; the last token
    of an answer always counts."""

    @model_validator(mode="after")
    def _settings_are_used(self) -> DistillConfig:
        if self.answers != "data" and self.skip_tokens >= self.max_new_tokens:
            raise ConfigError(
                f"task.skip_tokens: {self.skip_tokens} skips all tokens of an answer.",
                found=f"Answers have at most {self.max_new_tokens} tokens (task.max_new_tokens).",
                fix="Lower task.skip_tokens, or raise task.max_new_tokens.",
            )
        if self.beta is not None and self.kind != "jsd":
            raise ConfigError(
                f"task.beta is not used by task.kind: {self.kind}.",
                fix="Remove it, or set task.kind: jsd.",
            )
        return self

    @property
    def makes_answers(self) -> str:
        return "task.answers is teacher" if self.answers == "teacher" else ""

    @property
    def divergence(self) -> Divergence:
        """The divergence at each token."""
        return Divergence(self.kind, self.beta or 0.5, self.temperature)

    def saved(self) -> dict[str, object]:
        """Settings of causal_lm: the adapter is used and evaluated without the teacher."""
        return {"type": "causal_lm"}
