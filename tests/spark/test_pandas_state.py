"""One function under Spark's own ``applyInPandasWithState`` and under ours: the same rows, timeouts included."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import penstock as pk
from penstock.errors import ConfigError

pytestmark = pytest.mark.spark

OUTPUT = "k string, what string, rows bigint, total double, last timestamp, watermark bigint"
STATE = "rows bigint, total double, last bigint"
INPUT = "k string, ts timestamp, ms bigint, v double"


def make_sessions() -> Any:
    # Inside, so that it is pickled by value: executors cannot import a test.
    def sessions(key: tuple[str], frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        """Written for Spark: sums per session; a session ends 10 s after its last event."""
        watermark = state.getCurrentWatermarkMs()
        if state.hasTimedOut:
            assert sum(map(len, frames)) == 0
            rows, total, last = state.get
            state.remove()
            what = "closed"
        else:
            rows, total, last = state.getOption or (0, 0.0, 0)
            for frame in frames:
                rows += len(frame)
                total += frame["v"].sum()
                last = max(last, int(frame["ms"].max()))
                assert frame["ts"].dtype == "datetime64[ns]"
            state.update((rows, total, last))
            state.setTimeoutTimestamp(max(last + 10_000, watermark))
            what = "open"
        yield pd.DataFrame(
            {
                "k": [key[0]],
                "what": [what],
                "rows": [rows],
                "total": [total],
                "last": [pd.Timestamp(last, unit="ms")],
                "watermark": [watermark],
            }
        )

    return sessions


#: The files of the stream, one after the other: key, second, value.
FILES = [
    [("a", 1, 1.0), ("b", 2, 2.0), ("a", 3, 3.0)],
    [("b", 4, 4.0), ("c", 30, 5.0)],
    [("c", 31, 6.0), ("a", 5, 99.0), ("d", 32, 7.0)],
    [("e", 100, 8.0)],
]


def row(k: str, second: int, v: float) -> tuple[Any, ...]:
    at = datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc) + datetime.timedelta(seconds=second)
    return k, at, int(at.timestamp() * 1000), v


def write(spark: Any, folder: Path, number: int) -> None:
    spark.createDataFrame([row(*fields) for fields in FILES[number]], INPUT).coalesce(1).write.mode("append").parquet(
        str(folder)
    )


def source(spark: Any, folder: Path) -> Any:
    return spark.readStream.schema(INPUT).parquet(str(folder)).withWatermark("ts", "2 seconds")


def drive(spark: Any, folder: Path, start: Any, between: Any = lambda number: None) -> list[list[Any]]:
    """The rows that come out after each file."""
    lock, seen = threading.Lock(), []

    def sink(df: Any, batch_id: int) -> None:
        rows = df.collect()
        with lock:
            seen.extend(rows)

    write(spark, folder, 0)
    query = start(sink)
    steps = []
    try:
        for number in range(len(FILES)):
            if number:
                write(spark, folder, number)
            query.processAllAvailable()
            with lock:
                steps.append(sorted(map(tuple, seen)))
                seen.clear()
            between(number)
    finally:
        query.stop()
    return steps


def test_the_same_function_gives_the_same_rows_as_under_spark(spark: Any, tmp_path: Path) -> None:
    spark.conf.set("spark.sql.shuffle.partitions", "1")

    def theirs(sink: Any) -> Any:
        df = source(spark, tmp_path / "theirs").groupBy("k")
        df = df.applyInPandasWithState(make_sessions(), OUTPUT, STATE, "update", "EventTimeTimeout")
        writer = df.writeStream.foreachBatch(sink).outputMode("update")
        return writer.option("checkpointLocation", str(tmp_path / "ct")).start()

    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").mkdir()
    expected = drive(spark, tmp_path / "theirs", theirs)
    assert [row[1] for step in expected for row in step].count("closed") >= 3
    late: list[Any] = []
    with pk.Engine(spark, workers=1, threads=2) as engine:

        def ours(sink: Any) -> Any:
            stream = pk.spark.apply_in_pandas_with_state(
                source(spark, tmp_path / "ours"), "k", make_sessions(), OUTPUT, STATE, "update", "EventTimeTimeout"
            )
            late_sink = lambda df, batch_id: late.extend(df.collect())  # noqa: E731
            return stream.start(engine, sink, checkpointLocation=str(tmp_path / "co"), late=late_sink)

        def move(number: int) -> None:
            if number == 1:
                owners = engine.owners()[0]
                engine.migrate(to=[1 - owner for owner in owners]).wait(60)

        assert drive(spark, tmp_path / "ours", ours, move) == expected
        rest = engine.finish(None).collect()
    # What Spark would keep open for ever.
    assert sorted((row.k, row.what) for row in rest) == [("e", "closed")]
    assert [(row.k, row.v) for row in late] == [("a", 99.0)]


def test_a_batch_sees_each_key_once(spark: Any) -> None:
    df = spark.createDataFrame([row(*fields) for file in FILES for fields in file], INPUT)

    def count(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
        assert not state.exists and not state.hasTimedOut
        state.setTimeoutTimestamp(5)
        yield pd.DataFrame([[key[0], sum(map(len, frames))]])

    arguments = count, "k string, n bigint", "n bigint", "append", "EventTimeTimeout"
    counts = pk.spark.apply_in_pandas_with_state(df, "k", *arguments, partitions=2)
    # Spark itself refuses the function in a batch query.
    assert sorted(counts.collect()) == sorted(df.groupBy("k").count().collect())


def test_a_stream_without_watermark_has_no_event_time_timeouts(spark: Any) -> None:
    df = spark.readStream.format("rate").load().selectExpr("value AS k", "timestamp AS ts")
    with pytest.raises(ConfigError, match="withWatermark"):
        pk.spark.apply_in_pandas_with_state(df, "k", make_sessions(), OUTPUT, STATE, "update", "EventTimeTimeout")
    stream = pk.spark.apply_in_pandas_with_state(
        df.withWatermark("ts", "3 seconds"), "k", make_sessions(), OUTPUT, STATE, "update", "EventTimeTimeout"
    )
    assert (stream.flow.event_time, stream.flow.lateness_ms) == ("ts", 3_000)


def test_the_step_has_a_name_and_side_outputs_and_what_has_no_effect_is_refused(spark: Any, tmp_path: Path) -> None:
    schema = "k string, n bigint"
    spark.createDataFrame([("a", 1), ("b", 2)], schema).write.parquet(str(tmp_path / "in"))
    df = spark.readStream.schema(schema).parquet(str(tmp_path / "in"))

    def apart(key: Any, frames: Any, state: Any) -> Iterator[Any]:
        for frame in frames:
            yield frame
            yield pk.side("odd", frame[frame.n % 2 == 1])

    arguments = apart, schema, "n bigint"
    stream = pk.spark.apply_in_pandas_with_state(df, "k", *arguments, name="apart", sides={"odd": schema})
    found: list[Any] = []
    odd: list[Any] = []
    with pk.Engine(spark, workers=1) as engine:
        query = stream.start(
            engine,
            lambda df, batch_id: found.extend(df.collect()),
            sides={"odd": lambda df, batch_id: odd.extend(df.collect())},
            checkpointLocation=str(tmp_path / "checkpoint"),
        )
        try:
            query.processAllAvailable()
        finally:
            query.stop()
    assert (sorted(map(tuple, found)), list(map(tuple, odd))) == ([("a", 1), ("b", 2)], [("a", 1)])
    assert pk.state.operators(str(tmp_path / "checkpoint")).column("name").to_pylist() == ["apart"]
    with pytest.raises(ConfigError, match="partitions=3: a stream has the workers of its engine"):
        pk.spark.apply_in_pandas_with_state(df, "k", *arguments, partitions=3)
    with pytest.raises(ConfigError, match="one output"):
        pk.spark.apply_in_pandas_with_state(spark.range(1), "id", *arguments, sides={"odd": schema})
    with pytest.raises(ConfigError, match="name columns by their names"):
        pk.spark.apply_in_pandas_with_state(df, df.k, *arguments)
