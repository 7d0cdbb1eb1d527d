"""Matches as they are found."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import pyarrow as pa

from penstock.graph.options import Progress

__all__ = ["Matches"]

#: Seconds between two looks at how far it is.
_LOOK_S = 0.2


class Matches(Iterator[pa.RecordBatch]):
    """Matches of a pattern, batch by batch; threads search while nobody asks, as far as the window lets them.

    Memory holds the index and a few batches, however many matches there are. Closing it, or leaving its ``with``, stops
    the threads; so does dropping it.

    Attributes
    ----------
    schema : pyarrow.Schema
        One column per variable of the head.
    stats : dict
        ``count``, ``prefixes``, ``admitted_maximum`` and ``batches_maximum``; filled when the end has come.

    Examples
    --------
    >>> import pyarrow as pa
    >>> import penstock as pk
    >>> with pk.graph.cliques(pa.table({"a": [1, 1, 2], "b": [2, 3, 3]}), 3) as found:
    ...     found.to_table().to_pylist()
    [{'a1': 1, 'a2': 2, 'a3': 3}]
    """

    def __init__(self, search: Any, schema: pa.Schema, progress: Progress | None) -> None:
        self.schema = schema
        self.stats: dict[str, int] = {}
        self._search = search
        self._progress = progress
        self._look = time.monotonic()

    def __next__(self) -> pa.RecordBatch:
        while self._search is not None:
            batch, end = self._search.next(_LOOK_S if self._progress else None)
            self._tell(end is not None)
            if end is not None:
                self.stats = end
                self.close()
            elif batch is not None:
                return pa.record_batch(batch)
        raise StopIteration

    def _tell(self, last: bool) -> None:
        now = time.monotonic()
        if self._progress is not None and (last or now - self._look >= _LOOK_S):
            self._look = now
            self._progress(*self._search.progress())

    def to_table(self) -> pa.Table:
        """Collect what is left: memory then holds all of it."""
        return pa.Table.from_batches(self, schema=self.schema)

    def close(self) -> None:
        """Stop the threads; there are no more rows then."""
        search, self._search = self._search, None
        if search is not None:
            search.close()

    def __enter__(self) -> Matches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
