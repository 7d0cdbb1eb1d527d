"""Bounded scopes: what they tell, and lazy expansions.

Owns the loop that draws from the iterators of a user's function, and what is kept of those that raise. Invariants:
never more is drawn than was asked for; what is kept of failures has an end, and holds nothing that was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import AsyncGeneratorType, CoroutineType
from typing import Any

from penstock._coroutines import require_plain, unawaited
from penstock.dataflow._functions import failed, name_of
from penstock.errors import BlockError

__all__ = ["BoundedStats", "Failure", "Failures", "beginner"]


@dataclass(frozen=True)
class Failure:
    """One item whose expansion raised.

    Attributes
    ----------
    item : Any
        What the function was called with.
    drawn : int
        How many items its iterator had given before.
    error : Exception
        What was raised, without its traceback: the frames would hold what was drawn.
    where : str
        File and line where it was raised.
    """

    item: Any
    drawn: int
    error: Exception
    where: str


class Failures:
    """The first items whose expansion raised, and how many there were."""

    #: As many as a `Flow` keeps.
    MOST = 100

    def __init__(self) -> None:
        self.kept: list[Failure] = []
        self.count = 0

    def add(self, item: Any, drawn: int, error: Exception) -> None:
        self.count += 1
        if len(self.kept) < self.MOST:
            self.kept.append(Failure(item, drawn, error, _without_frames(error)))


def _without_frames(error: BaseException) -> str:
    """Take the frames from an exception and those behind it; file and line where it was raised."""
    where, trace = "", error.__traceback__
    while trace is not None:
        where, trace = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}", trace.tb_next
    behind: list[BaseException | None] = [error]
    while behind:
        one = behind.pop()
        if one is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            behind += [one.__cause__, one.__context__]
    return where


@dataclass(frozen=True)
class BoundedStats:
    """The figures of a bounded scope on one worker.

    Attributes
    ----------
    batches, batch_size : int
        N and B, as they are now.
    phase : str
        ``fixed``, ``growing``, ``settled`` or ``short`` (of memory).
    raises, shrinks : int
        How often a bound was raised to stay, and how often one shrank.
    rate : float or None
        Items per second in the last period that was judged, where bounds are found.
    admitted, admitted_items : int
        Batches admitted so far, and their items.
    unfinished, unfinished_items : int
        Batches that are admitted and not finished, and their items.
    maximum, maximum_items : int
        The most there were of both.
    buffered : int
        Inputs that wait before the scope.
    holding : str or None
        The time of the batch that is unfinished for longest.
    """

    batches: int
    batch_size: int
    phase: str
    raises: int
    shrinks: int
    rate: float | None
    admitted: int
    admitted_items: int
    unfinished: int
    unfinished_items: int
    maximum: int
    maximum_items: int
    buffered: int
    holding: str | None


def beginner(
    expand: Callable[[Any], Iterable[Any]], failures: Failures | None
) -> Callable[[Any], tuple[Callable[[int], tuple[list[Any], int]], int]]:
    """What the native side calls with each list: it gives the expansion of that list, and how many items it has.

    `failures` takes the items whose expansion raised; None lets the first one stop the workers. A coroutine or async
    generator in place of an iterable is a fault of the step, and stops them in any case.

    Raises
    ------
    ConfigError
        For a coroutine function.
    """
    step = f"bounded {name_of(expand)}"
    require_plain(expand, step)

    def begin(block: Any) -> tuple[Callable[[int], tuple[list[Any], int]], int]:
        if not isinstance(block, list):
            raise BlockError(f"{step} expands the items of a list and got a {type(block).__name__}")
        return _Expansion(step, expand, block, failures).draw, len(block)

    return begin


def _unrun(made: Any) -> str:
    """What is wrong with a function that returned this in place of an iterable."""
    if made.__class__ is CoroutineType:
        return unawaited(made)
    return (
        f"returned an async generator ({made.__qualname__}), which is no iterable: collect it inside, as by asyncio.run"
    )


class _Expansion:
    """The items of one list, each through a function that gives an iterable, on demand."""

    def __init__(
        self, step: str, expand: Callable[[Any], Iterable[Any]], items: list[Any], failures: Failures | None
    ) -> None:
        self._step = step
        self._expand = expand
        self._items = items
        self._next = 0
        self._live: Iterator[Any] | None = None
        self._drawn = 0
        self._failures = failures

    def draw(self, room: int) -> tuple[list[Any], int]:
        """Up to `room` items, and how many inputs are left."""
        made: list[Any] = []
        while len(made) < room and (self._live is not None or self._next < len(self._items)):
            before, faulty = len(made), False
            try:
                if self._live is None:
                    self._next += 1
                    self._drawn = 0
                    found: Any = self._expand(self._items[self._next - 1])
                    if found.__class__ in (CoroutineType, AsyncGeneratorType):
                        faulty = True
                        raise TypeError(f"the function {_unrun(found)}")
                    self._live = iter(found)
                made.extend(islice(self._live, room - before))
                self._drawn += len(made) - before
                if len(made) < room:
                    self._live = None
            except Exception as error:
                self._live = None
                item, drawn = self._items[self._next - 1], self._drawn + len(made) - before
                if faulty or self._failures is None:
                    raised = failed(self._step, self._expand, error, item, known=True)
                    raise raised from (None if raised is error else error)
                self._failures.add(item, drawn, error)
        return made, len(self._items) - self._next + (self._live is not None)
