"""Patterns in graphs as Spark jobs: DataFrames in, a DataFrame or a count out.

Owns: how an index reaches tasks, and how work is shared by them. The edges come to the driver piece by piece
(`stream`) and become one index file, by way of scratch files where they are many; Spark brings that file to its
executors, and those of one host share one copy (`hosted`), which all their tasks map. The work is cut into units of
like estimated size, heavy vertices too, several per slot of the cluster, and each task searches one unit: a task that
Spark runs again gives the same rows.

Invariants: closures carry a pattern and numbers, never a native handle; rows stream out of a task batch by batch;
memory of the driver grows with the nodes at most, never with the edges or the matches.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from penstock._schema import conform, spark_types, to_arrow, to_ddl
from penstock.errors import ConfigError, SchemaError
from penstock.graph._edges import Edges, Source, check_columns, edge_columns, node_kind
from penstock.graph._index import Index, Shape, Unit
from penstock.graph._matches import Counted
from penstock.graph._options import Options, Progress
from penstock.spark._graph.hosted import meeting_place, opened
from penstock.spark._graph.stream import pieces
from penstock.spark._graph.watch import watched
from penstock.spark._session.guard import require_classic
from penstock.spark._tasks.columns import integers
from penstock.spark._tasks.memory import Hints, local_folders

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Job", "edge_batches", "edge_source", "match", "query_of", "written"]

#: Units of work per slot of the cluster: enough to even out what the estimate got wrong, and not one for so few edges
#: that a task costs more than searching them.
_UNITS_PER_SLOT, _LEAST_PER_SLOT, _EDGES_PER_UNIT = 8, 2, 25_000
_COUNTED = "count bigint, prefixes bigint, admitted_maximum bigint, batches_maximum bigint"

#: The index that this Python worker used last: opening reads all of it.
_last: list[tuple[str, Index]] = []


@dataclass(frozen=True)
class _Search:
    """What a task does, as a function for ``mapInArrow``: its input rows are numbers of units."""

    digest: str
    shared: bool
    pattern: str
    order: tuple[str, ...]
    units: tuple[Unit, ...]
    options: Options
    counts: bool
    output: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Search the units whose numbers come."""
        numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
        if not numbers:
            return
        index = host_index(self.digest, self.shared)
        for number in numbers:
            unit = self.units[number]
            if self.counts:
                done = index.count(self.pattern, order=self.order, options=self.options, unit=unit)
                row = [done.count, done.prefixes, done.admitted_maximum, done.batches_maximum]
                columns = [integers([value]) for value in row]
                yield pa.RecordBatch.from_arrays(columns, schema=self.output)
                continue
            with index.match(self.pattern, order=self.order, options=self.options, unit=unit) as matches:
                for batch in matches:
                    yield conform(batch, self.output, "matches")


def host_index(digest: str, shared: bool = True) -> Index:
    """Open the index of that digest in a task: the one copy of this host, or this executor's where none is shared."""
    from pyspark import SparkFiles

    own = Path(SparkFiles.get(_name(digest)))
    if not _last or _last[0][0] != str(own):
        _last.clear()
        place = meeting_place(local_folders(Hints())[0]) if shared else None
        _last.append((str(own), opened(own, digest, place, Index.open)))
    return _last[0][1]


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _name(digest: str) -> str:
    return f"penstock-{digest}.graph"


class Job:
    """A pattern over relations, ready to be searched by the tasks of a session.

    Parameters
    ----------
    session : pyspark.sql.SparkSession
        Classic. It keeps the file of the index until it stops.
    relations : mapping of str to edges
        As for `penstock.graph.Index`.
    pattern : str
        What to search for.
    order : sequence of str, optional
        The order to bind variables in.
    options : Options
        For each task.
    **build
        As for `penstock.graph.Index.build`.
    """

    def __init__(
        self,
        session: SparkSession,
        relations: Mapping[str, Edges],
        pattern: str,
        order: Sequence[str] | None,
        options: Options,
        **build: Any,
    ) -> None:
        context = session.sparkContext
        # Executors fetch it when their first task needs it, so it stays as long as the session's other temporary files.
        folder = Path(context._temp_dir)
        part = folder / f"{uuid.uuid4().hex}.graph"
        try:
            index = Index.build(part, relations, **build)
            digest = _digest(part)
            self.schema = index.schema(pattern)
            bound = tuple(index.order(pattern, order))
            self.slots = max(1, int(context.defaultParallelism))
            worth = sum(index.edges.values()) // _EDGES_PER_UNIT
            parts = self.slots * max(_LEAST_PER_SLOT, min(_UNITS_PER_SLOT, worth // self.slots))
            self.units = tuple(index.units(pattern, parts, bound))
            # The same graph again is the same file, which Spark has brought already.
            path = folder / _name(digest)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        context.addFile(str(path))
        self.digest, self.nodes, self.edges = digest, index.nodes, sum(index.edges.values())
        self._session, self._pattern = session, pattern
        # A local session has one executor.
        shared = not re.fullmatch(r"local(\[.*\])?", str(context.master))
        self._make: Callable[[bool, pa.Schema], _Search] = lambda counts, output: _Search(
            digest, shared, pattern, bound, self.units, options, counts, output
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
        rows = self.watched(frame.collect, "counted", progress)
        return Counted(
            sum(row[0] for row in rows),
            sum(row[1] for row in rows),
            max((row[2] for row in rows), default=0),
            max((row[3] for row in rows), default=0),
        )

    def watched(self, action: Callable[[], Any], what: str, progress: Progress | None = None) -> Any:
        """Run an action over all units, telling how many are done; an interrupt cancels it."""
        description = f"penstock: {self._pattern} is {what}"
        return watched(self._session.sparkContext, description, action, max(1, len(self.units)), progress)

    def _numbers(self) -> DataFrame:
        return self._session.range(0, len(self.units), 1, max(1, len(self.units)))


def edge_source(name: str, frame: DataFrame, columns: Sequence[str] | None = None, diff: str | None = None) -> Source:
    """Open a DataFrame as the edges of a relation; Spark computes it once, when they are read.

    Parameters
    ----------
    name : str
        Of the relation.
    frame : pyspark.sql.DataFrame
        Of a classic session.
    columns : pair of str, optional
        Where edges begin and end; default the first two other than `diff`.
    diff : str, optional
        A column of whole numbers, which becomes the third of the batches, as int64. Rows with 0 are left out.

    Raises
    ------
    UnsupportedSession, ConfigError
        For a Spark Connect session, or a streaming DataFrame; at the call.
    SchemaError
        When it has no such columns, or they cannot be nodes; at the call. For a `diff` that is no whole number: when
        the edges are read.
    """
    schema, batches = _opened(name, frame, columns, diff)
    return Source(name, node_kind(name, schema), batches)


def edge_batches(name: str, frame: DataFrame, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    """Give the edges of a DataFrame batch by batch, an empty one first, which tells their types.

    Errors are those of `edge_source`.
    """
    schema, batches = _opened(name, frame, columns, None)
    node_kind(name, schema)
    first = pa.RecordBatch.from_arrays([pa.array([], kind) for kind in schema.types], schema=schema)
    return chain([first], batches)


def _opened(
    name: str, frame: DataFrame, columns: Sequence[str] | None, diff: str | None
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    require_classic(frame, "penstock.graph")
    if frame.isStreaming:
        raise ConfigError(
            f"relation {name!r} is a streaming DataFrame; feed its batches to penstock.graph.Deltas by foreach_batch"
        )
    check_columns(columns)
    last = None if diff is None else _diff_place(name, frame, diff)
    rest = [at for at in range(len(frame.columns)) if at != last]
    begin, end = edge_columns(name, [frame.columns[at] for at in rest], columns)
    places = [rest[begin], rest[end]]
    names = [frame.columns[at] for at in places]
    # By place: names may be there twice, or with dots and blanks.
    numbered = frame.toDF(*(f"c{at}" for at in range(len(frame.columns))))
    chosen = numbered.select(*(f"c{at}" for at in places))
    types = to_arrow(chosen.schema, f"relation {name!r}").types
    schema = pa.schema([pa.field(*field) for field in zip(names, types, strict=True)])
    if diff is None or last is None:
        read = pieces(chosen, f"penstock: the edges of {name}")
        return schema, (pa.RecordBatch.from_arrays(batch.columns, names=names) for batch in read)
    signed = numbered.select(*(f"c{at}" for at in (*places, last)))
    signed = signed.where(signed[f"c{last}"].isNull() | (signed[f"c{last}"] != 0))

    def whole() -> Iterator[pa.RecordBatch]:
        for batch in pieces(signed, f"penstock: the edges of {name}"):
            times = _whole(name, diff, batch.column(2))
            yield pa.RecordBatch.from_arrays([*batch.columns[:2], times], names=[*names, diff])

    return schema, whole()


def query_of(batch: DataFrame) -> str | None:
    """The query that calls this thread with a batch, by the id that survives its restarts; None: no query does."""
    query: str | None = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
    return query and f"query {query}"


def _diff_place(name: str, frame: DataFrame, diff: str) -> int:
    from pyspark.sql.types import NumericType

    if frame.columns.count(diff) != 1:
        raise SchemaError(f"relation {name!r} has no single column {diff!r}; it has {', '.join(frame.columns)}")
    at = frame.columns.index(diff)
    kind = frame.schema[at].dataType
    if not isinstance(kind, NumericType):
        raise SchemaError(
            f"relation {name!r}: column {diff!r}, which is to say whether edges come or go, is {kind.simpleString()};"
            " it has to be of numbers"
        )
    return at


def _whole(name: str, diff: str, column: pa.Array) -> pa.Array:
    """The numbers of a column as int64: a null, a NaN and a fraction do not say whether an edge comes or goes."""
    what = f"relation {name!r}: column {diff!r}"
    if column.null_count:
        raise SchemaError(f"{what} is null in some row, so it does not say whether that edge comes or goes")
    try:
        return pc.cast(column, pa.int64())
    except pa.ArrowInvalid as error:
        raise SchemaError(f"{what} has a value that is no whole number of 64 bits: {error}") from error


def match(
    pattern: str,
    relations: Mapping[str, DataFrame],
    shape: Shape,
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
    if not relations:
        raise ConfigError("no relations: give a dict of name to DataFrame")
    session = next(iter(relations.values())).sparkSession
    # What does not fit the names is refused before anything is read.
    Index({name: [] for name in relations}).order(pattern, order)
    edges = {name: edge_batches(name, frame, columns) for name, frame in relations.items()}
    threads = options if options.workers is not None else _one_thread(options)
    job = Job(session, edges, pattern, order, threads, self_loops=self_loops, shape=shape)
    return job.counted(progress).count if count else job.rows()


def _one_thread(options: Options) -> Options:
    return Options(1, options.batches, options.batch_size, options.batch_rows, options.in_order)


def written(job: Job, folder: Path, progress: Progress | None = None) -> Iterator[pa.RecordBatch]:
    """Give the matches batch by batch, by way of files in `folder`: the driver never holds all of them."""
    import pyarrow.parquet as pq

    place = folder / "rows"
    frame = job.rows()
    job.watched(lambda: frame.write.parquet(str(place)), "written", progress)
    for path in sorted(place.glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches()
