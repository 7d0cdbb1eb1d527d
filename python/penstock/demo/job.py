"""The demo's run itself, from starting Spark to the report, and its moment-to-moment view."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

import penstock as pk
from penstock import _cpus, _native
from penstock._durations import duration_text
from penstock._live import Move, Snapshot, WorkerLoad
from penstock.cli.common import whole_file, writing
from penstock.demo.expected import (
    check_updates,
    compare,
    compare_tables,
    expected_bidders,
    expected_hot_items,
    latest,
)
from penstock.demo.feeder import FILES_PER_SECOND, SCHEMA, Feeder
from penstock.report import Check
from penstock.report._html import no_picture, save_page
from penstock.report._timeline import Epoch, Timeline, per_worker, quantiles, size_text
from penstock.spark._session.collect import to_table
from penstock.spark._session.java import ensure_java
from penstock.spark._session.session import private_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["FILES", "DemoConfig", "Interrupted", "Job", "Outcome"]

WORKERS, MOST_WORKERS = 2, 3
SIZE_MS, EVERY_MS = 10_000, 2_000
"""The window of hot items: ten seconds long, one every two seconds."""

BIDDERS = "bidders"
"""The query with the large state, a key for every bidder."""

FILES = ("timeline.json", "report.html", "timeline.png")
"""What the report is."""

_DONE = "done"
_SAMPLES_PER_SECOND = 2
_WARM_BATCHES = 3
"""Batches of each query before the clock starts: the first compile and take what came meanwhile."""
_TIMEOUT_S = 120
_BEFORE_S, _BEHIND_S = 30.0, 10.0
"""What starting and warming up, and draining, comparing and the report take on two quiet cores."""


class Interrupted(Exception):
    """The run was asked to stop."""


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """What to run: seconds of input, bids per second, keys of the larger state, 2**bits bins, where the report goes."""

    seconds: float = 20.0
    rate: int = 20_000
    bidders: int = 1_000_000
    bits: int = 8
    output: Path = Path("out")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: what was checked, the measurements, the files of the report, and why it has no picture."""

    checks: Sequence[Check]
    timeline: Timeline
    files: Sequence[Path]
    no_picture: str | None = None

    @property
    def passed(self) -> bool:
        """Whether every check holds."""
        return bool(self.checks) and all(check.passed for check in self.checks)


@dataclass(slots=True)
class _Query:
    """One streaming query: its flow, what its sink has received per batch, and its handle."""

    name: str
    flow: Any
    received: dict[int, pa.Table] = field(default_factory=dict)
    handle: Any = None

    def sink(self, frame: Any, batch_id: int) -> None:
        """Keep the output of a batch; a batch that Spark replays replaces what it gave before."""
        self.received[batch_id] = to_table(frame)

    def output(self) -> pa.Table:
        """All output so far, batches in order."""
        return pa.concat_tables([self.received[batch] for batch in sorted(self.received)])


@dataclass(slots=True)
class _Step:
    """One planned migration, kill or rescale: when in the run, and what the view calls it.

    ``to`` is the worker to which the bins of worker 0 move, None for back where they were; of a rescale how many
    workers there are to be.
    """

    at: float
    kind: Literal["migration", "kill", "rescale"]
    what: str
    strategy: str = ""
    to: int | None = None
    started: float = 0.0
    ended: float = 0.0
    bins: int = 0
    bytes: int = 0
    state: Any = "planned"


@dataclass(slots=True)
class Job:
    """The run itself; every field that the view reads is replaced, never changed in place."""

    config: DemoConfig
    stop: threading.Event
    outcome: Outcome | None = None
    error: BaseException | None = None
    _phase: str = "preparing"
    _begun: float = field(default_factory=time.monotonic)
    _streaming_at: float = 0.0
    _streaming_since: float = 0.0
    _fed_s: float = 0.0
    _feeder: Feeder | None = None
    _starting: Any = None
    _engine: Any = None
    _lives: set[tuple[Any, ...]] = field(default_factory=set)
    _same: bool = False
    _runs: list[str] = field(default_factory=list)
    _pids: tuple[int, int] = (0, 0)
    _timeline: Timeline = field(default_factory=Timeline)
    _steps: list[_Step] = field(default_factory=list)

    def run(self) -> None:
        try:
            with contextlib.ExitStack() as cleanup:
                self.outcome = self._run(cleanup)
        except BaseException as error:
            if not self.stop.is_set():
                self.error = error
            elif self.outcome is None:  # else the report is written, and what was ended has been interrupted
                self.error = Interrupted()

    def interrupt(self) -> None:
        """Wake what does not look at the event: an engine that waits for its workers."""
        if self._starting is not None:
            self._starting.close()

    def _run(self, cleanup: contextlib.ExitStack) -> Outcome:
        config = self.config
        folder = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        bids = folder / "bids"
        bids.mkdir()
        self._steps = _plan(config.seconds)
        queries = _queries()

        self._enter("starting Spark")
        java = str(ensure_java())
        # Three task slots are for the resident workers, two for the queries.
        settings = {"spark.sql.streaming.numRecentProgressUpdates": "10000"}
        spark = cleanup.enter_context(private_session(folder, "penstock demo", MOST_WORKERS + 2, settings))
        self._check()
        self._enter("starting the workers")
        engine = pk.Engine(spark, workers=WORKERS, bits=config.bits, name="demo")
        self._starting = engine
        cleanup.enter_context(engine)
        self._starting, self._engine = None, engine
        self._check()
        for query in queries:
            frame = spark.readStream.schema(SCHEMA).parquet(str(bids))
            writer = frame.writeStream.queryName(query.name).option(
                "checkpointLocation", str(folder / "checkpoints" / query.name)
            )
            query.handle = writer.foreachBatch(engine.foreach_batch(query.flow, query.sink)).start()
            cleanup.callback(_stop_query, query.handle)

        self._feeder = Feeder(bids, config.rate, config.bidders)
        cleanup.callback(self._feeder.stop)
        self._feeder.start()
        self._enter("warming up")
        self._stream(engine, queries)
        self._enter("draining the input")
        self._drain(queries)
        self._enter("closing the last windows")
        self._finish(engine, queries)
        self._sample(engine)
        measured = self._measured(engine, queries, spark, java)
        self._enter("comparing the output")
        checks = self._verify(bids, queries, measured)
        self._enter("writing the report")
        measured.checks = list(checks)
        files, why = _write(measured, config.output)
        # Who stops it now has the report, and hears the verdict.
        self._phase = _DONE
        return Outcome(checks, measured, files, why)

    # Phases

    def _stream(self, engine: Any, queries: Sequence[_Query]) -> None:
        """Let the queries run, and do what is planned when it is time; the clock starts when they are warm."""
        assert self._feeder is not None
        homes: dict[str, list[int]] = {}
        pending = list(self._steps)
        since = 0.0
        while not homes or pending or time.monotonic() - since < self.config.seconds:
            self._check(queries)
            self._sample(engine)
            if self._taken(queries, self.config.bidders):
                self._feeder.go_on()
            if not homes and self._warm(queries):
                # All keyed steps of a query have the same owners.
                homes = {query.name: list(engine.owners(query.handle)[0]) for query in queries}
                self._lives = _lives(engine)
                self._runs = [str(query.handle.runId) for query in queries]
                since, self._streaming_at = time.monotonic(), time.time()
                self._streaming_since = since
                self._enter("streaming")
            if homes and pending and time.monotonic() - since >= pending[0].at:
                self._take(pending.pop(0), engine, queries, homes)
            self.stop.wait(1 / _SAMPLES_PER_SECOND)
        self._feeder.stop()
        self._fed_s = time.monotonic() - since

    def _warm(self, queries: Sequence[_Query]) -> bool:
        """Whether every query has compiled its plans, and taken a bid of every bidder and more."""
        return self._taken(queries, self.config.bidders + 1) and all(
            len(query.received) >= _WARM_BATCHES for query in queries
        )

    def _taken(self, queries: Sequence[_Query], bids: int) -> bool:
        """Whether every query has taken so many bids."""
        epochs = self._timeline.epochs
        return all(sum(e.rows for e in epochs if e.query == query.name) >= bids for query in queries)

    def _take(self, step: _Step, engine: Any, queries: Sequence[_Query], homes: Mapping[str, list[int]]) -> None:
        """Do what is planned, and wait for its end while the queries run."""
        if step.kind == "kill":
            self._same = self._lives == _lives(engine)
        step.started = time.monotonic()
        step.state = "moving"
        if step.kind == "migration":
            self._migrate(engine, queries, step, homes)
        elif step.kind == "kill":
            self._kill(engine, queries, step)
        else:
            self._rescale(engine, queries, step)
        step.ended = time.monotonic()
        step.state = "done"

    def _until(self, engine: Any, queries: Sequence[_Query], over: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not over():
            self._check(queries)
            self._sample(engine)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} took more than {_TIMEOUT_S} s")
            self.stop.wait(0.05)

    def _migrate(self, engine: Any, queries: Sequence[_Query], step: _Step, homes: Mapping[str, list[int]]) -> None:
        """Move the bins of worker 0 of every query to another worker, or back to where they were."""
        handles = []
        for query in queries:
            home = homes[query.name]
            target = home if step.to is None else [step.to] * len(home)
            handles.append(engine.migrate(to=target, strategy=step.strategy, query=query.handle))
        self._until(engine, queries, lambda: all(handle.done for handle in handles), "a migration")
        for handle in handles:
            handle.wait(timeout=10)
        step.bins = sum(handle.report.bins for handle in handles)
        step.bytes = sum(handle.report.bytes for handle in handles)

    def _kill(self, engine: Any, queries: Sequence[_Query], step: _Step) -> None:
        """Kill a worker process, and wait until another serves and every query has had a batch with it."""
        gone = engine.members()[-1]
        step.what = f"-9 of a worker (pid {gone.pid})"
        os.kill(gone.pid, signal.SIGKILL)
        self._until(engine, queries, lambda: _replaced(engine, gone) is not None, "replacing a worker")
        self._pids = gone.pid, _replaced(engine, gone) or 0
        since = time.time()
        self._until(engine, queries, lambda: self._all_ran_since(queries, since), "going on after a worker's death")

    def _rescale(self, engine: Any, queries: Sequence[_Query], step: _Step) -> None:
        """Go to another number of workers."""
        assert step.to is not None
        handle = engine.rescale(step.to)
        self._until(engine, queries, lambda: handle.done, "a rescale")
        handle.wait(timeout=10)
        step.bins = handle.progress.moved

    def _all_ran_since(self, queries: Sequence[_Query], since: float) -> bool:
        ran = {epoch.query for epoch in self._timeline.epochs if epoch.started >= since}
        return ran >= {query.name for query in queries}

    def _drain(self, queries: Sequence[_Query]) -> None:
        """Wait until both queries have taken all that was written, then stop them."""
        waiting = [
            threading.Thread(target=_take_everything, args=(query.handle,), name="penstock-demo-drain", daemon=True)
            for query in queries
        ]
        for thread in waiting:
            thread.start()
        deadline = time.monotonic() + _TIMEOUT_S
        while any(thread.is_alive() for thread in waiting):
            self._check(queries)
            self._sample(self._engine)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the queries did not take all input within {_TIMEOUT_S} s")
            self.stop.wait(1 / _SAMPLES_PER_SECOND)
        self._check(queries)
        for query in queries:
            query.handle.stop()

    def _finish(self, engine: Any, queries: Sequence[_Query]) -> None:
        """End of input: what was still open comes out."""
        for query in queries:
            rest = engine.finish(query.handle)
            query.received[max(query.received, default=-1) + 1] = to_table(rest)
            self._check()

    def _verify(self, folder: Path, queries: Sequence[_Query], measured: Timeline) -> list[Check]:
        bids = pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("bids-*.parquet"))])
        hot, bidders = (query.output() for query in queries)
        produced = Counter(zip(*(column.to_pylist() for column in hot.columns), strict=True))
        planned, killed, rescaled = (
            [step for step in self._steps if step.kind == kind] for kind in ("migration", "kill", "rescale")
        )
        done = [step for step in planned if step.state == "done"]
        moved = len(done) == len(planned) and all(step.bins and step.bytes for step in done)
        went_on = self._runs == [str(query.handle.runId) for query in queries]
        return [
            compare(expected_hot_items(bids, SIZE_MS, EVERY_MS), produced, "hot items"),
            compare_tables(expected_bidders(bids), latest(bidders, "bidder", "bids"), "what bidders bid"),
            check_updates(queries[1].received, "bidder", "bids", "each update once"),
            Check(
                "moves without a restart",
                moved and self._same,
                f"{'' if self._same else 'a worker or its generation changed; '}"
                f"{len(done)} of {len(planned)} migrations of {len(queries)} queries,"
                f" {sum(step.bins for step in done):,} bins and {size_text(sum(step.bytes for step in done))}"
                f" moved while {bids.num_rows:,} bids passed",
            ),
            Check(
                "a killed worker costs no query",
                went_on and all(step.state == "done" for step in killed),
                f"{'' if went_on else 'a query was started again; '}"
                f"pid {self._pids[0]} was killed with SIGKILL, pid {self._pids[1]} has its place; {_cost(measured)}",
            ),
            Check(
                "more and fewer workers while it runs",
                went_on and all(step.state == "done" and step.bins for step in rescaled),
                "; ".join(
                    f"{step.what}: {step.bins:,} bins moved in {duration_text(step.ended - step.started)}"
                    for step in rescaled
                ),
            ),
        ]

    # What it looks like

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._check()

    def _check(self, queries: Sequence[_Query] = ()) -> None:
        """Raise when the run was interrupted or something in it has failed."""
        if self.stop.is_set():
            raise Interrupted
        if self._feeder is not None and self._feeder.error is not None:
            raise self._feeder.error
        for query in queries:
            if not query.handle.isActive:
                error = query.handle.exception()
                raise RuntimeError(f"query {query.name} ended: {error}") from error

    def _sample(self, engine: Any) -> None:
        self._timeline = _converted(engine.timeline())

    def _measured(self, engine: Any, queries: Sequence[_Query], spark: SparkSession, java: str) -> Timeline:
        timeline = _converted(engine.timeline()).since(self._streaming_at)
        timeline.epochs = _with_sparks_share(timeline.epochs, {query.name: query.handle for query in queries})
        timeline.title = f"penstock demo: NEXMark bids, {WORKERS} to {MOST_WORKERS} workers"
        timeline.conditions = {
            "input": (
                f"one bid of each of {self.config.bidders:,} bidders, then {self.config.rate:,} bids/s of random ones"
                f" for {self._fed_s:.1f} s ({self.config.seconds:g} s were asked for), {FILES_PER_SECOND} files/s"
            ),
            "hot items": f"windows of {SIZE_MS / 1000:g} s every {EVERY_MS / 1000:g} s",
            "bins": f"{1 << self.config.bits} per query",
            "penstock": f"{pk.__version__}, build of profile {_native.profile()}",
            "Spark": spark.version,
            "Java": java,
            "Python": platform.python_version(),
            "pyarrow": pa.__version__,
            "machine": f"{platform.system()} {platform.machine()}, {_cpus.of_process()} cores",
        }
        return timeline

    def _total_s(self) -> float:
        """About how long the run takes: better known when Spark is up and the workers are warm."""
        before = self._streaming_since - self._begun if self._streaming_since else _BEFORE_S
        return before + self.config.seconds + _BEHIND_S

    def snapshot(self) -> Snapshot:
        """This moment, for the live view."""
        now = time.monotonic()
        timeline, horizon = self._timeline, time.time() - 3
        recent = [e for e in timeline.epochs if e.ended > horizon]
        slices = [(s.latency_ns, s.rows) for s in timeline.slices if s.ended > horizon]
        p50, p99 = quantiles(slices, (0.5, 0.99)) if slices else (None, None)
        return Snapshot(
            title="penstock demo: hot items and bidders over NEXMark bids",
            phase=self._phase,
            elapsed_s=now - self._begun,
            total_s=now - self._begun if self._phase == _DONE else self._total_s(),
            rows=timeline.rows,
            rows_per_s=sum(e.rows for e in recent) / 3,
            queries=len({e.query for e in timeline.epochs}),
            epochs=len(timeline.epochs),
            epoch_s=[e.seconds for e in sorted(timeline.epochs, key=_ended)[-120:]],
            workers=_loads(timeline),
            moves=[
                Move(
                    what=step.what,
                    strategy=step.strategy,
                    kind=step.kind,
                    state=step.state,
                    bins=step.bins,
                    bytes=step.bytes,
                    seconds=(step.ended or now) - step.started,
                )
                for step in self._steps
            ],
            slice_p50_s=None if p50 is None else p50 / 1e9,
            slice_p99_s=None if p99 is None else p99 / 1e9,
        )


def _plan(seconds: float) -> list[_Step]:
    """Two migrations, a kill and two rescales, spread over the run."""
    return [
        _Step(seconds * 0.08, "migration", "half of the state to worker 1", "all-at-once", 1),
        _Step(seconds * 0.22, "migration", "and back", "batched"),
        _Step(seconds * 0.36, "kill", "-9 of a worker"),
        _Step(seconds * 0.58, "rescale", f"from {WORKERS} to {MOST_WORKERS} workers", to=MOST_WORKERS),
        _Step(seconds * 0.80, "rescale", f"from {MOST_WORKERS} to {WORKERS} workers", to=WORKERS),
    ]


def _replaced(engine: Any, gone: Any) -> int | None:
    """The process that has the place of a member that is gone."""
    return next((member.pid for member in engine.members() if member.slot == gone.slot and member.id != gone.id), None)


def _queries() -> tuple[_Query, _Query]:
    bids = pk.Flow(SCHEMA, event_time="date_time", lateness="1s").key_by("auction")
    window = pk.sliding(f"{SIZE_MS}ms", every=f"{EVERY_MS}ms")
    hot = bids.window(window).agg(num=pk.count()).top(1, by="num", per="window")
    per_bidder = pk.Flow(SCHEMA).key_by("bidder")
    bidders = per_bidder.agg(bids=pk.count(), spent=pk.sum("price"), highest=pk.max("price"), lowest=pk.min("price"))
    return _Query("hot items", hot), _Query(BIDDERS, bidders)


def _cost(measured: Timeline) -> str:
    """What the death of the worker cost who waits for a batch: by Spark's own clock, from its trigger to its commit."""
    lost = next((change for change in measured.changes if change.kind == "lost"), None)
    hit = None if lost is None else measured.hit(lost)
    if hit is None:
        return "no batch ran meanwhile"
    usual = median(epoch.whole_s for epoch in measured.epochs if epoch.query == hit.query)
    return f"a batch of {hit.query} took {duration_text(hit.whole_s)} then, and {duration_text(usual)} in the median"


def _lives(engine: Any) -> set[tuple[Any, ...]]:
    """Which process and which generation serves each worker of each query."""
    lives = engine.stats().select(["query", "worker", "pid", "generation"])
    return {tuple(life.values()) for life in lives.to_pylist()}


def _converted(timeline: Any) -> Timeline:
    """The engine's timeline as ours to change."""
    return Timeline(
        title=timeline.title,
        epochs=list(timeline.epochs),
        slices=list(timeline.slices),
        migrations=list(timeline.migrations),
        workers=list(timeline.workers),
        conditions=dict(timeline.conditions),
        changes=list(timeline.changes),
    )


def _ended(epoch: Epoch) -> float:
    return epoch.ended


def _loads(timeline: Timeline) -> list[WorkerLoad]:
    """Each worker's latest load, all queries together; the rate over the last seconds."""
    horizon = time.time() - 3
    latest = max((sample.at for sample in timeline.workers), default=0.0)
    loads = []
    for worker, samples in per_worker(timeline.workers).items():
        last = samples[-1]
        if last.at < latest - 1.5:
            continue  # it has gone
        first = next((s for s in samples if s.at >= horizon), last)
        span = last.at - first.at
        loads.append(
            WorkerLoad(
                worker=worker,
                bins=last.bins,
                keys=last.keys,
                state_bytes=last.state_bytes,
                rows_per_s=(last.rows - first.rows) / span if span > 0 else 0.0,
            )
        )
    return loads


def _write(timeline: Timeline, output: Path) -> tuple[list[Path], str | None]:
    """Write the report; returns its files, and why there is no picture."""
    output.resolve().mkdir(parents=True, exist_ok=True)  # a link may lead to what is not there yet
    kept, page, picture = (output / name for name in FILES)
    with whole_file(kept) as part, writing(kept):
        part.write_text(timeline.to_json(), encoding="utf-8")
    with whole_file(page) as part, writing(page):
        why = save_page(timeline, part)
    try:
        from penstock.report._plot import latency_png

        drawn = latency_png(timeline)
    except Exception as error:
        # A picture of another run does not stand beside the page, which says so.
        picture.unlink(missing_ok=True)
        return [kept, page], why or no_picture(error)
    with whole_file(picture) as part, writing(picture):
        part.write_bytes(drawn)
    return [kept, page, picture], why


def _with_sparks_share(epochs: Sequence[Epoch], handles: Mapping[str, Any]) -> list[Epoch]:
    """The epochs with what Spark spent on each batch beside us, from its own progress reports."""
    spent: dict[tuple[str, int], float] = {}
    for name, handle in handles.items():
        for progress in handle.recentProgress:
            duration = progress["durationMs"]
            if "addBatch" in duration:
                spent[name, progress["batchId"]] = duration["triggerExecution"] / 1e3
    return [
        dataclasses.replace(e, spark_s=max(0.0, spent.get((e.query, e.epoch), e.seconds) - e.seconds)) for e in epochs
    ]


def _take_everything(handle: Any) -> None:
    # An error ends the query, which the job sees by itself.
    with contextlib.suppress(Exception):
        handle.processAllAvailable()


def _stop_query(handle: Any) -> None:
    with contextlib.suppress(Exception):
        handle.stop()
