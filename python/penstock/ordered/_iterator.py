"""The iterator that `ordered_map` and `Pipeline.run` return."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.errors import OrderedError
from penstock.ordered._chunk import Failure
from penstock.ordered._driver import Driver
from penstock.ordered._options import Stats

if TYPE_CHECKING:
    from typing_extensions import Self

    from penstock._native import Handover

__all__ = ["OrderedIterator"]


X = TypeVar("X")


class OrderedIterator(Generic[X]):
    """Results of type X in the order of the input. Made by `ordered_map` and `Pipeline.run`.

    An iterator and a context manager. An exception of a function is raised where its result would have come; the next
    call goes on with the item behind it. After an interrupt (Ctrl-C) it goes on where it was, with every result once
    and in order; where it cannot, it raises `Interrupted` from then on. Close it (or leave the ``with``) to stop early.

    Examples
    --------
    >>> import penstock as pk
    >>> with pk.ordered_map(abs, [-1, 2, -3]) as results:
    ...     next(results)
    1
    """

    # A loop takes results from a native iterator over the lists that the driver gives, and so does `next` of this
    # object: a method in Python would cost each item more than the loop around it, and lose the one that it has in its
    # hand when an interrupt comes.
    if TYPE_CHECKING:

        def __next__(self) -> X: ...

    else:
        __slots__ = ("__next__", "__weakref__", "_driver", "_results")

    _driver: Driver
    _results: Handover

    def __init__(self, driver: Driver) -> None:
        from penstock import _native

        self._driver = driver
        self._results = _native.Handover(driver.fill, OrderedError, Failure)
        self.__next__ = self._results.__next__  # type: ignore[method-assign]

    def __iter__(self) -> Iterator[X]:
        return self._results

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the run: its threads and processes end, no further input is read, no further result comes.

        Functions that are under way are called for the rest of their chunk, and what they return is dropped. In worker
        processes they have a quarter of a second for that: then their process is killed, wherever they are.

        Examples
        --------
        >>> import itertools, penstock as pk
        >>> results = pk.ordered_map(abs, itertools.count())
        >>> results.close()
        >>> list(results)
        []
        """
        self._driver.quit()
        self._results.clear()
        self._driver.stop()

    def stats(self) -> Stats:
        """What the run has done so far, and how it does it.

        Examples
        --------
        >>> import penstock as pk
        >>> results = pk.ordered_map(abs, range(3), mode="inline")
        >>> list(results), results.stats().items_in, results.stats().mode
        ([0, 1, 2], 3, 'inline')
        """
        return self._driver.stats()

    def __reduce__(self) -> Any:
        raise TypeError("a running ordered iterator cannot be pickled: ship the function or the Pipeline")

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<ordered iterator: {stats.mode}, {stats.items_in} items read, {stats.in_flight} in flight>"
