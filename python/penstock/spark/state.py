"""Functions written for Spark's ``applyInPandasWithState``, unchanged, on penstock.

Owns: reading keys, schemas, the watermark and the session's time zone from a DataFrame, and the choice of the host. A
batch DataFrame becomes a batch job. A streaming one becomes a `StatefulStream`, which starts on an `Engine`: the state
then is resident, and moves while the query runs.

What differs from Spark: the state lives in the engine, and is written to the query's checkpoint in a form of penstock's
own; batches that Spark runs only to let time pass come with the batch before them (event time) or wait for the next
batch with data (processing time). Numbers that an output column cannot hold, such as 2.5 in a bigint, are an error;
Spark cuts them by default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from penstock._durations import Duration
from penstock._flow import Flow
from penstock._functions.group_state import EVENT_TIME, GroupFunction
from penstock._schema import to_arrow
from penstock.errors import ConfigError, SchemaError
from penstock.spark._session.guard import require_classic
from penstock.spark.batch import run

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.types import StructType

    from penstock.spark._engine.batch_function import BatchFunction, Sink
    from penstock.spark.engine import Engine

__all__ = ["StatefulStream", "apply_in_pandas_with_state"]

#: What Spark writes into the metadata of a column with a watermark.
_DELAY = "spark.watermarkDelayMs"
#: Arguments of Spark's own ``start``, which would be options of no meaning.
_NO_OPTIONS = {"format", "outputMode", "partitionBy"}


def apply_in_pandas_with_state(
    df: DataFrame,
    key: str | Sequence[str],
    func: GroupFunction,
    outputStructType: str | pa.Schema | StructType,
    stateStructType: str | pa.Schema | StructType,
    outputMode: str = "update",
    timeoutConf: str = "NoTimeout",
    *,
    event_time: str | None = None,
    lateness: Duration | None = None,
    timezone: str | None = None,
    partitions: int | None = None,
    name: str | None = None,
    sides: Mapping[str, Any] | None = None,
) -> DataFrame | StatefulStream:
    """Apply a function written for ``df.groupBy(key).applyInPandasWithState``, unchanged.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Batch or streaming, of a classic session.
    key : str or sequence of str
        The columns of ``groupBy``.
    func, outputStructType, stateStructType, outputMode, timeoutConf
        As for Spark: ``func(key, frames, state)`` yields pandas DataFrames.
    event_time : str, optional
        The column that the watermark follows; default the one of ``df.withWatermark``.
    lateness : str or datetime.timedelta, optional
        How far the watermark stays behind; default that of ``df.withWatermark``.
    timezone : str, optional
        Zone in whose local time frames show timestamps; default ``spark.sql.session.timeZone``.
    partitions : int, optional
        For a batch DataFrame: partitions of the shuffle, default ``spark.sql.shuffle.partitions``.
    name : str, optional
        Of the step, by which its state is found again in a flow that was changed.
    sides : dict of str to schema, optional
        Side outputs of the function, see `Flow.apply_in_pandas_with_state`; `StatefulStream.start` says where they go.

    Returns
    -------
    pyspark.sql.DataFrame or StatefulStream
        For a batch DataFrame a DataFrame, lazy: each key once, nothing times out, no state is
        kept (Spark refuses the function there). For a streaming one a `StatefulStream`: start
        it on an engine.

    Raises
    ------
    UnsupportedSession
        For a Spark Connect session.
    ConfigError
        When a mode or timeout is unknown, event-time timeouts have no watermark to go by, or `partitions` or `sides`
        are given where they have no effect.
    SchemaError
        When a column does not exist or a schema cannot be read.

    Notes
    -----
    One line differs from Spark: ``apply_in_pandas_with_state(df, "k", func, ...).start(engine, sink)``
    in the place of ``df.groupBy("k").applyInPandasWithState(func, ...).writeStream.foreachBatch(sink).start()``.

    Spark follows a batch that moved the watermark with an empty one, in which event-time timeouts fire; here they come
    out with the batch that moved it. Processing-time timeouts are looked at with each batch that has data: Spark calls
    nobody while a source is silent. A timeout that a call does not set again is gone, as Spark documents. Rows that are
    late for event-time timeouts go to ``late=`` of `StatefulStream.start` and are counted.

    Examples
    --------
    >>> import pandas as pd
    >>> def count(key, frames, state):
    ...     seen = sum(map(len, frames)) + (state.get[0] if state.exists else 0)
    ...     state.update((seen,))
    ...     yield pd.DataFrame({"user": [key[0]], "seen": [seen]})
    >>> counts = apply_in_pandas_with_state(
    ...     clicks, "user", count, "user string, seen bigint", "seen bigint", "update", "NoTimeout"
    ... )  # doctest: +SKIP
    >>> with pk.Engine(spark) as engine:  # doctest: +SKIP
    ...     query = counts.start(engine, lambda df, batch_id: df.write.mode("append").saveAsTable("counts"))
    """
    what = "penstock.spark.apply_in_pandas_with_state"
    require_classic(df, what)
    try:
        keys = (key,) if isinstance(key, str) else tuple(key)
    except TypeError:  # of a Column of Spark, too
        keys = ()
    if not keys or not all(isinstance(one, str) for one in keys):
        raise ConfigError(f"{what} key={key!r}: name columns by their names")
    event_time, delay = _watermark(df, event_time)
    if lateness is None:
        lateness = delay if delay is not None else "0s"
    streaming = bool(df.isStreaming)
    if streaming and partitions is not None:
        raise ConfigError(f"{what} partitions={partitions!r}: a stream has the workers of its engine, give none")
    if sides is not None and not streaming:
        raise ConfigError(f"{what} sides=: a batch DataFrame has one output; use Flow.collect, or an engine")
    if timeoutConf == EVENT_TIME and event_time is None and streaming:
        raise ConfigError(
            f"{what}: EventTimeTimeout needs a watermark; write df.withWatermark('ts', '10 seconds') before, or say"
            " event_time= and lateness="
        )
    zone = timezone or _zone(str(df.sparkSession.conf.get("spark.sql.session.timeZone") or "UTC"))
    flow = Flow(to_arrow(df.schema, "the DataFrame"), event_time=event_time, lateness=lateness)
    flow = flow.key_by(*keys)._group_state(
        func, outputStructType, stateStructType, outputMode, timeoutConf, zone, name, sides, streaming=streaming
    )
    return StatefulStream(df, flow) if streaming else run(flow, df, partitions=partitions)


def _zone(setting: str) -> str:
    """A zone of Spark's as Python names it.

    Examples
    --------
    >>> [_zone(name) for name in ("Z", "+08", "GMT+8", "UTC-3:30", "Asia/Tokyo")]
    ['UTC', '+08:00', '+08:00', '-03:30', 'Asia/Tokyo']
    """
    found = re.fullmatch(r"(?:GMT|UTC|UT)?([+-])(\d{1,2})(?::?(\d{2}))?", setting)
    if found is None:
        return "UTC" if setting == "Z" else setting
    return f"{found[1]}{int(found[2]):02}:{found[3] or '00'}"


class StatefulStream:
    """A streaming DataFrame with a function to be applied to its groups; starts on an `Engine`.

    Attributes
    ----------
    df : pyspark.sql.DataFrame
        The input.
    flow : Flow
        The function as a flow; ``engine.foreach_batch(stream.flow, sink)`` serves as well.
    """

    def __init__(self, df: DataFrame, flow: Flow) -> None:
        self.df = df
        self.flow = flow

    def foreach_batch(
        self,
        engine: Engine,
        sink: Sink,
        *,
        late: Sink | None = None,
        sides: Mapping[str, Sink] | None = None,
        name: str | None = None,
        checkpoint: str | None = "query",
    ) -> BatchFunction:
        """The function for ``DataStreamWriter.foreachBatch``; see `Engine.foreach_batch`."""
        if not hasattr(engine, "foreach_batch"):
            raise ConfigError(
                f"engine is a {type(engine).__name__}: the state lives in a penstock.Engine; write with"
                " pk.Engine(spark, workers=2) as engine: stream.start(engine, sink)"
            )
        return engine.foreach_batch(self.flow, sink, late=late, sides=sides, name=name, checkpoint=checkpoint)

    def writer(
        self,
        engine: Engine,
        sink: Sink,
        *,
        late: Sink | None = None,
        sides: Mapping[str, Sink] | None = None,
        name: str | None = None,
        checkpoint: str | None = "query",
    ) -> DataStreamWriter:
        """A ``DataStreamWriter`` to which a trigger, a name and options can be added before its ``start()``."""
        function = self.foreach_batch(engine, sink, late=late, sides=sides, name=name, checkpoint=checkpoint)
        return self.df.writeStream.foreachBatch(function)

    def start(
        self,
        engine: Engine,
        sink: Sink,
        *,
        checkpointLocation: str | None = None,
        late: Sink | None = None,
        sides: Mapping[str, Sink] | None = None,
        queryName: str | None = None,
        trigger: dict[str, Any] | None = None,
        name: str | None = None,
        checkpoint: str | None = "query",
        **options: Any,
    ) -> StreamingQuery:
        """Start the query.

        Parameters
        ----------
        engine : Engine
            Holds the state; open.
        sink : callable
            ``sink(df, batch_id)`` with what the function yields in each batch.
        checkpointLocation : str, optional
            Spark's checkpoint of the source.
        late : callable, optional
            ``late(df, batch_id)`` with the rows that came too late.
        sides : dict of str to callable, optional
            The same for each side output, by its name.
        queryName : str, optional
            Spark's name of the query.
        trigger : dict, optional
            Arguments of ``DataStreamWriter.trigger``, such as ``{"processingTime": "1 second"}``.
        name : str, optional
            What the engine calls the query; default Spark's name of it.
        checkpoint : str or None, optional
            Where the state is durable, as for `Engine.foreach_batch`; default in `checkpointLocation`.
        **options
            Options of the writer.

        Returns
        -------
        pyspark.sql.streaming.StreamingQuery
            Spark's own; ``engine.finish(query)`` fires the event-time timeouts that are left.

        Raises
        ------
        ConfigError
            When `engine` is none, an argument of `Engine.foreach_batch` is refused, or one of Spark's own
            ``DataStreamWriter.start`` is given that has no effect here.
        """
        for given in _NO_OPTIONS & options.keys():
            raise ConfigError(
                f"start({given}=...): rows go to the sink, which writes them as it likes, in the outputMode that"
                " apply_in_pandas_with_state was given; leave it out"
            )
        writer = self.writer(engine, sink, late=late, sides=sides, name=name, checkpoint=checkpoint)
        if checkpointLocation is not None:
            writer = writer.option("checkpointLocation", checkpointLocation)
        if queryName is not None:
            writer = writer.queryName(queryName)
        if trigger is not None:
            writer = writer.trigger(**trigger)
        return writer.options(**options).start()

    def __repr__(self) -> str:
        return f"StatefulStream({self.flow!r})"

    if not TYPE_CHECKING:  # who checks types would take every name for one that it has

        def __getattr__(self, name: str) -> Any:
            hint = ": start it on an engine, .start(engine, sink)" if name == "writeStream" else ""
            raise AttributeError(f"'StatefulStream' object has no attribute {name!r}{hint}", name=name, obj=self)


def _watermark(df: DataFrame, event_time: str | None) -> tuple[str | None, timedelta | None]:
    """The column that the watermark follows and its delay, as ``withWatermark`` has left them."""
    found = {
        field.name: timedelta(milliseconds=int(field.metadata[_DELAY]))
        for field in df.schema.fields
        if _DELAY in (field.metadata or {})
    }
    if event_time is not None:
        if event_time not in df.columns:
            raise SchemaError(f"event_time: column {event_time!r} does not exist; there are {', '.join(df.columns)}")
        return event_time, found.get(event_time)
    if len(found) > 1:
        raise ConfigError(f"the DataFrame has watermarks on {', '.join(found)}: say which with event_time=")
    for name, delay in found.items():
        return name, delay
    return None, None
