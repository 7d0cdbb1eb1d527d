"""penstock: dataflow with keyed state that moves while it runs.

Describe a computation once, as a `Flow`, and run it where the data is: in this process
(`Flow.run`), as a Spark batch job (``penstock.spark.run``), inside Spark partitions
(`Flow.map_in_arrow`), or resident beside a Structured Streaming query
(``penstock.Engine``). Below flows there are dataflows by hand: `execute` and `penstock.dataflow`.

Importing this package starts no thread, socket or process and does not import pyspark.

Examples
--------
>>> import pyarrow as pa
>>> import penstock as pk
>>> flow = pk.Flow("auction bigint, price bigint").key_by("auction").agg(best=pk.max("price"), emit="final")
>>> bids = pa.table({"auction": [1, 2, 1], "price": [10, 20, 30]})
>>> sorted((row["auction"], row["best"]) for batch in flow.run(bids, workers=2) for row in batch.to_pylist())
[(1, 30), (2, 20)]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock import errors
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock import dataflow, graph, ordered, spark
    from penstock.aggregates import Aggregate, count, max, mean, min, sum
    from penstock.dataflow.execution import execute
    from penstock.flow import Flow
    from penstock.ordered import Pipeline, ordered_map
    from penstock.spark.engine import Engine
    from penstock.windows import Window, sliding, tumbling

__all__ = [
    "Aggregate",
    "Engine",
    "Flow",
    "PenstockError",
    "Pipeline",
    "Window",
    "__version__",
    "count",
    "dataflow",
    "errors",
    "execute",
    "graph",
    "max",
    "mean",
    "min",
    "ordered",
    "ordered_map",
    "sliding",
    "spark",
    "sum",
    "tumbling",
]

#: Where what is public comes from. It loads when somebody asks for it: pyarrow, pyspark and the native module cost
#: more to import than a short-lived process may want to pay, such as a child that only calls a function.
_HOMES = {
    "Aggregate": "aggregates",
    "Engine": "spark.engine",
    "Flow": "flow",
    "Pipeline": "ordered",
    "Window": "windows",
    "count": "aggregates",
    "execute": "dataflow",
    "max": "aggregates",
    "mean": "aggregates",
    "min": "aggregates",
    "ordered_map": "ordered",
    "sliding": "windows",
    "sum": "aggregates",
    "tumbling": "windows",
}


def __getattr__(name: str) -> Any:
    if name in ("dataflow", "graph", "ordered", "spark"):
        return importlib.import_module(f"penstock.{name}")
    if name in _HOMES:
        found = getattr(importlib.import_module(f"penstock.{_HOMES[name]}"), name)
        globals()[name] = found
        return found
    if name == "__version__":
        return importlib.import_module("penstock._native").version()
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
