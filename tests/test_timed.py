"""`stateful_map` with timers, states that expire and an end, against a straightforward model of its documentation."""

from __future__ import annotations

import datetime
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
from examples_support import examples
from penstock import _native
from penstock._functions.calls import bind
from penstock._functions.timed import TimedBin
from penstock.errors import ConfigError, PlanError, SchemaError, StateError, UserFunctionError

SCHEMA = pa.schema([("k", pa.int64()), ("ts", pa.int64()), ("v", pa.int64())])
OUTPUT = "k bigint, why string, at bigint, total bigint"
END_US = (1 << 63) - 1
LATENESS = 5
TTL = 20

Row = tuple[int, "int | None", int]


def step(state: Any, k: int, ts: int | None, v: int) -> Any:
    """Changes its state in place, forgets it, and sets timers before and behind the watermark."""
    state = [0, []] if state is None else state
    state[0] = (state[0] * 31 + v) % 1_000
    state[1].append(v)
    out = (k, "row", ts, state[0])
    if v == 9:
        return None, out
    if ts is not None and v % 3 == 0:
        return state, out, (ts + 7 * (v - 3), "once")
    if ts is not None and v == 4:
        return state, [out, out], [(ts + 6, "x"), (ts + 6, "y"), (ts + 1, "z")]
    return state, None if v == 7 else out


def on_timer(state: Any, time: int, value: str, k: int) -> Any:
    """Sets one more at its own time or later, and makes states of its own."""
    total = -1 if state is None else state[0]
    later = {"x": (time, "again"), "y": [(time + 9, "z")]}.get(value)
    if value == "again" and state is not None and total % 2:
        state = None
    elif value == "z":
        state = [(total + 1) % 1_000, [time]]
    return state, (k, value, time, total), later


def at_end(state: Any, k: int) -> Any:
    return (k, "end", len(state[1]), state[0])


def flow_of(ttl_time: str | None, ends: bool = True) -> pk.Flow:
    source = pk.Flow(SCHEMA, event_time="ts", lateness=f"{LATENESS}ms")
    return source.key_by("k").stateful_map(
        step,
        schema=OUTPUT,
        on_timer=on_timer,
        ttl=None if ttl_time is None else f"{TTL}ms",
        ttl_time=ttl_time or "event",
        at_end=at_end if ends else None,
    )


class Model:
    """The twin: a dict of what a key has, looked through as a whole."""

    def __init__(self, ttl_time: str | None) -> None:
        self.ttl_time = ttl_time
        self.keys: dict[int, list[Any]] = {}
        self.out: list[Any] = []
        self.number = 0

    def call(self, k: int, now: int | None, function: Callable[..., Any], *arguments: Any) -> None:
        state, used, timers = self.keys.get(k, [None, None, []])
        if self.ttl_time and used is not None and now is not None and now >= used + TTL:
            state, used = None, None
        state, out, later = (*function(state, *arguments), None)[:3]
        self.out += [] if out is None else [out] if isinstance(out, tuple) else out
        for at, value in [] if later is None else [later] if isinstance(later, tuple) else later:
            self.number += 1
            timers = [*timers, (at, self.number, value)]
        if now is not None and (used is None or now > used):
            used = now
        self.keys[k] = [state, used if state is not None else None, timers]

    def drop(self, limit: int) -> None:
        for entry in self.keys.values():
            if entry[0] is not None and entry[1] is None:
                entry[1] = limit
            elif entry[0] is not None and entry[1] + TTL <= limit:
                entry[0] = entry[1] = None

    def epoch(self, rows: list[Row], watermark: int | None, clock: int | None, ended: bool = False) -> list[Any]:
        self.out = []
        if self.ttl_time == "processing" and clock is not None:
            self.drop(clock)
        for k, ts, v in rows:
            self.call(k, ts if self.ttl_time == "event" else clock, step, k, ts, v)
        while watermark is not None or ended:
            due = [(at, n, k, value) for k, entry in self.keys.items() for at, n, value in entry[2]]
            due = [one for one in due if ended or one[0] < watermark]  # type: ignore[operator]
            if not due:
                break
            at, n, k, value = min(due)
            self.keys[k][2].remove((at, n, value))
            self.call(k, clock if self.ttl_time == "processing" else at, on_timer, at, value, k)
        if self.ttl_time == "event" and watermark is not None and not ended:
            self.drop(watermark)
        if ended:
            self.out += [at_end(entry[0], k) for k, entry in self.keys.items() if entry[0] is not None]
            self.keys = {}
        return self.out

    def states(self) -> dict[int, Any]:
        return {k: entry[0] for k, entry in self.keys.items() if entry[0] is not None}


def by_key(rows: list[Any]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = defaultdict(list)
    for row in rows:
        found[row[0]].append(row)
    return found


rows_of_an_epoch = st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(0, 80), st.integers(0, 9)), max_size=9)
epochs_of_a_stream = st.lists(st.tuples(st.integers(0, 30), rows_of_an_epoch), min_size=1, max_size=7)


class Epochs:
    """Watermarks and clocks of epochs."""

    def __init__(self, epochs: list[tuple[int, list[Row]]]) -> None:
        self.epochs: list[tuple[list[Row], int | None, int]] = []
        watermark, clock = None, 1_000
        for passed, rows in epochs:
            clock += passed
            times = [ts for _, ts, _ in rows if ts is not None]
            if times and (watermark is None or max(times) - LATENESS > watermark):
                watermark = max(times) - LATENESS
            self.epochs.append((rows, watermark, clock))


@settings(deadline=None, max_examples=examples(60))
@given(
    epochs_of_a_stream,
    st.sampled_from([None, "event", "processing"]),
    st.integers(1, 3),
    st.lists(st.integers(0, 6), max_size=3),
)
def test_equals_the_model_while_bins_move(
    epochs: list[tuple[int, list[Row]]], ttl_time: str | None, workers: int, moves: list[int]
) -> None:
    model, told = Model(ttl_time), Epochs(epochs)
    expected = [row for epoch in told.epochs for row in model.epoch(*epoch)]
    expected += model.epoch([], None, told.epochs[-1][2], ended=True)
    plan, calls = flow_of(ttl_time).to_plan(streaming=True)
    out: list[Any] = []
    with _native.LocalRun(plan, calls, workers=workers, bits=2) as run:
        for number, (rows, _, clock) in enumerate(told.epochs):
            columns = zip(*rows, strict=True) if rows else ([], [], [])
            batch = pa.record_batch([pa.array(column, pa.int64()) for column in columns], schema=SCHEMA)
            run.push(batch, clock_ms=clock)
            if number in moves and workers > 1:
                run.migrate([[(bin, number % workers)] for bin in range(4)])
        run.finish(clock_ms=told.epochs[-1][2])
        while (item := run.take(30)) is not None:
            out.extend(tuple(row.values()) for row in pa.record_batch(item[1]).to_pylist())
    assert sorted(out, key=str) == sorted(expected, key=str)


class Held:
    """Two bins of one worker, and what their epochs have recorded."""

    def __init__(self, ttl_time: str | None) -> None:
        _, calls = flow_of(ttl_time).to_plan(streaming=True)
        self.call: Any = bind(calls[0])
        self.bins = [TimedBin(), TimedBin()]
        self.records: list[list[list[tuple[bytes, bytes | None]]]] = [[], []]

    def rows(self, rows: list[Row]) -> list[Any]:
        parts = [[row for row in rows if row[0] % 2 == at] for at in (0, 1)]
        all_ = [row for part in parts for row in part]
        columns = [list(column) for column in zip(*all_, strict=True)] if all_ else [[], [], []]
        if len(self.call.columns) == 4:
            columns.append(columns[1])
        out: list[Any] = self.call.apply(self.bins, [len(part) for part in parts], [row[0] for row in all_], columns)
        return out

    def mark(self) -> None:
        for bin in self.bins:
            bin.mark()

    def undo(self) -> None:
        for bin in self.bins:
            bin.rollback()

    def move(self, changed: bool) -> None:
        """To another process; where the epoch has begun it goes as what was before, then as what has changed."""
        for at, bin in enumerate(self.bins):
            moved = TimedBin()
            chunks = list(bin.encode(not changed))
            changes = list(bin.changes()) if changed else []
            for chunk in chunks:
                moved.absorb(chunk)
            moved.mark()
            for entries in changes:
                moved.restore([(name, body) for _, name, body in entries])
            self.bins[at] = moved

    def record(self) -> None:
        for bin, record in zip(self.bins, self.records, strict=True):
            record.append([(name, body) for part in bin.changes() for _, name, body in part])

    def restart(self) -> None:
        """From files alone."""
        for at, record in enumerate(self.records):
            self.bins[at] = TimedBin()
            for entries in record:
                self.bins[at].restore(entries)
            self.bins[at].require()

    def states(self) -> dict[int, Any]:
        return {k: entry[0] for bin in self.bins for k, entry in bin.items() if entry[0] is not None}


@mock.patch("penstock._functions.timed._FEW", 0)  # indexes are made anew as soon as most of one counts no more
@settings(deadline=None, max_examples=examples(150))
@given(epochs_of_a_stream, st.sampled_from([None, "event", "processing"]), st.lists(st.integers(0, 7), max_size=8))
def test_is_undone_moved_recorded_and_restored(
    epochs: list[tuple[int, list[Row]]], ttl_time: str | None, events: list[int]
) -> None:
    model, held, before = Model(ttl_time), Held(ttl_time), None
    for number, (rows, watermark, clock) in enumerate(Epochs(epochs).epochs):
        event = events[number] if number < len(events) else 0
        after_us = None if watermark is None else watermark * 1_000
        held.mark()
        if event in (1, 2):  # broken off, before or behind its end
            held.rows(rows)
            if event == 2:
                held.call.end_epoch(held.bins, before, after_us, clock)
            held.undo()
            assert held.states() == model.states()
        half = len(rows) // 2
        out = held.rows(rows[:half])
        if event in (3, 4):
            held.move(event == 3)
        out += held.rows(rows[half:])
        out += held.call.end_epoch(held.bins, before, after_us, clock)
        before = after_us
        if event != 4:  # what moved as a whole no longer knows what has changed
            held.record()
        else:
            for bin, record in zip(held.bins, held.records, strict=True):
                moved = TimedBin()
                for chunk in bin.encode():
                    moved.absorb(chunk)
                gone = {name: None for old in record for name, _ in old}
                all_ = [(name, body) for part in moved.changes() for _, name, body in part]
                record.append([*gone.items(), *all_])
        assert by_key(out) == by_key(model.epoch(rows, watermark, clock))
        if event in (5, 6):
            held.restart()
        assert held.states() == model.states()
        # Nothing is left of a key that has neither state nor timers.
        assert sum(map(len, held.bins)) == sum(entry[0] is not None or bool(entry[2]) for entry in model.keys.values())
    held.mark()
    out = held.call.end_epoch(held.bins, before, END_US, 9_999)
    assert by_key(out) == by_key(model.epoch([], None, 9_999, ended=True))
    assert not any(map(len, held.bins))
    held.record()
    held.restart()
    assert not any(map(len, held.bins)), "what has expired or ended has tombstones"
    # The end is told once.
    assert held.call.end_epoch(held.bins, END_US, END_US, 9_999) == []


def timed(step: Callable[..., Any], **options: Any) -> tuple[Any, TimedBin]:
    """The call of a step over ``k`` and ``ts``, and a bin for it."""
    keyed = pk.Flow(SCHEMA, event_time="ts").key_by("k")
    _, calls = keyed.stateful_map(step, schema="k bigint", columns=["k", "ts"], **options).to_plan(streaming=True)
    call: Any = bind(calls[0])
    return call, call.new_state()


@pytest.mark.parametrize("ttl_time", ["event", "processing"])
def test_keys_that_are_forgotten_leave_nothing_for_the_ttl(ttl_time: str) -> None:
    def step(state: Any, k: int, ts: int) -> Any:
        return None if state else [ts], None

    call, bin = timed(step, ttl="1d", ttl_time=ttl_time)
    kept = list(range(-10, 0))
    for epoch in range(50):
        keys = kept * (epoch == 0) + [key for k in range(epoch * 20, epoch * 20 + 20) for key in (k, k)]
        times = [epoch * 1_000] * len(keys)
        call.apply([bin], [len(keys)], keys, [keys, times, times][: len(call.columns)])
        call.end_epoch([bin], None, epoch * 1_000_000, epoch * 1_000)
        assert len(bin._queued) == len(kept) and len(bin._expiring or ()) <= 2 * len(kept) + 100
    # Those that stay are over when they were before.
    for after_ms, left in ((86_399_999, kept), (86_400_000, [])):
        call.end_epoch([bin], 0, after_ms * 1_000, after_ms)
        assert [key for key, _ in bin.items()] == left


def test_timers_that_fire_before_another_leave_nothing_until_that_one() -> None:
    fired: list[tuple[int, str]] = []

    def step(state: Any, k: int, ts: int) -> Any:
        return 1, None, [(ts + 1, "near"), *([] if state else [(1_000_000, "far")])]

    def on_timer(state: Any, time: int, value: str, k: int) -> Any:
        fired.append((time, value))
        return state, None

    call, bin = timed(step, on_timer=on_timer)
    for ts in range(0, 5_000, 10):
        call.apply([bin], [2], [1, 2], [[1, 2], [ts, ts]])
        call.end_epoch([bin], None, (ts + 5) * 1_000, 0)
        assert bin._timers is not None, "nothing is made anew of all timers"
        assert len(bin._timers) <= 2 * 2 + 64
    assert fired == [(ts + 1, "near") for ts in range(0, 5_000, 10) for _ in (1, 2)]
    call.end_epoch([bin], 0, 1_000_001_000, 0)
    assert fired[-3:] == [(4_991, "near"), (1_000_000, "far"), (1_000_000, "far")]


def test_rows_that_wait_move_with_the_nan_and_the_zero_that_rows_bring() -> None:
    bin = TimedBin()
    bin.waiting = [([(math.nan, 1), (-0.0, 1)], [[5, 6]])]
    moved = TimedBin()
    for chunk in bin.encode():
        moved.absorb(chunk)
    [(keys, values)] = moved.waiting
    assert keys[0][0] is math.nan and str(keys[1]) == "(0.0, 1)" and values == [[5, 6]]


def test_one_epoch_is_one_epoch_on_every_host() -> None:
    rows = pa.table({"k": [1, 2, 1], "ts": [0, 50, 30], "v": [4, 1, 3]}, SCHEMA)
    model = Model("event")
    expected = model.epoch([(1, 0, 4), (2, 50, 1), (1, 30, 3)], None, None, ended=True)
    for ttl_time, clock in (("event", None), (None, None)):
        flow = flow_of(ttl_time)
        assert clock is None
        for workers in (1, 3):
            got = sorted(tuple(row.values()) for row in flow.collect(rows, workers).to_pylist())
            if ttl_time == "event":
                assert got == sorted(expected)


def test_times_are_those_of_the_column() -> None:
    """Datetimes with and without a zone come back as event time has them."""
    seen: list[Any] = []

    def note(state: Any, k: int, ts: Any) -> Any:
        return 1, None, (ts + datetime.timedelta(seconds=1), "x")

    def timer(state: Any, time: Any, value: Any, k: int) -> Any:
        seen.append(time)
        return None, (k,)

    for zone in (None, "Europe/Berlin"):
        schema = pa.schema([("k", pa.int64()), ("ts", pa.timestamp("us", zone))])
        flow = pk.Flow(schema, event_time="ts").key_by("k").stateful_map(note, schema="k bigint", on_timer=timer)
        moment = datetime.datetime(2024, 6, 1, 12, tzinfo=datetime.timezone.utc if zone else None)
        table = pa.table({"k": [7], "ts": pa.array([moment], schema.field("ts").type)})
        assert flow.collect(table).to_pylist() == [{"k": 7}]
        assert seen.pop() == moment + datetime.timedelta(seconds=1)


@pytest.mark.parametrize("kind", [pa.int64(), *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns"))])
def test_a_timer_may_be_set_again_at_the_time_that_was_told(kind: pa.DataType) -> None:
    """Also where that shows less of the time than there is: milliseconds of a time in microseconds."""
    moment = datetime.datetime(1970, 1, 1, 0, 0, 0, 1_500)
    told: list[tuple[Any, str]] = []

    def note(state: Any, k: int, ts: Any) -> Any:
        return 1, None, [(moment, "x"), (moment, "z")]

    def timer(state: Any, time: Any, value: str, k: int) -> Any:
        told.append((time, value))
        return 1, None, (time, "y") if value == "x" else None

    schema = pa.schema([("k", pa.int64()), ("ts", kind)])
    flow = pk.Flow(schema, event_time="ts").key_by("k").stateful_map(note, schema="k bigint", on_timer=timer)
    flow.collect(pa.table({"k": [7], "ts": pa.array([0], kind)}))
    time = 1 if pa.types.is_integer(kind) else moment
    assert told == [(time, "x"), (time, "z"), (time, "y")]


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_timers_have_times_of_the_type_that_rows_have(zone: str | None) -> None:
    seen: list[Any] = []

    def note(state: Any, k: int, ts: Any) -> Any:
        seen.append(ts)
        return 1, None, [(ts, "x"), (datetime.datetime(2500, 1, 1), "beyond nanoseconds")]

    def timer(state: Any, time: Any, value: Any, k: int) -> Any:
        seen.append(time)
        return None, None

    kind = pa.timestamp("ns", zone)
    flow = pk.Flow(pa.schema([("k", pa.int64()), ("ts", kind)]), event_time="ts").key_by("k")
    flow.stateful_map(note, schema="k bigint", on_timer=timer).collect(
        pa.table({"k": [7], "ts": pa.array([1_700_000_000_000_001_000], kind)})
    )
    row, first, last = seen
    assert type(first) is type(row) and first == row and first.tzinfo == row.tzinfo
    assert last.replace(tzinfo=None).year in (2500,) and isinstance(last, datetime.datetime)


def test_timers_that_cannot_be_told_are_refused_when_they_are_set() -> None:
    for kind in (pa.timestamp("us", "Europe/Berlin"), pa.timestamp("ns")):
        flow = pk.Flow(pa.schema([("k", pa.int64()), ("ts", kind)]), event_time="ts").key_by("k")
        for later in (10**15, -(10**15)):
            made = flow.stateful_map(lambda s, k, ts, at=later: (1, None, (at, 0)), schema="k bigint", on_timer=plain)
            with pytest.raises(UserFunctionError, match=f"the time {later} of a timer is out of range.*test_timed.py"):
                made.collect(pa.table({"k": [7], "ts": pa.array([0], kind)}))


def plain(state: Any, *values: Any) -> Any:
    return state, None


def test_the_least_of_nanoseconds_is_told_with_its_row() -> None:
    kind = pa.timestamp("ns")
    rows = pa.table({"k": ["a", "b", "c"], "ts": pa.array([-(2**63) + 1, None, -(2**63)], pa.int64()).cast(kind)})

    def step(state: Any, v: str) -> Any:
        return 1, (v,)

    keyed = pk.Flow(rows.schema, event_time="ts").key_by("k")
    flow = keyed.stateful_map(step, schema="k string", columns=["k"], ttl="1s")
    assert flow.collect(rows[:2]).num_rows == 2
    says = r"event time NaT in column 'ts' is out of range: Python has no such time\n  row: k='c'$"
    with pytest.raises(SchemaError, match=says):
        flow.collect(rows)


def test_what_makes_no_sense_is_refused() -> None:
    timed = pk.Flow("k bigint, ts bigint", event_time="ts").key_by("k")
    untimed = pk.Flow("k bigint").key_by("k")
    cases: list[tuple[type[Exception], str, Any]] = [
        (
            ConfigError,
            "stateful_map on_timer=3: give a function",
            lambda: timed.stateful_map(plain, schema="k bigint", on_timer=3),
        ),  # type: ignore[arg-type]
        (
            ConfigError,
            "stateful_map at_end='x': give a function",
            lambda: timed.stateful_map(plain, schema="k bigint", at_end="x"),
        ),  # type: ignore[arg-type]
        (ConfigError, "stateful_map ttl", lambda: timed.stateful_map(plain, schema="k bigint", ttl="soon")),
        (ConfigError, "stateful_map ttl", lambda: timed.stateful_map(plain, schema="k bigint", ttl="0s")),
        (
            ConfigError,
            "ttl_time='wall' is unknown",
            lambda: timed.stateful_map(plain, schema="k bigint", ttl="1s", ttl_time="wall"),
        ),
        (
            PlanError,
            "on_timer needs event time",
            lambda: untimed.stateful_map(plain, schema="k bigint", on_timer=plain),
        ),
        (
            PlanError,
            "ttl needs event time.*ttl_time='processing'",
            lambda: untimed.stateful_map(plain, schema="k bigint", ttl="1s"),
        ),
    ]
    for kind, says, build in cases:
        with pytest.raises(kind, match=says):
            build()
    bare = pk.Flow("k bigint, ts bigint", event_time="ts")
    # A step before took event time away, or gave its name to something else.
    for before in (timed.agg(n=pk.count()), timed.agg(ts=pk.max("ts")), bare.distinct("k")):
        for options in ({"on_timer": plain}, {"ttl": "1s"}):
            with pytest.raises(PlanError, match="'ts' is not in its rows any more: a step before it took it away"):
                before.key_by("k").stateful_map(plain, schema="k bigint", **options)  # type: ignore[arg-type]
    assert "and at the end of each epoch" in timed.stateful_map(plain, schema="k bigint", ttl="1s").explain()
    assert "end of each epoch" not in timed.stateful_map(plain, schema="k bigint").explain()
    untimed.stateful_map(plain, schema="k bigint", ttl="1s", ttl_time="processing").explain()


def test_an_end_and_processing_time_need_no_event_time() -> None:
    flow = (
        pk.Flow("k bigint, ts timestamp", event_time="ts")
        .key_by("k")
        .window(pk.tumbling("1m"))
        .agg(n=pk.count())
        .key_by("k")
        .stateful_map(
            lambda state, n: ((state or 0) + n, None), columns=["n"], schema="k bigint, n bigint", at_end=at_the_end
        )
    )
    ts = pa.array([0, 1, 61_000_000], pa.timestamp("us", "UTC"))
    assert flow.collect(pa.table({"k": [1, 1, 1], "ts": ts})).to_pylist() == [{"k": 1, "n": 3}]


def at_the_end(state: Any, k: int) -> Any:
    return [(k, state)]


def early(state: Any, time: int, value: Any, k: int) -> Any:
    return state, None, (time - 1, None)


def failing(state: Any, time: int, value: Any, k: int) -> Any:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("later", "timer", "says"),
    [
        ((5, "v"), early, r"ValueError: a timer at 5 set one before, at 4 .*test_timed.py"),
        ((5, "v"), failing, r"ValueError: no .*test_timed.py:\d+\)\n  row: k=1"),
        ((5,), plain, r"\(5,\) is no timer: give \(time, value\)"),
        (5, plain, r"TypeError: 5 is no timer: give \(time, value\), or a list of them"),
        ({6: "v"}, plain, r"TypeError: \{6: 'v'\} is no timer: give \(time, value\), or a list of them"),
        ([3], plain, "3 is no timer"),
        (("5", 1), plain, "'5' is no time: give milliseconds since 1970, or a datetime"),
        ((pd.NaT, 1), plain, "NaT is no time"),
        ((1 << 60, 1), plain, "of a timer is out of range"),
        ((5, "v"), None, r"sets \(5, 'v'\) for later, and the step has no on_timer"),
    ],
)
def test_what_functions_do_wrong_is_told(later: Any, timer: Any, says: str) -> None:
    def sets(state: Any, k: int, ts: int) -> Any:
        return 1, None, later

    flow = pk.Flow("k bigint, ts bigint", event_time="ts").key_by("k")
    made = flow.stateful_map(sets, schema="k bigint", on_timer=timer, at_end=None if timer else plain)
    with pytest.raises(UserFunctionError, match=says):
        made.collect(pa.table({"k": [1], "ts": [0]}))


class Pair(NamedTuple):
    """What a step may return, too."""

    state: Any
    out: Any


@pytest.mark.parametrize("options", [{}, {"at_end": lambda state, k: None}, {"ttl": "1s"}], ids=["plain", "end", "ttl"])
@pytest.mark.parametrize("make", [tuple, list, lambda pair: Pair(*pair)], ids=["tuple", "list", "named"])
def test_a_step_may_return_any_pair_whatever_else_the_step_is_given(make: Any, options: dict[str, Any]) -> None:
    flow = pk.Flow("k bigint, ts bigint", event_time="ts").key_by("k")
    made = flow.stateful_map(lambda state, k, ts: make([1, (k,)]), schema="k bigint", **options)
    assert made.collect(pa.table({"k": [7], "ts": [0]})).to_pylist() == [{"k": 7}]


def test_timers_may_be_named_tuples() -> None:
    class Timer(NamedTuple):
        time: int
        value: str

    flow = pk.Flow("k bigint, ts bigint", event_time="ts").key_by("k")
    for later in (Timer(5, "v"), [Timer(5, "v")]):
        made = flow.stateful_map(
            lambda state, k, ts, later=later: [1, None, later],
            schema="k bigint, value string",
            on_timer=lambda state, time, value, k: (None, (k, value)),
        )
        assert made.collect(pa.table({"k": [1], "ts": [0]})).to_pylist() == [{"k": 1, "value": "v"}]


def test_what_a_step_is_to_return_is_told_by_what_it_may_set() -> None:
    flow = pk.Flow("k bigint, ts bigint", event_time="ts").key_by("k")
    two = r"\(state, out\)"
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (5, {"on_timer": plain}, rf"returned 5; it must be {two} or \(state, out, later\) .*returns {two} or .*later"),
        (5, {"at_end": plain}, rf"returned 5; it must be {two} .*returns {two}$"),
        (
            (1, None, (5, "v")),
            {},
            rf"more than {two}: return .* give on_timer=, and the flow an event_time= .*row: k=1.*{two}$",
        ),
        ((1, None, (5, "v")), {"at_end": plain}, r"sets \(5, 'v'\) for later, and the step has no on_timer"),
    ]
    for result, options, says in cases:
        made = flow.stateful_map(lambda state, k, ts, result=result: result, schema="k bigint", **options)
        with pytest.raises(UserFunctionError, match=f"(?s){says}"):
            made.collect(pa.table({"k": [1], "ts": [0]}))


def test_a_value_error_of_the_step_itself_is_told_as_it_is() -> None:
    def step(state: Any, k: int) -> Any:
        one, two = (1, 2, 3)
        return one, two

    made = pk.Flow("k bigint").key_by("k").stateful_map(step, schema="k bigint")
    with pytest.raises(UserFunctionError, match=r"ValueError: too many values to unpack .*test_timed.py") as failed:
        made.collect(pa.table({"k": [1]}))
    assert "on_timer" not in str(failed.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_ttl_time_without_a_ttl_loses_no_rows(streaming: bool) -> None:
    keyed = pk.Flow("k bigint").key_by("k")
    flow = keyed.stateful_map(
        lambda state, k: ((state or 0) + 1, (k, "row")),
        schema="k bigint, why string",
        ttl_time="processing",
        at_end=lambda state, k: (k, f"end {state}"),
    )
    with flow.run(pa.table({"k": [1, 1]}), streaming=streaming) as results:
        rows = [tuple(row.values()) for batch in results for row in pa.record_batch(batch).to_pylist()]
    assert rows == [(1, "row"), (1, "row"), (1, "end 2")]


def test_where_there_is_no_clock_no_row_waits_for_one() -> None:
    _, calls = flow_of("processing").to_plan(streaming=True)
    waiting, ready = bind(calls[0] | {"clock": True}), bind(calls[0] | {"clock": False})
    rows = [(k, ts, v) for k in range(5) for ts, v in ((0, 4), (None, 3), (90, 9), (30, 7))]
    columns = [list(column) for column in zip(*rows, strict=True)]
    made = []
    for call in (waiting, ready):
        bin: Any = TimedBin()
        out: list[Any] = call.apply([bin], [len(rows)], columns[0], columns)  # type: ignore[union-attr]
        assert bool(out) == (not bin.waiting) == (call is ready)
        made.append(out + call.end_epoch([bin], None, END_US, None))  # type: ignore[union-attr, operator]
    assert made[0] == made[1]


def test_rows_of_an_input_that_ends_do_not_wait_for_its_end() -> None:
    seen: list[int] = []
    early: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for k in range(64):
            yield pa.record_batch({"k": [k]})
        early.extend(seen)

    def step(state: Any, k: int) -> Any:
        seen.append(k)
        return 1, (k,)

    keyed = pk.Flow("k bigint").key_by("k")
    flow = keyed.stateful_map(step, schema="k bigint", ttl="1h", ttl_time="processing")
    with flow.run(batches(), batch_rows=1) as results:
        assert sum(batch.num_rows for batch in map(pa.record_batch, results)) == 64
    assert early, "with few batches in flight some are through when the last one is read"
    clocks = [call["clock"] for streaming in (False, True) for call in flow.to_plan(streaming)[1]]
    assert clocks == [False, True]


def test_rows_that_wait_are_counted() -> None:
    bin = TimedBin()
    before = bin.bytes()
    bin.waiting = [([1] * 1_000, [["a" * 1_000 + str(n) for n in range(1_000)]])]
    assert bin.bytes() - before > 1_000_000


def test_a_function_that_fails_leaves_the_bin_to_be_rolled_back() -> None:
    held = Held("event")
    held.mark()
    held.rows([(1, 0, 4)])
    held.mark()
    before = held.states()
    with pytest.raises(UserFunctionError):
        held.rows([(1, 10, None)])  # type: ignore[list-item]
    with pytest.raises(StateError, match="roll back"):
        held.rows([(1, 11, 1)])
    held.undo()
    assert held.states() == before == {1: [4, [4]]}
    assert [row[:2] for row in held.call.end_epoch(held.bins, None, 100_000, 0)] == [
        (1, "z"),
        (1, "x"),
        (1, "y"),
        (1, "again"),
        (1, "z"),
    ]


def locked(state: Any, k: int, ts: int) -> Any:
    """A state that cannot be copied, of the keys from 10 on; those from 20 on have a timer too."""
    return [threading.Lock() if k >= 10 else k], None, [(ts + 50, "x")] if k >= 20 else None


@pytest.mark.parametrize(
    "at", ["row", "row that waited", "timer", "expiry by the watermark", "expiry by the clock", "end"]
)
def test_a_state_that_cannot_be_copied_is_told_as_such(at: str) -> None:
    """It was a bare TypeError, without step and key."""
    options: dict[str, Any] = {"on_timer": lambda state, time, value, k: (state, None), "at_end": lambda state, k: None}
    if at != "end":
        options |= {
            "ttl": "30ms",
            "ttl_time": "processing" if at in ("row that waited", "expiry by the clock") else "event",
        }
    call, bin = timed(locked, **options)
    key = 20 if at == "timer" else 10

    def rows(keys: list[int]) -> None:
        call.apply([bin], [len(keys)], keys, [keys, [0] * len(keys), [0] * len(keys)][: len(call.columns)])

    bin.mark()
    rows([1, key])
    call.end_epoch([bin], None, 0, 0)
    bin.mark()
    before = dict(bin.items())
    says = (
        rf"^stateful_map\[.*: the state of key {key} cannot be copied, as undoing an epoch needs: "
        "TypeError: cannot pickle '_thread.lock' object$"
    )
    with pytest.raises(StateError, match=says) as caught:
        if at.startswith("row"):
            rows([1, key])
        after_ms = {"timer": 60, "expiry by the watermark": 40}.get(at, 1)
        call.end_epoch([bin], 0, END_US if at == "end" else after_ms * 1_000, 40 if at == "expiry by the clock" else 1)
    assert type(caught.value.__cause__) is TypeError
    with pytest.raises(StateError, match="roll back"):
        bin.open()
    bin.rollback()
    assert dict(bin.items()) == before


def test_an_event_time_that_is_none_keeps_no_state_for_ever() -> None:
    """The greatest number stands for "never" in some sources."""

    def seen(count: Any, k: int, ts: int) -> Any:
        count = (count or 0) + 1
        return count, (count,)

    flow = pk.Flow("k bigint, ts bigint", event_time="ts").key_by("k").stateful_map(seen, schema="n bigint", ttl="1s")
    for none in (2**63 - 1, -(2**63), None):
        rows = pa.table({"k": [1] * 4, "ts": pa.array([0, none, 10_000, 20_000], pa.int64())})
        assert flow.collect(rows)["n"].to_pylist() == [1, 2, 1, 1]


def test_what_a_state_shares_with_its_timers_it_shares_when_it_is_undone() -> None:
    bin, shared = TimedBin(), [1]
    bin.put("k", [shared], None, [(5, 1, shared), (6, 2, [shared])], None)
    bin.mark()
    bin.keep("k", bin.states["k"])
    shared.append(2)
    bin.rollback()
    state, _, timers = bin.states["k"]
    assert state == [[1]] and state[0] is timers[0][2] is timers[1][2][0] and state[0] is not shared
