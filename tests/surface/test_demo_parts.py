"""The demo's parts that need no Spark: its input, and the independent computation against naive twins."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.demo.expected import compare, expected_counts, expected_hot_items
from penstock.demo.feeder import FILES_PER_SECOND, Feeder

BIDS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), min_size=1, max_size=60)


def table(bids: list[tuple[int, int]]) -> pa.Table:
    return pa.table(
        {
            "auction": pa.array([auction for auction, _ in bids], pa.int64()),
            "date_time": pa.array([1_000_000 + at for _, at in bids], pa.int64()),
        }
    )


@given(BIDS)
def test_counts_are_those_of_a_loop(bids: list[tuple[int, int]]) -> None:
    assert expected_counts(table(bids)) == dict(Counter(auction for auction, _ in bids))


@given(BIDS, st.integers(1, 7), st.integers(1, 4))
def test_hot_items_are_those_of_a_loop(bids: list[tuple[int, int]], every: int, times: int) -> None:
    size = every * times
    expected: Counter[tuple[int, int, int, int]] = Counter()
    for start in range((1_000_000 - size) // every * every, 1_000_100, every):
        inside = Counter(auction for auction, at in bids if start <= 1_000_000 + at < start + size)
        for auction, number in inside.items():
            if number == max(inside.values()):
                expected[(start, start + size, auction, number)] += 1
    assert expected_hot_items(table(bids), size, every) == expected


def test_compare_tells_lost_from_repeated() -> None:
    same = Counter({"a": 1, "b": 2})
    assert compare(same, Counter(same), "x").passed
    lost = compare(same, Counter({"a": 1, "b": 1}), "x")
    assert not lost.passed
    assert "1 rows missing or wrong, 0 unexpected" in lost.detail
    assert "missing b" in lost.detail
    repeated = compare(same, Counter({"a": 2, "b": 2}), "x")
    assert not repeated.passed
    assert "0 rows missing or wrong, 1 unexpected or repeated" in repeated.detail


def test_the_feeder_writes_whole_files_at_its_rate(tmp_path: Path) -> None:
    feeder = Feeder(tmp_path, rate=2_000)
    started = time.monotonic()
    feeder.start()
    seen: set[str] = set()
    while len(seen) < FILES_PER_SECOND and feeder.running:
        for path in tmp_path.glob("bids-*.parquet"):
            assert pq.read_metadata(path).num_rows > 0, "a visible file is whole"
            seen.add(path.name)
    elapsed = time.monotonic() - started
    feeder.stop()
    assert not feeder.running
    assert feeder.error is None
    assert elapsed >= 1 - 1 / FILES_PER_SECOND
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == [f"bids-{index:05}.parquet" for index in range(len(files))]
    written = pa.concat_tables(map(pq.read_table, files))
    assert written.num_rows == feeder.rows == pytest.approx(2_000 / FILES_PER_SECOND * len(files), rel=0.05)
    times = written["date_time"].to_pylist()
    assert times == sorted(times)
    assert times[-1] - times[0] == pytest.approx(1000 / FILES_PER_SECOND * len(files), rel=0.1)


def test_the_feeder_keeps_its_error(tmp_path: Path) -> None:
    feeder = Feeder(tmp_path / "no" / "folder", rate=1_000)
    feeder.start()
    while feeder.running:
        time.sleep(0.01)
    assert isinstance(feeder.error, OSError)
