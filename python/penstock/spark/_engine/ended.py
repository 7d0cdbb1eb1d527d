"""Which Spark queries of an engine have ended for good.

Owns: looking at the queries that have had a batch, and telling of those that have ended and cannot come back. A Spark
query is its checkpoint: while that exists the query can be started again under its id. A checkpoint that Spark made
itself, since none was given, is for one run: Spark deletes it when the query is stopped or done, and keeps it when the
query failed, for people to look at, in a folder that nobody has named. So such a query cannot come back. One that
somebody has named and that is there at the end of its query is looked at again, at a slow pace: somebody may delete it.

Invariants: one thread at most, which ends when there is nothing to look at; each end is told once, and where that
fails again at the slow pace. What cannot be found out counts as a query that may come back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock._storage import shown
from penstock.spark._engine.progress import StreamFacts

__all__ = ["Ended"]

log = logging.getLogger(__name__)

#: Seconds between two looks at a query that runs, or that waits to be told of.
_LOOK_S = 0.5
#: The same of one that has ended and may come back, or could not be told of.
_AGAIN_S = 30.0


@dataclass
class _Life:
    """One run of a Spark query."""

    #: The JVM's thread that runs its batches; when it has ended, Spark has cleaned up after the query. Or that of a
    #: thread of the user's, which ends before the query does.
    thread: Any
    number: int
    #: Where its checkpoint is; None where that cannot be found out.
    checkpoint: str | None
    #: Whether Spark made that for this run alone.
    temporary: bool
    #: Whether it was seen to have ended.
    ended: bool = False
    #: Since when Spark counts it as active no more.
    idle: float | None = None
    #: Since when it cannot come back, and when it is looked at next, of `time.monotonic`.
    gone: float | None = None
    next: float = 0.0


class Ended:
    """Watches the Spark queries of an engine.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        Any session of the context.
    name : str
        The engine's; names the thread.
    linger : float
        Seconds between the time at which a query has ended and cannot come back, and `gone`.
    gone : callable
        Called with the id of each query that cannot come back, in the thread here; again, later, where it raises.
    """

    def __init__(self, spark: Any, name: str, linger: float, gone: Callable[[str], None]) -> None:
        self._spark = spark
        self._name = name
        self._linger = linger
        self._gone = gone
        self._lock = threading.Lock()
        self._lives: dict[str, _Life] = {}
        self._closing = False
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def saw(self, query_id: str, thread: Any) -> None:
        """A Spark query has a batch, on a thread of the JVM."""
        number = int(thread.getId())
        with self._lock:
            known = self._lives.get(query_id)
        if known is not None and known.number == number:
            return
        life = _Life(thread, number, self._checkpoint(query_id), self._is_temporary(query_id))
        with self._lock:
            if self._thread is None and not self._closing:
                looks = threading.Thread(target=self._look, name=f"penstock-ended-{self._name}", daemon=True)
                try:
                    looks.start()
                except RuntimeError as error:
                    log.warning(
                        "engine %s sees from the next batch on whether queries have ended: %s", self._name, error
                    )
                    return
                self._thread = looks
            self._lives[query_id] = life
        self._changed.set()

    def forget(self, query_id: str) -> None:
        """A query is dropped: nobody wants to know of its end."""
        with self._lock:
            self._lives.pop(query_id, None)
        self._changed.set()

    def runs(self, query_id: str) -> bool:
        """Whether the Spark query of an id still runs."""
        with self._lock:
            life = self._lives.get(query_id)
        if life is None:
            return False
        # Of a run that has had no batch yet as well; the thread of the last one lives on a little.
        active = self._active(query_id)
        return self._alive(life) if active is None else active

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._closing = True
            thread = self._thread
        self._changed.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(5)

    # The thread

    def _look(self) -> None:
        while True:
            self._changed.clear()
            now = time.monotonic()
            with self._lock:
                due = [(query_id, life) for query_id, life in self._lives.items() if life.next <= now]
            for query_id, life in due:
                try:
                    if self._is_over(query_id, life, now):
                        self._settle(query_id, life)
                except Exception:  # of this query alone: the others are looked at all the same
                    life.next = now + _AGAIN_S
                    log.exception("whether query %s has ended for good cannot be found out", query_id)
            with self._lock:
                if self._closing or not self._lives:
                    self._thread = None
                    return
                pause = min(life.next for life in self._lives.values()) - time.monotonic()
            self._changed.wait(max(0.0, pause))

    def _is_over(self, query_id: str, life: _Life, now: float) -> bool:
        """Whether its query cannot come back, and was kept for long enough; else says when to look again."""
        if not life.ended and self._active(query_id) is False:
            life.idle = now if life.idle is None else life.idle
            # A thread of the user's may outlive its query, in a pool, say. Spark's own does so while it cleans up.
            life.ended = not self._alive(life) or now - life.idle >= _AGAIN_S
        elif not life.ended:
            life.idle = None
        life.next = now + _LOOK_S
        if not life.ended:
            return False
        if not life.temporary and self._exists(life.checkpoint):
            life.gone, life.next = None, now + _AGAIN_S
            return False
        life.gone = now if life.gone is None else life.gone
        return now - life.gone >= self._linger

    def _settle(self, query_id: str, life: _Life) -> None:
        with self._lock:
            if self._lives.get(query_id) is not life:
                return  # it runs again
        try:
            self._gone(query_id)
        except Exception:
            life.next = time.monotonic() + _AGAIN_S
            log.exception("query %s has ended and could not be dropped, which is tried again", query_id)
            return
        with self._lock:
            if self._lives.get(query_id) is life:
                del self._lives[query_id]

    # The JVM

    def _alive(self, life: _Life) -> bool:
        try:
            return bool(life.thread.isAlive())
        except Exception:
            return False  # the JVM is gone, and all queries with it

    def _active(self, query_id: str) -> bool | None:
        """Whether Spark counts the query as active; None where it does not tell."""
        try:
            return self._running(query_id) is not None
        except Exception:
            return None

    def _checkpoint(self, query_id: str) -> str | None:
        try:
            return str(self._running(query_id).resolvedCheckpointRoot())
        except Exception as error:
            log.debug("query %s: its checkpoint cannot be found out: %s", query_id, error)
            return None

    def _is_temporary(self, query_id: str) -> bool:
        """Whether its checkpoint is known to be Spark's own, of this run alone."""
        return StreamFacts(self._spark, query_id).temporary() is True

    def _running(self, query_id: str) -> Any:
        """Spark's own of an active query of any session of the context."""
        number = self._spark.sparkContext._jvm.java.util.UUID.fromString(query_id)
        return self._spark._jsparkSession.sharedState().activeStreamingQueries().get(number)

    def _exists(self, checkpoint: str | None) -> bool:
        """Whether a checkpoint is there, or may be."""
        if checkpoint is None:
            return True
        try:
            sc = self._spark.sparkContext
            path = sc._jvm.org.apache.hadoop.fs.Path(checkpoint, "metadata")
            return bool(path.getFileSystem(sc._jsc.hadoopConfiguration()).exists(path))
        except Exception as error:
            text = shown(checkpoint, str(error))
            log.debug("checkpoint %s cannot be looked at: %s", shown(checkpoint), text)
            return True
