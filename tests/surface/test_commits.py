"""Whether Spark has committed a batch, as an engine asks it, against as much of Spark as is asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine_support import wait_for
from penstock.spark._engine.commits import Commits


class Spark:
    """Stands for a session and all that is reached through it; queries that run are those in `active`."""

    _jsc = object()

    def __init__(self) -> None:
        self.active: dict[str, Any] = {}
        self.sparkContext = self.java = self.util = self.UUID = self._jvm = self._jsparkSession = self
        self.fromString = str

    def sharedState(self) -> Spark:
        return self

    def activeStreamingQueries(self) -> dict[str, Any]:
        return self.active

    def start(self, query: str, committed: int) -> None:
        option = SimpleNamespace(isDefined=lambda: True, get=lambda: committed)
        log = SimpleNamespace(getLatestBatchId=lambda: option)
        self.active[query] = SimpleNamespace(commitLog=lambda: log, runId=lambda: f"run of {query}")


class Engine:
    """As much of an engine as commits are told to."""

    def __init__(self) -> None:
        self.spark = Spark()
        self.queries: set[str] = set()
        self.posted: list[Any] = []
        self.acts: dict[str, Any] = {}
        executor: Any = SimpleNamespace(
            perform=lambda **acts: self.acts.update(acts), post=self.posted.append, begin=threading.Thread.start
        )
        self.commits = Commits(self.spark, "commits", executor, self.queries.__contains__)

    def begin(self, query: str) -> None:
        """As the first batch of a query begins, before the engine has the query."""
        assert self.commits.facts(query).run_id() == f"run of {query}"

    def run(self, query: str) -> None:
        """As a batch goes on then."""
        self.queries.add(query)
        assert self.commits.facts(query).active()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.commits.close()


@pytest.mark.parametrize("others", [[], ["b"]])
def test_the_only_batch_of_a_query_is_known_to_be_committed(engine: Engine, others: list[str]) -> None:
    """Also where another query has its first batch at the same time: what was known of the first was thrown away."""
    for query in ["a", *others]:
        engine.spark.start(query, 0)
        engine.begin(query)
    engine.run("a")
    engine.spark.active.clear()
    engine.acts["WatchCommit"]({"query": "a", "epoch": 0})
    wait_for(lambda: engine.posted, what="it is told how the query rests")
    assert engine.posted == [{"Committed": {"query": "a", "epoch": 0}}]


def test_what_is_known_of_queries_that_the_engine_never_had_or_has_no_more_goes(engine: Engine) -> None:
    """Each start of a query without a checkpoint has another id."""
    for number in range(5):
        query = f"q{number}"
        engine.spark.start(query, 0)
        engine.begin(query)
        if number % 2:
            engine.run(query)
        engine.spark.active.clear()
        engine.queries.clear()
    assert len(engine.commits._facts) == 1
