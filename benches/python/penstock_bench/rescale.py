"""``rescale``: to twice the workers while these are saturated, beside Spark's own way.

From one worker to two; on eight cores or more from two to four, and on sixteen from four to eight with ``--full``.

Both sides count per key what comes, after work of some microseconds for each record in Python (CPU time, spun), from
files that always wait. One side runs after the other, since each takes all there is. Ours: `engine.rescale` while
batches run. Spark's: ``groupBy.count`` on RocksDB with as many state partitions and tasks for the input as workers; the
query is stopped, its state repartitioned offline (``StreamingCheckpointManager.repartition``), and the query started
again with twice as many. Where there are no more cores than that, the input has a task for each part of a file.

- *pause*: ours is what the gap between two batches grew by, over the median gap, plus the worst latency of a slice over
  the median slice (that of one worker or that beside the change, whichever is less), from the wish until the end of the
  first batch behind it (``worst_slice_at_rest_s`` is the same of batches beside which nothing changes). The wish comes
  at another moment of a batch each time, from its begin to its end. The peer's is what the gap between its batches grew
  by, since it has no slices: from the end of the last batch before its stop until the begin of the first behind.
- *rate*: rows per second of whole batches with twice the workers; the peer is ours with half of them, so a ratio of 2
  is all there is. ``peer_gain`` is what Spark's own rate grew by.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.errors import EngineError
from penstock_bench import machine, streams
from penstock_bench.measure import LEAST, Emit, Options, Paired, Tell, going, line
from penstock_bench.streams import Batches, Sink, Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["run"]

NAME = "rescale"
SCHEMA = "k bigint"
FULL, QUICK = 1_000_000, 100_000
#: CPU time for each record, microseconds; and rows of a batch for each worker at first: together they make a batch.
#: Feeding and serving a record takes two more, which on two cores is taken from the second worker.
WORK_US = 20.0
ROWS, QUICK_ROWS = 200_000, 25_000
#: Rows of a slice: few, since the latency of one is measured.
_SLICE = 1_024
#: Batches whose rate counts, before and after.
_STEADY = 3
#: Files that wait at least, the one that is read among them: behind an empty folder Spark sleeps before it looks again.
_WAITING = 2
_GIVE_UP_S = 300.0
#: Multiples of it, without their whole part, fill the time of a batch evenly.
_TURN = 0.618


def run(options: Options, emit: Emit, tell: Tell, keys: int | None = None, rows: int | None = None) -> None:
    """Run the bench; `keys` and `rows` are for tests."""
    size = keys or (QUICK if options.quick else FULL)
    each = rows or (QUICK_ROWS if options.quick else ROWS)
    numbers = _numbers(options.cores, options.full)
    budget = options.budget(2 * len(numbers), quick=20, full=600 * len(numbers))
    with streams.session(NAME, tell, residents=2 * max(numbers)) as (spark, folder):
        # Files are small: without this they are one part, whose rows one worker would get.
        spark.conf.set("spark.sql.files.openCostInBytes", str(64 << 10))
        for few in numbers:
            own = folder / str(few)
            own.mkdir()
            _pair(spark, own, few, size, each * few, budget, options, emit, tell)


def _numbers(cores: int, full: bool) -> list[int]:
    """How many workers there are at first; twice as many need half of the cores, or all where there are but two.

    Examples
    --------
    >>> [_numbers(cores, True) for cores in (1, 2, 4, 8, 16)]
    [[1], [1], [1], [2], [2, 4]]
    """
    return [few for few in (2, 4)[: 1 + full] if 4 * few <= cores] or [1]


def _pair(
    spark: SparkSession,
    folder: Path,
    few: int,
    size: int,
    count: int,
    budget: float,
    options: Options,
    emit: Emit,
    tell: Tell,
) -> None:
    """Go from `few` workers to twice as many and back, ours and Spark."""
    files = Batches(folder / "files", size)
    first, file = files.every_key(), files.next(count)
    ours = _Ours(spark, folder, files, first, file, few, tell)
    try:
        ours.rounds(budget, options)
    finally:
        ours.close()
    peer = _Peer(spark, folder, first, file, few, options.cores, tell)
    try:
        peer.rounds(budget, options, len(ours.pauses))
    finally:
        peer.close()
    both = min(len(ours.pauses), len(peer.pauses))
    conditions: dict[str, Any] = {
        "versions": streams.spark_versions(spark),
        "work_us": WORK_US,
        "batch_rows": count,
        "slice_rows": _SLICE,
        "workers": "resident processes of 1 thread",
        "repeats_of_peer": len(peer.pauses),
    }
    gaps = {
        "gap_s": _rounded(ours.gaps),
        "worst_slice_s": _rounded(ours.slices),
        "worst_slice_at_rest_s": _rounded(ours.resting),
        "pause_down_s": _rounded(ours.downs),
        "rescale_s": _rounded(ours.took),
        "peer_is": "stop, repartition offline, start again: gap between the batches, over the median gap",
    }
    emit(
        line(
            NAME,
            f"pause {few} to {2 * few} workers, keys={size} vs Spark offline repartition",
            "s",
            "lower",
            Paired(ours.pauses[:both], peer.pauses[:both], *machine.worst(ours.usage, peer.usage)),
            options,
            conditions | gaps,
            in_turn=False,
        )
    )
    emit(
        line(
            NAME,
            f"rate with {2 * few} workers, keys={size} vs {few} worker{'s' if few > 1 else ''}",
            "rows/s",
            "higher",
            Paired(ours.after, ours.before, *ours.usage),
            options,
            conditions | {"peer_gain": round(statistics.median(peer.gains), 3), "run_gain": _rounded(ours.gains)},
        )
    )


def spin(rows: int) -> None:
    """Use the CPU time of so many records."""
    end = time.thread_time() + rows * WORK_US / 1e6
    while time.thread_time() < end:
        pass


def worked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows, after work on each."""
    spin(batch.num_rows)
    return batch


def worked_all(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same for ``mapInArrow``."""
    return map(worked, batches)


class _Ours:
    """An engine that goes to twice its workers and back."""

    def __init__(
        self, spark: SparkSession, folder: Path, files: Batches, first: Path, file: Path, few: int, tell: Tell
    ) -> None:
        import penstock as pk

        self._files, self._file, self._few, self._tell = files, file, few, tell
        self._engine = pk.Engine(spark, workers=few, slice_rows=_SLICE, name="bench").start()
        flow = pk.Flow(SCHEMA).map_batches(worked, schema=SCHEMA).key_by("k").agg(n=pk.count())
        self._sink = Sink()
        self._stream = Stream(spark, folder / "ours", SCHEMA, self._engine.foreach_batch(flow, self._sink))
        self.pauses: list[float] = []
        self.gaps: list[float] = []
        self.slices: list[float] = []
        self.downs: list[float] = []
        self.took: list[float] = []
        self.before: list[float] = []
        self.after: list[float] = []
        self.gains: list[float] = []
        #: The worst slice above the median of batches beside which nothing changes.
        self.resting: list[float] = []
        self.usage = machine.Usage()
        self._changes = 0
        tell("ours: filling and warming up")
        # The batch of the rates is the last file, and counted when it was made.
        self._stream.give(first)
        self._given = 0
        self._offer()
        self._stream.done(_GIVE_UP_S)

    def rounds(self, budget: float, options: Options) -> None:
        """Go up and down until the budget is spent."""
        begin, longest, meter = time.monotonic(), 0.0, machine.Meter()
        while going(len(self.pauses), LEAST, time.monotonic() - begin + longest <= budget, options.left()):
            turn = time.monotonic()
            self._round()
            longest = max(longest, time.monotonic() - turn)
        self.usage = meter.stop()
        self._sink.keep = True
        self._offer()
        self._stream.done(_GIVE_UP_S)
        self._files.check(self._sink.kept, f"{NAME}: the counts of ours")

    def close(self) -> None:
        self._stream.stop()
        self._engine.close()

    def _offer(self) -> None:
        if self._given:
            self._files.again()
        self._given += 1
        self._stream.offer(self._file)

    def _round(self) -> None:
        since = time.time()
        one = self._rates()
        up = self._change(2 * self._few, since)
        two = self._rates()
        down = self._change(self._few, up[0])
        _, gap, worst, took = up
        self.gaps.append(gap)
        self.slices.append(worst)
        self.took.append(took)
        self.pauses.append(gap + worst)
        self.downs.append(down[1] + down[2])
        self.before.append(self._rate(one))
        self.after.append(self._rate(two))
        self.gains.append(self._run_s(one) / self._run_s(two))
        self._tell(
            f"ours {len(self.pauses)}: pause {1e3 * self.pauses[-1]:.0f} ms (gap {1e3 * gap:.0f}), rate"
            f" {self.before[-1]:,.0f} to {self.after[-1]:,.0f} rows/s"
        )

    def _rates(self) -> list[int]:
        """Run some batches, behind one another and before others, whose files wait by then; returns which."""
        began = self._stream.given
        for _ in range(_STEADY + 1 + _WAITING):
            self._offer()
        self._stream.done(_GIVE_UP_S, behind=_WAITING)
        return list(range(began + 1, self._stream.given - _WAITING))  # the first begins with what waited for nothing

    def _run_for(self, seconds: float) -> None:
        """Let batches run for so long; files always wait."""
        end = time.monotonic() + seconds
        while True:
            if self._stream.waiting() < _WAITING:
                self._offer()
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(0.02, left))

    def _batch_s(self) -> float:
        """What a batch takes now."""
        reports = [report for report in self._stream.query.recentProgress if report["numInputRows"]]
        return statistics.median(float(one["durationMs"]["triggerExecution"]) / 1e3 for one in reports[-_STEADY:])

    def _reports(self, batches: Sequence[int]) -> list[Mapping[str, Any]]:
        return [report for report in self._stream.query.recentProgress if report["batchId"] in batches]

    def _rate(self, batches: Sequence[int]) -> float:
        rates = [
            float(report["numInputRows"]) / float(report["durationMs"]["triggerExecution"]) * 1e3
            for report in self._reports(batches)
        ]
        return statistics.median(rates)

    def _run_s(self, batches: Sequence[int]) -> float:
        return statistics.median(epoch.run_s for epoch in self._engine.timeline().epochs if epoch.epoch in batches)

    def _change(self, workers: int, since: float) -> tuple[float, float, float, float]:
        """Rescale while batches run; returns when that was done, gap and slice above their medians, and how long."""
        self._changes += 1
        self._run_for(self._changes * _TURN % 1 * self._batch_s())
        asked = time.time()
        handle = self._engine.rescale(workers)
        while not handle.done:
            self._run_for(0.02)
        handle.wait()
        done = time.time()
        self._offer()
        self._stream.done(_GIVE_UP_S)
        self._engine.stats()  # members tell of the slices that they have finished
        timeline = self._engine.timeline()
        epochs = sorted((epoch for epoch in timeline.epochs if epoch.rows), key=lambda epoch: epoch.started)
        gaps = [(before.ended, after.started) for before, after in pairwise(epochs)]
        resting = [end - begin for begin, end in gaps if begin >= since and end < asked]
        # The gap that the last batch of the change ends with, too.
        later = [begin for begin, _ in gaps if begin >= done]
        changing = [end - begin for begin, end in gaps if end >= asked and begin <= min(later, default=done)]
        # The first batch that ends behind the change is served by all that there are then.
        behind = min((epoch.ended for epoch in epochs if epoch.ended >= done), default=done)
        slow = [s.latency_ns / 1e9 for s in timeline.slices if asked <= s.ended <= behind]
        usual = [s.latency_ns / 1e9 for s in timeline.slices if since <= s.ended < asked]
        if not slow or not usual or not changing or not resting:
            raise EngineError(f"{NAME}: no batch ran beside the rescale; give more rows")
        worst = max(0.0, max(slow) - min(statistics.median(usual), statistics.median(slow)))
        self.resting.append(max(usual) - statistics.median(usual))
        gap = max(0.0, max(changing) - statistics.median(resting))
        return done, gap, worst, done - asked


class _Peer:
    """Spark: stop, repartition, start."""

    def __init__(
        self, spark: SparkSession, folder: Path, first: Path, file: Path, few: int, cores: int, tell: Tell
    ) -> None:
        self._spark, self._file, self._few, self._cores, self._tell = spark, file, few, cores, tell
        self._sink = Sink()
        self._partitions = few
        spark.conf.set("spark.sql.shuffle.partitions", str(few))
        self._stream = Stream(
            spark, folder / "peer", SCHEMA, self._sink, self._count, mode="update", store=streams.ROCKSDB
        )
        self.pauses: list[float] = []
        self.gains: list[float] = []
        self.usage = machine.Usage()
        tell("Spark: filling and warming up")
        self._stream.give(first)
        self._stream.give(file)

    def _count(self, frame: DataFrame) -> DataFrame:
        spread = frame.coalesce(self._partitions) if self._partitions < self._cores else frame
        return spread.mapInArrow(worked_all, SCHEMA).groupBy("k").count().withColumnRenamed("count", "n")

    def rounds(self, budget: float, options: Options, most: int) -> None:
        """Go up and down until the budget is spent."""
        begin, longest, meter = time.monotonic(), 0.0, machine.Meter()
        while len(self.pauses) < most and going(
            len(self.pauses), LEAST, time.monotonic() - begin + longest <= budget, options.left()
        ):
            turn = time.monotonic()
            one = self._rates()
            pause = self._change(2 * self._few)
            two = self._rates()
            self._change(self._few)
            self.pauses.append(pause)
            self.gains.append(two / one)
            self._tell(f"Spark {len(self.pauses)}: pause {pause:.2f} s, rate x {two / one:.2f}")
            longest = max(longest, time.monotonic() - turn)
        self.usage = meter.stop()

    def close(self) -> None:
        self._stream.stop()

    def _rates(self) -> float:
        """Rows per second, median of some batches."""
        for _ in range(_STEADY):
            self._stream.offer(self._file)
        began = self._stream.given - _STEADY
        self._stream.done(_GIVE_UP_S)
        reports = [r for r in self._stream.query.recentProgress if r["batchId"] >= began and r["numInputRows"]]
        seconds = [float(r["durationMs"]["triggerExecution"]) / 1e3 for r in reports]
        return float(reports[-1]["numInputRows"]) / statistics.median(seconds)

    def _change(self, partitions: int) -> float:
        """Go to so many partitions; returns the gap between the batches above the median one."""
        before = [r for r in self._stream.query.recentProgress if r["numInputRows"]]
        usual = [_begin(after) - _end(one) for one, after in pairwise(before)]
        self._stream.stop()
        self._spark._streamingCheckpointManager.repartition(str(self._stream.checkpoint), partitions)
        self._stream.skip(1)  # the repartition is a batch
        self._partitions = partitions
        self._spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
        self._stream.offer(self._file)
        self._stream.restart()
        self._stream.done(_GIVE_UP_S)
        gap = _begin(self._stream.progress) - _end(before[-1])
        if gap < 0:
            raise EngineError(f"{NAME}: Spark's clock went back by {-gap:.3f} s; the figures are void")
        return max(0.0, gap - statistics.median(usual))


def _begin(report: Mapping[str, Any]) -> float:
    return datetime.datetime.fromisoformat(report["timestamp"]).timestamp()


def _end(report: Mapping[str, Any]) -> float:
    return _begin(report) + float(report["durationMs"]["triggerExecution"]) / 1e3


def _rounded(values: Sequence[float]) -> list[float]:
    """Least, median and greatest."""
    return [round(value, 4) for value in (min(values), statistics.median(values), max(values))]
