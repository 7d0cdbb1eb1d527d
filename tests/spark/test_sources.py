"""Flows of several sources beside Spark: one DataFrame feeds all of them, as a batch job and in the engine."""

from __future__ import annotations

import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import penstock as pk
from durable_support import kill
from engine_support import Gate, Kept, bag, frame, in_thread, sized, wait_for
from penstock._schema import to_ddl
from penstock.errors import ConfigError, EngineError, PlanError, SchemaError, UnsupportedSession
from penstock.spark._session.collect import to_table
from penstock.workloads import nexmark

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

Rows = dict[str, pa.Table]


@pytest.fixture(autouse=True)
def by_value() -> Iterator[None]:
    """Spark's workers cannot import this file: ship its functions, as those of a notebook are."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def source(name: str, schema: str, **options: Any) -> pk.Flow:
    return pk.Flow(schema, name=name, event_time="ts", lateness="3s", **options)


WEB = source("web", "k bigint, v bigint, ts bigint")
SHOP = source("shop", "k bigint, v bigint, ts bigint")
NAMES = pk.Flow("k bigint, name string", name="names")
#: A union in windows, whose sums meet the third source.
MEET = WEB.union(SHOP).key_by("k").window(pk.tumbling("5s")).agg(n=pk.count(), total=pk.sum("v")).join(NAMES, on="k")


def some(seed: int, rows: int = 900) -> Rows:
    """Rows of each source, those with a time at most 2 s out of order."""
    rng = random.Random(seed)

    def timed() -> pa.Table:
        values = [(rng.randrange(12), rng.randrange(100), at * 40 + rng.randrange(2_000)) for at in range(rows)]
        return pa.table([pa.array(column, pa.int64()) for column in zip(*values, strict=True)], ["k", "v", "ts"])

    ks = [key for key in range(20) if key % 3] * 2
    names = pa.table({"k": pa.array(ks, pa.int64()), "name": [f"{key}-{at}" for at, key in enumerate(ks)]})
    return {"web": timed(), "shop": timed(), "names": names}


def met(rows: Rows) -> Counter[tuple[Any, ...]]:
    """What MEET gives of them, in plain words."""
    sums: dict[tuple[int, int], list[int]] = defaultdict(list)
    for name in ("web", "shop"):
        for row in rows[name].to_pylist():
            sums[row["ts"] // 5_000 * 5_000, row["k"]].append(row["v"])
    pairs = [(row["k"], row["name"]) for row in rows["names"].to_pylist()]
    return Counter(
        (start, start + 5_000, k, len(values), sum(values), name)
        for (start, k), values in sums.items()
        for key, name in pairs
        if key == k
    )


def cut(rows: Rows, epochs: int) -> list[Rows]:
    """The same rows, source by source in as many parts; a source has none in some of them."""

    def part(table: pa.Table, at: int) -> pa.Table:
        size = -(-table.num_rows // epochs)
        return table.slice(at * size, size)

    return [{name: part(table, at) for name, table in rows.items()} for at in range(epochs)]


def one(spark: Any, table: pa.Table) -> Any:
    """A DataFrame without tasks of Python."""
    rows = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
    return spark.createDataFrame(rows, to_ddl(table.schema)).coalesce(1)


def tagged(spark: Any, rows: Rows) -> Any:
    return pk.spark.tagged(**{name: one(spark, table) for name, table in rows.items()})


def later(earlier: tuple[int, int] | None, k: int, v: int) -> Any:
    """Each row with the one before it: results depend on order."""
    return (k, v), (k, v, None if earlier is None else earlier[1])


def doubled(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"k": pc.multiply(batch["k"], 2), "w": batch["v"]})


def test_one_frame_has_a_struct_for_each_source(wide: Any) -> None:
    rows = some(1, 60)
    made = tagged(wide, rows)
    assert made.columns == ["web", "shop", "names"] and made.count() == sum(table.num_rows for table in rows.values())
    found = [row.asDict() for row in made.collect()]
    assert all(sum(value is not None for value in row.values()) == 1 for row in found)
    assert Counter(tuple(row["shop"]) for row in found if row["shop"]) == bag(rows["shop"])
    web, names = frame(wide, rows["web"]), frame(wide, rows["names"])
    for given, error, said in [
        ({}, ConfigError, r"names no source"),
        ({"web": rows["web"]}, UnsupportedSession, r"source 'web'\) needs a Spark DataFrame .*, not a pyarrow.Table"),
        ({"web": web.select("k", "k")}, SchemaError, r"source 'web' has more than one column 'k'"),
        (
            {"web": wide.readStream.format("rate").load(), "names": names},
            ConfigError,
            r"source 'web' is streaming and source 'names' is not",
        ),
    ]:
        with pytest.raises(error, match=said):
            pk.spark.tagged(**given)


def test_a_batch_job_gives_what_this_process_gives(wide: Any) -> None:
    rows = some(2)
    expected = met(rows)
    assert len(expected) > 100 and bag(MEET.collect(rows, 2)) == expected
    given = {name: one(wide, table) for name, table in rows.items()}
    by_name = pk.spark.run(MEET, given, partitions=2)
    assert bag(to_table(by_name)) == expected
    union = tagged(wide, rows)
    # Columns that the flow does not ask for, and sources in another order.
    wider = {name: held.withColumn("more", held.k) for name, held in reversed(list(given.items()))}
    assert bag(to_table(pk.spark.run(MEET, pk.spark.tagged(**wider), partitions=2))) == expected
    plan = pk.spark.run(MEET, union)._jdf.queryExecution().optimizedPlan().toString()
    assert (plan.count("MapInArrow"), plan.count("LogicalRDD")) == (5, 3), "each source is read once, for itself"
    # Mixed in one partition, as a tagged union of somebody else may be.
    mixed = union.coalesce(1).orderBy("web.v", "names.k", "shop.ts").coalesce(1)
    assert bag(to_table(pk.spark.run(MEET, mixed, partitions=2))) == expected
    inside = mixed.mapInArrow(MEET.map_in_arrow(per_partition=True), MEET.output_ddl)
    assert bag(to_table(inside)) == expected


def test_rows_keep_their_order_by_source(wide: Any) -> None:
    one, two = (pk.Flow("k bigint, v bigint", name=name, order_by="v") for name in ("one", "two"))
    flow = one.union(two).key_by("k").stateful_map(later, schema="k bigint, v bigint, before bigint")
    rng = random.Random(3)
    rows = {
        name: pa.table(
            {"k": [rng.randrange(5) for _ in range(400)], "v": rng.sample(range(1_000 * at, 1_000 * at + 400), 400)}
        )
        for at, name in enumerate(("one", "two"))
    }
    ordered = {name: table.sort_by("v") for name, table in rows.items()}
    expected = bag(flow.collect(ordered, 2))
    assert bag(to_table(pk.spark.run(flow, tagged(wide, rows)))) == expected
    kept = Kept()
    with pk.Engine(wide, workers=1, threads=2) as engine:
        engine.foreach_batch(flow, kept)(tagged(wide, rows), 0)
    assert bag(kept.batches[0]) == expected


def test_what_is_no_row_of_one_source_fails(wide: Any) -> None:
    flow = WEB.union(SHOP)
    shape = "web struct<k:bigint,v:bigint,ts:bigint>, shop struct<k:bigint,v:bigint,ts:bigint>"
    both, none = ((1, 2, 3), (4, 5, 6)), (None, None)
    with pk.Engine(wide, workers=1) as engine:

        def rows(*rows: Any) -> Any:
            return wide.createDataFrame(list(rows), shape).coalesce(1)

        with pytest.raises(SchemaError, match=r"row 1 of a batch has web and shop set; .* exactly one of web, shop"):
            engine.foreach_batch(flow, Kept())(rows(((1, 2, 3), None), both), 0)
        for row, said in ((both, "web and another source"), (none, "none of the sources")):
            with pytest.raises(Exception, match=rf"a row has {said} set; .* exactly one of web, shop"):
                pk.spark.run(flow, rows(row)).collect()
        fitting = rows(((1, 2, 3), None), (None, (4, 5, 6)))
        for df, said in [
            (
                fitting.select("web.*"),
                r"the flow has the sources web, shop, and this DataFrame has none of them: it has k",
            ),
            (fitting.select("web"), r"source 'shop' is missing in the tagged DataFrame, which has web; .*tagged\(web="),
            (fitting.selectExpr("*", "web AS bids"), r"a column 'bids', which is no source of the flow \(web, shop\)"),
            (
                fitting.selectExpr("web.k AS web", "shop"),
                r"column 'web' of the tagged DataFrame is bigint, not a struct",
            ),
            (
                fitting.selectExpr("web", "named_struct('k', shop.k, 'ts', shop.ts) AS shop"),
                r"source 'shop' has no column 'v'; it has k, ts",
            ),
            (
                fitting.selectExpr("web", "named_struct('k', shop.k, 'v', 'x', 'ts', shop.ts) AS shop"),
                r"source 'shop' column 'v' is string, expected int64",
            ),
        ]:
            for host in (lambda df=df: pk.spark.run(flow, df), lambda df=df: engine.foreach_batch(flow, Kept())(df, 0)):
                with pytest.raises(SchemaError, match=said):
                    host()
        bids = fitting.select("web.*")
        for given, said in [
            ({"web": bids}, "source 'shop' is missing; the flow has web, shop"),
            ({"bid": bids}, "no source 'bid'"),
        ]:
            with pytest.raises(ConfigError, match=said):
                pk.spark.run(flow, given)
        other = pk.Flow("k bigint, v bigint, ts bigint, x bigint", name="other", event_time="ts")
        windows = [
            one.key_by("k").window(pk.tumbling("5s")).agg(n=pk.count(), name=one._source().name) for one in (WEB, other)
        ]
        with pytest.raises(PlanError, match=r"columns \(web: k, v, ts; other: k, v, ts, x\), .* give late= a dict"):
            engine.foreach_batch(windows[0].union(windows[1]), Kept(), late=Kept())


def test_epochs_of_the_engine_while_bins_move_and_workers_come_and_go(wide: Any) -> None:
    rows = some(4)
    epochs = cut(rows, 6)
    kept, late = Kept(), Kept()
    with pk.Engine(wide, workers=2, bits=4) as engine:
        function = engine.foreach_batch(MEET, kept, late=late, name="meet")
        moves: list[Any] = []
        grown: Any = None
        for number, epoch in enumerate(epochs):
            function(tagged(wide, epoch), number)
            if number == 2:
                function(tagged(wide, epoch), number)  # Spark replays it
            if number in (0, 1):
                moves.append(engine.migrate(to=[1 - number] * 16, strategy="fluid" if number else "all-at-once"))
            if number in (2, 3):
                [migration.wait(60) for migration in moves]
                if grown is not None:
                    assert grown.wait(60) == 3
                grown = engine.rescale(5 - number)
                if number == 2:
                    wait_for(lambda: len(engine.members()) == 3, what="one more has come")
        rest = to_table(engine.finish("meet"))
        assert bag(*kept.batches.values(), rest) == met(rows)
        assert sum(table.num_rows for table in late.batches.values()) == 0
        # Windows close before the end, and not before the least of the sources with event time has passed them.
        starts = [set(table["window_start"].to_pylist()) for table in kept.batches.values()]
        for number, seen in enumerate(starts):
            done = [
                max(max(epoch[name]["ts"].to_pylist()) for epoch in epochs[: number + 1]) for name in ("web", "shop")
            ]
            assert all(start + 5_000 <= min(done) - 3_000 for start in seen)
        assert any(starts)


def test_a_source_that_is_silent_holds_windows_and_late_rows_are_told(wide: Any) -> None:
    def one(name: str, *rows: tuple[int, int, int]) -> Rows:
        none = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("ts", pa.int64())]).empty_table()
        told = pa.Table.from_pylist([dict(zip(("k", "v", "ts"), row, strict=True)) for row in rows], none.schema)
        return {"web": none, "shop": none} | {name: told}

    flow = WEB.union(SHOP).key_by("k").window(pk.tumbling("5s")).agg(n=pk.count())
    kept, late = Kept(), Kept()
    with pk.Engine(wide, workers=2) as engine:
        function = engine.foreach_batch(flow, kept, late=late, name="silent")
        for number, rows in enumerate(
            [
                one("web", (1, 0, 1_000), (1, 0, 60_000)),
                one("shop", (1, 0, 20_000)),
                one("web", (2, 0, 2_000)),
                one("shop", (2, 0, 18_000)),
            ]
        ):
            function(tagged(wide, rows), number)
        assert [table.num_rows for table in kept.batches.values()] == [0, 1, 0, 0]
        assert bag(kept.batches[1]) == {(0, 5_000, 1, 1): 1}
        assert [table.to_pylist() for table in late.batches.values()] == [[], [], [{"k": 2, "v": 0, "ts": 2_000}], []]
        assert bag(to_table(engine.finish("silent"))) == {
            (60_000, 65_000, 1, 1): 1,
            (20_000, 25_000, 1, 1): 1,
            (15_000, 20_000, 2, 1): 1,
        }


class Site:
    """Folders of files, one for each source, and one query over all of them."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.spark, self.folder, self.kept = spark, folder, Kept()
        self.number = 0
        self.function: Any = None

    def add(self, rows: Rows) -> None:
        for name, table in rows.items():
            (self.folder / name).mkdir(exist_ok=True)
            file = self.folder / name / f"{self.number}.parquet"
            pq.write_table(table, file)
            # Spark reads files in the order of their times, of which two may be the same tick of a clock.
            os.utime(file, (1_600_000_000 + self.number,) * 2)
        self.number += 1

    def run(self, engine: pk.Engine, flow: pk.Flow = MEET, **options: Any) -> Any:
        streams = {
            name: self.spark.readStream.schema(ddl).option("maxFilesPerTrigger", 1).parquet(str(self.folder / name))
            for name, ddl in (
                ("web", "k bigint, v bigint, ts bigint"),
                ("shop", "k bigint, v bigint, ts bigint"),
                ("names", "k bigint, name string"),
            )
        }
        self.function = engine.foreach_batch(flow, options.pop("sink", self.kept), **options)
        writer = pk.spark.tagged(**streams).writeStream.option("checkpointLocation", str(self.folder / "check"))
        query = writer.trigger(availableNow=True).foreachBatch(self.function).start()
        query.awaitTermination(120)
        return query


def test_a_stream_of_all_sources_goes_on_with_other_workers_and_outlives_one(wide: Any, tmp_path: Path) -> None:
    rows = some(5)
    epochs = cut(rows, 5)
    site = Site(wide, tmp_path)
    for workers, added in ((2, 2), (1, 1)):
        for _ in range(added):
            site.add(epochs[site.number])
        with pk.Engine(wide, workers=workers, bits=4) as engine:
            site.run(engine)
    # Names and order of the sources are part of the state.
    site.add(epochs[site.number])
    turned = (
        SHOP.union(WEB).key_by("k").window(pk.tumbling("5s")).agg(n=pk.count(), total=pk.sum("v")).join(NAMES, on="k")
    )
    with pk.Engine(wide, workers=1, bits=4) as engine:
        with pytest.raises(Exception, match=r".*"):
            site.run(engine, turned)
        error = site.function.error
    assert isinstance(error, EngineError)
    assert "sources web, shop, names, in this order" in str(error) and "sources shop, web, names, in this order" in str(
        error
    )
    died = []

    def sink(df: Any, batch_id: int) -> None:
        site.kept(df, batch_id)
        if not died:
            died.append(batch_id)
            kill(engine.members()[0])

    site.add(epochs[site.number])
    with pk.Engine(wide, workers=3, bits=4) as engine:
        query = site.run(engine, sink=sink)
        rest = to_table(engine.finish(query))
    assert died and sorted(site.kept.batches) == [0, 1, 2, 3, 4]
    assert bag(*site.kept.batches.values(), rest) == met(rows)


def test_sources_in_another_order_are_refused_in_memory(wide: Any) -> None:
    rows = some(6, 50)
    with pk.Engine(wide, workers=1) as engine:
        first = engine.foreach_batch(MEET, Kept(), name="one", checkpoint=None)
        first(tagged(wide, rows), 0)
        first._program = type(first._program).of(
            SHOP.union(WEB)
            .key_by("k")
            .window(pk.tumbling("5s"))
            .agg(n=pk.count(), total=pk.sum("v"))
            .join(NAMES, on="k")
        )
        with pytest.raises(
            EngineError, match=r"its sources are shop, web, names, in this order.* were web, shop, names"
        ):
            first(tagged(wide, rows), 1)


def test_joins_in_time_give_the_same_rows_on_every_host(wide: Any) -> None:
    clicks = pk.Flow("k bigint, w bigint, at bigint", name="clicks", event_time="at", lateness="3s")
    near = WEB.join(clicks, on="k", within=("-1s", "2s"), how="full")
    rows = {"web": some(7, 300)["web"], "clicks": some(8, 300)["shop"].rename_columns(["k", "w", "at"])}
    with pk.Engine(wide, workers=2, bits=4) as engine:
        for name, flow in {
            "near": near,
            "in windows": WEB.window_join(clicks, on="k", window=pk.tumbling("2s"), how="left"),
            "itself": WEB.join(WEB.map_batches(doubled, "k bigint, w bigint"), on="k", how="semi"),
        }.items():
            given = {source: rows[source] for source in flow.sources}
            expected = bag(flow.collect(given, 2))
            assert len(expected) > 100, name
            assert (
                bag(to_table(pk.spark.run(flow, {source: one(wide, table) for source, table in given.items()})))
                == expected
            )
            kept = Kept()
            function = engine.foreach_batch(flow, kept, name=name)
            for number, epoch in enumerate(cut(given, 3)):
                frames = {source: one(wide, table) for source, table in epoch.items()}
                function(pk.spark.tagged(**frames) if len(frames) > 1 else frames["web"], number)
            assert bag(*kept.batches.values(), to_table(engine.finish(name))) == expected, name
        # What is late has the columns of its side.
        with pytest.raises(PlanError, match=r"have different columns \(web: k, v, ts; clicks: k, w, at\), .* a dict"):
            engine.foreach_batch(near, Kept(), late=Kept())
        with pytest.raises(ConfigError, match="no such late rows; there are 'web', 'clicks'"):
            engine.foreach_batch(near, Kept(), late={"shop": Kept()})
        web, other = Kept(), Kept()
        function = engine.foreach_batch(near, Kept(), late={"web": web, "clicks": other}, name="late ones")
        epochs = [
            *cut({source: rows[source] for source in near.sources}, 2),
            {name: rows[name] for name in near.sources},
        ]
        for number, epoch in enumerate(epochs):
            function(pk.spark.tagged(**{source: one(wide, table) for source, table in epoch.items()}), number)
        found = {"web": bag(*web.batches.values()), "clicks": bag(*other.batches.values())}
        assert all(len(kept) > 100 for kept in found.values())
        assert found["web"] <= bag(rows["web"]) and found["clicks"] <= bag(rows["clicks"])


def test_a_silent_source_is_not_waited_for(wide: Any) -> None:
    """By the times of batches: windows close though one source has nothing for longer than it may."""
    schema = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("ts", pa.int64())])

    def frame_of(*times: int) -> Any:
        return one(wide, pa.table({"k": [1] * len(times), "v": list(times), "ts": list(times)}, schema))

    with pk.Engine(wide, workers=1, bits=2) as engine:
        for idle_after, closed in (("1ms", [(0, 5_000, 1, 2)]), ("1h", [])):
            quiet = source("quiet", "k bigint, v bigint, ts bigint", idle_after=idle_after)
            flow = WEB.union(quiet).key_by("k").window(pk.tumbling("5s")).agg(n=pk.count())
            kept = Kept()
            function = engine.foreach_batch(flow, kept, name=f"idle after {idle_after}")
            function(pk.spark.tagged(web=frame_of(1_000), quiet=frame_of(2_000)), 0)
            function(pk.spark.tagged(web=frame_of(60_000), quiet=frame_of()), 1)
            assert bag(kept.batches[0]) == Counter() and bag(kept.batches[1]) == Counter(closed)


def test_queries_of_an_auction_site_while_bins_move_workers_come_and_go_and_one_dies(
    wide: Any, nexmark_data: Path, tmp_path: Path
) -> None:
    """All in one engine, on 1, 4 and 2 workers; of the events a fifth, out of order: there are many batches."""
    rng, params = random.Random(14), nexmark.load_params(nexmark_data)
    flows = {query: nexmark.flow(query, params, lateness="3s") for query in nexmark.QUERIES}
    tables = {}
    for name in ("person", "auction", "bid"):
        tables[name] = pq.read_table(nexmark_data / f"{name}.parquet", filters=[("seq", "<", 20_000)])
        arrival = [time + rng.randrange(3_000) for time in tables[name]["date_time"].to_pylist()]
        mixed = tables[name].take(pa.array(sorted(range(len(arrival)), key=arrival.__getitem__)))
        for number, part in enumerate(cut({name: mixed}, 3)):
            pq.write_table(part[name], tmp_path / f"{name}-{number}.parquet")
    gate = Gate(tmp_path)
    waits = gate.function()

    def waiting(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from map(waits, batches)

    def batch(query: str, number: int) -> None:
        given = {
            name: wide.read.parquet(str(tmp_path / f"{name}-{number}.parquet")).select(*schema.names)
            for name, schema in flows[query].sources.items()
        }
        df = pk.spark.tagged(**given) if len(given) > 1 else next(iter(given.values()))
        functions[query](df.mapInArrow(waiting, df.schema) if gate.path.exists() else df, number)

    def batch_that_somebody_dies_in(query: str, number: int) -> None:
        gate.close()
        with in_thread(lambda: batch(query, number)) as result:
            try:
                wait_for(gate.reached.exists, what="the batch is fed")
                kill(rng.choice(engine.members()))
            finally:
                gate.open()
            result(120)

    kept = {query: Kept() for query in flows}
    with pk.Engine(wide, workers=1, bits=4) as engine:
        functions = {
            query: engine.foreach_batch(flow, kept[query], name=query, checkpoint=str(tmp_path / "state" / query))
            for query, flow in flows.items()
        }
        for number, workers in enumerate((1, 4, 2)):
            if number:
                resize = engine.rescale(workers)
                wait_for(lambda least=workers: len(engine.members()) >= least, what="they have come")
            for query in flows:
                (batch_that_somebody_dies_in if (query, number) == ("q4_stream", 2) else batch)(query, number)
                if number < 2 and query not in ("q1", "q2"):
                    strategy = rng.choice(("all-at-once", "batched", "fluid", "matched"))
                    target = [rng.randrange(workers) for _ in range(16)]
                    engine.migrate(to=target, query=query, **sized(strategy, rng.randrange(1, 8)))
            if number == 1:
                assert resize.wait(60) == workers
        for query, flow in flows.items():
            # With this those that leave have gone from the query.
            rest = to_table(engine.finish(query))
            given = {name: tables[name].select(schema.names) for name, schema in flow.sources.items()}
            wanted = nexmark.flow(query, params).collect(given if len(given) > 1 else next(iter(given.values())))
            assert rest.column_names == wanted.column_names
            assert bag(*kept[query].batches.values(), rest) == bag(wanted) != Counter(), query
        assert resize.wait(60) == 2
