"""The batch host: a flow as a Spark batch job.

Owns: cutting a plan at its exchanges. Each piece of the plan is one ``mapInArrow``; between
two pieces lies a real Spark shuffle, by the hash that the native part uses for its bins. So
Spark's own scheduling, retries and spilling serve the flow, and at the end of input the
watermark is infinite: no row is late.

Invariants: a piece depends on nothing but its input rows (and, where the flow cares about
order, on their order), so a task that Spark runs again gives the same rows. Closures carry
the plan as text and the Python functions as cloudpickle bytes, never a native handle.
Helper columns live between two pieces only.

Order: where a keyed step cares, the rows carry (partition, row) of the piece that made them,
and each partition is sorted by it after the shuffle. ``order_by`` of the flow sorts the input
first, for inputs whose partitions Spark may cut differently when it reads them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from penstock._functions.inline import drive
from penstock._schema import conform, spark_types, to_arrow, to_ddl
from penstock.errors import ConfigError, PlanError, SchemaError
from penstock.spark._session.guard import require_classic, require_flow
from penstock.spark._tasks.partitions import dump_calls, load_calls

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
        Which piece.
    last : bool
        Whether rows leave the flow here; otherwise they get helper columns.
    places : int
        Partitions of the shuffle that follows.
    ordered : bool
        Whether rows get a sequence for the piece that follows.
    input_schema, output_schema : pyarrow.Schema
        Without helper columns; the output in Spark's Arrow types.
    """

    plan: str
    calls: bytes
    number: int
    last: bool
    places: int
    ordered: bool
    input_schema: pa.Schema
    output_schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the piece over the batches of one partition."""
        from penstock import _native

        run = _native.InlineRun(self.plan, load_calls(self.calls), piece=self.number)
        given = 0
        for handle in drive(run, renamed(batches, self.input_schema), self.input_schema):
            out = pa.record_batch(handle)
            if not out.num_rows:
                continue
            fitting = conform(out, self.output_schema, "output")
            yield fitting if self.last else self._tag(out, fitting, given)
            given += out.num_rows

    def _tag(self, out: pa.RecordBatch, fitting: pa.RecordBatch, given: int) -> pa.RecordBatch:
        from penstock import _native

        handle = _native.exchange_hashes(self.plan, self.number + 1, out)
        columns = [*fitting.columns, places(pa.record_batch(handle).column(0), self.places)]
        names = [*fitting.schema.names, PLACE]
        if self.ordered:
            from pyspark import TaskContext

            context = TaskContext.get()
            maker = context.partitionId() if context is not None else 0
            columns += [
                pa.repeat(pa.scalar(maker, pa.int32()), out.num_rows),
                pa.array(range(given, given + out.num_rows), pa.int64()),
            ]
            names += [MAKER, ROW]
        return pa.RecordBatch.from_arrays(columns, names=names)

    @property
    def ddl(self) -> str:
        """The columns that it gives, helper columns included, as Spark DDL."""
        text = to_ddl(self.output_schema)
        if self.last:
            return text
        return text + f", {PLACE} int" + (f", {MAKER} int, {ROW} bigint" if self.ordered else "")


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
    top = pc.shift_right(hashes.view(pa.uint64()), pa.scalar(32, pa.uint64()))
    scaled = pc.multiply(top, pa.scalar(count, pa.uint64()))
    return pc.shift_right(scaled, pa.scalar(32, pa.uint64())).cast(pa.int32())


def run(flow: Flow, df: DataFrame, *, partitions: int | None = None) -> DataFrame:
    """Run a flow as a Spark batch job.

    Parameters
    ----------
    flow : Flow
        What to compute.
    df : pyspark.sql.DataFrame
        The input, of a classic session; columns by name, other columns are ignored.
    partitions : int, optional
        Partitions of each shuffle; default ``spark.sql.shuffle.partitions``.

    Returns
    -------
    pyspark.sql.DataFrame
        Lazy, with the columns of the flow. The same rows as `Flow.run` gives: the input is
        one epoch, at whose end all windows close.

    Raises
    ------
    UnsupportedSession
        For a Spark Connect session.
    PlanError, SchemaError
        When the flow is not complete, the DataFrame lacks a column or has it in another
        type, or Spark has no type for an output column.
    ConfigError
        When `partitions` is not a positive int, `df` is a streaming DataFrame, or a function
        of the flow cannot be pickled.

    Notes
    -----
    Cost: one shuffle per exchange of the flow. A flow that cares about order sorts each
    shuffled partition. The order of the output rows is not defined.

    Examples
    --------
    >>> import penstock as pk
    >>> flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
    >>> run(flow, spark.range(10).selectExpr("id % 3 AS k")).count()  # doctest: +SKIP
    3
    """
    require_flow(flow, "penstock.spark.run")
    require_classic(df, "penstock.spark.run")
    if df.isStreaming:
        raise ConfigError(
            "penstock.spark.run takes a batch DataFrame, this one is streaming; use penstock.Engine with foreachBatch"
        )
    count = _partitions(df, partitions)
    from penstock import _native

    plan, calls = flow.to_plan()
    facts = _native.plan_check(plan)
    if len(flow.sources) == 1 and not facts["line"]:
        raise PlanError(
            "penstock.spark.run cuts a flow at its exchanges, one behind the other; the paths of this one part and meet"
            " again: run it here with flow.run, or beside a stream with penstock.Engine"
        )
    pieces, ordered = int(facts["pieces"]), bool(facts["needs_order"])
    output = pa.schema(facts["output_schema"])
    pickled = dump_calls(calls)
    current = _select(flow, df)
    if ordered and flow.order_by:
        current = current.sort(*(_quoted(name) for name in flow.order_by))
    for number in range(pieces):
        last = number == pieces - 1
        takes = pa.schema(_native.plan_piece_schema(plan, number))
        gives = output if last else pa.schema(_native.plan_piece_schema(plan, number + 1))
        piece = PlanPiece(plan, pickled, number, last, count, ordered, takes, spark_types(gives))
        current = by_place(current).mapInArrow(piece, piece.ddl)
        if not last:
            current = _shuffle(current, count)
            if ordered:
                current = current.sortWithinPartitions(MAKER, ROW)
    return current


def _shuffle(df: DataFrame, count: int) -> DataFrame:
    if hasattr(df, "repartitionById"):
        return df.repartitionById(count, PLACE)
    # Before Spark 4.1: by the hash of the number. Each number still lies in one partition.
    return df.repartition(count, PLACE)


def _partitions(df: DataFrame, partitions: int | None) -> int:
    if partitions is None:
        return int(df.sparkSession.conf.get("spark.sql.shuffle.partitions") or 200)
    if isinstance(partitions, bool) or not isinstance(partitions, int) or partitions < 1:
        raise ConfigError(f"partitions={partitions!r} must be an int of at least 1")
    return partitions


def _select(flow: Flow, df: DataFrame) -> DataFrame:
    wanted = flow.input_schema.names
    for name in wanted:
        if df.columns.count(name) != 1:
            problem = "has no column" if name not in df.columns else "has more than one column"
            raise SchemaError(f"the DataFrame {problem} {name!r}; it has {', '.join(df.columns) or 'no columns'}")
    selected = df.select(*(_quoted(name) for name in wanted))
    # An empty batch of the DataFrame's types meets every check that its rows will meet, before a job starts.
    have = to_arrow(selected.schema, "the DataFrame")
    conform(pa.RecordBatch.from_pylist([], schema=have), flow.input_schema, "the DataFrame")
    return selected


def by_place(df: DataFrame) -> DataFrame:
    """The DataFrame as ``mapInArrow`` can take it: Spark does not find names with dots and backquotes there."""
    if not any("." in name or "`" in name for name in df.columns):
        return df
    return df.toDF(*(f"c{place}" for place in range(len(df.columns))))


def renamed(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Batches of `by_place` with the names of `schema`, whose columns come first."""
    for batch in batches:
        yield batch.rename_columns([*schema.names, *batch.schema.names[len(schema) :]])


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
