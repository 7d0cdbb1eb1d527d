"""Matches of a pattern over edges that come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from penstock._coroutines import require_done, require_plain
from penstock._resume import Given
from penstock.errors import ConfigError, SchemaError, StateError
from penstock.graph._edges import Edges, Ids, check_columns, is_spark, sources

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Changes", "Deltas"]


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

    def __init__(self, handle: Any, schema: pa.Schema, replayed: bool) -> None:
        from penstock import _native

        self.schema = schema
        self.replayed = replayed
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
    PatternError
        When the pattern is none.

    Notes
    -----
    Relations are sets: an edge that comes though it is there, or goes though it is not, changes nothing. The edges
    live in this process; a Spark stream feeds it by `foreach_batch`. What an epoch changed is held until the next one
    is fed, so an epoch with a number is given again, the same, when its rows were lost behind it. Time of an epoch: the
    search from its changed edges, and a copy of the lists of their nodes; memory: the edges twice, and that copy.

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

    def update(
        self,
        added: Mapping[str, Edges | DataFrame] | None = None,
        removed: Mapping[str, Edges | DataFrame] | None = None,
        *,
        epoch: int | None = None,
    ) -> pa.Table:
        """Run one epoch and collect what it changed.

        Parameters, errors and order of the rows are those of `stream`, which holds a batch instead of all.

        Returns
        -------
        pyarrow.Table
            Exactly the matches that changed.
        """
        return self.stream(added, removed, epoch=epoch).to_table()

    def stream(
        self,
        added: Mapping[str, Edges | DataFrame] | None = None,
        removed: Mapping[str, Edges | DataFrame] | None = None,
        *,
        epoch: int | None = None,
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
            For an epoch that is over, one before which others are missing, or the last one with edges of other
            relations (two streams that count for themselves cannot feed one object). Nothing has changed then.
        """
        from penstock.graph._options import whole

        whole("batch_rows", batch_rows, 1 << 24)
        for edges in (added, removed):
            if edges is not None and not isinstance(edges, Mapping):
                raise ConfigError(f"edges that come or go are a dict of name to edges, not {type(edges).__name__}")
        relations = sorted({str(name) for edges in (added, removed) for name in edges or ()})
        if epoch is not None:
            if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch < 1 << 63:
                raise ConfigError(f"epoch={epoch!r} must be an int of 0 to 2**63 - 1, such as Spark's batch id")
            if self._handle.expect(epoch, relations):
                return Changes(self._handle.changes(batch_rows), self.schema, True)
        try:
            for edges, times in ((added, 1), (removed, -1)):
                self._note(edges or {}, times)
            self._handle.begin(epoch, relations)
        except BaseException:
            self._handle.discard()
            raise
        return Changes(self._handle.changes(batch_rows), self.schema, False)

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
            A column of numbers: edges with a positive one come, with a negative one go, and with 0 do neither; a null
            fails the batch. Default: all come.

        Returns
        -------
        callable
            ``(DataFrame, batch id) -> None``.

        Raises
        ------
        ConfigError
            When the pattern has several relations and none is named, or not the one that is; for a sink that is no
            function, or gives a coroutine, which nobody awaits; when `diff` is one of `columns`.
        """
        if not callable(sink):
            raise ConfigError(f"sink={sink!r} must be a function of (Changes, batch id)")
        require_plain(sink, "sink", takes="changes, batch_id")
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
            from penstock.spark.graph import edge_batches

            added = {relation: edge_batches(relation, batch, columns, diff)}
            removed = {} if diff is None else {relation: edge_batches(relation, batch, columns, diff, goes=True)}
            require_done(sink(self.stream(added, removed, epoch=epoch), epoch), "sink")

        return run

    def _note(self, relations: Mapping[str, Edges | DataFrame], times: int) -> None:
        _, opened = sources(
            {name: _local(name, edges) for name, edges in relations.items()},
            None,
            "text" if self._ids == "text" else "number",
        )
        for source in opened:
            if source.ids is not None and (source.ids == "text") != (self._ids == "text"):
                raise SchemaError(
                    f"relation {source.name!r} has {'text' if source.ids == 'text' else 'numbers'} for nodes, which is"
                    f" not what these deltas were made for; say ids= accordingly"
                )
            for batch in source.cast(self._ids):
                self._handle.change(source.name, batch, times)


def _local(name: str, edges: Edges | DataFrame) -> Edges:
    if is_spark(edges):
        from penstock.spark.graph import edge_batches

        return edge_batches(name, edges, None)
    return edges
