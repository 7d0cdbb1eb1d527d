"""The function that Spark calls with each micro-batch of a query of an engine.

Owns: which Spark query a function serves, and telling a query that was stopped from one that failed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penstock._options import whole
from penstock._storage import OWN_FOLDER, Storage, open_storage
from penstock.errors import ConfigError, EngineError
from penstock.spark._engine.program import Program
from penstock.spark._engine.query import Abandoned, called, described
from penstock.spark._engine.stream import Stream
from penstock.spark._session.guard import require_classic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.spark._engine.commits import Commits
    from penstock.spark._engine.ended import Ended
    from penstock.spark._engine.queries import Queries
    from penstock.spark._engine.query import Setup

__all__ = ["OWN_CHECKPOINT", "BatchFunction", "Sink"]

log = logging.getLogger(__name__)

#: The state of a query is durable where Spark keeps the query's progress, if that outlives the query.
OWN_CHECKPOINT = "query"

Sink = Callable[["DataFrame", int], Any]


class Host(Protocol):
    """The engine, as far as the function of a query knows it."""

    _spark: SparkSession
    _setup: Setup | None
    _queries: Queries
    _ended: Ended
    _commits: Commits | None

    def _require_open(self) -> None: ...


def parse_batch_id(batch_id: object) -> int:
    """The number of a batch: an int, of numpy's as well, of at least 0.

    Raises
    ------
    ConfigError
        For anything else.

    Examples
    --------
    >>> parse_batch_id(7)
    7
    """
    number = whole(batch_id, 0, (1 << 63) - 1)
    if number is None:
        raise ConfigError(f"batch_id={batch_id!r}: the number of a batch is an int of at least 0")
    return number


@dataclass
class _Call:
    """One batch, as far as it is known whose it is."""

    query_id: str
    name: str | None
    batch: int | None = None


class BatchFunction:
    """The function that Spark calls with each micro-batch of one query.

    Attributes
    ----------
    query_id : str or None
        Spark's id of the query that it serves, once it has had a batch.
    error : Exception or None
        What the last batch raised. Spark wraps it in text; here it is itself.
    """

    def __init__(
        self,
        engine: Host,
        program: Program,
        sink: Sink,
        late: Sink | Mapping[str, Sink] | None,
        sides: Mapping[str, Sink] | None,
        name: str | None,
        checkpoint: Storage | str | None,
    ) -> None:
        self._engine = engine
        self._checkpoint = checkpoint
        self._program = program
        self._sink = sink
        self._late = late
        self._sides = sides
        self._name = name
        self._direct = f"direct-{os.urandom(8).hex()}"
        self._lock = threading.Lock()
        #: The run of a query that it was called by last, and where its state is durable: another run may have other
        #: options and its checkpoint elsewhere.
        self._known: tuple[tuple[str, str | None], Stream, Storage | None] | None = None
        #: Java's class, which is looked up once.
        self._threads: Any = None
        #: The last batch that returned, and its run.
        self._returned: tuple[tuple[str, str | None], int] | None = None
        self.query_id: str | None = None
        self.error: BaseException | None = None
        self._told_direct = False

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """Run one batch; see `Engine.foreach_batch` for what it raises."""
        self.error = None
        began, call = time.monotonic(), _Call(self.query_id or self._direct, self._name)
        try:
            call.batch = parse_batch_id(batch_id)
            self._run(df, call.batch, call)
        except BaseException as error:
            self.error = error
            self._tell_failed(call, time.monotonic() - began, error)
            raise

    def _tell_failed(self, call: _Call, seconds: float, error: BaseException) -> None:
        """Whatever a call raises is counted and told, also where it was refused before the query was asked."""
        setup = self._engine._setup
        if setup is not None:
            name = self._engine._queries.label(call.query_id, call.name) if call.name else None
            stopped = not isinstance(error, Exception) or isinstance(error, Abandoned)
            setup.journal.batch_failed(call.query_id, call.batch, seconds, error, stopped, name)

    def _run(self, df: DataFrame, batch_id: int, call: _Call) -> None:
        engine = self._engine
        engine._require_open()
        require_classic(df, "penstock.Engine.foreach_batch")
        sc = df.sparkSession.sparkContext
        query_id = call.query_id = sc.getLocalProperty("sql.streaming.queryId") or self._direct
        assert engine._setup is not None
        assert engine._commits is not None
        stream = None
        if query_id != self._direct:
            # A session knows its own queries alone.
            stream = engine._commits.facts(query_id).query() or engine._spark.streams.get(query_id)
        name = call.name = self._name or (stream.name if stream is not None else None) or query_id
        self._bind(query_id, batch_id)
        # Spark names the jobs of a run after it, unless the user has named them.
        run: tuple[str, str | None] = query_id, None
        if query_id != self._direct:
            run = query_id, engine._commits.facts(query_id).run_id() or sc.getLocalProperty("spark.jobGroup.id")
        if self._known is None or self._known[0] != run:
            told = Stream(None if query_id == self._direct else engine._commits.facts(query_id))
            self._known = run, told, self._storage(told, query_id, name)
        _, told, storage = self._known
        query = engine._queries.of(engine._setup, self._program, query_id, name, told, storage)
        # Python's callback runs on the thread of the query. Stopping interrupts it, whatever session owns it.
        if self._threads is None:
            jvm: Any = sc._jvm
            self._threads = jvm.java.lang.Thread
        thread = None if query_id == self._direct else self._threads.currentThread()
        if thread is None and not self._told_direct:
            self._told_direct = True
            self._tell_direct(df, name)
        if thread is not None:
            engine._ended.saw(query_id, thread)
            engine._commits.facts(query_id).active()  # that of this run is known when it has ended
        check = self._checker(thread, stream, batch_id)
        failure: BaseException
        try:
            with described(df.sparkSession, f"penstock {query.name}: epoch {batch_id}"):
                follows = self._returned == (run, batch_id - 1)
                query.batch(df, batch_id, self._program, self._sink, self._late, self._sides, check, run, follows)
            self._returned = run, batch_id
            return
        except Abandoned:
            # Alone: with Java's pages behind it Spark would not see that this is an interruption.
            failure = Abandoned(batch_id)
        except Exception as error:
            failure = error
            try:
                check()
            except Abandoned as stopped:
                failure = stopped
            except EngineError:
                pass  # the engine is closing; the first error says more
        if isinstance(failure, Abandoned):
            failure.__cause__ = failure.__context__ = None
            failure.__suppress_context__ = True
        raise failure

    def _tell_direct(self, df: DataFrame, name: str) -> None:
        """Say what it means that a batch comes without Spark's query, where that is hardly meant.

        A thread that a function of ``foreachBatch`` has started has none of what Spark tells its own one.
        """
        spark = self._engine._spark
        same = df.sparkSession._jsparkSession.equals(spark._jsparkSession)
        if spark.streams.active and not same:
            log.warning(
                "query %s: its batches come by hand, not as those of a Spark query, though some run: nobody stops them"
                " with the query, and their state is durable nowhere. Where threads of your own call this function"
                " within foreachBatch, start them as pyspark.InheritableThread",
                name,
            )

    def _storage(self, stream: Stream, query_id: str, name: str) -> Storage | None:
        """Where the state of the query is durable."""
        storage = None if isinstance(self._checkpoint, str) else self._checkpoint
        try:
            root = stream.checkpoint() if isinstance(self._checkpoint, str) else None
        except LookupError as error:
            raise EngineError(
                f"query {called(name, query_id)}: {error} (py4j is not allowed to look, or this release of Spark has it"
                " elsewhere), so its state would be durable or not by chance: say where with"
                " foreach_batch(checkpoint=), a folder of this query alone, or keep it in memory with checkpoint=None",
                query=query_id,
            ) from error
        if root is not None:
            try:
                storage = open_storage(stream.folder(root, OWN_FOLDER))
            except ConfigError as error:
                raise EngineError(
                    f"query {called(name, query_id)}: its state cannot be kept in its checkpointLocation: {error}; say"
                    " where with foreach_batch(checkpoint=), a folder of this query alone, or keep it in memory with"
                    " checkpoint=None",
                    query=query_id,
                ) from error
        if storage is not None and stream.asynchronous:
            raise EngineError(
                f"query {called(name, query_id)}: with asyncProgressTrackingEnabled Spark may ask for a batch before"
                " the one before it is committed, so its state cannot be durable: turn that off, or keep the state in"
                " memory with checkpoint=None",
                query=query_id,
            )
        if storage is not None or not isinstance(self._checkpoint, str):
            return storage
        if self._engine._queries.get(query_id) is None and query_id != self._direct:
            assert self._engine._setup is not None
            self._engine._setup.journal.in_memory(name)
        return None

    def _bind(self, query_id: str, batch_id: int) -> None:
        """State belongs to one Spark query: another one must have a function of its own."""
        with self._lock:
            if self.query_id is not None and self.query_id != query_id:
                earlier = self._engine._queries.get(self.query_id)
                if batch_id != 0 or (earlier is not None and not earlier.reusable):
                    raise EngineError(
                        f"this function serves Spark query {self.query_id}, and is now called by Spark query {query_id}"
                        f" with batch {batch_id}: its state belongs to the first; call engine.foreach_batch once for"
                        " each query",
                        query=query_id,
                        expected=self.query_id,
                        epoch=batch_id,
                    )
            self.query_id = query_id

    def _checker(self, thread: Any, stream: Any, batch_id: int) -> Callable[[], None]:
        """What every wait asks: is the engine open, does the query still run?"""
        engine = self._engine

        def check() -> None:
            engine._require_open()
            if thread is not None and (thread.isInterrupted() or (stream is not None and not stream.isActive)):
                raise Abandoned(batch_id)

        return check
