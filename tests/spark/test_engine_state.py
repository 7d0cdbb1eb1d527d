"""`pk.state` beside the engine: what a query has written is what its rows give, and no other flow goes on from it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import penstock as pk
from engine_support import Kept, counted, numbers, stream, write
from penstock.errors import EngineError, PenstockError

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

SCHEMA = "k bigint, v bigint"
#: ``PENSTOCK_GOLDEN=1`` replaces it by what the test writes.
KEPT = Path(__file__).parents[1] / "data" / "checkpoint-v1-engine"


def sums() -> pk.Flow:
    def summed(state: Any, k: int, v: int) -> Any:  # in here, so that it is pickled by value
        total = (state or 0) + v
        return total, (k, total)

    return pk.Flow(SCHEMA).key_by("k").stateful_map(summed, schema="k bigint, total bigint").key_by("k")


SUMS = sums()
FLOW = SUMS.agg(n=pk.count(), most=pk.max("total"))
VALUES, COUNTS = "stateful_map", "agg"


def check(checkpoint: Path, batch: int | None, batches: int) -> None:
    """Keys and values after so many batches."""
    expected = counted(batches)
    counts = {row["k"]: (row["n"], row["most"]) for row in pk.state.read(checkpoint, COUNTS, batch).to_pylist()}
    assert counts == expected
    values = pk.state.read(checkpoint, VALUES, batch)
    assert {row["k"]: row["value"] for row in values.to_pylist()} == {k: str(sum_) for k, (_, sum_) in expected.items()}
    assert values["readable"].to_pylist() == [True] * len(expected)


def run(cluster: Any, folder: Path, flow: pk.Flow, batches: range, workers: int) -> Any:
    for batch in batches:
        write(cluster, folder / "in", batch, numbers(cluster, batch))
    with pk.Engine(cluster, workers=workers, bits=2) as engine:
        function = engine.foreach_batch(flow, Kept())
        query = stream(cluster, folder / "in", SCHEMA, function, folder / "check")
        try:
            query.awaitTermination(120)
        except Exception:
            assert function.error is not None
        return function.error


def changing(swapped: bool) -> pk.Flow:
    """Two functions, then two aggregates, that are told apart by their names only."""

    def summed(state: Any, k: int, v: int) -> Any:
        return (state or 0) + v, (k, v)

    def greatest(state: Any, k: int, v: int) -> Any:
        return max(state or 0, v), (k, v)

    flow = pk.Flow(SCHEMA)
    maps = [("total", summed), ("most", greatest)]
    for name, step in reversed(maps) if swapped else maps:
        flow = flow.key_by("k").stateful_map(step, schema=SCHEMA, name=name)
    for name in ("groups", "rows") if swapped else ("rows", "groups"):
        flow = flow.key_by("k").agg(n=pk.count(), emit="final", name=name)
    return flow


def test_steps_that_change_places_go_on_from_their_own_state(cluster: Any, tmp_path: Path) -> None:
    place = tmp_path / "check"

    def kept(name: str, column: str) -> dict[int, str]:
        return {row["k"]: str(row[column]) for row in pk.state.read(place, name).to_pylist()}

    def run(engine: pk.Engine, batches: range, swapped: bool) -> None:
        for batch in batches:
            write(cluster, tmp_path / "in", batch, numbers(cluster, batch))
        function = engine.foreach_batch(changing(swapped), Kept())
        stream(cluster, tmp_path / "in", SCHEMA, function, place).awaitTermination(120)
        sums = counted(batches.stop)
        assert kept("total", "value") == {k: str(total) for k, (_, total) in sums.items()}
        assert kept("most", "value") == {k: str((batches.stop * 600 - 1 - k) // 7 * 7 + k) for k in range(7)}

    with pk.Engine(cluster, workers=2, bits=2) as engine:
        run(engine, range(2), False)
        rows = kept("rows", "n")
        assert rows == {k: str(n) for k, (n, _) in counted(2).items()} and kept("groups", "n") == {}
        # Workers that still have the state.
        run(engine, range(2, 3), True)
        groups = {k: str(counted(3)[k][0] - counted(2)[k][0]) for k in range(7)}
        assert kept("rows", "n") == rows and kept("groups", "n") == groups
    with pk.Engine(cluster, workers=1, bits=2) as engine:
        run(engine, range(3, 4), False)
        now = {k: str(counted(2)[k][0] + counted(4)[k][0] - counted(3)[k][0]) for k in range(7)}
        assert kept("rows", "n") == now and kept("groups", "n") == groups
    found = pk.state.operators(place)
    assert found["name"].to_pylist() == ["total", "most", "rows", "groups"]


def test_what_a_query_writes_is_read(cluster: Any, tmp_path: Path) -> None:
    place = tmp_path / "check"
    assert run(cluster, tmp_path, FLOW, range(3), 2) is None
    found = pk.state.manifests(place)
    assert found["batch"].to_pylist()[-1] == 2 and found["problem"].null_count == found.num_rows
    check(place, None, 3)
    for batch in found["batch"].to_pylist():
        check(place, batch, batch + 1)
    if os.environ.get("PENSTOCK_GOLDEN"):
        shutil.rmtree(KEPT, ignore_errors=True)
        shutil.copytree(place / "_penstock", KEPT)
    assert run(cluster, tmp_path, FLOW, range(3, 5), 3) is None
    check(place, None, 5)
    # The same step with another aggregate.
    error = run(cluster, tmp_path, SUMS.agg(n=pk.count(), most=pk.min("total")), range(5, 6), 1)
    assert isinstance(error, PenstockError)
    assert "Int64 -> count, max(Int64) with updates" in str(error) and "count, min(Int64) with updates" in str(error)
    check(place, None, 5)


def test_what_spark_has_not_committed_is_not_shown(cluster: Any, tmp_path: Path) -> None:
    """The manifest of a batch is there before Spark's commit: that of the first one is no state of anything yet."""
    for batch in range(2):
        write(cluster, tmp_path / "in", batch, numbers(cluster, batch))
    shown: list[dict[int, tuple[int, int]]] = []
    with pk.Engine(cluster, workers=1, bits=2) as engine:
        function = engine.foreach_batch(SUMS.agg(n=pk.count(), most=pk.max("total")), Kept())

        def call(df: Any, batch_id: int) -> None:
            function(df, batch_id)
            assert list((tmp_path / "check" / "_penstock").glob(f"manifest-{batch_id:020}-*"))
            if batch_id == 0:
                with pytest.raises(EngineError, match=r"has committed no batch of it so far\. Ask again when"):
                    engine.state(function.query_id, COUNTS)
            else:
                table = engine.state(function.query_id, COUNTS)
                shown.append({row["k"]: (row["n"], row["most"]) for row in table.to_pylist()})

        stream(cluster, tmp_path / "in", SCHEMA, call, tmp_path / "check").awaitTermination(120)
    assert shown == [counted(1)]
