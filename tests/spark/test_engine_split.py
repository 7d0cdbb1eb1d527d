"""Bins of an engine's queries, split and merged while batches run, workers die and engines follow each other."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as pk
from durable_support import Runs
from engine_support import COUNTS, Kept, counted, numbers, state, wait_for
from penstock.errors import ConfigError, EngineError

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture
def runs(cluster: Any, tmp_path: Path) -> Runs:
    return Runs(cluster, tmp_path)


def bins(engine: pk.Engine) -> dict[tuple[int, int], int]:
    """The worker of each bin and part."""
    return {(row["prefix"], row["bits"]): row["worker"] for row in engine.bins().to_pylist()}


def test_a_split_bin_outlives_a_worker_and_the_engine(cluster: Any, runs: Runs) -> None:
    """Splits, moves and merges are asked for in the sinks of batches, and take effect while the next ones run."""
    done: list[int] = []

    def run(engine: pk.Engine, deeds: dict[int, Callable[[], Any]]) -> None:
        def sink(df: Any, batch_id: int) -> None:
            runs.kept(df, batch_id)
            deed = deeds.get(batch_id)
            # A sink is called again when its batch is computed again.
            if deed is not None and batch_id not in done:
                done.append(batch_id)
                deed()

        runs.add(5)
        runs.run(engine, sink=sink)
        assert state(runs.kept) == counted(runs.batches)

    with pk.Engine(cluster, workers=2, bits=2) as engine:
        run(
            engine,
            {
                0: lambda: engine.split([1, 2], by=2),
                1: lambda: engine.migrate(moves={1: 0, (8, 4): 1, (9, 4): 0}),
                2: lambda: engine.split((9, 4)).wait(60),
                3: lambda: os.kill(engine.members()[1].pid, signal.SIGKILL),
            },
        )
        split = bins(engine)
        assert set(split) == {
            *((0, 2), (3, 2)), *((prefix, 4) for prefix in (4, 5, 6, 7, 8, 10, 11)), *((18, 5), (19, 5))
        }  # fmt: skip
        assert engine.owners()[0][1:3] == [-1, -1] and min(engine.owners()[0][::3]) >= 0
        loads = engine.loads().to_pylist()
        assert {(row["bin"], row["bits"]): row["worker"] for row in loads} == split
    assert b'"parts":[' in max(runs.files.glob("manifest-*")).read_bytes()
    with pk.Engine(cluster, workers=3, bits=3) as engine:
        deeds = {
            6: lambda: engine.merge((9, 4)),
            7: lambda: engine.rebalance(),
            8: lambda: engine.split(7, by=1).wait(60),
        }
        run(engine, deeds)
        finer = bins(engine)
        assert set(finer) == {
            *((prefix, 3) for prefix in (0, 1, 6)), *((prefix, 4) for prefix in range(4, 12)), (14, 4), (15, 4)
        }  # fmt: skip
        assert set(finer.values()) == {0, 1, 2}
    # Bins as wide as the first engine's: what was split since is as short as it has to be.
    with pk.Engine(cluster, workers=1, bits=2) as engine:
        run(engine, {11: lambda: engine.merge([1, 2, 3]).wait(60)})
        assert set(bins(engine)) == {(prefix, 2) for prefix in range(4)}
    assert b'"parts"' not in max(runs.files.glob("manifest-*")).read_bytes()
    assert done == [0, 1, 2, 3, 6, 7, 8, 11]


def test_all_bins_are_split_and_merged_again_without_a_checkpoint(cluster: Any) -> None:
    """A rescale takes parts along."""
    kept, batches = Kept(), 0
    with pk.Engine(cluster, workers=1, bits=3, name="fine") as engine:
        function = engine.foreach_batch(COUNTS, kept, checkpoint=None)

        def feed() -> None:
            nonlocal batches
            function(numbers(cluster, batches, 900, 300), batches)
            batches += 1

        feed()
        engine.split(range(8), by=3).wait(60)
        feed()
        assert len(bins(engine)) == 64
        grown = engine.rescale(2)
        wait_for(lambda: feed() or grown.done, what="another worker has its share")
        assert sorted(bins(engine).values()) == [0] * 32 + [1] * 32
        engine.rebalance(by="rows", tolerance=1.05).wait(60)
        feed()
        merged = engine.merge(range(8))
        feed()
        assert merged.wait(60).bins == 8 and len(bins(engine)) == 8
        feed()
        assert state(kept) == counted(batches, 900, 300)


def test_what_cannot_be_split_says_why(cluster: Any) -> None:
    with pk.Engine(cluster, workers=1, bits=2, name="refused") as engine:
        with pytest.raises(EngineError, match="has no running query"):
            engine.split(1)
        function = engine.foreach_batch(COUNTS, Kept(), checkpoint=None, name="counts")
        function(numbers(cluster, 0), 0)
        for wrong, says in [
            (lambda: engine.split(4), "there can be no bin 4"),
            (lambda: engine.split((1, 1)), "there can be no bin"),
            (lambda: engine.split([1, 1]), "named twice"),
            (lambda: engine.split(1, by=0), "by=0"),
            (lambda: engine.split(1, by=19), "20 bits at most"),
            (lambda: engine.split((3, 3)), "what it would be part of is whole"),
            (lambda: engine.merge(1), "is not split"),
            (lambda: engine.merge("all"), "a bin is its number"),
            (lambda: engine.migrate(moves={(3, 3): 0}), "what it would be part of is whole"),
            (lambda: engine.migrate(moves={(1, 2): 7}), "no worker 7"),
        ]:
            with pytest.raises(ConfigError, match=says):
                wrong()  # type: ignore[no-untyped-call]
        with pytest.raises(EngineError, match="no batch of a query"):
            engine.split(1, query="nobody")
        # One without bins beside it does not keep those of the others where they are, unless it is named.
        same = pk.Flow("k bigint, v bigint").map_batches(lambda batch: batch)
        plain = engine.foreach_batch(same, Kept(), checkpoint=None, name="plain")
        plain(numbers(cluster, 0), 0)
        with pytest.raises(ConfigError, match="query plain: keeps no state: it has no bins"):
            engine.split(0, query=["counts", "plain"])
        for ask in (lambda: engine.split(0), lambda: engine.migrate(moves={(0, 3): 0}), lambda: engine.merge(0)):
            assert ask().wait(60).queries == ("counts",)
        assert engine.rebalance().wait(60).queries == ("counts",)
        engine.drop("plain")
        # Turns: the second is of what the first makes.
        first, second = engine.split(1), engine.split((3, 3), by=2)
        with pytest.raises(ConfigError, match="is split already"):
            engine.split(1)
        function(numbers(cluster, 1), 1)
        assert (first.wait(60).bins, second.wait(60).bins) == (1, 1)
        assert len(bins(engine)) == 3 + 1 + 4


def test_bins_that_hold_too_much_are_split_and_merged_when_it_has_expired(cluster: Any) -> None:
    """Nobody has to know how many bins it takes: 20,000 keys in two of them, until their window is over."""
    flow = pk.Flow("k bigint, v bigint", event_time="v").key_by("k").window(pk.tumbling("100s"))
    limit, kept, batches = 128 << 10, Kept(), itertools.count()
    keys: list[int] = []
    with pk.Engine(cluster, workers=2, bits=1, name="large") as engine:
        function = engine.foreach_batch(flow.agg(n=pk.count()), kept, checkpoint=None)

        def feed(some: int) -> None:
            batch = next(batches)
            keys.append(some)
            function(numbers(cluster, batch, 20_000, some), batch)

        def sizes() -> list[int]:
            return [row["state_bytes"] or 0 for row in engine.bins().to_pylist()]

        feed(20_000)
        feed(20_000)
        wait_for(lambda: min(sizes()) > 2 * limit, what="workers tell what their bins hold")
        assert sum(sizes()) == sum(engine.stats().column("state_bytes").to_pylist())
        options: dict[str, Any] = {"every": "100ms", "patience": 1, "least_rows": 100, "trigger": 9.0}
        with engine.autobalance(max_bin_bytes=limit, dry_run=True, **options) as balance:
            # Those before it may lack the figures of a worker.
            why = wait_for(lambda: next((look.why for look in balance.looks if "limit" in look.why), ""), what="a look")
            assert f"KiB, limit {limit >> 10} KiB: " in why and why.endswith("parts, and 1 more"), why
        assert len(sizes()) == 2
        with engine.autobalance(max_bin_bytes=limit, **options) as balance:
            # Also while no batch comes.
            wait_for(lambda: len(sizes()) >= 8 and 0 < max(sizes()) <= limit, what="parts hold less")
            feed(20_000)
            splits = sum(look.splits for look in balance.looks)
            assert splits >= 2 and not any(look.merges for look in balance.looks)
            wait_for(lambda: feed(7) or len(sizes()) == 2, what="what has expired needs no parts")
            wait_for(lambda: sum(look.merges for look in balance.looks) == 2, what="the looks tell so")
        for wrong in ("1k", -1, 0, "many", True, 1.5):
            with pytest.raises(ConfigError, match="max_bin_bytes="):
                engine.autobalance(max_bin_bytes=wrong)  # type: ignore[arg-type]
    found: Counter[tuple[int, int]] = Counter()
    for row in itertools.chain.from_iterable(table.to_pylist() for table in kept.batches.values()):
        found[row["window_start"] // 100_000, row["k"]] += row["n"]
    rows = (
        (value, value % some)
        for batch, some in enumerate(keys)
        for value in range(batch * 20_000, (batch + 1) * 20_000)
    )
    wanted = Counter((value // 100_000, k) for value, k in rows)
    closed = max(window for window, _ in found)
    assert found == {key: n for key, n in wanted.items() if key[0] <= closed}
