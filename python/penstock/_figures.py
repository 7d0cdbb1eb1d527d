"""What running flows tell of themselves, in the shape in which users get it.

Owns: the columns of ``stats()`` and ``moves()``, one table each for the local host and for engines, and the figures of
bounded scopes. A table has its columns also without rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock._loads import Loads
from penstock._parts import Parts

__all__ = [
    "ENGINE_MOVES",
    "ENGINE_WORKERS",
    "LOADS",
    "LOCAL_MOVES",
    "LOCAL_WORKERS",
    "ScopeStats",
    "bins_table",
    "loads_table",
    "scope_stats",
    "to_table",
]

_QUERY = [("query", pa.string())]
_WORKERS = [
    ("worker", pa.int64()),
    ("bins", pa.int64()),
    ("bins_by_step", pa.list_(pa.int64())),
    ("keys", pa.int64()),
    ("state_bytes", pa.int64()),
    ("rows", pa.int64()),
    ("late_rows", pa.int64()),
    ("epochs", pa.int64()),
    ("busy_s", pa.float64()),
]
_PROCESSES = [
    ("generation", pa.int64()),
    ("member", pa.int64()),
    ("resident", pa.int64()),
    ("executor", pa.string()),
    ("pid", pa.int64()),
    ("rss_bytes", pa.int64()),
    ("staging_memory_bytes", pa.int64()),
    ("staged_bytes", pa.int64()),
    ("staged_peak_bytes", pa.int64()),
    ("disk_bytes", pa.int64()),
    ("spilled_bytes", pa.int64()),
    ("refused_connections", pa.int64()),
    ("at", pa.timestamp("us", "UTC")),
]
_MOVES = [
    ("op", pa.int64()),
    ("worker", pa.int64()),
    ("bin", pa.int64()),
    ("what", pa.string()),
    ("bytes", pa.int64()),
    ("at", pa.timestamp("ns", "UTC")),
    ("routed_rows", pa.int64()),
]

#: One row per worker of the local host; see `LocalSession.stats`.
LOCAL_WORKERS = pa.schema([*_WORKERS, ("pid", pa.int64())])
#: One row per worker of each query; see ``Engine.stats``.
ENGINE_WORKERS = pa.schema([*_QUERY, *_WORKERS, *_PROCESSES])
#: One row per entry of the log of moved bins; see `LocalSession.moves` and ``Engine.moves``.
LOCAL_MOVES = pa.schema(_MOVES)
ENGINE_MOVES = pa.schema([*_QUERY, *_MOVES])
#: One row per bin; see `LocalSession.loads` and ``Engine.loads``.
LOADS = pa.schema(
    [
        ("bin", pa.int64()),
        ("bits", pa.int64()),
        ("worker", pa.int64()),
        ("rows", pa.int64()),
        ("busy_s", pa.float64()),
    ]
)


def loads_table(plan: Parts, loads: Loads) -> pa.Table:
    """What each bin and part got and cost, of all keyed steps together, with its owner."""
    rows, busy = loads.rows(plan), loads.busy_ns(plan)
    found = [(*part, worker, rows[part], busy[part] / 1e9) for part, worker in plan.owner.items()]
    return pa.table([[row[at] for row in found] for at in range(len(LOADS))], schema=LOADS)


def bins_table(
    bins: Sequence[Sequence[tuple[int, int, int]]], bytes_: Sequence[Mapping[tuple[int, int], int]]
) -> pa.Table:
    """Bins, of those that are split the parts, by keyed step: (prefix, bits, worker), and bytes of what each holds."""
    sizes = [*bytes_, *[{}] * (len(bins) - len(bytes_))]
    rows = [(op, *bin_, sizes[op].get(bin_[:2])) for op, step in enumerate(bins) for bin_ in step]
    names = ("op", "prefix", "bits", "worker", "state_bytes")
    return pa.table({name: pa.array([row[at] for row in rows], pa.int64()) for at, name in enumerate(names)})


@dataclass(frozen=True)
class ScopeStats:
    """The figures of a bounded part or a flat map of a flow, on one worker.

    Attributes
    ----------
    query : str
        The query of an engine; empty on the local host.
    worker : int
        Which worker.
    step : str
        Which step of the flow.
    batches, batch_size : int
        N and B, as they are now.
    phase : str
        ``fixed``, ``growing``, ``settled`` or ``short`` (of memory).
    raises, shrinks : int
        How often a bound was raised to stay, and how often one shrank.
    rate : float or None
        Rows per second in the last period that was judged, where bounds are found.
    admitted, admitted_rows : int
        Batches admitted so far, and their rows.
    unfinished, unfinished_rows : int
        Batches that are admitted and not finished, and their rows.
    maximum, maximum_rows : int
        The most there were of both.
    buffered : int
        Inputs that wait before the scope.
    failed : int
        Inputs whose expansion failed and that were left out.
    failures : tuple of str
        The first of them, and why.
    holding : str or None
        The time of the batch that is unfinished for longest.
    """

    query: str
    worker: int
    step: str
    batches: int
    batch_size: int
    phase: str
    raises: int
    shrinks: int
    rate: float | None
    admitted: int
    admitted_rows: int
    unfinished: int
    unfinished_rows: int
    maximum: int
    maximum_rows: int
    buffered: int
    failed: int
    failures: tuple[str, ...]
    holding: str | None


def scope_stats(workers: Iterable[Mapping[str, Any]]) -> list[ScopeStats]:
    """The scopes in what workers tell, in the order of the flow."""
    return [
        ScopeStats(
            **{**scope, "failures": tuple(scope["failures"])},
            query=worker.get("query", ""),
            worker=worker["worker"],
        )
        for worker in workers
        for scope in worker["scopes"]
    ]


def to_table(rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Rows as a table of the columns of `schema`; what a row lacks is null.

    Examples
    --------
    >>> to_table([{"worker": 0, "keys": 3}], LOCAL_WORKERS).select(["worker", "keys", "rows"]).to_pylist()
    [{'worker': 0, 'keys': 3, 'rows': None}]
    """
    return pa.Table.from_pylist(list(rows), schema=schema)
