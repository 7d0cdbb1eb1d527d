"""What calls return that is never made by hand: to annotate with, and for ``help``.

A name loads its module when it is asked for; those of an engine need pyspark.

Examples
--------
>>> import pyarrow as pa
>>> import penstock as pk
>>> flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
>>> def rows(results: "pk.handles.LocalResults") -> int:
...     return sum(batch.num_rows for batch in results)
>>> rows(flow.run(pa.table({"k": [1, 1, 2]})))
2
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock._autobalance import Autobalance, Look
    from penstock._figures import ScopeStats
    from penstock._local import LocalSession, RunSummary
    from penstock._migration import Migration, MigrationReport, MigrationStep
    from penstock._pump import LocalResults
    from penstock._rescale import LocalRescale, Rescale, RescaleProgress, RescaleReport
    from penstock.graph._deltas import Changes
    from penstock.spark._engine.batch_function import BatchFunction
    from penstock.spark._engine.hub import Member
    from penstock.spark._engine.query import Query
    from penstock.spark._tasks.partitions import PartitionFunction

__all__ = [
    "Autobalance",
    "BatchFunction",
    "Changes",
    "LocalRescale",
    "LocalResults",
    "LocalSession",
    "Look",
    "Member",
    "Migration",
    "MigrationReport",
    "MigrationStep",
    "PartitionFunction",
    "Query",
    "Rescale",
    "RescaleProgress",
    "RescaleReport",
    "RunSummary",
    "ScopeStats",
]

_HOMES = {
    "Autobalance": "_autobalance",
    "BatchFunction": "spark._engine.batch_function",
    "Changes": "graph._deltas",
    "LocalRescale": "_rescale",
    "LocalResults": "_pump",
    "LocalSession": "_local",
    "Look": "_autobalance",
    "Member": "spark._engine.hub",
    "Migration": "_migration",
    "MigrationReport": "_migration",
    "MigrationStep": "_migration",
    "PartitionFunction": "spark._tasks.partitions",
    "Query": "spark._engine.query",
    "Rescale": "_rescale",
    "RescaleProgress": "_rescale",
    "RescaleReport": "_rescale",
    "RunSummary": "_local",
    "ScopeStats": "_figures",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock.handles' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"penstock.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
