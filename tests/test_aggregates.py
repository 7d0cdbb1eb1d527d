"""Aggregates beside plain Python: every function, with and without windows, on one worker and several."""

from __future__ import annotations

import decimal
import math
import random
import statistics
import struct
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock as pk
from penstock.errors import ConfigError, PlanError, SchemaError

Row = dict[str, Any]
NAN = float("nan")


def made(count: int = 3_000) -> list[Row]:
    rng = random.Random(7)
    return [
        {
            "k": rng.choice(["ann", "bob", "cy", None]),
            "i": rng.choice([None, *range(-20, 20)]),
            "f": rng.choice([None, 0.0, -0.0, 1.5, -2.25, NAN, 1e12, rng.uniform(-5, 5)]),
            "s": rng.choice([None, "", "a", "b", "long " * 9]),
            "ts": rng.randrange(0, 100_000),
        }
        for _ in range(count)
    ]


ROWS = made()
SCHEMA = pa.schema([("k", pa.string()), ("i", pa.int64()), ("f", pa.float64()), ("s", pa.string()), ("ts", pa.int64())])
TABLE = pa.Table.from_pylist(ROWS, SCHEMA)
FLOW = pk.Flow(SCHEMA, event_time="ts", lateness="1s")


def order(value: Any) -> tuple[Any, ...]:
    """Nulls first, NaN last, one zero."""
    if value is None:
        return (0,)
    return (1, isinstance(value, float) and math.isnan(value), 0.0 if value != value else value)


def values(rows: list[Row], column: str) -> list[Any]:
    return [row[column] for row in rows if row[column] is not None]


def by(column: str, by: str, greatest: bool) -> Callable[[list[Row]], Any]:
    def find(rows: list[Row]) -> Any:
        found = [row for row in rows if row[by] is not None]
        best = (max if greatest else min)(found, key=lambda row: (order(row[by]), order(row[column])), default=None)
        return None if best is None else best[column]

    return find


def moments(column: str, f: Callable[[list[float]], float], least: int) -> Callable[[list[Row]], Any]:
    def find(rows: list[Row]) -> Any:
        found = [float(value) for value in values(rows, column)]
        if len(found) < least:
            return None
        return NAN if any(math.isnan(value) for value in found) else f(found)

    return find


def distinct(column: str) -> Callable[[list[Row]], int]:
    return lambda rows: len({order(value) for value in values(rows, column)})


def quantile(column: str, q: float) -> Callable[[list[Row]], Any]:
    def find(rows: list[Row]) -> Any:
        found = sorted(values(rows, column), key=order)
        return found[max(math.ceil(q * len(found)), 1) - 1] if found else None

    return find


CASES: dict[str, tuple[pk.Aggregate, Callable[[list[Row]], Any], float]] = {
    "least": (pk.min_by("s", by="f"), by("s", "f", False), 0),
    "greatest": (pk.max_by("f", by="i"), by("f", "i", True), 0),
    "greatest_text": (pk.max_by("i", by="s"), by("i", "s", True), 0),
    "first": (pk.first("i"), by("i", "ts", False), 0),
    "last": (pk.last("s"), by("s", "ts", True), 0),
    "variance": (pk.variance("i"), moments("i", statistics.variance, 2), 1e-9),
    "var_pop": (pk.var_pop("i"), moments("i", statistics.pvariance, 1), 1e-9),
    "stddev": (pk.stddev("i"), moments("i", statistics.stdev, 2), 1e-9),
    "stddev_pop": (pk.stddev_pop("f"), moments("f", statistics.pstdev, 1), 1e-9),
    "distinct_i": (pk.count_distinct("i"), distinct("i"), 0),
    "distinct_f": (pk.count_distinct("f"), distinct("f"), 0),
    "distinct_s": (pk.count_distinct("s"), distinct("s"), 0),
    "about_f": (pk.approx_count_distinct("f", error=0.01), distinct("f"), 0.04),
    "median": (pk.approx_quantile("f", 0.5), quantile("f", 0.5), 0.01),
    "tail": (pk.approx_quantile("f", 0.9, error=0.001), quantile("f", 0.9), 0.001),
    "least_i": (pk.approx_quantile("i", 0), quantile("i", 0), 0.01),
}


def check(out: pa.Table, groups: dict[tuple[Any, ...], list[Row]], keys: list[str]) -> None:
    found = {tuple(row[key] for key in keys): row for row in out.to_pylist()}
    assert len(found) == out.num_rows and found.keys() == groups.keys()
    for key, rows in groups.items():
        for name, (_, naive, error) in CASES.items():
            got, wanted = found[key][name], naive(rows)
            if error or (isinstance(wanted, float) and wanted == wanted):
                same = got == wanted or (wanted is not None and math.isclose(got, wanted, rel_tol=error or 1e-12))
                same = same or (got != got and wanted != wanted)
            else:
                same = got == wanted or (got != got and wanted != wanted)
            assert same, f"{name} of {key}: {got!r} is not {wanted!r}"


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_aggregate_equals_plain_python(workers: int) -> None:
    groups = defaultdict(list)
    for row in ROWS:
        groups[(row["k"],)].append(row)
    flow = FLOW.key_by("k").agg(**{name: case[0] for name, case in CASES.items()})
    check(flow.collect(TABLE, workers=workers, batch_rows=100), groups, ["k"])


@pytest.mark.parametrize("workers", [1, 3])
def test_every_aggregate_in_sliding_windows(workers: int) -> None:
    groups = defaultdict(list)
    for row in ROWS:
        last = row["ts"] // 10_000 * 10_000
        for start in (last, last - 10_000):
            groups[(start, row["k"])].append(row)
    flow = FLOW.key_by("k").window(pk.sliding("20s", every="10s")).agg(**{n: case[0] for n, case in CASES.items()})
    check(flow.collect(TABLE, workers=workers, batch_rows=100), groups, ["window_start", "k"])


def sessions_of_all(gap: int) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    own: list[Row] = []
    for row in sorted(ROWS, key=lambda row: row["ts"]):
        if own and row["ts"] - own[-1]["ts"] > gap:
            own = []
        own = own or groups.setdefault((row["ts"],), own)
        own.append(row)
    return groups


@pytest.mark.parametrize("how", [{"workers": 1}, {"workers": 3}, {"processes": 2}], ids=str)
@pytest.mark.parametrize("window", [None, pk.sliding("20s", every="10s"), pk.session("100ms")], ids=str)
def test_all_rows_are_one_group_where_there_is_no_key(window: pk.Window | None, how: dict[str, int]) -> None:
    groups: dict[tuple[Any, ...], list[Row]]
    if window is None:
        groups = {(): ROWS}
    elif window.kind == "session":
        groups = sessions_of_all(100)
        assert len(groups) > 20
    else:
        groups = defaultdict(list)
        for row in ROWS:
            last = row["ts"] // 10_000 * 10_000
            for start in (last, last - 10_000):
                groups[(start,)].append(row)
    cut = FLOW if window is None else FLOW.window(window)
    flow = cut.agg(**{name: case[0] for name, case in CASES.items()})
    head = () if window is None else ("window_start", "window_end")
    assert flow.columns == (*head, *CASES) and "exchange: all rows to one bin" in flow.explain()
    check(flow.collect(TABLE, batch_rows=100, **how), groups, list(head[:1]))
    assert flow.collect(TABLE.slice(0, 0), **how).num_rows == 0, "no group without a row"


def test_all_rows_of_a_stream_are_one_group_where_there_is_no_key() -> None:
    batches = TABLE.to_batches(max_chunksize=1_000)

    def given(flow: pk.Flow) -> list[Row]:
        return [row for batch in flow.run(batches, 2, streaming=True) for row in batch.to_pylist()]

    counts = {"n": pk.count(), "d": pk.count_distinct("s")}
    last = {"n": len(ROWS), "d": distinct("s")(ROWS)}
    updates = given(FLOW.agg(**counts))
    assert [row["n"] for row in updates] == [1_000, 2_000, 3_000] and updates[-1] == last
    assert given(FLOW.agg(emit="final", **counts)) == [last]
    # Behind one with keys, and beside columns of those names.
    each = FLOW.key_by("k").agg(n=pk.count(), emit="final")
    assert given(each.agg(k=pk.count(), n=pk.sum("n"), emit="final")) == [{"k": 4, "n": len(ROWS)}]


def test_an_aggregate_called_name_stands_in_its_place() -> None:
    assert FLOW.agg(a=pk.count(), name=pk.count(), b=pk.count()).columns == ("a", "name", "b")
    assert FLOW.agg(a=pk.count(), name="kept").columns == ("a",)


def test_distinct_gives_each_combination_once() -> None:
    flow = FLOW.distinct("k", "f")
    assert flow.columns == ("k", "f") and flow.output_schema.field("f").type == pa.float64()
    wanted = sorted({(order(row["k"]), order(row["f"])) for row in ROWS})
    for workers in (1, 4):
        out = flow.collect(TABLE, workers=workers, batch_rows=64).to_pylist()
        assert sorted((order(row["k"]), order(row["f"])) for row in out) == wanted
    windowed = FLOW.window(pk.tumbling("10s")).distinct("s")
    assert windowed.columns == ("window_start", "window_end", "s")
    out = windowed.collect(TABLE, workers=2).to_pylist()
    found = sorted((row["window_start"], order(row["s"])) for row in out)
    assert found == sorted({(row["ts"] // 10_000 * 10_000, order(row["s"])) for row in ROWS})
    # Of a stream each comes with the batch that has it first, and event time goes on.
    batches = TABLE.select(["s", "ts"]).to_batches(max_chunksize=500)
    out = pk.Flow(batches[0].schema).distinct("s").run(batches, streaming=True, workers=2)
    assert sorted(order(row["s"]) for batch in out for row in batch.to_pylist()) == sorted(
        {order(row["s"]) for row in ROWS}
    )
    behind = FLOW.distinct("k", "ts").key_by("k").window(pk.tumbling("100s")).agg(n=pk.count())
    counts = {row["k"]: row["n"] for row in behind.collect(TABLE, workers=2).to_pylist()}
    assert counts == {k: len({row["ts"] for row in ROWS if row["k"] == k}) for k in ("ann", "bob", "cy", None)}


@pytest.mark.parametrize("window", [None, pk.tumbling("1s"), pk.session("1s")])
def test_values_of_extension_types_are_of_that_type(window: pk.Window | None) -> None:
    uuids = [b"b" * 16, b"a" * 16, None]
    rows = pa.table({"u": pa.array(uuids, pa.uuid()), "t": [1, 2, 3]})
    flow = pk.Flow(rows.schema, event_time="t")
    flow = flow if window is None else flow.window(window)
    gives = {"min": pk.min("u"), "first": pk.first("u"), "max": pk.max("u"), "last": pk.last("u")}
    flow = flow.agg(**gives, early=pk.min_by("u", by="t"), late=pk.max_by("u", by="t"), n=pk.count("u"))
    out = flow.collect(rows)
    names = [*gives, "early", "late"]
    assert out.schema == flow.output_schema and {out.schema.field(name).type for name in names} == {pa.uuid()}
    stored = [[one for part in out[name].chunks for one in part.storage.to_pylist()] for name in names]
    assert stored == [[uuids[at]] for at in (1, 0, 0, 2, 0, 2)] and out["n"].to_pylist() == [2]


@pytest.mark.parametrize("window", [None, pk.tumbling("1s")])
def test_a_value_of_an_extension_type_goes_to_spark_as_it_is_stored(window: pk.Window | None) -> None:
    flow = pk.Flow(pa.schema({"u": pa.uuid(), "t": pa.int64()}), event_time="t")
    flow = (flow if window is None else flow.window(window)).agg(m=pk.min("u"))
    assert flow.output_ddl.endswith("`m` binary")
    rows = pa.record_batch({"u": [b"b" * 16, b"a" * 16], "t": [1, 2]})
    out = list(flow.map_in_arrow(per_partition=True)(iter([rows])))
    assert [row["m"] for batch in out for row in batch.to_pylist()] == [b"a" * 16]


def test_every_nan_is_above_all_numbers() -> None:
    """Also one with a sign, as 0 / 0 gives it on some processors, and of half floats."""
    signed = struct.unpack("<d", struct.pack("<Q", 0xFFF8 << 48))[0]
    for kind in (pa.float64(), pa.float32(), pa.float16()):
        values = pa.array(np.array([signed, 1.0], kind.to_pandas_dtype()), kind)
        table = pa.table({"b": [1, 1], "v": values})
        flow = (
            pk.Flow(table.schema)
            .key_by("b")
            .agg(most=pk.max("v"), least=pk.min("v"), over=pk.max_by("v", by="b"), under=pk.min_by("v", by="b"))
        )
        [row] = flow.collect(table).to_pylist()
        assert math.isnan(row["most"]) and math.isnan(row["over"]), kind
        assert (row["least"], row["under"]) == (1.0, 1.0), kind


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("window", [None, pk.tumbling("1s"), pk.sliding("4s", "1s"), pk.session("1s")], ids=str)
def test_a_mean_of_decimals_holds_where_their_sum_does_not(window: pk.Window | None, workers: int) -> None:
    most = decimal.Decimal(9 * 10**37)
    for kind, unit in ((pa.decimal128(38, 0), 1), (pa.decimal128(38, 2), 100)):
        n = 1_000
        table = pa.table({"k": [1] * n, "ts": [0] * n, "x": pa.array([most / unit] * n, kind)})
        keyed = pk.Flow(table.schema, event_time="ts").key_by("k")
        cut = keyed if window is None else keyed.window(window)
        means = cut.agg(m=pk.mean("x")).collect(table, workers).to_pylist()
        assert means and all(row["m"] == pytest.approx(9e37 / unit, rel=1e-15) for row in means)


def test_the_error_of_a_sum_of_decimals_does_not_say_to_do_what_is_done() -> None:
    for scale, says in (
        (0, "make the column double before"),
        (2, "give the column a smaller scale, or make it double"),
    ):
        kind = pa.decimal128(38, scale)
        most = decimal.Decimal(9 * 10**37).scaleb(-scale)
        table = pa.table({"k": [1, 1], "x": pa.array([most, most], kind)})
        flow = pk.Flow(table.schema).key_by("k").agg(m=pk.sum("x"))
        with pytest.raises(SchemaError, match=rf"the sum in column 'm' overflows decimal\(38,{scale}\); {says}"):
            flow.collect(table)


@pytest.mark.parametrize("window", [None, pk.tumbling("1s"), pk.sliding("2s", "1s"), pk.session("1s")], ids=str)
@pytest.mark.parametrize("batch_rows", [7, 5_000])
def test_quantiles_of_many_buckets_are_those_of_plain_python(window: pk.Window | None, batch_rows: int) -> None:
    dice = random.Random(7)
    values = [dice.choice((-1, 1)) * 10 ** dice.uniform(-300, 300) for _ in range(5_000)]
    table = pa.table({"k": [n % 3 for n in range(5_000)], "ts": [0] * 5_000, "x": values})
    keyed = pk.Flow(table.schema, event_time="ts").key_by("k")
    cut = keyed if window is None else keyed.window(window)
    for row in cut.agg(q=pk.approx_quantile("x", 0.3, error=1e-5)).collect(table, batch_rows=batch_rows).to_pylist():
        mine = sorted(values[row["k"] :: 3])
        assert row["q"] == pytest.approx(mine[math.ceil(len(mine) * 0.3) - 1], rel=1e-5)


def test_gaps_of_sessions_out_of_range_say_at_which_end() -> None:
    keyed = pk.Flow("k bigint, ts bigint", event_time="ts").key_by("k")
    with pytest.raises(PlanError, match="is longer than the range of event times"):
        keyed.window(pk.session("30000000d")).agg(n=pk.count()).explain()


def test_what_is_wrong_is_told() -> None:
    keyed = FLOW.key_by("k")
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: pk.approx_quantile("f", 1.5), ConfigError, "q=1.5: give a number from 0 to 1"),
        (lambda: pk.approx_quantile("f", True), ConfigError, "q=True"),
        (lambda: pk.approx_quantile("f", 0.5, error=0), ConfigError, "error=0: give a number from 1e-05"),
        (lambda: pk.approx_count_distinct("f", error=0.001), ConfigError, r"error=0\.001: give a number from 0\.0021"),
        (lambda: pk.min_by("f", ""), ConfigError, r"min_by\(by=''\): give the name of a column"),
        (lambda: keyed.agg(x=pk.min_by("f", "nope")), SchemaError, "column 'nope' does not exist"),
        (lambda: pk.Flow(SCHEMA).key_by("k").agg(x=pk.last("f")), PlanError, r"max_by\(\.\.\., by='column'\)"),
        (lambda: keyed.agg(x=pk.variance("s")).output_schema, SchemaError, "a variance or deviation needs"),
        (lambda: keyed.agg(x=pk.approx_quantile("s", 0.5)).output_schema, SchemaError, "quantile needs integers"),
        (lambda: keyed.distinct("i"), PlanError, r"leave key_by\(k\) out"),
        (lambda: FLOW.distinct("nope"), SchemaError, "column 'nope' does not exist"),
        (lambda: FLOW.distinct("i", "i"), ConfigError, "names column 'i' twice"),
    ]
    nested = pk.Flow(pa.schema([("k", pa.int64()), ("l", pa.list_(pa.int64()))])).key_by("k")
    wrong.append((lambda: nested.agg(x=pk.max_by("k", by="l")).output_schema, SchemaError, "needs an order"))
    runs = pk.Flow(pa.schema([("k", pa.int64()), ("r", pa.run_end_encoded(pa.int32(), pa.string()))])).key_by("k")
    wrong.append((lambda: runs.agg(x=pk.min("r")).output_schema, SchemaError, "a run-end encoded column: convert it"))
    for make, kind, words in wrong:
        with pytest.raises(kind, match=words):
            make()
    assert str(pk.min_by("a", by="b")) == "min_by(a by b)"
    flow = keyed.agg(a=pk.approx_quantile("f", 0.9), b=pk.max_by("i", "f"))
    assert "a=approx_quantile(f, 0.9, error=0.01), b=max_by(i by f)" in repr(flow)
    assert "a = approx_quantile(f, 0.9, error 0.0078125), b = max_by(i by f)" in flow.explain()
