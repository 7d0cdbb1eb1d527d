"""``foreach-batch-python-state``: Python state per key, the running mean, on every side one row out for each row in.

Two parts. In this process: `Flow.stateful_map` beside a loop over a dict, see `python_dict`. On Spark: the same flow in
``foreachBatch`` beside Spark's own ways, and one function for ``applyInPandasWithState``, unchanged, on both; batch by
batch on the same files, all in one session. A peer that does not finish a batch in time is recorded as such: its rate
is then an upper bound, and the ratio a lower one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.errors import EngineError
from penstock_bench import machine, streams
from penstock_bench.measure import Emit, Options, Paired, Tell, going, line
from penstock_bench.python_dict import INPUT, OUTPUT, beside_dict, newest, running_mean
from penstock_bench.streams import BatchTimeout, Sink, Stream

__all__ = ["run"]

NAME = "foreach-batch-python-state"
OURS, OURS_PANDAS, SAME_FUNCTION = "stateful_map", "apply_in_pandas_with_state", "applyInPandasWithState"
#: Rows by keys, of the cases beside a dict.
LOCAL_FULL, LOCAL_QUICK = {200_000: 2_000_000, 1_000_000: 5_000_000}, {100_000: 200_000}
#: Keys, which is also the rows of a batch, on Spark.
FULL, QUICK = 200_000, 5_000
#: Seconds after which a batch of a peer is given up.
_LIMIT_S = 100.0
#: Rounds also where the budget is spent: one takes minutes.
_LEAST = 2
#: What a quick bench may take longer for a peer that has begun.
_GRACE_S = 5.0
#: What would take a quick bench over its time.
_SLOWEST = ("transformWithStateInPandas",)
_WARM_KEYS = 200
#: Small batches before the first that counts: the JVM compiles for many, and a large one of a peer takes a minute.
_WARM, _WARM_QUICK = 8, 1


def run(
    options: Options,
    emit: Emit,
    tell: Tell,
    keys: int | None = None,
    local: dict[int, int] | None = None,
    peers: tuple[str, ...] | None = None,
) -> None:
    """Run the bench; `keys`, `local` and `peers` are for tests."""
    cases = local or (LOCAL_QUICK if options.quick else LOCAL_FULL)
    # Half of the time is for what is beside Spark.
    budget = options.budget(2 * len(cases), quick=10, full=100)
    for count, rows in cases.items():
        beside_dict(NAME, count, rows, budget, options, emit)
    _beside_spark(keys or (QUICK if options.quick else FULL), peers, options, emit, tell)


@dataclass
class _Side:
    """One query, and its rate in each batch; `bound` when a batch was not done in time."""

    stream: Stream
    sink: Sink
    rates: list[float] = field(default_factory=list)
    bound: float | None = None


def _beside_spark(keys: int, peers: tuple[str, ...] | None, options: Options, emit: Emit, tell: Tell) -> None:
    import penstock as pk
    from penstock.spark.engine import Engine
    from penstock_bench.peers import PEERS, STATE, lacking, running_means

    with streams.session(NAME, tell, residents=streams.WORKERS) as (spark, folder):
        keyed = pk.Flow(INPUT).key_by("k")
        flows = {
            OURS: keyed.stateful_map(running_mean, schema=OUTPUT),
            OURS_PANDAS: keyed.apply_in_pandas_with_state(running_means, OUTPUT, STATE, "append", "NoTimeout"),
        }
        files = _Files(folder / "files")
        sides: dict[str, _Side] = {}
        with Engine(spark, workers=streams.WORKERS, name="bench") as engine:
            try:
                for name, flow in flows.items():
                    sink = Sink()
                    stream = Stream(spark, folder / name, INPUT, engine.foreach_batch(flow, sink))
                    sides[name] = _Side(stream, sink)
                for name, shape in PEERS.items():
                    if peers is not None and name not in peers:
                        continue
                    if why := lacking(name):
                        tell(f"{name} is left out: {why}")
                        continue
                    if options.quick and name in _SLOWEST:
                        tell(f"{name} is left out of a quick run")
                        continue
                    sink = Sink()
                    # transformWithState runs on RocksDB alone; the other is faster on the default store.
                    store = streams.ROCKSDB if name.startswith("transform") else streams.DEFAULT
                    stream = Stream(spark, folder / name, INPUT, sink, shape, store=store)
                    sides[name] = _Side(stream, sink)
                _warm_up(sides, files, _WARM_QUICK if options.quick else _WARM, tell)
                tell("measuring")
                usage = _rounds(sides, files, keys, options, tell)
                conditions = {
                    "versions": streams.spark_versions(spark),
                    "batch_rows": keys,
                    "durable_snapshots": True,
                    "peer_durable_snapshots": True,
                    "workers": f"{streams.WORKERS} resident processes of 1 thread",
                    "peer_shuffle_partitions": machine.cores(),
                    "timed": "triggerExecution of Spark's progress, on both sides",
                }
                for name, peer in [(OURS, name) for name in PEERS] + [(OURS_PANDAS, SAME_FUNCTION)]:
                    if peer in sides:
                        case = (name, sides[name], peer, sides[peer], keys)
                        _tell_of(*case, usage, options, conditions, emit, tell)
            finally:
                for side in sides.values():
                    side.stream.stop()


def _tell_of(
    name: str,
    ours: _Side,
    peer: str,
    side: _Side,
    keys: int,
    usage: machine.Usage,
    options: Options,
    conditions: dict[str, Any],
    emit: Emit,
    tell: Tell,
) -> None:
    case = f"{name} in foreachBatch, keys={keys} rows={keys} vs {peer}"
    if both := min(len(ours.rates), len(side.rates)):
        paired = Paired(ours.rates[:both], side.rates[:both], *usage)
    elif side.bound is not None and ours.rates:
        # Not one batch in time: it does fewer rows a second than this.
        conditions = conditions | {"peer_unfinished": True, "peer_limit_s": side.bound, "ratio_is": "a lower bound"}
        case += f" (no batch done in {side.bound:.0f} s)"
        paired = Paired(ours.rates[:1], [keys / side.bound], *usage)
    else:
        tell(f"{name} beside {peer}: no time was left for it")
        return
    emit(line(NAME, case, "rows/s", "higher", paired, options, conditions))


def _warm_up(sides: dict[str, _Side], files: _Files, batches: int, tell: Tell) -> None:
    """A few small batches of keys of their own, and all queries have to say the same of them."""
    tell("warming up and checking")
    for number in range(batches):
        file = files.make(range(-_WARM_KEYS, 0), 2 * _WARM_KEYS)
        for side in sides.values():
            side.sink.keep = True
            side.stream.offer(file)
        for name, side in sides.items():
            side.stream.done()
            side.sink.keep = False
            if newest(side.sink.kept) != files.last(file):
                raise EngineError(f"{NAME}: the means of {name} are wrong in batch {number}; the figures are void")


def _rounds(sides: dict[str, _Side], files: _Files, keys: int, options: Options, tell: Tell) -> machine.Usage:
    """Give every query the same batches until the budget is spent; a peer that is too slow drops out.

    Each round goes the other way round, so that ours is not always first.
    """
    budget = options.budget(2, quick=24, full=400)
    begin, longest = time.monotonic(), 0.0
    meter, order = machine.Meter(), list(sides)
    while going(len(sides[OURS].rates), _LEAST, time.monotonic() - begin + longest <= budget, options.left()):
        turn = time.monotonic()
        file = files.make(range(keys), keys)
        for name in order:
            # The first round begins with ours, which gets its time; a peer may take what a quick bench has left, and a
            # little more.
            limit = _LIMIT_S if name == OURS else min(_LIMIT_S, max(0.0, options.left()) + _GRACE_S)
            side = sides[name]
            if side.bound is not None:
                continue
            try:
                seconds = side.stream.give(file, limit)
            except BatchTimeout:
                if name == OURS:
                    raise EngineError(f"{NAME}: ours has not done a batch of {keys:,} rows in {limit:.0f} s") from None
                side.bound = limit
                side.stream.stop()
                tell(f"{name}: not done after {limit:.0f} s")
                continue
            side.rates.append(keys / seconds)
            tell(f"{name}: {keys:,} rows in {seconds:.2f} s")
        order.reverse()
        longest = max(longest, time.monotonic() - turn)
    return meter.stop()


class _Files:
    """Batches of uniform keys, and what the means have to be after each."""

    def __init__(self, folder: Path) -> None:
        import random

        folder.mkdir()
        self._folder = folder
        self._random = random.Random(7)
        self._made = 0
        self._states: dict[int, tuple[int, int]] = {}
        self._last: dict[Path, dict[int, tuple[int, float]]] = {}

    def make(self, keys: range, rows: int) -> Path:
        """Write a batch of so many rows."""
        self._made += 1
        ks, vs = self._random.choices(keys, k=rows), self._random.choices(range(1000), k=rows)
        last = {}
        for k, v in zip(ks, vs, strict=True):
            self._states[k], (_, n, mean) = running_mean(self._states.get(k), k, v)
            last[k] = (n, mean)
        path = streams.write_file(self._folder / f"{self._made}.parquet", pa.table({"k": ks, "v": vs}))
        self._last[path] = last
        return path

    def last(self, file: Path) -> dict[int, tuple[int, float]]:
        """Count and mean of each key of a batch after it."""
        return self._last[file]
