"""Bounded scopes: their options, lazy expansions, and the stream that comes out.

Owns the loop that draws from the iterators of a user's function. Invariant: never more is drawn than was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from penstock._bounds import OnFailure, parse_bounds
from penstock.dataflow._functions import failed, name_of
from penstock.dataflow._scope import Scope
from penstock.dataflow._stream import Stream
from penstock.errors import BlockError, GraphError

if TYPE_CHECKING:
    from penstock import _native

__all__ = ["Bounded", "BoundedStats", "Failure", "bounded"]

X = TypeVar("X")


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
        What was raised.
    """

    item: Any
    drawn: int
    error: Exception


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


class Bounded(Stream[X]):
    """What comes out of a bounded scope; made by `Stream.bounded`. A stream as any other, with figures."""

    __slots__ = ("_gate", "failures")

    def __init__(
        self,
        native: _native.DataflowStream,
        scope: Scope,
        gate: _native.DataflowGate,
        failures: list[Failure],
    ) -> None:
        super().__init__(native, scope)
        self._gate = gate
        #: Items whose expansion raised on this worker, where ``on_failure="skip"``.
        self.failures = failures

    def stats(self) -> BoundedStats:
        """The figures of the scope on this worker, as of now. See `Stream.bounded` for an example."""
        return BoundedStats(**self._gate.stats())


def bounded(
    stream: Stream[Any],
    body: Callable[[Stream[Any]], Stream[X]],
    *,
    batches: int | None,
    batch_size: int | None,
    memory: int | str | None,
    on_failure: OnFailure,
    expand: Callable[[Any], Iterable[Any]] | None,
    name: str,
) -> Bounded[X]:
    """As `Stream.bounded`."""
    bounds = parse_bounds(batches, batch_size, memory, on_failure)
    failures: list[Failure] = []
    begin = None if expand is None else _beginner(expand, failures if bounds.on_failure == "skip" else None)
    scope, items, gate = stream._native.bounded(name, bounds.batches, bounds.batch_size, bounds.memory, begin)
    out = body(Stream(items, Scope(scope)))
    if not isinstance(out, Stream):
        raise GraphError(f"the body of a bounded scope gives back a stream, got {type(out).__name__}")
    return Bounded(out._native.close_bounded(gate, stream.scope._native), stream.scope, gate, failures)


def _beginner(
    expand: Callable[[Any], Iterable[Any]], failures: list[Failure] | None
) -> Callable[[Any], tuple[Callable[[int], tuple[list[Any], int]], int]]:
    step = f"bounded {name_of(expand)}"

    def begin(block: Any) -> tuple[Callable[[int], tuple[list[Any], int]], int]:
        if not isinstance(block, list):
            raise BlockError(f"{step} expands the items of a list and got a {type(block).__name__}")
        return _Expansion(step, expand, block, failures).draw, len(block)

    return begin


class _Expansion:
    """The items of one list, each through a function that gives an iterable, on demand."""

    def __init__(
        self, step: str, expand: Callable[[Any], Iterable[Any]], items: list[Any], failures: list[Failure] | None
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
            before = len(made)
            try:
                if self._live is None:
                    self._next += 1
                    self._drawn = 0
                    self._live = iter(self._expand(self._items[self._next - 1]))
                made.extend(islice(self._live, room - before))
                self._drawn += len(made) - before
                if len(made) < room:
                    self._live = None
            except Exception as error:
                self._live = None
                item, drawn = self._items[self._next - 1], self._drawn + len(made) - before
                if self._failures is None:
                    raised = failed(self._step, self._expand, error, item, known=True)
                    raise raised from (None if raised is error else error)
                self._failures.append(Failure(item, drawn, error))
        return made, len(self._items) - self._next + (self._live is not None)
