"""The task of distillation: at each token of an answer, how far the student is from the teacher.

Both are one model: the teacher is the base without the adapter, with its prompt in front of each
row; the student has the adapter and reads the row alone. The same head makes the logits of both, so
all that is needed of the teacher is what reaches the head: of answers that do not change that is
computed once, before the first step, and kept in main memory where it fits.

Shapes: B rows, n answer tokens of them all, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from peftkit.data.columns import columns_of
from peftkit.data.load import DataConfig
from peftkit.data.pack import IGNORE
from peftkit.data.stored import StoredRows
from peftkit.errors import AdapterError
from peftkit.events import Listener, Notice, ignore
from peftkit.kernels.divergence import Divergence, chunked_divergence, reference_divergence
from peftkit.kernels.host_memory import free_bytes
from peftkit.model.modes import adapters_off, evaluating
from peftkit.model.places import unwrap_adapter
from peftkit.tasks.distill.prompt import TeacherPrompt
from peftkit.tasks.distill.rows import Distilled, DistillEncoder
from peftkit.tasks.isolation import check_causal
from peftkit.tasks.length import exact_length
from peftkit.tasks.loss import find_head, target_logits, target_rows, unwrapped
from peftkit.tasks.measure import over_batches
from peftkit.tasks.preference.reference import Reference
from peftkit.tasks.token_task import AnswerTask
from peftkit.train.signals import Interrupted
from peftkit.train.task import SetupContext

TEACHER = "teacher_"
"""How the names of a batch begin that are of the teacher's documents."""
HIDDEN = "teacher_hidden"
"""What reaches the head after the teacher's documents (n, H), where it is known already."""
SHARE = 0.25
"""Of the free main memory, that may be taken to keep it."""
DIVERGENCES = {"forward": "KL(teacher, student)", "reverse": "KL(student, teacher)", "jsd": "JSD"}
"""What the header calls them."""


class Settings(Protocol):
    """What is asked of the task: the part of its config that it reads."""

    @property
    def answers(self) -> str:
        """Whose answers teacher and student are compared on."""

    @property
    def divergence(self) -> Divergence:
        """What is computed at each token."""


class Distill(AnswerTask):
    """Learn to answer as the teacher does.

    Args:
        prompt: What the teacher reads before each row.

    Raises:
        BaseError: The model is not causal.
        AdapterError: The adapter changes the head: the teacher's is another function then.
        DataError: A template or a length that cannot be.
    """

    predicts_tokens: ClassVar[bool] = False
    is_causal: ClassVar[bool] = True
    num_metrics: ClassVar[int] = 1
    row_encoder: DistillEncoder

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        config: Settings,
        data: DataConfig,
        prompt: TeacherPrompt,
        **more: Any,
    ) -> None:
        check_causal(model)
        _check_head(model)
        super().__init__(model, tokenizer, config, data.without_packing(), **more)
        self.divergence = config.divergence
        self.by_teacher = config.answers == "teacher"
        self.limit = exact_length(model, tokenizer, None)
        self.row_encoder = DistillEncoder(
            tokenizer,
            self.template,
            data,
            prompt,
            max_length=self.max_length,
            limit=self.limit,
            by_teacher=self.by_teacher,
        )
        self.reference = Reference(partial(adapters_off, model))
        self._places: dict[int, tuple[int, int]] = {}
        self._hidden: Tensor | None = None

    @property
    def paths(self) -> dict[str, str]:
        """Which divergence, and when the teacher is asked."""
        known = super().paths
        when = "in each step" if self._hidden is None else "before the first step"
        loss = f"{DIVERGENCES[self.divergence.kind]}, {known['loss']}"
        return {**known, "loss": loss, "teacher": f"asked {when}"}

    def set_reference(self, state: Any, key: str) -> None:
        """Learn from the model in this state; see `Reference`."""
        self.reference = Reference(state, key)

    def counts(self, rows: StoredRows) -> list[tuple[str, str]]:
        kept = max(len(rows), 1)
        teacher, student = (rows.counts[f"{who}_prompts"] / kept for who in ("teacher", "student"))
        told = f"{teacher:,.0f}, {student:,.0f}: {teacher - student:,.0f} saved per request"
        return [("tokens of a prompt, teacher's and student's", told)]

    def setup(self, model: nn.Module, context: SetupContext) -> None:
        """Ask the teacher about all rows, where what it says can be kept.

        Several processes ask it in each step: none of them has all rows.

        Raises:
            Interrupted: A signal came.
        """
        if self._head is None or context.ranks.world_size > 1:
            return
        bare = unwrapped(model)
        number = sum(_num_answer(row) for row in context.rows)
        shape = (number, int(bare.config.get_text_config().hidden_size))
        needed, free = shape[0] * shape[1] * bare.dtype.itemsize, free_bytes()
        if free is not None and needed > SHARE * free:
            told = f"it takes {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
            context.say(Notice(f"What the teacher says is computed in each step: {told}."))
            return
        hidden, places, start = torch.empty(shape, dtype=bare.dtype), {}, 0
        compute, told = partial(self.teacher_hidden, model), "Asking the teacher"
        with context.ranks.autocast():
            asked = over_batches(self, model, context.rows, told, context.say, compute)
            for rows, _, said in asked:
                if context.stop.signum:
                    raise Interrupted(context.stop.signum, "stopped before the first step.")
                hidden[start : start + len(said)] = said
                for row in rows:
                    places[_key(row)] = (start, start + _num_answer(row))
                    start += _num_answer(row)
        self._hidden, self._places = hidden, places

    def num_positions(self, rows: Sequence[Distilled]) -> int:
        """Return how many positions rows take; the teacher's too, where it is asked now."""
        own, theirs = zip(*(row.documents for row in rows), strict=True)
        found = super().num_positions(own)
        return found if self._hidden is not None else found + super().num_positions(theirs)

    def collate(self, rows: Sequence[Distilled]) -> dict[str, Tensor]:
        """Return the student's documents as a batch, and the teacher's, or what it said."""
        own, theirs = zip(*(row.documents for row in rows), strict=True)
        batch = super().collate(own)
        keys = [_key(row) for row in rows] if self._hidden is not None else []
        if self._hidden is not None and all(key in self._places for key in keys):
            said = [self._hidden[slice(*self._places[key])] for key in keys]
            return {**batch, HIDDEN: torch.cat(said)}
        asked = super().collate(theirs)
        return {**batch, **{TEACHER + name: tensor for name, tensor in asked.items()}}

    def teacher_hidden(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return what reaches the head after the teacher's documents (n, H): known, or asked now.

        Where a model's head cannot be had apart, it is the logits (n, V).
        """
        if HIDDEN in batch:
            return batch[HIDDEN]
        theirs = {n.removeprefix(TEACHER): t for n, t in batch.items() if n.startswith(TEACHER)}
        with evaluating(model), self.reference.state():
            return self._before_head(model, theirs)

    def loss_and_metric_sums(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the summed divergence, and at how many tokens both choose the same one."""
        theirs = self.teacher_hidden(model, batch)  # first: recomputed blocks ask for the last one
        own = self._before_head(model, batch)
        if self._head is None:
            values = reference_divergence(own.float(), theirs.float(), self.divergence)
            same = own.argmax(-1) == theirs.argmax(-1)
        else:
            values, same = chunked_divergence(
                own,
                theirs,
                self._head,
                self.divergence,
                vocab_size=self._head.vocab_size,
                chunks=self._head.chunks,
            )
        return torch.stack([values.sum(), same.sum().to(values)])

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return self.loss_and_metric_sums(model, batch)[0]

    def metric_means(self, means: Sequence[float]) -> dict[str, float]:
        """Return same_token: the share of answer tokens at which both choose the same one."""
        return {"same_token": means[0]}

    @torch.no_grad()
    def metrics(
        self, model: nn.Module, rows: Sequence[Any], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the loss, same_token, and the tokens of a prompt that the student does without."""
        total, count = torch.zeros(2), 0
        compute = partial(self.loss_and_metric_sums, model)
        for _, batch, sums in over_batches(self, model, rows, "Comparing", on_event, compute):
            total += sums.cpu()
            count += self.num_targets(batch)
        loss, same = (total / count).tolist()
        saved = sum(row.lengths[1] - row.lengths[0] for row in rows) / len(rows)
        return {"loss": loss, "same_token": same, "tokens_saved": saved}

    def spans(self, row: Any) -> list[tuple[str, str]]:
        """Return what the student reads, its answer, and what the teacher reads before that."""
        own, theirs = row.documents
        prompt = [text for kind, text in super().spans(theirs) if not kind]
        return [*super().spans(own), ("the teacher reads", "".join(prompt))]

    def _before_head(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        ask = target_logits if self._head is None else target_rows
        found = ask(model, self.model_inputs(model, batch), batch["target_index"])
        if not found.requires_grad:
            self.forget_layout()  # no backward pass will ask again
        return found


def _key(row: Distilled) -> int:
    return columns_of(Distilled).digest(row)


def _num_answer(row: Distilled) -> int:
    return sum(label != IGNORE for label in row.labels) // 2


def _check_head(model: nn.Module) -> None:
    """Make sure that the adapter leaves the head alone: one head makes the logits of both.

    Raises:
        AdapterError: It does not.
    """
    head = find_head(unwrapped(model))
    if head is None:
        return
    if unwrap_adapter(head) is not head or any(p.requires_grad for p in head.parameters()):
        raise AdapterError(
            "the task distill does not go with an adapter on the head.",
            found="Teacher and student share it; rows of tokens are the head's too if it is tied.",
            fix="Leave the head out of method.targets and method.train_fully, and leave "
            "method.token_rows and base.new_tokens out.",
        )
