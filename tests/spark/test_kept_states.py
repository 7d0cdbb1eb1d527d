"""What a function written for Spark finds of its state: the values that Spark's own ``applyInPandasWithState`` has."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import penstock as pk
from penstock.errors import ConfigError

pytestmark = pytest.mark.spark

#: Spark 4.3 reads no state with lists and maps.
STATE = "d decimal(10,2), f float, a date, t timestamp, s struct<x: int, y: decimal(5,1), a: date>, b binary"
OUTPUT = "k int, seen string, left string"


def make_adds() -> Any:
    # Inside, so that it is pickled by value: executors cannot import a test.
    def adds(key: tuple[int], frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        """Written for Spark: adds to a state of each type, and says what it found and what it left."""
        rows = sum(map(len, frames))
        assert rows
        noon = datetime.datetime(2024, 1, 1, 12)
        d, f, a, t, s, b = state.getOption or (Decimal(0), 0.0, noon.date(), noon, None, None)
        before = repr(state.getOption)
        step = Decimal(int(key[0])) * Decimal("0.333")
        struct = {"x": 1, "y": Decimal("2.25"), "a": noon} if s is None else (s.x + 1, s["y"] + step, s[2])
        # Of a date and of a number of days; of a datetime its date is kept.
        day = noon + (a - noon.date()) + datetime.timedelta(days=1)
        state.update((d + step, f + 0.1, day, t + (day.date() - a), struct, bytearray(b"x") + (b or b"")))
        yield pd.DataFrame({"k": [key[0]], "seen": [before], "left": [repr(state.get)]})

    return adds


def found(spark: Any, folder: Path, start: Any) -> list[list[tuple[Any, ...]]]:
    """What comes out of three batches of the keys 1, 2 and 3."""
    seen: dict[int, list[tuple[Any, ...]]] = {}

    def sink(df: Any, batch_id: int) -> None:
        seen[batch_id] = sorted(map(tuple, df.collect()))

    query = None
    try:
        for _ in range(3):
            spark.range(1, 4).selectExpr("CAST(id AS int) AS k").coalesce(1).write.mode("append").parquet(str(folder))
            if query is None:
                query = start(spark.readStream.schema("k int").parquet(str(folder)), sink)
            query.processAllAvailable()
    finally:
        if query is not None:
            query.stop()
    return [seen[batch] for batch in sorted(seen)]


def test_a_state_is_kept_as_spark_keeps_it(spark: Any, tmp_path: Path) -> None:
    spark.conf.set("spark.sql.shuffle.partitions", "1")

    def theirs(df: Any, sink: Any) -> Any:
        df = df.groupBy("k").applyInPandasWithState(make_adds(), OUTPUT, STATE, "update", "NoTimeout")
        writer = df.writeStream.foreachBatch(sink).outputMode("update")
        return writer.option("checkpointLocation", str(tmp_path / "ct")).start()

    expected = found(spark, tmp_path / "theirs", theirs)
    with pk.Engine(spark, workers=1) as engine:

        def ours(df: Any, sink: Any) -> Any:
            stream = pk.spark.apply_in_pandas_with_state(df, "k", make_adds(), OUTPUT, STATE)
            return stream.start(engine, sink, checkpointLocation=str(tmp_path / "co"))

        assert found(spark, tmp_path / "ours", ours) == expected
    # What is durable is the same, and can be read; times are what the function's clock says.
    table = pk.state.read(tmp_path / "co")
    assert table.column("readable").to_pylist() == [True] * 3 and table.column("problem").null_count == 3
    values = {row["k"]: row["value"] for row in table.to_pylist()}
    assert values[2] == {
        "d": Decimal("2.01"),  # of 0.666 each time 0.67
        "f": pytest.approx(0.3),
        "a": datetime.date(2024, 1, 4),
        "t": datetime.datetime(2024, 1, 4, 12),
        "s": {"x": 3, "y": Decimal("3.7"), "a": datetime.date(2024, 1, 1)},
        "b": b"xxx",
    }


def test_a_stream_starts_with_a_checkpoint_and_a_name_of_the_engine_s(spark: Any, tmp_path: Path) -> None:
    spark.range(3).selectExpr("CAST(id AS int) AS k").write.parquet(str(tmp_path / "in"))
    df = spark.readStream.schema("k int").parquet(str(tmp_path / "in"))

    def once(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
        state.update((1,))
        yield pd.DataFrame({"k": [key[0]]})

    stream = pk.spark.apply_in_pandas_with_state(df, "k", once, "k int", "n int")
    with pk.Engine(spark, workers=1) as engine:
        query = stream.start(engine, lambda df, batch_id: None, checkpoint=str(tmp_path / "mine"), name="visits")
        try:
            query.processAllAvailable()
        finally:
            query.stop()
        assert {name: one.checkpoint for name, one in engine.queries.items()} == {"visits": str(tmp_path / "mine")}
        assert stream.foreach_batch(engine, print, checkpoint=None)._checkpoint is None
        with pytest.raises(ConfigError, match="checkpoint=7 must be a path or URL"):
            stream.start(engine, print, checkpoint=7)
        for name in ("format", "outputMode", "partitionBy"):
            with pytest.raises(ConfigError, match=rf"start\({name}=...\): rows go to the sink"):
                stream.start(engine, print, **{name: "append"})
    assert sorted(row["k"] for row in pk.state.read(tmp_path / "mine").to_pylist()) == [0, 1, 2]
