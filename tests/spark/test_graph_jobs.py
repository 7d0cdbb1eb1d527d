"""Graphs on Spark: the same matches as in this process, whatever the tasks are given."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as pk
from data_support import Graph
from engine_support import wait_for
from penstock import errors
from penstock.graph._options import Options
from penstock.spark._graph.watch import watched
from penstock.spark._session.collect import to_table

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

EDGES = [(a * 2**33, b * 2**33) for a in range(-6, 14) for b in range(-6, 14) if (a * 7 + b * 3) % 4 == 0 or a == 0]
TRIANGLE = "tri(a, b, c) :- e(a, b), e(a, c), e(b, c)"


@pytest.fixture(scope="module")
def edges(spark: Any) -> Any:
    return spark.createDataFrame(EDGES * 2, "src bigint, dst bigint")


def bag(rows: Any) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row) for row in rows)


def local(batches: Any) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.values()) for batch in batches for row in batch.to_pylist())


def test_dataframes_give_what_tables_give(spark: Any, edges: Any) -> None:
    table = to_table(edges)
    for directed in (False, True):
        frame = pk.graph.cliques(edges, 3, directed=directed)
        assert frame.columns == ["a1", "a2", "a3"] and [kind for _, kind in frame.dtypes] == ["bigint"] * 3
        wanted = local(pk.graph.cliques(table, 3, directed=directed))
        assert bag(frame.collect()) == wanted and max(wanted.values()) == 1
        told: list[tuple[int, int]] = []
        count = pk.graph.cliques(edges, 3, directed=directed, count=True, progress=lambda *at, to=told: to.append(at))
        assert count == wanted.total() and told[-1][0] == told[-1][1] > 1
    names = edges.selectExpr("concat('n', dst) AS t", "concat('n', src) AS s")
    pattern = "p(x, z) :- e(x, y), f(y, z), e(y, x)"
    frame = pk.graph.match(pattern, {"e": names, "f": names}, columns=("s", "t"), batch_rows=7)
    assert [kind for _, kind in frame.dtypes] == ["string"] * 2
    both = {"e": to_table(names), "f": to_table(names)}
    assert bag(frame.collect()) == local(pk.graph.match(pattern, both, columns=("s", "t")))


def test_a_hub_is_shared_by_tasks(spark: Any) -> None:
    from pyspark.sql.functions import spark_partition_id

    hub = [(0, n) for n in range(1, 400)] + [(n, n + 1) for n in range(1, 399)]
    frame = pk.graph.match(TRIANGLE, {"e": spark.createDataFrame(hub, "a int, b int")}, order=["a", "b", "c"])
    parts = frame.groupBy(spark_partition_id()).count().collect()
    assert sum(row["count"] for row in parts) == 398 and len(parts) >= 2


def test_an_interrupt_cancels_the_job(spark: Any) -> None:
    """As Ctrl-C would come: while the driver looks how far the tasks are."""
    pairs = list(itertools.combinations(range(300), 2))
    frame = spark.createDataFrame(pairs, "a int, b int")
    tracker = spark.sparkContext.statusTracker()

    def interrupt(done: int, total: int) -> None:
        if tracker.getActiveJobsIds():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pk.graph.cliques(frame, 8, count=True, progress=interrupt)
    wait_for(lambda: not tracker.getActiveJobsIds(), what="the job has ended")


def test_an_interrupt_before_the_job_is_submitted_cancels_it_too(spark: Any) -> None:
    context = spark.sparkContext
    interrupted = threading.Event()

    def action() -> Any:
        assert interrupted.wait(60)
        return context.parallelize(range(1), 1).map(lambda _: time.sleep(600)).collect()

    def interrupt(done: int, total: int) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watched(context, "late", action, 1, interrupt)
    # Spark tells the thread that waits for a job before those that list what runs.
    wait_for(lambda: not context.statusTracker().getActiveJobsIds(), what="the job has ended")


def test_nothing_gives_nothing(spark: Any) -> None:
    empty = spark.createDataFrame([], "a bigint, b bigint")
    assert pk.graph.cliques(empty, 3, count=True) == 0 and pk.graph.cliques(empty, 4).collect() == []


def test_what_is_wrong_is_refused_at_the_driver(spark: Any, edges: Any) -> None:
    with pytest.raises(errors.PatternError, match='no relation "g"'):
        pk.graph.match("p(a) :- g(a, b)", {"e": edges})
    with pytest.raises(errors.ConfigError, match="order='ab' must be a list of variables"):
        pk.graph.match("p(a, b) :- e(a, b)", {"e": edges}, order="ab")
    for call in (
        lambda ids: pk.graph.cliques(edges, 3, ids=ids),
        lambda ids: pk.graph.match(TRIANGLE, {"e": edges}, ids=ids),
    ):
        with pytest.raises(
            errors.ConfigError, match="ids='text' says what nodes in files are, and DataFrames have types"
        ):
            call("text")
        with pytest.raises(errors.ConfigError, match="ids='bogus' must be"):
            call("bogus")
    with pytest.raises(errors.ConfigError, match="streaming"):
        stream = spark.readStream.format("rate").load().selectExpr("value AS a", "value AS b")
        pk.graph.cliques(stream, 3)
    with pytest.raises(errors.ConfigError, match="give all as one kind"):
        pk.graph.match("p(a) :- e(a, b), f(a, b)", {"e": edges, "f": to_table(edges)})
    with pytest.raises(errors.SchemaError, match="null in row"):
        pk.graph.cliques(spark.createDataFrame([(1, None)], "a int, b int"), 3)


def test_edges_come_to_the_driver_in_pieces(spark: Any, edges: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.spark._graph import stream

    monkeypatch.setattr(stream, "_AT_A_TIME", 1)
    some = edges.repartition(3)
    found = [tuple(row.values()) for batch in stream.pieces(some, "some edges") for row in batch.to_pylist()]
    assert Counter(found) == Counter(EDGES * 2)
    assert spark.sparkContext.getLocalProperty("spark.job.description") is None
    assert not spark.sparkContext._jsc.getPersistentRDDs()


def test_columns_are_found_by_place(spark: Any) -> None:
    """Names that SQL would have to quote, or that are there twice."""
    frame = spark.createDataFrame([(1, 9, 2), (2, 9, 3), (1, 9, 3)], "`a.b` int, `x y` int, `a.c` int")
    assert pk.graph.cliques(frame, 3, columns=("a.b", "a.c"), count=True) == 1
    same = spark.createDataFrame([(1, 2), (2, 3), (1, 3)], "a int, b int").toDF("a", "a")
    assert pk.graph.cliques(same, 3, count=True) == 1
    with pytest.raises(errors.SchemaError, match="no single column 'a'"):
        pk.graph.cliques(same, 3, columns=("a", "b"))
    with pytest.raises(errors.SchemaError, match="column 'b' is double; nodes are integers or text"):
        pk.graph.cliques(spark.createDataFrame([(1, 2.0)], "a int, b double"), 3)
    with pytest.raises(errors.SchemaError, match="has 1 column"):
        pk.graph.cliques(spark.range(3), 3)


def test_batches_of_a_stream_are_epochs_of_deltas(spark: Any, tmp_path: Path) -> None:
    """A sink that fails once: the batch comes again, and so do its changes."""
    edges = [(a, b) for a in range(8) for b in range(8) if (a + 2 * b) % 3]
    gone = edges[1::4]
    for number in range(3):
        rows = [(*edge, 1) for edge in edges[number::3]] + [(*edge, -1) for edge in gone if number == 2]
        part = spark.createDataFrame(rows, "src bigint, dst bigint, diff int").coalesce(1)
        part.write.mode("append").parquet(str(tmp_path / "edges"))
    deltas = pk.graph.Deltas(TRIANGLE)
    seen: dict[int, list[tuple[Any, ...]]] = {}
    tries: list[int] = []

    def sink(changes: pk.graph.Changes, number: int) -> None:
        tries.append(number)
        if tries == [0, 1]:
            next(changes)
            raise RuntimeError("the sink is full")
        seen[number] = [tuple(row.values()) for batch in changes for row in batch.to_pylist()]

    def run() -> Any:
        stream = spark.readStream.schema("src bigint, dst bigint, diff int").option("maxFilesPerTrigger", 1)
        writer = stream.parquet(str(tmp_path / "edges")).writeStream.trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        return writer.foreachBatch(deltas.foreach_batch(sink, diff="diff")).start()

    with pytest.raises(Exception, match="the sink is full"):
        run().awaitTermination()
    run().awaitTermination()
    assert tries == [0, 1, 1, 2]
    total = Counter[tuple[Any, ...]]()
    for changes in seen.values():
        for *row, diff in changes:
            total[tuple(row)] += diff
    left = spark.createDataFrame(sorted(set(edges) - set(gone)), "src bigint, dst bigint")
    assert +total == local(pk.graph.match(TRIANGLE, {"e": to_table(left)})) and min(total.values()) == 0


@pytest.mark.parametrize("at", range(3))
def test_the_diff_is_no_node_wherever_it_stands(spark: Any, at: int) -> None:
    """Of the smaller node and the larger one, whatever their types; also where names need quotes."""
    deltas = pk.graph.Deltas("p(a, b) :- e(a, b)")
    seen: list[tuple[Any, ...]] = []
    function = deltas.foreach_batch(lambda changes, number: seen.extend(local(changes)), diff="a `diff`.x")
    columns = ["`from` bigint", "to bigint"]
    columns.insert(at, "`a ``diff``.x` {}")
    schema = ", ".join(columns)

    def rows(*given: tuple[int, int, Any]) -> Any:
        return [(*row[:2][:at], row[2], *row[:2][at:]) for row in given]

    function(spark.createDataFrame(rows((1, 2, 1), (3, 4, 5), (5, 6, 0)), schema.format("int")), 0)
    function(spark.createDataFrame(rows((1, 2, -1.0), (7, 8, 2.0)), schema.format("double")), 1)
    assert sorted(seen) == [(1, 2, -1), (1, 2, 1), (3, 4, 1), (7, 8, 1)]
    with pytest.raises(errors.SchemaError, match=r"relation 'e': column 'a `diff`\.x' is null in some row"):
        function(spark.createDataFrame(rows((7, 8, -1), (9, 9, None)), schema.format("int")), 2)
    for kind, value in (("string", "1"), ("boolean", True)):
        with pytest.raises(errors.SchemaError, match=rf"column 'a `diff`\.x', .*, is {kind}; it has to be of numbers"):
            function(spark.createDataFrame(rows((7, 8, value)), schema.format(kind)), 2)
    with pytest.raises(errors.SchemaError, match=r"no single column 'a `diff`\.x'; it has x, y"):
        function(spark.createDataFrame([(1, 2)], "x bigint, y bigint"), 2)
    with pytest.raises(errors.SchemaError, match=r"has 1 column\(s\), x: edges need two"):
        function(spark.createDataFrame([(1, 2)], "x bigint, `a ``diff``.x` bigint"), 2)
    # What was refused has not been fed.
    function(spark.createDataFrame(rows((7, 8, -1)), schema.format("int")), 2)
    assert sorted(seen)[-2:] == [(7, 8, -1), (7, 8, 1)]


def test_numbers_of_a_diff_add_up(spark: Any) -> None:
    deltas = pk.graph.Deltas("p(a, b) :- e(a, b)")
    seen: list[tuple[Any, ...]] = []
    function = deltas.foreach_batch(lambda changes, number: seen.extend(sorted(local(changes))), diff="d")

    def feed(number: int, kind: str, *rows: Any) -> list[tuple[Any, ...]]:
        seen.clear()
        function(spark.createDataFrame(list(rows), f"a bigint, b bigint, d {kind}"), number)
        return seen

    assert feed(0, "int", (1, 2, 2), (1, 2, -1), (3, 4, 1), (3, 4, -1), (5, 6, 3)) == [(1, 2, 1), (5, 6, 1)]
    assert feed(1, "bigint", (5, 6, -(2**62)), (5, 6, 2**62 - 1), (3, 4, 2**62)) == [(3, 4, 1), (5, 6, -1)]
    assert feed(2, "decimal(20,2)", (3, 4, Decimal("-1.00")), (1, 2, Decimal(0))) == [(3, 4, -1)]
    assert feed(3, "float", (3, 4, 1.0)) == [(3, 4, 1)]
    for kind, wrong in [
        ("double", float("nan")),
        ("float", float("nan")),
        ("double", float("inf")),
        ("double", 0.5),
        ("double", 1e300),
        ("decimal(20,2)", Decimal("1.50")),
        ("decimal(38,0)", Decimal(10) ** 30),
    ]:
        with pytest.raises(errors.SchemaError, match="relation 'e': column 'd' has a value that is no whole number"):
            feed(4, kind, (1, 2, type(wrong)(-1)), (8, 9, wrong))
    with pytest.raises(errors.ConfigError, match="epoch=-1 must be an int"):
        feed(-1, "int", (8, 9, 1))
    assert deltas.epoch == 3
    assert feed(4, "int", (8, 9, 1)) == [(8, 9, 1)]


def test_a_batch_is_computed_once(spark: Any) -> None:
    """What comes and what goes is told from the same rows."""
    computed = spark.sparkContext.accumulator(0)

    def noted(batches: Any) -> Any:
        for batch in batches:
            computed.add(batch.num_rows)
            yield batch

    schema = "a bigint, b bigint, d int"
    rows = [(n, n + 1, 1 if n % 2 else -1) for n in range(100)]
    batch = spark.createDataFrame(rows, schema).mapInArrow(noted, schema)
    deltas = pk.graph.Deltas("p(a, b) :- e(a, b)")
    deltas.foreach_batch(lambda changes, number: None, diff="d")(batch, 0)
    assert computed.value == 100 and deltas.changes().to_table().num_rows == 50


def test_another_query_is_another_source(spark: Any, tmp_path: Path) -> None:
    """Its batches have the same numbers: they are no replay. Nor are those of a query whose checkpoint is new."""
    deltas = pk.graph.Deltas("p(a, b) :- e(a, b)")
    seen: list[tuple[int, bool, list[tuple[Any, ...]]]] = []

    def sink(changes: pk.graph.Changes, number: int) -> None:
        seen.append((number, changes.replayed, sorted(local(changes))))

    def run(name: str, checkpoint: str) -> Any:
        stream = spark.readStream.schema("a bigint, b bigint").parquet(str(tmp_path / name))
        writer = stream.writeStream.trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(tmp_path / checkpoint))
        query = writer.foreachBatch(deltas.foreach_batch(sink)).start()
        query.awaitTermination()
        return query.id

    for name, edge in (("one", (1, 2)), ("two", (3, 4))):
        spark.createDataFrame([edge], "a bigint, b bigint").write.parquet(str(tmp_path / name))
    first = run("one", "checkpoint of one")
    for name in ("two", "one"):
        with pytest.raises(
            Exception, match=rf"epoch 0 comes from query .*, but the epochs before came from query {first}"
        ):
            run(name, f"another of {name}")
    assert seen == [(0, False, [(1, 2, 1)])]
    # The query itself goes on behind a restart.
    spark.createDataFrame([(5, 6)], "a bigint, b bigint").write.mode("append").parquet(str(tmp_path / "one"))
    assert run("one", "checkpoint of one") == first
    assert seen[1:] == [(1, False, [(5, 6, 1)])]


@pytest.mark.parametrize(
    "more",
    [["--output", "out.parquet"], pytest.param(["--batches", "1", "--batch-size", "10"], marks=pytest.mark.long)],
    ids=["rows", "count"],
)
def test_the_command(tmp_path: Path, graphs: Path, figures: Mapping[str, Graph], more: list[str]) -> None:
    """In a process of its own: it starts a session for itself."""
    path, threes = graphs / "ca-GrQc.txt.gz", figures["ca-GrQc"].threes
    shared = ["--input", str(path), "--size", "3", "--undirected", "--host", "spark", "--workers", "2", "--json"]

    command = [sys.executable, "-m", "penstock.cli", "cliques", *shared, *more]
    facts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout)
    assert facts["count"] == threes
    assert facts["peak_memory_bytes"] is facts["loaded_peak_memory_bytes"] is None, "the graph is in Spark's tasks"
    if more[0] == "--output":
        assert pq.read_table(tmp_path / more[1]).num_rows == threes
        assert os.listdir(tmp_path) == [more[1]]
    else:
        assert facts["admitted_maximum"] == 10 and facts["batches_maximum"] == 1
        assert os.listdir(tmp_path) == []


def test_a_host_has_one_copy(cluster: Any) -> None:
    """Two executors: all slots at once open the index."""
    from penstock.spark.graph import Job, host_index

    # A graph that no test before has brought: one of the executors that have it may have been replaced since.
    edges = [*EDGES, (1_000_003, 1_000_033)]
    table = pa.table({"a": [a for a, _ in edges], "b": [b for _, b in edges]})
    digest = Job(cluster, {"e": table}, TRIANGLE, None, Options(1)).digest

    def look(_: Any) -> Any:
        from pyspark import SparkFiles

        from penstock.spark._tasks.place import executor_name

        count = host_index(digest).count(TRIANGLE).count
        yield executor_name(), count, os.stat(SparkFiles.get(f"penstock-{digest}.graph")).st_ino

    seen = cluster.sparkContext.parallelize(range(4), 4).barrier().mapPartitions(look).collect()
    names, counts, inodes = (set(column) for column in zip(*seen, strict=True))
    assert len(names) == 2 and len(inodes) == 1
    assert counts == {pk.graph.match(TRIANGLE, {"e": table}, count=True)}
