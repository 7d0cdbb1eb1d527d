"""``foreach-batch-count``: count per key in ``foreachBatch`` beside Spark's ``groupBy.count``.

All queries run in one session, read the same files, and give the counts that changed to the same sink. They take
turns batch by batch, after the state holds every key, and each batch is told by its parts. All write what a batch has
changed to their checkpoints.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock_bench import machine, streams
from penstock_bench.measure import LEAST, Emit, Options, Paired, Tell, going, line
from penstock_bench.streams import Sink, Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock.spark.engine import Engine

__all__ = ["run"]

NAME = "foreach-batch-count"
SCHEMA = "k bigint"
#: Keys, which is also the rows of a batch.
FULL, QUICK = 1_000_000, 100_000


def run(options: Options, emit: Emit, tell: Tell, keys: int | None = None) -> None:
    """Run the bench; `keys` is for tests."""
    import penstock as pk
    from penstock.spark.engine import Engine

    count = keys or (QUICK if options.quick else FULL)
    with streams.session(NAME, tell, residents=True) as (spark, folder):
        flow = pk.Flow(SCHEMA).key_by("k").agg(n=pk.count())
        files = streams.Batches(folder / "files", count)
        with Engine(spark, workers=streams.WORKERS, name="bench") as engine:
            sinks = {name: Sink() for name in ("ours", "RocksDB", "default store")}
            made = {"ours": Stream(spark, folder / "ours", SCHEMA, engine.foreach_batch(flow, sinks["ours"]))}
            for name, store in (("RocksDB", streams.ROCKSDB), ("default store", streams.DEFAULT)):
                made[name] = Stream(
                    spark, folder / name.split()[0], SCHEMA, sinks[name], _count, mode="update", store=store
                )
            try:
                tell(f"filling {count:,} keys and warming up")
                for file in (files.every_key(), files.next()):
                    for stream in made.values():
                        stream.offer(file)
                    for stream in made.values():
                        stream.done()
                tell("measuring")
                rates, reports, usage = _rounds(made, files, options, tell)
                parts = _parts(reports, engine)
                _check(made, sinks, files)
                conditions = {
                    "versions": streams.spark_versions(spark),
                    "batch_rows": count,
                    "durable_snapshots": True,
                    "peer_durable_snapshots": True,
                    "workers": f"{streams.WORKERS} resident processes of 1 thread",
                    "peer_shuffle_partitions": machine.cores(),
                    "timed": "triggerExecution of Spark's progress, on both sides",
                }
                for name, split in parts.items():
                    tell(f"{name}: " + ", ".join(f"{part} {seconds:.3f} s" for part, seconds in split.items()))
                for name in ("RocksDB", "default store"):
                    case = f"keys={count} rows={count} vs Spark groupBy.count, {name}"
                    paired = Paired(rates["ours"], rates[name], *usage)
                    own: dict[str, Any] = {"parts_s": parts["ours"], "peer_parts_s": parts[name]}
                    emit(line(NAME, case, "rows/s", "higher", paired, options, conditions | own))
            finally:
                for stream in made.values():
                    stream.stop()


def _count(frame: DataFrame) -> DataFrame:
    return frame.groupBy("k").count().withColumnRenamed("count", "n")


def _rounds(
    made: dict[str, Stream], files: streams.Batches, options: Options, tell: Tell
) -> tuple[dict[str, list[float]], dict[str, list[Mapping[str, Any]]], machine.Usage]:
    """Give every query the same batches, in changing order, until the budget is spent.

    Returns rows per second of each, and Spark's progress reports.
    """
    rates: dict[str, list[float]] = {name: [] for name in made}
    reports: dict[str, list[Mapping[str, Any]]] = {name: [] for name in made}
    names = list(made)
    budget = options.budget(1, quick=15, full=150)
    begin, longest = time.monotonic(), 0.0
    meter = machine.Meter()
    while going(len(rates["ours"]), LEAST, time.monotonic() - begin + longest <= budget, options.left()):
        turn = time.monotonic()
        file = files.next()
        seconds = {name: made[name].give(file) for name in names}
        for name in made:
            rates[name].append(len(files.last) / seconds[name])
            reports[name].append(made[name].progress)
        tell(f"batch {len(rates['ours'])}: " + ", ".join(f"{name} {seconds[name]:.2f} s" for name in made))
        names = [*names[1:], names[0]]
        longest = max(longest, time.monotonic() - turn)
    return rates, reports, meter.stop()


def _parts(reports: Mapping[str, Sequence[Mapping[str, Any]]], engine: Engine) -> dict[str, dict[str, float]]:
    """Median seconds of each part of each query's batches."""
    epochs = {epoch.epoch: epoch for epoch in engine.timeline().epochs}
    found = {}
    for name, batches in reports.items():
        splits = [
            streams.parts(batch["durationMs"], epochs[batch["batchId"]] if name == "ours" else None)
            for batch in batches
        ]
        found[name] = {part: round(statistics.median(split[part] for split in splits), 4) for part in splits[0]}
    return found


def _check(made: dict[str, Stream], sinks: dict[str, Sink], files: streams.Batches) -> None:
    """One more batch, of which every query has to give the same counts: those that were counted here."""
    file = files.next()
    for name, stream in made.items():
        sinks[name].keep = True
        stream.give(file)
        files.check(sinks[name].kept, f"{NAME}: the counts of {name}")
