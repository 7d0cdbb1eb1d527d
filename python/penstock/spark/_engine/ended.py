"""Which Spark queries of an engine have ended for good.

Owns: looking at the queries that have had a batch, and telling of those that have ended and cannot come back. A Spark
query is its checkpoint: while that exists the query can be started again under its id. Spark deletes the checkpoint
that it made itself when the query is stopped or done, and keeps it when the query failed.

Invariants: one thread at most, which ends when there is nothing to look at; each end is told once. What cannot be found
out counts as a query that may come back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Ended"]

log = logging.getLogger(__name__)

#: Seconds between two looks.
_LOOK_S = 0.5


@dataclass
class _Life:
    """One run of a Spark query."""

    #: The JVM's thread that runs its batches; when it has ended, Spark has cleaned up after the query.
    thread: Any
    number: int
    #: Where its checkpoint is; None where that cannot be found out.
    checkpoint: str | None
    #: When it was seen to have ended.
    ended: float | None = None


class Ended:
    """Watches the Spark queries of an engine.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        Any session of the context.
    name : str
        The engine's; names the thread.
    linger : float
        Seconds between the end of a query and `gone`.
    gone : callable
        Called with the id of each query that cannot come back, in the thread here.
    """

    def __init__(self, spark: Any, name: str, linger: float, gone: Callable[[str], None]) -> None:
        self._spark = spark
        self._name = name
        self._linger = linger
        self._gone = gone
        self._lock = threading.Lock()
        self._lives: dict[str, _Life] = {}
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def saw(self, query_id: str, thread: Any) -> None:
        """A Spark query has a batch, on a thread of the JVM."""
        number = int(thread.getId())
        with self._lock:
            known = self._lives.get(query_id)
        if known is not None and known.number == number:
            return
        life = _Life(thread, number, self._checkpoint(query_id))
        with self._lock:
            self._lives[query_id] = life
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._look, name=f"penstock-ended-{self._name}", daemon=True)
                self._thread.start()

    def runs(self, query_id: str) -> bool:
        """Whether the Spark query of an id still runs."""
        with self._lock:
            life = self._lives.get(query_id)
        return life is not None and self._alive(life) and self._active(query_id)

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(5)

    # The thread

    def _look(self) -> None:
        while not self._closing.wait(_LOOK_S):
            with self._lock:
                lives = list(self._lives.items())
            over = [(query_id, life) for query_id, life in lives if self._over(life)]
            for query_id, life in over:
                self._settle(query_id, life)
            with self._lock:
                if not self._lives:
                    self._thread = None
                    return

    def _over(self, life: _Life) -> bool:
        """Whether there is nothing more to see."""
        if life.ended is None:
            if self._alive(life):
                return False
            life.ended = time.monotonic()
        return self._exists(life.checkpoint) or time.monotonic() - life.ended >= self._linger

    def _settle(self, query_id: str, life: _Life) -> None:
        with self._lock:
            if self._lives.get(query_id) is not life:
                return  # it runs again
            del self._lives[query_id]
        if not self._exists(life.checkpoint):
            try:
                self._gone(query_id)
            except Exception:
                log.exception("query %s has ended and could not be dropped", query_id)

    # The JVM

    def _alive(self, life: _Life) -> bool:
        try:
            return bool(life.thread.isAlive())
        except Exception:
            return False  # the JVM is gone, and all queries with it

    def _checkpoint(self, query_id: str) -> str | None:
        try:
            return str(self._running(query_id).resolvedCheckpointRoot())
        except Exception as error:
            log.debug("query %s: its checkpoint cannot be found out: %s", query_id, error)
            return None

    def _active(self, query_id: str) -> bool:
        """Whether Spark counts a query as active; its thread lives a little longer."""
        try:
            return self._running(query_id) is not None
        except Exception:
            return True

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
            log.debug("checkpoint %s cannot be looked at: %s", checkpoint, error)
            return True
