"""The memory of an engine: a batch of four times the budget, and directories that take no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as pk
from engine_support import COUNTS, Kept, bag, counted, numbers, state, wait_for
from penstock.errors import StorageError

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

MIB = 1 << 20
BUDGET = 16 * MIB
#: Rows of about 216 bytes: together four times the budget of each of two members. What pads them is read, since it must
#: have no nulls.
ROWS, PAD = 650_000, 200
SCHEMA = "k bigint, v bigint, pad string NOT NULL"


def resident(pid: int, field: str) -> int:
    """Bytes of a line of a process's status."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1]) * 1024


def padded(spark: Any, batch: int, rows: int) -> Any:
    """Rows of a known size, spread over eight partitions."""
    first = batch * ROWS
    return spark.range(first, first + rows, 1, 8).selectExpr("id % 7 AS k", "id AS v", f"repeat('x', {PAD}) AS pad")


def run(spark: Any, name: str, **options: Any) -> tuple[dict[Any, Any], int, list[dict[str, Any]]]:
    """Two batches; returns the results, the most that a member grew by in the second, and the figures."""
    flow = pk.Flow(SCHEMA).key_by("k").agg(n=pk.count(), total=pk.sum("v"))
    kept = Kept()
    with pk.Engine(spark, workers=2, name=name, slice_rows=4_096, **options) as engine:
        function = engine.foreach_batch(flow, kept, name=name)
        # Everything that a member needs once is there: what is measured are rows.
        function(padded(spark, 0, 20_000), 0)
        before = {}
        for member in engine.members():
            Path(f"/proc/{member.pid}/clear_refs").write_text("5")
            before[member.pid] = resident(member.pid, "VmRSS")
        function(padded(spark, 1, ROWS), 1)
        grown = max(resident(pid, "VmHWM") - rss for pid, rss in before.items())
        figures = engine.stats().to_pylist()
    return state(kept), grown, figures


def test_a_batch_of_four_times_the_budget(cluster: Any) -> None:
    roomy, grown_roomy, figures = run(cluster, "roomy", staging_memory="1g")
    assert all(entry["spilled_bytes"] == 0 for entry in figures)
    peak = max(entry["staged_peak_bytes"] for entry in figures)
    assert sum(entry["staged_peak_bytes"] for entry in figures) >= 4 * 2 * BUDGET, (
        "the batch is as large as it is to be"
    )

    narrow, grown, figures = run(cluster, "narrow", staging_memory=BUDGET)
    values = [*range(20_000), *range(ROWS, 2 * ROWS)]
    assert narrow == roomy == {k: (len(own), sum(own)) for k in range(7) if (own := [v for v in values if v % 7 == k])}
    for entry in figures:
        assert entry["staging_memory_bytes"] == BUDGET >= entry["staged_peak_bytes"]
        assert entry["disk_bytes"] == 0, "what an epoch spilled is gone when it is over"
    # Which member gets how much of the batch is for Spark to say.
    assert sum(entry["spilled_bytes"] for entry in figures) >= 6 * BUDGET
    print(
        f"grown by {grown / MIB:.0f} MiB, without the budget {grown_roomy / MIB:.0f} MiB; staged {peak / MIB:.0f} MiB"
    )
    assert grown <= BUDGET + 32 * MIB, f"{grown / MIB:.0f} MiB"
    assert grown_roomy - grown >= peak - 3 * BUDGET


def test_results_beyond_the_budget(cluster: Any) -> None:
    """Results wait in files too, and may be read twice; ordered state gives the same through files."""

    def running(total: int | None, k: int, v: int) -> tuple[int, tuple[int, int]]:
        total = (total or 0) + v
        return total, (v, total)

    flow = (
        pk.Flow("k bigint, v bigint", order_by="v").key_by("k").stateful_map(running, schema="v bigint, total bigint")
    )
    kept = Kept()

    def sink(df: Any, batch_id: int) -> None:
        kept(df, batch_id)
        assert df.count() == kept.batches[batch_id].num_rows

    with pk.Engine(cluster, workers=2, name="files", staging_memory=0, slice_rows=1_000) as engine:
        function = engine.foreach_batch(flow, sink, name="files")
        for batch in range(2):
            function(numbers(cluster, batch, rows=20_000), batch)
        figures = engine.stats().to_pylist()
    assert all(entry["spilled_bytes"] > 100_000 and entry["staged_peak_bytes"] == 0 for entry in figures)
    assert all(entry["disk_bytes"] > 0 for entry in figures), "the results of the last batch"
    seen: dict[int, int] = {}
    expected = []
    for v in range(40_000):
        seen[v % 7] = seen.get(v % 7, 0) + v
        expected.append((v, seen[v % 7]))
    assert sorted(bag(*kept.batches.values())) == expected


def test_a_directory_that_takes_nothing_fails_the_batch_only(cluster: Any, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    kept = Kept()
    options: dict[str, Any] = {"staging_memory": "1k", "staging_folders": [str(folder)]}
    with pk.Engine(cluster, workers=1, name="full", **options) as engine:
        function = engine.foreach_batch(COUNTS, kept, name="full")
        for _ in range(2):
            with pytest.raises(StorageError, match=r"spark\.local\.dir") as caught:
                function(numbers(cluster, 0), 0)
            assert str(folder) in str(caught.value) and "staging_memory" in str(caught.value)
        assert not kept.batches
        folder.mkdir()
        for batch in range(2):
            function(numbers(cluster, batch), batch)
        assert state(kept) == counted(2)
        assert not list(folder.iterdir()), "the files have no names"
        wait_for(lambda: engine.stats().column("spilled_bytes")[0].as_py() > 0, 60, "figures")
