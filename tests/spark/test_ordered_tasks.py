"""Ordered functions inside Spark tasks: order, errors at their place, nothing left of a task that ends."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import penstock as pk
from engine_support import Gate, frame, in_thread, wait_for
from penstock import ordered
from penstock.errors import ConfigError, SchemaError, UserFunctionError
from penstock.spark import ordered as spark_ordered
from penstock.spark._session.collect import to_table
from penstock.workloads import tpcxbb
from tpcxbb_support import BAGS, expected, some_clicks, some_lines, write

#: Far beyond what anything here takes, far below waiting for ever.
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def by_value() -> Iterator[None]:
    """Spark's workers cannot import this file: ship its functions, as those of a notebook are."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def twice(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"id": pc.multiply(batch.column("id"), 2)})


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def noted(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.glob("[0-9]*")]


@pytest.mark.spark
@pytest.mark.parametrize("mode", ["auto", "threads", "processes"])
def test_rows_leave_in_order(spark: Any, mode: str) -> None:
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "97")
    df = spark.range(0, 3_000, 1, 2)
    over_batches = pk.spark.ordered(twice, "id bigint", mode=mode, workers=2)
    assert to_table(df.mapInArrow(over_batches, over_batches.ddl)).column("id").to_pylist() == list(range(0, 6_000, 2))

    def described(row: dict[str, Any]) -> tuple[int, str]:
        return row["id"], f"row {row['id']}"

    over_rows = pk.spark.ordered(described, "id bigint, text string", rows=True, mode=mode, workers=2)
    table = to_table(df.mapInArrow(over_rows, over_rows.ddl))
    assert table.column("text").to_pylist() == [f"row {number}" for number in range(3_000)]
    rdd = spark.sparkContext.parallelize(range(500), 2)
    squares = rdd.mapPartitions(pk.spark.ordered_partitions(lambda n: n * n, mode=mode, workers=2))
    assert squares.collect() == [n * n for n in range(500)]
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


@pytest.mark.spark
def test_a_pipeline_has_its_state_per_partition_and_ends_with_it(spark: Any) -> None:
    def running(total: int, row: dict[str, Any]) -> tuple[int, list[tuple[str, int]]]:
        return total + row["id"], [("sum", total + row["id"])]

    line = ordered.Pipeline(
        [ordered.stateful(running, initial=0, finish=lambda total: [("end", total)]), ordered.filter(lambda row: row)]
    )
    sums = pk.spark.ordered(line, "what string, total bigint", rows=True, workers=2, mode="threads")
    got = spark.range(0, 8, 1, 2).mapInArrow(sums, sums.ddl).collect()
    assert [row.total for row in got if row.what == "sum"] == [0, 1, 3, 6, 4, 9, 15, 22]
    assert [row.total for row in got if row.what == "end"] == [6, 22]


@pytest.mark.spark
def test_tpcxbb_on_spark_is_tpcxbb_here(spark: Any, tmp_path: Path) -> None:
    rng = random.Random(12)
    clicks, sales = some_clicks(rng, 200), some_lines(rng, 60)
    folder = write(tmp_path, random.Random(1).sample(clicks, len(clicks)), sales)
    for name, wanted in expected(clicks, sales).items():
        table = tpcxbb.run_spark(tpcxbb.find(name), folder, spark, workers=2)
        rows = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
        assert (sorted(rows) if name in BAGS else rows) == wanted, name
    write(tmp_path, [], [])
    assert tpcxbb.run_spark(tpcxbb.find("q4"), folder, spark).to_pylist() == [
        {"pages": None, "sessions": 0, "avg_pages": None}
    ]
    assert tpcxbb.run_spark(tpcxbb.find("q1"), folder, spark).num_rows == 0
    write(tmp_path, [clicks[0], clicks[1], clicks[1]], [])
    with pytest.raises(SchemaError, match=r"web_clickstreams\.parquet has seq 3 twice"):
        tpcxbb.run_spark(tpcxbb.find("q2_sessions"), folder, spark)


@pytest.mark.spark
@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_a_function_that_raises_names_its_row_at_the_driver(spark: Any, mode: str) -> None:
    def picky(row: dict[str, Any]) -> tuple[int]:
        if row["id"] == 77:
            raise ValueError("no such price")
        return (row["id"],)

    failing = pk.spark.ordered(picky, "id bigint", rows=True, mode=mode, workers=2)
    with pytest.raises(Exception, match="no such price") as caught:
        spark.range(0, 100, 1, 1).mapInArrow(failing, failing.ddl).collect()
    cause = pk.spark.cause_of(caught.value)
    assert isinstance(cause, UserFunctionError)
    assert "row 77 of partition 0: ValueError: no such price" in str(cause)
    assert cause.file == __file__


@pytest.mark.spark
def test_a_worker_is_reused_as_new(spark: Any, tmp_path: Path) -> None:
    """The second job finds the threads, files and processes of before the first, and gets the right rows."""

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        yield pa.RecordBatch.from_pylist([{"pid": os.getpid(), "threads": threads, "files": files}])

    def states() -> dict[int, tuple[int, int]]:
        """Of all that wait: Spark takes who has waited longest, so one that comes again was the first."""
        found: dict[int, tuple[int, int]] = {}
        while True:
            df = spark.range(0, 2, 1, 1).mapInArrow(look, "pid bigint, threads bigint, files bigint")
            (row,) = df.collect()
            if row.pid in found:
                return found
            found[row.pid] = row.threads, row.files

    folder = str(tmp_path)

    def note(n: int) -> int:
        open(f"{folder}/{os.getpid()}", "w").close()
        return n + 1

    def job() -> list[int]:
        rdd = spark.sparkContext.parallelize(range(400), 1)
        return list(rdd.mapPartitions(pk.spark.ordered_partitions(note, mode="processes", workers=2)).collect())

    def jobs() -> None:
        """One for each of the workers."""
        for _ in states():
            assert job() == list(range(1, 401))

    jobs()
    before = states()
    jobs()
    after = before

    def none_more() -> bool:
        nonlocal after
        after = states()
        both = before.keys() & after.keys()
        assert both, "Spark reuses its Python workers"
        return all(now <= then for pid in both for now, then in zip(after[pid], before[pid], strict=True))

    # A thread that is over may be listed for a moment longer.
    wait_for(none_more, LIMIT_S, "the threads and files of the second job have gone")
    children = [pid for pid in noted(tmp_path) if pid not in after]
    assert children
    wait_for(lambda: all(map(gone, children)), LIMIT_S, "the end of the worker processes")


@pytest.mark.spark
def test_a_limit_ends_the_processes(spark: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def note(row: dict[str, Any]) -> tuple[int]:
        open(f"{folder}/{os.getpid()}", "w").close()
        return (row["id"],)

    endless = pk.spark.ordered(note, "id bigint", rows=True, mode="processes", workers=2, in_flight=64)
    df = spark.range(0, 50_000_000, 1, 1).mapInArrow(endless, endless.ddl)
    assert [row.id for row in df.limit(3).collect()] == [0, 1, 2]
    assert noted(tmp_path)
    wait_for(lambda: all(map(gone, noted(tmp_path))), LIMIT_S, "the end of the worker processes")


@pytest.mark.spark
@pytest.mark.fault
def test_a_task_that_is_killed_while_full_leaves_no_process(spark: Any, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.close()
    path, folder = str(gate.path), str(tmp_path)

    def waits(row: dict[str, Any]) -> tuple[int]:
        open(f"{folder}/{os.getpid()}", "w").close()
        while os.path.exists(path):
            time.sleep(0.02)
        return (row["id"],)

    stuck = pk.spark.ordered(waits, "id bigint", rows=True, mode="processes", workers=2, in_flight=8)
    sc = spark.sparkContext

    def job() -> str:
        sc.setJobGroup("stuck", "a task that never ends", interruptOnCancel=True)
        try:
            spark.range(0, 1_000, 1, 1).mapInArrow(stuck, stuck.ddl).collect()
        except Exception as error:
            return str(error)
        return "it ended"

    with in_thread(job) as result:
        wait_for(lambda: len(noted(tmp_path)) >= 2, LIMIT_S, "two processes at work")
        sc.cancelJobGroup("stuck")
        assert "cancel" in result(LIMIT_S).lower()
    wait_for(lambda: all(map(gone, noted(tmp_path))), LIMIT_S, "the end of the worker processes")
    gate.open()


@pytest.mark.spark
def test_what_cannot_be_shipped_is_told_at_the_call(spark: Any) -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to Spark's Python workers"):
        pk.spark.ordered(lambda batch: (lock, batch), "id bigint")
    empty = pk.spark.ordered(twice, "id bigint")
    assert frame(spark, pa.table({"id": pa.array([], pa.int64())})).mapInArrow(empty, empty.ddl).count() == 0


def one(f: Any, schema: Any, rows: bool = True) -> list[pa.RecordBatch]:
    batch = pa.record_batch({"id": [1, 2]})
    return list(pk.spark.ordered(f, schema, rows=rows, workers=1, mode="inline")([batch]))


def test_wrong_results_are_named() -> None:
    for f, says in [
        (lambda row: (1, 2), "result 0 has 2 values, expected 1 (id)"),
        (lambda row: {"ident": 1}, "result 0 has the columns ident; expected id"),
        (lambda row: None, "result 0 is None, expected a RecordBatch, or a row"),
        (lambda row: ("one",) if row["id"] == 2 else (1,), "result 1 has 'one' in column 'id', expected int64"),
        (lambda row: (2**70,), "result 0 has 1180591620717411303424 in column 'id', expected int64"),
        (lambda row: (row["id"] / 2,), "result 0 has 0.5 in column 'id', expected int64"),
        (lambda row: {"id": Decimal("1.5")}, "result 0 has Decimal('1.5') in column 'id', expected int64"),
        (lambda row: {"id": 1} if row["id"] == 1 else {"ident": 1}, "result 1 has the columns ident; expected id"),
        (lambda row: pa.record_batch({"other": [1]}), "result 0: has no column 'id'; it has other"),
    ]:
        with pytest.raises(SchemaError) as caught:
            one(f, "id bigint")
        assert says in str(caught.value)
    with pytest.raises(SchemaError, match="result 1 has a null in column 'id', which is NOT NULL"):
        one(lambda row: (None if row["id"] == 2 else 1,), "id bigint NOT NULL")
    with pytest.raises(SchemaError, match=r"is \[1\], not a pyarrow RecordBatch; rows need a schema"):
        one(lambda batch: [1], None, rows=False)
    with pytest.raises(SchemaError, match=r"result 0 has 1\.5 in column 'at', expected timestamp"):
        one(lambda row: (1.5,), "at timestamp")
    assert one(twice, None, rows=False)[0].column("id").to_pylist() == [2, 4]
    mixed = one(lambda row: (1,) if row["id"] == 1 else pa.record_batch({"id": pa.array([7], pa.int8())}), "id bigint")
    assert [batch.to_pydict() for batch in mixed] == [{"id": [1]}, {"id": [7]}]


def test_rows_before_one_that_is_refused_leave_first() -> None:
    """A pipeline may give tuples and dicts among each other."""

    def made(row: dict[str, Any]) -> Any:
        number = row["id"]
        return (number,) if number % 2 else {"id": "bad" if number == 50 else number}

    batch = pa.record_batch({"id": range(100)})
    line = ordered.Pipeline([ordered.map(made)])
    results = pk.spark.ordered(line, "id bigint", rows=True, workers=1, mode="inline")([batch])
    found: list[int] = []
    with pytest.raises(SchemaError, match="result 50 has 'bad' in column 'id', expected int64"):
        for out in results:
            found += out.column("id").to_pylist()
    assert found == list(range(50))


def test_two_columns_of_one_name_make_no_rows() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    over_rows = pk.spark.ordered(lambda row: (row["a"],), "id bigint", rows=True, workers=1, mode="inline")
    with pytest.raises(SchemaError, match="the input has 2 columns named 'a'; rename one of them"):
        list(over_rows([batch]))
    over_batches = pk.spark.ordered(lambda batch: batch.slice(0, 1), None, workers=1, mode="inline")
    assert next(iter(over_batches([batch]))).schema.names == ["a", "a"]


def test_errors_of_the_input_stay_what_they_are() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    results = pk.spark.ordered_partitions(lambda n: n, workers=1, mode="inline")(broken())
    assert next(results) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)


def test_bad_arguments_are_refused_at_the_call() -> None:
    for arguments, says in [
        ({"f": 7}, "needs a function or a penstock.Pipeline, not a int"),
        ({"workers": 0}, "workers must be a number of workers from 1 to 1024, got 0"),
        ({"in_flight": True}, "in_flight must be a number of items from 1 to 1099511627776, got True"),
        ({"chunk": 1.5}, "chunk must be a number of items from 1 to 16777216, got 1.5"),
        ({"mode": "fast"}, "mode must be one of auto, inline, threads, processes, got 'fast'"),
        ({"timeout": -1}, "timeout=-1 must be above 0 s"),
        ({"timeout": 1, "mode": "inline"}, "timeout= needs mode"),
    ]:
        with pytest.raises(ConfigError) as caught:
            pk.spark.ordered_partitions(**({"f": abs} | arguments))
        assert says in str(caught.value)
    with pytest.raises(SchemaError, match="needs the schema of the rows"):
        pk.spark.ordered(abs, rows=True)
    with pytest.raises(SchemaError, match="was given no schema"):
        _ = pk.spark.ordered(abs).ddl


def test_workers_are_the_cpus_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.spark import ordered as function

    module = sys.modules[function.__module__]

    class Context:
        def cpus(self) -> int:
            return 3

        def partitionId(self) -> int:
            return 5

    asked: list[Any] = []
    start = module._start

    def started(f: Any, items: Any, options: dict[str, Any]) -> Any:
        made = start(f, items, options)
        asked.append(made._driver.options.workers)
        return made

    monkeypatch.setattr(module._cpus, "task", Context)
    monkeypatch.setattr(module, "_start", started)
    assert list(spark_ordered(twice, "id bigint")([])) == []
    assert list(spark_ordered(twice, "id bigint", workers=2)([])) == []
    assert asked == [3, 2]
