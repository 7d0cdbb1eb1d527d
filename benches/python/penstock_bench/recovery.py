"""``recovery``: what the death of a worker costs a query, and what that of the driver does.

Two cases for each size of the state, a count per key:

- *kill*: a worker process is killed with SIGKILL at changing moments of a batch. Ours is the time of the batch that
  is hit, or of the next one where that is longer, since a worker that dies behind the last rows is missed there; the
  peer is the batch right before, which nothing hits. Both are Spark's ``triggerExecution``. The next kill waits until
  all workers serve again.
- *restart*: from ``start()`` of the query until its first batch, of few rows, is done, by the clock of this process,
  for ours and for ``groupBy.count`` on RocksDB in turn. Each begins from its checkpoint, with nothing of it in memory:
  Spark's stores are unloaded, and ours has a new engine, whose residents serve already, as Spark's executors do
  (``engine_start_s`` says how long that took). Nothing of a checkpoint is written when a query or an engine ends, so a
  driver that dies leaves the same. ``ready_s`` is ours alone: from the claim on the checkpoint until rows are asked
  for, with all state read; ``peer_load_metrics`` is what Spark says of loading its stores in the last restart;
  ``floor_s`` is the restart of a query that has no state and hands its rows to the same sink: what Spark takes for any.
"""

from __future__ import annotations

import logging
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import EngineError
from penstock_bench import machine, streams
from penstock_bench.measure import LEAST, Emit, Options, Paired, Tell, going, line
from penstock_bench.streams import Batches, Sink, Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    import penstock as pk

__all__ = ["run"]

NAME = "recovery"
SCHEMA = "k bigint"
QUICK, USUAL, LARGE = (100_000,), (100_000, 1_000_000), (10_000_000,)
#: Rows of a batch, as a part of the keys; at least, and at most, so many.
_ROWS = (1_000, 100_000)
#: Rows of the batch after a restart.
_FEW = 1_000
#: Moments of a batch at which the worker dies, as parts of the median batch.
_MOMENTS = (0.3, 0.0, 0.6, 0.15, 0.45, 0.75)
_GIVE_UP_S = 120.0
#: The query that has no state.
_FLOOR = "no state"


def run(options: Options, emit: Emit, tell: Tell, keys: int | None = None) -> None:
    """Run the bench; `keys` is for tests."""
    sizes = (keys,) if keys else QUICK if options.quick else USUAL + (LARGE if options.full else ())
    with streams.session(NAME, tell, residents=streams.WORKERS) as (spark, folder):
        for size in sizes:
            budget = options.budget(2 * len(sizes), quick=24, full=100 * 2 * len(sizes))
            _Size(spark, folder, size, options, emit, tell).run(budget)


class _Effects(logging.Handler):
    """When the protocol of an engine first asked for what."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._logger = logging.getLogger("penstock.spark._engine.executor")
        self.at: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and record.args:
            self.at.setdefault(str(record.args[0]), time.monotonic())

    def __enter__(self) -> _Effects:
        self._before = self._logger.level, self._logger.propagate
        self._logger.addHandler(self)
        self._logger.setLevel(logging.DEBUG)
        self._logger.propagate = False
        return self

    def __exit__(self, *error: object) -> None:
        self._logger.removeHandler(self)
        self._logger.level, self._logger.propagate = self._before
        self._logger.setLevel(self._before[0])


class _Size:
    """Both cases with one size of the state."""

    def __init__(self, spark: SparkSession, folder: Path, keys: int, options: Options, emit: Emit, tell: Tell) -> None:
        self.spark, self.keys, self.options, self.emit, self.tell = spark, keys, options, emit, tell
        self.folder = folder / str(keys)
        self.folder.mkdir()
        self.files = Batches(self.folder / "files", keys)
        self.rows = min(max(_ROWS[0], keys // 10), _ROWS[1])
        self.sinks = {"ours": Sink(), "RocksDB": Sink(), _FLOOR: Sink()}
        self.engine: Any = None
        self.streams: dict[str, Stream] = {}

    def run(self, budget: float) -> None:
        """Measure and emit."""
        self.engine = self._engine()
        try:
            self.streams = {
                "ours": Stream(self.spark, self.folder / "ours", SCHEMA, self._function()),
                "RocksDB": Stream(
                    self.spark,
                    self.folder / "RocksDB",
                    SCHEMA,
                    self.sinks["RocksDB"],
                    _count,
                    mode="update",
                    store=streams.ROCKSDB,
                ),
                _FLOOR: Stream(self.spark, self.folder / "floor", SCHEMA, self.sinks[_FLOOR]),
            }
            self.tell(f"filling {self.keys:,} keys and warming up")
            for file in (self.files.every_key(), *(self.files.next(self.rows) for _ in range(3))):
                for stream in self.streams.values():
                    stream.offer(file)
                for stream in self.streams.values():
                    stream.done()
            others = [stream for name, stream in self.streams.items() if name != "ours"]
            for stream in others:
                stream.stop()
            given = self._kills(budget)
            for stream in others:
                stream.restart()
                for file in given:
                    stream.offer(file)
                stream.done()
            self._restarts(budget)
            self._check()
        finally:
            for stream in self.streams.values():
                stream.stop()
            self.engine.close()

    def _engine(self) -> Any:
        import penstock as pk

        return pk.Engine(self.spark, workers=streams.WORKERS, name="bench").start()

    def _function(self) -> Any:
        import penstock as pk

        flow: pk.Flow = pk.Flow(SCHEMA).key_by("k").agg(n=pk.count())
        return self.engine.foreach_batch(flow, self.sinks["ours"])

    def _kills(self, budget: float) -> list[Path]:
        """Kill workers until the budget is spent; returns the files that were given."""
        ours = self.streams["ours"]
        given: list[Path] = []

        def give() -> float:
            given.append(self.files.next(self.rows))
            return ours.give(given[-1])

        hits: list[float] = []
        before = [give() for _ in range(3)]
        begin, longest, meter = time.monotonic(), 0.0, machine.Meter()
        while going(len(hits), LEAST, time.monotonic() - begin + longest <= budget, self.options.left()):
            turn = time.monotonic()
            before.append(give())
            member = self.engine.members()[len(hits) % streams.WORKERS]
            given.append(self.files.next(self.rows))
            ours.offer(given[-1])
            time.sleep(_MOMENTS[len(hits) % len(_MOMENTS)] * statistics.median(before))
            os.kill(member.pid, signal.SIGKILL)
            hit = ours.done()
            hits.append(max(hit, give()))
            self.tell(f"kill {len(hits)}: a batch took {hits[-1]:.2f} s, the one before {before[-1]:.2f} s")
            self._whole(give, member.id)
            longest = max(longest, time.monotonic() - turn)
        usual = before[-len(hits) :]
        beyond = max(hits) - 2 * statistics.median(before)
        self._emit(
            f"kill -9 of a worker, keys={self.keys} vs the batch before",
            Paired(hits, usual, *meter.stop()),
            {
                "beyond_s": round(beyond, 3),
                "beyond_is": "the longest batch hit less twice the median batch",
                "batch_rows": self.rows,
                "timed": "triggerExecution of Spark's progress of the batch hit, or of the next where that is longer",
            },
        )
        return given

    def _whole(self, give: Callable[[], float], gone: int) -> None:
        """Give batches until a new member serves and has its share of the bins."""
        deadline = time.monotonic() + _GIVE_UP_S
        while True:
            give()
            members = [member.id for member in self.engine.members()]
            owners = {owner for step in self.engine.owners() for owner in step}
            if len(members) == streams.WORKERS and gone not in members and len(owners) == streams.WORKERS:
                return
            if time.monotonic() > deadline:
                raise EngineError(f"{NAME}: no worker in the place of member {gone} within {_GIVE_UP_S:g} s")

    def _restarts(self, budget: float) -> None:
        """Restart both queries in turn until the budget is spent."""
        found: dict[str, list[float]] = {name: [] for name in self.streams}
        ready: list[float] = []
        loads: dict[str, Any] = {}
        starts: list[float] = []
        begin, longest, meter = time.monotonic(), 0.0, machine.Meter()
        names = list(self.streams)
        while going(len(ready), LEAST, time.monotonic() - begin + longest <= budget, self.options.left()):
            turn = time.monotonic()
            # Ordinary batches first, so that there is something above the last whole state.
            for file in (self.files.next(self.rows), self.files.next(self.rows)):
                for stream in self.streams.values():
                    stream.give(file)
            file = self.files.next(_FEW)
            for name in names:
                stream = self.streams[name]
                stream.stop()
                if name == "ours":
                    self.engine.close()
                    clock = time.monotonic()
                    self.engine = self._engine()
                    starts.append(time.monotonic() - clock)
                elif name == "RocksDB":
                    _unload(self.spark)
                function = self._function() if name == "ours" else None
                stream.offer(file)
                with _Effects() as effects:
                    clock = time.monotonic()
                    stream.restart(function)
                    stream.done()
                    found[name].append(time.monotonic() - clock)
                if name == "RocksDB":
                    custom = stream.progress["stateOperators"][0].get("customMetrics", {})
                    loads = {metric: custom[metric] for metric in sorted(custom) if "load" in metric.lower()}
                if name == "ours":
                    ready.append(effects.at["Feed"] - effects.at["CreateClaim"])
            self.tell(
                f"restart {len(ready)}: ours {found['ours'][-1]:.2f} s, of it {ready[-1]:.2f} s from claim to ready;"
                f" RocksDB {found['RocksDB'][-1]:.2f} s, without state {found[_FLOOR][-1]:.2f} s"
            )
            names = [*names[1:], names[0]]
            longest = max(longest, time.monotonic() - turn)
        self._emit(
            f"restart of a query, keys={self.keys} vs Spark groupBy.count, RocksDB",
            Paired(found["ours"], found["RocksDB"], *meter.stop()),
            {
                "ready_s": round(statistics.median(ready), 3),
                "ready_range_s": [round(min(ready), 3), round(max(ready), 3)],
                "ready_is": "from the claim on the checkpoint until rows are asked for",
                "peer_load_metrics": loads,
                "floor_s": round(statistics.median(found[_FLOOR]), 3),
                "floor_range_s": [round(min(found[_FLOOR]), 3), round(max(found[_FLOOR]), 3)],
                "floor_is": "the restart of a query without state",
                "engine_start_s": round(statistics.median(starts), 3),
                "batch_rows": _FEW,
                "peer_shuffle_partitions": machine.cores(),
                "timed": "from start() of the query until its first batch is done, by this process's clock",
            },
        )

    def _check(self) -> None:
        file = self.files.next(self.rows)
        for name in ("ours", "RocksDB"):
            stream = self.streams[name]
            self.sinks[name].keep = True
            stream.give(file)
            self.files.check(self.sinks[name].kept, f"{NAME}: the counts of {name}")

    def _emit(self, case: str, paired: Paired, own: dict[str, Any]) -> None:
        conditions = {
            "versions": streams.spark_versions(self.spark),
            "workers": f"{streams.WORKERS} resident processes of 1 thread",
            "state": "durable, in the query's checkpoint on the local disk",
        }
        self.emit(line(NAME, case, "s", "lower", paired, self.options, conditions | own))


def _unload(spark: SparkSession) -> None:
    """Let Spark forget the state stores of its executors, here the driver's process: a new one would have none."""
    jvm: Any = spark.sparkContext._jvm
    stores = getattr(jvm.org.apache.spark.sql.execution.streaming.state, "StateStore$")
    getattr(stores, "MODULE$").stop()


def _count(frame: DataFrame) -> DataFrame:
    return frame.groupBy("k").count().withColumnRenamed("count", "n")
