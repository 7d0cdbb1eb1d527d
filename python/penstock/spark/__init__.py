"""Spark hosts: batch jobs, functions inside partitions, and resident engines.

``penstock.spark.run(flow, df)`` runs a flow as a Spark batch job. `Engine` keeps keyed state
resident beside a Structured Streaming query. `tagged` makes one DataFrame of those that feed a
flow of several sources. `apply_in_pandas_with_state` takes a function
written for Spark's ``applyInPandasWithState`` to either; `engines` lists the open engines. `gang`
runs a program on tasks that work together as workers; `ordered` and `ordered_partitions` run
functions and pipelines on the CPUs of each task and keep the order; `cause_of` finds penstock's
error in what Spark raises; `ensure_java` finds a Java for Spark and gives its tasks this interpreter.
Only modules below this package import pyspark, and they do it when they are used.

Examples
--------
>>> import penstock as pk
>>> flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
>>> counts = pk.spark.run(flow, spark.range(10).selectExpr("id % 3 AS k"))  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from penstock.spark._session.guard import require_classic
from penstock.spark._session.java import ensure_java
from penstock.spark._tasks.failures import cause_of
from penstock.spark._tasks.partitions import map_in_arrow
from penstock.spark.batch import run
from penstock.spark.gang import gang
from penstock.spark.ordered import ordered, ordered_partitions
from penstock.spark.sources import tagged
from penstock.spark.state import StatefulStream, apply_in_pandas_with_state

if TYPE_CHECKING:
    from penstock.spark.engine import Engine, engines

__all__ = [
    "Engine",
    "StatefulStream",
    "apply_in_pandas_with_state",
    "cause_of",
    "engines",
    "ensure_java",
    "gang",
    "map_in_arrow",
    "ordered",
    "ordered_partitions",
    "require_classic",
    "run",
    "tagged",
]

# A stub of pyspark, as some tests make one, need not say where it comes from: it is not looked for then.
if not TYPE_CHECKING and sys.modules.get("pyspark") is None and importlib.util.find_spec("pyspark") is None:
    __all__.remove("Engine")
    __all__.remove("engines")


if not TYPE_CHECKING:  # who checks types would take every name for one that is here

    def __getattr__(name: str) -> Any:
        if name in ("Engine", "engines"):
            try:
                return getattr(importlib.import_module("penstock.spark.engine"), name)
            except ModuleNotFoundError as error:
                if error.name is None or error.name.partition(".")[0] != "pyspark":
                    raise
                from penstock._extras import how_to_install

                raise AttributeError(
                    f"penstock.spark.{name} needs Spark, which is not installed here: {how_to_install('spark')}",
                    name=name,
                ) from error
        raise AttributeError(f"module 'penstock.spark' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
