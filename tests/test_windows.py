"""Windows beside plain Python: offsets, days of time zones with the clocks' changes, and sessions."""

from __future__ import annotations

import datetime as dt
import random
import subprocess
import sys
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import penstock as pk
from penstock.errors import ConfigError, PlanError, SchemaError

UTC = dt.timezone.utc
HOUR = 3_600_000_000
Row = tuple[int, int]


def table(rows: list[Row]) -> pa.Table:
    times = pa.array([at for _, at in rows], pa.timestamp("us", tz="UTC"))
    return pa.table({"k": pa.array([k for k, _ in rows], pa.int64()), "ts": times})


def instants(out: pa.Table, *more: str) -> Counter[tuple[int, ...]]:
    bounds = [out[name].cast(pa.int64()).to_pylist() for name in ("window_start", "window_end")]
    return Counter(zip(*bounds, *(out[name].to_pylist() for name in more), strict=True))


def keyed() -> pk.Flow:
    return pk.Flow("k bigint, ts timestamp", event_time="ts").key_by("k")


def test_windows_start_where_the_offset_says() -> None:
    rng = random.Random(1)
    rows = [(rng.randrange(3), rng.randrange(-3 * HOUR, 50 * HOUR)) for _ in range(500)]
    size, offset = HOUR, HOUR // 4
    flow = keyed().window(pk.tumbling("1h", offset="15m")).agg(n=pk.count())
    wanted = Counter(((at - offset) // size * size + offset, k) for k, at in rows)
    for workers in (1, 3):
        found = instants(flow.collect(table(rows), workers), "k", "n")
        assert found == Counter({(start, start + size, k, n): 1 for (start, k), n in wanted.items()})
    ranked = pk.Flow("k bigint, ts timestamp", event_time="ts").window(pk.sliding("2h", every="1h", offset="15m"))
    starts = {(at - offset) // size * size + offset - back for _, at in rows for back in (0, HOUR)}
    assert {start for start, _, _ in instants(ranked.top(1, by="k", per="window").collect(table(rows)), "k")} == starts


def day_of(at: int, zone: ZoneInfo, hours: int) -> tuple[int, int]:
    """The day that holds an instant by the clocks of a zone, which begins at `hours`: found from instants alone."""

    def begin(day: dt.date) -> int:
        # Of a time that is shown twice the first; of one that is skipped as much later.
        shown = dt.datetime.combine(day, dt.time(hours), zone)
        return round(shown.timestamp()) * 1_000_000

    day = dt.datetime.fromtimestamp(at // 1_000_000, zone).date() + dt.timedelta(days=2)
    while begin(day) > at:
        day -= dt.timedelta(days=1)
    return begin(day), begin(day + dt.timedelta(days=1))


@pytest.mark.parametrize(
    "name", ["Europe/Berlin", "America/Sao_Paulo", "Pacific/Apia", "Asia/Kathmandu", "America/New_York"]
)
@pytest.mark.parametrize("hours", [0, 6])
def test_days_are_those_of_the_clocks(name: str, hours: int) -> None:
    zone, rng = ZoneInfo(name), random.Random(2)
    first = int(dt.datetime(2011, 10, 1, tzinfo=UTC).timestamp())
    rows = [(0, (first + rng.randrange(0, 8 * 365 * 86_400)) * 1_000_000) for _ in range(3_000)]
    # Where clocks change there are rows in every half hour.
    changes = [
        at for at in range(first, first + 8 * 365 * 86_400, 3_600) if _offset(zone, at) != _offset(zone, at + 3_600)
    ]
    assert changes or name == "Asia/Kathmandu"
    rows += [(0, (at + step * 1_800) * 1_000_000) for at in changes for step in range(-60, 60)]
    flow = keyed().window(pk.tumbling("1d", offset=f"{hours}h" if hours else None, zone=name)).agg(n=pk.count())
    wanted = Counter(day_of(at, zone, hours) for _, at in rows)
    found = instants(flow.collect(table(rows), 2), "n")
    assert found == Counter({(*bounds, n): 1 for bounds, n in wanted.items()})
    lengths = {(end - start) // HOUR for start, end, _ in found}
    assert lengths >= {24} and (name == "Asia/Kathmandu") == (lengths == {24})


def _offset(zone: ZoneInfo, at: int) -> Any:
    return dt.datetime.fromtimestamp(at, zone).utcoffset()


def test_weeks_of_a_zone_begin_on_monday_and_close_with_the_watermark() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    at = [dt.datetime(2024, 3, day, hour, tzinfo=berlin) for day, hour in ((25, 0), (31, 23), (30, 1))]
    monday = dt.datetime(2024, 4, 1, tzinfo=berlin)
    flow = pk.Flow("k bigint, ts timestamp", event_time="ts", lateness="0s").key_by("k")
    flow = flow.window(pk.tumbling("7d", offset="4d", zone="Europe/Berlin")).agg(n=pk.count())
    batches = [
        table([(1, round(when.timestamp()) * 1_000_000) for when in whens]).to_batches()[0] for whens in (at, [monday])
    ]
    out = list(flow.run(batches, streaming=True))
    (first, *_) = out[0].to_pylist()
    assert (first["window_start"], first["window_end"], first["n"]) == (
        at[0].astimezone(UTC),
        monday.astimezone(UTC),
        3,
    )
    assert first["window_end"] - first["window_start"] == dt.timedelta(hours=7 * 24 - 1)


def sessions(rows: list[Row], gap: int) -> Counter[tuple[int, int, int, int]]:
    held = defaultdict(list)
    for k, at in rows:
        held[k].append(at)
    found: Counter[tuple[int, int, int, int]] = Counter()
    for k, times in held.items():
        run: list[int] = []
        for at in sorted(times):
            if run and at - run[-1] > gap:
                found[(run[0], run[-1] + gap, k, len(run))] += 1
                run = []
            run.append(at)
        found[(run[0], run[-1] + gap, k, len(run))] += 1
    return found


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_sessions_end_where_rows_are_apart(workers: int) -> None:
    rng = random.Random(4)
    rows = [(rng.randrange(50), rng.randrange(0, 20_000_000_000)) for _ in range(4_000)]
    rows += [(99, 1_000_000), (99, 61_000_000), (99, 121_000_001)]  # as far apart as the gap, and more
    flow = keyed().window(pk.session("60s")).agg(n=pk.count())
    wanted = sessions(rows, 60_000_000)
    assert wanted[(1_000_000, 121_000_000, 99, 2)] == 1 and wanted[(121_000_001, 181_000_001, 99, 1)] == 1
    assert instants(flow.collect(table(rows), workers, batch_rows=64), "k", "n") == wanted


def test_sessions_of_a_stream_close_with_the_watermark_and_late_rows_are_told() -> None:
    flow = pk.Flow("k bigint, ts timestamp", event_time="ts", lateness="0s").key_by("k")
    flow = flow.window(pk.session("10s")).agg(n=pk.count())
    second = 1_000_000
    epochs = [
        [(1, 0), (1, 8 * second), (2, 5 * second)],
        [(1, 17 * second), (2, 16 * second)],  # 1 goes on, 2 is a new one; the watermark gets to 17 s
        [(1, 6 * second), (2, 7 * second + 1), (3, 40 * second)],  # late, though 1 is open; not late, joins 2
        [(3, 41 * second)],
    ]
    late: list[pa.RecordBatch] = []
    batches = [table(rows).to_batches()[0] for rows in epochs]
    out = pa.Table.from_batches(flow.run(batches, streaming=True, workers=2, late=late.append))
    assert instants(out, "k", "n") == Counter(
        {
            (5 * second, 15 * second, 2, 1): 1,
            (0, 27 * second, 1, 3): 1,
            (7 * second + 1, 26 * second, 2, 2): 1,
            (40 * second, 51 * second, 3, 2): 1,
        }
    )
    assert [row["k"] for batch in late for row in batch.to_pylist()] == [1]


def test_what_is_wrong_with_windows_is_told() -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: pk.tumbling("1h", offset="1h"), ConfigError, "offset='1h' is not less than the window size, 1h"),
        (lambda: pk.sliding("2h", every="1h", offset="90m"), ConfigError, "not less than the window step"),
        (lambda: pk.tumbling("1h", offset=5), ConfigError, "window offset 5 has no unit"),
        (lambda: pk.tumbling("1h", zone="Europe/Berlin"), ConfigError, "size 1h with zone='Europe/Berlin'"),
        (lambda: pk.tumbling("1d", zone=""), ConfigError, "give the name of a time zone"),
        (lambda: pk.session("0s"), ConfigError, "session gap"),
        (lambda: pk.session(3), ConfigError, "session gap 3 has no unit"),
        (
            lambda: keyed().window(pk.tumbling("1d", zone="Mars/X")).agg(n=pk.count()),
            PlanError,
            "no time zone 'Mars/X'",
        ),
        (
            lambda: keyed()._whole_rows().window(pk.sliding("2d", every="1d", zone="Europe/Berln")).distinct("k"),
            PlanError,
            "no time zone 'Europe/Berln'; give a name of the IANA database",
        ),
        (
            lambda: keyed()._whole_rows().window(pk.session("1s")).distinct("k"),
            PlanError,
            "only agg and aggregate take them",
        ),
        (lambda: keyed()._whole_rows().window(pk.session("1s")).top(1, by="k", per="window"), PlanError, "only agg"),
    ]
    for make, kind, words in wrong:
        with pytest.raises(kind, match=words):
            make()
    flow = keyed().window(pk.tumbling("1d", offset="6h", zone="Europe/Berlin")).agg(n=pk.count())
    assert "window(tumbling 1d from 6h in Europe/Berlin)" in repr(flow)
    assert "tumbling 24 h from 6 h in Europe/Berlin on ts" in flow.explain()
    assert "sessions with gaps of 1 s on ts" in keyed().window(pk.session("1s")).agg(n=pk.count()).explain()


def test_gaps_between_windows_are_named() -> None:
    """Rows in them are in no result and not late: who has swapped the size and the step sees it nowhere else."""
    flow, apart = keyed(), pk.sliding("1s", every="60s")
    unkeyed = pk.Flow("k bigint, ts timestamp", event_time="ts")
    other = pk.Flow("k bigint, ts timestamp", event_time="ts", name="other")
    own: Any = SimpleNamespace(create=list, accumulate=zip, merge=max, finish=len)
    said = "  gaps of 59 s between windows: rows in them are in no result, and not late"
    for made in (
        flow.window(apart).agg(n=pk.count()),
        unkeyed.window(apart).agg(n=pk.count()),
        unkeyed.window(apart).distinct("k"),
        unkeyed.window(apart).top(1, by="k", per="window"),
        unkeyed.window_join(other, on="k", window=apart, suffix="_right"),
        flow.window(apart).aggregate(own, schema="made bigint"),
    ):
        assert said in made.explain().splitlines()
    assert str(apart) == "sliding 1s every 1m, gaps of 59s" and str(apart) in repr(flow.window(apart))
    for window in (pk.sliding("60s", every="1s"), pk.tumbling("1s"), pk.session("1s")):
        whole = flow.window(window)
        assert "between windows" not in whole.agg(n=pk.count()).explain() and ", gaps" not in repr(whole)


@pytest.mark.parametrize("per", ["window", None, ["k"]])
def test_tops_rank_a_column_that_stands_behind_those_of_the_windows(per: Any) -> None:
    def scored(batch: pa.RecordBatch) -> pa.RecordBatch:
        score = pc.cast(pc.negate(batch[batch.schema.names[-1]]), pa.float64())
        return pa.record_batch({**{name: batch[name] for name in batch.schema.names}, "score": score})

    counts = keyed().window(pk.tumbling("1h")).agg(n=pk.count())
    columns = "window_start timestamp, window_end timestamp, k bigint, n bigint, score double"
    rows = table([(1, 0), (1, 1), (2, 2)])
    best = counts.map_batches(scored, columns).top(1, by="score", per=per).collect(rows).to_pydict()
    assert sorted(zip(best["k"], best["score"], strict=True))[-1] == (2, -1.0)
    assert len(best["k"]) == (2 if per == ["k"] else 1)


def test_a_window_that_lost_its_end_is_refused_by_tops_of_windows() -> None:
    """Not told as late: rows of a step that has no late rows would come under the columns of another's."""

    def without_ends(batch: pa.RecordBatch) -> pa.RecordBatch:
        ends = pc.if_else(pc.equal(batch["n"], 1), batch["window_end"], None)
        return pa.record_batch({**{name: batch[name] for name in batch.schema.names}, "window_end": ends})

    counts = keyed().window(pk.tumbling("1h")).agg(n=pk.count())
    columns = "window_start timestamp, window_end timestamp, k bigint, n bigint"
    tops = counts.map_batches(without_ends, columns).top(1, by="n", per="window")
    assert tops.collect(table([(1, 0), (2, HOUR)])).num_rows == 2
    with pytest.raises(
        SchemaError, match=r"\(top\): column 'window_end' is null in row 0, and tops are of windows by it"
    ):
        tops.collect(table([(1, 0), (1, 1)]))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory of a process, as Linux tells it")
@pytest.mark.parametrize("run", ["flow.run(rows)", "flow.map_in_arrow(per_partition=True)(iter(rows.to_batches()))"])
def test_memory_does_not_grow_with_the_windows_that_close_together(run: str) -> None:
    """In processes of their own: all windows of a table close when it ends, and come out while others are made."""
    work = (
        "import resource, sys\n"
        "import numpy as np, pyarrow as pa, penstock as pk\n"
        "rows = pa.table({'k': np.arange(100), 'ts': np.zeros(100, np.int64)})\n"
        "windows = pk.sliding(f'{sys.argv[1]}ms', every='1ms')\n"
        "flow = pk.Flow(rows.schema, event_time='ts').key_by('k').window(windows).agg(n=pk.count())\n"
        f"print(sum(batch.num_rows for batch in {run}), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )

    def peak(windows: int) -> int:
        done = subprocess.run([sys.executable, "-c", work, str(windows)], check=True, capture_output=True)
        rows, peak = done.stdout.split()
        assert int(rows) == 100 * windows
        return int(peak) << 10

    # Held in memory they would be 32 bytes each.
    assert peak(40_000) - peak(1_000) < 64 << 20
