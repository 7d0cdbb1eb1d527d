"""Gangs on a local Spark: tasks that meet, order and exchange; what a failing or killed task does to the others."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import penstock as pk
from engine_support import wait_for
from penstock.errors import (
    ConfigError,
    EngineError,
    SchemaError,
    SlotsError,
    UnsupportedSession,
    UserFunctionError,
    WorkerLost,
    WorkerStopped,
)
from penstock.spark._tasks.place import Secret
from penstock.spark._tasks.slots import from_settings, require_gang
from penstock.spark.gang import GangTask

#: Far beyond what anything here takes, far below waiting for ever.
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def by_value() -> Iterator[None]:
    """Spark's workers cannot import this file: ship its functions, as those of a notebook are."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def row(**values: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([values])


def total(batches: pa.RecordBatchReader) -> int:
    return sum(pc.sum(batch.column("id")).as_py() or 0 for batch in batches)


@pytest.mark.spark
def test_tasks_exchange_meet_and_agree_on_an_order(spark: Any) -> None:
    def program(worker: Any, batches: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        with worker.dataflow("sums") as scope:
            sums, stream = scope.input()
            seen = stream.broadcast().collect()
        barrier, log = worker.barrier(), worker.sequencer()
        own = total(batches)
        sums.send([own])
        sums.advance_to(1)
        barrier.wait()
        for number in range(3):
            log.push((worker.index, number))
        order = [log.wait_next() for _ in range(3 * worker.peers)]
        sums.close()
        worker.step_while(lambda: len(seen) < worker.peers)
        everything = sum(value for _, block in seen for value in block)
        yield row(worker=worker.index, own=own, everything=everything, order=str(order))

    out = pk.spark.gang(
        spark.range(1_000), program, tasks=2, schema="worker int, own bigint, everything bigint, order string"
    )
    rows = sorted(out.collect())
    assert [found.worker for found in rows] == [0, 1]
    assert sum(found.own for found in rows) == sum(range(1_000)) and min(found.own for found in rows) > 0
    assert {found.everything for found in rows} == {sum(range(1_000))}
    assert rows[0].order == rows[1].order
    assert [number for worker, number in eval(rows[0].order) if worker == 1] == [0, 1, 2]


@pytest.mark.spark
def test_what_follows_a_gang_may_look_at_some_rows_only(spark: Any) -> None:
    def tables(worker: Any, batches: pa.RecordBatchReader) -> pa.Table:
        return batches.read_all()

    out = pk.spark.gang(spark.range(100), tables, tasks=2, schema="id bigint")
    assert len(out.limit(3).collect()) == 3
    assert out.coalesce(1).count() == 100
    assert out.first() is not None


@pytest.mark.spark
def test_every_task_runs_though_there_are_no_rows_and_what_is_not_read_is_left(spark: Any) -> None:
    def lazy(worker: Any, batches: pa.RecordBatchReader) -> Any:
        worker.barrier().wait()
        return None if worker.index else row(peers=worker.peers)

    for df in (
        spark.range(0),
        spark.createDataFrame([], "a int"),
        spark.range(200_000),
        spark.range(5).filter("id < 0"),
        # Spark's optimizer knows that these are empty.
        spark.range(5).limit(0),
        spark.range(5).where("1 = 0"),
        spark.range(0).groupBy("id").count(),
    ):
        assert pk.spark.gang(df, lazy, tasks=2, schema="peers int").collect() == [(2,)]


@pytest.mark.spark
def test_reused_workers_are_clean(spark: Any) -> None:
    def look(worker: Any, batches: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        worker.barrier().wait()
        yield row(pid=os.getpid(), threads=len(os.listdir("/proc/self/task")), files=len(os.listdir("/proc/self/fd")))

    def run() -> dict[int, Any]:
        # A frame of its own each: Spark would read again what the tasks of the first one wrote.
        gang = pk.spark.gang(spark.range(10), look, tasks=2, schema="pid int, threads int, files int")
        return {found.pid: found for found in gang.collect()}

    first, least = run(), dict[int, tuple[int, int]]()

    def none_more() -> bool:
        """A thread that is over, or a file of its, may be there a moment longer at a look; what leaks is at each."""
        for pid, now in run().items():
            if first.setdefault(pid, now) is not now:
                threads, files = least.get(pid, (now.threads, now.files))
                least[pid] = min(threads, now.threads), min(files, now.files)
        return all(one[0] <= first[pid].threads and one[1] <= first[pid].files for pid, one in least.items())

    for _ in range(6):
        none_more()
    wait_for(none_more, what="reused workers have the threads and files of before")
    assert least, "Spark reuses its Python workers"


@pytest.mark.spark
def test_a_failing_program_is_the_one_error(spark: Any) -> None:
    failing = 1

    def program(worker: Any, batches: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        barrier = worker.barrier()
        barrier.wait()
        if worker.index == failing:
            raise ValueError("no such price")
        barrier.wait()
        yield row(id=1)

    with pytest.raises(Exception, match="no such price") as caught:
        pk.spark.gang(spark.range(10), program, tasks=2, schema="id bigint").collect()
    text = str(caught.value)
    assert "errors.WorkerStopped" not in text and "errors.WorkerLost" not in text
    error = pk.spark.cause_of(caught.value)
    assert isinstance(error, UserFunctionError) and error.__cause__ is caught.value
    line = program.__code__.co_firstlineno + 4
    assert (error.task, error.file, error.line) == (failing, __file__, line)  # type: ignore[attr-defined]
    assert error.message == f"task {failing} of the gang: ValueError: no such price ({__file__}:{line})"


@pytest.mark.spark
@pytest.mark.fault
def test_a_killed_task_ends_the_waits_of_the_others(spark: Any) -> None:
    def program(worker: Any, batches: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        barrier = worker.barrier()
        barrier.wait()
        if worker.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        barrier.wait()
        yield row(id=1)

    with pytest.raises(Exception, match="Python worker exited unexpectedly") as caught:
        pk.spark.gang(spark.range(10), program, tasks=2, schema="id bigint").collect()
    error = pk.spark.cause_of(caught.value)
    assert isinstance(error, WorkerLost) and error.process == 1


def test_results_of_every_shape_are_brought_to_the_schema_or_refused() -> None:
    schema = pa.schema({"id": pa.int64()})
    task = GangTask(b"", 1, schema, schema, Secret.random().mesh(), "run", 1.0)
    one = pa.record_batch({"id": pa.array([1, 2], pa.int32()), "more": ["a", "b"]})
    table = pa.Table.from_batches([one, one])
    for results, rows in ((None, 0), ([], 0), (one, 2), (table, 4), (iter([one, table, one.slice(0, 0)]), 6)):
        batches = list(task._fitting(results))
        assert sum(batch.num_rows for batch in batches) == rows
        assert all(batch.schema == schema and batch.num_rows for batch in batches)
    with pytest.raises(SchemaError, match="the result has no column 'id'; it has other"):
        list(task._fitting(row(other=1)))
    with pytest.raises(TypeError, match="the program gave a int, not a pyarrow RecordBatch or Table"):
        list(task._fitting([7]))


@pytest.mark.spark
def test_bad_arguments_are_refused_at_the_call(spark: Any) -> None:
    df = spark.range(10)
    nothing = print
    for tasks in (0, -1, 1.5, True, "2", None):
        with pytest.raises(ConfigError, match=f"tasks={tasks!r} must be an int of at least 1"):
            pk.spark.gang(df, nothing, tasks=tasks, schema="id bigint")  # type: ignore[arg-type]
    for timeout in (0, -1.0, float("nan"), float("inf"), True, "1"):
        with pytest.raises(ConfigError, match="timeout"):
            pk.spark.gang(df, nothing, tasks=1, schema="id bigint", timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a function"):
        pk.spark.gang(df, 7, tasks=1, schema="id bigint")  # type: ignore[arg-type]

    async def later(worker: Any, batches: pa.RecordBatchReader) -> None: ...

    async def one_by_one(worker: Any, batches: pa.RecordBatchReader) -> Any:
        yield row(id=1)

    for awaited, kind in ((later, "a coroutine"), (one_by_one, "an async generator")):
        with pytest.raises(ConfigError, match=f"the program: {awaited.__name__} is {kind} function"):
            pk.spark.gang(df, awaited, tasks=1, schema="id bigint")
    with pytest.raises(SchemaError):
        pk.spark.gang(df, nothing, tasks=1, schema="id bigin")
    with pytest.raises(ConfigError, match="streaming"):
        pk.spark.gang(spark.readStream.format("rate").load(), nothing, tasks=1, schema="id bigint")
    with pytest.raises(UnsupportedSession):
        pk.spark.gang(None, nothing, tasks=1, schema="id bigint")  # type: ignore[arg-type]
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to Spark's Python workers"):
        pk.spark.gang(df, lambda worker, batches: lock, tasks=1, schema="id bigint")
    with pytest.raises(SlotsError, match=r"a gang of 64 tasks needs 64 task slots at once; local\[") as caught:
        pk.spark.gang(df, nothing, tasks=64, schema="id bigint")
    assert caught.value.needed == 64


def test_slots_of_engines_count() -> None:
    require_gang(from_settings("local[4]", {}), 2, {"a": 2})
    with pytest.raises(
        SlotsError, match=r"at once, engine a holds 2; local\[3\] allows 3\. Start Spark with local\[4\]"
    ):
        require_gang(from_settings("local[3]", {}), 2, {"a": 2})


def test_the_key_shows_itself_to_nobody() -> None:
    key = Secret.random().mesh()
    task = GangTask(b"", 1, pa.schema({}), pa.schema({}), key, "run", 1.0)
    assert repr(key.reveal())[2:-1] not in repr(task) and key.reveal().hex() not in repr(task)
    assert pickle.loads(pickle.dumps(task)).key.reveal() == key.reveal()


def test_the_error_is_found_in_what_spark_says() -> None:
    text = (
        "An error occurred while calling o843.collectToPython.\n: org.apache.spark.SparkException: Job aborted: "
        "Stage failed because barrier task ShuffleMapTask(46, 0) finished unsuccessfully.\n"
        "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
        '  File "gang.py", line 209, in __call__\n'
        "penstock.errors.WorkerStopped: stopped by worker 1\n\n"
        "Traceback (most recent call last):\n"
        '  File "gang.py", line 234, in _run\n'
        "penstock.errors.UserFunctionError: task 3 of the gang: ValueError: two\nlines (a b.py:33)\n  row: k=1\n"
        " SQLSTATE: 38000\n\tat org.apache.spark.api.python\n"
    )
    found = pk.spark.cause_of(RuntimeError(text))
    assert isinstance(found, UserFunctionError)
    assert found.message == "task 3 of the gang: ValueError: two\nlines (a b.py:33)\n  row: k=1"
    within = pk.spark.cause_of(
        RuntimeError("penstock.errors.UserFunctionError: map: x (f.py:2)\n  in task 1 of the gang")
    )
    assert within is not None and within.data == {"task": 1, "file": "f.py", "line": 2}
    assert found.data == {"task": 3, "file": "a b.py", "line": 33}
    assert isinstance(pk.spark.cause_of(RuntimeError(text.replace("UserFunctionError", "NoSuch"))), WorkerStopped)
    assert pk.spark.cause_of(found) is found
    assert pk.spark.cause_of(ValueError("penstock.errors.NoSuch: x")) is None
    assert pk.spark.cause_of(ValueError("ModuleNotFoundError: No module named 'penstocks'")) is None


def test_tasks_without_penstock_are_told_what_is_missing() -> None:
    text = (
        "\n  An exception was thrown from the Python worker. Please see the stack trace below.\n"
        'Traceback (most recent call last):\n  File "cloudpickle.py", line 3, in subimport\n'
        "ModuleNotFoundError: No module named 'penstock'\n"
    )
    raised = RuntimeError(text)
    found = pk.spark.cause_of(raised)
    assert isinstance(found, EngineError) and found.__cause__ is raised
    assert "cannot import penstock: in local mode call penstock.spark.ensure_java()" in found.message


@pytest.mark.spark
def test_tasks_of_two_executors_work_together(cluster: Any) -> None:
    def program(worker: Any, batches: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        log = worker.sequencer()
        log.push((worker.index, total(batches)))
        sums = [log.wait_next() for _ in range(worker.peers)]
        yield row(parent=os.getppid(), sums=str(sums), everything=sum(own for _, own in sums))

    schema = "parent int, sums string, everything bigint"
    rows = pk.spark.gang(cluster.range(1_000), program, tasks=4, schema=schema).collect()
    assert [found.everything for found in rows] == [sum(range(1_000))] * 4
    assert len({found.sums for found in rows}) == 1 and len({found.parent for found in rows}) == 2
