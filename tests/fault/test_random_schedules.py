"""NEXMark under random schedules of kills, failures and rescales: the output is that of an undisturbed run, row by row.

A seed decides what is done to which batch at which moment. In each schedule somebody dies while a batch before the last
is fed (tasks hold its rows back until then), and the engine goes to another number of workers before another batch:
that both happened is asserted. What is done besides comes when it comes, and may come to nothing. The sink overwrites a
folder for each batch. ``--long`` runs a hundred longer ones; the name of a test that failed has the seed, and its
output what was to be done.
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
from engine_support import Gate, bag, in_thread, wait_for
from penstock.errors import EngineError, SlotsError
from penstock.spark._session.collect import to_table
from penstock.workloads import nexmark

pytestmark = [pytest.mark.spark, pytest.mark.fault, pytest.mark.timeout(600)]

COLUMNS = ("auction", "bidder", "price", "channel", "date_time")
SCHEMA = "auction bigint, bidder bigint, price bigint, channel string, date_time bigint"

#: Of one source; of several: joins for ever, within an interval and in windows, and steps behind them.
WINDOWS = ("q5_beam", "q5_mega", "q7_beam", "q7_mega")
JOINS = ("q3", "winning_bids", "q4_stream", "q6_stream", "q8_tumble", "q8_horizon")
KINDS = ("native", "python", "pandas", "joins")
#: Who dies while a batch is fed. Those of Python and pandas are small: after the first they come by way of the driver.
VICTIMS = ("feed", "member", "executor")


class Deed(NamedTuple):
    """What is done to a batch, once."""

    batch: int
    #: "call" (before it begins), "feeding", "delay" (so many seconds into it), "sink" or "written".
    moment: str
    #: "member", "executor", "feed" (they die), "rescale", "sink" (it fails), "engine" (another one goes on).
    what: str
    #: Which member or partition, or how many workers further in 1, 2, 3.
    number: int
    delay: float = 0.0


def plan(chosen: random.Random, batches: int, victim: str) -> list[Deed]:
    """A kill, a rescale, and some deeds besides; not more than batches."""
    kill = Deed(chosen.randrange(batches - 1), "feeding", victim, chosen.randint(1, 3))
    rescale = Deed(chosen.randrange(batches - 1), "call", "rescale", chosen.randint(1, 2))
    weights = {"member": 5, "rescale": 5, "feed": 2, "sink": 2, "engine": 2}
    if batches > 4:
        weights["executor"] = 1  # costs ten seconds
    deeds = [kill, rescale]
    for _ in range(chosen.randint(0, batches - 2)):
        [what] = chosen.choices(list(weights), list(weights.values()))
        moment = chosen.choice(("call", "feeding", "delay", "delay", "sink", "written"))
        first, most = 0, 3
        if what in ("sink", "engine"):
            moment = chosen.choice(("sink", "written"))
        if what == "feed":
            moment = "feeding"
        if what == "rescale":
            # One at a time: none keeps the first one off.
            first, most, moment = rescale.batch + 1, 2, chosen.choice(("delay", "sink", "written"))
        deeds.append(
            Deed(chosen.randrange(first, batches), moment, what, chosen.randint(1, most), chosen.uniform(0, 0.6))
        )
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
        self.deeds = list(deeds)
        self.workers = workers
        self.engine: Any = None
        #: What the sink raises now, on purpose.
        self.failing: str | None = None
        self.timers: list[threading.Timer] = []
        #: Who died while which batch was fed, and the rescales that began, with the number of workers before.
        self.killed: list[tuple[str, int]] = []
        self.rescales: list[tuple[int, Any]] = []
        (folder / "in").mkdir()
        for batch, piece in enumerate(workload.pieces):
            path = folder / "in" / f"part-{batch:05d}.parquet"
            pq.write_table(piece, path)
            os.utime(path, (1_600_000_000 + batch, 1_600_000_000 + batch))

    def take(self, batch: int, moment: str) -> list[Deed]:
        """Deeds whose time has come; each comes once, however often a batch is computed."""
        due = [deed for deed in self.deeds if deed.batch <= batch and deed.moment == moment and not self.waits(deed)]
        self.deeds = [deed for deed in self.deeds if deed not in due]
        return due

    def waits(self, deed: Deed) -> bool:
        """Another engine would be the end of a rescale that is under way."""
        return deed.what == "engine" and any(not rescale.done for _, rescale in self.rescales)

    def do(self, deed: Deed) -> None:
        if deed.what == "rescale":
            self.rescale(deed)
        elif deed.what in ("member", "executor"):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError, LookupError):  # somebody else was faster
                self.kill(deed)
        else:
            self.failing = deed.what

    def kill(self, deed: Deed) -> Any:
        members = wait_for(self.engine.members, what="somebody is there")
        victim = members[deed.number % len(members)]
        os.kill(victim.pid if deed.what == "member" else executor_of(victim.pid), signal.SIGKILL)
        return victim

    def rescale(self, deed: Deed) -> bool:
        """False where the slots of a killed executor are missed."""
        before = self.engine.workers
        try:
            self.rescales.append((before, self.engine.rescale((before - 1 + deed.number) % 3 + 1)))
        except SlotsError:
            return False
        except EngineError:
            assert deed.moment != "call", "one at a time"
        return True

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
            if deed.what == "rescale":
                wait_for(lambda deed=deed: self.rescale(deed), 120, "the slots of an executor are back")
                _, rescale = self.rescales[-1]
                wait_for(lambda rescale=rescale: len(self.engine.members()) >= rescale.workers, 120, "they have come")
            else:
                self.do(deed)
        with contextlib.ExitStack() as beside:
            hits = []
            for deed in self.take(batch, "feeding"):
                if deed.what == "feed":
                    died = self.folder / f"died-{batch}-{deed.number}"
                    df = df.mapInArrow(dying(deed.number - 1, str(died)), df.schema)
                    hits.append(lambda died=died: died.exists() and self.killed.append(("feed", batch)))
                else:
                    gate = Gate(self.folder, f"gate-{batch}-{len(hits)}")
                    gate.close()
                    df = df.mapInArrow(held(gate.function()), df.schema)
                    hit = beside.enter_context(in_thread(lambda deed=deed, gate=gate: self.hit(deed, batch, gate)))
                    hits.append(hit)
            for deed in self.take(batch, "delay"):
                timer = threading.Timer(deed.delay, self.do, (deed,))
                self.timers.append(timer)
                timer.start()
            try:
                self.function(df, batch)
            finally:
                for hit in hits:
                    hit()

    def hit(self, deed: Deed, batch: int, gate: Gate) -> None:
        """Kill somebody while tasks hold the rows of a batch back."""
        try:
            wait_for(gate.reached.exists, what="the batch is fed")
            victim = self.kill(deed)
            wait_for(lambda: victim.lost is not None, what="the loss is noticed")
            self.killed.append((deed.what, batch))
        finally:
            gate.open()

    def run(self) -> Counter[tuple[Any, ...]]:
        """Until all batches are committed; the rows in the sink's folders and of the final epoch."""
        while True:
            with pk.Engine(self.cluster, workers=self.workers, bits=4, name="schedule") as self.engine:
                if self.goes_through():
                    for _, rescale in self.rescales:
                        if not rescale.done:
                            rescale.wait(120)
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
                query.awaitTermination(300)
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


def held(waits: Any) -> Any:
    def holds(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from map(waits, batches)

    return holds


def dying(partition: int, mark: str) -> Any:
    """The first attempt at a partition ends with its process, when its rows are sent."""

    def dies(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.attemptNumber() == 0 and context.partitionId() == partition:
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return dies


def check(cluster: Any, folder: Path, data: Path, seed: int, batches: int) -> None:
    chosen = random.Random(seed)
    kind, victim = KINDS[seed % len(KINDS)], VICTIMS[seed % len(VICTIMS)]
    workload, deeds = Workload(kind, data, chosen, batches), plan(chosen, batches, victim)
    workers = chosen.randint(1, 3)
    print(f"seed {seed}: {workload.name}, {workers} workers", *deeds, sep="\n  ")
    schedule = Schedule(cluster, folder, workload, deeds, workers)
    assert schedule.run() == workload.expected
    assert any(what == victim and batch < batches - 1 for what, batch in schedule.killed), schedule.killed
    before, rescale = schedule.rescales[0]
    assert rescale.done and rescale.error is None and rescale.progress.members == rescale.workers != before, rescale
    shutil.rmtree(folder)


@pytest.mark.parametrize("seed", range(3))
def test_a_schedule(cluster: Any, nexmark_data: Path, tmp_path: Path, seed: int) -> None:
    check(cluster, tmp_path, nexmark_data, seed, batches=4)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_a_hundred_schedules(cluster: Any, nexmark_data: Path, tmp_path: Path, seed: int) -> None:
    check(cluster, tmp_path, nexmark_data, seed, batches=6)
