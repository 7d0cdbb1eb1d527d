"""Durable state: a query outlives its workers and its engine."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from durable_support import Runs, only
from engine_support import COUNTS, Kept, bag, counted, numbers, state, wait_for
from penstock._storage import open_storage
from penstock.errors import ConfigError, EngineError, StateLost
from penstock.spark._session.collect import to_table

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
            # The one before has a successor by then, on a busy machine too.
            wait_for(lambda: len(engine.members()) == 2, what="both members are there")
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


def test_a_mount_without_links_keeps_a_query(cluster: Any, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims are made under their own names there, and looked at again: a second engine shuts the first one out."""

    def link(*paths: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    in_place: list[str] = []
    folder = type(open_storage(str(runs.folder)))
    create = folder._create_in_place  # type: ignore[attr-defined]

    def created(self: Any, path: Path, data: bytes) -> bool:
        in_place.append(path.name)
        return bool(create(self, path, data))

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(folder, "_create_in_place", created)
    runs.add(2)
    with pk.Engine(cluster, workers=1, bits=2) as first:
        runs.run(first)
        runs.add()
        with pk.Engine(cluster, workers=1, bits=2, takeover=True) as second:
            runs.run(second)
            assert f"claim-{2:020}" in [path.name for path in runs.files.glob("*claim-*")]
            runs.add()
            error = runs.fails(first)
            assert isinstance(error, EngineError) and "claim 2" in str(error)
    with pk.Engine(cluster, workers=2, bits=2) as third:
        runs.run(third)
    assert set(in_place) >= {f"claim-{number:020}" for number in (1, 2, 3)}, "no link was made"
    assert state(runs.kept) == counted(4) and sorted(runs.kept.batches) == list(range(4))


def test_timers_and_aggregates_of_users_outlive_engines(cluster: Any, runs: Runs) -> None:
    def remind(n: int | None, k: int, v: int) -> Any:
        return (n or 0) + 1, None, (v + 700, v)

    def reminded(n: int, time: int, v: int, k: int) -> Any:
        assert time == v + 700
        return n, (k, time, n)

    class Sum(pk.Aggregator):
        def create(self) -> Any:
            return 0

        def accumulate(self, states: list[Any], groups: Any, rows: Any) -> None:
            for group, value in zip(groups.to_pylist(), rows["v"].to_pylist(), strict=True):
                states[group] += value

        def merge(self, state: Any, other: Any) -> Any:
            return state + other

        def finish(self, states: list[Any]) -> Any:
            return pa.table({"n": states})

    made = "k bigint, at bigint, n bigint"
    keyed = pk.Flow("k bigint, v bigint", event_time="v").key_by("k")
    timed = keyed.stateful_map(remind, schema=made, on_timer=reminded, ttl="1h", name="reminders")
    sums = keyed.window(pk.tumbling("1s")).aggregate(Sum(), schema="n bigint", columns=["v"], name="sums")
    flow = timed.union(
        sums.map_batches(lambda b: b.select(["k", "window_end", "n"]).rename_columns(["k", "at", "n"]), made)
    )
    for workers, bits in ((2, 4), (3, 6), (1, 2)):
        runs.add(2)
        with pk.Engine(cluster, workers=workers, bits=bits) as engine:
            runs.run(engine, flow)
    counts: Counter[int] = Counter()
    for batch in range(6):
        values = range(600 * batch, 600 * (batch + 1))
        counts.update(value % 7 for value in values)
        # The watermark is the greatest v, that of the batch before was 600 less.
        due = [at for at in range(values[-1] - 600, values[-1]) if at >= 700]
        expected = Counter(((at - 700) % 7, at, counts[(at - 700) % 7]) for at in due)
        for end in (one for one in range(1_000, values[-1] + 1, 1_000) if one > values[-1] - 600):
            expected.update((k, end, sum(v for v in range(end - 1_000, end) if v % 7 == k)) for k in range(7))
        assert bag(runs.kept.batches[batch]) == expected, batch
    held = pk.state.read(runs.check, "reminders").to_pylist()
    assert sorted(row["k"] for row in held) == list(range(7)) and all(row["readable"] for row in held)


def test_an_end_that_was_not_meant_is_taken_back_by_hand(cluster: Any, runs: Runs) -> None:
    """As the messages and docs/checkpoint-format.md say."""
    flow = pk.Flow("k bigint, v bigint").key_by("k").agg(n=pk.count(), total=pk.sum("v"), emit="final")
    runs.add()
    with pk.Engine(cluster, workers=2, bits=4) as engine:
        query = runs.rest(engine, flow)
        query.stop()
        assert to_table(engine.finish(query)).num_rows > 0
    runs.add()
    with pk.Engine(cluster, workers=1, bits=4) as engine:
        error = runs.fails(engine, flow)
        assert re.search(r"is finished after batch 0: .* delete its file manifest-\.\.\.-finished-\.\.\.", str(error))
        with pytest.raises(EngineError, match="by an engine before this one"):
            engine.finish(runs.function.query_id)
        only(runs.files, "manifest-*-finished-*").unlink()
        query = runs.rest(engine, flow)
        query.stop()
        rows = to_table(engine.finish(query)).to_pylist()
    assert {row["k"]: (row["n"], row["total"]) for row in rows} == counted(2)
