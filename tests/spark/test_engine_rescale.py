"""More and fewer members while batches come: right results, bins that follow, slots that are given back."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from durable_support import Runs
from engine_support import (
    COUNTS,
    Gate,
    Kept,
    by_each,
    counted,
    in_thread,
    in_three_ways,
    numbers,
    state,
    wait_for,
    write,
)
from penstock.errors import ConfigError, EngineError, SlotsError
from penstock.spark._engine import feeds

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


def threads(prefix: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]


def jobs(spark: Any) -> int:
    return len(spark.sparkContext.statusTracker().getActiveJobsIds())


def test_one_two_four_two_one_while_batches_come(wide: Any) -> None:
    kept = Kept()
    with pk.Engine(wide, workers=1, name="elastic", bits=4) as engine:
        function = engine.foreach_batch(COUNTS, kept, name="elastic")
        batches = 0

        def run() -> None:
            nonlocal batches
            function(numbers(wide, batches), batches)
            batches += 1

        run()
        for workers in (2, 4, 2, 1):
            resize = engine.rescale(workers)
            if workers > 1:
                wait_for(lambda least=workers: len(engine.members()) >= least, what="they have come")
            with pytest.raises(EngineError, match=rf"rescale\({workers + 1}\).* goes to {workers} workers just now"):
                engine.rescale(workers + 1)
            # With the next batch they take part, and bins move; leavers go with the one after it.
            for _ in range(10):
                run()
                if resize.done:
                    break
            assert resize.wait(60) == workers
            wait_for(lambda wanted=workers: len(engine.members()) == wanted, what="who leaves has gone")
            wait_for(lambda wanted=workers: jobs(wide) == wanted, what="its task slot is free")
            shares = Counter(engine.owners("elastic")[0])
            assert sorted(shares) == list(range(workers)) and set(shares.values()) == {16 // workers}
            assert engine.workers == workers
            assert state(kept) == counted(batches)
        run()
        assert state(kept) == counted(batches)
        assert sum(n for n, _ in state(kept).values()) == 600 * batches


def test_members_get_equally_many_rows_of_uneven_partitions(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs ahead of the first key runs where the rows are; by their numbers all partitions that have some would go
    to one of two members."""
    came: list[list[int]] = []
    kept, original = Kept(), feeds.Places.came

    def watched(self: feeds.Places, receipts: Any, seats: Any) -> None:
        rows = Counter({seat.member: 0 for seat in seats})
        for one in receipts:
            rows[one.member] += one.rows
        came.append(sorted(rows.values()))
        original(self, receipts, seats)

    monkeypatch.setattr(feeds.Places, "came", watched)
    sizes = "array(0, 4000, 0, 1000, 0, 3000, 0, 2000)"
    rows = wide.range(0, 8, 1, 8).selectExpr(
        f"explode(array_repeat(id, element_at({sizes}, int(id) + 1))) AS k", "id + 1 AS v"
    )
    with pk.Engine(wide, workers=2, name="even", bits=4) as engine:
        function = engine.foreach_batch(COUNTS, kept, name="even")
        for batch in range(2):
            function(rows, batch)
        resize = engine.rescale(3)
        wait_for(lambda: len(engine.members()) == 3, what="it has come")
        for batch in range(2, 12):
            function(rows, batch)
            if resize.done:
                break
        resize.wait(60)
        function(rows, batch + 1)
    assert came[:2] == [[0, 10_000], [5_000, 5_000]]
    assert came[-1] == [3_000, 3_000, 4_000]
    times = batch + 2
    assert state(kept) == {
        k: (n * times, n * times * (k + 1)) for k, n in ((1, 4_000), (3, 1_000), (5, 3_000), (7, 2_000))
    }


def test_members_work_on_their_stretches_of_an_ordered_flow_at_once(wide: Any, tmp_path: Path) -> None:
    """Rows of the second member come behind all of the first one's, further than the window of the flow is wide."""
    there = tmp_path / "there"

    def meet(batch: pa.RecordBatch) -> pa.RecordBatch:
        first = batch.column("v")[0].as_py()
        if first >= 2_000:
            there.touch()
        until = time.monotonic() + 60
        while first == 0 and not there.exists():
            assert time.monotonic() < until, "nobody works on the other stretch"
            time.sleep(0.01)
        return batch

    def numbered(seen: int | None, k: int, v: int) -> tuple[int, tuple[int, int, int]]:
        seen = (seen or 0) + 1
        return seen, (k, v, seen)

    flow = pk.Flow("k bigint, v bigint").map_batches(meet, schema="k bigint, v bigint").key_by("k")
    flow = flow.stateful_map(numbered, schema="k bigint, v bigint, n bigint")
    kept = Kept()
    rows = wide.range(0, 4_000, 1, 2).selectExpr("id % 5 AS k", "id AS v")
    with pk.Engine(wide, workers=2, name="apart", bits=4, slice_rows=64) as engine:
        engine.foreach_batch(flow, kept, name="apart")(rows, 0)
    found = sorted((row["v"], row["k"], row["n"]) for row in kept.batches[0].to_pylist())
    assert found == [(v, v % 5, v // 5 + 1) for v in range(4_000)], "in order all the same"


def test_one_two_four_two_one_of_a_stream_under_load(wide: Any, tmp_path: Path) -> None:
    """Batches come one after the other; state is durable, and what is written is of all members at that batch."""
    runs, stop = Runs(wide, tmp_path), threading.Event()
    runs.add()

    def load() -> None:
        while not stop.is_set():
            # Spark lists the folder for each batch: not many more than it takes.
            wait_for(lambda: stop.is_set() or len(runs.kept.batches) >= runs.batches - 1, what="a batch was taken")
            runs.add()

    with pk.Engine(wide, workers=1, name="loaded", bits=4) as engine:
        query = runs.rest(engine, in_three_ways())
        with in_thread(load) as loaded:
            try:
                for workers in (2, 4, 2, 1):
                    before = len(runs.kept.batches)
                    assert engine.rescale(workers).wait(120) == workers
                    wait_for(lambda more=before: len(runs.kept.batches) > more, what="batches go on")
                    for owners in engine.owners(query.id):
                        shares = Counter(owners)
                        assert sorted(shares) == list(range(workers)) and set(shares.values()) == {16 // workers}
                    assert len(engine.owners(query.id)) == 3
            finally:
                stop.set()
            loaded(60)
        query.processAllAvailable()
        query.stop()
    assert sorted(runs.kept.batches) == list(range(runs.batches))
    for batch, table in runs.kept.batches.items():
        assert by_each(table) == dict.fromkeys(("native", "python", "pandas"), counted(batch + 1)), batch
    kept = {row["k"]: (row["n"], row["total"]) for row in pk.state.read(runs.check, "agg").to_pylist()}
    assert kept == counted(runs.batches)


@pytest.mark.parametrize("counts", [(1, 5), pytest.param((2, 3), marks=pytest.mark.long)], ids=["far", "near"])
def test_one_checkpoint_is_restored_on_any_number_of_workers(
    wide: Any, tmp_path: Path, counts: tuple[int, ...]
) -> None:
    runs, flow = Runs(wide, tmp_path), in_three_ways()
    runs.add(2)
    with pk.Engine(wide, workers=2, threads=2, bits=4) as engine:
        runs.run(engine, flow)
    runs.add(2)
    for workers in counts:
        copy = runs.copy(tmp_path / str(workers))
        with pk.Engine(wide, workers=workers, bits=workers) as engine:
            copy.run(engine, flow)
            owners = engine.owners(copy.function.query_id)[0]
        told = {batch: by_each(table) for batch, table in copy.kept.batches.items()}
        right = {batch: dict.fromkeys(("native", "python", "pandas"), counted(batch + 1)) for batch in (2, 3)}
        assert told == right, f"{workers} workers"
        assert len(owners) == 2**workers and set(owners) == set(range(min(workers, len(owners))))


def rested(spark: Any, folder: Path, function: Any) -> Any:
    """A stream over files of which all have been taken."""
    read = spark.readStream.schema("k bigint, v bigint").option("maxFilesPerTrigger", 1).parquet(str(folder / "in"))
    query = read.writeStream.foreachBatch(function).option("checkpointLocation", str(folder / "check")).start()
    query.processAllAvailable()
    return query


def test_a_query_that_rests_is_no_obstacle(wide: Any, tmp_path: Path) -> None:
    kept = Kept()
    with pk.Engine(wide, workers=1, name="resting", bits=4) as engine:
        function = engine.foreach_batch(COUNTS, kept, name="resting")
        for batch in range(2):
            write(wide, tmp_path / "in", batch, numbers(wide, batch))
        query = rested(wide, tmp_path, function)
        for workers in (3, 1, 2):
            resize = engine.rescale(workers)
            assert resize.wait(60) == workers and engine.workers == workers
            done = resize.progress
            assert (done.workers, done.members, done.leaving, done.waits) == (workers, workers, 0, ())
            assert repr(resize) == f"<Rescale to {workers} workers: done, {workers} serve>"
            assert sorted(Counter(engine.owners("resting")[0])) == list(range(workers))
            assert state(kept) == counted(2)
        wait_for(lambda: not threads("penstock-commits"), what="nothing is looked at any more")
        # What has ended was committed before: its members need not wait for another run.
        query.stop()
        assert engine.rescale(1).wait(60) == 1
        write(wide, tmp_path / "in", 2, numbers(wide, 2))
        again = rested(wide, tmp_path, function)
        assert state(kept) == counted(3)
        again.stop()
    assert not threads("penstock-commits")


@pytest.mark.parametrize("batch", [0, 1])
def test_a_query_whose_sink_failed_is_no_obstacle(wide: Any, tmp_path: Path, batch: int) -> None:
    """Spark has stopped it, and nobody may ever start it again: others have their rescale."""
    kept, broken = Kept(), True

    def sink(df: Any, batch_id: int) -> None:
        if broken and batch_id == batch:
            raise RuntimeError("a typo")
        kept(df, batch_id)

    with pk.Engine(wide, workers=1, name="failing", bits=4) as engine:
        function = engine.foreach_batch(COUNTS, sink, name="failing")
        for number in range(batch + 1):
            write(wide, tmp_path / "in", number, numbers(wide, number))
        with pytest.raises(Exception, match="a typo"):
            rested(wide, tmp_path, function)
        for workers in (2, 1, 3, 2):
            assert engine.rescale(workers).wait(120) == workers and len(engine.members()) == workers
        broken = False
        query = rested(wide, tmp_path, function)
        assert state(kept) == counted(batch + 1)
        wait_for(lambda: sorted(Counter(engine.owners("failing")[0])) == [0, 1], what="both have their share")
        query.stop()
    wait_for(lambda: not threads("penstock-commits"), what="nothing is looked at any more")


def test_no_batch_waits_for_what_a_new_process_loads(wide: Any, tmp_path: Path) -> None:
    kept, gate = Kept(), Gate(tmp_path)
    flow = pk.Flow("k bigint, v bigint").map_batches(gate.loading()).key_by("k").agg(n=pk.count(), total=pk.sum("v"))
    with pk.Engine(wide, workers=1, name="heavy", bits=4) as engine:
        function = engine.foreach_batch(flow, kept, name="heavy")
        function(numbers(wide, 0), 0)
        gate.close()
        resize = engine.rescale(2)
        wait_for(gate.reached.exists, what="it loads the functions")
        function(numbers(wide, 1), 1)
        assert state(kept) == counted(2) and resize.progress.members == 1
        gate.open()
        wait_for(lambda: resize.progress.members == 2, what="it has come")
        function(numbers(wide, 2), 2)
        function(numbers(wide, 3), 3)
        assert resize.wait(60) == 2 and state(kept) == counted(4)


def test_progress_and_the_way_back(wide: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, gate = Kept(), Gate(tmp_path)
    flow = pk.Flow("k bigint, v bigint").map_batches(gate.function()).key_by("k").agg(n=pk.count(), total=pk.sum("v"))
    with pk.Engine(wide, workers=2, name="undecided", bits=4) as engine:
        function = engine.foreach_batch(flow, kept, name="undecided")
        function(numbers(wide, 0), 0)
        before = engine.members()
        # A call without a stream has no commit log: only the next batch tells.
        resize = engine.rescale(3)
        wait_for(lambda: resize.progress.members == 3, what="it has come")
        now = resize.progress
        assert now.workers == 3 and now.moved == 0 and now.bins > 0 and now.leaving == 0
        assert now.waits == ("the commit or the next batch of query undecided",)
        assert "3 of 3 workers, 0 of " in repr(resize)
        with pytest.raises(TimeoutError, match="waits for the commit or the next batch of query undecided"):
            resize.wait(0.3, progress=True)
        assert "3 of 3 workers" in capsys.readouterr().err
        resize.cancel()
        assert resize.wait(60) == 2 and engine.workers == 2
        assert resize.progress.workers == 2 and "done, 2 serve" in repr(resize)
        assert engine.members() == before and wait_for(lambda: jobs(wide) == 2, what="its slot is free")
        # Cancelled while those that are to go are there: they stay.
        gate.close()
        with in_thread(lambda: function(numbers(wide, 1), 1)) as result:
            wait_for(gate.reached.exists, what="the epoch is under way")
            shrink = engine.rescale(1)
            assert shrink.progress.waits == ("batch 1 of query undecided",) and shrink.progress.leaving == 1
            shrink.cancel()
            shrink.cancel()
            gate.open()
            result(60)
        assert shrink.wait(60) == 2 and engine.members() == before
        function(numbers(wide, 2), 2)
        assert state(kept) == counted(3)
        assert Counter(engine.owners("undecided")[0]) == {0: 8, 1: 8}


def test_a_sink_that_waits_for_a_rescale_is_told(wide: Any) -> None:
    """Members come and go between two batches, so it would wait for itself for ever."""
    kept, handles = Kept(), []

    def sink(df: Any, batch_id: int) -> None:
        kept(df, batch_id)
        if batch_id in (1, 4):
            handles.append(engine.rescale(2 if batch_id == 1 else 1))
            with pytest.raises(EngineError, match=r"by the sink of query asking .* when the sink has returned"):
                handles[-1].wait()

    with pk.Engine(wide, workers=1, name="asked", bits=4) as engine:
        function = engine.foreach_batch(COUNTS, sink, name="asking")
        for batch in range(8):
            function(numbers(wide, batch), batch)
            if batch in (3, 7):
                # From without, and from a sink once it is done.
                assert handles[-1].wait(60) == engine.workers == (2 if batch == 3 else 1)
            elif batch == 1:
                wait_for(lambda: len(engine.members()) == 2, what="it has come")
        assert state(kept) == counted(8)


def test_what_is_refused_changes_nothing(wide: Any) -> None:
    with pk.Engine(wide, workers=2, name="steady", bits=4) as engine:
        members = engine.members()
        for wrong in (0, -1, "two", True, 2.0):
            with pytest.raises(ConfigError, match=re.escape(f"rescale({wrong!r})")):
                engine.rescale(wrong)  # type: ignore[arg-type]
        said = r"2 task slots are held and 3 more are free; local\[6\]\. Start Spark with local\[7\]"
        with pytest.raises(SlotsError, match=said):
            engine.rescale(6)
        assert engine.members() == members and engine.workers == 2
        # Without a query nobody is waited for.
        assert engine.rescale(3).wait(120) == 3
        assert len(engine.members()) == 3
        assert engine.rescale(1).wait(60) == 1
        wait_for(lambda: jobs(wide) == 1, what="the slots are free")
    with pytest.raises(EngineError, match="closed"):
        engine.rescale(2)
