"""The batch host on a local Spark: same rows as the local host, retries, refusals."""

from __future__ import annotations

import datetime
import decimal
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import penstock as pk
from engine_support import frame
from penstock.errors import ConfigError, PlanError, SchemaError, UnsupportedSession
from penstock.spark._session.collect import to_table
from penstock.spark.batch import places
from penstock.workloads import nexmark, wordcount
from penstock.workloads.tpcxbb import tables as tpcxbb

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def by_value() -> Iterator[None]:
    """Spark's workers cannot import this file: ship its functions, as those of a notebook are."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def bag(table: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))


def bids(count: int = 5_000) -> pa.Table:
    rng = random.Random(11)
    return pa.table(
        {
            "auction": [rng.randrange(40) for _ in range(count)],
            "bidder": [rng.choice(["ann", "bob", "cy", None]) for _ in range(count)],
            "price": [rng.randrange(100) for _ in range(count)],
            "ts": pa.array([20_000 * number for number in range(count)], pa.timestamp("us", tz="UTC")),
        }
    )


BIDS = pk.Flow("auction bigint, bidder string, price bigint, ts timestamp", event_time="ts")


def cheap(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.filter(pc.less(batch.column("price"), 50))


FLOWS = {
    "maps only": BIDS.map_batches(cheap),
    "final aggregate": BIDS.key_by("bidder").agg(n=pk.count(), total=pk.sum("price"), emit="final"),
    "sliding windows": BIDS.key_by("auction").window(pk.sliding("10s", every="5s")).agg(n=pk.count()),
    "two exchanges": BIDS.map_batches(cheap)
    .key_by("auction", "bidder")
    .window(pk.tumbling("20s"))
    .agg(n=pk.count(), best=pk.max("price"))
    .top(2, by="n", per="window"),
    "highest bids": BIDS.window(pk.tumbling("20s")).top(1, by="price", per="window"),
    "highest of all": BIDS.top(3, by="price"),
    "maps behind": BIDS.key_by("auction")
    .agg(n=pk.count(), emit="final")
    .map_batches(lambda batch: batch.filter(pc.greater(batch.column("n"), 120))),
}


@pytest.mark.parametrize("name", FLOWS)
def test_same_rows_as_the_local_host(spark: Any, name: str) -> None:
    flow = FLOWS[name]
    table = bids()
    df = frame(spark, table).repartition(4)
    out = pk.spark.run(flow, df)
    local = flow.collect(table, workers=2)
    assert out.columns == local.column_names
    got = pa.Table.from_batches(to_table(out).to_batches())
    assert bag(got.cast(local.schema)) == bag(local)
    assert local.num_rows > 0
    assert bag(to_table(pk.spark.run(flow, df, partitions=1)).cast(local.schema)) == bag(local)


def running(state: tuple[int, int] | None, auction: int, price: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
    seen, mixed = state or (0, 0)
    mixed = (mixed * 31 + price) % 1_000_003  # depends on the order of all rows so far
    return (seen + 1, mixed), (auction, seen + 1, mixed)


ORDERED = BIDS.key_by("auction").stateful_map(
    running, schema="auction bigint, seen bigint, mixed bigint", columns=["auction", "price"]
)


def test_order_of_the_input_reaches_the_step(spark: Any) -> None:
    table = bids()
    local = ORDERED.collect(table, workers=2)
    df = frame(spark, table).coalesce(1)
    assert bag(to_table(pk.spark.run(ORDERED, df)).cast(local.schema)) == bag(local)
    # Many partitions that follow each other, and a map that drops rows before the exchange.
    parts = frame(spark, table).repartitionByRange(5, "ts").sortWithinPartitions("ts")
    flow = (
        BIDS.map_batches(cheap)
        .key_by("auction")
        .stateful_map(running, schema="auction bigint, seen bigint, mixed bigint", columns=["auction", "price"])
    )
    assert bag(to_table(pk.spark.run(flow, parts)).cast(local.schema)) == bag(flow.collect(table, workers=3))


def test_order_by_makes_an_order(spark: Any) -> None:
    table = bids()
    flow = (
        pk.Flow(BIDS.input_schema, order_by="ts")
        .key_by("auction")
        .stateful_map(running, schema="auction bigint, seen bigint, mixed bigint", columns=["auction", "price"])
    )
    mixed = frame(spark, table).repartition(6)
    local = flow.collect(table)
    assert bag(to_table(pk.spark.run(flow, mixed)).cast(local.schema)) == bag(local)


def test_a_task_that_fails_is_run_again_and_changes_nothing(spark: Any) -> None:
    def fails_once(batch: pa.RecordBatch) -> pa.RecordBatch:
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is not None and context.attemptNumber() == 0:
            raise OSError("this attempt is lost")
        return batch

    def fails_late(state: Any, auction: int, price: int) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        state, out = running(state, auction, price)
        if out[1] == 100 and context is not None and context.attemptNumber() == 0:
            raise OSError("this attempt is lost, after rows came out")
        return state, out

    table = bids()
    keyed = BIDS.map_batches(fails_once).key_by("auction")
    flow = keyed.stateful_map(
        fails_late, schema="auction bigint, seen bigint, mixed bigint", columns=["auction", "price"]
    )
    df = frame(spark, table).coalesce(1)
    wanted = bag(ORDERED.collect(table))
    assert bag(to_table(pk.spark.run(flow, df)).cast(ORDERED.output_schema)) == wanted


def test_an_error_of_a_user_function_reaches_the_user(spark: Any) -> None:
    def broken(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise ValueError("no such price")

    with pytest.raises(Exception, match="no such price") as caught:
        pk.spark.run(BIDS.map_batches(broken), frame(spark, bids(10)).coalesce(1)).count()
    assert "UserFunctionError" in str(caught.value) and "broken" in str(caught.value)


def test_a_module_that_the_workers_lack_is_named(spark: Any) -> None:
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    try:
        out = pk.spark.run(BIDS.map_batches(cheap), frame(spark, bids(10)).coalesce(1))
    finally:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.raises(Exception, match=r"workers cannot import; ship it with spark\.sparkContext\.addPyFile"):
        out.count()


def test_types_on_the_way(spark: Any) -> None:
    """Types that Spark and Arrow name differently, through a shuffle, in a session of another time zone."""
    schema = "k decimal(10,2), d date, b binary, f boolean, ntz timestamp_ntz, ts timestamp, tags array<string>"
    flow = pk.Flow(schema).top(100, by="k")
    day = datetime.date(2024, 2, 29)
    wall = datetime.datetime(2024, 3, 10, 2, 30)
    instant = datetime.datetime(2024, 3, 10, 7, 30, tzinfo=datetime.timezone.utc)
    columns = {"k": [1, None], "d": [day, None], "b": [b"\0x", None], "f": [True, None], "ntz": [wall, None]}
    table = pa.table(columns | {"ts": [instant, None], "tags": [["a", None], None]}, schema=flow.input_schema)
    df = frame(spark, table)
    assert to_table(pk.spark.run(flow, df)).cast(table.schema).sort_by("d") == table.sort_by("d")


def test_collected_tables(spark: Any) -> None:
    """Values, nulls and types as they are, on each Spark release; and also without rows."""
    instant = datetime.datetime(2024, 11, 3, 5, 30, tzinfo=datetime.timezone.utc)  # an hour that New York has twice
    schema = "d decimal(20,3), n bigint, ts timestamp, ntz timestamp_ntz, s struct<a: int, b: array<string>>"
    first = [decimal.Decimal("1.250"), 2**62, instant, instant.replace(tzinfo=None), {"a": 1, "b": ["x", None]}]
    names = pk.Flow(schema).input_schema.names
    table = pa.Table.from_pylist([dict(zip(names, first, strict=True)), {}, {}], pk.Flow(schema).input_schema)
    assert to_table(frame(spark, table)) == table
    none = to_table(frame(spark, table).where("n = 5"))
    assert none == table.slice(0, 0)


def test_odd_names_on_the_way(spark: Any) -> None:
    flow = pk.Flow("`a.b` bigint, `c``d` bigint, `größe 1` bigint").key_by("a.b", "c`d")
    flow = flow.agg(**{"s.t": pk.sum("größe 1")}, emit="final").top(5, by="s.t", per="c`d")
    table = pa.table({"a.b": [1, 1, 2], "c`d": [3, 3, 3], "größe 1": [4, 5, 6], "x": [0, 0, 0]})
    made = to_table(pk.spark.run(flow, frame(spark, table)))
    assert made.column_names == ["a.b", "c`d", "s.t"]
    assert bag(made) == bag(flow.collect(table)) == Counter([(1, 3, 9), (2, 3, 6)])


def test_expected_outputs(spark: Any, nexmark_data: Path) -> None:
    import pyarrow.parquet as pq

    for query in nexmark.QUERIES:
        flow = nexmark.flow(query, nexmark.load_params(nexmark_data))
        frames = nexmark.read_spark(flow, nexmark_data, spark)
        got = to_table(pk.spark.run(flow, {name: one.repartition(3) for name, one in frames.items()}))
        wanted = pq.read_table(nexmark_data / "expected" / f"{query}.parquet")
        assert got.column_names == wanted.column_names
        assert bag(got) == bag(wanted), query


def test_word_counts(spark: Any, text_data: Path) -> None:
    files = sorted(text_data.glob("*.txt.gz"))
    counts = to_table(pk.spark.run(wordcount.flow(), wordcount.read_spark(files, spark)))
    assert wordcount.to_tsv(counts) == (text_data / "expected_wordcount.tsv").read_bytes()


def test_inside_partitions(spark: Any) -> None:
    flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="final")
    df = spark.range(30).selectExpr("id % 3 AS k").repartition(2)
    with pytest.raises(PlanError, match=r"penstock\.spark\.run\(flow, df\)"):
        flow.map_in_arrow()
    parts = df.mapInArrow(flow.map_in_arrow(per_partition=True), flow.output_ddl).collect()
    assert len(parts) > 3 and sum(row.n for row in parts) == 30
    assert sorted((row.k, row.n) for row in pk.spark.run(flow, df).collect()) == [(0, 10), (1, 10), (2, 10)]
    doubled = pk.Flow("k bigint").map_batches(lambda b: pa.record_batch({"k": pc.multiply(b["k"], 2)}))
    assert doubled.map_in_arrow() is not None
    out = df.mapInArrow(doubled.map_in_arrow(), doubled.output_ddl)
    assert sorted(row.k for row in out.distinct().collect()) == [0, 2, 4]


def test_rows_without_event_time_are_told_once_in_the_logs_of_tasks(spark: Any, tmp_path: Path) -> None:
    log = str(tmp_path / "log.txt")

    def listens(batch: pa.RecordBatch) -> pa.RecordBatch:
        import logging

        logger = logging.getLogger("penstock")
        if not any(isinstance(handler, logging.FileHandler) for handler in logger.handlers):
            logger.addHandler(logging.FileHandler(log))
        return batch

    clicks = pk.Flow("k bigint, ts bigint", event_time="ts").map_batches(listens)
    windowed = clicks.key_by("k").window(pk.tumbling("1s")).agg(n=pk.count())
    # Two pieces read the source.
    both = windowed.join(clicks.key_by("k").agg(m=pk.count()), on="k")
    df = spark.createDataFrame([(1, 1), (1, None), (2, None)], "k bigint, ts bigint").coalesce(1)
    told = "2 of 3 rows of this partition have no event time (column 'ts' is null)"
    try:
        assert [tuple(row) for row in pk.spark.run(both, df, partitions=1).collect()] == [(0, 1000, 1, 1, 2)]
        assert Path(log).read_text().count(told) == 1
        inside = df.mapInArrow(windowed.map_in_arrow(per_partition=True), windowed.output_ddl)
        assert [row.n for row in inside.collect()] == [1]
        assert Path(log).read_text().count(told) == 2
    finally:
        deaf = clicks.map_batches(silenced).map_in_arrow()
        df.mapInArrow(deaf, clicks.output_ddl).collect()


def silenced(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The worker is that of other tests, too."""
    import logging

    logger = logging.getLogger("penstock")
    for handler in [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]:
        logger.removeHandler(handler)
    return batch


def test_a_partition_that_expands_keeps_its_worker_small(spark: Any) -> None:
    def blocks(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        for at in range(batch["n"][0].as_py()):
            yield pa.record_batch({"at": [at] * 64, "data": [bytes([at % 251]) * (1 << 14)] * 64})

    def weighed(batch: pa.RecordBatch) -> pa.RecordBatch:
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * 4096
        return batch.append_column("resident", pa.array([resident] * batch.num_rows))

    def part(inner: pk.Flow) -> pk.Flow:
        made = inner.flat_map(blocks, "at bigint, data binary")
        return made.map_batches(weighed, "at bigint, data binary, resident bigint")

    flow = pk.Flow("n bigint").bounded(part, batches=2)
    df = spark.createDataFrame([(600,)], "n bigint").coalesce(1)
    out = df.mapInArrow(flow.map_in_arrow(), flow.output_ddl)
    figures = ("sum(length(data))", "max(resident) - min(resident)")
    size, grown = out.selectExpr(*figures).first()
    assert size == 600 << 20 and grown < 200 << 20, f"{grown} bytes more for {size} bytes of rows"


def test_expanded_rows_reach_the_step_behind_a_shuffle(spark: Any) -> None:
    def words(text: str) -> Iterator[tuple[str]]:
        return ((word,) for word in text.split())

    def shorter(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.append_column("again", pc.greater(pc.utf8_length(batch["word"]), 3))

    def cut(batch: pa.RecordBatch) -> pa.RecordBatch:
        long = pc.greater(pc.utf8_length(batch["word"]), 3)
        return pa.record_batch({"word": pc.if_else(long, pc.utf8_slice_codeunits(batch["word"], 1), batch["word"])})

    flow = (
        pk.Flow("text string")
        .bounded(lambda part: part.flat_map(words, "word string", rows=True), batches=1, batch_size=3)
        .iterate(lambda part: part.map_batches(cut).map_batches(shorter, "word string, again boolean"))
        .key_by("word")
        .agg(n=pk.count(), emit="final")
    )
    df = spark.createDataFrame([("alpha pha x",), ("",), ("lpha alpha x",)], "text string").repartition(2)
    assert sorted((row.word, row.n) for row in pk.spark.run(flow, df).collect()) == [("pha", 4), ("x", 2)]


def test_mistakes_are_refused_before_a_job_starts(spark: Any) -> None:
    flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="final")
    with pytest.raises(SchemaError, match="the DataFrame has no column 'k'; it has id"):
        pk.spark.run(flow, spark.range(3))
    with pytest.raises(SchemaError, match="'k' is string, expected int64"):
        pk.spark.run(flow, spark.createDataFrame([("a",)], "k string"))
    with pytest.raises(ConfigError, match="partitions=0"):
        pk.spark.run(flow, spark.range(3).toDF("k"), partitions=0)
    with pytest.raises(UnsupportedSession, match="not a list"):
        pk.spark.run(flow, [1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"needs a penstock\.Flow, not a int"):
        pk.spark.run(5, spark.range(3))  # type: ignore[arg-type]
    stream = spark.readStream.format("rate").load().selectExpr("value AS k")
    with pytest.raises(ConfigError, match="streaming"):
        pk.spark.run(flow, stream)


def test_a_connect_session_is_refused_naming_what_works() -> None:
    kind = type("DataFrame", (), {"__module__": "pyspark.sql.connect.dataframe"})
    with pytest.raises(UnsupportedSession, match=r"mapInArrow\(flow\.map_in_arrow\(\)"):
        pk.spark.run(BIDS, kind())


def test_places_cover_all_partitions_evenly() -> None:
    rng = random.Random(3)
    hashes = [rng.getrandbits(64) for _ in range(20_000)]
    signed = pa.array([value - (1 << 64) if value >> 63 else value for value in hashes], pa.int64())
    for count in (1, 3, 7, 200):
        got = places(signed, count).to_pylist()
        assert got == [(value >> 32) * count >> 32 for value in hashes]
        loads = Counter(got)
        assert set(loads) == set(range(count))
        assert max(loads.values()) < 20_000 / count * 1.6 + 10


def test_handles_stay_out_of_closures() -> None:
    from penstock.spark._tasks.partitions import PartitionFunction

    function = BIDS.map_batches(cheap).map_in_arrow()
    assert isinstance(function, PartitionFunction)
    copy = cloudpickle.loads(cloudpickle.dumps(function))

    def source() -> Iterator[pa.RecordBatch]:
        yield from bids(100).to_batches(max_chunksize=30)

    assert sum(batch.num_rows for batch in copy(source())) == sum(
        price < 50 for price in bids(100)["price"].to_pylist()
    )


def test_a_folder_is_no_pattern(spark: Any, tmp_path: Path) -> None:
    """``run[1]`` is a name, though ``run1`` is what it would match."""
    for name, price in (("run[1]", 7), ("run1", 8)):
        folder = tmp_path / name
        folder.mkdir()
        rows = pa.table({"auction": [123], "price": [price]})
        pq.write_table(rows, folder / "bid.parquet")
        pq.write_table(pa.table({key: [price] for key in tpcxbb.SALES.schema.names}), folder / "store_sales.parquet")
        (folder / "a.txt").write_text(str(price))
    asked = tmp_path / "run[1]"
    [bid] = nexmark.read_spark(nexmark.flow("q2", {}), asked, spark)["bid"].collect()
    assert bid.price == 7
    [line] = tpcxbb.read_spark(tpcxbb.SALES, ["seq"], asked, spark).collect()
    assert line.seq == 7
    [text] = wordcount.read_spark([asked / "a.txt"], spark).collect()
    assert bytes(text.chunk) == b"7"
