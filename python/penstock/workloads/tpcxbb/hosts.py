"""Where the pipelines run: this process, or one task of a Spark job.

Owns: feeding a pipeline with its stream and making batches of what it gives. Both hosts run the same pipeline over the
same stream. On Spark the stream comes together in one partition and is sorted there by ``seq``; the pipeline runs in
that one task, which gives its results in order, and a result of one partition is collected in order.

Departure: a stream on Spark is one partition, since a parallel sort orders partitions only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock._resume import Guarded, guarded
from penstock._schema import conform, spark_types, to_ddl
from penstock.workloads.tpcxbb.queries import Query, narrow, pack, pipeline
from penstock.workloads.tpcxbb.tables import check_together, in_order, read, read_spark, require, rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["check", "run_local", "run_spark"]


def check(query: Query, folder: str | Path) -> int:
    """Look at everything that has to be told before the query runs; returns how many rows its stream has.

    Of q1 that is one pass over the numbers of its tickets: of one whose lines are apart some pairs are not counted.

    Raises
    ------
    ConfigError, SchemaError
        When a table, a column or a parameter is missing or does not fit, or lines of a ticket are not adjacent.
    """
    pipeline(query, folder)
    require(query.stream, query.columns, folder)
    if query.stream.together in query.columns:
        check_together(query.stream, folder)
    return rows(query.stream, folder)


def run_local(
    query: Query,
    folder: str | Path,
    *,
    workers: int | None = None,
    mode: str = "auto",
    scheduler: str = "adaptive",
    queue: str = "hybrid",
    batch_rows: int = 8_192,
    step: Callable[[int], None] | None = None,
) -> Guarded[pa.RecordBatch]:
    """Run a query in this process.

    Parameters
    ----------
    query : Query
        Which.
    folder : str or Path
        Holds the tables and ``params.json``.
    workers, mode, scheduler, queue
        As for `penstock.Pipeline` and its ``run``.
    batch_rows : int, default 8_192
        Rows of the stream that are read at once.
    step : callable, optional
        Takes how many rows of the stream have been read.

    Returns
    -------
    iterator of pyarrow.RecordBatch
        Of `Query.schema`; its ``close`` stops all early. After an interrupt it goes on, or raises `Interrupted` from
        then on.

    Raises
    ------
    ConfigError, SchemaError
        When the input does not fit: what the footers and small tables tell now, the rest on the way.
    """
    line = pipeline(query, folder, scheduler, queue)
    source = _told(read(query.stream, query.columns, folder, batch_rows), step)
    return guarded(_packed(line, source, query.schema, workers, mode), f"the run of {query.name}")


def _packed(
    line: Any, source: Iterator[pa.RecordBatch], schema: pa.Schema, workers: int | None, mode: str
) -> Iterator[pa.RecordBatch]:
    with contextlib.closing(line.run(source, workers=workers, mode=mode)) as results:
        yield from pack(results, schema)


def _told(source: Iterable[pa.RecordBatch], step: Callable[[int], None] | None) -> Iterator[pa.RecordBatch]:
    count = 0
    for batch in source:
        count += batch.num_rows
        if step is not None:
            step(count)
        yield batch


def run_spark(
    query: Query,
    folder: str | Path,
    spark: SparkSession,
    *,
    workers: int | None = None,
    mode: str = "auto",
    scheduler: str = "adaptive",
    queue: str = "hybrid",
) -> pa.Table:
    """Run a query in one task of a Spark job.

    Parameters
    ----------
    query, folder, workers, mode, scheduler, queue
        As for `run_local`.
    spark : pyspark.sql.SparkSession
        Classic.

    Returns
    -------
    pyarrow.Table
        In the order of the pipeline.

    Raises
    ------
    PenstockError
        As `run_local`, also for what the task raised.
    """
    from penstock.spark._session.collect import to_table
    from penstock.spark._tasks.failures import cause_of
    from penstock.spark.ordered import ordered

    if rows(query.stream, folder) == 0:
        # Spark gives an empty frame no task, and q4 has a row to say all the same.
        return narrow(pa.Table.from_batches(run_local(query, folder, workers=1, mode="inline"), query.schema))
    line = pipeline(query, folder, scheduler, queue)
    inside = ordered(line, query.schema, workers=workers, mode=mode)
    task = _Task(inside, query.stream.select(query.columns), f"{query.stream.name}.parquet")
    frame = read_spark(query.stream, query.columns, folder, spark)
    try:
        table = to_table(frame.mapInArrow(task, to_ddl(spark_types(query.schema))))
    except Exception as error:
        raise cause_of(error) or error from None
    return narrow(
        pa.Table.from_batches([conform(part, query.schema, "output") for part in table.to_batches()], query.schema)
    )


@dataclass(frozen=True)
class _Task:
    """The function of the one task: checks the stream as the local reader does, then runs."""

    inside: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
    takes: pa.Schema
    name: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return self.inside(in_order((conform(batch, self.takes, self.name) for batch in batches), self.name))
