"""Patterns in graphs as Spark jobs: DataFrames in, a DataFrame or a count out.

Owns: how an index reaches tasks, and how work is shared by them. The driver collects the edges, builds one index and
gives its file to Spark, which brings it to every executor once; its tasks map that file, so one copy in memory serves
all of them. The work is cut into units of like estimated size, heavy vertices too, several per slot of the cluster, and
each task searches one unit at a time: a task that Spark runs again gives the same rows.

Invariants: closures carry a pattern and numbers, never a native handle; rows stream out of a task batch by batch.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from penstock.errors import ConfigError
from penstock.graph.index import Counted, Index, Unit
from penstock.graph.options import Options, Progress
from penstock.schema import conform, spark_types, to_ddl
from penstock.spark.collect import to_table
from penstock.spark.guard import require_classic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Job", "match", "written"]

#: Units of work per slot of the cluster: enough to even out what the estimate got wrong.
_UNITS_PER_SLOT = 8
_COUNTED = "count bigint, prefixes bigint, admitted_maximum bigint, batches_maximum bigint"


@dataclass(frozen=True)
class _Search:
    """What a task does, as a function for ``mapInArrow``: its input rows are numbers of units."""

    file: str
    pattern: str
    order: tuple[str, ...]
    units: tuple[Unit, ...]
    options: Options
    counts: bool
    output: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Search the units whose numbers come."""
        from pyspark import SparkFiles

        numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
        if not numbers:
            return
        index = Index.open(SparkFiles.get(self.file))
        for number in numbers:
            unit = self.units[number]
            if self.counts:
                done = index.count(self.pattern, order=self.order, options=self.options, unit=unit)
                row = [done.count, done.prefixes, done.admitted_maximum, done.batches_maximum]
                columns = [pa.array([value], pa.int64()) for value in row]
                yield pa.RecordBatch.from_arrays(columns, schema=self.output)
                continue
            with index.match(self.pattern, order=self.order, options=self.options, unit=unit) as matches:
                for batch in matches:
                    yield conform(batch, self.output, "matches")


class Job:
    """A pattern over an index, ready to be searched by the tasks of a session.

    Parameters
    ----------
    session : pyspark.sql.SparkSession
        Classic. It keeps the file of the index until it stops.
    index : Index
        What to search.
    pattern : str
        For what.
    order : sequence of str, optional
        The order to bind variables in.
    options : Options
        For each task.
    """

    def __init__(
        self, session: SparkSession, index: Index, pattern: str, order: Sequence[str] | None, options: Options
    ) -> None:
        self.schema = index.schema(pattern)
        self._session = session
        context = session.sparkContext
        bound = tuple(index.order(pattern, order))
        slots = max(1, int(context.defaultParallelism))
        units = tuple(index.units(pattern, slots * _UNITS_PER_SLOT, bound))
        name = f"penstock-{uuid.uuid4().hex}.graph"
        # Executors fetch it when their first task needs it, so it stays as long as the session's other temporary files.
        path = os.path.join(context._temp_dir, name)
        index.save(path)
        context.addFile(path)
        self._units = len(units)
        self._make: Callable[[bool, pa.Schema], _Search] = lambda counts, output: _Search(
            name, pattern, bound, units, options, counts, output
        )

    def rows(self) -> DataFrame:
        """The matches, lazily; Spark searches again whenever it runs the plan again."""
        # Spark has no unsigned numbers; a node that does not fit is an error of the task that finds it.
        signed = [field.with_type(pa.int64()) if pa.types.is_uint64(field.type) else field for field in self.schema]
        output = spark_types(pa.schema(signed))
        return self._numbers().mapInArrow(self._make(False, output), to_ddl(output))

    def counted(self, progress: Progress | None = None) -> Counted:
        """Count the matches now. Maxima are those of the task that had most."""
        output = pa.schema([(part.split()[0], pa.int64()) for part in _COUNTED.split(", ")])
        frame = self._numbers().mapInArrow(self._make(True, output), _COUNTED)
        rows = frame.collect() if progress is None else self._watched(frame, progress)
        return Counted(
            sum(row[0] for row in rows),
            sum(row[1] for row in rows),
            max((row[2] for row in rows), default=0),
            max((row[3] for row in rows), default=0),
        )

    def _numbers(self) -> DataFrame:
        return self._session.range(0, self._units, 1, max(1, self._units))

    def _watched(self, frame: DataFrame, progress: Progress) -> list[Any]:
        """Collect in a thread of its own, and tell how many tasks are done."""
        from pyspark import InheritableThread

        context = self._session.sparkContext
        group = f"penstock-{uuid.uuid4().hex}"
        outcome: list[Any] = []
        ended = threading.Event()

        def collect() -> None:
            try:
                context.setJobGroup(group, "penstock: a pattern is counted", True)
                outcome.append(frame.collect())
            except BaseException as error:
                outcome.append(error)
            finally:
                ended.set()

        thread = InheritableThread(target=collect, daemon=True)
        thread.start()
        tracker = context.statusTracker()
        try:
            while not ended.wait(0.2):
                stages = [
                    tracker.getStageInfo(stage)
                    for job in tracker.getJobIdsForGroup(group)
                    for stage in getattr(tracker.getJobInfo(job), "stageIds", ())
                ]
                progress(sum(stage.numCompletedTasks for stage in stages if stage is not None), self._units)
        except BaseException:
            context.cancelJobGroup(group)
            raise
        thread.join()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        progress(self._units, self._units)
        return list(outcome[0])


def match(
    pattern: str,
    relations: Mapping[str, DataFrame],
    shape: Literal["both", "forward", "degree", "degeneracy"],
    order: Sequence[str] | None,
    columns: Sequence[str] | None,
    self_loops: Literal["keep", "drop", "refuse"],
    options: Options,
    count: bool,
    progress: Progress | None,
) -> DataFrame | int:
    """Find a pattern in DataFrames; see `penstock.graph.match` and `penstock.graph.cliques`.

    Raises
    ------
    UnsupportedSession, ConfigError
        For a Spark Connect session, or a streaming DataFrame.
    PatternError, SchemaError
        As there.
    """
    tables = {}
    session = None
    for name, frame in relations.items():
        require_classic(frame, "penstock.graph")
        if frame.isStreaming:
            raise ConfigError(
                f"relation {name!r} is a streaming DataFrame; feed its batches to penstock.graph.Deltas in foreachBatch"
            )
        session = frame.sparkSession
        chosen = frame.columns[:2] if columns is None else [name for name in columns if name in frame.columns]
        tables[name] = to_table(frame.select(*("`" + column.replace("`", "``") + "`" for column in chosen)))
    if session is None:
        raise ConfigError("no relations: give a dict of name to DataFrame")
    index = Index(tables, columns=columns, self_loops=self_loops, shape=shape)
    threads = options if options.workers is not None else _one_thread(options)
    job = Job(session, index, pattern, order, threads)
    return job.counted(progress).count if count else job.rows()


def _one_thread(options: Options) -> Options:
    return Options(1, options.batches, options.batch_size, options.batch_rows, options.in_order)


def written(frame: DataFrame, folder: Path) -> Iterator[pa.RecordBatch]:
    """Give the rows of a DataFrame batch by batch, by way of files in `folder`: the driver never holds all of them."""
    import pyarrow.parquet as pq

    place = folder / "rows"
    frame.write.parquet(str(place))
    for path in sorted(place.glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches()
