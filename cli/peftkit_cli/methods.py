"""The table of methods: what each would train on a model, and what can be done with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peftkit.errors import PeftkitError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class MethodFacts:
    """A method with its defaults, on one model.

    Attributes:
        num_trainable: What it would train; None where it does not suit the model.
        merges: Whether weights can hold it. fresh_is_base: Before training.
        four_bit: Whether the base may be in 4 bits: it is called, never looked into.
        files: Who reads its files.
        remark: Why not, for every no.
    """

    method: str
    num_trainable: int | None
    merges: bool
    fresh_is_base: bool
    four_bit: bool
    files: str
    remark: str


def method_facts(model: nn.Module) -> Iterator[MethodFacts]:
    """Put every method on a model without weights, one after the other, and yield what it is."""
    from peftkit.adapter import attach
    from peftkit.methods.table import METHODS

    for name, kind in METHODS.items():
        method, num_trainable = kind(type=name), None
        remarks = [method.unmergeable, method.fresh_changes]
        try:
            adapter = attach(model, method, fresh=False)
        except PeftkitError as error:
            remarks.insert(0, _why(str(error)))
        else:
            num_trainable = adapter.num_trainable
            adapter.detach()
        yield MethodFacts(
            method=name,
            num_trainable=num_trainable,
            merges=not method.unmergeable,
            fresh_is_base=not method.fresh_changes,
            four_bit=True,
            files=f"peftkit, {method.files}" if method.files else "peftkit",
            remark="; ".join(filter(None, remarks)),
        )


def _why(told: str) -> str:
    """Return the first line of an error, where it is one of the model and not of its skeleton."""
    # a prefix is measured by running the model, and some do not run without weights
    if "Its cache is of another kind" in told:
        return "only the weights tell whether it suits"
    return told.splitlines()[0].rstrip(".")


COLUMNS = ("method", "trains", "merges", "starts as the base", "4-bit base", "read by", "")


def method_rows(facts: list[MethodFacts], num_parameters: int) -> list[tuple[str, ...]]:
    """Return the table's rows as text."""
    from peftkit.report.figures import count

    return [
        (
            one.method,
            "-"
            if one.num_trainable is None
            else f"{count(one.num_trainable)} ({one.num_trainable / num_parameters:.2%})",
            *(("no", "yes")[told] for told in (one.merges, one.fresh_is_base, one.four_bit)),
            one.files,
            one.remark,
        )
        for one in facts
    ]
