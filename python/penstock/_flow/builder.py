"""The builder: a flow from its input on."""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

from penstock._durations import Duration, lateness_ms, milliseconds, parse_duration
from penstock._flow.base import FlowBase
from penstock._flow.graph import Source
from penstock._flow.keyed import KeyedSteps
from penstock._flow.meetings import Meetings
from penstock._flow.running import Running
from penstock._flow.stateless import StatelessSteps
from penstock._flow.text import names_of
from penstock._schema import to_arrow
from penstock.errors import ConfigError

__all__ = ["Flow"]

_KEEP = "keep rows with .map_batches(lambda b: b.filter(pc.greater(b['price'], 100))), pc being pyarrow.compute"
_KEYED = "write .key_by('column').agg(n=penstock.count()), without key_by for one group of all rows"
_MAP = "write .map_batches(f, schema) with a function of batches"
_COLUMNS = (
    "write .map_batches(lambda b: b.append_column('twice', pc.add(b['a'], b['a'])), schema='a bigint, twice bigint'),"
    " pc being pyarrow.compute"
)
_RUN = "flow.run(data) gives batches, flow.collect(data) a table, print(flow) shows the steps"
#: What does the work of methods that DataFrames have.
_INSTEAD = {
    "applyInPandas": "write .key_by('column').apply_in_pandas_with_state(...), or .stateful_map(...)",
    "applyInPandasWithState": "write .key_by('column').apply_in_pandas_with_state(...)",
    "collect_list": "write .key_by('column').stateful_map(...), or .aggregate(...) with a penstock.Aggregator",
    "drop": "give the columns that stay: .map_batches(lambda b: b.select(['a']), schema='a bigint')",
    "crossJoin": "write .join(other, on='column') with a column that is equal on both sides",
    "dropDuplicates": "write .distinct('column')",
    "dropDuplicatesWithinWatermark": "write .key_by('column').stateful_map(..., ttl='1h')",
    "dropna": _KEEP,
    "drop_duplicates": "write .distinct('column')",
    "fillna": _COLUMNS,
    "filter": _KEEP,
    "groupBy": _KEYED,
    "group_by": _KEYED,
    "groupby": _KEYED,
    "head": _RUN,
    "limit": ".top(10, by='column') keeps the rows with the greatest values",
    "mapInArrow": _MAP,
    "mapInPandas": _MAP,
    "map": "write .map_batches(f, schema) with a function of batches, .flat_map(f, schema, rows=True) with one of rows",
    "orderBy": "its output has no order: sort what comes out, or keep the greatest with .top(10, by='column')",
    "printSchema": "flow.output_schema has the columns, print(flow) shows the steps",
    "schema": "flow.output_schema has the columns of the output",
    "selectExpr": _COLUMNS,
    "select": "write .map_batches(lambda b: b.select(['a', 'b']), schema='a bigint, b string')",
    "show": _RUN,
    "sort": "its output has no order: sort what comes out, or keep the greatest with .top(10, by='column')",
    "take": _RUN,
    "toPandas": "write .collect(data).to_pandas()",
    "unionByName": "write .union(other)",
    "where": _KEEP,
    "withColumn": _COLUMNS,
    "withColumnRenamed": "write .map_batches(lambda b: b.rename_columns(['a', 'c']), schema='a bigint, c string')",
    "withColumns": _COLUMNS,
    "withWatermark": "say it of the input: penstock.Flow(schema, event_time='ts', lateness='10s')",
    "writeStream": "write df.writeStream.foreachBatch(engine.foreach_batch(flow, sink)) with a penstock.Engine",
}


class Flow(KeyedSteps, StatelessSteps, Meetings, Running):
    """A description of a computation over batches of rows.

    Parameters
    ----------
    schema : str, pyarrow.Schema or pyspark StructType
        Columns of the input: Spark DDL such as ``"auction bigint, ts timestamp"``, or a
        schema object.
    event_time : str, optional
        Column that says when a row happened: a timestamp of any unit, or a bigint that
        counts milliseconds since 1970. Needed by `window`.
    lateness : str or datetime.timedelta, default "0s"
        How far behind the greatest event time a row of an input that does not end may still
        come, in whole milliseconds. The watermark is the greatest event time of all epochs so
        far minus this. A row whose windows have all closed is late: it goes to the late
        output and a counter, never silently away. An input that ends is one epoch, whose
        windows close with it, so nothing is late there. Rows without event time are in no window: they count as late,
        and inside of Spark jobs each partition logs how many there were.
    order_by : str or sequence of str, optional
        Columns that fix the order of the input where the host may change it (Spark may
        replan partitions). Only `stateful_map` and `apply_in_pandas_with_state` care about order.

    name : str, default "input"
        What the source is called where flows of several sources meet (`union`, `join`); see
        `run`.
    idle_after : str or datetime.timedelta, optional
        How long the source may have no rows with an event time, in whole milliseconds, before
        the watermark of several sources goes on without it; by default it is waited for until it
        ends. Looked at when rows of another source come. What it has then, behind the watermark, is late.
        Beside a Spark stream it is looked at in each batch, by the batch's time, which checkpoints keep.

    Raises
    ------
    SchemaError
        When the schema cannot be read, a named column is not in it, or the one of event time has no time.
    ConfigError
        When a duration is not one, or the name is no text.

    Notes
    -----
    Every method returns a new Flow in time linear in the number of steps and touches no
    data. The same flow gives the same rows on every host and any number of workers: where
    the input ends those of all of it, beside a stream those of the same epochs.

    Examples
    --------
    >>> import penstock as pk
    >>> flow = (pk.Flow("auction bigint, price bigint, ts timestamp", event_time="ts", lateness="5s")
    ...           .key_by("auction").window(pk.sliding("60s", every="1s")).agg(n=pk.count())
    ...           .top(1, by="n", per="window"))
    >>> flow.columns
    ('window_start', 'window_end', 'auction', 'n')
    """

    __slots__ = ()

    def __init__(
        self,
        schema: Any,
        event_time: str | None = None,
        lateness: Duration = "0s",
        order_by: str | Sequence[str] | None = None,
        *,
        name: str = "input",
        idle_after: Duration | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"name={name!r}: give the source a name")
        shape = to_arrow(schema)
        late_ms = lateness_ms(lateness)
        order = names_of(order_by, "order_by") if order_by is not None else ()
        idle_ms = None if idle_after is None else milliseconds(parse_duration(idle_after, "idle_after"), "idle_after")
        self._head = Source(name, shape, event_time, late_ms, order, idle_ms)
        self._columns = tuple(shape.names)
        self._event_time = event_time
        self._steps = ()
        self._calls = ()
        self._keys = None
        self._window = None
        self._shape = shape
        self._scope = None
        if event_time is not None:
            self._require([event_time], "event_time")
        elif late_ms:
            raise ConfigError(f"lateness {lateness!r} needs event_time: name the column that says when a row happened")
        if idle_after is not None and event_time is None:
            raise ConfigError(
                f"idle_after {idle_after!r} needs event_time: a source without it holds no watermark back"
            )
        self._require(order, "order_by")
        if event_time is not None:
            self._check()  # whether it has times

    if not TYPE_CHECKING:  # who checks types would take every name for one that a flow has

        def __getattr__(self, name: str) -> Any:
            hint = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise AttributeError(f"'Flow' object has no attribute {name!r}{hint}", name=name, obj=self)


# Python's own errors of a call, and tracebacks, name a method as the user wrote it.
for _base in (FlowBase, KeyedSteps, StatelessSteps, Meetings, Running):
    for _name, _method in vars(_base).items():
        if isinstance(_method, FunctionType):
            _method.__module__, _method.__qualname__ = __name__, f"Flow.{_name}"
