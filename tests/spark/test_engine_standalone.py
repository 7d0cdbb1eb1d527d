"""A standalone cluster of two workers on this machine: rescale, executors that go, executors that come late."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JError

import penstock as pk
import spark_classes
from conftest import find_spark_home
from durable_support import Runs
from engine_support import COUNTS, Kept, counted, numbers, refuses, state, wait_for
from penstock.errors import SlotsError
from penstock.spark._session.java import ensure_java

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

CORES = 3


@pytest.fixture(scope="module")
def master(sessions: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a master with two workers, in processes of their own."""
    folder = tmp_path_factory.mktemp("standalone")
    ensure_java()
    sessions.stop()
    environment = os.environ | {
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": spark_classes.options(),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_NO_DAEMONIZE": "1",
    }
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *options: str) -> None:
        command = [f"{find_spark_home()}/bin/spark-class", f"org.apache.spark.deploy.{name}", *options]
        with open(folder / f"{name}-{len(started)}.log", "wb") as log:
            # A group of its own: the script starts a JVM, a worker its executors.
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))

    try:
        start("master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        log = folder / "master.Master-0.log"
        where = re.compile(r"Starting Spark master at (spark://(127\.0\.0\.1:[0-9]+))\s")
        url, address = wait_for(lambda: where.search(log.read_text()), timeout=120, what="the master").groups()
        wait_for(lambda: not refuses(address), what="the master listens")
        for worker in range(2):
            place = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0", "--work-dir", str(folder / str(worker)))
            start("worker.Worker", *place, "--cores", str(CORES), "--memory", "1g", url)
        logs = [folder / f"worker.Worker-{number}.log" for number in (1, 2)]
        wait_for(lambda: all("registered with master" in log.read_text() for log in logs), 120, "both workers")
        yield url
    finally:
        sessions.stop()
        for process in reversed(started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in reversed(started):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)


@pytest.fixture
def two(sessions: Any, master: str) -> Any:
    """A session with an executor on each worker."""
    spark = sessions.get(master, {"spark.decommission.enabled": "true"})
    wait_for(lambda: len(executors(spark)) == 2, timeout=120, what="an executor on each worker")
    return spark


def executors(spark: Any) -> set[str]:
    """Spark's ids of those that are there."""
    found = spark.sparkContext._jsc.sc().schedulerBackend().getExecutorIds()
    return {str(found.apply(at)) for at in range(found.size())}


def place_of(spark: Any, member: Any) -> str:
    """Spark's id of a member's executor."""
    stage, task = member.info["task"]
    places: dict[int, str] = {}

    def is_told() -> bool:
        with contextlib.suppress(Py4JError):  # of a stage that is not told of yet
            found = spark.sparkContext._jsc.sc().statusStore().taskList(stage, 0, 10)
            places.update((found.apply(at).taskId(), found.apply(at).executorId()) for at in range(found.size()))
        return task in places

    wait_for(is_told, what="Spark tells of the task")
    return str(places[task])


def places(engine: pk.Engine) -> list[str]:
    return [member.executor for member in engine.members()]


def decommission(spark: Any, executor: str) -> None:
    """Have Spark ask an executor to go."""
    jvm, backend = spark.sparkContext._jvm, spark.sparkContext._jsc.sc().schedulerBackend()
    why = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo("its host is going", jvm.scala.Option.empty())
    assert backend.decommissionExecutor(executor, why, False, False)


def test_one_two_one_on_both_workers(two: Any, tmp_path: Path) -> None:
    runs = Runs(two, tmp_path)
    with pk.Engine(two, workers=1, bits=4) as engine:
        runs.add(2)
        runs.run(engine)
        for workers in (2, 1):
            resize = engine.rescale(workers)
            runs.add(3)
            runs.run(engine)
            assert resize.wait(60) == workers
            wait_for(lambda wanted=workers: len(places(engine)) == wanted, what="who leaves has gone")
            assert len(set(places(engine))) == workers, "each on an executor of its own"
            assert state(runs.kept) == counted(runs.batches)


def test_slots_beyond_those_of_the_executors_are_refused_at_once(two: Any) -> None:
    """Nothing bounds them by a setting, and nobody makes more: who waited for them would wait in vain."""
    assert two.sparkContext.getConf().get("spark.cores.max", None) is None
    with pk.Engine(two, workers=1, bits=2) as engine:
        with pytest.raises(SlotsError) as caught:
            engine.rescale(50)
        assert str(caught.value) == (
            f"rescale(50): 1 task slots are held and {2 * CORES - 2} more are free; the executors that there are offer"
            f" {2 * CORES}: add some (spark.cores.max=unset)"
        )
        assert engine.workers == 1
        assert engine.rescale(2).wait(60) == 2


def test_a_member_leaves_an_executor_that_goes(two: Any, tmp_path: Path) -> None:
    """Nothing is durable: what is right afterwards has moved. No batch comes: it has moved while the query rests."""
    runs = Runs(two, tmp_path)
    with pk.Engine(two, workers=2, bits=4) as engine:
        runs.add(2)
        query = runs.rest(engine, checkpoint=None)
        goes, stays = engine.members()
        assert goes.executor != stays.executor
        place = place_of(two, goes)
        decommission(two, place)
        wait_for(lambda: goes.lost is not None, what="the member has left")
        assert goes.dismissed and stays.lost is None
        wait_for(lambda: place not in executors(two), what="its executor has gone by itself")
        wait_for(lambda: len(engine.members()) == 2, what="another one in its place")
        wait_for(lambda: Counter(engine.owners(query)[0]) == {0: 8, 1: 8}, what="equal shares")
        assert engine.workers == 2 and stays in engine.members()
        runs.add(1)
        query.processAllAvailable()
        query.stop()
    assert runs.function.error is None
    assert state(runs.kept) == counted(3)


def test_the_last_member_leaves_an_executor_that_goes(two: Any, tmp_path: Path) -> None:
    """Nothing is durable, and nobody else has anything: it stays until another one is there and has taken all."""
    runs = Runs(two, tmp_path)
    with pk.Engine(two, workers=1, bits=4) as engine:
        runs.add(2)
        query = runs.rest(engine, checkpoint=None)
        [goes] = engine.members()
        place = place_of(two, goes)
        decommission(two, place)
        wait_for(lambda: goes.lost is not None, what="the last member has left")
        assert goes.dismissed
        [other] = engine.members()
        assert place_of(two, other) != place and engine.owners(query)[0] == [0] * 16
        wait_for(lambda: place not in executors(two), what="its executor has gone by itself")
        runs.add(1)
        query.processAllAvailable()
        query.stop()
    assert runs.function.error is None
    assert state(runs.kept) == counted(3)


@pytest.mark.long
def test_executors_that_are_made_on_demand_get_their_time(sessions: Any, master: str) -> None:
    settings = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.executorIdleTimeout": "2s",
        "spark.executor.cores": str(CORES),
    }
    spark = sessions.get(master, settings)
    kept = Kept()
    with pk.Engine(spark, workers=1, bits=4, name="grows", start_timeout=15) as engine:
        function = engine.foreach_batch(COUNTS, kept, name="grows")
        function(numbers(spark, 0), 0)
        # Looking at the executors may have called for a second one, which nobody uses.
        wait_for(lambda: len(executors(spark)) == 1, what="the end of an executor without members")
        # One slot more than there are.
        resize = engine.rescale(4)
        wait_for(lambda: len(engine.members()) == 4, what="an executor that was not there")
        assert len(executors(spark)) == 2
        for batch in range(1, 3):
            function(numbers(spark, batch), batch)
        assert resize.wait(60) == 4 and state(kept) == counted(3)
        # Spark does not say that it can never have so many.
        late = engine.rescale(8)
        wait_for(lambda: late.progress.waits[:1] == ("2 task slots",), what="those that there are")
        with pytest.raises(SlotsError) as caught:
            late.wait(60)
        missing = r"resident \d \(no task slot for \d+ s\)"
        assert re.fullmatch(
            rf"rescale\(8\): 2 of 8 workers have not come in 15 s \(start_timeout\): {missing}, {missing};"
            r" spark\.dynamicAllocation\.maxExecutors \(unbounded\)",
            str(caught.value),
        )
        wait_for(lambda: len(engine.members()) == 4, what="those from before")
        assert engine.workers == 4
        function(numbers(spark, 3), 3)
        assert state(kept) == counted(4)
