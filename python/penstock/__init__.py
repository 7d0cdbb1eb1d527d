"""penstock: dataflow with keyed state that moves while it runs.

Describe a computation once, as a `Flow`, and run it where the data is: in this process
(`Flow.run`), as a Spark batch job (``penstock.spark.run``), inside Spark partitions
(`Flow.map_in_arrow`), or resident beside a Structured Streaming query
(``penstock.Engine``). Below flows there are dataflows by hand: `execute` and `penstock.dataflow`.

Durations of event time (windows, lateness) are text with a unit (``"10s"``, ``"5 minutes"``) or a ``timedelta``; a
bare number is refused. Where an argument says how long to wait (``timeout``, ``start_timeout``, ``member_timeout``,
``linger``, ``max_pause``, ``every`` of ``autobalance``), a number is seconds, as in the standard library; text and
timedeltas are taken, too.

Importing this package starts no thread, socket or process and does not import pyspark.

Examples
--------
>>> import pyarrow as pa
>>> import penstock as pk
>>> flow = pk.Flow("auction bigint, price bigint").key_by("auction").agg(best=pk.max("price"))
>>> bids = pa.table({"auction": [1, 2, 1], "price": [10, 20, 30]})
>>> sorted((row["auction"], row["best"]) for batch in flow.run(bids, workers=2) for row in batch.to_pylist())
[(1, 30), (2, 20)]
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from penstock import errors
from penstock.errors import PenstockError

if TYPE_CHECKING:
    __version__: str
    from penstock import dataflow, graph, handles, ordered, report, spark, state
    from penstock._aggregates import (
        Aggregate,
        approx_count_distinct,
        approx_quantile,
        count,
        count_distinct,
        first,
        last,
        max,
        max_by,
        mean,
        min,
        min_by,
        stddev,
        stddev_pop,
        sum,
        var_pop,
        variance,
    )
    from penstock._aggregator import Aggregator
    from penstock._flow import Flow
    from penstock._functions.group_state import GroupState
    from penstock._pump import LateRows
    from penstock._sides import side
    from penstock._windows import Window, session, sliding, tumbling
    from penstock.dataflow._execution import execute
    from penstock.ordered import Pipeline, ordered_map
    from penstock.spark.engine import Engine

__all__ = [
    "Aggregate",
    "Aggregator",
    "Engine",
    "Flow",
    "GroupState",
    "LateRows",
    "PenstockError",
    "Pipeline",
    "Window",
    "__version__",
    "approx_count_distinct",
    "approx_quantile",
    "count",
    "count_distinct",
    "dataflow",
    "errors",
    "execute",
    "first",
    "graph",
    "handles",
    "last",
    "max",
    "max_by",
    "mean",
    "min",
    "min_by",
    "ordered",
    "ordered_map",
    "report",
    "session",
    "side",
    "sliding",
    "spark",
    "state",
    "stddev",
    "stddev_pop",
    "sum",
    "tumbling",
    "var_pop",
    "variance",
]

# A stub of pyspark, as some tests make one, need not say where it comes from: it is not looked for then.
if not TYPE_CHECKING and sys.modules.get("pyspark") is None and importlib.util.find_spec("pyspark") is None:
    __all__.remove("Engine")

#: Where what is public comes from. It loads when somebody asks for it: pyarrow, pyspark and the native module cost
#: more to import than a short-lived process may want to pay, such as a child that only calls a function.
_HOMES = {
    "Aggregate": "_aggregates",
    "Aggregator": "_aggregator",
    "Engine": "spark.engine",
    "Flow": "_flow",
    "GroupState": "_functions.group_state",
    "LateRows": "_pump",
    "Pipeline": "ordered",
    "Window": "_windows",
    "approx_count_distinct": "_aggregates",
    "approx_quantile": "_aggregates",
    "count": "_aggregates",
    "count_distinct": "_aggregates",
    "execute": "dataflow",
    "first": "_aggregates",
    "last": "_aggregates",
    "max": "_aggregates",
    "max_by": "_aggregates",
    "mean": "_aggregates",
    "min": "_aggregates",
    "min_by": "_aggregates",
    "ordered_map": "ordered",
    "session": "_windows",
    "side": "_sides",
    "sliding": "_windows",
    "stddev": "_aggregates",
    "stddev_pop": "_aggregates",
    "sum": "_aggregates",
    "tumbling": "_windows",
    "var_pop": "_aggregates",
    "variance": "_aggregates",
}

#: What names of ``pyspark.sql.functions`` are called here, or what does their work.
_INSTEAD = {
    "any_value": "first",
    "approxCountDistinct": "approx_count_distinct",
    "approx_percentile": "approx_quantile",
    "avg": "mean",
    "collect_list": "Flow.stateful_map, or Flow.aggregate with a penstock.Aggregator",
    "collect_set": "Flow.distinct, or Flow.aggregate with a penstock.Aggregator",
    "col": "the column's name as text, such as penstock.sum('price')",
    "countDistinct": "count_distinct",
    "count_if": "Flow.map_batches to keep the rows, then count",
    "explode": "Flow.flat_map",
    "expr": "Flow.map_batches, with pyarrow.compute",
    "first_value": "first",
    "last_value": "last",
    "lit": "Flow.map_batches, with pyarrow.compute",
    "median": "approx_quantile('column', 0.5)",
    "pandas_udf": "Flow.map_batches",
    "percentile": "approx_quantile",
    "percentile_approx": "approx_quantile",
    "session_window": "session",
    "stddev_samp": "stddev",
    "std": "stddev",
    "udf": "Flow.map_batches or Flow.flat_map",
    "var_samp": "variance",
    "when": "Flow.map_batches, with pyarrow.compute.if_else",
    "window": "tumbling, sliding or session",
}


if not TYPE_CHECKING:  # who checks types would take every name for one that is here

    def __getattr__(name: str) -> Any:
        if name in ("dataflow", "graph", "handles", "ordered", "report", "spark", "state"):
            return importlib.import_module(f"penstock.{name}")
        if name in _HOMES:
            try:
                home = importlib.import_module(f"penstock.{_HOMES[name]}")
            except ModuleNotFoundError as error:
                if error.name is None or error.name.partition(".")[0] != "pyspark":
                    raise
                from penstock._extras import how_to_install

                # An AttributeError, so that who only looks (hasattr, inspect, help) sees that it is not there.
                raise AttributeError(
                    f"penstock.{name} needs Spark, which is not installed here: {how_to_install('spark')}",
                    name=name,
                ) from error
            found = getattr(home, name)
            globals()[name] = found
            return found
        if name == "__version__":
            return importlib.import_module("penstock._native").version()
        hint = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"module 'penstock' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted(__all__)
