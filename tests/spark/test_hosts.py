"""One flow on every host: the same rows where the input ends, and those of the same epochs where it does not.

Rows come in any order, some of them hours behind and some without a time, and there are more than fit into one batch.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import penstock as pk
from engine_support import Kept, bag, frame
from penstock.errors import PlanError, SchemaError
from penstock.spark._session.collect import to_table

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]

ROWS = 70_000
Event = tuple[int, int, "int | None"]
Rows = Counter[tuple[Any, ...]]


@pytest.fixture(autouse=True)
def by_value() -> Iterator[None]:
    """Spark's workers cannot import this file: ship its functions, as those of a notebook are."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def engine(spark: Any) -> Iterator[pk.Engine]:
    with pk.Engine(spark, workers=1, threads=2) as engine:
        yield engine


def made() -> list[Event]:
    rng = random.Random(5)
    times = [number * 10 + rng.randrange(-2_000, 2_000) for number in range(ROWS)]
    for at in rng.sample(range(ROWS), ROWS // 20):
        times[at] -= rng.randrange(7_200_000)
    absent = set(rng.sample(range(ROWS), 500))
    return [
        (rng.randrange(40), rng.randrange(-9, 100), None if at in absent else time) for at, time in enumerate(times)
    ]


EVENTS = made()
TABLE = pa.table(
    {name: pa.array([event[at] for event in EVENTS], pa.int64()) for at, name in enumerate(("k", "v", "ts"))}
)
SOURCE = pk.Flow(TABLE.schema, event_time="ts", lateness="2s")
KEYED = SOURCE.key_by("k")


def windows(size: int, every: int) -> dict[int, list[Event]]:
    """Every window with its rows, looked up row by row."""
    held = defaultdict(list)
    for event in EVENTS:
        if event[2] is None:
            continue
        start = event[2] // every * every
        while start + size > event[2]:
            held[start].append(event)
            start -= every
    return held


def totals() -> Rows:
    held = defaultdict(list)
    for k, v, _ in EVENTS:
        held[k].append(v)
    return Counter((k, len(values), sum(values)) for k, values in held.items())


def counts(size: int, every: int) -> Rows:
    found = windows(size, every).items()
    return Counter((s, s + size, k, n) for s, own in found for k, n in Counter(k for k, _, _ in own).items())


def best(size: int, every: int) -> Rows:
    found = windows(size, every).items()
    return Counter((s, s + size, *row) for s, own in found for row in own if row[1] == max(v for _, v, _ in own))


def hottest(size: int) -> Rows:
    most: dict[int, int] = defaultdict(int)
    for (start, _, _, n), _ in counts(size, size).items():
        most[start] = max(most[start], n)
    return Counter({row: 1 for row in counts(size, size) if row[3] == most[row[0]]})


def largest() -> Rows:
    limit = sorted((total for _, _, total in totals()), reverse=True)[2]
    return Counter({row: 1 for row in totals() if row[2] >= limit})


def gathered(size: int) -> Rows:
    found: Rows = Counter()
    for start, own in windows(size, size).items():
        by_key = defaultdict(list)
        for event in own:
            by_key[event[0]].append(event)
        for k, events in by_key.items():
            last = max(events, key=lambda event: (event[2], event[1]))[1]
            found[(start, start + size, k, len({v for _, v, _ in events}), last)] += 1
    return found


def sessions(gap: int) -> Rows:
    found: Rows = Counter()
    times = defaultdict(list)
    for k, _, at in EVENTS:
        if at is not None:
            times[k].append(at)
    for k, all_of_key in times.items():
        all_of_key.sort()
        first = 0
        for number, at in enumerate(all_of_key):
            if number + 1 == len(all_of_key) or all_of_key[number + 1] - at > gap:
                found[(all_of_key[first], at + gap, k, number + 1 - first)] += 1
                first = number + 1
    return found


def once(key: tuple[int], frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """What Spark's applyInPandasWithState calls: each key's rows of an epoch, in one call."""
    rows = [len(frame) for frame in frames]
    calls = (state.get[0] if state.exists else 0) + 1
    state.update((calls,))
    yield pd.DataFrame({"k": [key[0]], "calls": [calls], "n": [sum(rows)]})


def remind(count: int | None, k: int, ts: int | None, v: int) -> Any:
    """A timer for each row that has a time."""
    return (count or 0) + 1, None, None if ts is None else (ts + 1_000, v)


def reminded(count: int, time: int, v: int, k: int) -> Any:
    return count, (k, time, v)


def counted(count: int, k: int) -> Any:
    return (k, None, count)


class Spread(pk.Aggregator):
    """How far apart the values are, in numpy's way."""

    def create(self) -> Any:
        return None

    def accumulate(self, states: list[Any], groups: Any, rows: pa.RecordBatch) -> list[Any]:
        found = pa.table({"g": groups, "v": rows["v"]}).group_by("g").aggregate([("v", "min"), ("v", "max")])
        for group, low, high in zip(*(found[name].to_pylist() for name in ("g", "v_min", "v_max")), strict=True):
            states[group] = (low, high)
        return states

    def merge(self, state: Any, other: Any) -> Any:
        return min(state[0], other[0]), max(state[1], other[1])

    def finish(self, states: list[Any]) -> pa.Table:
        return pa.table({"spread": [high - low for low, high in states]})


def even(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.filter(pc.equal(pc.bit_wise_and(batch["v"], 1), 0))


def whole(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def spreads(window: tuple[int, int] | None) -> Rows:
    found = defaultdict(list)
    for start, own in windows(*window).items() if window else [(0, EVENTS)]:
        for k, v, _ in own:
            found[(start, start + window[0], k) if window else (k,)].append(v)
    return Counter((*head, max(values) - min(values)) for head, values in found.items())


AGGS = {"n": pk.count(), "total": pk.sum("v")}
FLOWS: dict[str, tuple[pk.Flow, Callable[[], Rows]]] = {
    "map": (SOURCE.map_batches(even), lambda: Counter(event for event in EVENTS if event[1] % 2 == 0)),
    "totals": (KEYED.agg(**AGGS), totals),
    "all rows": (pk.Flow(TABLE.schema).agg(n=pk.count()), lambda: Counter({(ROWS,): 1})),
    "all rows in windows": (
        SOURCE.window(pk.sliding("60s", every="25s")).agg(n=pk.count()),
        lambda: Counter((s, s + 60_000, len(own)) for s, own in windows(60_000, 25_000).items()),
    ),
    "totals as updates": (KEYED.agg(emit="update", **AGGS), totals),
    "largest totals": (KEYED.agg(emit="final", **AGGS).top(3, by="total"), largest),
    "sliding": (KEYED.window(pk.sliding("60s", every="25s")).agg(n=pk.count()), lambda: counts(60_000, 25_000)),
    "apart": (KEYED.window(pk.sliding("7s", every="50s")).agg(n=pk.count()), lambda: counts(7_000, 50_000)),
    "gathered": (
        KEYED.window(pk.tumbling("40s")).agg(d=pk.count_distinct("v"), last=pk.last("v")),
        lambda: gathered(40_000),
    ),
    "sessions": (KEYED.window(pk.session("1s")).agg(n=pk.count()), lambda: sessions(1_000)),
    "distinct": (SOURCE.distinct("v", "k"), lambda: Counter({(v, k): 1 for k, v, _ in EVENTS})),
    "distinct in windows": (
        SOURCE.window(pk.tumbling("50s")).distinct("k"),
        lambda: Counter({(s, s + 50_000, k): 1 for s, own in windows(50_000, 50_000).items() for k, _, _ in own}),
    ),
    "hottest": (
        KEYED.window(pk.tumbling("30s")).agg(n=pk.count(), name="z").top(1, by="n", per="window", name="a"),
        lambda: hottest(30_000),
    ),
    "best apart": (
        SOURCE.window(pk.sliding("5s", every="1m")).top(1, by="v", per="window"),
        lambda: best(5_000, 60_000),
    ),
    "reminders": (
        KEYED.stateful_map(
            remind,
            schema="k bigint, at bigint, v bigint",
            columns=["k", "ts", "v"],
            on_timer=reminded,
            at_end=counted,
            ttl="30d",
        ),
        lambda: Counter(
            [(k, ts + 1_000, v) for k, v, ts in EVENTS if ts is not None] + [(k, None, n) for k, n, _ in totals()]
        ),
    ),
    "own aggregate": (KEYED.aggregate(Spread(), schema="spread bigint", emit="final"), lambda: spreads(None)),
    "own aggregate in windows": (
        KEYED.window(pk.sliding("60s", every="20s")).aggregate(Spread(), schema="spread bigint"),
        lambda: spreads((60_000, 20_000)),
    ),
    "groups": (
        KEYED.apply_in_pandas_with_state(
            once, "k bigint, calls bigint, n bigint", "calls bigint", "update", "NoTimeout", name="groups, once"
        ),
        lambda: Counter((k, 1, n) for k, n, _ in totals()),
    ),
}


def as_table(df: Any, flow: pk.Flow) -> pa.Table:
    return to_table(df).cast(flow.output_schema)


@pytest.mark.parametrize("name", FLOWS)
def test_an_input_that_ends_gives_the_same_rows_everywhere(spark: Any, engine: pk.Engine, name: str) -> None:
    flow, twin = FLOWS[name]
    expected = twin()
    assert expected
    for workers, batch_rows in ((1, 65_536), (2, ROWS), (3, 1_000)):
        late: list[pa.RecordBatch] = []
        local = flow.collect(TABLE, workers, batch_rows=batch_rows, late=late.append)
        assert bag(local) == expected, f"{workers} workers, {batch_rows} rows a batch"
        assert all(batch["ts"].null_count == batch.num_rows for batch in late), "none is late"
    df = frame(spark, TABLE)
    assert bag(as_table(pk.spark.run(flow, df.repartition(4)), flow)) == expected
    inside = df.coalesce(1).mapInArrow(flow.map_in_arrow(per_partition=flow.keyed), flow.output_ddl)
    assert bag(as_table(inside, flow)) == expected
    kept = Kept()
    engine.foreach_batch(flow, kept, late=Kept(), name=name)(df, 0)
    rest = [as_table(engine.finish(name), flow)] if flow.keyed else []
    assert bag(kept.batches[0], *rest) == expected


def test_a_flow_of_several_sources_gives_the_same_rows_everywhere(spark: Any, engine: pk.Engine) -> None:
    """The rows as those of two sources, whose totals meet a third one."""
    halves = [pk.Flow(TABLE.schema, event_time="ts", lateness="2s", name=name) for name in ("low", "high")]
    tags = pk.Flow("k bigint, tag string", name="tags")
    flow = halves[0].union(halves[1].map_batches(whole)).key_by("k").agg(emit="final", **AGGS).join(tags, on="k")
    low = pc.less(TABLE["v"], 40)
    named = pa.table({"k": pa.array([*range(30), 7, 99], pa.int64()), "tag": [f"t{at}" for at in range(32)]})
    rows = {"low": TABLE.filter(low), "high": TABLE.filter(pc.invert(low)), "tags": named}
    pairs = list(zip(*named.to_pydict().values(), strict=True))
    expected = Counter((*row, tag) for row in totals() for k, tag in pairs if k == row[0])
    assert len(expected) == 31
    for workers in (1, 3):
        assert bag(flow.collect(rows, workers)) == expected
    df = pk.spark.tagged(**{name: frame(spark, table) for name, table in rows.items()})
    assert bag(as_table(pk.spark.run(flow, df), flow)) == expected
    inside = df.coalesce(1).mapInArrow(flow.map_in_arrow(per_partition=True), flow.output_ddl)
    assert bag(as_table(inside, flow)) == expected
    kept = Kept()
    engine.foreach_batch(flow, kept, name="several sources")(df, 0)
    assert bag(kept.batches[0], as_table(engine.finish("several sources"), flow)) == expected


WIDE = pk.Flow(pa.schema([("x", pa.int64()), *TABLE.schema]), event_time="ts", lateness="2s")
NARROW: dict[str, tuple[pk.Flow, Callable[[], Rows], str]] = {
    "totals": (WIDE.key_by("k").agg(emit="final", **AGGS), totals, "k, v, ts"),
    "sliding": (
        WIDE.key_by("k").window(pk.sliding("60s", every="25s")).agg(n=pk.count()),
        lambda: counts(60_000, 25_000),
        "k, ts; where late rows are taken x, k, v, ts",
    ),
    "sessions": (
        WIDE.key_by("k").window(pk.session("1s")).agg(n=pk.count()),
        lambda: sessions(1_000),
        "k, ts; where late rows are taken x, k, v, ts",
    ),
    "distinct": (WIDE.distinct("v", "k"), FLOWS["distinct"][1], "k, v, ts"),
}


def poisoned(spark: Any) -> Any:
    """The rows, with a column that fails when it is read."""
    from pyspark.sql import functions as F

    return frame(spark, TABLE).withColumn("x", F.raise_error(F.lit("x is read")).cast("bigint"))


@pytest.mark.parametrize("name", NARROW)
def test_columns_that_nobody_reads_are_not_asked_of_spark(spark: Any, engine: pk.Engine, name: str) -> None:
    flow, twin, read = NARROW[name]
    assert f"  read: {read}\n" in flow.explain()
    assert bag(flow.collect(TABLE.append_column("x", pa.nulls(ROWS, pa.int64())), 2)) == twin()
    df = poisoned(spark)
    assert bag(as_table(pk.spark.run(flow, df), flow)) == twin()
    kept = Kept()
    engine.foreach_batch(flow, kept, name=f"narrow {name}")(df, 0)
    assert bag(kept.batches[0], as_table(engine.finish(f"narrow {name}"), flow)) == twin()
    # It must be there all the same, and of its type.
    for other, reason in (
        (df.drop("x"), "has no column 'x'"),
        (df.withColumn("x", df.k.cast("string")), "'x' is string"),
    ):
        with pytest.raises(SchemaError, match=reason):
            pk.spark.run(flow, other)
        with pytest.raises(SchemaError, match=reason):
            engine.foreach_batch(flow, kept, name=f"narrow {name} {reason}")(other, 0)
    if "late rows" in read:
        with pytest.raises(Exception, match="x is read"):
            engine.foreach_batch(flow, kept, late=Kept(), name=f"late {name}")(df, 0)


def test_a_tagged_source_is_asked_for_what_is_read(spark: Any, engine: pk.Engine) -> None:
    tags = pk.Flow("k bigint, tag string, x bigint", name="tags")
    wide = WIDE.join(tags, on="k", how="semi").key_by("k").agg(emit="final", n=pk.count())
    told = wide.explain()
    assert "source input: x bigint" in told and told.count("  read: ") == 1 and "  read: k\n" in told
    totalled = (
        WIDE.key_by("k")
        .agg(emit="final", **AGGS)
        .union(tags.key_by("k").agg(emit="final", n=pk.count(), total=pk.sum("k")))
    )
    named = spark.range(3).selectExpr("id AS k", "CAST(raise_error('tag is read') AS string) AS tag", "0L AS x")
    df = pk.spark.tagged(input=poisoned(spark), tags=named)
    expected = totals() + Counter((k, 1, k) for k in range(3))
    assert bag(as_table(pk.spark.run(totalled, df), totalled)) == expected
    assert bag(as_table(pk.spark.run(totalled, {"input": poisoned(spark), "tags": named}), totalled)) == expected
    kept = Kept()
    engine.foreach_batch(totalled, kept, name="tagged and narrow")(df, 0)
    assert bag(kept.batches[0], as_table(engine.finish("tagged and narrow"), totalled)) == expected


@pytest.mark.parametrize(
    "name",
    [
        "totals",
        "all rows in windows",
        "sliding",
        "apart",
        "hottest",
        "groups",
        "gathered",
        "sessions",
        "distinct",
        "reminders",
        "own aggregate in windows",
    ],
)
def test_a_stream_gives_the_same_rows_for_the_same_epochs(spark: Any, engine: pk.Engine, name: str) -> None:
    flow, twin = FLOWS[name]
    size = ROWS // 5
    epochs = [TABLE.slice(at, size).combine_chunks().to_batches()[0] for at in range(0, ROWS, size)]
    kept, dropped = Kept(), Kept()
    function = engine.foreach_batch(flow, kept, late=dropped, name=f"{name}, in epochs")
    for number, epoch in enumerate(epochs):
        function(frame(spark, pa.Table.from_batches([epoch])), number)
    found = bag(*kept.batches.values(), as_table(engine.finish(f"{name}, in epochs"), flow))
    for workers in (1, 3):
        late: list[pa.RecordBatch] = []
        local = pa.Table.from_batches(flow.run(epochs, workers, batch_rows=size, late=late.append, streaming=True))
        assert bag(local) == found
        assert bag(*dropped.batches.values()) == (bag(pa.Table.from_batches(late)) if late else Counter())
    if name == "totals":
        newest = {row["k"]: tuple(row.values()) for row in local.to_pylist()}
        assert Counter(newest.values()) == twin(), "the last update of a key is its final value"
        assert local.num_rows == 5 * len(newest)
    elif name == "reminders":
        assert local.num_rows == sum(twin().values()) and found == twin(), "nothing of it is late"
    elif name == "distinct":
        assert local.num_rows == len(twin()), "each once in all epochs together"
    elif name != "groups":
        assert any(batch["ts"].null_count < batch.num_rows for batch in late) and found != twin(), "some were late"


@pytest.mark.parametrize("name", ["totals", "sliding", "sessions"])
def test_an_epoch_of_more_rows_than_a_block_is_one(spark: Any, engine: pk.Engine, name: str) -> None:
    """No host cuts it: what is late and which updates come follow from the batches of the source alone."""
    flow, twin = FLOWS[name]
    epochs = [TABLE.combine_chunks().to_batches()[0], TABLE.slice(0, 5_000).combine_chunks().to_batches()[0]]
    assert epochs[0].num_rows == ROWS > 65_536
    kept, dropped = Kept(), Kept()
    function = engine.foreach_batch(flow, kept, late=dropped, name=f"{name}, in large epochs")
    for number, epoch in enumerate(epochs):
        function(frame(spark, pa.Table.from_batches([epoch])), number)
    found = bag(*kept.batches.values(), as_table(engine.finish(f"{name}, in large epochs"), flow))
    for how in ({"workers": 1}, {"workers": 3}, {"processes": 2}):
        late: list[pa.RecordBatch] = []
        local = pa.Table.from_batches(flow.run(epochs, late=late.append, streaming=True, **how))
        assert bag(local) == found, how
        assert bag(*dropped.batches.values()) == (bag(pa.Table.from_batches(late)) if late else Counter()), how
    if name == "totals":
        keys = len({k for k, _, _ in twin()})
        assert local.num_rows == 2 * keys, "an update of each key and epoch"
    else:
        timed = sum(batch.num_rows - batch["ts"].null_count for batch in late)
        assert 0 < timed <= epochs[1].num_rows, "none of the first epoch"


def test_a_stream_of_updates_is_not_aggregated_again(engine: pk.Engine) -> None:
    flow = KEYED.agg(n=pk.count()).top(1, by="n")
    assert flow.collect(TABLE).num_rows >= 1
    with pytest.raises(PlanError, match="emit='final' in the agg"):
        engine.foreach_batch(flow, Kept())
