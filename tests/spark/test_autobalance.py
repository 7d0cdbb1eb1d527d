"""Loads evened out unaided: the rules with a pretended engine, and a skewed query on a local cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from engine_support import COUNTS, Kept, counted, numbers, state, wait_for
from penstock.errors import ConfigError, EngineError
from penstock.spark._engine.autobalance import Autobalance, Looked, Rules


class Pretended:
    """Two workers with four bins; what comes for each is set by the test."""

    def __init__(self) -> None:
        self.bins = [(bin_, 2) for bin_ in range(4)]
        self.owners = [0, 0, 1, 1]
        self.loads = [0, 0, 0, 0]
        self.bytes: list[int | None] = [0, 0, 0, 0]
        self.rows = 0
        self.busy_s = 0.0
        self.offered: float | None = None
        self.generation = 1
        self.sizes: list[int] = []
        self.recuts: list[tuple[dict[tuple[int, int], int], list[tuple[int, int]]]] = []
        self.fails = False

    def come(self, *rows: int) -> None:
        self.loads = [before + more for before, more in zip(self.loads, rows, strict=True)]
        self.rows += sum(rows)

    def looked(self) -> Iterator[Looked]:
        if self.fails:
            raise EngineError("a member was lost")
        workers = 2
        yield Looked(
            "q",
            self.generation,
            2,
            list(self.bins),
            list(self.owners),
            workers,
            list(self.loads),
            list(self.bytes),
            self.rows,
            self.busy_s,
            self.offered,
        )

    def move(self, query: str, moves: Mapping[tuple[int, int], int], stopping: Callable[[], bool]) -> None:
        assert query == "q" and not stopping()
        for part, worker in moves.items():
            self.owners[self.bins.index(part)] = worker

    def recut(
        self,
        query: str,
        splits: Mapping[tuple[int, int], int],
        merges: Sequence[tuple[int, int]],
        stopping: Callable[[], bool],
    ) -> None:
        assert query == "q" and not stopping()
        self.recuts.append((dict(splits), list(merges)))
        for (prefix, bits), by in splits.items():
            at = self.bins.index((prefix, bits))
            self.bins[at : at + 1] = [(prefix << by | low, bits + by) for low in range(1 << by)]
            self.owners[at : at + 1] = [self.owners[at]] * (1 << by)
            self.loads[at : at + 1] = [self.loads[at] >> by] * (1 << by)
            self.bytes[at : at + 1] = [(self.bytes[at] or 0) >> by] * (1 << by)
        for prefix, bits in merges:
            within = [at for at, one in enumerate(self.bins) if one[0] >> (one[1] - bits) == prefix]
            self.loads[within[0] : within[-1] + 1] = [sum(self.loads[at] for at in within)]
            self.bytes[within[0] : within[-1] + 1] = [sum(self.bytes[at] or 0 for at in within)]
            del self.bins[within[0] + 1 : within[-1] + 1], self.owners[within[0] + 1 : within[-1] + 1]
            self.bins[within[0]] = (prefix, bits)

    def resize(self, workers: int) -> None:
        self.sizes.append(workers)


def rules(**changed: Any) -> Rules:
    plain: dict[str, Any] = {
        "every_s": 1.0,
        "trigger": 1.5,
        "tolerance": 1.2,
        "patience": 2,
        "least_rows": 10,
        "most_bytes": 64 << 20,
        "workers": None,
        "dry_run": False,
    }
    return Rules(**{**plain, **changed})


def test_bins_move_when_skew_stands_and_a_new_generation_is_looked_at_afresh() -> None:
    engine = Pretended()
    balance = Autobalance(engine, rules(), "t")
    for look in range(3):
        balance.look(float(look))
        engine.come(40, 40, 10, 10)
    assert [one.why for one in balance.looks] == ["skewed, 1 looks before anything moves", "skewed"]
    assert balance.looks[-1].moves == 1 and balance.looks[-1].skew == pytest.approx(1.6)
    assert sorted(engine.owners) == [0, 1, 1, 1]
    engine.generation, engine.loads = 2, [0, 0, 0, 0]
    balance.look(3.0)
    assert len(balance.looks) == 2, "counts that began again are no load"
    engine.fails = True
    with pytest.raises(EngineError):
        balance.look(4.0)


def test_a_dry_run_tells_and_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = Pretended()
    engine.offered = 1_000.0
    balance = Autobalance(engine, rules(dry_run=True, workers=(1, 8)), "t")
    with caplog.at_level(logging.INFO, "penstock"):
        for look in range(6):
            balance.look(float(look))
            engine.come(40, 40, 10, 10)
            engine.busy_s += 1.0
    assert engine.owners == [0, 0, 1, 1] and engine.sizes == []
    assert any(one.moves == 1 for one in balance.looks)
    # 100 rows a busy second, 1,000 offered, four fifths busy: 12.5 workers; 8 are allowed.
    assert balance.looks[-1].needed == 8
    assert "load is 1.60 times even on one worker; would move 1 bins" in caplog.text


def test_a_hot_bin_is_split_moved_and_merged_when_it_has_cooled(caplog: pytest.LogCaptureFixture) -> None:
    engine, dry = Pretended(), Pretended()
    balance, told = Autobalance(engine, rules(), "t"), Autobalance(dry, rules(dry_run=True), "dry")
    with caplog.at_level(logging.INFO, "penstock"):
        for look in range(3):
            for one, at in ((balance, engine), (told, dry)):
                one.look(float(look))
                if look < 2:
                    at.come(90, 4, 3, 3)
    assert engine.recuts == [({(0, 2): 2}, [])] and engine.bins == [
        *((low, 4) for low in range(4)),
        (1, 2),
        (2, 2),
        (3, 2),
    ]
    assert dry.recuts == [] and "would split [(0, 2)]" in caplog.text
    assert (
        [(one.splits, one.merges) for one in balance.looks]
        == [(0, 0), (1, 0)]
        == [(one.splits, one.merges) for one in told.looks]
    )
    # The look after it compares nothing; then its parts move like bins.
    for look in range(3, 7):
        engine.come(22, 23, 22, 23, 4, 3, 3)
        balance.look(float(look))
    assert balance.looks[-1].why == "even" and {0, 1} == set(engine.owners[:4])
    for look in range(7, 15):
        assert len(engine.recuts) == 1
        engine.come(1, 0, 1, 0, 30, 30, 30)
        balance.look(float(look))
    assert engine.recuts[1:] == [({}, [(0, 2)])] and len(engine.bins) == 4


def test_a_bin_that_holds_too_much_is_split_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    engine, dry = Pretended(), Pretended()
    balance, told = Autobalance(engine, rules(), "t"), Autobalance(dry, rules(dry_run=True), "dry")
    with caplog.at_level(logging.INFO, "penstock"):
        for look in range(4):
            for one, at in ((balance, engine), (told, dry)):
                if look == 1:
                    at.bytes[3], at.bytes[1] = 210 << 20, 65 << 20
                one.look(float(look))
    held = "bin 3 holds 210 MiB, limit 64 MiB"
    # Rows are too few to judge loads by; four limits are split at a look, and parts are looked at afresh.
    assert [one.why for one in balance.looks] == [
        f"too few rows to judge; {held}: 1 looks before it is split, and 1 more",
        f"too few rows to judge; {held}: 4 parts, and 1 more",
    ]
    assert engine.recuts == [({(3, 2): 2}, [])] and dry.recuts == []
    assert "would split [(3, 2)]" in caplog.text and f"{held}: 4 parts" in caplog.text
    balance.look(4.0)
    assert engine.recuts[1:] == [({(1, 2): 1}, [])]
    assert [one.splits for one in told.looks] == [0, 1, 1]
    # What nobody tells the size of stays.
    engine.bytes = [None] * len(engine.bytes)
    for look in range(5, 20):
        balance.look(float(look))
        engine.come(*[5] * len(engine.bins))
    assert len(engine.recuts) == 2


def test_the_number_of_workers_follows_what_is_offered() -> None:
    engine = Pretended()
    engine.offered = 250.0
    balance = Autobalance(engine, rules(workers=(1, 8)), "t")
    for look in range(4):
        balance.look(float(look))
        engine.come(25, 25, 25, 25)
        engine.busy_s += 1.0
    assert engine.sizes == [4], "250 rows/s at 100 a busy second and 0.8"
    assert balance.looks[-1].needed == 4


def test_busy_time_told_at_the_end_of_a_batch_is_that_of_all_its_rows() -> None:
    engine = Pretended()
    engine.offered = 250.0
    balance = Autobalance(engine, rules(workers=(1, 8)), "t")
    balance.look(0.0)
    for batch in range(2):
        for look in range(4):
            engine.come(25, 25, 25, 25)
            engine.busy_s += 4.0 * (look == 3)
            balance.look(1.0 + 4 * batch + look)
    assert [one.needed for one in balance.looks] == 2 * [None, None, None, 4]
    assert engine.sizes == [4], "two batches in a row asked for more"


@pytest.mark.spark
@pytest.mark.timeout(180)
def test_a_skewed_query_is_evened_out_while_it_runs(cluster: Any, tmp_path: Path) -> None:
    with pk.Engine(cluster, workers=2, name="balanced") as engine:
        kept = Kept()
        function = engine.foreach_batch(COUNTS, kept, checkpoint=None)
        function(numbers(cluster, 0, 5_000, 1_000), 0)
        engine.migrate(to=[0] * 224 + [1] * 32).wait(60)
        with engine.autobalance(every="100ms", patience=1, least_rows=100) as balance:
            with pytest.raises(EngineError, match="balanced already"):
                engine.autobalance()
            batches = 0

            def moved() -> bool:
                nonlocal batches
                batches += 1
                function(numbers(cluster, batches, 5_000, 1_000), batches)
                return any(look.moves for look in balance.looks)

            wait_for(moved, what="bins move unaided")
            wait_for(lambda: engine.owners()[0].count(1) >= 50, what="they have moved")
        assert not balance.looking
        acted = next(look for look in balance.looks if look.moves)
        assert acted.skew > 1.5 and acted.expected <= 1.25 and acted.why == "skewed"
        assert engine.owners()[0].count(1) <= 140
        assert state(kept) == counted(batches + 1, 5_000, 1_000)
        for wrong, says in [
            ({"every": 0}, "0"),
            ({"tolerance": 2.0}, "above trigger"),
            ({"trigger": 0.5, "tolerance": 0.5}, "at least 1"),
            ({"patience": 0}, "patience=0"),
            ({"workers": (4, 2)}, "workers="),
        ]:
            with pytest.raises(ConfigError, match=says):
                engine.autobalance(**wrong)


@pytest.mark.spark
@pytest.mark.timeout(180)
def test_one_bin_is_divided_among_the_workers_unaided(cluster: Any) -> None:
    """Nobody has to know how many bins it takes."""
    with pk.Engine(cluster, workers=2, name="divided", bits=0) as engine:
        kept, batches = Kept(), 0
        function = engine.foreach_batch(COUNTS, kept, checkpoint=None)

        def evened() -> bool:
            nonlocal batches
            function(numbers(cluster, batches, 5_000, 1_000), batches)
            batches += 1
            workers = engine.bins().column("worker").to_pylist()
            return len(workers) == 4 and workers.count(0) == 2

        assert not evened()
        with engine.autobalance(every="100ms", patience=1, least_rows=100) as balance:
            wait_for(evened, what="the bin is split, and half of it moves")
            assert any(look.splits for look in balance.looks) and any(look.moves for look in balance.looks)
        assert engine.owners() == [[-1]]
        assert state(kept) == counted(batches, 5_000, 1_000)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(180)
def test_a_query_that_cannot_keep_up_gets_another_worker(cluster: Any, tmp_path: Path) -> None:
    def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(batch.num_rows / 500)  # what a worker does in a second
        return batch

    kept = Kept()
    with pk.Engine(cluster, workers=1, name="sized", slice_rows=50) as engine:
        flow = pk.Flow("value long").map_batches(slow, schema="value long").key_by("value").agg(n=pk.count())
        source = cluster.readStream.format("rate").option("rowsPerSecond", 600).option("numPartitions", 2).load()
        writer = source.select("value").writeStream.foreachBatch(engine.foreach_batch(flow, kept))
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        try:
            with engine.autobalance(every="200ms", patience=1, workers=(1, 2)) as balance:
                wait_for(lambda: len(engine.members()) == 2, what="a second worker comes unaided", timeout=120)
                assert any(look.needed == 2 for look in balance.looks)
                # Before the load changes nothing asks for a third, or for less.
                known = query.lastProgress["batchId"]
                wait_for(lambda: query.lastProgress["batchId"] >= known + 2, what="batches go on", timeout=120)
                assert len(engine.members()) == 2
        finally:
            query.stop()
    rows = kept.last("value")
    assert sorted(rows) == list(range(len(rows))) and all(row["n"] == 1 for row in rows.values())
