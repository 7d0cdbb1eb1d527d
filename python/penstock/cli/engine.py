"""The engine host of the commands: a flow resident beside a Spark stream.

The input is laid out as a few Parquet files, of each source as many, that file streams take one
per epoch, in order; one query takes the streams of all sources. So a command shows what a
streaming query does: epochs, migrations between and during them, and a final epoch that closes
what is still open.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock._flow import Flow
from penstock._schema import conform, spark_types
from penstock.cli.common import Move, Report, Resize, Source, first_step, spark_session, told_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["engine_host"]

#: Files, and so epochs, that an input of known size is laid out in.
EPOCHS = 8


def engine_host(
    flow: Flow,
    source: Source,
    report: Report,
    *,
    file_rows: int,
    moves: Sequence[Move] = (),
    how: Mapping[str, Any] | None = None,
    resizes: Sequence[Resize] = (),
) -> Iterator[pa.RecordBatch]:
    """Run a flow resident beside a Spark stream.

    Parameters
    ----------
    flow : Flow
        What to compute.
    source : iterator of pyarrow.RecordBatch, or dict of str to such an iterator
        The input; by the name of the source, where the flow has several.
    report : Report
        Gets rows, late rows and migrations.
    file_rows : int
        Rows per epoch at least; of the greatest of several sources.
    moves : sequence of Move
        Migrations to start on the way.
    how : mapping
        Options of `Engine.migrate` for them.
    resizes : sequence of Resize
        Rescales to start on the way, one after the other.

    Yields
    ------
    pyarrow.RecordBatch
        Results, after the stream has ended.
    """
    name = f"penstock {report.command}"
    most = max([report.workers, *(resize.after for resize in resizes)])
    with spark_session(name, most + 2, report.workers) as (spark, folder):
        files = _lay_out(source, flow, folder, file_rows)
        report.rows = sum(files)
        if report.rows == 0:
            # Spark asks for no batch of nothing.
            nothing = {name: schema.empty_table() for name, schema in flow.sources.items()}
            tables = [flow.collect(nothing if len(nothing) > 1 else next(iter(nothing.values())))]
        else:
            tables = _stream(spark, flow, folder, files, report, moves, how, resizes)
    for table in tables:
        for batch in table.to_batches():
            yield conform(batch, flow.output_schema, "output")


def _stream(
    spark: SparkSession,
    flow: Flow,
    folder: Path,
    files: list[int],
    report: Report,
    moves: Sequence[Move],
    how: Mapping[str, Any] | None,
    resizes: Sequence[Resize],
) -> list[pa.Table]:
    from penstock.spark._session.collect import to_table
    from penstock.spark.engine import Engine

    # By batch id: Spark may call a sink twice for one batch, with the same rows.
    results: dict[int, pa.Table] = {}
    late: dict[int, int] = {}

    def sink(out: DataFrame, batch_id: int) -> None:
        results[batch_id] = to_table(out)

    def late_sink(out: DataFrame, batch_id: int) -> None:
        late[batch_id] = out.count()

    with Engine(spark, workers=report.workers) as engine:
        step = engine.foreach_batch(flow, sink, late=late_sink)
        mover = _Mover(engine, report, files, moves, how, resizes)
        writer = (
            _input(spark, flow, folder)
            .writeStream.option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(availableNow=True)
        )
        query = writer.foreachBatch(mover.around(step)).start()
        try:
            while not query.awaitTermination(1):
                pass
            mover.wait()
            rest = to_table(engine.finish(query))
        finally:
            query.stop()
    report.late_rows = sum(late.values())
    return [*(results[batch_id] for batch_id in sorted(results)), rest]


class _Mover:
    """Starts migrations and rescales when their share of the input has passed."""

    def __init__(
        self,
        engine: Any,
        report: Report,
        files: list[int],
        moves: Sequence[Move],
        how: Mapping[str, Any] | None,
        resizes: Sequence[Resize],
    ) -> None:
        self._engine = engine
        self._report = report
        self._before = [0, *itertools.accumulate(files)]
        self._waiting = list(moves)
        self._how = how or {}
        self._begin = time.perf_counter()
        self._owners: list[int] = []
        self._running: list[tuple[Move, Any]] = []
        self._resizes = list(resizes)
        #: The one that runs, with when it began.
        self._resizing: tuple[Resize, Any, float] | None = None

    def around(self, step: Callable[[DataFrame, int], None]) -> Callable[[DataFrame, int], None]:
        """Wrap the function that runs an epoch: look at the clock and the input before it."""

        def run(frame: DataFrame, batch_id: int) -> None:
            if batch_id:
                self.start(self._before[min(batch_id, len(self._before) - 1)])
            step(frame, batch_id)

        return run

    def start(self, rows: int) -> None:
        """Start what is due after so many rows."""
        total = self._before[-1]
        for move in list(self._waiting):
            if move.when.due(rows, total, time.perf_counter() - self._begin):
                self._waiting.remove(move)
                self._owners = self._owners or first_step(self._engine.owners())
                moves = move.take(self._owners)
                self._running.append((move, self._engine.migrate(moves=moves, **self._how)))
        # One at a time, in their order.
        if self._resizing is not None and self._resizing[1].done:
            self._resized()
        seconds = time.perf_counter() - self._begin
        if self._resizes and self._resizing is None and self._resizes[0].when.due(rows, total, seconds):
            resize = self._resizes.pop(0)
            self._resizing = (resize, self._engine.rescale(resize.after), time.perf_counter())

    def _resized(self) -> None:
        """Wait for the rescale that runs, and report it."""
        assert self._resizing is not None
        (resize, handle, began), self._resizing = self._resizing, None
        told = {"rescale": str(resize), "workers": handle.wait("5 minutes"), "bins": handle.progress.bins}
        self._report.rescales.append(told | {"seconds": time.perf_counter() - began})

    def wait(self) -> None:
        """Start what is due at the end, and wait for all."""
        self.start(self._before[-1])
        for move, migration in self._running:
            self._report.migrations.append(told_of(move, migration.wait("5 minutes")))
        while self._resizing is not None:
            self._resized()
            self.start(self._before[-1])
        self._report.not_started(self._waiting)
        self._report.not_started(self._resizes)


def _lay_out(source: Source, flow: Flow, folder: Path, file_rows: int) -> list[int]:
    """Write the input as files below a folder for each source; returns the rows of each epoch."""
    schemas = flow.sources
    given = source if isinstance(source, Mapping) else dict.fromkeys(schemas, source)
    if len(given) == 1:
        [(name, schema)] = schemas.items()
        return _write(given[name], spark_types(schema), _place(folder, 0), file_rows)
    # Event time is to pass alike in all of them: as many files of each.
    tables = {
        name: pa.Table.from_batches((conform(batch, spark_types(schema)) for batch in given[name]), spark_types(schema))
        for name, schema in schemas.items()
    }
    most = max(table.num_rows for table in tables.values())
    epochs = -(-most // file_rows)
    counts = [
        _write(
            iter(table.to_batches()),
            table.schema,
            _place(folder, number),
            -(-table.num_rows // max(1, epochs)),
            exactly=True,
        )
        for number, table in enumerate(tables.values())
    ]
    return [sum(rows) for rows in itertools.zip_longest(*counts, fillvalue=0)]


def _place(folder: Path, number: int) -> Path:
    """Where the files of a source lie."""
    return folder / f"input-{number}"


def _write(
    source: Iterator[pa.RecordBatch], schema: pa.Schema, folder: Path, file_rows: int, exactly: bool = False
) -> list[int]:
    """Write rows as files of at least so many, or exactly; returns the rows of each."""
    import pyarrow.parquet as pq

    folder.mkdir()
    counts: list[int] = []
    batches: Iterator[pa.RecordBatch] = (conform(batch, schema) for batch in source)
    if exactly:
        batches = _sliced(batches, file_rows)
    for first in batches:
        path = folder / f"part-{len(counts):05d}.parquet"
        rows = 0
        with pq.ParquetWriter(path, schema) as writer:
            for batch in itertools.chain([first], batches):
                writer.write_batch(batch)
                rows += batch.num_rows
                if rows >= file_rows:
                    break
        # The stream takes files in the order of their times.
        os.utime(path, (1_000_000_000 + len(counts), 1_000_000_000 + len(counts)))
        counts.append(rows)
    return counts


def _sliced(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Batches that end where as many rows are full."""
    left = rows
    for batch in batches:
        at = 0
        while at < batch.num_rows:
            piece = batch.slice(at, left)
            at += piece.num_rows
            left = left - piece.num_rows or rows
            yield piece


def _input(spark: SparkSession, flow: Flow, folder: Path) -> DataFrame:
    """The files of all sources as one stream."""
    from penstock._schema import to_ddl
    from penstock.spark.sources import tagged

    streams = {
        name: spark.readStream.schema(to_ddl(spark_types(schema)))
        .option("maxFilesPerTrigger", 1)
        .parquet(str(_place(folder, number)))
        for number, (name, schema) in enumerate(flow.sources.items())
    }
    return tagged(**streams) if len(streams) > 1 else next(iter(streams.values()))
