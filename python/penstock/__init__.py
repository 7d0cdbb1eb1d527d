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
from penstock.aggregates import Aggregate, count, max, mean, min, sum
from penstock.errors import PenstockError
from penstock.flow import Flow
from penstock.windows import Window, sliding, tumbling

if TYPE_CHECKING:
    from penstock import dataflow, spark
    from penstock.dataflow.execution import execute
    from penstock.spark.engine import Engine

__all__ = [
    "Aggregate",
    "Engine",
    "Flow",
    "PenstockError",
    "Window",
    "__version__",
    "count",
    "dataflow",
    "errors",
    "execute",
    "max",
    "mean",
    "min",
    "sliding",
    "spark",
    "sum",
    "tumbling",
]


def __getattr__(name: str) -> Any:
    # pyspark and the native module load only when somebody asks for what needs them.
    if name in ("dataflow", "spark"):
        return importlib.import_module(f"penstock.{name}")
    if name == "execute":
        return importlib.import_module("penstock.dataflow").execute
    if name == "Engine":
        return importlib.import_module("penstock.spark.engine").Engine
    if name == "__version__":
        return importlib.import_module("penstock._native").version()
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
