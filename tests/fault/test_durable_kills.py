"""Durable state when processes are killed or the store fails, once for each place: results are what the rows give."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as pk
from durable_support import SCHEMA, Runs, executor_of, kill
from engine_support import COUNTS, Gate, counted, stream, wait_for
from penstock import _storage
from penstock.spark._engine import drains
from penstock.spark._session.collect import to_table

pytestmark = [pytest.mark.spark, pytest.mark.fault, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def engine(cluster: Any) -> Iterator[pk.Engine]:
    with pk.Engine(cluster, workers=2, bits=4, name="killed") as engine:
        yield engine


@pytest.fixture
def runs(cluster: Any, engine: pk.Engine, tmp_path: Path) -> Runs:
    wait_for(lambda: len(engine.members()) == 2, what="all members")
    return Runs(cluster, tmp_path)


def through(function: Any) -> pk.Flow:
    return pk.Flow(SCHEMA).map_batches(function).key_by("k").agg(n=pk.count(), total=pk.sum("v"))


def is_right(runs: Runs) -> None:
    """Every batch came, and its results are those of all rows up to it, no row twice."""
    assert sorted(runs.kept.batches) == list(range(runs.batches))
    for batch, table in runs.kept.batches.items():
        got = {row["k"]: (row["n"], row["total"]) for row in table.to_pylist()}
        assert len(got) == table.num_rows and got == counted(batch + 1), f"batch {batch}"


def test_a_member_in_the_epoch(engine: pk.Engine, runs: Runs) -> None:
    gate = Gate(runs.folder)

    def sink(df: Any, batch_id: int) -> None:
        runs.kept(df, batch_id)
        if batch_id == 0:
            gate.close()

    runs.add(3)
    query = runs.start(engine, through(gate.function()), sink)
    wait_for(gate.reached.exists, what="the epoch is under way")
    kill(engine.members()[0])
    gate.open()
    query.awaitTermination(120)
    is_right(runs)


@pytest.mark.parametrize("few", [True, False])
def test_a_member_in_the_sink(engine: pk.Engine, runs: Runs, monkeypatch: pytest.MonkeyPatch, few: bool) -> None:
    """Before it has read the results: it is called again with them. Few are with the driver when it is called, which is
    enough if the member had written its files."""
    calls = []
    if not few:
        monkeypatch.setattr(drains, "_LOCAL_ROWS", 0)

    def sink(df: Any, batch_id: int) -> None:
        calls.append(batch_id)
        if calls == [0, 1]:
            kill(engine.members()[1])
        runs.kept(df, batch_id)

    runs.add(3)
    runs.run(engine, sink=sink)
    assert calls == [0, 1, 1, 2] or (few and calls == [0, 1, 2])
    is_right(runs)


def test_a_member_between_batches(engine: pk.Engine, runs: Runs) -> None:
    runs.add(2)
    query = runs.rest(engine)
    try:
        kill(engine.members()[0])
        runs.add(2)
        query.processAllAvailable()
    finally:
        query.stop()
    is_right(runs)


def test_the_worker_of_a_feed_task(engine: pk.Engine, runs: Runs) -> None:
    """What it has sent and gave no receipt for does not count."""

    def dies_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.attemptNumber() == 0:
            Path(marks, f"died-{context.taskAttemptId()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def call(df: Any, batch_id: int) -> None:
        function(df.mapInArrow(dies_once, df.schema) if batch_id == 1 else df, batch_id)

    marks = str(runs.folder)
    runs.add(3)
    function = engine.foreach_batch(COUNTS, runs.kept)
    stream(runs.cluster, runs.folder / "in", SCHEMA, call, runs.check).awaitTermination(120)
    assert list(runs.folder.glob("died-*"))
    is_right(runs)


def test_an_executor(engine: pk.Engine, runs: Runs) -> None:
    """With its members, its feed tasks and what they have staged."""
    killed = []

    def sink(df: Any, batch_id: int) -> None:
        if batch_id == 1 and not killed:
            victim = engine.members()[0]
            killed.append(victim.executor)
            os.kill(executor_of(victim.pid), signal.SIGKILL)
            wait_for(lambda: victim.lost is not None, what="the loss is noticed")
        runs.kept(df, batch_id)

    runs.add(4)
    runs.run(engine, sink=sink)
    is_right(runs)
    wait_for(lambda: len(engine.members()) == 2, timeout=120, what="a replacement, with an executor of its own")
    assert killed[0] not in {member.executor for member in engine.members()}


#: Runs a query whose sink writes one folder a batch, and comes to a stop in the sink of batch 2.
DRIVER = """
import sys, time
from pathlib import Path

import penstock as pk
from durable_support import Runs
from engine_support import COUNTS
from penstock.spark._session.collect import to_table
from pyspark.sql import SparkSession
import pyarrow.parquet as pq

folder = Path(sys.argv[1])
spark = (
    SparkSession.builder.master("local[3]")
    .config("spark.driver.host", "127.0.0.1").config("spark.ui.enabled", "false").config("spark.log.level", "ERROR")
    .getOrCreate()
)
with pk.Engine(spark, workers=2, bits=4) as engine:
    runs = Runs(spark, folder)

    def sink(df, batch_id):
        table = to_table(df)
        if batch_id == 2:
            table = table.slice(0, 3)  # of what it writes then, a part
        pq.write_table(table, folder / f"batch_id={batch_id}.parquet")
        if batch_id == 2:
            jvm = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
            print("in the sink", jvm, *(member.pid for member in engine.members()), flush=True)
            time.sleep(600)

    runs.run(engine, sink=sink)
"""


def test_the_driver(engine: pk.Engine, runs: Runs) -> None:
    """Another process goes on, with the batch in whose sink the first one died."""
    from penstock.spark._session.java import ensure_java

    ensure_java()
    runs.add(5)
    paths = [str(Path(__file__).parents[1]), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-c", DRIVER, str(runs.folder)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as first:
        assert first.stdout is not None
        told = next((line for line in first.stdout if line.startswith("in the sink")), "")
        pids = [int(word) for word in told.split()[3:]]
        try:
            assert len(pids) == 3, "it came to the sink of batch 2"
        finally:
            for pid in [first.pid, *pids[:1]]:
                os.kill(pid, signal.SIGKILL)
    for pid in pids:
        wait_for(lambda pid=pid: not Path(f"/proc/{pid}/exe").exists(), what=f"process {pid} has ended")
    assert pq.read_table(runs.folder / "batch_id=2.parquet").num_rows == 3

    def sink(df: Any, batch_id: int) -> None:
        assert batch_id >= 2, "what Spark has committed is not computed again"
        pq.write_table(to_table(df), runs.folder / f"batch_id={batch_id}.parquet")

    runs.run(engine, sink=sink)
    runs.kept.batches = {
        batch: pq.read_table(runs.folder / f"batch_id={batch}.parquet", partitioning=None) for batch in range(5)
    }
    is_right(runs)


@pytest.mark.parametrize("call", ["list", "read", "write", "create"])
def test_the_store_at_the_driver(engine: pk.Engine, runs: Runs, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """It fails once for each file, whatever it is asked; a manifest has another name each time, but for its end."""
    original, failed = getattr(_storage._Folder, call), set()

    def fails_once(self: Any, *arguments: Any) -> Any:
        what = tuple(name.rpartition("-")[0] if name.startswith("manifest-") else name for name in arguments[:1])
        if self.url.endswith("_penstock") and what not in failed:
            failed.add(what)
            raise OSError("the cable is out")
        return original(self, *arguments)

    runs.add(2)
    runs.run(engine)
    # Dropped, its state is read from the checkpoint by who goes on.
    engine.drop(runs.function.query_id)
    runs.add(2)
    monkeypatch.setattr(_storage._Folder, call, fails_once)
    runs.run(engine)
    assert failed
    is_right(runs)


def test_the_store_at_members(engine: pk.Engine, runs: Runs) -> None:
    """It fails once for each file of data that is written, and for each that is read: as often as it is tried again."""

    def breaks() -> Any:
        marks = str(runs.folder)

        def patch(rows: int | None, k: int, v: int) -> Any:
            from penstock import _storage

            folder: Any = _storage._Folder
            if marks not in getattr(folder, "broken", ()):
                folder.broken = (*getattr(folder, "broken", ()), marks)
                for call in ("read", "write"):
                    setattr(folder, call, failing(call, getattr(folder, call)))
            return (rows or 0) + 1, (k, v)

        def failing(call: str, original: Any) -> Any:
            failed = set()

            def fails_once(self: Any, name: str, *arguments: Any) -> Any:
                # A file that is written again has another name.
                key = name.split("-")[2] if call == "write" else name
                ours = self.url.startswith(f"file:{marks}/") and name.startswith("data-")
                if ours and key not in failed:
                    failed.add(key)
                    Path(marks, f"{call}-failed-{name}").touch()
                    raise OSError("the cable is out")
                return original(self, name, *arguments)

            return fails_once

        return patch

    # A step with keys: all members run it, also those that nobody feeds.
    flow = pk.Flow(SCHEMA).key_by("k").stateful_map(breaks(), schema=SCHEMA)
    for _ in range(2):
        runs.add(2)
        runs.run(engine, flow.key_by("k").agg(n=pk.count(), total=pk.sum("v")))
        # Dropped, its state is read by the same processes.
        engine.drop(runs.function.query_id)
    is_right(runs)
    assert len(list(runs.folder.glob("write-failed-*"))) >= 4 and list(runs.folder.glob("read-failed-*"))
