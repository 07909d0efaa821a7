"""Shares of several API keys in the batch and in the queue of prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from peftkit.inference.engine import Limits
from peftkit_server.generation import Generation
from peftkit_server.refusals import RequestError

Share = Callable[[int], int]
"""Returns the part of a common limit that one owner may use."""


def check_owner(new: Sequence[Generation], held: Iterable[Generation], most: int) -> None:
    """Raise if an owner would have too many completions that wait or run.

    Args:
        new: Completions of one request.
        held: Completions of all owners that wait or run.
        most: Most completions of one owner.

    Raises:
        RequestError: 429: the owner would have more than `most`.
    """
    owner = new[0].owner
    number = sum(each.owner == owner and not (each.is_done or each.is_cancelled) for each in held)
    if number + len(new) > most:
        raise RequestError(
            "too many requests of this key wait.",
            found=f"{number} of its prompts wait or run; the server's limit is key_share.",
            fix="Try again when some have ended.",
            status=429,
            code="key_share",
        )


def admissible(
    waiting: Sequence[Generation], active: Sequence[Generation], limits: Limits, share: Share
) -> tuple[list[Generation], list[Generation]]:
    """Return the waiting completions that may run now, and the others.

    Each owner has a share of the rows of the batch and of the tokens in memory. A completion that
    exceeds the share of tokens alone runs if its owner has no other.
    """
    waiting = [each for each in waiting if not each.is_cancelled]
    rows, tokens = share(limits.rows), limits.tokens
    if rows == limits.rows:  # one owner
        return [*waiting], []
    most_tokens = None if tokens is None else share(tokens)
    held, held_tokens = Counter[str](), Counter[str]()
    for each in active:
        held[each.owner] += 1
        held_tokens[each.owner] += each.num_tokens
    admitted, rest = [], []
    for each in waiting:
        owner, total = each.owner, held_tokens[each.owner] + each.num_tokens
        has_memory = most_tokens is None or total <= most_tokens or not held[owner]
        if held[owner] < rows and has_memory:
            admitted.append(each)
            held[owner] += 1
            held_tokens[owner] = total
        else:
            rest.append(each)
    return admitted, rest
