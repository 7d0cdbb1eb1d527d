"""Aggregates and windows beside Spark SQL: nulls, NaN, zeros, decimals, single values and empty groups."""

from __future__ import annotations

import decimal
import math
import random
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from engine_support import frame
from penstock.spark._session.collect import to_table

pytestmark = pytest.mark.spark

NAN = float("nan")


def table() -> pa.Table:
    rng = random.Random(3)
    rows = [
        {
            "k": rng.randrange(6),
            "i": rng.choice([None, *range(-5, 5)]),
            "f": rng.choice([None, 0.0, -0.0, 1.25, -7.5, 1e15, rng.uniform(-1, 1)]),
            "d": rng.choice([None, decimal.Decimal("12.34"), decimal.Decimal("-0.01"), decimal.Decimal("99999999.99")]),
            "s": rng.choice([None, "", "a", "b"]),
            "t": number,
        }
        for number in range(1_200)
    ]
    # A key with NaN, one with a single value, one with none, one with an infinity.
    rows += [{"k": 10, "i": 1, "f": f, "d": None, "s": "a", "t": 2_000 + at} for at, f in enumerate((NAN, 1.0, 2.0))]
    rows += [{"k": 11, "i": 4, "f": 0.5, "d": decimal.Decimal("1.00"), "s": "z", "t": 3_000}]
    rows += [{"k": 12, "i": None, "f": None, "d": None, "s": None, "t": 4_000}]
    rows += [{"k": 13, "i": 1, "f": f, "d": None, "s": None, "t": 5_000 + at} for at, f in enumerate((math.inf, 1.0))]
    schema = [("k", pa.int64()), ("i", pa.int64()), ("f", pa.float64()), ("d", pa.decimal128(10, 2))]
    return pa.Table.from_pylist(rows, pa.schema([*schema, ("s", pa.string()), ("t", pa.int64())]))


#: Spark SQL, and ours. Where Spark takes any of several rows, `by` has each value once a key: t has.
FUNCTIONS: dict[str, tuple[str, pk.Aggregate]] = {
    "a": ("variance(i)", pk.variance("i")),
    "b": ("var_pop(f)", pk.var_pop("f")),
    "c": ("stddev(d)", pk.stddev("d")),
    "d1": ("stddev_pop(i)", pk.stddev_pop("i")),
    "e": ("var_samp(f)", pk.variance("f")),
    "g": ("count(DISTINCT f)", pk.count_distinct("f")),
    "h": ("count(DISTINCT s)", pk.count_distinct("s")),
    "j": ("count(DISTINCT d)", pk.count_distinct("d")),
    "l": ("min_by(s, t)", pk.min_by("s", by="t")),
    "m": ("max_by(d, t)", pk.max_by("d", by="t")),
    "n": ("min_by(t, -t)", pk.last("t")),
    "o": ("max_by(f, t)", pk.last("f")),
    "p": ("max(struct(f, s)).s", pk.max_by("s", by="f")),
    "q": ("sum(d)", pk.sum("d")),
    "r": ("min_by(f, t)", pk.first("f")),
}


def near(got: Any, wanted: Any) -> bool:
    if isinstance(got, float) and isinstance(wanted, float):
        return got == wanted or math.isclose(got, wanted, rel_tol=1e-9) or (got != got and wanted != wanted)
    return bool(got == wanted)


def test_values_are_those_of_spark_sql(spark: Any) -> None:
    rows = table()
    df = frame(spark, rows)
    df.createOrReplaceTempView("aggregated")
    columns = ", ".join(f"{sql} AS {name}" for name, (sql, _) in FUNCTIONS.items())
    # In Spark a null in the first field of a struct counts: leave those out where the pair decides.
    columns = columns.replace("max(struct(f, s)).s", "max(CASE WHEN f IS NOT NULL THEN struct(f + 0.0D, s) END).s")
    wanted = {row["k"]: row for row in spark.sql(f"SELECT k, {columns} FROM aggregated GROUP BY k").collect()}
    flow = pk.Flow(rows.schema, event_time="t").key_by("k").agg(**{name: ours for name, (_, ours) in FUNCTIONS.items()})
    local = flow.collect(rows, workers=3)
    spread = to_table(pk.spark.run(flow, df.repartition(3))).cast(local.schema)
    for out in (local, spread):
        got = {row["k"]: row for row in out.to_pylist()}
        assert got.keys() == wanted.keys()
        for key, row in got.items():
            for name, (sql, _) in FUNCTIONS.items():
                assert near(row[name], wanted[key][name]), f"{sql} of {key}: {row[name]!r}, {wanted[key][name]!r}"


def test_approximations_are_near_those_of_spark(spark: Any) -> None:
    rows = table()
    frame(spark, rows).createOrReplaceTempView("aggregated")
    sql = "SELECT k, percentile_approx(f, 0.5, 100000) q, count(DISTINCT t) n FROM aggregated GROUP BY k"
    aggregates = {"q": pk.approx_quantile("f", 0.5, error=0.001), "n": pk.approx_count_distinct("t", error=0.005)}
    flow = pk.Flow(rows.schema).key_by("k").agg(**aggregates)
    got = {row["k"]: row for row in flow.collect(rows).to_pylist()}
    # Spark's quantiles have no place for NaN, ours put it above all numbers.
    for row in spark.sql(f"{sql} HAVING k <> 10").collect():
        q = got[row["k"]]["q"]
        assert near(q, row["q"]) or math.isclose(q, row["q"], rel_tol=0.001)
        assert math.isclose(got[row["k"]]["n"], row["n"], rel_tol=0.02)


def test_distinct_rows_are_those_of_spark(spark: Any) -> None:
    rows = table().select(["k", "f", "s"])
    df = frame(spark, rows)
    flow = pk.Flow(rows.schema).distinct("f", "s")
    plain = [(row["f"], row["s"]) for row in df.select("f", "s").distinct().collect()]
    for out in (flow.collect(rows, workers=2), to_table(pk.spark.run(flow, df.repartition(3)))):
        found = [(row["f"], row["s"]) for row in out.to_pylist()]
        assert len(found) == len(plain)
        assert {repr(row).replace("-0.0", "0.0") for row in found} == {repr(r).replace("-0.0", "0.0") for r in plain}


def test_sessions_and_offsets_are_those_of_spark(spark: Any) -> None:
    rng = random.Random(9)
    rows = [{"k": rng.randrange(20), "ts": rng.randrange(0, 2_000) * 5_000_000} for _ in range(1_500)]
    times = pa.array([row["ts"] for row in rows], pa.timestamp("us", tz="UTC"))
    table = pa.table({"k": pa.array([row["k"] for row in rows], pa.int64()), "ts": times})
    df = frame(spark, table)
    df.createOrReplaceTempView("timed")
    cuts = {
        "session_window(ts, '60 seconds')": pk.session("60s"),
        "window(ts, '10 minutes', '5 minutes', '2 minutes')": pk.sliding("10m", every="5m", offset="2m"),
    }
    for sql, ours in cuts.items():
        flow = pk.Flow(table.schema, event_time="ts").key_by("k").window(ours).agg(n=pk.count())
        spread = to_table(pk.spark.run(flow, df.repartition(3))).cast(flow.output_schema)
        name = sql.partition("(")[0]
        names = f"{name}.start window_start, {name}.end window_end, k, count(*) n"
        wanted = to_table(spark.sql(f"SELECT {names} FROM timed GROUP BY k, {sql}")).cast(flow.output_schema)
        for out in (flow.collect(table, workers=2), spread):
            assert sorted(map(str, out.to_pylist())) == sorted(map(str, wanted.to_pylist())), sql
