"""NEXMark under random schedules of kills, failures and rescales: the output is that of an undisturbed run, row by row.

A seed decides what is done to which batch at which moment; how far a batch has come then depends on the machine. The
sink overwrites a folder for each batch. ``--long`` runs a hundred longer ones; the name of a test that failed
has the seed, and its output what was to be done.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

import penstock as pk
from durable_support import executor_of
from engine_support import bag
from penstock.errors import EngineError
from penstock.spark._session.collect import to_table
from penstock.workloads import nexmark

pytestmark = [pytest.mark.spark, pytest.mark.fault, pytest.mark.timeout(300)]

COLUMNS = ("auction", "bidder", "price", "channel", "date_time")
SCHEMA = "auction bigint, bidder bigint, price bigint, channel string, date_time bigint"

#: Of one source; of several: joins for ever, within an interval and in windows, and steps behind them.
WINDOWS = ("q5_beam", "q5_mega", "q7_beam", "q7_mega")
JOINS = ("q3", "winning_bids", "q4_stream", "q6_stream", "q8_tumble", "q8_horizon")
KINDS = ("native", "python", "pandas", "joins")


class Deed(NamedTuple):
    """What is done to a batch, once."""

    batch: int
    #: "call", "delay" (so many seconds into it), "sink" or "written".
    moment: str
    #: "member", "executor", "feed", "rescale", "sink" (it fails), "engine" (another one goes on).
    what: str
    #: Which member, or how many workers.
    number: int
    delay: float


def plan(chosen: random.Random, batches: int) -> list[Deed]:
    """Some deeds, fewer than batches."""
    weights = {"member": 5, "rescale": 5, "feed": 2, "sink": 2, "engine": 2}
    if batches > 4:
        weights["executor"] = 1  # costs ten seconds
    deeds = []
    for _ in range(batches - chosen.randint(1, 2)):
        [what] = chosen.choices(list(weights), list(weights.values()))
        moment = chosen.choice(("call", "delay", "delay", "sink", "written"))
        if what in ("sink", "engine"):
            moment = chosen.choice(("sink", "written"))
        if what == "feed":
            moment = "call"
        deeds.append(Deed(chosen.randrange(batches), moment, what, chosen.randint(1, 3), chosen.uniform(0.0, 0.6)))
    return sorted(deeds)


class Workload:
    """A flow, its input in pieces, and the bag of what must come out."""

    def __init__(self, kind: str, data: Path, chosen: random.Random, batches: int) -> None:
        bids = pq.read_table(data / "bid.parquet", columns=list(COLUMNS))
        self.finishes = kind in ("native", "joins")
        self.schema: Any = SCHEMA
        if self.finishes:
            query = chosen.choice(WINDOWS if kind == "native" else JOINS)
            self.name = query
            self.flow = nexmark.flow(query, nexmark.load_params(data), lateness="3s")
            self.expected = bag(pq.read_table(data / "expected" / f"{query}.parquet"))
            if kind == "joins":
                bids = together(self.flow, data)
                self.schema = from_arrow_schema(bids.schema)
        elif kind == "python":
            self.name, bids = "stateful_map", bids.slice(0, 18_000)
            self.flow = pk.Flow(SCHEMA).key_by("auction").stateful_map(numbering(), schema="auction bigint, n bigint")
            counts = Counter(bids["auction"].to_pylist())
            self.expected = Counter((auction, n + 1) for auction, total in counts.items() for n in range(total))
        else:
            self.name, bids = "applyInPandasWithState", bids.slice(0, 18_000)
            keyed = pk.Flow(SCHEMA).key_by("channel")
            self.flow = keyed.apply_in_pandas_with_state(
                running(), "channel string, n bigint, total bigint", "n bigint, total bigint"
            )
        rows = -(-bids.num_rows // batches)
        self.pieces = [bids.slice(batch * rows, rows) for batch in range(batches)]
        if kind == "pandas":
            self.expected = totals(self.pieces)


def together(flow: pk.Flow, data: Path) -> pa.Table:
    """The rows of all sources as one tagged table, by time; those of each stay in the order in which they are."""
    rows, reached = {}, []
    for name, schema in flow.sources.items():
        table = pq.read_table(data / f"{name}.parquet")
        reached.append(np.maximum.accumulate(table["date_time"].to_numpy()))
        rows[name] = table.select(schema.names).to_struct_array().combine_chunks()

    def column(name: str) -> pa.Array:
        of = rows[name].type
        return pa.concat_arrays([part if one == name else pa.nulls(len(part), of) for one, part in rows.items()])

    return pa.table({name: column(name) for name in rows}).take(np.argsort(np.concatenate(reached), kind="stable"))


def numbering() -> Any:
    def number(rows: int | None, auction: int, *others: Any) -> Any:
        return (rows or 0) + 1, (auction, (rows or 0) + 1)

    return number


def running() -> Any:
    def add(key: tuple[str], frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        n, total = state.getOption or (0, 0)
        for frame in frames:
            n, total = n + len(frame), total + int(frame["price"].sum())
        state.update((n, total))
        yield pd.DataFrame({"channel": [key[0]], "n": [n], "total": [total]})

    return add


def totals(pieces: list[pa.Table]) -> Counter[tuple[Any, ...]]:
    """What `running` says of each channel after each piece in which it comes."""
    known: dict[str, tuple[int, int]] = {}
    told: Counter[tuple[Any, ...]] = Counter()
    for piece in pieces:
        for channel, rows in piece.to_pandas().groupby("channel"):
            n, total = known.get(channel, (0, 0))
            known[channel] = n + len(rows), total + int(rows["price"].sum())
            told[(channel, *known[channel])] += 1
    return told


class Schedule:
    """One query through one plan."""

    def __init__(self, cluster: Any, folder: Path, workload: Workload, deeds: list[Deed], workers: int) -> None:
        self.cluster, self.folder, self.workload = cluster, folder, workload
        self.deeds, self.done = list(deeds), []
        self.workers = workers
        self.engine: Any = None
        #: What the sink raises now, on purpose.
        self.failing: str | None = None
        self.timers: list[threading.Timer] = []
        (folder / "in").mkdir()
        for batch, piece in enumerate(workload.pieces):
            path = folder / "in" / f"part-{batch:05d}.parquet"
            pq.write_table(piece, path)
            os.utime(path, (1_600_000_000 + batch, 1_600_000_000 + batch))

    def take(self, batch: int, *moments: str) -> list[Deed]:
        """Deeds whose time has come; each comes once, however often a batch is computed."""
        due = [deed for deed in self.deeds if deed.batch == batch and deed.moment in moments]
        self.deeds = [deed for deed in self.deeds if deed not in due]
        self.done += due
        return due

    def do(self, deed: Deed) -> None:
        if deed.what == "rescale":
            # One at a time, and a killed executor's slots are missed for a while: refused, nothing changes.
            with suppressed():
                self.engine.rescale(deed.number)
        elif deed.what in ("member", "executor"):
            members = self.engine.members()
            if members:
                victim = members[deed.number % len(members)].pid
                with suppressed():
                    os.kill(victim if deed.what == "member" else executor_of(victim), signal.SIGKILL)
        else:
            self.failing = deed.what

    def sink(self, df: Any, batch: int) -> None:
        for deed in self.take(batch, "sink"):
            self.do(deed)
        self.fail()
        df.write.mode("overwrite").parquet(str(self.folder / "out" / f"batch_id={batch}"))
        for deed in self.take(batch, "written"):
            self.do(deed)
        self.fail()

    def fail(self) -> None:
        if self.failing is not None:
            raise OSError("as the schedule has it")

    def call(self, df: Any, batch: int) -> None:
        df = df.repartition(3)
        for deed in self.take(batch, "call"):
            if deed.what == "feed":
                df = df.mapInArrow(dying(deed.number - 1), df.schema)
            else:
                self.do(deed)
        for deed in self.take(batch, "delay"):
            timer = threading.Timer(deed.delay, self.do, (deed,))
            self.timers.append(timer)
            timer.start()
        self.function(df, batch)

    def run(self) -> Counter[tuple[Any, ...]]:
        """Until all batches are committed; the rows in the sink's folders and of the final epoch."""
        while True:
            with pk.Engine(self.cluster, workers=self.workers, bits=4, name="schedule") as self.engine:
                if self.goes_through():
                    rest = to_table(self.engine.finish(self.function.query_id)) if self.workload.finishes else None
                    break
                self.workers = self.workers % 3 + 1
        told = [pq.read_table(path, partitioning=None) for path in sorted((self.folder / "out").iterdir())]
        assert len(told) == len(self.workload.pieces)
        return bag(*told) if rest is None else bag(*told, rest)

    def goes_through(self) -> bool:
        """Run on this engine; False when the schedule wants another one."""
        self.function = self.engine.foreach_batch(self.workload.flow, self.sink)
        while True:
            read = self.cluster.readStream.schema(self.workload.schema).option("maxFilesPerTrigger", 1)
            writer = read.parquet(str(self.folder / "in")).writeStream.foreachBatch(self.call)
            writer = writer.option("checkpointLocation", str(self.folder / "check"))
            query = writer.trigger(availableNow=True).start()
            try:
                query.awaitTermination(120)
                assert not query.isActive, "it came to an end"
                return True
            except Exception:
                if self.failing is None:
                    raise
            finally:
                query.stop()
                for timer in self.timers:
                    timer.cancel()
                    timer.join()
            failed, self.failing = self.failing, None
            if failed == "engine":
                return False


def suppressed() -> Any:
    """What may be refused just now: who is to die is dead, who is to come finds no slot."""
    return contextlib.suppress(EngineError, ProcessLookupError, FileNotFoundError, LookupError)


def dying(partition: int) -> Any:
    """The first attempt at a partition ends with its process, when its rows are sent."""

    def dies(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.attemptNumber() == 0 and context.partitionId() == partition:
            os.kill(os.getpid(), signal.SIGKILL)

    return dies


def check(cluster: Any, folder: Path, data: Path, seed: int, batches: int) -> None:
    chosen = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    workload, deeds, workers = Workload(kind, data, chosen, batches), plan(chosen, batches), chosen.randint(1, 3)
    print(f"seed {seed}: {workload.name}, {workers} workers", *deeds, sep="\n  ")
    schedule = Schedule(cluster, folder, workload, deeds, workers)
    assert schedule.run() == workload.expected
    shutil.rmtree(folder)


@pytest.mark.parametrize("seed", range(len(KINDS)))
def test_a_schedule(cluster: Any, nexmark_data: Path, tmp_path: Path, seed: int) -> None:
    check(cluster, tmp_path, nexmark_data, seed, batches=4)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_a_hundred_schedules(cluster: Any, nexmark_data: Path, tmp_path: Path, seed: int) -> None:
    check(cluster, tmp_path, nexmark_data, seed, batches=6)
