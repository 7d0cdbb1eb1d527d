"""Names, types and settings that Spark sees otherwise than flows: what runs in one process runs there, or says why."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from engine_support import Kept, bag
from penstock.errors import ConfigError, SchemaError, UserFunctionError
from penstock.spark._session.collect import to_table
from penstock.spark._tasks.failures import cause_of
from penstock.spark.batch import _partitions

pytestmark = pytest.mark.spark


@contextmanager
def setting(session: Any, name: str, value: str) -> Iterator[None]:
    before = session.conf.get(name, None)
    session.conf.set(name, value)
    try:
        yield
    finally:
        if before is None:
            session.conf.unset(name)
        else:
            session.conf.set(name, before)


# Names that differ in case only

TWO = "k bigint, K bigint, v bigint"


def two(spark: Any) -> Any:
    return spark.range(12).selectExpr("id % 3", "id % 2", "id").toDF("k", "K", "v")


def in_place(df: Any) -> pa.Table:
    return to_table(df).sort_by([("K", "ascending"), ("v", "ascending")])


def counts() -> pk.Flow:
    flow = pk.Flow("k bigint, v bigint").key_by("k").agg(n=pk.count(), N=pk.sum("v"), emit="final")
    return flow.key_by("n").agg(x=pk.sum("N"), X=pk.count())


def followed(flow: pk.Flow) -> pk.Flow:
    """Of each key what has come of K, with each row."""

    # Inside, so that it is pickled by value: executors cannot import a test.
    def running(seen: list[int] | None, k: int, K: int, v: int) -> Any:
        seen = [*(seen or []), K]
        return seen, (k, ",".join(map(str, seen)))

    return flow.key_by("k").stateful_map(running, schema="k bigint, K string")


def in_order() -> pk.Flow:
    return followed(pk.Flow(TWO, order_by=("K", "v")))


def of_two(order_by: Any = None) -> pk.Flow:
    flow = pk.Flow(TWO, name="p", order_by=order_by).union(pk.Flow(TWO, name="P", order_by=order_by))
    if order_by:
        return followed(flow)
    return flow.map_batches(lambda batch: batch.select(["K", "v"]), schema="K bigint, v bigint")


@pytest.mark.parametrize("flow", [counts(), in_order()], ids=["intermediate", "sorted"])
def test_names_that_differ_in_case_are_names_of_their_own(spark: Any, flow: pk.Flow) -> None:
    df = two(spark)
    rows = in_place(df)
    assert bag(to_table(pk.spark.run(flow, df))) == bag(flow.collect(rows))
    kept = Kept()
    with pk.Engine(spark, workers=1) as engine:
        function = engine.foreach_batch(flow, kept)
        for batch in range(2):  # the second comes by way of the driver
            function(df.repartition(2), batch)
        found = bag(*kept.batches.values(), to_table(engine.finish(None)))
    assert found == bag(flow.collect(pa.concat_tables([rows, rows])))


@pytest.mark.parametrize("order_by", [None, ("K", "v")], ids=["any", "sorted"])
def test_sources_that_differ_in_case_are_sources_of_their_own(spark: Any, order_by: Any) -> None:
    flow, df = of_two(order_by), two(spark)
    other = df.selectExpr("*").toDF("k", "K", "v").where("v < 3")
    rows = {"p": in_place(df), "P": in_place(other)}
    expected = bag(flow.collect(rows))
    assert bag(to_table(pk.spark.run(flow, {"p": df, "P": other}))) == expected
    tagged = pk.spark.tagged(p=df, P=other)
    assert tagged.columns == ["p", "P"] and tagged.schema["P"].dataType.names == ["k", "K", "v"]
    assert bag(to_table(pk.spark.run(flow, tagged))) == expected
    kept = Kept()
    with pk.Engine(spark, workers=1) as engine:
        engine.foreach_batch(flow, kept)(tagged, 0)
    assert bag(kept.batches[0]) == expected


def test_a_gang_gets_names_that_differ_in_case(spark: Any) -> None:
    gang = pk.spark.gang(two(spark), lambda worker, batches: batches, tasks=1, schema=TWO)
    assert bag(to_table(gang)) == bag(to_table(two(spark)))


# Times


@pytest.mark.parametrize("zone", ["America/New_York", "GMT+8", "Z"])
def test_rows_of_ordered_have_their_times_in_utc(spark: Any, zone: str) -> None:
    def told(row: dict[str, Any]) -> tuple[str, Any]:
        return f"{row['ts']} {row['all'][0]['t']} {row['wall']}", row["ts"]

    ordered = pk.spark.ordered(told, "s string, ts timestamp", rows=True, mode="inline")
    with setting(spark, "spark.sql.session.timeZone", zone):
        df = spark.sql(
            "SELECT timestamp'2024-07-01 12:00:00Z' AS ts, array(named_struct('t', timestamp'2024-07-01 12:00:00Z')) AS"
            " all, timestamp_ntz'2024-07-01 12:00:00' AS wall"
        )
        [row] = to_table(df.mapInArrow(ordered, ordered.ddl)).to_pylist()
    noon = datetime.datetime(2024, 7, 1, 12, tzinfo=datetime.timezone.utc)
    assert row == {"s": f"{noon} {noon} 2024-07-01 12:00:00", "ts": noon}


# Errors


def test_a_program_that_raised_is_found_where_spark_hides_tracebacks(spark: Any) -> None:
    def bad(worker: Any, batches: Any) -> Any:
        raise ZeroDivisionError("bad")

    hidden = setting(spark, "spark.sql.execution.pyspark.udf.hideTraceback.enabled", "true")
    with hidden, pytest.raises(Exception) as caught:
        pk.spark.gang(spark.range(3), bad, tasks=1, schema="k bigint").count()
    cause = cause_of(caught.value)
    assert type(cause) is UserFunctionError and cause.task == 0 and "ZeroDivisionError" in str(cause)
    assert cause.file == __file__


def test_partitions_go_by_the_cores_where_spark_has_no_number_of_them() -> None:
    told = {"spark.sql.shuffle.partitions": "auto"}
    session = SimpleNamespace(conf=told, sparkContext=SimpleNamespace(defaultParallelism=6))
    assert _partitions(SimpleNamespace(sparkSession=session), None) == 6
    told["spark.sql.shuffle.partitions"] = "7"
    assert _partitions(SimpleNamespace(sparkSession=session), None) == 7


def test_a_null_that_must_not_be_is_found_in_its_source_and_row(spark: Any) -> None:
    schema = "k bigint NOT NULL, s struct<x: bigint NOT NULL>"
    flow = pk.Flow(schema, name="people").union(pk.Flow(schema, name="sales"))
    good = spark.range(3).selectExpr("id AS k", "named_struct('x', id) AS s").coalesce(1)
    for bad, expected in (
        (
            good.selectExpr("IF(k = 2, NULL, k) AS k", "s"),
            "source 'sales' has a null in column 'k', which its schema calls NOT NULL: row 2 of a batch",
        ),
        (
            good.selectExpr("k", "named_struct('x', IF(k = 2, NULL, k)) AS s"),
            "source 'sales' column 's' has a null in its field 'x', which its schema calls NOT NULL: row 2 of a batch",
        ),
    ):
        with pytest.raises(Exception) as caught:
            pk.spark.run(flow, {"people": good, "sales": bad}).collect()
        cause = cause_of(caught.value)
        assert type(cause) is SchemaError and expected in str(cause)
        with pk.Engine(spark, workers=1) as engine:
            function = engine.foreach_batch(flow, lambda df, batch_id: df.count())
            with pytest.raises(SchemaError, match=f"^{re.escape(expected)}"):
                function(pk.spark.tagged(people=good, sales=bad), 0)


def test_a_column_of_a_type_that_arrow_has_not_is_to_be_cast(spark: Any) -> None:
    for value, kind in (("parse_json('1')", "variant"), ("INTERVAL '1' YEAR", "interval year")):
        df = spark.sql(f"SELECT 1L AS k, {value} AS v")
        with pytest.raises(SchemaError, match=f"column 'v' has the type '{kind}', .* cast it before, or leave it out"):
            pk.Flow(df.schema)


def test_a_sink_s_exception_stays_itself(spark: Any) -> None:
    cause = KeyError("why")
    error = RuntimeError("my sink: child failed with\npenstock.errors.SchemaError: not mine")

    def sink(df: Any, batch_id: int) -> None:
        raise error from cause

    with pk.Engine(spark, workers=1) as engine:
        function = engine.foreach_batch(in_order(), sink)
        with pytest.raises(RuntimeError) as caught:
            function(two(spark), 0)
        assert caught.value is error and function.error is error
        assert error.__cause__ is cause and sink.__name__ in [frame.name for frame in caught.traceback]


def test_a_sink_that_cannot_be_called_is_refused_at_once(spark: Any) -> None:
    late = pk.Flow("k bigint, ts timestamp", event_time="ts").key_by("k").window(pk.tumbling("1s")).agg(n=pk.count())
    engine = pk.Engine(spark, workers=1)
    for given, what in (
        ({"sink": lambda df: None}, "sink"),
        ({"sink": print, "late": lambda: None}, "late"),
        ({"sink": print, "late": {"input": lambda df: None}}, "late={'input': ...}"),
    ):
        with pytest.raises(ConfigError, match=r"cannot be called with \(df, batch_id\)") as caught:
            engine.foreach_batch(late, **given)
        assert str(caught.value).startswith(f"{what}: <lambda>")
    for sink in (print, lambda *given: None, lambda df, batch_id, more=1: None, Kept()):
        assert engine.foreach_batch(late, sink).error is None
