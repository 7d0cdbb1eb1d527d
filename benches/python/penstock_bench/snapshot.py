"""``snapshot``: what durable state costs a batch, when few keys change and when all do.

Two queries count per key in one session and one engine, with the same flow, files and sink, and take turns batch by
batch: one writes what each batch has changed to its checkpoint, the other keeps its state in memory only, which is what
the rest of a batch costs. Cases: one key of a hundred changes, each once; the same with as many rows as there are keys;
and every key changes, so that what is written is all of the state. The last case puts the first beside that: a
snapshot of changes beside a full one.

``files_s`` is what a batch waits for its files behind the sink, from the engine's split; ``added_s`` is what it takes
longer than that of the other query, so with what was written while the sink ran. Both are medians, and so are bytes.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock._storage import OWN_FOLDER
from penstock_bench import machine, streams
from penstock_bench.measure import LEAST, Emit, Options, Paired, Tell, going, line
from penstock_bench.streams import Batches, Sink, Stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.spark.engine import Engine

__all__ = ["run"]

NAME = "snapshot"
SCHEMA = "k bigint"
FULL, QUICK = 1_000_000, 100_000
#: Part of the keys that a batch changes.
DIRTY = 0.01
DURABLE, MEMORY = "durable", "memory"
_NO_USAGE = machine.Usage(None, None, None)


def run(options: Options, emit: Emit, tell: Tell, keys: int | None = None) -> None:
    """Run the bench; `keys` is for tests."""
    from penstock.spark.engine import Engine

    count = keys or (QUICK if options.quick else FULL)
    with (
        streams.session(NAME, tell, residents=streams.WORKERS) as (spark, folder),
        Engine(spark, workers=streams.WORKERS, name="bench") as engine,
    ):
        _Bench(spark, engine, folder, count, options, emit, tell).run()


@dataclass
class _Case:
    """The batches of one kind: seconds by query, and of the durable one what its files were."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {DURABLE: [], MEMORY: []})
    numbers: dict[str, list[int]] = field(default_factory=lambda: {DURABLE: [], MEMORY: []})
    spark: dict[str, list[Any]] = field(default_factory=lambda: {DURABLE: [], MEMORY: []})
    written: list[int] = field(default_factory=list)
    usage: machine.Usage = _NO_USAGE


class _Bench:
    """Both queries, and what was found."""

    def __init__(
        self, spark: SparkSession, engine: Engine, folder: Path, keys: int, options: Options, emit: Emit, tell: Tell
    ) -> None:
        self.spark, self.engine, self.folder, self.keys = spark, engine, folder, keys
        self.options, self.emit, self.tell = options, emit, tell
        self.files = Batches(folder / "files", keys)
        self.sinks = {DURABLE: Sink(), MEMORY: Sink()}
        self.streams: dict[str, Stream] = {}

    def run(self) -> None:
        """Measure and emit."""
        dirty = max(1, round(DIRTY * self.keys))
        try:
            for name in self.sinks:
                self.streams[name] = self._stream(name)
            self.tell(f"filling {self.keys:,} keys and warming up")
            for file in (self.files.every_key(), self.files.among(dirty), self.files.among(dirty)):
                for stream in self.streams.values():
                    stream.give(file)
            few = self._measure(dirty, dirty)
            self._tell_of(few, dirty, dirty)
            many = self._measure(dirty, self.keys)
            self._tell_of(many, dirty, self.keys)
            whole = self._measure(self.keys, self.keys)
            self._tell_of(whole, self.keys, self.keys)
            self._beside(few, whole, dirty)
            self._check()
        finally:
            for stream in self.streams.values():
                stream.stop()

    def _stream(self, name: str) -> Stream:
        import penstock as pk

        flow: pk.Flow = pk.Flow(SCHEMA).key_by("k").agg(n=pk.count())
        place: dict[str, Any] = {"checkpoint": None} if name == MEMORY else {}
        return Stream(
            self.spark, self.folder / name, SCHEMA, self.engine.foreach_batch(flow, self.sinks[name], **place)
        )

    def _measure(self, dirty: int, rows: int) -> _Case:
        """Batches in turn until the budget is spent."""
        case, names = _Case(), list(self.streams)
        budget = self.options.budget(3, quick=18, full=180)
        begin, longest, meter = time.monotonic(), 0.0, machine.Meter()
        while going(len(case.written), LEAST, time.monotonic() - begin + longest <= budget, self.options.left()):
            turn = time.monotonic()
            file = self.files.among(dirty, rows)
            for name in names:
                stream = self.streams[name]
                case.numbers[name].append(stream.given)
                case.seconds[name].append(stream.give(file))
                case.spark[name].append(stream.progress["durationMs"])
            case.written.append(self._written(case.numbers[DURABLE][-1]))
            told = ", ".join(f"{name} {case.seconds[name][-1]:.2f} s" for name in self.streams)
            self.tell(f"{rows:,} rows of {dirty:,} keys: {told}, {case.written[-1]:,} bytes")
            names.reverse()
            longest = max(longest, time.monotonic() - turn)
        case.usage = meter.stop()
        return case

    def _written(self, batch: int) -> int:
        """Bytes of the data files of a batch, which are there until Spark's log has a later one."""
        places = (self.streams[DURABLE].checkpoint / OWN_FOLDER).glob(f"data-*-{batch:020}-*")
        return sum(place.stat().st_size for place in places)

    def _parts(self, case: _Case, name: str) -> dict[str, float]:
        """Median seconds of each part of a query's batches."""
        epochs = {epoch.epoch: epoch for epoch in self.engine.timeline().epochs if epoch.query == name}
        numbers = zip(case.numbers[name], case.spark[name], strict=True)
        splits = [streams.parts(spent, epochs[number]) for number, spent in numbers]
        return {part: round(statistics.median(split[part] for split in splits), 4) for part in splits[0]}

    def _conditions(self, case: _Case, rows: int) -> dict[str, Any]:
        return {
            "versions": streams.spark_versions(self.spark),
            "batch_rows": rows,
            "sink": "noop",
            "workers": f"{streams.WORKERS} resident processes of 1 thread",
            "parts_s": self._parts(case, DURABLE),
            "written_bytes": round(statistics.median(case.written)),
            "store": "a folder on the local disk, each file synced",
        }

    def _tell_of(self, case: _Case, dirty: int, rows: int) -> None:
        """What the files cost a batch."""
        told = self._conditions(case, rows)
        ours, peer = case.seconds[DURABLE], case.seconds[MEMORY]
        added = statistics.median(mine - its for mine, its in zip(ours, peer, strict=True))
        whole = statistics.median(ours)
        own = {
            "dirty_keys": dirty,
            "peer_parts_s": self._parts(case, MEMORY),
            "files_share": round(told["parts_s"]["files"] / whole, 4),
            "added_s": round(added, 4),
            "added_share": round(added / whole, 4),
            "timed": "triggerExecution of Spark's progress, on both sides",
        }
        for name in self.streams:
            split = told["parts_s"] if name == DURABLE else own["peer_parts_s"]
            self.tell(f"{name}: " + ", ".join(f"{part} {value:.3f} s" for part, value in split.items()))
        name = f"keys={self.keys} dirty={dirty} rows={rows} durable vs in memory only"
        self.emit(line(NAME, name, "s", "lower", Paired(ours, peer, *case.usage), self.options, told | own))

    def _beside(self, few: _Case, whole: _Case, dirty: int) -> None:
        """Bytes of a snapshot of changes beside one of everything."""
        both = min(len(few.written), len(whole.written))
        ours, peer = ([float(size) for size in case.written[:both]] for case in (few, whole))
        told = self._conditions(few, dirty)
        own = {
            "dirty_keys": dirty,
            "peer_written_bytes": round(statistics.median(whole.written)),
            "peer_files_s": self._parts(whole, DURABLE)["files"],
            "files_s": told["parts_s"]["files"],
        }
        name = f"keys={self.keys} incremental, dirty={dirty} vs full"
        self.emit(line(NAME, name, "bytes", "lower", Paired(ours, peer, *few.usage), self.options, told | own))

    def _check(self) -> None:
        file = self.files.among(max(1, round(DIRTY * self.keys)))
        for name, stream in self.streams.items():
            self.sinks[name].keep = True
            stream.give(file)
            self.files.check(self.sinks[name].kept, f"{NAME}: the counts of {name}")
