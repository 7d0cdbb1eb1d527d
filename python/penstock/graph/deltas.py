"""Matches of a pattern over edges that come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pyarrow as pa

from penstock.errors import ConfigError, SchemaError
from penstock.graph.edges import Edges, Ids, sources

__all__ = ["Deltas"]


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
    Relations are sets: an edge that comes though it is there, or goes though it is not, changes nothing, so a batch
    that is replayed gives no match twice. The edges live in this process; a Spark stream feeds it in ``foreachBatch``:
    ``deltas.update({"e": df})``. Time of an epoch: the search from its changed edges, and a copy of the lists of their
    nodes; memory: the edges twice, and the matches of one epoch.

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

    @property
    def schema(self) -> pa.Schema:
        """A column per variable of the head, and ``diff``: 1 for a match that came, -1 for one that went."""
        return pa.schema(self._handle.schema)

    def update(self, added: Mapping[str, Edges] | None = None, removed: Mapping[str, Edges] | None = None) -> pa.Table:
        """Run one epoch.

        Parameters
        ----------
        added, removed : mapping of str to edges or Spark DataFrame, optional
            Edges that come and that go, by relation; what comes and goes in one epoch adds up.

        Returns
        -------
        pyarrow.Table
            Exactly the matches that changed: those that went, then those that came, once each.

        Raises
        ------
        PatternError, SchemaError, ConfigError
            For a relation that the pattern does not have, and for what is no edge. Nothing has changed then.
        """
        try:
            for edges, times in ((added, 1), (removed, -1)):
                self._note(edges or {}, times)
        except BaseException:
            self._handle.discard()
            raise
        return pa.Table.from_batches([pa.record_batch(batch) for batch in self._handle.commit()], schema=self.schema)

    def _note(self, relations: Mapping[str, Edges], times: int) -> None:
        _, opened = sources(
            {name: _local(edges) for name, edges in relations.items()},
            None,
            "text" if self._ids == "text" else "number",
        )
        for source in opened:
            if source.batches != () and (source.ids == "text") != (self._ids == "text"):
                raise SchemaError(
                    f"relation {source.name!r} has {'text' if source.ids == 'text' else 'numbers'} for nodes, which is"
                    f" not what these deltas were made for; say ids= accordingly"
                )
            for batch in source.cast(self._ids):
                self._handle.change(source.name, batch, times)


def _local(edges: Any) -> Edges:
    if any(kind.__module__.startswith("pyspark.sql") for kind in type(edges).__mro__):
        from penstock.spark.collect import to_table
        from penstock.spark.guard import require_classic

        require_classic(edges, "penstock.graph.Deltas")
        return to_table(edges)
    return edges
