"""What is left of queries that have ended, and of engines whose handle is lost."""

from __future__ import annotations

import gc
import logging
import shutil
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as pk
from engine_support import (
    COUNTS,
    Gate,
    Kept,
    NoThreads,
    bag,
    counted,
    numbers,
    penstock_threads,
    refuses,
    state,
    stream,
    wait_for,
    write,
)
from penstock.errors import ConfigError, EngineError, StateLost
from penstock.spark._engine.ended import Ended
from penstock.spark._session.collect import to_table

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]

SCHEMA = "k bigint, v bigint"


@pytest.fixture(scope="module")
def engine(cluster: Any) -> Iterator[pk.Engine]:
    with pk.Engine(cluster, workers=2, name="ended", bits=4) as engine:
        yield engine


#: Threads of a member that serve all queries.
SHARED = {"penstock-member", "penstock-data", "penstock-read", "penstock-write"}


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Between tests there is no query, here or at the members."""
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        for name in list(engine.queries):
            engine.drop(name)
        wait_for(lambda: threads(engine) == [[], []], 60, "the members rest")


def threads(engine: pk.Engine) -> list[list[str]]:
    """Names of the members' threads that serve some query."""
    return [sorted(set(penstock_threads(member.pid)) - SHARED) for member in engine.members()]


def started(cluster: Any, engine: pk.Engine, folder: Path, batches: int, flow: pk.Flow = COUNTS, **options: Any) -> Any:
    """A query over so many files, one a batch, without a checkpoint that outlives it."""
    for batch in range(batches):
        write(cluster, folder / "in", batch, numbers(cluster, batch))
    read = cluster.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folder / "in"))
    sink = options.pop("sink", Kept())
    return read.writeStream.foreachBatch(engine.foreach_batch(flow, sink)).trigger(**options).start()


def test_a_query_that_was_started_again_is_not_dropped(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    """It has had no batch in this run, and its state is in memory."""
    kept = Kept()
    function = engine.foreach_batch(COUNTS, kept, checkpoint=None, name="again")
    write(cluster, tmp_path / "in", 0, numbers(cluster, 0))
    stream(cluster, tmp_path / "in", SCHEMA, function, tmp_path / "check").awaitTermination(120)
    read = cluster.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
    writer = read.writeStream.option("checkpointLocation", str(tmp_path / "check")).foreachBatch(function)
    query = writer.start()
    try:
        wait_for(
            lambda: not engine._ended._alive(engine._ended._lives[query.id]), what="the first run's thread is gone"
        )
        with pytest.raises(EngineError, match="stop it, then drop it"):
            engine.drop(query)
        write(cluster, tmp_path / "in", 1, numbers(cluster, 1))
        query.processAllAvailable()
    finally:
        query.stop()
    assert state(kept) == counted(2)
    engine.drop(query)


def test_dropping_a_query_ends_all_of_it(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    flow = pk.Flow(SCHEMA).map_batches(gate.function()).key_by("k").agg(n=pk.count(), total=pk.sum("v"))
    kept, other = Kept(), Kept()
    beside = engine.foreach_batch(COUNTS, other, name="beside")
    beside(numbers(cluster, 0), 0)
    write(cluster, tmp_path / "in", 0, numbers(cluster, 0))
    function = engine.foreach_batch(flow, kept, checkpoint=None)
    gate.close()
    query = stream(cluster, tmp_path / "in", SCHEMA, function, tmp_path / "check", "dropped")
    wait_for(gate.reached.exists, what="the epoch is under way")
    try:
        with pytest.raises(EngineError, match="stop it, then drop it"):
            engine.drop(query)
    finally:
        gate.open()
    query.awaitTermination(120)
    counts = [len(penstock_threads(member.pid)) for member in engine.members()]
    engine.drop(query)
    assert list(engine.queries) == ["beside"]
    wait_for(
        lambda: all(len(penstock_threads(m.pid)) < n for m, n in zip(engine.members(), counts, strict=True)),
        what="its threads have ended, those of the other have not",
    )
    assert set(engine.stats().column("query").to_pylist()) == {"beside"}
    with pytest.raises(EngineError, match="no batch of a query dropped"):
        engine.drop("dropped")
    # Its checkpoint is there, but not the state.
    write(cluster, tmp_path / "in", 1, numbers(cluster, 1))
    with pytest.raises(Exception, match="or was dropped"):
        stream(cluster, tmp_path / "in", SCHEMA, function, tmp_path / "check").awaitTermination(120)
    assert isinstance(function.error, StateLost)
    engine.drop(query)
    beside(numbers(cluster, 1), 1)
    assert all("penstock-query" in names for names in threads(engine))
    engine.drop("beside")
    wait_for(lambda: threads(engine) == [[], []], what="all threads of queries have ended")
    assert engine.stats().num_rows == 0
    assert state(other) == counted(2)


def test_a_flow_without_state_goes_on_after_it_was_dropped(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    flow = pk.Flow(SCHEMA).map_batches(lambda batch: batch.slice(0, 1))
    kept = Kept()
    function = engine.foreach_batch(flow, kept)
    function(numbers(cluster, 0), 0)
    engine.drop(function.query_id)
    function(numbers(cluster, 1), 1)
    assert sorted(kept.batches) == [0, 1]
    engine.drop(function.query_id)


def test_a_finished_query_keeps_only_what_came_out(cluster: Any, engine: pk.Engine) -> None:
    flow = pk.Flow("k bigint, ts timestamp", event_time="ts").key_by("k").window(pk.tumbling("1h")).agg(n=pk.count())
    function = engine.foreach_batch(flow, Kept(), name="finished")
    function(numbers(cluster, 0).selectExpr("k", "timestamp_seconds(v) AS ts"), 0)
    assert any("penstock-0" in names for names in threads(engine))
    rest = engine.finish("finished")
    # The thread that answers for the query stays.
    wait_for(lambda: threads(engine) == [["penstock-query"]] * 2, what="the workers and their connections have ended")
    assert sum(row["n"] for row in to_table(rest).to_pylist()) == 600
    assert bag(to_table(engine.finish("finished"))) == bag(to_table(rest))
    with pytest.raises(EngineError, match="is finished: its bins cannot move"):
        engine.migrate(to=[0] * 16, query="finished")
    engine.drop("finished")
    wait_for(lambda: threads(engine) == [[], []], what="all of it has ended")


def test_a_query_that_cannot_come_back_is_dropped(
    cluster: Any, engine: pk.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept()
    query = started(cluster, engine, tmp_path, 2, sink=kept, processingTime="0 seconds")
    query.processAllAvailable()
    assert query.id in engine.queries and state(kept)
    query.stop()
    # It waits for `finish`.
    assert to_table(engine.finish(query)).num_rows == 0 and engine.queries[query.id].finished
    wait_for(
        lambda: query.id not in engine._ended._lives or engine._ended._lives[query.id].ended, what="its end is seen"
    )
    engine.drop(query)
    monkeypatch.setattr(engine._ended, "_linger", 0.0)
    query = started(cluster, engine, tmp_path, 2, availableNow=True)
    query.awaitTermination(120)
    wait_for(lambda: query.id not in engine.queries, what="it is dropped")
    wait_for(lambda: threads(engine) == [[], []], what="all of it has ended")
    with pytest.raises(EngineError, match="no batch of a query"):
        engine.finish(query)
    # With a checkpoint it may come back, and does.
    kept = Kept()
    for batch in range(2):
        write(cluster, tmp_path / "other", batch, numbers(cluster, batch))
        function = engine.foreach_batch(COUNTS, kept)
        query = stream(cluster, tmp_path / "other", SCHEMA, function, tmp_path / "check")
        query.awaitTermination(120)
        wait_for(lambda found=query.id: engine._ended._lives[found].ended, what="its end is seen")
        assert query.id in engine.queries
    assert sum(n for n, _ in state(kept).values()) == 1_200
    # Until somebody deletes it.
    life = engine._ended._lives[query.id]
    monkeypatch.setattr("penstock.spark._engine.ended._AGAIN_S", 0.1)
    shutil.rmtree(tmp_path / "check")
    life.next = 0.0
    engine._ended._changed.set()
    wait_for(lambda: query.id not in engine.queries, what="it is dropped")
    wait_for(lambda: threads(engine) == [[], []], what="all of it has ended")
    wait_for(lambda: engine._ended._thread is None, what="nothing is left to look at")


def test_a_query_that_failed_without_a_checkpoint_is_dropped(
    cluster: Any, engine: pk.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark keeps the checkpoint that it made for it, which nobody can name."""

    def sink(df: Any, batch_id: int) -> None:
        if batch_id == 1:
            raise ValueError("the disk is full")

    query = started(cluster, engine, tmp_path, 2, sink=sink, processingTime="0 seconds")
    with pytest.raises(Exception, match="the disk is full"):
        query.awaitTermination(120)
    life = engine._ended._lives[query.id]
    wait_for(lambda: life.gone is not None, what="it is seen that it cannot come back")
    assert query.id in engine.queries and engine._ended._exists(life.checkpoint), "it is kept for a while"
    monkeypatch.setattr(engine._ended, "_linger", 0.0)
    wait_for(lambda: query.id not in engine.queries, what="it is dropped")
    wait_for(lambda: threads(engine) == [[], []], what="all of it has ended")
    # One whose checkpoint has a name may come back.
    function = engine.foreach_batch(COUNTS, sink)
    for batch in range(2):
        write(cluster, tmp_path / "other", batch, numbers(cluster, batch))
    query = stream(cluster, tmp_path / "other", SCHEMA, function, tmp_path / "check")
    with pytest.raises(Exception, match="the disk is full"):
        query.awaitTermination(120)
    life = engine._ended._lives[query.id]
    wait_for(lambda: life.next > time.monotonic() + 2, what="it is looked at now and then")
    assert life.ended and life.gone is None and query.id in engine.queries


@pytest.mark.parametrize(
    ("flow", "rows"),
    [
        (pk.Flow(SCHEMA, event_time="v").key_by("k").window(pk.tumbling("1h")).agg(n=pk.count()), 7),
        (COUNTS, 0),
    ],
    ids=["rows", "nothing"],
)
def test_a_finished_query_stays_while_there_is_something_to_read(
    cluster: Any, engine: pk.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flow: pk.Flow, rows: int
) -> None:
    query = started(cluster, engine, tmp_path, 1, flow, processingTime="0 seconds")
    query.processAllAvailable()
    query.stop()
    rest = engine.finish(query)
    monkeypatch.setattr(engine._ended, "_linger", 0.0)
    wait_for(lambda: query.id not in engine._ended._lives, what="its end is told")
    assert (query.id in engine.queries) == (rows > 0)
    assert to_table(rest).num_rows == rows
    if rows:
        assert bag(to_table(engine.finish(query))) == bag(to_table(rest))
        engine.drop(query)
    wait_for(lambda: threads(engine) == [[], []], what="all of it has ended")


class Thread:
    """Of the JVM's kind."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.alive = True

    def getId(self) -> int:
        return self.number

    def isAlive(self) -> bool:
        return self.alive


class Looks:
    """How often a watch has asked whether a query has ended."""

    def __init__(self, watch: Ended) -> None:
        self.count, self._asks = 0, watch._is_over
        watch._is_over = self._ask  # type: ignore[method-assign]

    def _ask(self, *about: Any) -> bool:
        over = self._asks(*about)
        self.count += 1
        return over

    def wait(self, more: int) -> None:
        least = self.count + more
        wait_for(lambda: self.count >= least, what="it is looked at")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes the watch of an engine, for which a checkpoint is there as long as its place is in a set.

    Those of some queries are Spark's own. Spark counts those as active that are in another set.
    """
    monkeypatch.setattr("penstock.spark._engine.ended._LOOK_S", 0.01)
    monkeypatch.setattr("penstock.spark._engine.ended._AGAIN_S", 0.02)
    made: list[Ended] = []

    def make(
        linger: float,
        there: set[str | None],
        gone: list[str],
        temporary: Collection[str] = (),
        active: Collection[str] = (),
    ) -> Ended:
        watch = Ended(None, "test", linger, gone.append)
        monkeypatch.setattr(watch, "_running", lambda query_id: query_id if query_id in active else None)
        monkeypatch.setattr(watch, "_checkpoint", lambda query_id: f"checkpoint of {query_id}")
        monkeypatch.setattr(watch, "_is_temporary", temporary.__contains__)
        monkeypatch.setattr(watch, "_exists", there.__contains__)
        made.append(watch)
        return watch

    yield make
    for watch in made:
        watch.close()
    wait_for(lambda: "penstock-ended-test" not in {thread.name for thread in threading.enumerate()}, what="no thread")


@pytest.mark.parametrize(("linger", "dropped"), [(0.0, True), (3_600.0, False)])
def test_what_counts_as_an_end(watched: Any, linger: float, dropped: bool) -> None:
    gone: list[str] = []
    active = {"q", "other"}
    watch = watched(linger, set(), gone, active=active)
    first, second = Thread(1), Thread(2)
    watch.saw("q", first)
    watch.saw("q", first)
    assert watch.runs("q") and not watch.runs("other")
    watch.saw("q", second)  # it was started again
    first.alive = False
    assert watch.runs("q")
    second.alive = False
    active.remove("q")
    assert not watch.runs("q")
    if dropped:
        wait_for(lambda: watch._thread is None, what="the thread has ended")
    else:
        wait_for(lambda: watch._lives["q"].gone is not None, what="the end is seen")
    assert gone == (["q"] if dropped else [])


def test_a_query_whose_batches_come_by_threads_of_a_users_runs_between_them(watched: Any) -> None:
    """The thread that is seen ends with each batch. Its state was gone after `linger`."""
    gone: list[str] = []
    active = {"q"}
    watch = watched(0.0, set(), gone, {"q"}, active)
    looks = Looks(watch)
    for number in range(3):
        watch.saw("q", thread := Thread(number))
        thread.alive = False
        looks.wait(3)
        assert watch.runs("q") and not watch._lives["q"].ended and gone == []
    active.clear()
    wait_for(lambda: watch._thread is None, what="the end is told")
    assert gone == ["q"]


def test_a_thread_of_a_users_that_outlives_its_query_holds_up_no_end(watched: Any) -> None:
    """As one of a pool. Spark's own lives on for as long as it cleans up."""
    gone: list[str] = []
    active = {"q"}
    watch = watched(0.0, set(), gone, {"q"}, active)
    looks = Looks(watch)
    watch.saw("q", Thread(1))
    looks.wait(3)
    assert gone == []
    active.clear()
    wait_for(lambda: gone == ["q"], what="its end is told")


@pytest.mark.parametrize("which", ["thread", "query"])
def test_what_spark_does_not_tell_is_no_end(watched: Any, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """An interrupt within a call of the JVM costs all threads their connections."""
    gone: list[str] = []
    active = {"q"}
    watch, thread = watched(0.0, set(), gone, {"q"}, active), Thread(1)
    looks = Looks(watch)

    def broken(*about: Any) -> Any:
        raise ConnectionError("Answer from Java side is empty")

    with monkeypatch.context() as patch:
        if which == "thread":
            patch.setattr(thread, "isAlive", broken)
        else:
            patch.setattr(watch, "_running", broken)
            thread.alive = False
        watch.saw("q", thread)
        looks.wait(3)
        assert gone == [] and not watch._lives["q"].ended
    thread.alive = False
    active.clear()
    wait_for(lambda: gone == ["q"], what="its end is told")


def test_without_a_thread_the_next_batch_watches(
    watched: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone: list[str] = []
    watch, threads = watched(0.0, set(), gone), NoThreads(monkeypatch, "penstock-ended")
    runs = Thread(1)
    watch.saw("q", runs)
    assert threads.asked == ["penstock-ended-test"] and "from the next batch on" in caplog.text
    threads.none = False
    watch.saw("q", runs)
    runs.alive = False
    wait_for(lambda: gone == ["q"], what="its end is told")


def test_what_goes_wrong_with_one_query_holds_up_no_other(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[str] = []
    watch = watched(0.0, set(), gone)
    failures = iter([RuntimeError("once")])

    def exists(checkpoint: str) -> bool:
        if checkpoint == "checkpoint of bad":
            for failure in failures:
                raise failure
        return False

    monkeypatch.setattr(watch, "_exists", exists)
    for number, name in enumerate(("bad", "good")):
        thread = Thread(number)
        thread.alive = False
        watch.saw(name, thread)
    wait_for(lambda: sorted(gone) == ["bad", "good"], what="both are told")
    wait_for(lambda: watch._thread is None, what="the thread has ended")


def test_a_checkpoint_that_cannot_be_looked_at_is_named_without_its_credentials(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        @property
        def sparkContext(self) -> Any:
            raise OSError("no route to s3a://KEY:SECRET@bucket/x")

    caplog.set_level(logging.DEBUG, "penstock")
    asked: Any = SimpleNamespace(_spark=Broken())
    assert Ended._exists(asked, "s3a://KEY:SECRET@bucket/x"), "it may be there"
    assert caplog.text.count("s3a://...@bucket/x") == 2 and "SECRET" not in caplog.text


def test_a_checkpoint_of_sparks_own_is_no_way_back(watched: Any) -> None:
    gone: list[str] = []
    watch = watched(0.0, {"checkpoint of failed", "checkpoint of other"}, gone, {"failed"})
    for number, name in enumerate(("other", "failed")):
        watch.saw(name, thread := Thread(number))
        thread.alive = False
    # A life goes after its end is told.
    wait_for(lambda: set(watch._lives) == {"other"}, what="it is told")
    assert gone == ["failed"]
    watch.forget("other")


def test_an_end_that_could_not_be_taken_is_told_again(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    watch = watched(0.0, set(), told)

    def busy(query_id: str) -> None:
        told.append(query_id)
        if len(told) < 3:
            raise EngineError("a batch of query q runs")

    monkeypatch.setattr(watch, "_gone", busy)
    watch.saw("q", thread := Thread(1))
    thread.alive = False
    wait_for(lambda: watch._thread is None, what="nothing is left to tell")
    assert told == ["q"] * 3


def test_a_checkpoint_that_is_deleted_after_the_end_is_noticed(watched: Any) -> None:
    gone: list[str] = []
    there: set[str | None] = {"checkpoint of q", "checkpoint of other"}
    watch = watched(0.0, there, gone)
    for number, query in enumerate(("q", "other")):
        watch.saw(query, thread := Thread(number))
        thread.alive = False
    wait_for(lambda: all(life.ended for life in watch._lives.values()), what="both ends are seen")
    assert gone == [] and set(watch._lives) == {"q", "other"}, "they may come back"
    there.remove("checkpoint of q")
    wait_for(lambda: gone == ["q"], what="it cannot come back")
    # Who has dropped a query does not want to know.
    watch.forget("other")
    wait_for(lambda: watch._thread is None, what="nothing is left to look at")
    assert gone == ["q"]


def test_a_lost_engine_can_be_found_and_closed(cluster: Any, engine: pk.Engine) -> None:
    assert pk.spark.engines(cluster) == [engine]
    pk.Engine(cluster, workers=1, name="lost").start()
    gc.collect()
    found = {one.name: one for one in pk.spark.engines(cluster.newSession())}
    assert set(found) == {"ended", "lost"}
    address = found["lost"]._hub.address
    found["lost"].close()
    assert refuses(address)
    assert pk.spark.engines(cluster) == [engine]
    for wrong in (-1, True, "long", float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="linger"):
            pk.Engine(cluster, linger=wrong)
