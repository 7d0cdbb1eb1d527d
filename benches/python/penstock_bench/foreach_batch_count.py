"""``foreach-batch-count``: count per key in ``foreachBatch``, beside Spark's ``groupBy.count`` and beside no work.

All queries run in one session, read the same files, and give what they have to the same sink: we and Spark the counts
that changed, *identity* the rows of the batch, which an empty function for ``mapInArrow`` has passed on. So identity is
what a way through Python costs at all. They take turns batch by batch, after the state holds every key, and each batch
is told by its parts. All write to their checkpoints: we and Spark's default store what a batch has changed, RocksDB its
files, as by default, and as a peer of its own what has changed (changelog checkpoints); identity has nothing to write.

A query that runs for hours is what is measured, so some batches go before: the JVM compiles what they run while they
run. Spark's stores are stopped before identity has its turns, since they go on writing between them. All queries have
the settings of `streams.SETTINGS`, which are not Spark's defaults, and a shuffle partition for each core; the
conditions list them. That we feed narrow rows with others (`penstock.spark._engine.feeds`) is ours, not the identity's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock_bench import machine, streams
from penstock_bench.measure import LEAST, Emit, Options, Paired, Tell, going, line
from penstock_bench.streams import Sink, Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.spark.engine import Engine

__all__ = ["run"]

NAME = "foreach-batch-count"
SCHEMA = "k bigint"
#: Keys, which is also the rows of the batches that are beside Spark's stores.
FULL, QUICK = 1_000_000, 100_000
#: Rows of batches that are beside identity alone: those that cost what a batch costs, and, as a multiple of the keys,
#: those that cost what a row costs.
SMALL, MANY = 1_000, 4
#: Batches before the first that counts: of all queries, and then of those that go on without Spark's stores.
WARM, WARMER = 4, 6
#: Class of each of Spark's stores, and whether it keeps a changelog.
STORES = {
    "RocksDB": (streams.ROCKSDB, False),
    "RocksDB with a changelog": (streams.ROCKSDB, True),
    "default store": (streams.DEFAULT, False),
}
IDENTITY = "identity mapInArrow"


def run(
    options: Options, emit: Emit, tell: Tell, keys: int | None = None, sinks: Sequence[str] = ("noop", "parquet")
) -> None:
    """Run the bench; `keys` and `sinks` are for tests."""
    from penstock.spark.engine import Engine

    count = keys or (QUICK if options.quick else FULL)
    with (
        streams.session(NAME, tell, residents=streams.WORKERS) as (spark, folder),
        Engine(spark, workers=streams.WORKERS, name="bench") as engine,
    ):
        for sink in sinks:
            _Case(spark, engine, folder, sink, count, options, emit, tell).run()


class _Parquet(Sink):
    """Writes each batch to files; keeps it where that is asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        if self.keep:
            super().__call__(frame, batch_id)
        else:
            frame.write.mode("overwrite").parquet(str(self._folder / f"batch={batch_id % 4}"))


def same(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For ``mapInArrow``: what comes goes."""
    yield from batches


class _Case:
    """All queries with one sink."""

    def __init__(
        self,
        spark: SparkSession,
        engine: Engine,
        folder: Path,
        sink: str,
        keys: int,
        options: Options,
        emit: Emit,
        tell: Tell,
    ) -> None:
        self.spark, self.engine, self.sink, self.keys = spark, engine, sink, keys
        self.options, self.emit, self.tell = options, emit, tell
        self.folder = folder / sink
        self.folder.mkdir()
        self.files = streams.Batches(self.folder / "files", keys)
        # Spark's stores are beside us with the sink that costs nothing.
        names = ["ours", IDENTITY, *(STORES if sink == "noop" else ())]
        self.sinks = {name: Sink() if sink == "noop" else _Parquet(self.folder / f"{name} out") for name in names}

    def run(self) -> None:
        """Measure and emit."""
        made: dict[str, Stream] = {}
        try:
            for name in self.sinks:
                made[name] = self._stream(name)
            self.tell(f"{self.sink}: filling {self.keys:,} keys and warming up")
            self._offer(made, self.files.every_key())
            self._warm(made, WARM)
            if STORES.keys() & made.keys():
                self._measure({name: stream for name, stream in made.items() if name != IDENTITY}, self.keys)
                self._check(made)
                for name in STORES:
                    made.pop(name).stop()
            self._warm(made, WARMER)
            self._measure(made, self.keys)
            self._measure(made, SMALL if self.keys > SMALL else self.keys // 2, of_batch=True)
            if not self.options.quick:
                self._measure(made, MANY * self.keys)
            self._check(made)
        finally:
            for stream in made.values():
                stream.stop()

    def _warm(self, made: Mapping[str, Stream], batches: int) -> None:
        for _ in range(1 if self.options.quick else batches):
            self._offer(made, self.files.next())

    def _offer(self, made: Mapping[str, Stream], file: Path) -> None:
        """A batch to all, side by side."""
        for stream in made.values():
            stream.offer(file)
        for stream in made.values():
            stream.done()

    def _stream(self, name: str) -> Stream:
        import penstock as pk

        sink = self.sinks[name]
        if name == "ours":
            flow: pk.Flow = pk.Flow(SCHEMA).key_by("k").agg(n=pk.count())
            return Stream(self.spark, self.folder / name, SCHEMA, self.engine.foreach_batch(flow, sink))
        if name == IDENTITY:
            return Stream(
                self.spark, self.folder / name, SCHEMA, lambda df, batch: sink(df.mapInArrow(same, SCHEMA), batch)
            )
        store, changelog = STORES[name]
        place = self.folder / name
        return Stream(self.spark, place, SCHEMA, sink, _count, mode="update", store=store, changelog=changelog)

    def _check(self, made: Mapping[str, Stream]) -> None:
        """One more batch, of which every query has to give the same counts: those that were counted here."""
        file = self.files.next()
        for name, stream in made.items():
            if name == IDENTITY:
                continue
            self.sinks[name].keep = True
            stream.give(file)
            self.sinks[name].keep = False
            self.files.check(self.sinks[name].kept, f"{NAME}: the counts of {name}")

    def _measure(self, made: dict[str, Stream], rows: int, of_batch: bool = False) -> None:
        """Batches of so many rows: seconds of one where it is the batch that costs, and rows per second elsewhere."""
        seconds, reports, usage = _rounds(made, self.files, rows, self.options, self.tell)
        parts = _parts(reports, self.engine)
        conditions = {
            "versions": streams.spark_versions(self.spark),
            "batch_rows": rows,
            "sink": self.sink,
            "durable_snapshots": True,
            "workers": f"{streams.WORKERS} resident processes of 1 thread",
            "peer_shuffle_partitions": machine.cores(),
            "spark_settings": streams.told_settings(machine.cores()),
            "timed": "triggerExecution of Spark's progress, on both sides",
        }
        for name, split in parts.items():
            self.tell(f"{name}: " + ", ".join(f"{part} {value:.3f} s" for part, value in split.items()))
        for name in made:
            if name == "ours":
                continue
            peer = f"Spark groupBy.count, {name}" if name in STORES else name
            own: dict[str, Any] = {
                "parts_s": parts["ours"],
                "peer_parts_s": parts[name],
                "peer_durable_snapshots": name in STORES,
                "added_s": round(statistics.median(seconds["ours"]) - statistics.median(seconds[name]), 4),
            }
            if name in STORES:
                own["peer_changelog"] = STORES[name][1]
            ours, its = ([each if of_batch else rows / each for each in seconds[one]] for one in ("ours", name))
            self.emit(
                line(
                    NAME,
                    f"keys={self.keys} rows={rows} {self.sink} vs {peer}",
                    "s" if of_batch else "rows/s",
                    "lower" if of_batch else "higher",
                    Paired(ours, its, *usage),
                    self.options,
                    conditions | own,
                )
            )


def _count(frame: DataFrame) -> DataFrame:
    return frame.groupBy("k").count().withColumnRenamed("count", "n")


def _rounds(
    made: dict[str, Stream], files: streams.Batches, rows: int, options: Options, tell: Tell
) -> tuple[dict[str, list[float]], dict[str, list[Mapping[str, Any]]], machine.Usage]:
    """Give every query the same batches, in changing order, until the budget is spent.

    Returns the seconds of each batch by query, and Spark's progress reports.
    """
    seconds: dict[str, list[float]] = {name: [] for name in made}
    reports: dict[str, list[Mapping[str, Any]]] = {name: [] for name in made}
    names = list(made)
    # So often it is called: see `_Case.run`, with two sinks.
    budget = options.budget(5 if options.quick else 7, quick=30, full=630)
    begin, longest = time.monotonic(), 0.0
    meter = machine.Meter()
    while going(len(seconds["ours"]), LEAST, time.monotonic() - begin + longest <= budget, options.left()):
        turn = time.monotonic()
        file = files.next(rows)
        for name in names:
            seconds[name].append(made[name].give(file))
        for name in made:
            reports[name].append(made[name].progress)
        tell(f"batch {len(seconds['ours'])}: " + ", ".join(f"{name} {seconds[name][-1]:.2f} s" for name in made))
        names = [*names[1:], names[0]]
        longest = max(longest, time.monotonic() - turn)
    return seconds, reports, meter.stop()


def _parts(reports: Mapping[str, Sequence[Mapping[str, Any]]], engine: Engine) -> dict[str, dict[str, float]]:
    """Median seconds of each part of each query's batches."""
    # Both sinks number their batches from 0; the later one is the one that runs.
    epochs = {epoch.epoch: epoch for epoch in sorted(engine.timeline().epochs, key=lambda epoch: epoch.started)}
    found = {}
    for name, batches in reports.items():
        splits = [
            streams.parts(batch["durationMs"], epochs[batch["batchId"]] if name == "ours" else None)
            for batch in batches
        ]
        found[name] = {part: round(statistics.median(split[part] for split in splits), 4) for part in splits[0]}
    return found
