"""Matches of a pattern over edges that come and go.

Owns: how changes of edges reach the native deltas, from this process or from batches of a Spark stream. An epoch is fed
by one native call, which asks for its edges, so that an interrupt, another thread or an error leaves none of half an
epoch behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pyarrow as pa

from penstock._coroutines import require_done, require_plain
from penstock._options import whole
from penstock._resume import Given
from penstock.errors import ConfigError, PatternError, SchemaError, StateError
from penstock.graph._edges import Edges, Ids, Source, check_columns, is_spark, sources
from penstock.graph._options import counted, pattern_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Changes", "Deltas"]

#: Relation, edges, and how often they come (above 0) or go (below); None: their third column says it.
_Noted: TypeAlias = tuple[str, pa.RecordBatch, int | None]


class Changes(Iterator[pa.RecordBatch]):
    """The matches that an epoch changed, batch by batch: those that went, then those that came, once each.

    They are searched for as they are asked for, so memory holds a batch of them, however many there are. An interrupt
    loses none, wherever it lands. Once another epoch has begun, asking for more is a `StateError`.

    Attributes
    ----------
    schema : pyarrow.Schema
        A column per variable of the head, and ``diff``: 1 for a match that came, -1 for one that went.
    replayed : bool
        Whether the epoch had been fed before, and is only given again.
    """

    if TYPE_CHECKING:
        schema: pa.Schema
        replayed: bool

        def __next__(self) -> pa.RecordBatch: ...

    else:
        __slots__ = ("__next__", "__weakref__", "replayed", "schema")

    def __init__(self, given: tuple[Any, bool], schema: pa.Schema) -> None:
        from penstock import _native

        handle, self.replayed = given
        self.schema = schema
        self.__next__ = _native.Handover(Given(handle.next, pa.record_batch).fill, StateError).__next__  # type: ignore[method-assign]

    def to_table(self) -> pa.Table:
        """Collect what is left: memory then holds all of it."""
        return pa.Table.from_batches(self, schema=self.schema)


class Deltas:
    """Turns changes of edges into changes of matches, epoch by epoch.

    Parameters
    ----------
    pattern : str
        As for `penstock.graph.match`.
    ids : {"number", "text", "unsigned"}, default "number"
        What nodes are: int64, text or uint64.

    Raises
    ------
    PatternError, ConfigError
        When the pattern is none, and for other `ids`.

    Notes
    -----
    Relations are sets: an edge that comes though it is there, or goes though it is not, changes nothing. The edges
    live in this process; a Spark stream feeds it by `foreach_batch`. What an epoch changed is held until the next one
    is fed, so rows that were lost behind it (an interrupt, a sink that failed) are had once more: by `changes`, or by
    its number, when it has one. Threads that feed one object wait for each other. Time of an epoch: the search from its
    changed edges, and a copy of the lists of their nodes. Memory: the edges twice (4 bytes each), what the last epoch
    changed, and about 100 bytes for every node ever seen, 50 to 100 more for each further relation, and its text where
    nodes are texts: nodes keep their number when their edges are gone, so make the deltas anew where nodes come and go
    without end.

    Examples
    --------
    >>> import pyarrow as pa
    >>> deltas = Deltas("tri(a, b, c) :- e(a, b), e(a, c), e(b, c)")
    >>> deltas.update({"e": pa.table({"src": [1, 1], "dst": [2, 3]})}).num_rows
    0
    >>> deltas.update({"e": pa.table({"src": [2], "dst": [3]})}).to_pylist()
    [{'a': 1, 'b': 2, 'c': 3, 'diff': 1}]
    >>> deltas.update(removed={"e": pa.table({"src": [1], "dst": [3]})}).to_pylist()
    [{'a': 1, 'b': 2, 'c': 3, 'diff': -1}]
    """

    def __init__(self, pattern: str, ids: Literal["number", "text", "unsigned"] = "number") -> None:
        from penstock import _native

        pattern_text(pattern)
        if ids not in ("number", "text", "unsigned"):
            raise ConfigError(f'ids={ids!r} must be "number", "text" or "unsigned"')
        self._ids: Ids = "signed" if ids == "number" else ids
        self._handle = _native.GraphDeltas(pattern, self._ids)
        self._relations, _ = _native.graph_pattern(pattern)

    @property
    def schema(self) -> pa.Schema:
        """A column per variable of the head, and ``diff``: 1 for a match that came, -1 for one that went."""
        return pa.schema(self._handle.schema)

    @property
    def epoch(self) -> int | None:
        """The number of the epoch that was fed last, if it was given one."""
        number: int | None = self._handle.epoch
        return number

    @property
    def epochs(self) -> int:
        """How many epochs have been fed, so also whether one that was interrupted has."""
        return int(self._handle.begun)

    def update(
        self,
        added: Mapping[str, Edges | DataFrame] | None = None,
        removed: Mapping[str, Edges | DataFrame] | None = None,
        *,
        epoch: int | None = None,
        source: str | None = None,
    ) -> pa.Table:
        """Run one epoch and collect what it changed.

        Parameters, errors and order of the rows are those of `stream`, which holds a batch instead of all. When it is
        interrupted, `epochs` tells whether the epoch has been fed, and `changes` has its rows.

        Returns
        -------
        pyarrow.Table
            Exactly the matches that changed.
        """
        return self.stream(added, removed, epoch=epoch, source=source).to_table()

    def changes(self, batch_rows: int = 8192) -> Changes:
        """Give once more what the epoch fed last changed, whether or not it has a number.

        Parameters
        ----------
        batch_rows : int, default 8192
            Rows per batch.

        Returns
        -------
        Changes
            From the start, in the same order; none before the first epoch.

        Examples
        --------
        >>> import pyarrow as pa
        >>> deltas = Deltas("back(x, y) :- e(x, y), e(y, x)")
        >>> deltas.update({"e": pa.table({"src": [1, 2], "dst": [2, 1]})}).num_rows
        2
        >>> deltas.changes().to_table().num_rows
        2
        """
        counted("batch_rows", batch_rows, 1 << 24)
        return Changes((self._handle.changes(batch_rows), True), self.schema)

    def stream(
        self,
        added: Mapping[str, Edges | DataFrame] | None = None,
        removed: Mapping[str, Edges | DataFrame] | None = None,
        *,
        epoch: int | None = None,
        source: str | None = None,
        batch_rows: int = 8192,
    ) -> Changes:
        """Run one epoch and give what it changed batch by batch.

        Parameters
        ----------
        added, removed : mapping of str to edges or Spark DataFrame, optional
            Edges that come and that go, by relation; what comes and goes in one epoch adds up.
        epoch : int, optional
            Its number, such as Spark's batch id: from 0, or from any once edges were fed without a number, and one by
            one from there. The number of the epoch fed last gives its rows again; the edges are not looked at then.
        source : str, optional
            Who gives the numbers, such as the id of a Spark query: all numbers of one object have to come from the
            same. An epoch that is asked for again without edges may be asked for by anybody.
        batch_rows : int, default 8192
            Rows per batch.

        Returns
        -------
        Changes
            Exactly the matches that changed: those that went, then those that came, once each.

        Raises
        ------
        PatternError, SchemaError, ConfigError
            For a relation that the pattern does not have, and for what is no edge. Nothing has changed then.
        StateLost
            For an epoch that is over, one before which others are missing, one from another source (two streams that
            count for themselves cannot feed one object), or the last one with edges of other relations. Nothing has
            changed then.
        StateError
            When the edges, as they are read, feed this object. Other threads wait until an epoch has been fed.
        """
        counted("batch_rows", batch_rows, 1 << 24)
        for edges in (added, removed):
            if edges is not None and not isinstance(edges, Mapping):
                raise ConfigError(f"edges that come or go are a dict of name to edges, not {type(edges).__name__}")
        if source is not None and (not isinstance(source, str) or epoch is None):
            raise ConfigError(f"source={source!r} must be a text beside an epoch=, or None")
        given = {name for edges in (added, removed) for name in edges or ()}
        for name in given:
            if name not in self._relations:
                raise PatternError(f'no relation "{name}"; there are {", ".join(self._relations)}')
        noted = (self._noted(edges or {}, times) for edges, times in ((added, 1), (removed, -1)))
        return self._fed(epoch, source, sorted(given), chain.from_iterable(noted), batch_rows)

    def foreach_batch(
        self,
        sink: Callable[[Changes, int], object],
        relation: str | None = None,
        *,
        columns: Sequence[str] | None = None,
        diff: str | None = None,
    ) -> Callable[[Any, int], None]:
        """Make the function that a Spark stream of edges calls: ``stream.writeStream.foreachBatch(...)``.

        Parameters
        ----------
        sink : callable
            Called with the changes and the batch id. When it fails, the query fails; started again from its checkpoint
            with the same object, it gets the same changes. A sink that notes the id writes them exactly once.
        relation : str, optional
            Whose edges they are; default the only one of the pattern.
        columns : pair of str, optional
            Where edges begin and end; default the first two columns other than `diff`.
        diff : str, optional
            A column of whole numbers: how often an edge comes, or goes where it is negative. Those of one edge in a
            batch add up, and the sign of the sum decides: so 2 and -1 let it come, 1 and -1 do neither. A null, a NaN
            or a fraction fails the batch. Default: all come.

        Returns
        -------
        callable
            ``(DataFrame, batch id) -> None``.

        Raises
        ------
        ConfigError
            When the pattern has several relations and none is named, or not the one that is; for a sink that is no
            function, or gives a coroutine, which nobody awaits; when `diff` is one of `columns`.

        Notes
        -----
        The function raises `StateLost` for batches of another query than before, and of the same one behind a new
        checkpoint, which Spark takes for another; and `SchemaError` for a `diff` that is none.
        """
        if not callable(sink):
            raise ConfigError(f"sink={sink!r} must be a function of (Changes, batch id)")
        require_plain(sink, "sink", takes="changes, batch_id", ignored=True)
        known = ", ".join(self._relations)
        if relation is None:
            if len(self._relations) > 1:
                raise ConfigError(f"relation=None, but the pattern has {known}; name the one that is fed")
            relation = self._relations[0]
        if relation not in self._relations:
            raise ConfigError(f"relation={relation!r} is none of the pattern, which has {known}")
        if diff is not None and not isinstance(diff, str):
            raise ConfigError(f"diff={diff!r} must be the name of a column, or None")
        check_columns(columns)
        if columns is not None and diff in columns:
            raise ConfigError(f"columns={columns!r} has {diff!r}, which says as diff= what becomes of an edge")

        def run(batch: Any, epoch: int) -> None:
            from penstock.spark.graph import edge_source, query_of

            edges = edge_source(relation, batch, columns, diff)
            noted = self._cast(edges, 1 if diff is None else None)
            require_done(sink(self._fed(epoch, query_of(batch), [relation], noted, 8192), epoch), "sink")

        return run

    def _fed(
        self,
        epoch: int | None,
        source: str | None,
        relations: list[str],
        noted: Iterable[_Noted],
        batch_rows: int,
    ) -> Changes:
        number = None if epoch is None else whole(epoch, 0, (1 << 63) - 1)
        if epoch is not None and number is None:
            raise ConfigError(f"epoch={epoch!r} must be an int of 0 to 2**63 - 1, such as Spark's batch id")
        return Changes(self._handle.feed(number, source, relations, noted, batch_rows), self.schema)

    def _noted(self, relations: Mapping[str, Edges | DataFrame], times: int) -> Iterator[_Noted]:
        _, opened = sources(
            {name: _local(name, edges) for name, edges in relations.items()},
            None,
            "text" if self._ids == "text" else "number",
        )
        for source in opened:
            yield from self._cast(source, times)

    def _cast(self, source: Source, times: int | None) -> Iterator[_Noted]:
        if source.ids is not None and (source.ids == "text") != (self._ids == "text"):
            raise SchemaError(
                f"relation {source.name!r} has {'text' if source.ids == 'text' else 'numbers'} for nodes, which is"
                f" not what these deltas were made for; say ids= accordingly"
            )
        for batch in source.cast(self._ids):
            yield source.name, batch, times


def _local(name: str, edges: Edges | DataFrame) -> Edges:
    # Of tables and of frames; who names its columns otherwise is not looked at.
    named = (getattr(getattr(edges, "schema", None), "names", None), getattr(edges, "columns", None))
    columns = next((list(names) for names in named if isinstance(names, Collection)), [])
    if any(isinstance(name, str) and name == "diff" for name in columns[2:]):
        raise SchemaError(
            f"relation {name!r} has a column 'diff', which is not looked at here: give edges that go as removed=, or"
            " leave it out"
        )
    if is_spark(edges):
        from penstock.spark.graph import edge_batches

        return edge_batches(name, edges, None)
    return edges
