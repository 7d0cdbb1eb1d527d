"""Groups of an epoch with state and timeouts, against a straightforward model of Spark's rules."""

from __future__ import annotations

import contextlib
import copy
import datetime
import decimal
import doctest
import functools
import itertools
import math
import pickle
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
from examples_support import examples
from penstock import _native
from penstock._functions import frames as frames_module
from penstock._functions import group_state
from penstock._functions.frames import Cutter, Joiner, group_rows, held, joined, scalars
from penstock._functions.group_state import GroupEpoch, GroupState, StateShape, _duration_ms
from penstock._functions.groups import GroupBin, GroupStateCall
from penstock._schema import parse_ddl
from penstock.errors import ConfigError, PlanError, SchemaError, StateError, UserFunctionError

SCHEMA = pa.schema([("k", pa.string()), ("ts", pa.timestamp("ms")), ("v", pa.int64())])
STATE = pa.schema([("total", pa.int64()), ("seen", pa.list_(pa.int64()))])
OUTPUT = "k string, why string, total bigint, rows bigint, watermark bigint, clock bigint"
LATENESS_MS = 5


def test_a_timeout_that_is_set_anew_replaces_the_one_before() -> None:
    bin = GroupBin()
    for call in range(10_000):
        bin.put(("k",), ("state",), call)
    assert len(bin._timers or ()) <= 2 * len(bin.states) + 64
    for key in ("a", "b"):
        bin.put((key,), ("state",), 9_999)
    assert bin.due(9_999) == []
    assert sorted(bin.due(10_000)) == [(9_999, ("a",)), (9_999, ("b",)), (9_999, ("k",))]


def program(key: tuple[str], frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """A function that uses everything, by what it has summed up; order-sensitive."""
    total, seen = state.getOption or (0, [])
    assert state.exists == (state.getOption is not None)
    rows = 0
    for frame in frames:
        rows += len(frame)
        for value in frame["v"].tolist():
            total = (total * 31 + value) % 1_000
            seen = [*seen[-3:], value]
    seen.append(-1)  # must not reach the state unless it is set
    # Only one of the two setters works.
    if state.hasTimedOut:
        total += 7
        if total % 3 == 0:
            state.remove()
    choice = total % 5
    if choice in (0, 1):
        state.update((total, seen))
    elif choice == 2:
        state.remove()
    if choice in (1, 2, 3):
        try:
            state.setTimeoutDuration(10 + total % 40)
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 1 + total % 40)
    why = "timeout" if state.hasTimedOut else "rows"
    if choice != 4:
        row = [key[0], why, total, rows, state.getCurrentWatermarkMs(), state.getCurrentProcessingTimeMs()]
        yield pd.DataFrame([row])


class ModelState:
    """The twin of `GroupState`: deep copies, no checks."""

    def __init__(self, value: Any, timeout: str, watermark: int, clock: int, timed_out: bool) -> None:
        self.value, self.conf, self.watermark, self.clock = value, timeout, watermark, clock
        self.hasTimedOut, self.at = timed_out, None

    exists = property(lambda self: self.value is not None)
    getOption = property(lambda self: None if self.value is None else (self.value[0], list(self.value[1])))

    def update(self, value: Any) -> None:
        self.value = (value[0], tuple(value[1]))

    def remove(self) -> None:
        self.value = None

    def setTimeoutDuration(self, duration: int) -> None:
        if self.conf != "ProcessingTimeTimeout":
            raise RuntimeError
        self.at = self.clock + duration

    def setTimeoutTimestamp(self, at: int) -> None:
        if self.conf != "EventTimeTimeout":
            raise RuntimeError
        self.at = at

    def getCurrentWatermarkMs(self) -> int:
        return self.watermark

    def getCurrentProcessingTimeMs(self) -> int:
        return self.clock


Row = tuple[str, int | None, int]


def model(epochs: list[tuple[int, list[Row]]], conf: str) -> tuple[list[Any], list[Any]]:
    """What comes out, and what is late."""
    states: dict[str, tuple[Any, int | None]] = {}
    watermark, clock, out, late = 0, 0, [], []

    def call(key: str, values: list[int], timed_out: bool, watermark: int) -> None:
        state: Any = ModelState(states.get(key, (None,))[0], conf, watermark, clock, timed_out)
        frames = [pd.DataFrame({"v": values})] if values else []
        out.extend(tuple(frame.iloc[0]) for frame in program((key,), iter(frames), state))
        states.pop(key, None)
        if state.value is not None or state.at is not None:
            states[key] = (state.value, state.at)

    def fire(limit: float, data: set[str], watermark: int) -> None:
        due = sorted((at, key) for key, (_, at) in states.items() if at is not None and at < limit and key not in data)
        for _, key in due:
            call(key, [], True, watermark)

    for moment, rows in epochs:
        clock = max(clock, moment)
        in_time = []
        for row in rows:
            is_late = conf == "EventTimeTimeout" and row[1] is not None and row[1] <= watermark
            (late if is_late else in_time).append(row)
        by_key: dict[str, list[int]] = {}
        for key, _, value in in_time:
            by_key.setdefault(key, []).append(value)
        for key, values in by_key.items():
            call(key, values, False, watermark)
        if conf == "ProcessingTimeTimeout":
            fire(clock, set(by_key), watermark)
        times = [at for _, at, _ in rows if at is not None]
        if times and max(times) - LATENESS_MS > watermark:
            watermark = max(times) - LATENESS_MS
            if conf == "EventTimeTimeout":
                fire(watermark, set(), watermark)
    if conf == "EventTimeTimeout":
        fire(math.inf, set(), watermark)
    return sorted(out), sorted(late, key=str)


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [[], [], []]
    return pa.record_batch([pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)], SCHEMA)


def flow_of(conf: str) -> pk.Flow:
    flow = pk.Flow(SCHEMA, event_time="ts", lateness=f"{LATENESS_MS}ms").key_by("k")
    return flow.apply_in_pandas_with_state(program, OUTPUT, STATE, "update", conf)


def drive(
    epochs: list[tuple[int, list[Row]]], conf: str, workers: int, moves: list[int]
) -> tuple[list[Any], list[Any]]:
    plan, calls = flow_of(conf).to_plan()
    out: list[Any] = []
    late: list[Any] = []
    with _native.LocalRun(plan, calls, workers=workers, bits=2) as run:
        for number, (clock, rows) in enumerate(epochs):
            if rows:
                run.push(batch_of(rows), clock_ms=clock)
            if number in moves and workers > 1:
                run.migrate([[(bin, number % workers)] for bin in range(4)])
        run.finish(clock_ms=max(clock for clock, _ in epochs))
        while (item := run.take(30)) is not None:
            which = out if item[0] == "rows" else late
            which.extend(tuple(row.values()) for row in pa.record_batch(item[1]).to_pylist())
    return sorted(out), sorted(late, key=str)


rows_of_an_epoch = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.one_of(st.none(), st.integers(1, 120)), st.integers(0, 9)),
    min_size=1,
    max_size=12,
)
epochs_of_a_stream = st.lists(st.tuples(st.integers(1, 200), rows_of_an_epoch), min_size=1, max_size=6)


@settings(deadline=None)
@given(
    epochs_of_a_stream,
    st.sampled_from(["NoTimeout", "ProcessingTimeTimeout", "EventTimeTimeout"]),
    st.integers(1, 3),
    st.lists(st.integers(0, 5), max_size=3),
)
def test_equals_the_model_with_bins_on_the_move(
    epochs: list[tuple[int, list[Row]]], conf: str, workers: int, moves: list[int]
) -> None:
    expected, late = model(epochs, conf)
    found, found_late = drive(epochs, conf, workers, moves)
    assert found == expected
    naive = [(k, None if at is None else at.replace(tzinfo=datetime.timezone.utc), v) for k, at, v in found_late]
    assert [(k, at and round(at.timestamp() * 1000), v) for k, at, v in naive] == late


def call_of(func: Any, conf: str = "ProcessingTimeTimeout") -> GroupStateCall:
    flow = pk.Flow(SCHEMA, event_time="ts").key_by("k")
    (call,) = flow.apply_in_pandas_with_state(func, OUTPUT, STATE, "update", conf).to_plan()[1]
    return GroupStateCall(call, lambda: False, lambda error, keys, key: error)


def outputs(batches: list[pa.RecordBatch]) -> list[Any]:
    return sorted(tuple(row.values()) for batch in batches for row in batch.to_pylist())


@settings(deadline=None)
@given(st.lists(rows_of_an_epoch, min_size=1, max_size=4), st.lists(rows_of_an_epoch, min_size=1, max_size=3))
def test_an_undone_epoch_leaves_states_timers_and_rows_as_they_were(
    before: list[list[Row]], undone: list[list[Row]]
) -> None:
    call, twin = call_of(program), call_of(program)
    bin, other = call.new_state(), twin.new_state()

    def epoch(call: GroupStateCall, bin: GroupBin, rows: list[Row], clock: int) -> list[Any]:
        call.take([bin], [len(rows)], batch_of(rows))
        return outputs(call.end_epoch([bin], None, None, clock))

    for number, rows in enumerate(before):
        assert epoch(call, bin, rows, number) == epoch(twin, other, rows, number)
    bin.mark()
    for number, rows in enumerate(undone):
        epoch(call, bin, rows, 10 + 20 * number)
    call.take([bin], [1], batch_of([("a", 1, 1)]))
    bin.rollback()
    assert dict(bin.items()) == dict(other.items())
    # Then to another process, with the rows of an epoch under way.
    call.take([bin], [1], batch_of([("b", 1, 1)]))
    moved = call.new_state()
    for chunk in bin.encode():
        moved.absorb(chunk)
    twin.take([other], [1], batch_of([("b", 1, 1)]))
    for clock in (30, 1_000, 2_000):
        assert outputs(call.end_epoch([moved], None, None, clock)) == outputs(
            twin.end_epoch([other], None, None, clock)
        )
        assert dict(moved.items()) == dict(other.items())


def test_timeouts_fire_once_in_order_and_only_without_rows() -> None:
    fired: list[tuple[str, bool]] = []

    def func(key: Any, frames: Any, state: Any) -> Any:
        fired.append((key[0], state.hasTimedOut))
        state.update((0, []))
        if not state.hasTimedOut:
            state.setTimeoutDuration({"a": 30, "b": 10, "c": 20}[key[0]])
        return []

    call = call_of(func)
    bins = [call.new_state() for _ in range(3)]
    for bin, key in zip(bins, "abc", strict=True):
        call.take([bin], [1], batch_of([(key, 1, 1)]))
    call.end_epoch(bins, None, None, 100)
    fired.clear()
    call.take([bins[1]], [1], batch_of([("b", 1, 1)]))
    call.end_epoch(bins, None, None, 121)
    assert fired == [("b", False), ("c", True)]
    call.end_epoch(bins, None, None, 131)
    call.end_epoch(bins, None, None, 132)
    call.end_epoch(bins, None, None, 500)
    assert fired[2:] == [("a", True), ("b", True)], "130 is not before 130, and nothing fires twice"


@pytest.mark.parametrize("chunk", [b"\x01\x02nothing", b"\x01\x07", b"\x02\x02"])
def test_bad_chunks_change_nothing(chunk: bytes) -> None:
    bin = GroupBin()
    bin.put(("a",), (1, []), None)
    with pytest.raises(StateError):
        bin.absorb(chunk)
    assert dict(bin.items()) == {("a",): ((1, []), None)} and bin.pending == []


# The surface of the state


def state_of(conf: str = "NoTimeout", watermark: int | None = 1_000, value: Any = None, **fields: Any) -> GroupState:
    schema = pa.schema(fields or {"n": pa.int64()})
    return GroupState(GroupEpoch(StateShape(schema), conf, watermark, 5_000), value)


def test_the_example_names_what_users_have() -> None:
    assert doctest.testmod(group_state).failed == 0
    (example,) = (one for one in doctest.DocTestFinder().find(pk.GroupState, "GroupState") if one.examples)
    named = {name for code in example.examples for name in re.findall(r"\b[A-Z]\w+", code.source)}
    assert named <= {"DataFrame", "Flow", "ProcessingTimeTimeout"}


def test_spark_s_rules() -> None:
    state = state_of()
    assert not state.exists and state.getOption is None and not state.hasTimedOut
    with pytest.raises(ValueError, match="does not exist"):
        state.get  # noqa: B018
    state.update((1,))
    assert state.exists and state.get == (1,) and state.getOption == (1,)
    state.remove()
    assert not state.exists
    with pytest.raises(TypeError, match="remove"):
        state.update(None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="ProcessingTimeTimeout"):
        state.setTimeoutDuration(5)
    with pytest.raises(RuntimeError, match="EventTimeTimeout"):
        state.setTimeoutTimestamp(5)
    assert state.getCurrentWatermarkMs() == 1_000 and state.getCurrentProcessingTimeMs() == 5_000
    with pytest.raises(RuntimeError, match="withWatermark"):
        state_of(watermark=None).getCurrentWatermarkMs()
    timed = state_of("ProcessingTimeTimeout")
    for bad in (0, -1, "", "0 seconds", "1 month", "five", "1.5 ms"):
        with pytest.raises(ValueError, match="setTimeoutDuration"):
            timed.setTimeoutDuration(bad)
    timed.setTimeoutDuration("1 minute 30 seconds")
    assert timed._timeout_ms == 5_000 + 90_000
    with pytest.raises(RuntimeError):
        timed.setTimeoutTimestamp(5)
    event = state_of("EventTimeTimeout")
    for late in (0, 999):
        with pytest.raises(ValueError, match="setTimeoutTimestamp"):
            event.setTimeoutTimestamp(late)
    event.setTimeoutTimestamp(1_000)
    event.setTimeoutTimestamp(datetime.datetime(2024, 1, 1, 0, 0, 0, 123_999, datetime.timezone.utc))
    assert event._timeout_ms == 1_704_067_200_123
    with pytest.raises(RuntimeError):
        event.setTimeoutDuration(5)


def test_times_that_are_none_are_named() -> None:
    timed, event = state_of("ProcessingTimeTimeout"), state_of("EventTimeTimeout")
    for bad in (None, True, "x", datetime.timedelta(seconds=1), np.timedelta64(5, "s"), 1j, [5]):
        if not isinstance(bad, str):
            with pytest.raises(TypeError, match=rf"setTimeoutDuration\({re.escape(repr(bad))}\): give a number of mil"):
                timed.setTimeoutDuration(bad)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=rf"setTimeoutTimestamp\({re.escape(repr(bad))}\): give a number of mil"):
            event.setTimeoutTimestamp(bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"setTimeoutTimestamp\(NaT\): give a number of milliseconds or a datetime"):
        event.setTimeoutTimestamp(pd.NaT)
    for bad in (math.nan, math.inf, decimal.Decimal("nan")):
        for set_, name in ((timed.setTimeoutDuration, "Duration"), (event.setTimeoutTimestamp, "Timestamp")):
            with pytest.raises(ValueError, match=rf"setTimeout{name}\(.*\): the number of milliseconds must be finite"):
                set_(bad)  # type: ignore[arg-type]
    assert timed._timeout_ms is None and event._timeout_ms is None
    for good in (5, 5.5, np.int32(5), np.float64(5), decimal.Decimal(5)):
        timed.setTimeoutDuration(good)  # type: ignore[arg-type]
        event.setTimeoutTimestamp(1_000 + good)  # type: ignore[arg-type, operator]
        assert (timed._timeout_ms, event._timeout_ms) == (5_005, 1_005)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("10 seconds", 10_000),
        ("1 second", 1_000),
        ("90s", 90_000),
        ("interval 2 hours", 7_200_000),
        ("5ms", 5),
        ("1m30s", 90_000),
    ],
)
def test_durations_as_spark_writes_them(text: str, ms: int) -> None:
    assert _duration_ms(text) == ms


def test_the_state_has_the_declared_shape() -> None:
    kinds = {"n": pa.int32(), "x": pa.float64(), "s": pa.string(), "d": pa.date32(), "l": pa.list_(pa.int64())}
    state = state_of(**kinds)
    given_list = [1]
    state.update((np.int64(3), np.float32(0.5), None, pd.Timestamp(2024, 1, 2).date(), given_list))
    given_list.append(2)
    assert state.get == (3, 0.5, None, datetime.date(2024, 1, 2), [1])
    state.get[4].append(9)
    assert state.get[4] == [1] and type(state.get[0]) is int
    good = [1, 1.0, "s", datetime.date(2024, 1, 1), [1]]
    for place, bad in [
        (0, 1 << 31),
        (0, "1"),
        (0, True),
        (0, 1.0),
        (1, "x"),
        (1, decimal.Decimal(1)),
        (2, 5),
        (4, ["a"]),
    ]:
        value = list(good)
        value[place] = bad
        with pytest.raises(TypeError, match=f"field '{list(kinds)[place]}'"):
            state.update(tuple(value))
        assert state.get[0] == 3, "unchanged"
    for wrong in ((1,), 5, "abcde"):
        with pytest.raises(TypeError, match="tuple of 5"):
            state.update(wrong)  # type: ignore[arg-type]


def kept(ddl: str, value: Any, timezone: str = "UTC") -> Any:
    """What a state of one value becomes, and as what the next call sees it."""
    shape = StateShape(parse_ddl(ddl), timezone)
    [found] = shape.checked((value,))
    [shown] = shape.shown((found,))
    return found, shown


D = decimal.Decimal
FIVE = datetime.datetime(2024, 1, 1, 5)
#: As Spark 4.3 gives them back, but for those of lists and maps, which its own GroupState does not take.
KEPT = [
    ("d decimal(10,2)", D("1.235"), D("1.24")),
    ("d decimal(10,2)", D("-1.235"), D("-1.24")),
    ("d decimal(10,2)", D("1E+2"), D("100.00")),
    ("d decimal(10,2)", D("-0.001"), D("0.00")),
    ("d decimal(38,0)", D("1" * 38), D("1" * 38)),
    ("f float", 0.1, 0.10000000149011612),
    ("f float", 1e300, math.inf),
    ("f float", -1e300, -math.inf),
    ("f float", 1e-60, 0.0),
    ("a date", FIVE, FIVE.date()),
    ("a date", pd.Timestamp(FIVE), FIVE.date()),
    ("b binary", bytearray(b"x"), b"x"),
    ("z timestamp_ntz", FIVE.replace(tzinfo=datetime.timezone.utc), FIVE),
    ("l array<decimal(10,2)>", (D("1.239"), None), [D("1.24"), None]),
    ("l array<float>", np.array([0.1]), [0.10000000149011612]),
    ("m map<string,date>", {"a": FIVE, "b": None}, {"a": FIVE.date(), "b": None}),
]


@pytest.mark.parametrize(("ddl", "given", "expected"), KEPT)
def test_a_state_is_kept_as_its_schema_says(ddl: str, given: Any, expected: Any) -> None:
    found, shown = kept(ddl, given)
    assert repr(found) == repr(shown) == repr(expected)
    assert kept(ddl, shown) == (found, shown)


@pytest.mark.parametrize(
    ("ddl", "bad"),
    [
        ("d decimal(10,2)", D("99999999.995")),
        ("d decimal(10,2)", D("1e30")),
        ("d decimal(10,2)", D("NaN")),
        ("d decimal(10,2)", D("Infinity")),
        ("f float", 10**400),
        ("a date", pd.NaT),
        ("t timestamp", pd.NaT),
        ("l array<int>", {1}),
        ("m map<string,int>", [("a", 1)]),
        ("m map<string,int>", {None: 1}),
        ("s struct<x:int>", 7),
        ("s struct<x:int>", (1, 2)),
        ("s struct<x:int>", {"x": "no"}),
    ],
)
def test_what_no_state_of_that_schema_is_is_refused(ddl: str, bad: Any) -> None:
    with pytest.raises(TypeError, match=f"field '{ddl[0]}' .* cannot hold"):
        kept(ddl, bad)


def test_a_struct_of_a_state_is_read_as_a_row_of_spark() -> None:
    Row = pytest.importorskip("pyspark.sql").Row
    ddl = "s struct<x:int,y:array<struct<z:decimal(5,1)>>>"
    expected = Row(x=1, y=[Row(z=D("2.3")), None])
    for value in ((1, [(D("2.25"),), None]), {"y": [{"z": D("2.25")}, None], "x": 1, "other": 5}, expected):
        found, shown = kept(ddl, value)
        assert found == {"x": 1, "y": [{"z": D("2.3")}, None]}
        assert shown == expected and repr(shown) == repr(expected)
        assert shown.x == shown["x"] == shown[0] == 1 and "x" in shown and shown.y[0].z == D("2.3")
        assert shown.asDict(True) == expected.asDict(True)
        assert pickle.loads(pickle.dumps(shown)) == copy.deepcopy(shown) == shown
        with pytest.raises(AttributeError, match="no field 'w'; it has x, y"):
            shown.w  # noqa: B018
        with pytest.raises(KeyError):
            shown["w"]
        # A function may put it out again.
        joiner = Joiner(parse_ddl(ddl), "UTC")
        joiner.add(pd.DataFrame({"s": [shown]}))
        assert joiner.take()[0].to_pylist() == [{"s": found}]
    assert kept(ddl, {"x": 1}) == ({"x": 1, "y": None}, Row(x=1, y=None))
    with pytest.raises(SchemaError, match="two fields of one name"):
        StateShape(pa.schema({"s": pa.struct([("x", pa.int8()), ("x", pa.int16())])}))


def test_a_time_of_a_state_is_what_the_clock_of_the_zone_says() -> None:
    noon = datetime.datetime(2024, 7, 1, 12, tzinfo=datetime.timezone.utc)
    assert kept("t timestamp", noon, "Europe/Berlin") == (datetime.datetime(2024, 7, 1, 14),) * 2
    assert kept("t timestamp", FIVE, "Europe/Berlin") == (FIVE, FIVE)
    assert kept("l array<timestamp>", [noon], "America/New_York")[1] == [datetime.datetime(2024, 7, 1, 8)]


def test_the_call_that_sets_a_state_sees_what_it_gave() -> None:
    state = state_of(d=pa.decimal128(10, 2), l=pa.list_(pa.float32()))
    state.update((D("1.239"), [0.1]))
    assert state.get == state.getOption == (D("1.239"), [0.1])
    assert state._value == (D("1.24"), [0.10000000149011612])
    assert repr(state) == "GroupState((Decimal('1.239'), [0.1]))"
    state.remove()
    assert not state.exists and state.getOption is None and repr(state) == "GroupState(<undefined>)"


# Errors


def test_what_the_flow_refuses() -> None:
    keyed = pk.Flow(SCHEMA).key_by("k")
    with pytest.raises(PlanError, match="event_time"):
        keyed.apply_in_pandas_with_state(program, OUTPUT, STATE, "update", "EventTimeTimeout")
    with pytest.raises(ConfigError, match="timeoutConf"):
        keyed.apply_in_pandas_with_state(program, OUTPUT, STATE, "update", "Never")
    with pytest.raises(ConfigError, match="outputMode"):
        keyed.apply_in_pandas_with_state(program, OUTPUT, STATE, "complete")
    with pytest.raises(ConfigError, match="timezone"):
        keyed.apply_in_pandas_with_state(program, OUTPUT, STATE, timezone="Mars/Olympus")
    with pytest.raises(PlanError, match="key_by"):
        pk.Flow(SCHEMA).apply_in_pandas_with_state(program, OUTPUT, STATE)
    with pytest.raises(ConfigError, match="function"):
        keyed.apply_in_pandas_with_state("program", OUTPUT, STATE)  # type: ignore[arg-type]


def _raises(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
    if key[0] == "b":
        raise KeyError("missing")
    yield from ()


@pytest.mark.parametrize(
    ("func", "words"),
    [
        (_raises, r"(?s)KeyError.*missing.*k='b'"),
        (lambda key, frames, state: pd.DataFrame({"a": [1]}), "yield DataFrames"),
        (lambda key, frames, state: [1], "yielded a int"),
        (lambda key, frames, state: None, "the function returned None; it must yield DataFrames"),
        (lambda key, frames, state: [pd.DataFrame({"k": [1]})], "1 columns"),
        (lambda key, frames, state: [pd.DataFrame([["k", "why", "no number", 1, 1, 1]])], "'total'"),
        (lambda key, frames, state: [pd.DataFrame([[1] * 6], columns=list("abcdef"))], "without the column 'k'"),
        (lambda key, frames, state: state.get, "does not exist"),
        (lambda key, frames: [], "TypeError"),
    ],
)
def test_errors_name_the_function_and_the_key(func: Any, words: str) -> None:
    flow = pk.Flow(SCHEMA).key_by("k").apply_in_pandas_with_state(func, OUTPUT, STATE)
    with pytest.raises(UserFunctionError, match=words) as caught:
        flow.collect(batch_of([("a", 1, 1), ("b", 1, 1)]))
    assert caught.value.file == __file__ and caught.value.line > 0


KEYS: dict[str, Any] = {
    "float16": pa.array([0.0, -0.0, math.nan, math.nan, None], pa.float32()).cast(pa.float16()),
    "uuid": pa.array([b"a" * 16, b"a" * 16, b"b" * 16, b"b" * 16, None], pa.uuid()),
}
for narrow in ("decimal32", "decimal64"):
    if hasattr(pa, narrow):
        ones, twos = [decimal.Decimal("1.5")] * 2, [decimal.Decimal(2)] * 2
        KEYS[narrow] = pa.array([*ones, *twos, None], getattr(pa, narrow)(5, 2))
if hasattr(pa, "json_"):
    KEYS["json"] = pa.array(['{"a":1}', '{"a":1}', "[]", "[]", None], pa.json_())


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_all_types_that_the_plan_takes(name: str) -> None:
    def func(key: Any, frames: Any, state: Any) -> Any:
        before = state.getOption or (0,)
        rows = sum(map(len, frames))
        state.update((before[0] + rows,))
        state.setTimeoutTimestamp(50)
        yield pd.DataFrame({"n": [-before[0] if state.hasTimedOut else rows], "key": [str(key[0])]})

    rows = pa.table({"k": KEYS[name], "ts": [5, 5, 7, 7, 9]})
    flow = pk.Flow(rows.schema, event_time="ts", lateness="1s").key_by("k")
    made = flow.apply_in_pandas_with_state(func, "n bigint, key string", "n bigint", timeoutConf="EventTimeTimeout")
    found = made.collect([rows, rows], 2, streaming=True).to_pylist()
    for n, count in ((2, 4), (1, 2), (-4, 2), (-2, 1)):
        assert sum(row["n"] == n for row in found) == count
    # What times out is told as what came.
    assert {row["key"] for row in found if row["n"] < 0} == {row["key"] for row in found if row["n"] > 0}


def test_what_pandas_and_python_do_not_have_is_told_with_its_column() -> None:
    far = pa.array([1 << 62, 1], pa.timestamp("us"))
    mixed = pa.UnionArray.from_sparse(pa.array([0, 0], pa.int8()), [pa.array([1, 2])])
    for column, values, words in (
        ("k", far, r"'k' \(timestamp\[us\]\): date value out of range"),
        ("v", far, r"'v' \(timestamp\[us\]\): .*4611686018427387904"),
        ("v", mixed, r"'v' \(sparse_union<.*\): "),
    ):
        rows = pa.table({"k": [1, 2], "other": [1, 2], "v": ["a", "b"]})
        rows = rows.set_column(rows.schema.names.index(column), column, values)
        flow = pk.Flow(rows.schema).key_by("k")
        made = flow.apply_in_pandas_with_state(lambda key, frames, state: [], "n bigint", "n bigint")
        with pytest.raises(UserFunctionError, match=rf"it cannot take column {words}.*; cast the column") as caught:
            made.collect(rows)
        assert caught.value.file == __file__ and caught.value.line > 0
    # Where each key is converted alone it is one of these that is named.
    rows = pa.table({"k": [1, 2], "n": pa.array([[1], [None]]), "v": far})
    made = pk.Flow(rows.schema).key_by("k").apply_in_pandas_with_state(lambda k, f, s: [], "n bigint", "n bigint")
    with pytest.raises(UserFunctionError, match=r"(?s)it cannot take the rows of a key: .*k=1"):
        made.collect(rows)


def test_rows_that_cannot_be_taken_leave_the_bin_to_be_rolled_back() -> None:
    rows = pa.table({"k": pa.array([1 << 62], pa.timestamp("us"))})
    flow = pk.Flow(rows.schema).key_by("k").apply_in_pandas_with_state(lambda k, f, s: [], "n bigint", "n bigint")
    (call,) = flow.to_plan()[1]
    made = GroupStateCall(call, lambda: False, lambda error, keys, key: error)
    bin = made.new_state()
    bin.mark()
    made.take([bin], [1], rows.to_batches()[0])
    with pytest.raises(TypeError, match="it cannot take column 'k'"):
        made.end_epoch([bin], None, None, 1)
    with pytest.raises(StateError, match="roll back"):
        bin.open()
    bin.rollback()
    assert made.end_epoch([bin], None, None, 2) == []


# Frames


tables = st.integers(1, 30).flatmap(
    lambda n: st.fixed_dictionaries(
        {
            "i": st.lists(st.one_of(st.integers(0, 3), st.none()), min_size=n, max_size=n),
            "f": st.lists(st.sampled_from([0.0, -0.0, 1.5, math.nan, None]), min_size=n, max_size=n),
            "s": st.lists(st.sampled_from(["x", "y", None]), min_size=n, max_size=n),
            "t": st.lists(
                st.datetimes(datetime.datetime(2000, 1, 1), datetime.datetime(2030, 1, 1)), min_size=n, max_size=n
            ),
        }
    )
)


@settings(deadline=None)
@given(tables, st.sampled_from([["i"], ["f"], ["s", "i"], ["i", "f", "s"], ["t"]]), st.booleans())
def test_groups_and_their_frames_equal_the_obvious_ones(
    columns: dict[str, list[Any]], keys: list[str], nulls: bool
) -> None:
    if not nulls:
        columns["i"] = [value or 0 for value in columns["i"]]
    kinds = {"i": pa.int64(), "f": pa.float64(), "s": pa.string(), "t": pa.timestamp("us", "UTC")}
    table = pa.table({name: pa.array(values, kinds[name]) for name, values in columns.items()})
    order, starts = group_rows(table, keys)

    def key(row: int) -> tuple[Any, ...]:
        values = (columns[name][row] for name in keys)
        return tuple("nan" if value != value else value for value in values)

    expected: dict[Any, list[int]] = {}
    for row in range(table.num_rows):
        expected.setdefault(key(row), []).append(row)
    bounds = [*starts.tolist(), table.num_rows]
    groups = [order[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    assert sorted(groups) == sorted(expected.values())
    ordered = table.take(order)
    fast, naive = Cutter(ordered, "Europe/Berlin"), Cutter(ordered, "Europe/Berlin", naive=True)
    for a, b in itertools.pairwise(bounds):
        frame = fast.cut(a, b)
        pd.testing.assert_frame_equal(frame, naive.cut(a, b))
        frame.loc[0, "s"] = "changed"
        frame["i"] = 5
        assert len(frame) == b - a and frame["f"].iloc[-1:].equals(naive.cut(a, b)["f"].iloc[-1:])


WHOLE = {
    "int8": st.integers(-(2**7), 2**7 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "bool": st.booleans(),
    "double": st.sampled_from([0.0, -0.0, 1.5, math.nan]),
    "string": st.sampled_from(["x", "y"]),
}


@st.composite
def cut_tables(draw: Any) -> tuple[pa.Table, list[int]]:
    """A table of several chunks, and where its groups are cut."""
    count = draw(st.integers(1, 12))
    columns: dict[str, Any] = {}
    for place, kind in enumerate(draw(st.lists(st.sampled_from(sorted(WHOLE)), min_size=1, max_size=5))):
        column = WHOLE[kind] if draw(st.booleans()) else st.none() | WHOLE[kind]
        columns[str(place)] = pa.array(
            draw(st.lists(column, min_size=count, max_size=count)), kind if kind != "bool" else pa.bool_()
        )
    inner = draw(st.sampled_from([st.integers(0, 9), st.none() | st.integers(0, 9)]))
    if draw(st.booleans()):
        lists = st.lists(st.none() | st.lists(inner, max_size=2), min_size=count, max_size=count)
        columns["nested"] = pa.array(draw(lists), pa.list_(pa.int64()))
    table, at = pa.table(columns), draw(st.integers(0, count))
    bounds = sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    return pa.concat_tables([table[:at], table[at:]]), [0, *bounds, count]


@settings(deadline=None, max_examples=examples(60))
@given(cut_tables())
def test_each_frame_is_as_if_its_group_were_alone(case: tuple[pa.Table, list[int]]) -> None:
    table, bounds = case
    cutters = [Cutter(table, "UTC"), Cutter(table, "UTC", naive=True)]
    for a, b in itertools.pairwise(bounds):
        alone = Cutter(table[a:b], "UTC", naive=True).cut(0, b - a)
        for cutter in cutters:
            frame = cutter.cut(a, b)
            pd.testing.assert_frame_equal(frame, alone)
            for name in table.column_names:
                assert list(map(type, frame[name])) == list(map(type, alone[name]))


def test_a_null_costs_its_own_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One null of a whole number had the frame of each group built by itself."""
    built: list[int] = []
    to_pandas = frames_module._to_pandas

    def counted(table: pa.Table, timezone: str) -> pd.DataFrame:
        built.append(table.num_rows)
        return to_pandas(table, timezone)

    monkeypatch.setattr(frames_module, "_to_pandas", counted)
    n, b = list[Any](range(300)), [True] * 300
    n[7], b[7], b[150] = None, None, None
    cutter = Cutter(pa.table({"n": n, "b": b, "xs": [[1]] * 300}), "UTC")
    kinds = [cutter.cut(at, at + 3).dtypes.astype(str).tolist() for at in range(0, 300, 3)]
    assert built == [300, 3, 3]
    assert kinds[2] == ["float64", "object", "object"] and kinds[50] == ["int64", "object", "object"]
    assert set(map(tuple, kinds[:2] + kinds[3:50] + kinds[51:])) == {("int64", "bool", "object")}


frames = st.lists(
    st.sampled_from(
        [
            pd.DataFrame({"a": [1], "b": ["x"]}),
            pd.DataFrame({"a": [2, 3], "b": ["y", None]}),
            pd.DataFrame({"b": ["z"], "a": [4]}),
            pd.DataFrame({"a": [1.0], "b": ["x"]}),
            pd.DataFrame({"a": pd.array([None, 5], "Int64"), "b": pd.Categorical(["q", "r"])}),
            pd.DataFrame([[7, "p"]]),
            pd.DataFrame({"a": pd.to_datetime([1, 2]), "b": ["m", "n"], "c": pd.to_datetime([3, 4])}),
            pd.DataFrame({"a": pd.to_datetime([5]), "b": ["m"], "c": pd.to_datetime([6])}),
            pd.DataFrame({"a": pd.to_datetime([7], utc=True), "b": ["o"], "c": pd.to_timedelta([8])}),
            pd.DataFrame({"a": [9, 9, 9], "b": list("abc")}).iloc[1:2],
        ]
    ),
    max_size=8,
)


@given(frames)
def test_joined_frames_equal_concatenated_ones(several: list[pd.DataFrame]) -> None:
    def rows(parts: Any) -> list[str]:
        plain = [[[None if pd.isna(v) else v for v in column] for column in columns] for _, columns, _ in parts]
        return sorted(str(row) for columns in plain for row in zip(*columns, strict=True))

    assert rows(joined(list(map(held, several)))) == rows(joined([held(frame, naive=True) for frame in several]))
    joiner = Joiner(pa.schema({"a": pa.int64(), "b": pa.string()}), "UTC")
    several = [frame for frame in several if frame.shape[1] == 2]
    for frame in several:
        joiner.add(frame)
    values = [value for batch in joiner.take() for value in batch["a"].to_pylist()]
    first = [value for frame in several for value in (frame["a"] if "a" in frame else frame[0])]
    assert values == [None if pd.isna(value) else value for value in first], "in the order of the frames"
    assert joiner.take() == []


SHARED = pd.DataFrame({"k": [0], "n": [0.5], "s": [""], "t": [pd.Timestamp(0)], "l": [None]})


@pytest.mark.parametrize("naive", [False, True])
def test_frames_are_taken_as_they_are_when_they_are_yielded(naive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were kept as they were until they were joined, some thousand rows later."""

    def refilled(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
        SHARED.loc[0, "k"] = key[0]
        for name, value in (("n", key[0] / 2), ("s", str(key[0])), ("t", pd.Timestamp(key[0]))):
            SHARED.iloc[0, SHARED.columns.get_loc(name)] = value
        SHARED.at[0, "l"] = [key[0]]
        yield SHARED

    def changed(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
        numbers, several = np.array([key[0]]), [key[0]]
        frame = pd.DataFrame({"k": numbers, "n": [key[0] / 2]}, copy=False)
        frame["s"], frame["t"] = str(key[0]), pd.Timestamp(key[0])
        frame["l"] = [several]
        yield frame
        numbers[0] = -1
        several.append(-1)
        for place in range(3):
            frame.iloc[0, place] = frame.iloc[0, place] * 2
        frame.columns = list("zyxwv")
        yield pk.side("beside", frame.rename(columns={"v": "l"})[["l"]])
        del frame["w"]
        several.append(-2)

    if naive:
        monkeypatch.setattr(frames_module, "held", functools.partial(held, naive=True))
    ddl = "k bigint, n double, s string, t timestamp_ntz, l array<bigint>"
    rows = pa.table({"k": range(50)})
    epoch = datetime.datetime(1970, 1, 1)
    expected = [{"k": k, "n": k / 2, "s": str(k), "t": epoch, "l": [k]} for k in range(50)]
    for func in (refilled, changed):
        flow = pk.Flow(rows.schema).key_by("k")
        flow = flow.apply_in_pandas_with_state(func, ddl, "n bigint", sides={"beside": "l array<bigint>"})
        beside: list[pa.RecordBatch] = []
        made = flow.collect(rows, sides={"beside": beside.append})
        assert sorted(made.to_pylist(), key=lambda row: row["k"]) == expected, func.__name__
        lists = [cell for batch in beside for cell in batch["l"].to_pylist()]
        assert sorted(lists) == [[k, -1] for k in range(50) if func is changed]


@pytest.mark.parametrize(
    ("kind", "make", "change"),
    [
        (pa.binary(), lambda: bytearray(b"a"), lambda value: value.append(1)),
        (pa.binary(), lambda: memoryview(bytearray(b"a")), lambda value: value.__setitem__(0, 1)),
        (pa.list_(pa.int64()), lambda: np.array([1, 2]), lambda value: value.__setitem__(0, 5)),
        (pa.list_(pa.int64()), lambda: deque([1, 2]), lambda value: value.append(5)),
        (pa.list_(pa.int64()), lambda: {1, 2}, lambda value: value.add(5)),
        (pa.list_(pa.int64()), lambda: pd.Series([1, 2]), lambda value: value.__setitem__(0, 5)),
        (pa.list_(pa.list_(pa.int64())), lambda: [[1], None], lambda value: value[0].append(5)),
        (
            pa.list_(pa.list_(pa.int64())),
            lambda: np.array([[1], None], object),
            lambda value: value[0].append(5),
        ),
        (pa.struct({"a": pa.list_(pa.int64())}), lambda: {"a": [1]}, lambda value: value["a"].append(5)),
        (pa.struct({"a": pa.list_(pa.int64())}), lambda: ([1],), lambda value: value[0].append(5)),
        (pa.map_(pa.string(), pa.int64()), lambda: {"a": 1}, lambda value: value.update(a=5)),
        (pa.map_(pa.string(), pa.list_(pa.int64())), lambda: [("a", [1])], lambda value: value[0][1].append(5)),
    ],
)
def test_values_in_frames_are_taken_as_they_are_when_they_are_yielded(
    kind: pa.DataType, make: Any, change: Any
) -> None:
    at_once, later = (Joiner(pa.schema({"x": kind, "y": kind}), "UTC") for _ in range(2))
    value = make()
    frame = pd.DataFrame({name: pd.Series([value, None], dtype=object) for name in ("x", "y")})
    at_once.add(frame)
    expected = at_once.take()
    later.add(frame)
    change(value)
    assert later.take() == expected and expected[0].num_rows == 2


def test_large_frames_are_taken_at_once_and_in_their_place() -> None:
    joiner = Joiner(pa.schema({"n": pa.int64(), "l": pa.list_(pa.int64())}), "UTC")
    numbers, cell = np.arange(3_000), [1]
    large = pd.DataFrame({"n": numbers, "l": [cell] * 3_000}, copy=False)
    small = pd.DataFrame({"n": [-1], "l": [cell]})
    for frame in (small, large, small):
        joiner.add(frame)
    numbers[:] = 7
    cell.append(5)
    rows = [row for batch in joiner.take() for row in batch.to_pylist()]
    assert rows == [{"n": n, "l": [1]} for n in (-1, *range(3_000), -1)]


def test_rows_of_a_call_stay_in_order_where_frames_differ_in_types() -> None:
    """Those of frames with a null stood behind all others, and the next step got its rows out of order."""

    def func(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
        for frame in frames:
            for i in frame["i"].tolist():
                yield pd.DataFrame({"k": [key[0]], "i": [i], "v": [None if i % 3 == 0 else i]})
                yield pk.side("s", pd.DataFrame({"i": [i if i % 2 else float(i)]}))

    flow = pk.Flow("k bigint, i bigint").key_by("k")
    flow = flow.apply_in_pandas_with_state(func, "k bigint, i bigint, v bigint", "n bigint", sides={"s": "i bigint"})
    beside: list[pa.RecordBatch] = []
    count = 3_000
    rows = flow.collect(pa.table({"k": [1] * count, "i": range(count)}), sides={"s": beside.append})
    assert rows["i"].to_pylist() == list(range(count))
    assert rows["v"].to_pylist() == [None if i % 3 == 0 else i for i in range(count)]
    assert [i for batch in beside for i in batch["i"].to_pylist()] == list(range(count))


@pytest.mark.parametrize("workers", [1, 2])
def test_numbers_in_nested_columns_do_not_depend_on_other_keys(workers: int) -> None:
    """Of a null beside them, of another key, they became floats."""
    great, seen = 2**53 + 1, {}

    def func(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
        for frame in frames:
            seen[key[0]] = [frame[name][0] for name in ("s", "xs", "m")]
        yield pd.DataFrame({"k": [key[0]]})

    schema = pa.schema(
        [
            ("k", pa.string()),
            ("s", pa.struct([("n", pa.int64())])),
            ("xs", pa.list_(pa.int64())),
            ("m", pa.map_(pa.string(), pa.int64())),
        ]
    )
    rows = [
        {"k": "a", "s": {"n": great}, "xs": [great, 2], "m": {"x": great}},
        {"k": "b", "s": None, "xs": [None], "m": {"x": None}},
    ]
    flow = pk.Flow(schema).key_by("k").apply_in_pandas_with_state(func, "k string", "n int")
    flow.collect(pa.Table.from_pylist(rows, schema), workers)
    struct, numbers, pairs = seen["a"]
    assert struct == {"n": great} and pairs == {"x": great}
    assert all(type(value) is int for value in (struct["n"], pairs["x"]))
    assert numbers.dtype == "int64" and list(numbers) == [great, 2]
    assert seen["b"][0] is None and list(seen["b"][1]) == [None] and seen["b"][2] == {"x": None}


def test_nested_timestamps_go_in_and_out_in_the_session_s_zone() -> None:
    summer = datetime.datetime(2024, 7, 1, 12, tzinfo=datetime.timezone.utc)

    def func(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
        for frame in frames:
            assert [frame["ts"][0][0].hour, frame["s"][0]["t"].hour, frame["m"][0]["x"].hour] == [14, 14, 14]
            assert frame["ts"][0][1] is None or frame["ts"][0][1] is pd.NaT
            assert frame["s"][0]["t"] == frame["at"][0]
            yield frame[["ts", "s", "m", "at"]]

    ddl = "ts array<timestamp>, s struct<t: timestamp, n: int>, m map<string, timestamp>, at timestamp"
    flow = pk.Flow(f"k int, {ddl}").key_by("k")
    flow = flow.apply_in_pandas_with_state(func, ddl, "n int", timezone="Europe/Berlin")
    row = {"k": 1, "ts": [summer, None], "s": {"t": summer, "n": 7}, "m": [("x", summer)], "at": summer}
    made = flow.collect(pa.Table.from_pylist([row], flow.input_schema)).to_pylist()
    assert made == [{name: value for name, value in row.items() if name != "k"}]


def test_what_is_finer_than_an_output_column_is_cut_where_it_is_a_time() -> None:
    joiner = Joiner(pa.schema({"t": pa.timestamp("us", "UTC"), "d": pa.duration("us")}), "UTC")
    joiner.add(pd.DataFrame({"t": [pd.Timestamp(1_001, unit="ns")], "d": [pd.Timedelta(1_001, unit="ns")]}))
    [batch] = joiner.take()
    assert batch.column("t").cast(pa.int64()).to_pylist() == batch.column("d").cast(pa.int64()).to_pylist() == [1]
    joiner = Joiner(pa.schema({"n": pa.int64()}), "UTC")
    joiner.add(pd.DataFrame({"n": [2.5]}))
    with pytest.raises(TypeError, match="cannot hold"):
        joiner.take()


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.float64(), pa.timestamp("us", "UTC"), pa.string(), pa.bool_(), pa.decimal128(5, 2)]
)
def test_a_null_key_is_what_spark_shows(kind: pa.DataType) -> None:
    column = pa.array([None, None], kind)
    expected = pa.array([None], kind).to_pandas()[0]
    for shown in [*scalars(column, "UTC"), *scalars(column[:1], "UTC")]:
        assert shown is expected or (shown != shown and expected != expected), (shown, expected)


MOMENT = datetime.datetime(2024, 7, 1, 12)
SHOWN: dict[str, Any] = KEYS | {
    str(kind): pa.array([value, value, None], kind)
    for kind, value in (
        (pa.int8(), 3),
        (pa.int64(), 2**53 + 1),
        (pa.uint64(), 2**64 - 1),
        (pa.float32(), 0.1),
        (pa.float64(), math.nan),
        (pa.bool_(), True),
        (pa.string(), "a"),
        (pa.string_view(), "a"),
        (pa.binary(), b"a"),
        (pa.binary(1), b"a"),
        (pa.decimal128(5, 2), decimal.Decimal("1.5")),
        (pa.date32(), MOMENT.date()),
        (pa.date64(), MOMENT.date()),
        (pa.time64("us"), MOMENT.time()),
        (pa.timestamp("us"), MOMENT),
        (pa.timestamp("s", "UTC"), MOMENT),
        (pa.timestamp("ns", "America/New_York"), MOMENT),
        (pa.duration("ms"), datetime.timedelta(1)),
        (pa.dictionary(pa.int8(), pa.int64()), 2**53 + 1),
        (pa.dictionary(pa.int8(), pa.string()), "a"),
        (pa.null(), None),
    )
}


@pytest.mark.parametrize("name", SHOWN)
def test_keys_beside_a_null_are_shown_as_if_each_were_alone(name: str) -> None:
    column = SHOWN[name]
    for one in (column, pa.chunked_array([column[:1], column, column[1:]])):
        alone = [value for at in range(len(one)) for value in scalars(one.slice(at, 1), "Europe/Berlin")]
        shown = scalars(one, "Europe/Berlin")
        assert list(map(type, shown)) == list(map(type, alone))
        assert list(map(repr, shown)) == list(map(repr, alone))


def test_a_null_key_costs_one_conversion_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key was converted by itself: of 20,000 with one null it took minutes."""
    converted: list[int] = []
    localized = frames_module._localized

    def counted(table: pa.Table, timezone: str) -> pa.Table:
        converted.append(table.num_rows)
        return localized(table, timezone)

    monkeypatch.setattr(frames_module, "_localized", counted)
    shown = scalars(pa.array([None, *range(1_000), None]), "UTC")
    assert sorted(converted) == [1, 1_000]
    assert math.isnan(shown[0]) and math.isnan(shown[-1]) and shown[1:-1] == list(range(1_000))


def test_timestamps_go_in_and_out_in_the_session_s_zone() -> None:
    summer = datetime.datetime(2024, 7, 1, 12, tzinfo=datetime.timezone.utc)

    def func(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
        for frame in frames:
            assert frame["ts"].dtype == "datetime64[ns]" and frame["ts"][0].hour == 14
            assert key[0] == frame["ts"][0]
            yield pd.DataFrame({"ts": frame["ts"]})

    flow = pk.Flow("ts timestamp").key_by("ts")
    flow = flow.apply_in_pandas_with_state(func, "ts timestamp", "n int", timezone="Europe/Berlin")
    made = flow.collect(pa.table({"ts": pa.array([summer], pa.timestamp("us", "UTC"))}))
    assert made.column("ts").to_pylist() == [summer]
