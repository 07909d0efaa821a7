"""Whose turn is next: the only place that decides between the owners of waiting work."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from peftkit_server.refusals import RequestError

Share = Callable[[int], int]
"""Returns the part of a common limit that one owner may use."""


def whole(total: int) -> int:
    """Return a limit: the share of a single owner."""
    return total


class Owned(Protocol):
    """Work of one owner."""

    @property
    def owner(self) -> str:
        """Owner of the request that the work belongs to."""


T = TypeVar("T", bound=Owned)


class Schedule(Generic[T]):
    """Waiting work: a queue per owner; the next owner is the one that has waited for longest.

    An owner with any number of items delays the next item of another owner by one item at most.
    Not thread-safe: its users hold a lock.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[T]] = {}
        self._last_turns = Counter[str]()  # of owners, in turns of this schedule
        self._number = self._num_turns = 0

    def __len__(self) -> int:  # needs no lock
        return self._number

    def __iter__(self) -> Iterator[T]:
        return (item for queue in self._queues.values() for item in queue)

    def put(self, item: T) -> None:
        """Add an item at the end of its owner's queue."""
        self._queues.setdefault(item.owner, deque()).append(item)
        self._number += 1

    def take(self, fits: Callable[[T], bool] = lambda item: True) -> T | None:
        """Remove and return the first item of the next owner whose first item fits.

        No item overtakes a large one of its owner.
        """
        for owner in sorted(self._queues, key=lambda owner: self._last_turns[owner]):
            if fits(item := self._queues[owner][0]):
                self._num_turns += 1
                self._last_turns[owner] = self._num_turns
                self._queues[owner].popleft()
                self._number -= 1
                if not self._queues[owner]:
                    del self._queues[owner]
                return item
        return None

    def drop(self, is_dropped: Callable[[T], bool]) -> None:
        """Remove the items for which a condition holds."""
        for owner, queue in [*self._queues.items()]:
            left = deque(item for item in queue if not is_dropped(item))
            self._number -= len(queue) - len(left)
            self._queues[owner] = left
            if not left:
                del self._queues[owner]


class Call(NamedTuple):
    """A function of an owner, and the future of its result."""

    owner: str
    function: Callable[[], Any]
    future: Future[Any]

    def run(self) -> Callable[[], None]:
        """Call the function unless it is cancelled; return a function that sets the result."""
        if not self.future.set_running_or_notify_cancel():
            return lambda: None
        try:
            result = self.function()
        except BaseException as problem:
            return partial(self.future.set_exception, problem)
        return partial(self.future.set_result, result)


def check_room(waiting: int, number: int, most: int, kind: str, code: str = "queue_full") -> None:
    """Raise unless `number` further items of a kind may wait.

    Raises:
        RequestError: 429: more than `most` would wait.
    """
    if waiting + number > most:
        raise RequestError(
            "too many requests wait.",
            found=f"{waiting} {kind} wait, and no more may.",
            fix="Try again later.",
            status=429,
            code=code,
        )


def check_share(held: int, number: int, most: int, kind: str) -> None:
    """Raise unless an owner may have `number` further items.

    Args:
        held: The owner's items that wait or run.

    Raises:
        RequestError: 429: the owner would have more than `most`.
    """
    if held + number > most:
        raise RequestError(
            "too many requests of this key wait.",
            found=f"{held} of its {kind} wait or run; the server's limit is key_share.",
            fix="Try again when some have ended.",
            status=429,
            code="key_share",
        )
