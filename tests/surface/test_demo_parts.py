"""The demo's parts that need no Spark: its input, and the independent computation against naive twins."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.demo.expected import check_updates, compare, compare_tables, expected_bidders, expected_hot_items, latest
from penstock.demo.feeder import FILES_PER_SECOND, Feeder

#: Of what bidders bid, with no rows.
EMPTY = pa.table({name: pa.array([], pa.int64()) for name in ("bidder", "bids", "spent")})
BIDS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), min_size=1, max_size=60)


def table(bids: list[tuple[int, int]]) -> pa.Table:
    """Bids on auctions at times; the bidder is the auction's number, and the price the time."""
    return pa.table(
        {
            "auction": pa.array([auction for auction, _ in bids], pa.int64()),
            "bidder": pa.array([auction for auction, _ in bids], pa.int64()),
            "price": pa.array([at for _, at in bids], pa.int64()),
            "date_time": pa.array([1_000_000 + at for _, at in bids], pa.int64()),
        }
    )


@given(BIDS)
def test_bidders_are_those_of_a_loop(bids: list[tuple[int, int]]) -> None:
    prices: dict[int, list[int]] = {}
    updates = []
    for bidder, price in bids:
        own = prices.setdefault(bidder, [])
        own.append(price)
        row = {"bidder": bidder, "bids": len(own), "spent": sum(own), "highest": max(own), "lowest": min(own)}
        updates.append(row)
    expected = [
        {"bidder": key, "bids": len(own), "spent": sum(own), "highest": max(own), "lowest": min(own)}
        for key, own in sorted(prices.items())
    ]
    assert expected_bidders(table(bids)).to_pylist() == expected
    last = latest(pa.Table.from_pylist(updates[::-1]), "bidder", "bids")
    assert compare_tables(expected_bidders(table(bids)), last, "x").passed
    wrong = last.set_column(2, "spent", pa.array([1_000_000] * last.num_rows, pa.int64()))
    told = compare_tables(expected_bidders(table(bids)), wrong, "x")
    assert not told.passed and f"{last.num_rows:,} rows missing or wrong" in told.detail


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
    feeder = Feeder(tmp_path, rate=2_000, bidders=3_001)
    feeder.start()
    while feeder.loaded < 3_001 and feeder.running:
        time.sleep(0.01)
    assert feeder.rows == 0
    started = time.monotonic()
    feeder.go_on()
    seen: set[str] = set()
    while len(seen) < FILES_PER_SECOND and feeder.running:
        for path in tmp_path.glob("bids-1-*.parquet"):
            assert pq.read_metadata(path).num_rows > 0, "a visible file is whole"
            seen.add(path.name)
    elapsed = time.monotonic() - started
    feeder.stop()
    assert not feeder.running
    assert feeder.error is None
    assert elapsed >= 1 - 1 / FILES_PER_SECOND
    first, files = sorted(tmp_path.glob("bids-0-*")), sorted(tmp_path.glob("bids-1-*"))
    assert sorted(tmp_path.iterdir()) == first + files
    load = pa.concat_tables(map(pq.read_table, first))
    assert load["bidder"].to_pylist() == list(range(3_001)) and load.num_rows == feeder.loaded
    assert [path.name for path in files] == [f"bids-1-{index:05}.parquet" for index in range(len(files))]
    assert max(load["date_time"].to_pylist()) <= min(pq.read_table(files[0])["date_time"].to_pylist())
    written = pa.concat_tables(map(pq.read_table, files))
    assert written.num_rows == feeder.rows == pytest.approx(2_000 / FILES_PER_SECOND * len(files), rel=0.05)
    times = written["date_time"].to_pylist()
    assert times == sorted(times)
    assert set(written["bidder"].to_pylist()) <= set(range(3_001)) and len(set(written["bidder"].to_pylist())) > 100
    assert times[-1] - times[0] == pytest.approx(1000 / FILES_PER_SECOND * len(files), rel=0.1)


def test_the_feeder_keeps_its_error(tmp_path: Path) -> None:
    feeder = Feeder(tmp_path / "no" / "folder", rate=1_000, bidders=10)
    feeder.start()
    while feeder.running:
        time.sleep(0.01)
    assert isinstance(feeder.error, OSError)


@given(st.lists(st.dictionaries(st.integers(0, 3), st.integers(1, 3), max_size=4), min_size=1, max_size=6))
def test_updates_are_told_once(batches: list[dict[int, int]]) -> None:
    """Of every key once a batch, and more each time; an update again is told, in its batch or in a later one."""
    counts: Counter[int] = Counter()
    received = {}
    for batch, bids in enumerate(batches):
        counts.update(bids)
        rows = [{"bidder": key, "bids": counts[key], "spent": 1} for key in bids]
        received[batch] = pa.Table.from_pylist(rows, EMPTY.schema)
    rows = sum(table.num_rows for table in received.values())
    found = check_updates(received, "bidder", "bids", "x")
    assert found.passed and found.detail == f"{rows} updates of {len(batches)} batches"
    full = [batch for batch, table in received.items() if table.num_rows]
    if full:
        first = received[full[0]].slice(0, 1)
        twice = received | {full[0]: pa.concat_tables([received[full[0]], first])}
        told = check_updates(twice, "bidder", "bids", "x")
        assert not told.passed and "1 stand twice in one batch" in told.detail
        later = check_updates(received | {len(batches): first}, "bidder", "bids", "x")
        assert not later.passed and "1 have no more bids than the update before" in later.detail


def test_the_view_says_of_how_many_queries_its_rows_are() -> None:
    from penstock.demo.job import DemoConfig, Job
    from penstock.report import Epoch, Timeline

    job = Job(DemoConfig(), threading.Event())
    # They count for some seconds, which this thread may not have.
    now = time.time() + 3_600
    job._timeline = Timeline(epochs=[Epoch(0, now, 0.1, 600, query) for query in ("hot items", "bidders")])
    shown = job.snapshot()
    assert (shown.queries, shown.rows, shown.rows_per_s) == (2, 1_200, 400)


def test_who_stops_it_when_the_report_is_written_has_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the picture is drawn, and then while Spark is ended."""
    from penstock import demo
    from penstock.demo import job
    from penstock.report import Check, Timeline

    stop = threading.Event()
    holds = [Check("hot items", True, "3 = 3")]

    def written(timeline: Timeline, output: Path) -> Any:
        stop.set()
        return [output / "report.html"], None

    class Ends:
        """Stands for what is started: it ends with an error."""

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("the JVM is gone")

    monkeypatch.setattr(job, "_write", written)
    monkeypatch.setattr(job, "_queries", tuple)
    monkeypatch.setattr(job, "ensure_java", lambda: "java")
    monkeypatch.setattr(job, "private_session", lambda *_: Ends())
    monkeypatch.setattr(job.pk, "Engine", lambda *_, **__: Ends(), raising=False)
    idle = SimpleNamespace(start=lambda: None, stop=lambda: None, error=None)
    monkeypatch.setattr(job, "Feeder", lambda *_: idle)
    for name in ("_stream", "_drain", "_finish", "_sample"):
        monkeypatch.setattr(job.Job, name, lambda *_: None)
    monkeypatch.setattr(job.Job, "_measured", lambda *_: Timeline())
    monkeypatch.setattr(job.Job, "_verify", lambda *_: holds)
    outcome = demo.run(demo.DemoConfig(output=tmp_path), stop=stop)
    assert outcome.passed and outcome.files == [tmp_path / "report.html"]


def test_the_report_is_written_whole_and_without_a_picture_that_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import penstock.report._plot
    from penstock import demo
    from penstock.demo import job
    from penstock.report import Check, Timeline

    out = tmp_path / "out"
    out.symlink_to(tmp_path / "elsewhere")  # where nothing is yet
    run = Timeline(title="first")
    files, why = job._write(run, out)
    assert [path.name for path in files] == list(job.FILES) and why is None
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == sorted(job.FILES)

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no backend")

    monkeypatch.setattr(penstock.report._plot, "draw", fails)
    files, why = job._write(Timeline(title="second"), out)
    assert why == "matplotlib fails here: RuntimeError: no backend"
    assert {path.name for path in files} == {path.name for path in out.iterdir()} == set(job.FILES[:2])
    assert "second" in (out / "report.html").read_text()
    outcome = demo.Outcome([Check("hot items", True, "3 = 3")], run, files, why)
    monkeypatch.setattr(demo, "run", lambda *_, **__: outcome)
    assert demo.main(demo.DemoConfig(output=out), plain=True) == 0
    assert f"no picture: {why}\n" in capsys.readouterr().out

    def full(self: Path, text: str, encoding: str) -> int:
        with self.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    before = (out / "timeline.json").read_bytes()
    with pytest.raises(OSError, match=r"out/timeline\.json: cannot be written: No space left"):
        job._write(Timeline(title="third"), out)
    assert (out / "timeline.json").read_bytes() == before
    assert {path.name for path in out.iterdir()} == set(job.FILES[:2])
