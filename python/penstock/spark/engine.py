"""The engine: keyed state that stays resident beside Structured Streaming queries, and moves while they run.

Owns: the life of everything that an engine starts (registry, residents, threads) and the public surface. What is
behind it: `executor` (the thread of the protocol, which decides), `hub` (registry), `calls` (what members are asked),
`startup` and `residents` (members), `decommission` (executors that go), `commits` (Spark's commit log),
`batch_function` (what Spark calls), `queries` and `query` (calls), `record` (figures), `moves` and `migrate` (moves),
`ended` (queries that have ended), `handles` (the open engines).

Life of a batch: Spark calls the function made by `Engine.foreach_batch`; feed tasks stage the batch's rows at the
members; the receipts that Spark delivers are the commit; the members run the epoch and freeze its outputs; the
sink gets them as a DataFrame, as often as it wants; the next batch drops them.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock._autobalance import Autobalance, Rules
from penstock._coroutines import require_called, require_plain
from penstock._durations import Timeout, parse_timeout
from penstock._figures import (
    ENGINE_MOVES,
    ENGINE_WORKERS,
    ScopeStats,
    bins_table,
    loads_table,
    scope_stats,
    to_table,
)
from penstock._migration import Cut, evened, parse_by, parse_epoch, parse_tolerance
from penstock._options import whole, yes_or_no
from penstock._parts import Bins, Parts
from penstock._sizes import parse_bytes
from penstock._storage import open_storage, shown
from penstock.errors import ConfigError, EngineError, ForkError, PenstockError
from penstock.spark._engine import handles, interrupts
from penstock.spark._engine.autobalance import Balanced
from penstock.spark._engine.batch_function import OWN_CHECKPOINT, BatchFunction, Sink
from penstock.spark._engine.calls import Calls
from penstock.spark._engine.checkpoints import Checkpoints
from penstock.spark._engine.commits import Commits
from penstock.spark._engine.decommission import Decommissions
from penstock.spark._engine.ended import Ended
from penstock.spark._engine.executor import Executor
from penstock.spark._engine.hub import Hub, Member
from penstock.spark._engine.journal import Journal
from penstock.spark._engine.metrics import Sample, page
from penstock.spark._engine.migrate import Migration
from penstock.spark._engine.moves import Moves
from penstock.spark._engine.program import Program
from penstock.spark._engine.queries import Queries
from penstock.spark._engine.query import Query, Setup
from penstock.spark._engine.record import Recorder
from penstock.spark._engine.rescale import Rescale, Rescales
from penstock.spark._engine.residents import Residents, require_lasting
from penstock.spark._engine.scrape import Scrape, parse_address
from penstock.spark._engine.startup import Startup
from penstock.spark._session.guard import require_flow, require_session
from penstock.spark._tasks.files import require_files
from penstock.spark._tasks.place import Secret
from penstock.spark._tasks.slots import capacity, free_slots, held_slots, require_slots

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from penstock._flow import Flow
    from penstock.report._timeline import Timeline

__all__ = ["Engine", "engines"]

log = logging.getLogger(__name__)

_NUMBERS = itertools.count(1)
#: Engines that start at once see one another's slots.
_TAKING = threading.Lock()


class Engine:
    """Resident workers on Spark that hold keyed state for streaming queries.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        A classic session. The engine lives at most as long as its context: it closes itself when that has been stopped.
    workers : int, default 2
        Resident processes; each holds one task slot for the engine's life.
    threads : int, default 1
        Worker threads in each process. Workers are numbered by thread, in `migrate`, `owners`, `bins` and `stats`: with
        two threads the first process has workers 0 and 1, the second 2 and 3.
    bits : int, default 8
        The state is cut into ``2 ** bits`` bins; at most 20.
    name : str, optional
        For job descriptions, threads and messages.
    start_timeout : float, str or datetime.timedelta, default 300.0
        Seconds to wait for task slots that the cluster may still offer.
    registry_port : int, default 0
        Port at the driver that members dial; 0 takes any.
    window : int, default 8
        Slices of a batch, of at most `slice_rows` rows, that may be under way at once. In flows that need the order of
        rows (`stateful_map`) also what a worker does ahead of its turn, of functions before the first key.
    slice_rows : int, default 16_384
        Greatest size of a slice; smaller slices let bins move sooner.
    staging_memory : int or str, optional
        Memory of each resident process for rows that wait for their epoch, and for results that wait for the sink:
        bytes, or a size such as "256m". What is beyond it goes to files in the executor's local directories
        (``spark.local.dir``). Default an eighth of the limit on the process: the least of
        ``spark.executor.pyspark.memory``, ``spark.executor.memoryOverhead``, the container's limit without the JVM,
        and half of the machine's memory; from 16 MiB to 1 GiB.
    staging_folders : sequence of str, optional
        Directories for these files on every executor, used in turn; default the executor's local directories.
    member_timeout : float, str or datetime.timedelta, default 60.0
        Seconds after which a resident process that is connected but silent (stopped, hung, on a host that
        vanished) counts as lost; at least 0.5. One that dies is noticed at once. Feeds and reads of results wait no
        longer for it.
    linger : float, str or datetime.timedelta, default 300.0
        Seconds for which a query that has ended and cannot come back is kept for `finish`; see `drop`.
    keep : int, default 1
        Of durable state, manifests that are kept below the last batch that Spark has committed; at least 1.
    takeover : bool, default False
        Take over checkpoints that another engine serves; it is shut out from then on. A sink of it that runs already
        may still write.
    tls : {"auto", "always"}, default "auto"
        Which connections between driver, members and tasks are encrypted (TLS 1.3, certificates of the engine's own
        authority at both ends): those that leave a host, or all.
    retry_sink : bool, default True
        Whether the sink of a batch may be called again in the same batch when a worker was lost meanwhile.
    metrics : str, optional
        ``"host:port"`` at which the driver answers ``GET /metrics`` in the text format of Prometheus, while the engine
        is open; port 0 takes any, see `metrics_address`. Default none: whoever reaches the port may read names of
        queries and how much passes (never rows), so it is opened only where somebody says at which address.

    Raises
    ------
    UnsupportedSession
        For a Spark Connect session, and for what is no session.
    ConfigError
        When an option is out of range.

    Notes
    -----
    A context manager: entering starts it, leaving ends every thread, port and Spark job of it, also after errors.
    State is in memory, and durable where its query has a checkpoint, see `foreach_batch`. A query whose state is not
    durable ends with `StateLost` when a member dies, and gives no wrong number.

    Examples
    --------
    >>> import penstock as pk
    >>> flow = pk.Flow("auction bigint, price bigint").key_by("auction").agg(n=pk.count())
    >>> with pk.Engine(spark, workers=2) as engine:  # doctest: +SKIP
    ...     query = bids.writeStream.foreachBatch(engine.foreach_batch(flow, sink)).start()
    ...     engine.migrate(to=[1] * 256).wait(progress=True)
    ...     query.stop()
    ...     rest = engine.finish(query)
    """

    def __init__(
        self,
        spark: SparkSession,
        workers: int = 2,
        *,
        threads: int = 1,
        bits: int = 8,
        name: str | None = None,
        start_timeout: Timeout = 300.0,
        registry_port: int = 0,
        window: int = 8,
        slice_rows: int = 16_384,
        staging_memory: int | str | None = None,
        staging_folders: Sequence[str] | None = None,
        member_timeout: Timeout = 60.0,
        linger: Timeout = 300.0,
        keep: int = 1,
        takeover: bool = False,
        tls: str = "auto",
        retry_sink: bool = True,
        metrics: str | None = None,
    ) -> None:
        require_session(spark, "penstock.Engine")
        counts: dict[str, int] = {}
        for label, value, least, most in (
            ("workers", workers, 1, 1 << 12),
            ("threads", threads, 1, 1 << 10),
            ("bits", bits, 0, 20),
            ("registry_port", registry_port, 0, 65_535),
            ("window", window, 1, 1 << 20),
            ("slice_rows", slice_rows, 1, 1 << 30),
            ("keep", keep, 1, 1 << 20),
        ):
            count = whole(value, least, most)
            if count is None:
                raise ConfigError(f"{label}={value!r} must be an int from {least} to {most}")
            counts[label] = count
        _require_text("name", name)
        for label, choice in (("takeover", takeover), ("retry_sink", retry_sink)):
            yes_or_no(choice, label)
        self._secret = Secret.random(tls)
        self._durable = {"keep": counts["keep"], "takeover": takeover, "retry_sink": retry_sink}
        self._start_timeout = parse_timeout(start_timeout, "start_timeout")
        self._silence = parse_timeout(member_timeout, "member_timeout", least_s=0.5, most_s=86_400.0)
        self._metrics = None if metrics is None else parse_address(metrics)
        keep_s = parse_timeout(linger, "linger", least_s=0.0)
        self.name = name if name is not None else f"engine-{next(_NUMBERS)}"
        self._workers = counts["workers"]
        self.threads = counts["threads"]
        self.bits = counts["bits"]
        self._spark = spark
        self._port = counts["registry_port"]
        self._window = counts["window"]
        self._slice_rows = counts["slice_rows"]
        self._staging_memory = None if staging_memory is None else parse_bytes(staging_memory, "staging_memory")
        self._staging_folders = _folders(staging_folders)
        self._lock = threading.RLock()
        #: One thread at a time ends what there is.
        self._ending = threading.RLock()
        self._queries = Queries(self.name)
        self._ended = Ended(spark, self.name, keep_s, self._gone)
        self._state = "new"
        self._process = os.getpid()
        self._hub: Hub | None = None
        self._executor: Executor | None = None
        self._rescales: Rescales | None = None
        self._commits: Commits | None = None
        self._decommissions: Decommissions | None = None
        self._residents: Residents | None = None
        self._recorder: Recorder | None = None
        self._journal: Journal | None = None
        self._scrape: Scrape | None = None
        self._autobalance: Autobalance | None = None
        self._setup: Setup | None = None

    # Life

    def start(self) -> Engine:
        """Start the members and wait until they serve; does nothing when they do.

        Raises
        ------
        SlotsError
            Within moments, when a setting says that the cluster can never offer ``workers + 1`` task slots.
        EngineError
            When an executor cannot serve (a table says why), or slots do not come within `start_timeout`.
        """
        self._require_here()
        with self._lock:
            if self._state == "open":
                return self
            if self._state == "starting":
                raise EngineError(f"engine {self.name} is being started already, in another thread")
            if self._state != "new":
                raise EngineError(f"engine {self.name} is closed; make a new one")
            self._state = "starting"
        try:
            self._begin()
        except BaseException as error:
            # Also where somebody else has closed it: what was made since then ends here.
            self._end_all()
            if isinstance(error, Exception) and not isinstance(error, PenstockError) and self._orphaned:
                self._require_starting()  # Spark raises many things then
            raise
        with self._lock:
            if self._state != "starting":
                raise EngineError(f"engine {self.name} was closed while it started")
            self._state = "open"
        return self

    def close(self) -> None:
        """End every thread, port and Spark job of the engine; the state is gone. Harmless when done twice."""
        if self._process != os.getpid():
            return  # a forked child has nothing to end: the threads and the members are the parent's
        with self._ending:
            if self._state != "closed":
                self._end_all()

    @property
    def _orphaned(self) -> bool:
        """Whether its Spark context was stopped, and all its members with it."""
        sc: Any = self._spark.sparkContext
        return sc._jsc is None

    def _watch_context(self) -> None:
        """Close when the Spark context has ended: else ports and checkpoints stay taken, by whom nobody can find."""
        with self._lock:
            if self._state not in ("starting", "open") or not self._orphaned:
                return
            self._state = "closing"
        log.warning("engine %s closes: its Spark context was stopped", self.name)
        # The hub's thread is one of those that end.
        closes = threading.Thread(target=self.close, name=f"penstock-close-{self.name}", daemon=True)
        if self._executor is None:
            closes.start()
        else:
            self._executor.begin(closes)

    def _end_all(self) -> None:
        with self._ending:
            self._end_each()

    def _end_each(self) -> None:
        with self._lock:
            self._state = "closing"
        interrupted: BaseException | None = None
        # A move of autobalance may wait for a function that hangs, until the executor has ended.
        looking = (
            self._stop_autobalance,
            self._end_scrape,
            self._ended.close,
            self._end_commits,
            self._end_decommissions,
            self._keep_residents,
        )
        for end in (*looking, self._end_executor, self._end_autobalance, self._end_residents, self._end_hub):
            for _ in range(2):
                try:
                    end()
                    break
                except KeyboardInterrupt as error:
                    interrupted = error
                except Exception:
                    log.exception("engine %s did not close cleanly", self.name)
                    break
        with self._lock:
            self._state = "closed"
        handles.remove(self)
        interrupts.release()
        if interrupted is not None:
            raise interrupted

    def _end_scrape(self) -> None:
        if self._scrape is not None:
            self._scrape.close()

    def _end_commits(self) -> None:
        if self._commits is not None:
            self._commits.close()

    def _end_decommissions(self) -> None:
        if self._decommissions is not None:
            self._decommissions.close()

    def _end_executor(self) -> None:
        if self._executor is not None:
            self._executor.close()

    def _keep_residents(self) -> None:
        if self._residents is not None:
            self._residents.begin_to_close()

    def _end_residents(self) -> None:
        if self._residents is not None:
            self._residents.close()

    def _end_hub(self) -> None:
        if self._hub is not None:
            self._hub.close()

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<penstock.Engine {self.name!r}: {self._state}, {self.workers} workers, {len(self._queries)} queries>"

    def __reduce__(self) -> Any:
        raise TypeError("an Engine lives in the driver and cannot be pickled")

    def _begin(self) -> None:
        began = time.monotonic()
        self._require_starting()
        handles.close_orphans()
        sc = self._spark.sparkContext
        if os.environ.get("PYSPARK_PIN_THREAD", "true").lower() == "false":
            raise ConfigError("PYSPARK_PIN_THREAD=false makes all Python threads share one job group; unset it")
        conf = sc.getConf()
        require_lasting(conf.get)
        found = capacity(sc)
        require_files(self.workers)
        with _TAKING:
            require_slots(found, self.workers, held_slots(sc, but=self))
            handles.add(self)
        interrupts.spare(sc)
        host = str(conf.get("spark.driver.host") or "127.0.0.1")
        bind = str(conf.get("spark.driver.bindAddress") or host)
        secret = self._secret
        hub = Hub(bind, self._port, host, secret, self.name, self._silence)
        self._hub = hub
        nonce = secret.claim()
        executor = Executor(
            self.name,
            {
                "workers": self.workers,
                "threads": self.threads,
                "bits": self.bits,
                "start_ms": int(self._start_timeout * 1_000),
                "silence_ms": int(self._silence * 1_000),
                "nonce": nonce,
                "registry": hub.address,
                **self._durable,
            },
        )
        self._executor = executor
        self._recorder = Recorder(hub, f"engine {self.name}", self._queries.name_of)
        journal = self._journal = Journal(self.name, self._queries.name_of, hub.known)
        executor.watch(journal.step)
        hub.listen(turn=lambda: journal.refused(hub.metrics))
        hub.listen(turn=journal.waits)
        hub.listen(turn=self._watch_context)
        self._residents = Residents(
            sc,
            hub,
            executor,
            secret,
            self.name,
            self._silence,
            self._staging_memory,
            self._staging_folders,
            self._recorder.change,
            lambda member, then: calls.prepare(member, then),
            lambda member: [queries.name_of(query) or query for query in calls.loading(member)],
        )
        queries = self._queries
        calls = Calls(
            hub,
            executor,
            queries.program,
            queries.programs,
            queries.checkpoint,
            queries.hear,
            self._window,
            self._slice_rows,
        )
        Checkpoints(executor, queries.storage, hub.address, nonce, journal.aside, bool(self._durable["takeover"]))
        self._queries.attach(executor)
        self._rescales = Rescales(
            executor,
            self.workers,
            self._queries.name_of,
            self._queries.calling,
            self._recorder,
            self._residents.missing,
        )
        self._commits = Commits(self._spark, self.name, executor, lambda one: self._queries.get(one) is not None)
        self._setup = Setup(
            hub=hub,
            executor=executor,
            residents=self._residents,
            moves=Moves(executor, self._recorder, lambda: self.workers),
            recorder=self._recorder,
            journal=journal,
            secret=secret,
            bits=self.bits,
            silence=self._silence,
            engine=self.name,
        )
        hub.start()
        if self._metrics is not None:
            self._scrape = Scrape(*self._metrics, self.name, self._page)
        startup = Startup(
            sc, hub, self.name, self.workers, self._start_timeout, began, self._require_starting, found.setting
        )
        startup.executors(found.executors)
        journal.examined(startup.probes)
        self._residents.warn()
        self._require_starting()
        executor.start()
        startup.members(self._residents)
        residents = self._residents
        self._decommissions = Decommissions(sc, self.name, executor, lambda: residents.members)
        self._decommissions.start()

    def _require_starting(self) -> None:
        if self._orphaned:
            raise EngineError(self._told_stopped())
        if self._state != "starting":
            raise EngineError(f"engine {self.name} was closed while it started")

    # Queries

    def foreach_batch(
        self,
        flow: Flow,
        sink: Sink,
        *,
        late: Sink | Mapping[str, Sink] | None = None,
        sides: Mapping[str, Sink] | None = None,
        name: str | None = None,
        checkpoint: str | None = OWN_CHECKPOINT,
    ) -> BatchFunction:
        """Make the function for ``DataStreamWriter.foreachBatch`` that runs a flow on this engine.

        Parameters
        ----------
        flow : Flow
            What to compute. Each batch is an epoch: an `agg` without a window gives updates where it does not say
            ``emit="final"``. A flow of several sources is fed by one query on what `penstock.spark.tagged` makes of
            their streams.
        sink : callable
            ``sink(df, batch_id)`` with the results of each batch; may evaluate `df` any number of times until it
            returns. The next batch drops the rows (small results happen to stay readable): write or collect them here.
        late : callable, or dict of name to callable, optional
            ``late(df, batch_id)`` with the rows that came too late. Without it they are counted and a warning tells.
            Where several sources have event time and other columns, a dict with a function for those of each, as for
            `Flow.run`.
        sides : dict of name to callable, optional
            ``f(df, batch_id)`` with the rows of that side output (see `penstock.side`), for each batch, behind `sink`
            and `late`, in the order in which the flow declares them. Those that nobody takes are counted and dropped.
            As with `late`, rows of an attempt that is undone are given to nobody, and a batch that is replayed (the
            driver died between the first of these calls and Spark's commit, or a worker with rows that were not read)
            is given to all of them again, with the same rows and number: a sink that writes each number once has no
            row twice.
        name : str, optional
            What the query is called; default Spark's name of the query, else its id.
        checkpoint : str or None, optional
            Where its state is durable: "query", the default, in a folder of the query's own ``checkpointLocation``, so
            that it lives and dies with that; else a path or URL of a folder that driver and executors reach, of this
            query alone; None to keep the state in memory only. A query without a ``checkpointLocation`` has no
            durable state by default. Where Spark does not tell the time of its batches (py4j is not allowed to look),
            durable state that depends on processing time is refused with the first batch.

        Returns
        -------
        BatchFunction
            For one Spark query, which may be restarted from its checkpoint: while this engine lives, or, where its
            state is durable, with a new one.

        Raises
        ------
        PlanError, SchemaError
            When the flow is not complete, or Spark has no type for one of its columns.
        ConfigError
            When a sink is no function of two arguments, or gives a coroutine, which nobody awaits; or a function of the
            flow cannot be pickled.
        EngineError
            When the engine is closed.

        Notes
        -----
        With durable state the death of a worker costs time, never the query: the others go back to where the batch
        began, what was lost is read, and the batch runs again. Without it the function raises `StateLost` then. It
        raises `StorageError` when the checkpoint's store does not work or a file of it is damaged;
        `UserFunctionError` when a function of the flow raised,
        `SchemaError` when the batch does not have the flow's columns. Spark then ends the query; `BatchFunction.error`
        keeps the exception itself. After anything but `StateLost` the query can be started again from its checkpoint
        and replays the batch exactly.
        """
        if not callable(sink):
            raise ConfigError(f"sink={sink!r} must be a function of (DataFrame, batch id)")
        require_plain(sink, "sink", takes="df, batch_id", ignored=True)
        require_called(sink, "sink", "df, batch_id")
        if self._state in ("closing", "closed"):
            self._require_open()
        require_flow(flow, "penstock.Engine.foreach_batch")
        if checkpoint is not None and not isinstance(checkpoint, str):
            given = shown(str(checkpoint), repr(checkpoint))
            raise ConfigError(f"checkpoint={given} must be a path or URL, {OWN_CHECKPOINT!r} or None")
        _require_text("name", name)
        place = checkpoint if checkpoint in (None, OWN_CHECKPOINT) else open_storage(checkpoint)
        return BatchFunction(self, Program.of(flow, late, sides), sink, late, sides, name, place)

    @property
    def queries(self) -> dict[str, Query]:
        """Queries that have had a batch, by name (id where there is none)."""
        return {query.name: query for query in self._queries.all()}

    def finish(self, query: Any, *, sides: Mapping[str, Sink] | None = None) -> DataFrame:
        """Run the final epoch of a query and return what was still open.

        Parameters
        ----------
        query : StreamingQuery or str
            The stream, or its id or name. It must be stopped, or idle.
        sides : dict of name to callable, optional
            ``f(df, batch_id)`` with the rows of that side output, as for `foreach_batch`: those that timers and the end
            of the input give. Called each time.

        Returns
        -------
        pyspark.sql.DataFrame
            The flow's columns; readable until the query is dropped, the engine closed, or a worker that holds part of
            it leaves (a rescale, a loss): write it somewhere. The same again when asked again; what went with a worker
            is made again from a checkpoint.

        Raises
        ------
        EngineError
            When there is no such query, or the sink of its last batch did not return.
        StateLost
            When its state is lost, or a part of the results with a worker, and there is no checkpoint.

        Notes
        -----
        The query's worker threads, connections and state end here; what came out stays, with a thread at each worker
        that answers for it. Nobody but you knows when all of it was read: `drop` the query then, in an engine that
        lives on. Where nothing came out, it is dropped as other queries that have ended.

        It is final: the checkpoint of a query with durable state is finished, and a restart that brings more rows is an
        `EngineError`. Do not call it to restart or deploy; stop the query for that.
        """
        return self._queries.find(query).finish(self._spark, self._require_open, sides)

    def drop(self, query: Any) -> None:
        """Forget a query: its threads, connections, state and outputs at the members end.

        Parameters
        ----------
        query : StreamingQuery or str
            The stream, or its id or name. It must be stopped.

        Raises
        ------
        EngineError
            When there is no such query, or it still runs.

        Notes
        -----
        Started again, a query with durable state goes on from its checkpoint, and one without state from its batch; one
        that kept state in memory ends with `StateLost`.

        This happens by itself to a query that has ended and cannot come back, after `linger` seconds, unless `finish`
        gave rows: its Spark query is not active any more, and it had no ``checkpointLocation``, or that does not exist.
        (Without one Spark makes a temporary checkpoint. It keeps that of a query that failed, but a query is not
        started from it again.) A query whose checkpoint exists can be started again at any time: it is kept until it is
        dropped, its checkpoint deleted (which is noticed within half a minute) or the engine closed. Queries that are
        called by hand, without a stream, are kept until they are dropped or the engine closed.
        """
        self._require_open()
        found = self._queries.find(query)
        if self._ended.runs(found.id):
            raise EngineError(f"query {found.called} runs: stop it, then drop it", query=found.id)
        self._drop(found)

    def _drop(self, query: Query) -> None:
        assert self._recorder is not None
        try:
            query.end(self._require_open)
        finally:
            # Also where the wait for its threads is interrupted: else it could not be started again.
            if query.over:
                self._queries.forget(query)
                self._ended.forget(query.id)
                self._recorder.forget(query.name)
                if self._journal is not None:
                    self._journal.forget(query.id, query.name)

    def _gone(self, query_id: str) -> None:
        """A Spark query has ended and cannot come back; what `finish` gave stays readable."""
        found = self._queries.get(query_id)
        if found is not None and not found.gave_rest and self._state == "open":
            log.info("engine %s drops query %s, which has ended and cannot come back", self.name, found.name)
            self._drop(found)

    def migrate(
        self,
        to: Sequence[int] | None = None,
        moves: Mapping[Any, int] | Iterable[tuple[Any, int]] | None = None,
        *,
        strategy: str = "batched",
        batch_size: int | None = None,
        max_pause: Timeout | None = None,
        gap: str | None = None,
        at_epoch: int | None = None,
        query: Any = None,
    ) -> Migration:
        """Move bins to other workers, during an epoch or between epochs.

        Parameters
        ----------
        to : list of int, optional
            The worker of each bin afterwards.
        moves : dict of bin to worker, or list of (bin, worker), optional
            Only these bins; ``(prefix, bits)`` names a part of one that is split. With neither, bins are spread evenly.
        strategy : {"batched", "all-at-once", "fluid", "matched"}, default "batched"
            Many bins at once make a short migration with a long pause, few bins a long one with short pauses. With
            "matched" each worker sends to at most one other at a time and receives from at most one.
        batch_size : int, optional
            Bins of a step, for "batched", of a pair of workers for "matched"; of no effect and so refused for the
            others. Default 16, with `max_pause` 1.
        max_pause : float, str or datetime.timedelta, optional
            Seconds, or a duration such as "50ms", that no step may hold rows up for longer, where a single bin allows
            it: the number of bins that move at once is chosen from what the steps before have cost. Where a single one
            holds them up for longer (while slow functions run), steps are at most half as long again.
        gap : {"drain"}, optional
            What waited when a step was complete is worked off before the next one, so no row waits for two of them:
            a batch that runs by then, whatever comes later. So one step at most holds up the rows of a batch; between
            batches they follow at once. By default they always do.
        at_epoch : int, optional
            Prepared ahead: the first step takes effect before any row of that batch of Spark's is routed, whatever
            moves then, in every query that is meant. It waits in a query that is broken off, and is lost with one
            that is dropped. By default it begins when the migrations asked for before have ended.
        query : StreamingQuery or str, or a list of them, optional
            Default every running query that keeps state. Several are checked together: all of them move, or none.

        Returns
        -------
        Migration
            A handle; `Migration.wait` waits for the end.

        Raises
        ------
        ConfigError
            When a bin, worker, strategy or gap does not exist, or the epoch has passed in a query.
        EngineError
            When there is no such query, or it does not run.
        """
        self._require_open()
        cut, epoch = Cut.of(strategy, batch_size, max_pause, gap), parse_epoch(at_epoch)
        if isinstance(moves, Iterator):
            moves = list(moves)
        return self._ask(query, lambda found: found.wish(to, moves, cut), cut, epoch)

    def _ask(self, query: Any, wish: Callable[[Query], Any], cut: Cut, epoch: int | None = None) -> Migration:
        """Have the protocol move, split or merge bins of the queries that are meant, all or none."""
        if isinstance(query, (list, tuple)):
            chosen = list({found.id: found for found in map(self._queries.find, query)}.values())
            if not chosen:
                raise ConfigError("query=[] names no query: leave it out for all")
        elif query is not None:
            chosen = [self._queries.find(query)]
        else:
            chosen = [found for found in self._queries.all() if found.running]
            if not chosen:
                stands = [f"query {found.name} {found.status}" for found in self._queries.all()]
                told = "; ".join([f"engine {self.name} has no running query: nothing can move", *stands])
                raise EngineError(told)
            # Others have no bins, and would refuse what is meant for those that have.
            chosen = [found for found in chosen if found.program.operators] or chosen
        named = {found.name: found for found in chosen}
        handle = Migration(lambda name: named[name].require_outside(epoch))
        assert self._setup is not None, "a query runs"
        self._setup.moves.ask(handle, [(found.id, found.name, wish(found)) for found in chosen], cut, epoch)
        handle.seal()
        return handle

    def split(self, bins: Bins, by: int = 1, *, query: Any = None) -> Migration:
        """Cut bins into ``2 ** by`` parts each, by the next bits of the hashes of their keys, while batches run.

        A part moves like a bin: `migrate` takes it as ``(prefix, bits)``. Results do not change. What is split stays so
        when members are lost, when the number of workers changes, and with durable state when the query is started
        again, until it is merged.

        Parameters
        ----------
        bins : int or (prefix, bits), or a list of them
            Which: a bin by its number, or a part of one by its prefix and the bits of that.
        by : int, default 1
            How many bits. A part has 20 bits at most.
        query : StreamingQuery or str, or a list of them, optional
            Default every running query that keeps state. Several are checked together: in all of them bins are split,
            or in none.

        Returns
        -------
        Migration
            A handle. It takes effect between two batches, when what was asked for before has ended.

        Raises
        ------
        ConfigError
            When there is no such bin, it is split already, or its parts would be too fine.
        EngineError
            When there is no such query, or it does not run.

        Notes
        -----
        A worker that has a part of a bin counts into tables of their own instead of small ones that lie together, so
        split what is large or hot. Cost: a copy of the state of the bin, at one time, on one worker; a manifest of
        durable state names all parts, some 10 bytes each.
        """
        self._require_open()
        return self._ask(query, lambda found: found.split(bins, by), Cut.of("all-at-once", None, None))

    def merge(self, bins: Bins, *, query: Any = None) -> Migration:
        """Make all parts of a bin, or of a part, one again.

        Parameters
        ----------
        bins : int or (prefix, bits), or a list of them
            What they are to be.
        query : StreamingQuery or str, or a list of them, optional
            As for `split`.

        Returns
        -------
        Migration
            A handle, as of `split`. Parts on several workers first come together on the one that has most of them.

        Raises
        ------
        ConfigError
            When there is no such bin, or it is not split.
        EngineError
            When there is no such query, or it does not run.
        """
        self._require_open()
        return self._ask(query, lambda found: found.merge(bins), Cut.of("all-at-once", None, None))

    def bins(self, query: Any = None) -> pa.Table:
        """All bins of a query as they are now, parts among them; `query` may be left out when it is alone.

        Returns
        -------
        pyarrow.Table
            op (keyed step, from 0), prefix, bits (of the prefix), worker, state_bytes (that it holds in memory, as its
            worker told last, at the end of a batch or a move; null while nobody has).

        Raises
        ------
        EngineError
            When there is no such query.

        Notes
        -----
        Asks all members. Of state of Python functions the bytes are an estimate: by the mean of 16 keys, and one level
        into containers. What an epoch under way would be undone by counts as well.
        """
        found = self._queries.find(query)
        recorder = self._recorder if self._state == "open" else None
        return bins_table(found.bins(), recorder.loads(found.id).bytes if recorder is not None else [])

    def rebalance(
        self,
        *,
        by: str = "bins",
        tolerance: float = 1.2,
        strategy: str = "batched",
        batch_size: int | None = None,
        max_pause: Timeout | None = None,
        gap: str | None = None,
        query: Any = None,
    ) -> Migration:
        """Spread the bins evenly over the workers, moving as few as possible.

        Parameters
        ----------
        by : {"bins", "rows", "busy"}, default "bins"
            Equal numbers of bins; equal numbers of rows, as they came since the workers began; or equal time that they
            have kept workers busy since then (`loads`).
        tolerance : float, default 1.2
            By rows or time: what a worker may have, as a multiple of the mean. Fewer bins move the larger it is.
        strategy, batch_size, max_pause, gap
            As for `migrate`.
        query : StreamingQuery or str, optional
            Default every running query that keeps state; by rows or time it may be left out when it is alone.

        Returns
        -------
        Migration
            A handle, as of `migrate`.

        Raises
        ------
        ConfigError
            When an option is out of range.
        EngineError
            When there is no such query, or it does not run.
        """
        target, tolerance = None, parse_tolerance("tolerance", tolerance)
        if parse_by(by) != "bins":
            self._require_open()
            found = self._queries.find(query)
            looked = Balanced(self).look_at(found)
            if looked.missing and found.running:
                raise EngineError(f"rebalance(by={by!r}) of query {found.name}: {looked.missing}; ask again")
            _, loads = looked.loads.by(by, Parts(looked.bits, dict(zip(looked.bins, looked.owners, strict=True))))
            of_bins = [loads[part] for part in looked.bins]
            owners = evened(looked.owners, of_bins, looked.workers, tolerance) if looked.owners else []
            target = dict(zip(looked.bins, owners, strict=True)) or None
            query = looked.query
        options: Any = {"strategy": strategy, "batch_size": batch_size, "max_pause": max_pause, "gap": gap}
        return self.migrate(moves=target, query=query, **options)

    def loads(self, query: Any = None) -> pa.Table:
        """What each bin of a query gets; `query` may be left out when it is alone.

        Returns
        -------
        pyarrow.Table
            bin (its prefix), bits (of the prefix: more where it is part of a bin that is split), worker (its owner),
            rows (that came for it since the workers began, of all keyed steps; one in eight is counted, for eight;
            rows of a bin that was split later count as spread evenly over its parts), busy_s (seconds that it kept
            workers busy in keyed steps: calls of your functions for its keys, as they were measured, and of the rest of
            each step's time its share by rows and by pairs of a join). They begin again at 0 when the set of workers
            changes.

        Raises
        ------
        EngineError
            When there is no such query.
        """
        self._require_open()
        found = self._queries.find(query)
        assert self._recorder is not None
        return loads_table(found.parts() or Parts(0, {}), self._recorder.loads(found.id).loads)

    def autobalance(
        self,
        *,
        by: str = "busy",
        every: Timeout = "5s",
        trigger: float = 1.5,
        tolerance: float = 1.2,
        patience: int = 3,
        least_rows: int = 1_000,
        max_bin_bytes: int | str | None = "64m",
        workers: tuple[int, int] | None = None,
        dry_run: bool = False,
    ) -> Autobalance:
        """Even the load of the workers out whenever it stays skewed, and let their number follow the load.

        Looks at what each bin cost since the last look. When one worker had more than `trigger` times the mean for
        `patience` looks in a row, a few bins move until none has more than `tolerance` times it. Then comes a rest. A
        bin that alone had more than `trigger` times the mean is split, so that its parts can move; one that is split,
        by whomever, and had less than a quarter of that for four times as many looks is made one again. What one key
        makes hot is told of and left where it is. The same for size: a bin that holds more than `max_bin_bytes` is
        split into parts that hold less, and made one again only when it holds less than a quarter of that. So nobody
        has to know how many bins it takes, and no bin holds rows up for long when it moves.

        Parameters
        ----------
        by : {"busy", "rows"}, default "busy"
            What a load is: the time that a bin keeps workers busy (`loads`), since rows of one key may cost more than
            those of another; or its rows, also where no time was measured. Time has the noise of the machine in it
            where functions of yours are fast.
        every : float, str or datetime.timedelta, default "5s"
            Between two looks, at least 50 ms. Should hold a few batches.
        trigger, tolerance : float
            Multiples of the mean load of a worker, at least 1; `tolerance` is at most `trigger`. Where one worker gets
            `r` times what each other of `n` does, it has ``r * n / (r + n - 1)`` times the mean: 4 : 1 is 1.6 on two
            workers and 2.3 on four. What is evened out to 1.2 is 1.5 : 1 on two at most, and 1.3 : 1 on four; 1.2 : 1
            is 1.09 and 1.14.
        patience : int, default 3
            Looks in a row that must show it, and looks of rest after moves.
        least_rows : int, default 1,000
            A look with fewer rows says nothing of loads, and merges nothing.
        max_bin_bytes : int, str or None, default "64m"
            State that a bin or part may hold in memory, in all keyed steps together, as `bins` tells it; at least 64
            KiB. Of several that hold more, those that together hold four times as much are split at a look, the largest
            first: a split copies what it divides. What one key fills is told of (`Look.why`). None for any size.
        workers : (int, int), optional
            The fewest and the most workers, as for `rescale`. The number is set to what the offered rates of all
            queries together, of those without state too, need at the rates that busy workers have shown, four fifths
            busy (DS2); up after `patience` looks, down after three times as many, and only where those that stay would
            be less than 72 % busy. It does not go down while some query has not been measured, which is at ends of its
            batches. Where there are not as many task slots it goes up to what there are; where nothing says how many,
            by one at a time, and for ten minutes not again to a number for which they did not come. Without, it is only
            told (`Look.needed`).
        dry_run : bool, default False
            Tell what would be done and why (`Look.why`, log lines ``balance advised``), and do nothing.

        Returns
        -------
        Autobalance
            A handle with what was seen and done; close it, or use it as a context manager, to stop. It ends with the
            engine.

        Raises
        ------
        ConfigError
            When an option is out of range.
        EngineError
            When the engine has one already, or is not open.

        Examples
        --------
        >>> with engine.autobalance(every="10s") as balance:  # doctest: +SKIP
        ...     query.awaitTermination()
        >>> [look.why for look in balance.looks if look.moves]  # doctest: +SKIP
        """
        self._require_open()
        rules = Rules.of(by, every, trigger, tolerance, patience, least_rows, max_bin_bytes, workers, dry_run)
        with self._lock:
            if self._autobalance is not None and self._autobalance.looking:
                raise EngineError(f"engine {self.name} is balanced already: close that handle first")
            host = Balanced(self)
            self._autobalance = Autobalance(host, rules, self.name, host.room)
            return self._autobalance.start()

    def _stop_autobalance(self) -> None:
        if self._autobalance is not None:
            self._autobalance.stop()

    def _end_autobalance(self) -> None:
        if self._autobalance is not None:
            self._autobalance.close()

    def rescale(self, workers: int) -> Rescale:
        """Go to another number of resident processes while queries run.

        Parameters
        ----------
        workers : int
            How many, at least 1.

        Returns
        -------
        Rescale
            A handle: `Rescale.wait` waits for the end, `Rescale.progress` says what it waits for, `Rescale.cancel`
            goes back.

        Raises
        ------
        ConfigError
            For less than one.
        SlotsError
            When there are not as many task slots, those that a setting allows, or, where none does, those of the
            executors that there are; nothing has changed then. Where Spark may have more of them made (dynamic
            allocation), or does not say how many there are, `Rescale.wait` raises it when some have not come after the
            engine's `start_timeout`; what has come goes again.
        EngineError
            When another rescale is under way, or the engine is not open.

        Notes
        -----
        Those that are new start beside those that serve, and take part in each query when Spark has committed its last
        batch, at its next one at the latest: bins move to them while rows pass. Those that go give their bins away
        first, and end with the batch or the commit after. A query whose last batch failed, or that was stopped before
        Spark committed it, is not waited for: its state is read from its checkpoint when it is started again. Only one
        that keeps state in memory alone is, where members go, until it is started again or dropped.
        """
        self._require_open()
        most = 1 << 12
        count = whole(workers, 0, most)
        if count is None:
            raise ConfigError(f"rescale({workers!r}): the number of workers is an int from 1 to {most}")
        assert self._rescales is not None
        if count > self.workers:
            require_files(count, self.workers)
        free, setting = free_slots(self._spark.sparkContext, count - self.workers)
        return self._rescales.ask(count, most if free is None else min(most, free), setting)

    def owners(self, query: Any = None) -> list[list[int]]:
        """The worker of each bin, one list for each keyed step of the query; -1 of a bin that is split (`bins`).

        `query` may be left out when it is alone.

        Raises
        ------
        EngineError
            When there is no such query.
        """
        return self._queries.find(query).owners()

    def state(self, query: Any = None, operator: str | None = None) -> pa.Table:
        """Keys and values that a query has kept, at the last batch that Spark has committed.

        Parameters
        ----------
        query : StreamingQuery or str, optional
            The stream, or its id or name; may be left out when it is alone.
        operator : str, optional
            Which step, as `penstock.state.operators` names them; may be left out when it is alone.

        Returns
        -------
        pyarrow.Table
            As of `penstock.state.read`.

        Raises
        ------
        EngineError
            When there is no such query, or Spark has committed no batch of it so far.
        ConfigError
            When its state is not durable, or there is no such operator.
        StorageError
            When its checkpoint cannot be read.

        Notes
        -----
        Reads the checkpoint, not the workers: batches go on meanwhile. Costs what reading all of that state costs.
        """
        self._require_open()
        return self._queries.find(query).state(operator)

    # Figures

    def stats(self) -> pa.Table:
        """The present figures of the workers, one row for each worker of each query.

        Returns
        -------
        pyarrow.Table
            query, worker, bins, bins_by_step (of each keyed step), keys, state_bytes, rows, late_rows, epochs,
            busy_s: as `LocalSession.stats` tells them; rows are counted since the query began here. generation,
            member, resident, executor, pid: where the worker is. Of its whole process: rss_bytes,
            staging_memory_bytes (what waiting rows and results may take), staged_bytes (what they take now),
            staged_peak_bytes, disk_bytes (in files now), spilled_bytes (written to files so far),
            refused_connections; at: when it told.
        """
        rows = self._figures()
        for row in rows:
            row["at"] = datetime.fromtimestamp(row["at"], timezone.utc)
        return to_table(rows, ENGINE_WORKERS)

    def scopes(self) -> list[ScopeStats]:
        """The figures of the bounded parts and flat maps of all queries, on each worker."""
        return scope_stats(self._figures())

    def _figures(self) -> list[dict[str, Any]]:
        self._require_open()
        assert self._recorder is not None
        self._recorder.refresh()
        return self._recorder.latest()

    def moves(self) -> pa.Table:
        """The log of moved bins, of which the oldest entries go first.

        Returns
        -------
        pyarrow.Table
            query, op (the keyed step, from 0), worker, bin (its number; of a part ``2 ** bits + prefix`` with the bits
            of that prefix: the part (13, 4) is 29), what (prepare, state, pending, installed), bytes (of state in the
            message), at (nanoseconds, UTC), routed_rows (by this worker until then).
        """
        if self._recorder is None:
            return to_table([], ENGINE_MOVES)
        if self._state == "open":
            self._recorder.refresh()
        return to_table(self._recorder.moves(), ENGINE_MOVES)

    def timeline(self) -> Timeline:
        """What was measured so far: epochs, slices, migrations and load; a copy, bounded in size."""
        from penstock.report._timeline import Timeline

        if self._recorder is None:
            return Timeline(f"engine {self.name}")
        conditions = {"workers": f"{self.workers} processes x {self.threads} threads", "bins": str(1 << self.bits)}
        return self._recorder.timeline(conditions)

    @property
    def workers(self) -> int:
        """Resident processes that there are, or are to be while a rescale to more is under way."""
        return self._workers if self._rescales is None else self._rescales.workers

    @property
    def metrics_address(self) -> str | None:
        """Where the engine's figures can be scraped, ``host:port``; None without `metrics`, and when it is not open."""
        return self._scrape.address if self._scrape is not None and self._state in ("starting", "open") else None

    def _page(self) -> str:
        """The text of one scrape; asks nobody and waits for nothing."""
        from penstock._native import version

        assert self._recorder is not None and self._journal is not None
        own = [
            Sample("penstock_engine_info", {"version": version()}, 1),
            Sample("penstock_workers", {}, self.workers),
            Sample("penstock_members", {}, len(self.members())),
        ]
        return page(self.name, [*own, *self._journal.counters.samples(), *self._recorder.samples()])

    def members(self) -> list[Member]:
        """The members that serve now, by resident."""
        return [] if self._residents is None else self._residents.members

    # Inside

    def _holds_slots_of(self, sc: Any) -> bool:
        return self._spark.sparkContext is sc and self._state in ("starting", "open")

    def _serves(self, checkpoint: str, but: Any) -> bool:
        """Whether it has a query, other than `but`, whose state is at a place."""
        return self._queries.kept_at(checkpoint, but) is not None

    def _job_groups(self) -> list[str]:
        return [] if self._residents is None else self._residents.groups()

    def _require_here(self) -> None:
        here = os.getpid()
        if self._process != here:
            raise ForkError(
                f"engine {self.name} was made in process {self._process} and is used in its forked child {here},"
                " where its threads do not exist: use it in its own process",
                owner=self._process,
                here=here,
            )

    def _require_open(self) -> None:
        self._require_here()
        if self._orphaned:
            raise EngineError(self._told_stopped())
        if self._state != "open":
            new = self._state == "new"
            what = "has not started" if new else f"is {self._state}"
            advice = "use it in a with statement, or call start()" if new else "keep it open as long as its queries run"
            raise EngineError(f"engine {self.name} {what}: {advice}")

    def _told_stopped(self) -> str:
        return (
            f"the Spark context of engine {self.name} was stopped: make a new engine on the present session, which"
            " SparkSession.builder.getOrCreate() gives"
        )


def engines(spark: SparkSession) -> list[Engine]:
    """The engines that are open on a Spark context, in the order of their starts.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        Any classic session of the context.

    Returns
    -------
    list of Engine
        The engines themselves: one whose handle was lost (a notebook's cell that ran again, an error before the
        assignment) can be closed, and its queries looked at, through what is returned.

    Raises
    ------
    UnsupportedSession
        For a Spark Connect session.

    Examples
    --------
    >>> for engine in pk.spark.engines(spark):  # doctest: +SKIP
    ...     engine.close()
    """
    require_session(spark, "penstock.spark.engines")
    return [one for one in handles.open_engines(spark.sparkContext) if isinstance(one, Engine)]


def _require_text(what: str, given: object) -> None:
    if given is not None and not isinstance(given, str):
        raise ConfigError(f"{what}={given!r} must be a text or None")


def _folders(given: Sequence[str] | None) -> tuple[str, ...]:
    paths = () if given is None or isinstance(given, (str, bytes)) else tuple(given)
    if (given is not None and not paths) or not all(isinstance(path, str) and os.path.isabs(path) for path in paths):
        raise ConfigError(f"staging_folders={given!r} must be absolute paths of directories on the executors")
    return paths
