"""The batch host: a flow as a Spark batch job.

Owns: running the pieces of a plan between its exchanges. Each piece is one ``mapInArrow``; between
two pieces lies a real Spark shuffle, by the hash that the native part uses for its bins. So
Spark's own scheduling, retries and spilling serve the flow, and at the end of input the
watermark is infinite: no row is late. Rows without event time, which no window has, are counted where
the first piece of their source reads them, and told in the log of its task. What several
pieces lead to takes their union, and sides of an operator come as structs of one row, as the
sources of a tagged DataFrame do.

Invariants: a piece depends on nothing but its input rows (and, where the flow cares about
order, on their order), so a task that Spark runs again gives the same rows. Closures carry
the plan as text and the Python functions as cloudpickle bytes, never a native handle.
Helper columns live between two pieces only.

Order: where a keyed step cares, the rows carry (piece, partition, row) of where they were made,
and each partition is sorted by it after the shuffle: rows of sources in the order of these, then
those of operators. ``order_by`` of a source sorts its rows first, for inputs whose partitions
Spark may cut differently when it reads them again.

Cost: where paths part behind an operator, each of them runs that operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from penstock._beside import say_dropped
from penstock._flow.graph import sources_of
from penstock._functions.inline import drive, needed_times
from penstock._options import whole
from penstock._schema import conform, spark_types, to_ddl
from penstock.errors import ConfigError
from penstock.spark._session.guard import require_flow
from penstock.spark._tasks.apart import renamed, split
from penstock.spark._tasks.columns import integer, integers
from penstock.spark._tasks.heap import settle
from penstock.spark._tasks.partitions import dump_calls, load_calls
from penstock.spark.sources import by_place, frames, ordered_by, packed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock._flow import Flow

__all__ = ["PlanPiece", "run"]

#: Helper columns between two pieces.
PLACE = "__penstock_place"
MAKER = "__penstock_maker"
ROW = "__penstock_row"
_HELPERS = (PLACE, MAKER, ROW)


@dataclass(frozen=True)
class PlanPiece:
    """One piece of a plan, as a function for ``mapInArrow``.

    Attributes
    ----------
    plan : str
        The whole plan as JSON.
    calls : bytes
        The Python functions, cloudpickled.
    number : int
        Which piece of the plan.
    last : bool
        Whether rows leave the flow here; otherwise they get helper columns.
    places : int
        Partitions of the shuffle that follows.
    ordered : bool
        Whether rows get a sequence for the piece that follows.
    inputs : tuple of pyarrow.Schema
        By input, without helper columns; of several inputs each row is a struct.
    output_schema : pyarrow.Schema
        Without helper columns, in Spark's Arrow types.
    times : tuple of str or None
        By input the column of which nulls are told in the log; empty where another piece does so.
    what : str
        What errors call the input.
    """

    plan: str
    calls: bytes
    number: int
    last: bool
    places: int
    ordered: bool
    inputs: tuple[pa.Schema, ...]
    output_schema: pa.Schema
    times: tuple[str | None, ...] = ()
    what: str = "input"

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the piece over the batches of one partition."""
        from penstock import _native

        run = _native.InlineRun(self.plan, load_calls(self.calls), piece=self.number)
        given = 0
        for handle in drive(run, self._parted(batches), self.inputs, self.times, self.what):
            out = pa.record_batch(handle)
            if not out.num_rows:
                continue
            fitting = conform(out, self.output_schema, "output")
            yield fitting if self.last else self._tag(out, fitting, given)
            given += out.num_rows
        settle()

    def _parted(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
        if len(self.inputs) == 1:
            for batch in renamed(batches, self.inputs[0].names):
                yield 0, batch
            return
        names = [f"s{side}" for side in range(len(self.inputs))]
        for batch in renamed(batches, names):
            for side, rows in split(batch, names):
                yield side, rows.rename_columns(self.inputs[side].names)

    def _tag(self, out: pa.RecordBatch, fitting: pa.RecordBatch, given: int) -> pa.RecordBatch:
        from penstock import _native

        handle = _native.exchange_hashes(self.plan, self.number, out)
        columns = [*fitting.columns, places(pa.record_batch(handle).column(0), self.places)]
        names = [*fitting.schema.names, PLACE]
        if self.ordered:
            from pyspark import TaskContext

            context = TaskContext.get()
            maker = context.partitionId() if context is not None else 0
            columns += [
                pa.repeat(integer((self.number << 32) + maker), out.num_rows),
                integers(range(given, given + out.num_rows)),
            ]
            names += [MAKER, ROW]
        return pa.RecordBatch.from_arrays(columns, names=names)

    @property
    def ddl(self) -> str:
        """The columns that it gives, helper columns included, as Spark DDL."""
        text = to_ddl(self.output_schema)
        if self.last:
            return text
        return text + f", {PLACE} int" + (f", {MAKER} bigint, {ROW} bigint" if self.ordered else "")


def places(hashes: pa.Array, count: int) -> pa.Array:
    """Turn 64-bit hashes into partition numbers.

    Parameters
    ----------
    hashes : pyarrow.Array
        int64; the bits of the hashes.
    count : int
        Partitions, below 2**31.

    Returns
    -------
    pyarrow.Array
        int32 in ``0 .. count - 1``: a range of the top 32 bits each, as bins are.

    Examples
    --------
    >>> import pyarrow as pa
    >>> places(pa.array([0, -1], pa.int64()), 4).to_pylist()
    [0, 3]
    """
    half = integer(32, pa.uint64())
    top = pc.shift_right(hashes.view(pa.uint64()), half)
    scaled = pc.multiply(top, integer(count, pa.uint64()))
    return pc.shift_right(scaled, half).cast(pa.int32())


def run(flow: Flow, df: DataFrame | Mapping[str, DataFrame], *, partitions: int | None = None) -> DataFrame:
    """Run a flow as a Spark batch job.

    Parameters
    ----------
    flow : Flow
        What to compute.
    df : pyspark.sql.DataFrame, or dict of str to DataFrame
        The input, of a classic session; columns by name, other columns are ignored. A flow of several sources takes a
        dict from the name of each to its rows, or one DataFrame that `tagged` has made.
    partitions : int, optional
        Partitions of each shuffle; default ``spark.sql.shuffle.partitions``, and Spark's default parallelism where that
        is no number, as "auto".

    Returns
    -------
    pyspark.sql.DataFrame
        Lazy, with the columns of the flow. The same rows as `Flow.run` gives: the input is
        one epoch, at whose end all windows close. Rows whose event time is null are in no window and in no join in
        time; each task that reads a source logs how many came, as a warning of the logger ``penstock``.

    Raises
    ------
    UnsupportedSession
        For a Spark Connect session.
    PlanError, SchemaError
        When the flow is not complete, the DataFrame lacks a column or has it in another
        type, or Spark has no type for an output column.
    ConfigError
        When `partitions` is not a positive int, `df` is a streaming DataFrame, a source is missing
        or unknown, or a function of the flow cannot be pickled.

    Notes
    -----
    Cost: one shuffle per exchange of the flow; where paths part behind an operator, it runs once for
    each. A flow that cares about order sorts each shuffled partition. The order of the output rows is
    not defined. A tagged DataFrame is read once for each source, save what `tagged` has made.

    Examples
    --------
    >>> import penstock as pk
    >>> flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
    >>> run(flow, spark.range(10).selectExpr("id % 3 AS k")).count()  # doctest: +SKIP
    3
    """
    require_flow(flow, "penstock.spark.run")
    from penstock import _native

    say_dropped(flow.sides, "penstock.spark.run")
    # No row is late at the end of input.
    whole, calls = flow.to_plan()
    plan, read = _native.plan_narrowed(whole, late=False)
    columns = dict(zip(flow.sources, map(pa.schema, read), strict=True))
    sources = frames(flow, df, "penstock.spark.run", columns)
    live = next((name for name, frame in zip(flow.sources, sources, strict=True) if frame.isStreaming), None)
    if live is not None:
        which = "this one" if len(sources) == 1 else f"source {live!r}"
        raise ConfigError(
            f"penstock.spark.run takes a batch DataFrame, {which} is streaming; use penstock.Engine with foreachBatch"
        )
    count = _partitions(sources[0], partitions)
    facts = _native.plan_check(plan)
    ordered = bool(facts["needs_order"])
    pickled = dump_calls(calls)
    if ordered:
        sources = [ordered_by(frame, source.order_by) for source, frame in zip(sources_of(flow), sources, strict=True)]
    #: By operator and side, what leads there; and what of it has met.
    routed: dict[int, dict[int, list[DataFrame]]] = {}
    met: dict[int, DataFrame] = {}
    results = []
    #: By source the event time that its rows need, until a piece reads them.
    times = dict(enumerate(needed_times(plan)))
    names = list(flow.sources)
    for number, told in enumerate(facts["pieces"]):
        inputs, end = tuple(pa.schema(one) for one in told["inputs"]), told["end"]
        needed: tuple[str | None, ...] = ()
        what = "input"
        if "source" in told:
            rows = sources[told["source"]]
            if len(sources) > 1:
                what = f"source {names[told['source']]!r}"
            needed = (times.pop(told["source"], None),)
        else:
            operator = told["operator"]
            if operator not in met:
                sides = routed.pop(operator)
                met[operator] = _meeting([sides[side] for side in range(len(inputs))], count, ordered)
            rows = met[operator]
        output = spark_types(pa.schema(told["output"]))
        piece = PlanPiece(plan, pickled, number, end is None, count, ordered, inputs, output, needed, what)
        made = by_place(rows).mapInArrow(piece, piece.ddl)
        if end is None:
            results.append(made)
        else:
            routed.setdefault(end[0], {}).setdefault(end[1], []).append(made)
    return _union(results)


def _meeting(sides: list[list[DataFrame]], count: int, ordered: bool) -> DataFrame:
    """The rows on their way into an operator, by side, where they meet."""
    helpers = _HELPERS if ordered else (PLACE,)
    rows = _shuffle(_union(sides[0]) if len(sides) == 1 else packed(sides, helpers), count)
    return rows.sortWithinPartitions(MAKER, ROW) if ordered else rows


def _union(frames: list[DataFrame]) -> DataFrame:
    return reduce(lambda all_of, one: all_of.union(one), frames)


def _shuffle(df: DataFrame, count: int) -> DataFrame:
    if hasattr(df, "repartitionById"):
        return df.repartitionById(count, PLACE)
    # Before Spark 4.1: by the hash of the number. Each number still lies in one partition.
    return df.repartition(count, PLACE)


def _partitions(df: DataFrame, partitions: int | None) -> int:
    if partitions is None:
        told = str(df.sparkSession.conf.get("spark.sql.shuffle.partitions") or 200)
        # Some platforms have "auto" there, for what is known when a shuffle is read only.
        return int(told) if told.isdecimal() else max(1, int(df.sparkSession.sparkContext.defaultParallelism))
    count = whole(partitions, 1)
    if count is None:
        raise ConfigError(f"partitions={partitions!r} must be an int of at least 1")
    return count
