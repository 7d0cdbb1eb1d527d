"""The engine on a local cluster of two executors: right results, moves while rows pass, replays, refusals."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import functools
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import penstock as pk
from durable_support import executor_of
from engine_support import (
    COUNTS,
    Gate,
    Kept,
    Portions,
    bag,
    counted,
    frame,
    in_thread,
    numbers,
    penstock_threads,
    refuses,
    state,
    stream,
    wait_for,
    waits_in,
    write,
)
from penstock.errors import (
    ConfigError,
    EngineError,
    KeyNullError,
    SchemaError,
    SlotsError,
    StateError,
    StateLost,
    UnsupportedSession,
    UserFunctionError,
)
from penstock.spark._engine import drains, feeds, startup
from penstock.spark._session.collect import to_table
from penstock.spark._tasks import slots

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]

SCHEMA = "k bigint, v bigint"


@pytest.fixture(scope="module")
def engine(cluster: Any) -> Iterator[pk.Engine]:
    with pk.Engine(cluster, workers=2, name="shared", window=4, slice_rows=2_048, tls="always") as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Between tests of the shared engine: no job but the residents', no thread but the engine's."""
    yield
    if "engine" in request.fixturenames:
        engine, spark = request.getfixturevalue("engine"), request.getfixturevalue("cluster")
        wait_for(lambda: len(spark.sparkContext.statusTracker().getActiveJobsIds()) == 2, 60, "only residents run")
        # One looks at ended queries for as long as these are kept.
        wait_for(lambda: len(set(own_threads()) - {"penstock-ended-shared"}) == 4, 60, "the engine's threads")
        assert len(engine.members()) == 2


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]


def test_members_live_on_distinct_executors(engine: pk.Engine) -> None:
    members = engine.members()
    assert len({member.executor for member in members}) == 2
    assert len({member.pid for member in members}) == 2
    assert engine.start() is engine


def test_figures_say_where_each_worker_lives(cluster: Any, engine: pk.Engine) -> None:
    """Its member, process and executor, as the operating system has them."""
    engine.foreach_batch(COUNTS, Kept(), name="placed")(numbers(cluster, 0), 0)
    told = [row for row in engine.stats().to_pylist() if row["query"] == "placed"]
    members = [(worker, one.id, one.pid, one.executor) for worker, one in enumerate(engine.members())]
    assert [(row["worker"], row["member"], row["pid"], row["executor"]) for row in told] == members
    executors = {row["executor"]: executor_of(row["pid"]) for row in told}
    here = socket.gethostname(), str(os.stat("/proc/self/ns/pid").st_ino)
    assert list(executors) == ["/".join((*here, str(pid))) for pid in executors.values()]
    assert len(set(executors.values())) == 2


def test_few_rows_reach_the_sink_without_tasks_and_are_the_same(
    cluster: Any, engine: pk.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows and in bytes few; one more takes the other way, with the same schema and values."""
    schema = (
        "`a.b` bigint, k decimal(10,2), d date, x binary, f boolean, ntz timestamp_ntz, ts timestamp,"
        " tags array<string>, s struct<a: int, b: array<string>>, m map<string, bigint>, i interval day to second"
    )
    flow = pk.Flow(schema).map_batches(lambda batch: batch)
    instant = datetime.datetime(2024, 11, 3, 5, 30, tzinfo=datetime.timezone.utc)  # an hour that New York has twice
    first = {
        "a.b": 1,
        "k": decimal.Decimal("1.25"),
        "d": instant.date(),
        "x": b"\0x",
        "f": True,
        "ntz": instant.replace(tzinfo=None),
        "ts": instant,
        "tags": ["a", None],
        "s": {"a": 1, "b": ["x", None]},
        "m": [("y", 5), ("z", None)],
        "i": datetime.timedelta(days=1, microseconds=5),
    }
    table = pa.Table.from_pylist([first, {}, {}], flow.input_schema)
    found = []

    def sink(rows: Any, batch: int) -> None:
        local = "LocalTableScan" in rows._jdf.queryExecution().executedPlan().toString()
        found.append((local, rows.schema, to_table(rows)))

    limits = ({}, {"_LOCAL_ROWS": 3}, {"_LOCAL_ROWS": 2}, {"_LOCAL_BYTES": 8}, {"_TAKES_ARROW": False})
    for limit in limits:
        with monkeypatch.context() as patch:
            for name, value in limit.items():
                patch.setattr(drains, name, value)
            engine.foreach_batch(flow, sink)(frame(cluster, table).coalesce(1), 0)
    few = drains._TAKES_ARROW  # of Spark 3.5 all rows go by tasks
    assert [local for local, _, _ in found] == [few, few, False, False, False]
    for _, given, rows in found:
        assert given == found[-1][1]
        assert rows == found[-1][2] and rows.num_rows == 3
    assert found[0][2].to_pylist()[0] == first


@pytest.mark.parametrize("rows", [3, 40_000])
@pytest.mark.parametrize("setting", ["sql.timestampType=TIMESTAMP_NTZ", "sql.execution.arrow.maxRecordsPerBatch=0"])
def test_results_are_the_same_whatever_the_session_says(
    cluster: Any, engine: pk.Engine, rows: int, setting: str
) -> None:
    """What ``timestamp`` means in DDL, and batches without limit."""
    session, (name, value) = cluster.newSession(), setting.split("=")
    session.conf.set(f"spark.{name}", value)
    flow = pk.Flow("k bigint, t timestamp").key_by("k").agg(last=pk.max("t"))
    df = session.range(rows).selectExpr("id AS k", "timestamp_seconds(id) AS t")
    found: list[Any] = []
    engine.foreach_batch(flow, lambda given, batch: found.append((given.schema, to_table(given).sort_by("k"))))(df, 0)
    given = pk.spark.run(flow, df)
    found.append((given.schema, to_table(given).sort_by("k")))
    for schema, table in found:
        assert [field.dataType.typeName() for field in schema] == ["long", "timestamp"]
        seconds = pc.divide(table["last"].cast(pa.int64()), 1_000_000)
        assert table.num_rows == rows and pc.all(pc.equal(table["k"], seconds)).as_py()


class Watched:
    """Which batches came by way of the driver, by their rows; None for one that was too large for it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.came: list[int | None] = []
        first = feeds.first

        def watched(df: Any) -> Any:
            found = first(df)
            self.came.append(None if found is None else sum(batch.num_rows for batch in found))
            return found

        patch.setattr(feeds, "first", watched)


def test_few_rows_come_by_way_of_the_driver_and_count_the_same(
    cluster: Any, engine: pk.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is too large for it is fed by tasks, and so are those after it for a while."""
    watched, kept = Watched(monkeypatch), Kept()
    function = engine.foreach_batch(COUNTS, kept, name="few")
    for name in ("_FEW_ROWS", "_MOST_ROWS"):
        monkeypatch.setattr(feeds, name, 900)
    sizes = [600, 600, 0, 900, 901, 5, 5, 5, 901, 5, 5, 5, 5, 5]
    values = iter(range(sum(sizes)))
    own: dict[int, list[int]] = {}
    for batch, rows in enumerate(sizes):
        taken = [next(values) for _ in range(rows)]
        for value in taken:
            own.setdefault(value % 7, []).append(value)
        first = taken[0] if taken else 0
        function(cluster.range(first, first + rows, 1, 3).selectExpr("id % 7 AS k", "id AS v"), batch)
        assert state(kept) == {k: (len(all_of), sum(all_of)) for k, all_of in own.items()}, batch
    assert watched.came == [600, 0, 900, None, 5, None, 5], "one, two, then four small ones are seen before"
    fed = [entry["rows"] for entry in engine.stats().to_pylist() if entry["query"] == "few"]
    assert sum(fed) == sum(sizes)


def test_few_rows_keep_order_types_and_sources_on_their_way_through_the_driver(
    cluster: Any, engine: pk.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)

    def running(seen: list[int] | None, k: int, v: int) -> tuple[list[int], tuple[int, str]]:
        seen = [*(seen or [])[-3:], v]
        return seen, (k, ",".join(map(str, seen)))

    flow = pk.Flow(SCHEMA, order_by="v").key_by("k").stateful_map(running, schema="k bigint, seen string")
    kept = Kept()
    function = engine.foreach_batch(flow, kept, name="ordered and few")
    for batch in range(3):
        function(numbers(cluster, batch).repartition(5), batch)
    table = pa.table({"v": range(1_800)}).append_column("k", pa.array([v % 7 for v in range(1_800)]))
    assert bag(*kept.batches.values()) == bag(flow.collect(table.select(["k", "v"]), batch_rows=600))
    # Structs of two sources, one of which has names that Spark does not find, and times.
    left = pk.Flow("`a.b` bigint, ts timestamp", name="left")
    pairs = left.join(pk.Flow("k bigint, w decimal(9,2)", name="right"), left_on="a.b", right_on="k")
    both = Kept()
    function = engine.foreach_batch(pairs, both, name="two and few")
    for batch in range(2):
        one = cluster.range(3).selectExpr(f"id + {batch} AS `a.b`", "timestamp_seconds(id) AS ts")
        other = cluster.range(3).selectExpr(f"id + {batch} AS k", "CAST(id AS decimal(9,2)) AS w")
        function(pk.spark.tagged(left=one, right=other), batch)
    rows = [row for table in both.batches.values() for row in table.to_pylist()]
    found = sorted((row["a.b"], row["ts"].timestamp(), int(row["w"])) for row in rows)
    each = [(at + batch, at) for batch in range(2) for at in range(3)]
    assert found == sorted((k, float(at), w) for k, at in each for other, w in each if other == k)
    assert watched.came == [600, 600, 6]


def test_a_batch_of_few_wide_rows_does_not_come_to_the_driver() -> None:
    shortcut = feeds.Shortcut()
    receipt = feeds.Receipt(partition=0, attempt=1, member=1, rows=10, max_event_time=None, checksum=0, bytes=2 << 20)
    for size, then in ((2 << 20, False), (1 << 19, True), (2 << 20, False), (1, True)):
        shortcut.came([dataclasses.replace(receipt, bytes=size)])
        assert shortcut.open is then
    shortcut.came([dataclasses.replace(receipt, rows=8_193, bytes=1)] * 2)
    assert not shortcut.open
    waits = []
    for _ in range(8):
        shortcut.missed()
        waits.append(0)
        while not shortcut.open:
            shortcut.came([])
            waits[-1] += 1
    assert waits == [2, 4, 8, 16, 32, 64, 64, 64]
    assert shortcut.attempt() < shortcut.attempt() < 1 << 63


def test_few_rows_go_to_all_members_where_one_would_have_much_to_do() -> None:
    shortcut = feeds.Shortcut()
    receipt = feeds.Receipt(partition=0, attempt=1, member=1, rows=10, max_event_time=None, checksum=0)
    rows = [pa.record_batch({"v": [0, 1, 2]}), pa.record_batch({"v": [3, 4]})]

    def pieces(members: int) -> list[list[int]]:
        made = shortcut.pieces(rows, members)
        return [[v for batch in piece for v in batch["v"].to_pylist()] for piece in made]

    assert pieces(3) == [[0, 1, 2, 3, 4]]
    shortcut.ran(0.01)  # which any batch takes
    # One worked for 0.09 s; two that work for 0.04 s together have more to do than one should have.
    for members, seconds, one in (((1,), 0.09, False), ((1, 2), 0.04, False), ((1, 2), 0.03, True)):
        shortcut.came([dataclasses.replace(receipt, member=member, partition=member) for member in members])
        shortcut.ran(seconds)
        assert pieces(1) == [[0, 1, 2, 3, 4]]
        assert pieces(2) == ([[0, 1, 2, 3, 4]] if one else [[0, 1, 2], [3, 4]])
        assert pieces(9) == ([[0, 1, 2, 3, 4]] if one else [[0], [1], [2], [3], [4]])
    shortcut.ran(9.0)
    assert shortcut.pieces([], 2) == [[]]


@pytest.mark.parametrize(
    ("columns", "before", "rows"),
    [
        ({"k": pa.int64()}, 10_000, 50_000),
        ({"k": pa.int64(), "s": pa.string()}, 10_000, 10_000),
        ({f"c{at}": pa.decimal128(38, 2) for at in range(20)}, 10_000, 10_000),
        ({"k": pa.int64()}, 40_000, 50_000),
        ({"k": pa.int64()}, 0, 50_000),
        ({}, 10_000, 10_000),
    ],
)
def test_narrow_rows_cross_in_larger_batches(
    cluster: Any, columns: dict[str, pa.DataType], before: int, rows: int
) -> None:
    def sizes(batches: Any) -> Any:
        yield pa.record_batch({"n": [max(batch.num_rows for batch in batches)]})

    session, setting = cluster.newSession(), "spark.sql.execution.arrow.maxRecordsPerBatch"
    session.conf.set(setting, before)
    with feeds.larger_batches(session, [pa.schema(columns)]):
        [largest] = session.range(0, 50_000, 1, 1).mapInArrow(sizes, "n bigint").collect()
    assert largest.n == rows
    assert session.conf.get(setting) == str(before), "as it was"
    with pytest.raises(ZeroDivisionError), feeds.larger_batches(session, [pa.schema(columns)]):
        _ = 1 / 0
    assert session.conf.get(setting) == str(before)


def test_settings_are_as_before_when_the_last_of_several_threads_has_fed(cluster: Any) -> None:
    settings = ("spark.sql.execution.arrow.maxRecordsPerBatch", "spark.sql.execution.arrow.maxBytesPerBatch")
    session, narrow = cluster.newSession(), [pa.schema({"k": pa.int64()})]
    if not drains._TAKES_ARROW:
        settings = settings[:1]  # the second is of Spark 4
    before = [session.conf.get(name) for name in settings]
    first, second = feeds.larger_batches(session, narrow), feeds.larger_batches(session, narrow)
    first.__enter__()
    larger = [session.conf.get(name) for name in settings]
    second.__enter__()
    first.__exit__(None, None, None)
    assert [session.conf.get(name) for name in settings] == larger != before
    second.__exit__(None, None, None)
    assert [session.conf.get(name) for name in settings] == before


def test_wide_rows_beside_narrow_ones_cross_in_batches_as_spark_makes_them(cluster: Any) -> None:
    setting = "spark.sql.execution.arrow.maxRecordsPerBatch"
    session = cluster.newSession()
    before = session.conf.get(setting)
    narrow, wide = [pa.schema({"k": pa.int64()})], [pa.schema({"k": pa.int64(), "s": pa.string()})]
    first, second = feeds.larger_batches(session, narrow), feeds.larger_batches(session, wide)
    first.__enter__()
    assert session.conf.get(setting) != before
    second.__enter__()
    assert session.conf.get(setting) == before
    for one in (first, second):
        one.__exit__(None, None, None)
        assert session.conf.get(setting) == before


@pytest.mark.parametrize(
    ("columns", "most", "within"),
    [
        ({"k": pa.int64()}, "64m", "2147483647"),
        ({"k": pa.int64()}, "1m", "1m"),
        ({"k": pa.int64(), "s": pa.string()}, "64m", "64m"),
    ],
)
def test_spark_adds_up_bytes_only_where_rows_may_reach_the_limit(
    cluster: Any, columns: dict[str, pa.DataType], most: str, within: str
) -> None:
    session, setting = cluster.newSession(), "spark.sql.execution.arrow.maxBytesPerBatch"
    session.conf.set(setting, most)
    with feeds.larger_batches(session, [pa.schema(columns)]):
        assert session.conf.get(setting) == within
    assert session.conf.get(setting) == most, "as it was"


def test_counts_equal_pandas_with_bins_moving_while_rows_pass(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    portions = Portions(tmp_path)
    flow = pk.Flow(SCHEMA).map_batches(portions.function()).key_by("k").agg(n=pk.count(), total=pk.sum("v"))
    kept = Kept()
    function = engine.foreach_batch(flow, kept, name="moving")
    rows, keys = 400_000, 10_007
    function(numbers(cluster, 0, rows, keys), 0)
    before = engine.owners("moving")[0]
    portions.begin()
    with in_thread(lambda: function(numbers(cluster, 1, rows, keys), 1)) as result:

        def passed() -> set[int]:
            """Rows that the first worker had routed at each of what it did for bins that move."""
            log = [entry for entry in engine.moves().to_pylist() if entry["query"] == "moving"]
            return {entry["routed_rows"] for entry in log if entry["worker"] == 0}

        def further() -> bool:
            portions.allow(1)
            wait_for(portions.taken, what="the next rows are taken")
            return len(passed()) > 2

        try:
            wait_for(portions.taken, what="rows are under way")
            to = [1 - owner for owner in before]
            there = engine.migrate(to=to, strategy="batched", batch_size=8, query="moving")
            wait_for(further, what="rows pass while bins move")
            assert not there.done
        finally:
            portions.end()
        report = there.wait(60)
        result()
    assert report.bins == 256 and report.bytes > 0 and len(report.steps) == 32
    assert engine.owners("moving")[0] == [1 - owner for owner in before]
    log = [entry for entry in engine.moves().to_pylist() if entry["query"] == "moving"]
    first = min(entry["at"] for entry in log if entry["what"] == "prepare")
    last = max(entry["at"] for entry in log if entry["what"] == "state")
    during = [entry["routed_rows"] for entry in log if first <= entry["at"] <= last and entry["worker"] == 0]
    assert max(during) > min(during), "rows passed between the first Prepare and the last State"
    # Cancelled: what has moved has moved, and the engine knows which bins those are.
    for _ in range(20):
        cut = engine.migrate(to=before, strategy="fluid", query="moving")
        cut.cancel()
        report = cut.wait(60)
        assert report.bins == len(report.steps)
        cut.cancel()
        if report.bins < 192:
            break
        # This machine was too busy to say so earlier.
        engine.migrate(to=[1 - owner for owner in before], query="moving").wait(60)
    assert report.bins < 192
    moved = sum(owner == then for owner, then in zip(engine.owners("moving")[0], before, strict=True))
    assert moved == report.bins
    # Both workers send and receive side by side, more and more at once since no step comes near the limit.
    left = sum(owner != then for owner, then in zip(engine.owners("moving")[0], before, strict=True))
    report = engine.migrate(to=before, strategy="matched", max_pause="1h", query="moving").wait(60)
    assert engine.owners("moving")[0] == before
    assert report.bins == left and 0 < len(report.steps) < left / 4
    assert [step.bins for step in report.steps][:2] == [2, 4] and report.longest_pause_s > 0
    # Between epochs, one bin at a time, and back to an even spread.
    engine.migrate(moves=dict.fromkeys(range(64), 0), strategy="fluid", gap="drain", query="moving").wait(60)
    engine.rebalance(query="moving").wait(60)
    assert sorted(engine.owners("moving")[0]).count(0) == 128
    function(numbers(cluster, 2, rows, keys), 2)

    frame = pd.DataFrame({"v": range(3 * rows)})
    grouped = frame.groupby(frame["v"] % keys)["v"]
    expected = zip(grouped.count().index, zip(grouped.count(), grouped.sum(), strict=True), strict=True)
    assert state(kept) == dict(expected)
    figures = [entry for entry in engine.stats().to_pylist() if entry["query"] == "moving"]
    assert sum(entry["rows"] for entry in figures) == 3 * rows
    assert sum(entry["keys"] for entry in figures) == keys
    assert {entry["pid"] for entry in figures} == {member.pid for member in engine.members()}
    timeline = engine.timeline()
    assert [(e.epoch, e.rows) for e in timeline.epochs if e.query == "moving"] == [(b, rows) for b in range(3)]
    assert timeline.slices and next(m.bins for m in timeline.migrations if m.query == "moving") == 256


def test_hot_items_equal_the_local_host(cluster: Any, engine: pk.Engine) -> None:
    schema = "auction bigint, ts timestamp"
    flow = (
        pk.Flow(schema, event_time="ts", lateness="2s")
        .key_by("auction")
        .window(pk.sliding("10s", every="2s"))
        .agg(n=pk.count())
        .top(1, by="n", per="window")
    )
    tables = []
    for batch in range(4):
        # Some rows are late, some auctions come in bursts.
        times = [(batch * 300 + row) * 50_000 - (20_000_000 if row % 29 == 0 else 0) for row in range(300)]
        auctions = [(row * row + batch) % 11 for row in range(300)]
        times = [max(0, value) for value in times]
        tables.append(pa.table({"auction": auctions, "ts": pa.array(times, pa.timestamp("us", tz="UTC"))}))
    kept, late = Kept(), Kept()
    function = engine.foreach_batch(flow, kept, late=late, name="hot")
    for batch, table in enumerate(tables):
        function(frame(cluster, table).repartition(3), batch)
        if batch == 1:
            engine.migrate(to=[0] * 256, strategy="all-at-once", query="hot").wait(60)
    rest = to_table(engine.finish("hot"))
    late_local: list[pa.RecordBatch] = []
    batches = [table.combine_chunks().to_batches()[0] for table in tables]
    expected = pa.Table.from_batches(
        flow.run(batches, late=late_local.append, streaming=True), schema=flow.output_schema
    )
    assert expected.num_rows > 20 and late_local
    assert bag(*kept.batches.values(), rest) == bag(expected)
    assert bag(*late.batches.values()) == bag(pa.Table.from_batches(late_local))
    assert bag(to_table(engine.finish("hot"))) == bag(rest)
    with pytest.raises(EngineError, match="finished"):
        function(frame(cluster, tables[0]), 4)


def test_order_within_a_key_is_that_of_the_input(cluster: Any, engine: pk.Engine) -> None:
    def running(seen: list[int] | None, k: int, v: int) -> tuple[list[int], tuple[int, str]]:
        seen = [*(seen or [])[-3:], v]
        return seen, (k, ",".join(map(str, seen)))

    flow = pk.Flow(SCHEMA, order_by="v").key_by("k").stateful_map(running, schema="k bigint, seen string")
    kept = Kept()
    function = engine.foreach_batch(flow, kept, name="ordered")
    for batch in range(2):
        function(numbers(cluster, batch).repartition(5), batch)
    table = pa.table({"v": range(1_200)}).append_column("k", pa.array([v % 7 for v in range(1_200)]))
    expected = flow.collect(table.select(["k", "v"]), batch_rows=600)
    assert bag(*kept.batches.values()) == bag(expected)


def test_a_replayed_batch_gives_the_same_rows_and_feeds_nothing(cluster: Any, engine: pk.Engine) -> None:
    kept, fail = Kept(), [True]

    def sink(df: Any, batch_id: int) -> None:
        kept(df, batch_id)
        if batch_id == 1 and fail.pop():
            fail.append(False)
            raise OSError("the disk is full")
        assert df.count() == kept.batches[batch_id].num_rows == df.count(), "two more actions on the output"

    function = engine.foreach_batch(COUNTS, sink, name="replayed")
    function(numbers(cluster, 0), 0)
    with pytest.raises(OSError, match="full"):
        function(numbers(cluster, 1), 1)
    with pytest.raises(EngineError, match="Spark has not committed it"):
        engine.finish("replayed")
    first = kept.batches[1]
    fed = sum(entry["rows"] for entry in engine.stats().to_pylist() if entry["query"] == "replayed")
    function(numbers(cluster, 1), 1)
    assert bag(kept.batches[1]) == bag(first)
    assert sum(entry["rows"] for entry in engine.stats().to_pylist() if entry["query"] == "replayed") == fed == 1_200
    function(numbers(cluster, 2), 2)
    assert state(kept) == counted(3)
    for batch in (2 + 2, 1):
        with pytest.raises(EngineError, match="only 3 can follow") as caught:
            function(numbers(cluster, batch), batch)
        assert (caught.value.epoch, caught.value.expected) == (batch, 3)
        assert function.query_id in str(caught.value)
    function(numbers(cluster, 3), 3)
    assert state(kept) == counted(4)


def test_a_stream_restarted_after_its_sink_failed(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    for batch in range(3):
        write(cluster, tmp_path / "in", batch, numbers(cluster, batch))
    kept, seen = Kept(), []

    def sink(df: Any, batch_id: int) -> None:
        seen.append((batch_id, bag(to_table(df))))
        if [entry[0] for entry in seen] == [0, 1]:
            raise OSError("the disk is full")
        kept(df, batch_id)

    query = stream(
        cluster, tmp_path / "in", SCHEMA, engine.foreach_batch(COUNTS, sink), tmp_path / "check", "restarted"
    )
    with pytest.raises(Exception, match="the disk is full"):
        query.awaitTermination(120)
    again = stream(cluster, tmp_path / "in", SCHEMA, engine.foreach_batch(COUNTS, sink), tmp_path / "check")
    again.awaitTermination(120)
    assert again.id == query.id and "restarted" in engine.queries
    assert [entry[0] for entry in seen] == [0, 1, 1, 2]
    assert seen[1] == seen[2]
    assert state(kept) == counted(3)


def test_a_query_of_another_session(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    """It has its name, and is seen to be stopped where the interrupt of its thread is not."""
    gate = Gate(tmp_path)
    flow = pk.Flow(SCHEMA).map_batches(gate.function()).key_by("k").agg(n=pk.count(), total=pk.sum("v"))
    kept, session = Kept(), cluster.newSession()
    for batch in range(2):
        write(session, tmp_path / "in", batch, numbers(session, batch))

    def sink(df: Any, batch_id: int) -> None:
        kept(df, batch_id)
        gate.close()

    class Deaf:
        def __init__(self) -> None:
            thread = cluster.sparkContext._jvm.java.lang.Thread.currentThread()
            self.getId, self.isAlive = thread.getId, thread.isAlive

        def isInterrupted(self) -> bool:
            return False

    function = engine.foreach_batch(flow, sink)
    function._threads = SimpleNamespace(currentThread=Deaf)
    query = stream(session, tmp_path / "in", SCHEMA, function, tmp_path / "check", "elsewhere")
    wait_for(gate.reached.exists, what="the second epoch is stuck")
    assert "elsewhere" in engine.queries and engine.queries["elsewhere"].id == query.id
    query.stop()
    assert query.exception() is None, "a stopped query has not failed"
    gate.open()
    assert state(kept) == counted(1)


def test_stopping_a_query_in_a_stuck_epoch(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    for batch in range(3):
        write(cluster, tmp_path / "in", batch, numbers(cluster, batch))
    kept, other = Kept(), Kept()
    flow = pk.Flow(SCHEMA).map_batches(gate.function()).key_by("k").agg(n=pk.count(), total=pk.sum("v"))
    beside = engine.foreach_batch(COUNTS, other, name="beside")
    beside(numbers(cluster, 0), 0)
    members = engine.members()

    def sink(df: Any, batch_id: int) -> None:
        kept(df, batch_id)
        if batch_id == 0:
            gate.close()

    query = stream(cluster, tmp_path / "in", SCHEMA, engine.foreach_batch(flow, sink, name="stuck"), tmp_path / "check")
    wait_for(gate.reached.exists, what="the epoch is stuck")
    query.stop()
    assert gate.path.exists(), "it waits for nothing that is stuck"
    assert query.exception() is None, "a stopped query has not failed"
    beside(numbers(cluster, 1), 1)
    assert state(other) == counted(2)
    assert engine.members() == members
    gate.open()
    again = stream(cluster, tmp_path / "in", SCHEMA, engine.foreach_batch(flow, kept), tmp_path / "check")
    again.awaitTermination(120)
    assert again.id == query.id and again.exception() is None
    assert state(kept) == counted(3) and sorted(kept.batches) == [0, 1, 2]


def test_ctrl_c_ends_the_wait_and_nothing_else(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    kept = Kept()
    flow = pk.Flow(SCHEMA).map_batches(gate.function()).key_by("k").agg(n=pk.count(), total=pk.sum("v"))
    function = engine.foreach_batch(flow, kept, name="interrupted")
    function(numbers(cluster, 0), 0)
    members = engine.members()
    main = threading.get_ident()

    def interrupt() -> None:
        wait_for(gate.reached.exists, what="the epoch is under way")
        wait_for(lambda: waits_in(main, "wait_for"), what="the caller waits for it")
        os.kill(os.getpid(), signal.SIGINT)

    gate.close()
    with in_thread(interrupt) as result:
        with pytest.raises(KeyboardInterrupt):
            function(numbers(cluster, 1), 1)
        result()
    gate.open()
    assert engine.members() == members
    for batch in (1, 2):
        function(numbers(cluster, batch), batch)
    assert state(kept) == counted(3)


def test_small_slices_and_a_finish_after_a_stop(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    """What was still open comes out up to the last batch that Spark has committed, not the one that was stopped."""
    gate = Gate(tmp_path)
    flow = (
        pk.Flow("k bigint, ts timestamp", event_time="ts")
        .map_batches(gate.function())
        .key_by("k")
        .window(pk.tumbling("1h"))
        .agg(n=pk.count())
    )
    for batch in range(2):
        df = numbers(cluster, batch).selectExpr("k", "timestamp_seconds(v) AS ts")
        write(cluster, tmp_path / "in", batch, df)
    query = stream(
        cluster,
        tmp_path / "in",
        "k bigint, ts timestamp",
        engine.foreach_batch(flow, lambda df, batch_id: gate.close()),
        tmp_path / "check",
        "open windows",
    )
    wait_for(gate.reached.exists, what="the second epoch is stuck")
    query.stop()
    gate.open()
    rest = to_table(engine.finish(query))
    assert {row["k"]: row["n"] for row in rest.to_pylist()} == {k: n for k, (n, _) in counted(1).items()}


def test_a_function_that_raises(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    bad = tmp_path / "bad"

    def total(so_far: int | None, k: int, v: int) -> tuple[int, tuple[int, int]]:
        if v == 777 and bad.exists():
            raise ZeroDivisionError(f"no {v}")
        return (so_far or 0) + v, (k, (so_far or 0) + v)

    line = total.__code__.co_firstlineno + 2
    flow = pk.Flow(SCHEMA, order_by="v").key_by("k").stateful_map(total, schema="k bigint, total bigint")
    kept = Kept()
    function = engine.foreach_batch(flow, kept, name="raises")
    function(numbers(cluster, 0), 0)
    # Bins that moved since the last epoch stay where they are when the next one is rolled back.
    engine.migrate(to=[1] * 256, query="raises").wait(60)
    bad.touch()
    for _ in range(2):
        with pytest.raises(UserFunctionError) as caught:
            function(numbers(cluster, 1), 1)
        error = caught.value
        assert error.step == "stateful_map[1] total"
        assert (error.file, error.line) == (__file__, line)
        assert error.row == {"k": 0, "v": 777}
        assert isinstance(error.__cause__, ZeroDivisionError)
        assert function.error is error
    assert sorted(kept.batches) == [0]
    with pytest.raises(EngineError, match="cannot move now"):
        engine.migrate(to=[0] * 256, query="raises")
    bad.unlink()
    for batch in (1, 2):
        function(numbers(cluster, batch), batch)
        assert engine.owners("raises") == [[1] * 256]
    table = pa.table({"k": [v % 7 for v in range(1_800)], "v": range(1_800)})
    assert bag(*kept.batches.values()) == bag(flow.collect(table, batch_rows=600))


def test_a_state_that_cannot_move_costs_only_the_migration(cluster: Any, engine: pk.Engine) -> None:
    """A migration between epochs that breaks off in the middle: no bin is lost, wherever it was."""

    class Rooted(int):
        """Can be copied, as for the undo of an epoch, and not be pickled."""

        def __deepcopy__(self, memo: Any) -> Any:
            return self

        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("it has a root")

    def total(state: int | None, k: int, v: int) -> tuple[int, tuple[int, int]]:
        total = (state or 0) + v
        return Rooted(total) if k == 3 else total, (k, total)

    flow = pk.Flow(SCHEMA, order_by="v").key_by("k").stateful_map(total, schema="k bigint, total bigint")
    kept = Kept()
    function = engine.foreach_batch(flow, kept, name="stays")
    for batch in range(3):
        function(numbers(cluster, batch), batch)
        swapped = [1 - owner for owner in engine.owners("stays")[0]]
        with pytest.raises(EngineError, match=r"cut off.*key 3 cannot be pickled") as caught:
            engine.migrate(to=swapped, strategy="all-at-once", query="stays").wait(60)
        # The exception itself where the leader's process raised it; of another process its text.
        cause = caught.value.__cause__
        assert isinstance(cause, (StateError, EngineError)) and "key 3 cannot be pickled" in str(cause)
    function(numbers(cluster, 3), 3)
    table = pa.table({"k": [v % 7 for v in range(2_400)], "v": range(2_400)})
    assert bag(*kept.batches.values()) == bag(flow.collect(table, batch_rows=600))


def test_two_queries_side_by_side(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    sinks = [Kept(), Kept()]
    queries = []
    for index, kept in enumerate(sinks):
        for batch in range(3):
            write(cluster, tmp_path / f"in{index}", batch, numbers(cluster, batch, 300, 5 + index))
        function = engine.foreach_batch(COUNTS, kept)
        queries.append(
            stream(cluster, tmp_path / f"in{index}", SCHEMA, function, tmp_path / f"check{index}", f"twin {index}")
        )
    for query in queries:
        query.awaitTermination(150)
        assert query.exception() is None
    for index, kept in enumerate(sinks):
        assert state(kept) == counted(3, 300, 5 + index)
    assert {"twin 0", "twin 1"} <= set(engine.queries)
    assert engine.finish(queries[0]).count() == 0
    with pytest.raises(EngineError, match="it knows"):
        engine.finish("nobody")


def test_a_function_serves_one_query(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    write(cluster, tmp_path / "in", 0, numbers(cluster, 0))
    function = engine.foreach_batch(COUNTS, Kept())
    first = stream(cluster, tmp_path / "in", SCHEMA, function, tmp_path / "check1")
    first.awaitTermination(120)
    second = stream(cluster, tmp_path / "in", SCHEMA, function, tmp_path / "check2")
    with pytest.raises(Exception, match="belongs to the first"):
        second.awaitTermination(120)
    assert isinstance(function.error, EngineError)
    assert first.id in str(function.error) and second.id in str(function.error)


@pytest.mark.parametrize("place", ["query", None])
def test_a_query_has_the_state_of_one_flow(
    cluster: Any, engine: pk.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str | None
) -> None:
    """Two functions that share a stream, of flows that keep the same: the second gets no results of the first."""

    def even(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.filter(pc.equal(pc.bit_wise_and(batch["v"], 1), 0))

    def odd(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.filter(pc.equal(pc.bit_wise_and(batch["v"], 1), 1))

    write(cluster, tmp_path / "in", 0, numbers(cluster, 0))
    sinks = Kept(), Kept()
    flows = (pk.Flow(SCHEMA).map_batches(one).key_by("k").agg(n=pk.count()) for one in (even, odd))
    first, second = (
        engine.foreach_batch(flow, sink, checkpoint=place) for flow, sink in zip(flows, sinks, strict=True)
    )

    def both(df: Any, batch_id: int) -> None:
        first(df, batch_id)
        second(df, batch_id)

    query = stream(cluster, tmp_path / "in", SCHEMA, both, tmp_path / "check", name="shared")
    with pytest.raises(Exception, match="was given to another flow in this run"):
        query.awaitTermination(120)
    # What is refused before a batch begins counts and is told like all that fails.
    [line] = [vars(record) for record in caplog.records if getattr(record, "event", "") == "batch failed"]
    assert (line["query"], line["batch"], line["levelname"]) == ("shared", 0, "ERROR")
    assert "was given to another flow in this run" in line["reason"]
    counters = engine._journal.counters.samples()  # type: ignore[union-attr]
    counts = {
        one.labels["outcome"]: one.value
        for one in counters
        if one.labels.get("query") == "shared" and one.name == "penstock_batches_total"
    }
    assert counts == {"committed": 1, "failed": 1, "stopped": 0}
    assert type(second.error) is EngineError and "start a query for each of them" in str(second.error)
    assert list(sinks[0].batches) == [0] and not sinks[1].batches
    # The first goes on by itself, also by way of a function that is made for each batch.
    write(cluster, tmp_path / "in", 1, numbers(cluster, 1))

    def alone(df: Any, batch_id: int) -> None:
        engine.foreach_batch(
            pk.Flow(SCHEMA).map_batches(even).key_by("k").agg(n=pk.count()), sinks[0], checkpoint=place
        )(df, batch_id)

    stream(cluster, tmp_path / "in", SCHEMA, alone, tmp_path / "check").awaitTermination(120)
    assert sum(row["n"] for row in sinks[0].last().values()) == 600
    engine.drop(query)


def test_a_batch_is_given_once(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    """A second part of it would be answered with the results of the first."""
    write(cluster, tmp_path / "in", 0, numbers(cluster, 0))
    kept = Kept()
    function = engine.foreach_batch(COUNTS, kept)

    def parts(df: Any, batch_id: int) -> None:
        function(df.where("v % 2 = 0"), batch_id)
        function(df.where("v % 2 = 1"), batch_id)

    query = stream(cluster, tmp_path / "in", SCHEMA, parts, tmp_path / "check")
    with pytest.raises(Exception, match="was given a second time"):
        query.awaitTermination(120)
    assert type(function.error) is EngineError and "all rows at once" in str(function.error)
    assert list(kept.batches) == [0]

    def twice(df: Any, batch_id: int) -> None:
        for _ in range(2):  # as where a call is tried again
            function(df, batch_id)

    engine.drop(query)
    shutil.rmtree(tmp_path / "check")
    stream(cluster, tmp_path / "in", SCHEMA, twice, tmp_path / "check").awaitTermination(120)
    assert state(kept) == counted(1)


def test_a_batch_comes_again_in_another_run_whatever_its_jobs_are_called(
    cluster: Any, engine: pk.Engine, tmp_path: Path
) -> None:
    write(cluster, tmp_path / "in", 0, numbers(cluster, 0))
    kept, fail = Kept(), [True]
    function = engine.foreach_batch(COUNTS, kept)

    def each(df: Any, batch_id: int) -> None:
        df.sparkSession.sparkContext.setJobGroup("etl", "as always")
        function(df, batch_id)
        if fail.pop():
            raise OSError("after it")

    with pytest.raises(Exception, match="after it"):
        stream(cluster, tmp_path / "in", SCHEMA, each, tmp_path / "check").awaitTermination(120)
    fail.append(False)
    stream(cluster, tmp_path / "in", SCHEMA, each, tmp_path / "check").awaitTermination(120)
    assert state(kept) == counted(1)


def test_what_a_sink_raises_costs_its_batch_only(cluster: Any, engine: pk.Engine) -> None:
    """Also an exception that is its own cause, and text that UTF-8 does not have."""
    fail: list[BaseException] = [ValueError("cut \ud83d off"), ValueError("again")]
    kept = Kept()

    def sink(df: Any, batch_id: int) -> None:
        if fail:
            error = fail.pop()
            raise error from error
        kept(df, batch_id)

    function = engine.foreach_batch(COUNTS, sink, name="raises")
    for says in ("again", "cut"):
        with pytest.raises(ValueError, match=says):
            function(numbers(cluster, 0), 0)
    function(numbers(cluster, 0), np.int64(0))
    assert state(kept) == counted(1)
    for wrong in (-1, True, "1", 1.5, 1 << 64):
        with pytest.raises(ConfigError, match="an int of at least 0"):
            function(numbers(cluster, 1), wrong)
    with pytest.raises(ConfigError, match="max_pause"):
        engine.migrate(to=[0] * 256, strategy="fluid", max_pause=1e7)
    function(numbers(cluster, 1), 1)
    assert state(kept) == counted(2)


def test_a_batch_that_spark_plans_anew_is_done_anew(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    """Its offsets were removed, and now it has other rows; the engine is the one that did it before."""
    kept, check = Kept(), tmp_path / "check"
    function = engine.foreach_batch(COUNTS, kept)
    for batch in range(2):
        write(cluster, tmp_path / "in", batch, numbers(cluster, batch))
        stream(cluster, tmp_path / "in", SCHEMA, function, check).awaitTermination(120)
    assert state(kept) == counted(2)
    for folder in ("offsets", "commits", "sources/0"):
        (check / folder / "1").unlink()
        (check / folder / ".1.crc").unlink(missing_ok=True)
    for batch in (1, 2):
        write(cluster, tmp_path / "in", batch, numbers(cluster, batch, rows=900))
    # As beside any engine: its sink has had other rows of it, and that stands in the checkpoint.
    with pytest.raises(Exception, match="batch 1 had 600 rows when its sink was called, and now it has 900"):
        stream(cluster, tmp_path / "in", SCHEMA, function, check).awaitTermination(120)
    for note in (check / "_penstock").glob(f"shown-{1:020}-*"):
        note.unlink()
    stream(cluster, tmp_path / "in", SCHEMA, function, check).awaitTermination(120)
    assert sum(n for n, _ in state(kept).values()) == 600 + 900 + 900 and max(kept.batches) == 2


def test_threads_of_a_sink_that_are_no_spark_query_are_told(
    cluster: Any, engine: pk.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    function = engine.foreach_batch(COUNTS, Kept(), name="aside")

    def aside(df: Any, batch_id: int) -> None:
        thread = threading.Thread(target=function, args=(df, batch_id))
        thread.start()
        thread.join()

    write(cluster, tmp_path / "in", 0, numbers(cluster, 0))
    stream(cluster, tmp_path / "in", SCHEMA, aside, tmp_path / "check").awaitTermination(120)
    assert "pyspark.InheritableThread" in caplog.text
    assert function.query_id is not None and function.query_id.startswith("direct-")


def test_a_sink_that_asks_for_its_own_query_is_told(cluster: Any, engine: pk.Engine) -> None:
    """It would wait for itself for ever."""
    asked: list[Any] = []

    def sink(df: Any, batch_id: int) -> None:
        for ask in (lambda: engine.finish("itself"), lambda: function(df, batch_id)):
            with pytest.raises(EngineError, match="by the sink of its own batch") as caught:
                ask()
            asked.append(caught.value)

    function = engine.foreach_batch(COUNTS, sink, name="itself")
    function(numbers(cluster, 0), 0)
    assert len(asked) == 2
    assert engine.finish("itself").count() == 0


def test_a_process_with_threads_of_the_users_is_not_used_for_other_tasks(cluster: Any, tmp_path: Path) -> None:
    """It ends with its task, so no task after it loses its process. The shared engine has half of the slots."""

    def leaves_a_thread(state: Any, k: int, v: int) -> Any:
        if not any(thread.name == "stays" for thread in threading.enumerate()):
            threading.Thread(target=threading.Event().wait, name="stays", daemon=True).start()
        return state, (k,)

    flow = pk.Flow(SCHEMA).key_by("k").stateful_map(leaves_a_thread, schema="k bigint")
    with pk.Engine(cluster, workers=1, name="stays", bits=2) as engine:
        engine.foreach_batch(flow, Kept())(numbers(cluster, 0), 0)
        [pid] = (member.pid for member in engine.members())
    used = cluster.sparkContext.parallelize(range(16), 16).map(lambda _: os.getpid()).collect()
    assert pid not in used
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), what="the process has ended")


def test_state_in_memory_does_not_outlive_its_engine(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    """A query whose state is not durable finds none after a restart: an error that names both, not a wrong count."""
    write(cluster, tmp_path / "in", 0, numbers(cluster, 0))
    gone = engine.foreach_batch(COUNTS, Kept(), name="first life", checkpoint=None)
    query = stream(cluster, tmp_path / "in", SCHEMA, gone, tmp_path / "check")
    query.awaitTermination(120)
    write(cluster, tmp_path / "in", 1, numbers(cluster, 1))
    engine.drop(query)  # as in a new driver: nothing is known of the query
    kept = Kept()
    function = engine.foreach_batch(COUNTS, kept, checkpoint=None)
    with pytest.raises(Exception, match="holds none"):
        stream(cluster, tmp_path / "in", SCHEMA, function, tmp_path / "check").awaitTermination(120)
    assert isinstance(function.error, StateLost)
    assert query.id in str(function.error) and "engine shared" in str(function.error)
    assert not kept.batches


def test_batches_that_are_empty_and_keys_that_are_null(cluster: Any, engine: pk.Engine) -> None:
    kept = Kept()
    function = engine.foreach_batch(COUNTS, kept, name="sparse")
    empty = cluster.range(0).selectExpr("id AS k", "id AS v")
    function(empty, 0)
    assert kept.batches[0].num_rows == 0 and kept.batches[0].schema.names == ["k", "n", "total"]
    function(cluster.range(0, 10, 1, 5).selectExpr("if(id < 4, NULL, 1) AS k", "id AS v").where("v <> 9"), 1)
    function(empty, 2)
    assert kept.batches[2].num_rows == 0
    function(cluster.range(1, 2, 1, 1).selectExpr("CAST(NULL AS bigint) AS k", "CAST(NULL AS bigint) AS v"), 3)
    assert state(kept) == {None: (5, 6), 1: (5, 30)}

    strict = pk.Flow(SCHEMA).key_by("k", nulls="reject").agg(n=pk.count())
    function = engine.foreach_batch(strict, kept, name="strict")
    with pytest.raises(KeyNullError, match="k"):
        function(cluster.range(1).selectExpr("CAST(NULL AS bigint) AS k", "id AS v"), 0)
    function(numbers(cluster, 0), 0)


def test_a_schema_that_changes(cluster: Any, engine: pk.Engine) -> None:
    kept = Kept()
    function = engine.foreach_batch(COUNTS, kept, name="changing")
    function(numbers(cluster, 0), 0)
    with pytest.raises(SchemaError, match=r"'v' is string, expected int64"):
        function(numbers(cluster, 1).selectExpr("k", "CAST(v AS string) AS v"), 1)
    with pytest.raises(SchemaError, match="no column 'v'"):
        function(numbers(cluster, 1).select("k"), 1)
    function(numbers(cluster, 1).selectExpr("'more' AS extra", "CAST(v AS int) AS v", "k"), 1)
    assert state(kept) == counted(2)


def test_names_with_dots(cluster: Any, engine: pk.Engine) -> None:
    flow = pk.Flow("`a.b` bigint").key_by("a.b").agg(**{"n.m": pk.count()})
    kept = Kept()
    engine.foreach_batch(flow, kept, name="dots")(cluster.range(10).selectExpr("id % 2 AS `a.b`"), 0)
    assert bag(kept.batches[0]) == {(0, 5): 1, (1, 5): 1}


def test_a_nan_key_keeps_its_state_when_it_moves(cluster: Any, engine: pk.Engine) -> None:
    def count(state: Any, k: float) -> Any:
        return (state or 0) + 1, ((state or 0) + 1,)

    kept = Kept()
    flow = pk.Flow("k double").key_by("k").stateful_map(count, schema="n bigint")
    batch, df = engine.foreach_batch(flow, kept, name="nan"), cluster.sql("SELECT double('nan') AS k")
    batch(df, 0)
    for epoch in (1, 2):
        engine.migrate(to=[1 - owner for owner in engine.owners("nan")[0]], query="nan").wait(60)
        batch(df, epoch)
    assert [kept.batches[epoch]["n"].to_pylist() for epoch in range(3)] == [[1], [2], [3]]


def test_a_forked_child_is_told_and_ends_nothing(engine: pk.Engine) -> None:
    read, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            engine.stats()
        except BaseException as error:
            said = type(error).__name__
        engine.close()
        os.write(write_end, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with os.fdopen(read) as told:
        assert told.read() == "ForkError"
    assert engine.members() and engine.stats() is not None


def test_migrations_that_make_no_sense(cluster: Any, engine: pk.Engine) -> None:
    function = engine.foreach_batch(COUNTS, Kept(), name="still")
    with pytest.raises(EngineError, match="no batch of a query still"):
        engine.migrate(to=[0] * 256, query="still")
    function(numbers(cluster, 0), 0)
    owners = engine.owners("still")
    for wrong in ({"to": [0]}, {"to": [2] * 256}, {"moves": {256: 0}}, {"moves": [(0, 0), (0, 1)]}):
        with pytest.raises(ConfigError):
            engine.migrate(**wrong, query="still")
    with pytest.raises(ConfigError, match="strategy"):
        engine.migrate(strategy="hasty", query="still")
    with pytest.raises(ConfigError, match="not both"):
        engine.migrate(to=[0] * 256, moves={0: 1}, query="still")
    assert engine.owners("still") == owners
    assert engine.migrate(to=owners, query="still").wait(60).bins == 0


def test_a_second_migration_begins_where_the_first_has_ended(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    """Asked for while the first is under way, it is planned when its turn comes."""
    gate = Gate(tmp_path)
    kept = Kept()
    flow = pk.Flow(SCHEMA).map_batches(gate.function()).key_by("k").agg(n=pk.count(), total=pk.sum("v"))
    function = engine.foreach_batch(flow, kept, name="in turn")
    function(numbers(cluster, 0), 0)
    before = engine.owners("in turn")[0]
    gate.close()
    with in_thread(lambda: function(numbers(cluster, 1), 1)) as result:
        wait_for(gate.reached.exists, what="the epoch is under way")
        try:
            there = engine.migrate(to=[1] * 256, query="in turn")
            back = engine.migrate(to=before, query="in turn")
            assert not there.done and not back.done
            with pytest.raises(ConfigError, match="no worker 2"):
                engine.migrate(to=[2] * 256, query="in turn")
            none = engine.migrate(to=[0] * 256, query="in turn")
            none.cancel()
            assert none.wait(60).bins == 0
        finally:
            gate.open()
        assert there.wait(60).bins == 128
        assert back.wait(60).bins == 128
        result()
    assert engine.owners("in turn")[0] == before
    function(numbers(cluster, 2), 2)
    assert state(kept) == counted(3)


def test_queries_move_together_at_an_epoch(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    """Prepared ahead, beside a migration that is under way; all of the queries or none."""
    sinks = {name: Kept() for name in ("left", "right")}
    functions = {name: engine.foreach_batch(COUNTS, kept, name=name) for name, kept in sinks.items()}
    both = ["left", "right"]
    for name, function in functions.items():
        function(numbers(cluster, 0), 0)
        if name == "right":
            function(numbers(cluster, 1), 1)
    before = engine.owners("left")[0]
    with pytest.raises(ConfigError, match="query right: epoch 1 has passed: 2 is the first"):
        engine.migrate(to=[1] * 256, at_epoch=1, query=both)
    with pytest.raises(ConfigError, match="names no query"):
        engine.migrate(query=[])
    for wrong in (-2, True, "2"):
        with pytest.raises(ConfigError, match="must be the number of an epoch to come"):
            engine.migrate(at_epoch=wrong, query=both)  # type: ignore[arg-type]
    assert engine.owners("left")[0] == before, "nothing moved"
    prepared = engine.migrate(to=[1] * 256, strategy="batched", batch_size=64, at_epoch=3, query=both)
    never = engine.migrate(to=[0] * 256, at_epoch=50, query=both)
    for epoch in (1, 2, 3):
        slow = engine.migrate(to=[epoch % 2] * 256, strategy="fluid", query="left")
        for name, function in functions.items():
            if epoch > 1 or name == "left":
                function(numbers(cluster, epoch), epoch)
        if epoch < 3:
            assert not prepared.done
        slow.wait(60)
    report = prepared.wait(60)
    assert sorted(report.queries) == both
    first = {step.query: step.epoch for step in report.steps if step.step == 0}
    assert first["right"] == 3 and first.get("left", 3) == 3
    never.cancel()
    assert never.wait(60).bins == 0
    assert [engine.owners(name)[0] for name in both] == [[1] * 256] * 2
    for kept in sinks.values():
        assert state(kept) == counted(4)


def test_a_sink_that_waits_for_a_migration_of_a_later_batch_is_told(cluster: Any, engine: pk.Engine) -> None:
    """It begins when that batch does, so the sink would wait for itself; what moves at once it may wait for."""
    kept, other, handles = Kept(), Kept(), []

    def sink(df: Any, batch_id: int) -> None:
        kept(df, batch_id)
        if batch_id == 1:
            assert engine.migrate(to=[1] * 256, query="waiting").wait(60).bins == 128
            handles.append(engine.migrate(to=[0] * 256, at_epoch=2, query=["other", "waiting"]))
            with pytest.raises(EngineError, match=r"by the sink of query waiting .* batch 1 .* sink has returned"):
                handles[0].wait()
        elif batch_id == 2:
            assert handles[0].wait(60).bins == 384

    function = engine.foreach_batch(COUNTS, sink, name="waiting")
    another = engine.foreach_batch(COUNTS, other, name="other")
    for batch in range(2):
        another(numbers(cluster, batch), batch)
        function(numbers(cluster, batch), batch)
    another(numbers(cluster, 2), 2)
    function(numbers(cluster, 2), 2)
    assert state(kept) == state(other) == counted(3)


def test_a_flow_without_state_keeps_up_with_any_batch(cluster: Any, engine: pk.Engine) -> None:
    kept = Kept()
    flow = pk.Flow(SCHEMA).map_batches(lambda batch: batch.slice(0, 1))
    function = engine.foreach_batch(flow, kept, name="stateless")
    for batch in (4, 5):
        function(numbers(cluster, batch, partitions=2), batch)
        assert kept.batches[batch].num_rows >= 1


def test_a_batch_that_expands_beyond_memory(cluster: Any, engine: pk.Engine) -> None:
    def blocks(v: int) -> Iterator[tuple[int, bytes]]:
        return ((v, bytes([v % 251]) * (1 << 18)) for _ in range(64))

    def sizes(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"v": batch["v"], "size": pc.binary_length(batch["data"]).cast(pa.int64())})

    def part(inner: pk.Flow) -> pk.Flow:
        return inner.flat_map(blocks, "v bigint, data binary", rows=True)

    # In between are 40 times 16 MiB, of which few exist at a time; what comes out is small and is exchanged.
    kept = Kept()
    expanded = pk.Flow(SCHEMA).flat_map(lambda k, v: [(v,)] * 2, "v bigint", rows=True)
    flow = expanded.bounded(part, batches=2, batch_size=16).map_batches(sizes, "v bigint, size bigint")
    counts = flow.key_by("v").agg(n=pk.count(), size=pk.sum("size"), emit="update")
    function = engine.foreach_batch(counts, kept, name="expanding")
    function(numbers(cluster, 0, rows=2), 0)
    before = {member.pid: resident(member.pid) for member in engine.members()}
    function(numbers(cluster, 1, rows=20), 1)
    got = {row["v"]: (row["n"], row["size"]) for row in kept.batches[1].to_pylist()}
    assert got == dict.fromkeys(range(20, 40), (128, 128 << 18))
    grown = {pid: resident(pid) - bytes_ for pid, bytes_ in before.items()}
    assert all(more < 200 << 20 for more in grown.values()), grown
    scopes = [scope for scope in engine.scopes() if scope.query == "expanding"]
    assert len(scopes) == 4 and sum(scope.admitted_rows for scope in scopes if "0 (flat" in scope.step) == 44
    # A member that got no rows admitted none.
    assert max(scope.maximum for scope in scopes if "bounded" in scope.step) == 2


def resident(pid: int) -> int:
    """The most bytes of a process that were in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def test_what_is_refused_before_anything_starts(cluster: Any) -> None:
    jobs = cluster.sparkContext.statusTracker().getActiveJobsIds()
    with pytest.raises(SlotsError, match=r"local-cluster\[2,2,1024\] allows 4"):
        pk.Engine(cluster, workers=4).start()
    with pytest.raises(ConfigError, match=r"needs a penstock\.Flow, not a int"):
        pk.Engine(cluster).foreach_batch(5, Kept())  # type: ignore[arg-type]
    assert set(cluster.sparkContext.statusTracker().getActiveJobsIds()) <= set(jobs)
    connect = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(UnsupportedSession, match="Connect"):
        pk.Engine(connect)
    for wrong in (
        {"workers": 0},
        {"bits": 21},
        {"threads": True},
        {"start_timeout": 0},
        {"start_timeout": None},
        {"member_timeout": None},
        {"linger": None},
        {"registry_port": 70_000},
        {"tls": "never"},
        {"name": 5},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            pk.Engine(cluster, **wrong)
    engine = pk.Engine(cluster)
    with pytest.raises(EngineError, match="not started"):
        engine.migrate()
    engine.foreach_batch(COUNTS, Kept())
    with pytest.raises(ConfigError, match="name=5 must be a text"):
        engine.foreach_batch(COUNTS, Kept(), name=5)  # type: ignore[arg-type]
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.foreach_batch(COUNTS, Kept())
    with pytest.raises(EngineError, match="closed"):
        engine.start()


async def sends(*given: Any) -> None:
    raise AssertionError("nobody awaits it")


def yields(*given: Any) -> Iterator[None]:
    raise AssertionError("nobody runs it")
    yield


@pytest.mark.parametrize("what", ["sink", "late", "sides={'seen': ...}"])
@pytest.mark.usefixtures("all_awaited")
def test_sinks_that_nobody_awaits_are_refused(cluster: Any, engine: pk.Engine, what: str) -> None:
    columns = f"{SCHEMA}, at timestamp"
    timed = pk.Flow(columns, event_time="at").map_batches(lambda batch: batch, sides={"seen": columns})
    flow = timed.key_by("k").window(pk.tumbling("1s")).agg(n=pk.count())

    def given(f: Any) -> Any:
        return {"sink": Kept()} | ({what: f} if "=" not in what else {"sides": {"seen": f}})

    text = f"{what}: sends is a coroutine function, and nobody awaits what it returns; give a function that runs it"
    with pytest.raises(ConfigError, match=re.escape(f"{text}, such as lambda df, batch_id: asyncio.run(")):
        engine.foreach_batch(flow, **given(functools.partial(sends, 1)))
    function = engine.foreach_batch(flow, **given(lambda *results: sends(*results)), name="awaited")
    returned = f"{what} returned a coroutine (sends), which nobody awaits: run it inside, as by asyncio.run"
    rows = numbers(cluster, 0).selectExpr("k", "v", "timestamp_seconds(v) AS at")
    with pytest.raises(ConfigError, match=f"^{re.escape(returned)}$"):
        function(rows, 0)
    engine.drop("awaited")
    with pytest.raises(
        ConfigError, match=re.escape(f"{what}: yields is a generator function, and nobody runs what it")
    ):
        engine.foreach_batch(flow, **given(functools.partial(yields, 1)))
    function = engine.foreach_batch(flow, **given(lambda *results: yields(*results)), name="run")
    returned = f"{what} returned a generator (yields), which nobody runs: give a function without yield"
    with pytest.raises(ConfigError, match=f"^{re.escape(returned)}$"):
        function(rows, 0)
    engine.drop("run")


def test_engines_of_one_name_are_counted_each(monkeypatch: pytest.MonkeyPatch) -> None:
    open_ones = [SimpleNamespace(name=name, workers=2) for name in ("alike", "alike", "other")]
    monkeypatch.setattr(slots, "open_engines", lambda sc: open_ones)
    assert slots.held_slots(None) == {"alike": 4, "other": 2}
    assert slots.held_slots(None, but=open_ones[0]) == {"alike": 2, "other": 2}


@pytest.mark.parametrize("when", ["executors", "members"])
def test_what_is_closed_while_it_starts_leaves_nothing(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    jobs = set(cluster.sparkContext.statusTracker().getActiveJobsIds())
    engine = pk.Engine(cluster, workers=1, name="cut short", metrics="127.0.0.1:0")
    real = getattr(startup.Startup, when)

    def closing(self: Any, *given: Any) -> Any:
        made = real(self, *given)
        other = threading.Thread(target=engine.close)
        other.start()
        other.join()
        return made

    monkeypatch.setattr(startup.Startup, when, closing)
    with pytest.raises(EngineError, match=r"closed"):
        engine.start()
    # Those of other engines, of tests before, come and go.
    wait_for(
        lambda: not [one.name for one in threading.enumerate() if "cut short" in one.name],
        what="its threads have ended",
    )
    wait_for(lambda: set(cluster.sparkContext.statusTracker().getActiveJobsIds()) <= jobs, 60, "its jobs have ended")
    assert not [one for one in pk.spark.engines(cluster) if one.name == "cut short"]


def test_closing_leaves_nothing_behind(cluster: Any) -> None:
    """Also with an error on the way out, and with a query that was never finished. Runs last: needs all slots."""
    sc = cluster.sparkContext
    jobs = len(sc.statusTracker().getActiveJobsIds())
    # The shared engine has half of the slots, when it is there.
    engine = pk.Engine(cluster, workers=1 if jobs else 2, name="brief", slice_rows=50, bits=4)
    with pytest.raises(KeyboardInterrupt), engine:
        kept = Kept()
        engine.foreach_batch(COUNTS, kept)(numbers(cluster, 0), 0)
        assert state(kept) == counted(1)
        assert engine.stats().column("worker")[0].as_py() == 0 and len(engine.owners()[0]) == 16
        slices = engine.timeline().slices
        assert max(piece.rows for piece in slices) <= 50 and sum(piece.rows for piece in slices) == 600
        addresses = [member.address for member in engine.members()] + [engine._hub.address]
        pids = [member.pid for member in engine.members()]
        assert not any(refuses(address) for address in addresses)
        assert any(penstock_threads(pid) for pid in pids)
        raise KeyboardInterrupt
    # Those of other engines come and go.
    wait_for(lambda: not [one.name for one in threading.enumerate() if "brief" in one.name], 60, "its threads end")
    wait_for(lambda: all(refuses(address) for address in addresses), 60, "its ports are closed")
    wait_for(lambda: len(sc.statusTracker().getActiveJobsIds()) == jobs, 60, "the resident jobs have ended")
    for pid in pids:
        wait_for(lambda pid=pid: not penstock_threads(pid), 60, "the members' threads have ended")
    with pytest.raises(EngineError, match="closed"):
        engine.stats()
    assert os.getpid() not in pids
