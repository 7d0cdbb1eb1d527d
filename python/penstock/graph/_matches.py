"""Matches as they are found."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock._resume import caught
from penstock.errors import GraphError
from penstock.graph._options import Progress

if TYPE_CHECKING:
    from penstock._native import Handover

__all__ = ["Counted", "Matches"]

#: Seconds between two looks at how far it is.
_LOOK_S = 0.2


@dataclass(frozen=True)
class Counted:
    """What a search has counted.

    Attributes
    ----------
    count : int
        Matches.
    prefixes : int
        Values of the first two attributes that were handed out.
    admitted_maximum : int
        Most of them that were admitted and unfinished at once, as measured.
    batches_maximum : int
        Most units of them that were.
    """

    count: int
    prefixes: int
    admitted_maximum: int
    batches_maximum: int


class _Found:
    """Fills from a native search; see `penstock._resume`."""

    def __init__(self, search: Any, progress: Progress | None) -> None:
        self.stats: Counted | None = None
        self._search = search
        self._progress = progress
        self._look = time.monotonic()
        self._box: list[Any] = []
        #: What was given as which number, and the box that it came from.
        self._out: tuple[int, list[Any], Any] = (-1, [], None)

    def fill(self, taken: int) -> list[Any] | None:
        """The next batch, in a list."""
        serial, made, box = self._out
        if serial == taken:
            return made
        if self._box is box:
            self._box = []
        while (search := self._search) is not None:
            if not self._box:
                caught(self._box, search.next, _LOOK_S if self._progress else None)
            batch, end = self._box[0]
            self._tell(search, end is not None)
            if end is not None:
                self.stats = Counted(**end)
                self.close()
            elif batch is None:
                self._box = []
            else:
                made = [pa.record_batch(batch)]
                self._out = (taken, made, self._box)
                return made
        return None

    def _tell(self, search: Any, last: bool) -> None:
        now = time.monotonic()
        if self._progress is not None and (last or now - self._look >= _LOOK_S):
            self._look = now
            self._progress(*search.progress())

    def close(self) -> None:
        """Stop the threads."""
        search = self._search
        if search is not None:
            search.close()
        self._search = None


class Matches(Iterator[pa.RecordBatch]):
    """Matches of a pattern, batch by batch; threads search while nobody asks, as far as the window lets them.

    Memory holds the index and a few batches, however many matches there are. Closing it, or leaving its ``with``, stops
    the threads; so does dropping it. An interrupt loses none, wherever it lands.

    Attributes
    ----------
    schema : pyarrow.Schema
        One column per variable of the head.

    Examples
    --------
    >>> import pyarrow as pa
    >>> import penstock as pk
    >>> with pk.graph.cliques(pa.table({"a": [1, 1, 2], "b": [2, 3, 3]}), 3) as found:
    ...     found.to_table().to_pylist()
    [{'a1': 1, 'a2': 2, 'a3': 3}]
    """

    if TYPE_CHECKING:
        schema: pa.Schema

        def __next__(self) -> pa.RecordBatch: ...

    else:
        __slots__ = ("__next__", "__weakref__", "_found", "_results", "schema")

    _found: _Found
    _results: Handover

    def __init__(self, search: Any, schema: pa.Schema, progress: Progress | None) -> None:
        from penstock import _native

        self.schema = schema
        self._found = _Found(search, progress)
        self._results = _native.Handover(self._found.fill, GraphError)
        self.__next__ = self._results.__next__  # type: ignore[method-assign]

    def stats(self) -> Counted | None:
        """What was counted; None until the end has come."""
        return self._found.stats

    def to_table(self) -> pa.Table:
        """Collect what is left: memory then holds all of it."""
        return pa.Table.from_batches(self, schema=self.schema)

    def close(self) -> None:
        """Stop the threads; there are no more rows then."""
        self._found.close()
        self._results.clear()

    def __enter__(self) -> Matches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
