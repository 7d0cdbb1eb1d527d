"""Telling the engine's protocol that Spark has committed the last batch of a query that rests.

Owns: the thread that looks at commit logs. The protocol says of which query it wants to know (members have come or are
to go, and only the commit is missing), so nothing is looked at while nothing waits; the thread ends with the last.

Invariant: what is told was read from Spark's own log. A query that Spark does not run is looked at once: its last run
may have committed before it ended, and what it has not committed it will ask for again, when it is started again: that
is told, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import EngineError
from penstock.spark._engine.executor import Executor
from penstock.spark._engine.progress import StreamFacts

__all__ = ["Commits"]

log = logging.getLogger(__name__)

#: Seconds between two looks, at first and at last: Spark commits within moments of the return of a batch.
_FIRST_S, _LAST_S = 0.05, 1.0


class Commits:
    """The commit logs that somebody waits for.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        Any session of the context.
    name : str
        The engine's; names the thread.
    executor : Executor
        Of the engine; must not have started.
    known : callable
        Whether the engine still has a query, by its id.
    """

    def __init__(self, spark: Any, name: str, executor: Executor, known: Callable[[str], bool]) -> None:
        self._spark = spark
        self._name = name
        self._executor = executor
        self._known = known
        self._lock = threading.Lock()
        self._facts: dict[str, StreamFacts] = {}
        #: Query by id with the batch that it has to commit.
        self._wanted: dict[str, int] = {}
        self._changed = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        executor.perform(WatchCommit=self._watch)

    def facts(self, query_id: str) -> StreamFacts:
        """What Spark knows of a query; ask during its batches, so that its checkpoint is known when it has ended."""
        with self._lock:
            if query_id not in self._facts:
                # One in its first batch may not be the engine's yet: it asks again as soon as it is.
                self._facts = {one: facts for one, facts in self._facts.items() if self._known(one)}
                self._facts[query_id] = StreamFacts(self._spark, query_id)
            return self._facts[query_id]

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._closing = True
            thread = self._thread
        self._changed.set()
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(5)

    def _watch(self, asked: Mapping[str, Any]) -> None:
        with self._lock:
            self._wanted[asked["query"]] = asked["epoch"]
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._look, name=f"penstock-commits-{self._name}", daemon=True)
                self._executor.begin(self._thread)
        self._changed.set()

    # The thread

    def _look(self) -> None:
        pause = _FIRST_S
        while True:
            with self._lock:
                if self._closing or not self._wanted:
                    self._thread = None
                    return
                wanted = list(self._wanted.items())
            for query_id, epoch in wanted:
                if self._settled(query_id, epoch):
                    with self._lock:
                        if self._wanted.get(query_id) == epoch:
                            del self._wanted[query_id]
            if self._changed.wait(pause):
                self._changed.clear()
                pause = _FIRST_S
            pause = min(2 * pause, _LAST_S)

    def _settled(self, query_id: str, epoch: int) -> bool:
        """Tells of a commit; whether there is nothing more to see."""
        facts = self.facts(query_id)
        # Asked first: what it commits before it ends is seen then.
        active = facts.active()
        committed = facts.committed()
        if committed is not None and committed >= epoch:
            log.debug("query %s: Spark has committed batch %d", query_id, committed)
            self._post({"Committed": {"query": query_id, "epoch": committed}}, query_id)
            return True
        if active is False:
            # It asks for the batch again when it is started again, and for nothing before.
            self._post({"Rests": {"query": query_id, "epoch": epoch}}, query_id)
            return True
        # Not known: Spark is asked again, unless it never ran such a query, or has ended.
        return not facts.seen or self._spark.sparkContext._jsc is None

    def _post(self, event: dict[str, Any], query_id: str) -> None:
        try:
            self._executor.post(event)
        except EngineError as error:
            log.debug("how query %s rests is told to nobody: %s", query_id, error)
