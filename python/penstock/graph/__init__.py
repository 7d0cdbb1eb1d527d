"""Patterns in graphs: cliques and any join of binary relations, worst-case optimal.

`cliques` and `match` take Arrow tables, edge files or Spark DataFrames and give rows as they are found, or a count.
`Index` keeps relations ready for many questions, in memory or in a file that all processes of a host share. `Deltas`
turns changes of edges into changes of matches. Only a Spark DataFrame loads pyspark.

Examples
--------
>>> import pyarrow as pa
>>> import penstock as pk
>>> edges = pa.table({"src": [1, 1, 2, 3], "dst": [2, 3, 3, 1]})
>>> pk.graph.cliques(edges, 3, count=True)
1
>>> [row for batch in pk.graph.match("back(x, y) :- e(x, y), e(y, x)", {"e": edges}) for row in batch.to_pylist()]
[{'x': 1, 'y': 3}, {'x': 3, 'y': 1}]
"""

from __future__ import annotations

from penstock.graph._deltas import Changes, Deltas
from penstock.graph._edges import read_edges
from penstock.graph._index import Index
from penstock.graph._matches import Counted, Matches
from penstock.graph._options import Options
from penstock.graph._patterns import atom, cliques, match, pattern

__all__ = [
    "Changes",
    "Counted",
    "Deltas",
    "Index",
    "Matches",
    "Options",
    "atom",
    "cliques",
    "match",
    "pattern",
    "read_edges",
]
