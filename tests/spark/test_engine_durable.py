"""Durable state: a query outlives its workers and its engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import penstock as pk
from durable_support import Runs
from engine_support import COUNTS, Kept, counted, numbers, state
from penstock._storage import open_storage
from penstock.errors import ConfigError, EngineError, StateLost

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture
def runs(cluster: Any, tmp_path: Path) -> Runs:
    return Runs(cluster, tmp_path)


def test_a_new_engine_goes_on_with_any_number_of_workers(cluster: Any, runs: Runs) -> None:
    for workers, bits in ((2, 4), (3, 4), (1, 6), (2, 2)):
        runs.add(2)
        with pk.Engine(cluster, workers=workers, bits=bits) as engine:
            runs.run(engine)
        assert state(runs.kept) == counted(runs.batches), f"{workers} workers"
    assert sorted(runs.kept.batches) == list(range(8))


def test_the_death_of_a_worker_costs_no_query(cluster: Any, runs: Runs) -> None:
    deaths = 0

    def sink(df: Any, batch_id: int) -> None:
        nonlocal deaths
        runs.kept(df, batch_id)
        if batch_id in (1, 3) and deaths < batch_id:
            deaths += 2 if batch_id == 3 else 1
            os.kill(engine.members()[batch_id // 3].pid, signal.SIGKILL)

    runs.add(6)
    with pk.Engine(cluster, workers=2, bits=4) as engine:
        runs.run(engine, sink=sink)
    assert deaths == 3
    assert state(runs.kept) == counted(6)


def test_without_durable_state_it_is_lost_with_a_worker(cluster: Any, runs: Runs) -> None:
    def sink(df: Any, batch_id: int) -> None:
        runs.kept(df, batch_id)
        if batch_id == 1:
            os.kill(engine.members()[0].pid, signal.SIGKILL)

    runs.add(4)
    with pk.Engine(cluster, workers=2, bits=4) as engine:
        assert isinstance(runs.fails(engine, sink=sink, checkpoint=None), StateLost)
    assert not runs.files.exists()


def test_the_state_of_a_running_query_is_seen_at_its_last_committed_batch(cluster: Any, runs: Runs) -> None:
    seen = []

    def sink(df: Any, batch_id: int) -> None:
        runs.kept(df, batch_id)
        if batch_id:
            rows = engine.state().to_pylist()
            seen.append({row["k"]: (row["n"], row["total"]) for row in rows} == counted(batch_id))

    runs.add(4)
    with pk.Engine(cluster, workers=2, bits=4) as engine:
        runs.run(engine, sink=sink)
        assert seen == [True] * 3
        with pytest.raises(ConfigError, match="no operator 'sum', only 'agg'"):
            engine.state(operator="sum")
        engine.foreach_batch(COUNTS, Kept(), name="by hand")(numbers(cluster, 0), 0)
        with pytest.raises(ConfigError, match="in memory only"):
            engine.state("by hand")


def test_a_folder_that_members_do_not_share_is_refused(cluster: Any, runs: Runs, monkeypatch: Any) -> None:
    """The driver writes to another folder than the one that the members find under that name."""
    from penstock.spark._engine import batch_function

    def elsewhere(url: str) -> Any:
        storage = open_storage(url)
        storage._path = runs.folder / "of the driver alone"  # type: ignore[attr-defined]
        return storage

    monkeypatch.setattr(batch_function, "open_storage", elsewhere)
    runs.add()
    with pk.Engine(cluster, workers=2, bits=4) as engine:
        error = runs.fails(engine)
    assert isinstance(error, EngineError) and "not one folder for both" in str(error)
    assert not runs.kept.batches
