"""Queries started again in the same engine with edited functions: the state is kept, the old function is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as pk
from engine_support import COUNTS, Gate, Kept, bag, numbers, stream, wait_for, write
from penstock.errors import EngineError, UserFunctionError

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]

SCHEMA = "k bigint, v bigint"
Step = Callable[[Any, int, int], Any]


@pytest.fixture(scope="module")
def engine(cluster: Any) -> Iterator[pk.Engine]:
    with pk.Engine(cluster, workers=2, name="restart", bits=4) as engine:
        yield engine


def adding(factor: int) -> Step:
    """A step that counts the rows of a key and says what they are worth."""

    def add(rows: int | None, k: int, v: int) -> Any:
        return (rows or 0) + 1, (k, ((rows or 0) + 1) * factor)

    return add


def keyed(step: Step, before: Callable[[Any], Any] | None = None) -> pk.Flow:
    flow = pk.Flow(SCHEMA) if before is None else pk.Flow(SCHEMA).map_batches(before)
    return flow.key_by("k").stateful_map(step, schema="k bigint, worth bigint")


class Runs:
    """One Spark query, run again and again from its checkpoint with one more batch each time."""

    def __init__(self, cluster: Any, engine: pk.Engine, folder: Path) -> None:
        self.cluster, self.engine, self.folder = cluster, engine, folder
        self.kept = Kept()
        self.batches = 0
        self.function: Any = None

    def add(self) -> None:
        """One row of key 1 and one of key 2."""
        rows = numbers(self.cluster, self.batches, rows=2, keys=2, partitions=1)
        write(self.cluster, self.folder / "in", self.batches, rows)
        self.batches += 1

    def start(self, flow: pk.Flow, sink: Any = None, **options: Any) -> Any:
        self.function = self.engine.foreach_batch(flow, sink or self.kept, **options)
        return stream(self.cluster, self.folder / "in", SCHEMA, self.function, self.folder / "check")

    def run(self, flow: pk.Flow, sink: Any = None, **options: Any) -> None:
        self.start(flow, sink, **options).awaitTermination(120)

    def worth(self, batch: int) -> list[int]:
        return sorted(self.kept.batches[batch]["worth"].to_pylist())


@pytest.fixture
def runs(cluster: Any, engine: pk.Engine, tmp_path: Path) -> Runs:
    return Runs(cluster, engine, tmp_path)


def test_an_edited_function_is_used_with_the_state_kept(runs: Runs) -> None:
    def renamed(rows: int | None, k: int, v: int) -> Any:
        return (rows or 0) + 1, (k, -(rows or 0) - 1)

    flows = [keyed(adding(1)), keyed(adding(100)), keyed(renamed)]
    for flow in flows:
        runs.add()
        runs.run(flow)
    assert [runs.worth(batch) for batch in range(3)] == [[1, 1], [200, 200], [-3, -3]]
    # Bins that moved since are where they were moved to.
    target = [1] * 16
    runs.engine.migrate(to=target, query=runs.function.query_id).wait(60)
    runs.add()
    runs.run(keyed(adding(10)))
    assert runs.worth(3) == [40, 40]
    assert runs.engine.owners(runs.function.query_id) == [target]


def test_a_function_that_raised_is_mended(runs: Runs) -> None:
    def broken(rows: int | None, k: int, v: int) -> Any:
        raise ValueError(f"no {v}")

    runs.add()
    runs.run(keyed(adding(1)))
    runs.add()
    for _ in range(2):
        with pytest.raises(Exception, match="ValueError"):
            runs.run(keyed(broken))
        assert isinstance(runs.function.error, UserFunctionError)
    runs.run(keyed(adding(1)))
    assert [runs.worth(batch) for batch in range(2)] == [[1, 1], [2, 2]]


def test_a_function_that_cannot_be_restored_is_mended(runs: Runs) -> None:
    """Also the members that could restore it go on from the state that they had."""

    class Unreadable:
        def __reduce__(self) -> Any:
            return (int, ("no number",))

    bad = Unreadable()

    def broken(rows: int | None, k: int, v: int) -> Any:
        return rows, (k, bad)

    runs.add()
    runs.run(keyed(adding(1)))
    runs.add()
    with pytest.raises(Exception, match="no number"):
        runs.run(keyed(broken))
    runs.run(keyed(adding(5)))
    assert [runs.worth(batch) for batch in range(2)] == [[1, 1], [10, 10]]


def test_an_epoch_that_nobody_was_given_is_computed_by_the_new_function(runs: Runs) -> None:
    gate = Gate(runs.folder)
    runs.add()
    runs.run(keyed(adding(1), gate.function()))
    runs.add()
    gate.close()
    query = runs.start(keyed(adding(1), gate.function()))
    wait_for(gate.reached.exists, what="the epoch is under way")
    query.stop()
    gate.open()
    runs.run(keyed(adding(100), gate.function()))
    assert [runs.worth(batch) for batch in range(2)] == [[1, 1], [200, 200]]


def test_a_batch_that_was_computed_is_served_as_it_was(runs: Runs) -> None:
    """Its rows are in the state already, and a sink may have written some of them."""
    seen = []

    def fails(df: Any, batch_id: int) -> None:
        runs.kept(df, batch_id)
        seen.append(bag(runs.kept.batches[batch_id]))
        raise OSError("the disk is full")

    runs.add()
    with pytest.raises(Exception, match="the disk is full"):
        runs.run(keyed(adding(1)), fails)
    runs.add()
    runs.run(keyed(adding(100)))
    assert bag(runs.kept.batches[0]) == seen[0] and runs.worth(1) == [200, 200]


def test_a_batch_is_computed_again_where_its_columns_are_others_now(runs: Runs) -> None:
    """What came out before does not fit what is asked for, and never would."""

    def named(worth: str) -> pk.Flow:
        return keyed(adding(1)).map_batches(
            lambda batch: batch.rename_columns(["k", worth]), f"k bigint, {worth} bigint"
        )

    def wants(df: Any, batch_id: int) -> None:
        runs.kept(df.select("k", "worth"), batch_id)

    runs.add()
    for _ in range(2):
        with pytest.raises(Exception, match="worth"):
            runs.run(named("value"), wants)
    runs.run(named("worth"), wants)
    runs.add()
    runs.run(named("worth"), wants)
    assert [runs.worth(batch) for batch in range(2)] == [[1, 1], [2, 2]]


@pytest.mark.parametrize("place", ["query", None])
def test_another_flow_is_refused_with_the_reason(runs: Runs, place: str | None) -> None:
    why = {"query": "the flow has nothing of that name", None: r"its step 1 \(agg\) is not that of the flow before"}
    runs.add()
    runs.run(keyed(adding(1)), checkpoint=place)
    runs.add()
    with pytest.raises(Exception, match=why[place]):
        runs.run(COUNTS, checkpoint=place)
    assert isinstance(runs.function.error, EngineError)
    runs.run(keyed(adding(1)), checkpoint=place)
    assert runs.worth(1) == [2, 2]
