"""What Spark knows of a running query that its Python interface does not tell.

Owns: the look at Spark's own objects, through py4j. No class of Spark is named, since packages and signatures moved
between 3.5 and 4.3; only methods that both have, or one of each. What Spark refuses, or does not have, is None.

Invariant: a fact is never guessed from another. None always means "not known", so who asks has to be safe with that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

__all__ = ["StreamFacts"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class StreamFacts:
    """Facts of one Spark query of any session of a context.

    Parameters
    ----------
    session : pyspark.sql.SparkSession
        Any classic session of the context.
    query_id : str
        Spark's id of the query, the same after a restart from its checkpoint.

    Notes
    -----
    Any thread may ask, that of the batch included, at any time; nothing raises. A query that has ended is still
    answered for, as far as its checkpoint is there, if it was asked about while it ran.
    """

    def __init__(self, session: Any, query_id: str) -> None:
        self._session = session
        self._query_id = query_id
        #: Spark's own, of the last run that was seen.
        self._seen: Any = None
        #: Spark's table of the queries that run, and the key there: each name on the way to them is a call of the JVM.
        self._running: tuple[Any, Any] | None = None

    def active(self) -> bool | None:
        """Whether Spark runs the query now."""
        return self._tell("active", lambda: self._active() is not None)

    @property
    def seen(self) -> bool:
        """Whether it was found among the queries that Spark ran; those that are called by hand never are."""
        return self._seen is not None

    def query(self) -> Any:
        """The present run as PySpark has it, whichever session it is of: its name, and whether it was stopped."""

        def wrapped(execution: Any) -> Any:
            from pyspark.sql.streaming.query import StreamingQuery

            return StreamingQuery(execution)

        return self._of("query", wrapped)

    def run_id(self) -> str | None:
        """Spark's id of the present run."""
        return self._of("run", lambda execution: str(execution.runId()))

    def committed(self) -> int | None:
        """The last batch in Spark's commit log; None also when there is none yet.

        Lists one directory of the checkpoint.
        """
        return self._of("committed", lambda execution: _maybe(int, _value(execution.commitLog().getLatestBatchId())))

    def batch_timestamp_ms(self, batch_id: int) -> int | None:
        """Spark's own time of a batch, milliseconds since 1970: durable before `foreachBatch` is called with it.

        The batch that runs is answered from memory, others read one file of the checkpoint.
        """

        def now(execution: Any) -> int | None:
            last = execution.lastExecution()
            if last is None or int(last.currentBatchId()) != batch_id:
                return None
            return int(last.offsetSeqMetadata().batchTimestampMs())

        def logged(execution: Any) -> int | None:
            offsets = _value(execution.offsetLog().get(batch_id))
            if offsets is None:
                return None
            try:
                found = offsets.metadataOpt()  # 4.x
            except Exception:
                found = offsets.metadata()
            return _maybe(lambda metadata: int(metadata.batchTimestampMs()), _value(found))

        told = self._of("its last execution", now)
        return told if told is not None else self._of("offsets", logged)

    def checkpoint_root(self) -> str | None:
        """The checkpoint, as a URI for Hadoop's file systems."""
        return self._of("checkpoint", lambda execution: str(execution.resolvedCheckpointRoot()))

    def temporary(self) -> bool | None:
        """Whether the checkpoint is one that Spark made, since none was given, and deletes when the query stops."""

        def reflected(execution: Any) -> bool:
            # Of the abstract class that both kinds of executions extend.
            found, kind = None, execution.getClass()
            while found is None and kind is not None:
                names = [field.getName() for field in kind.getDeclaredFields()]
                found = kind.getDeclaredField(_DELETED) if _DELETED in names else None
                kind = kind.getSuperclass()
            if found is None:
                raise LookupError(f"no field {_DELETED}")
            found.setAccessible(True)
            return bool(found.get(execution))

        return self._of("whether its checkpoint is temporary", reflected)

    def asynchronous(self) -> bool | None:
        """Whether offsets and commits are written beside the batches (``asyncProgressTrackingEnabled``).

        Then Spark may ask for a batch before the one before it is committed.
        """
        name = self._of("class", lambda execution: str(execution.getClass().getSimpleName()))
        return None if name is None else name.startswith("AsyncProgressTracking")

    def sources(self) -> tuple[str, ...] | None:
        """What Spark calls its sources, in their order: as in the progress of the query."""

        def named(execution: Any) -> tuple[str, ...]:
            found = execution.sources()
            return tuple(str(found.apply(index).toString()) for index in range(found.size()))

        return self._of("sources", named)

    def offered(self, fed: Callable[[int], int | None] = lambda batch: None) -> float | None:
        """Rows per second that came to the query before its last batch with rows, processed or not.

        Fewer and fewer while none come, and 0 after its end; a trigger without rows does not make it 0 between two
        batches. None before a second batch. `fed` tells the rows that a batch had, by its number: Spark counts those of
        its sources each time that they are read, and before what the user has put in between.
        """

        def rate(execution: Any) -> float | None:
            if not execution.isActive():
                return 0.0
            recent = execution.recentProgress()
            newest = (recent[index] for index in range(len(recent) - 1, -1, -1))
            last = next((progress for progress in newest if progress.numInputRows() > 0), None)
            if last is None:
                return 0.0 if len(recent) else None
            told, rows = float(last.inputRowsPerSecond()), last.numInputRows()
            if not 0.0 <= told < float("inf"):
                return None
            had = fed(int(last.batchId()))
            if had is not None:
                told, rows = told * had / rows, had
            if execution.status().isDataAvailable():
                return told
            silent = time.time() - datetime.fromisoformat(last.timestamp().replace("Z", "+00:00")).timestamp()
            return min(told, rows / silent) if silent > 0.0 else told

        return self._of("last progress", rate)

    def hadoop(self, name: str) -> str | None:
        """A setting of Hadoop's (``spark.hadoop.*``), as Spark's context has it."""
        found = self._tell(name, lambda: self._session.sparkContext._jsc.hadoopConfiguration().get(name))
        return None if found is None else str(found)

    # Inside

    def _of(self, what: str, look: Callable[[Any], _T | None]) -> _T | None:
        def ask() -> _T | None:
            execution = self._execution()
            return None if execution is None else look(execution)

        return self._tell(what, ask)

    def _tell(self, what: str, ask: Callable[[], _T | None]) -> _T | None:
        try:
            return ask()
        except Exception as error:  # py4j's own, one of the JVM, or the context is gone
            log.debug("query %s: %s cannot be found out: %s", self._query_id, what, error)
            return None

    def _execution(self) -> Any:
        """Of the present run, else of the last that was seen."""
        running = self._active()
        return self._seen if running is None else running

    def _active(self) -> Any:
        """Of the present run, which is remembered; None without one."""
        if self._running is None:
            number = self._session.sparkContext._jvm.java.util.UUID.fromString(self._query_id)
            self._running = self._session._jsparkSession.sharedState().activeStreamingQueries(), number
        queries, number = self._running
        found = queries.get(number)
        if found is not None:
            self._seen = found
        return found


#: Of Spark's executions, 3.5 to 4.3; it has no accessor.
_DELETED = "deleteCheckpointOnStop"


def _value(option: Any) -> Any:
    """What a Scala option holds, or None."""
    return option.get() if option is not None and option.isDefined() else None


def _maybe(make: Callable[[Any], _T], value: Any) -> _T | None:
    return None if value is None else make(value)
