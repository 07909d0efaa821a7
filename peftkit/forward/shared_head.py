"""Two states of a model that share its head: whether they do, and how far apart they are.

Shapes: n tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from peftkit.errors import AdapterError
from peftkit.forward.loss import Head, find_head, unwrapped
from peftkit.kernels.divergence import Divergence, chunked_divergence, reference_divergence
from peftkit.model.places import unwrap_adapter


def changes_head(model: nn.Module) -> bool:
    """Return whether the adapter changes the model's head."""
    head = find_head(unwrapped(model))
    if head is None:
        return False
    return unwrap_adapter(head) is not head or any(p.requires_grad for p in head.parameters())


def check_shared_head(model: nn.Module, setting: str) -> None:
    """Check that the adapter does not change the head.

    Args:
        setting: What compares two states of the model: "the task distill".

    Raises:
        AdapterError: The adapter changes the head.
    """
    if changes_head(model):
        raise AdapterError(
            f"{setting} cannot train an adapter on the head.",
            found="Teacher and student share it; a tied head is also the token embedding.",
            fix="Remove the head from method.targets and method.train_fully, and remove "
            "method.token_rows and base.new_tokens.",
        )


def divergence_of(
    student: Tensor,
    teacher: Tensor,
    head: Head | None,
    divergence: Divergence,
    *,
    teacher_head: Head | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the divergence of each token (n,) in float32, and whether both choose the same token.

    Args:
        student, teacher: What the heads read (n, H); without a head, logits (n, V). Only the
            student gets a gradient.
        teacher_head: By default the student's.
    """
    if head is None:
        values = reference_divergence(student.float(), teacher.float(), divergence)
        return values, student.argmax(-1) == teacher.argmax(-1)
    return chunked_divergence(
        student,
        teacher,
        head,
        divergence,
        teacher_head=teacher_head,
        vocab_size=head.vocab_size,
        chunk_bytes=head.chunk_bytes,
    )
