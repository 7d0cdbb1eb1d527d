"""A member dies while a migration that a user has asked for moves bins: the results are exact, and the handle ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as pk
from durable_support import SCHEMA, Runs, kill
from engine_support import Portions, bag, numbers, wait_for, write
from penstock.errors import EngineError

pytestmark = [pytest.mark.spark, pytest.mark.fault, pytest.mark.timeout(240)]

ROWS, KEYS = 120_000, 500


@pytest.fixture(scope="module")
def engine(cluster: Any) -> Iterator[pk.Engine]:
    # 240 slices a batch: the rows of the next few are on their way while a bin moves.
    with pk.Engine(cluster, workers=2, bits=6, slice_rows=500, name="moving") as engine:
        yield engine


@pytest.fixture
def runs(cluster: Any, engine: pk.Engine, tmp_path: Path) -> Runs:
    wait_for(lambda: len(engine.members()) == 2, what="all members")
    return Runs(cluster, tmp_path)


def add(runs: Runs, batches: int) -> None:
    for _ in range(batches):
        write(runs.cluster, runs.inputs, runs.batches, numbers(runs.cluster, runs.batches, ROWS, KEYS))
        runs.batches += 1


def is_right(runs: Runs) -> None:
    """Every batch gave each key once, with the count and sum of all its rows so far."""
    assert sorted(runs.kept.batches) == list(range(runs.batches))
    for batch, table in runs.kept.batches.items():
        each = (batch + 1) * ROWS // KEYS
        sums = ((k, each, each * k + KEYS * each * (each - 1) // 2) for k in range(KEYS))
        assert bag(table) == dict.fromkeys(sums, 1), f"batch {batch}"


@pytest.mark.parametrize(("victim", "gap"), [(0, None), (1, None), (0, "drain")])
def test_a_member_while_bins_move(engine: pk.Engine, runs: Runs, victim: int, gap: str | None) -> None:
    """Bin by bin, while a batch runs: some have arrived, others are still to go, and one may be on its way."""
    # Behind the first one "drain" waits for the end of the batch.
    least = 2 if gap is None else 1
    portions = Portions(runs.folder)
    flow = pk.Flow(SCHEMA).map_batches(portions.function()).key_by("k").agg(n=pk.count(), total=pk.sum("v"))

    def sink(df: Any, batch_id: int) -> None:
        runs.kept(df, batch_id)
        if batch_id == 0:
            portions.begin()

    def arrived() -> int:
        log = engine.moves().to_pylist()
        return sum(entry["query"] == runs.function.query_id and entry["what"] == "state" for entry in log)

    def further() -> bool:
        portions.allow(1)
        wait_for(portions.taken, what="the next block is taken")
        return arrived() >= least

    add(runs, 3)
    query = runs.start(engine, flow, sink)
    try:
        wait_for(lambda: portions.folder.exists() and portions.taken(), what="the second batch runs")
        query_id = runs.function.query_id
        before = engine.owners(query_id)[0]
        moving = engine.migrate(to=[1 - owner for owner in before], strategy="fluid", gap=gap, query=query_id)
        wait_for(further, what="bins have moved")
        # Nothing passes now, and a step ends when what came before it has passed.
        assert not moving.done and arrived() < len(before)
        kill(engine.members()[victim])
    finally:
        portions.end()
    query.awaitTermination(120)
    is_right(runs)
    with pytest.raises(EngineError, match=r"engine\.owners\(\) says where its bins are"):
        moving.wait(60)
    assert moving.done and moving.report.queries == (query_id,) and moving.report.ended
    # Who has the place of the dead one gets its share with the next batch, and then moves go as ever.
    wait_for(lambda: len(engine.members()) == 2, what="a replacement")
    add(runs, 1)
    runs.run(engine, flow, sink)
    wait_for(lambda: Counter(engine.owners(query_id)[0]) == {0: 32, 1: 32}, what="both have their share")
    to = [1 - owner for owner in engine.owners(query_id)[0]]
    assert engine.migrate(to=to, query=query_id).wait(60).bins == 64 and engine.owners(query_id) == [to]
    is_right(runs)
