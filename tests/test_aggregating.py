"""Aggregates that users write, over blocks: against a loop, with bins that move, epochs undone, files and late rows."""

from __future__ import annotations

import decimal
import math
import random
import threading
from collections import Counter, defaultdict
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
from examples_support import examples
from penstock import _native
from penstock._functions.aggregating import AggregateBin, AggregateCall
from penstock._functions.calls import bind
from penstock.errors import ConfigError, PlanError, SchemaError, StateError, UserFunctionError

SCHEMA = pa.schema([("k", pa.int64()), ("x", pa.float64()), ("ts", pa.int64()), ("v", pa.int64())])
END_US = (1 << 63) - 1

Row = tuple["int | None", float, "int | None", int]


class Seen(pk.Aggregator):
    """How many rows, and the values in order of size; its states are lists that change in place."""

    def create(self) -> Any:
        return [0, []]

    def accumulate(self, states: list[Any], groups: pa.Int64Array, rows: pa.RecordBatch) -> None:
        assert groups.to_pylist() == sorted(groups.to_pylist()) and set(groups.to_pylist()) == set(range(len(states)))
        if 99 in rows["v"].to_pylist():
            raise ValueError("accumulate refuses 99")
        for group, value in zip(groups.to_pylist(), rows["v"].to_pylist(), strict=True):
            states[group][0] += 1
            states[group][1].append(value)

    def merge(self, state: Any, other: Any) -> Any:
        state[0] += other[0]
        state[1].extend(other[1])
        if 98 in other[1]:
            raise ValueError("merge refuses 98")
        return state

    def finish(self, states: list[Any]) -> Any:
        texts = [",".join(map(str, sorted(values))) for _, values in states]
        return pa.table({"n": [n for n, _ in states], "values": texts})


MADE = "n bigint, values string"


def flow_of(window: Any = None, emit: str | None = None, **source: Any) -> pk.Flow:
    keyed = pk.Flow(SCHEMA, event_time="ts", lateness="5ms", **source).key_by("k", "x")
    keyed = keyed if window is None else keyed.window(window)
    return keyed.aggregate(Seen(), schema=MADE, columns=["v"], emit=emit)


def table(rows: list[Row]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else ([], [], [], [])
    return pa.record_batch(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


def norm(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple("nan" if value != value else value for value in row)


class Model:
    """The twin: rows by window and key."""

    def __init__(self, window: tuple[int, int] | None, emit: str) -> None:
        self.window, self.emit = window, emit
        self.groups: dict[Any, list[int]] = defaultdict(list)
        self.watermark: int | None = None

    def session(self, key: Any, ts: int, v: int) -> None:
        """A row in its session, with those that are one then."""
        assert self.window is not None
        first, last, values = ts, ts + self.window[0], [v]
        for one in [one for one in self.groups if one[2:] == key and one[0] <= last and first <= one[1]]:
            first, last, values = min(first, one[0]), max(last, one[1]), values + self.groups.pop(one)
        self.groups[(first, last, *key)] = values

    def starts(self, ts: int) -> list[int]:
        assert self.window is not None
        size, every = self.window
        if not every:
            return [ts]
        return [start for start in range(ts - size + 1, ts + 1) if start % every == 0]

    def epoch(self, rows: list[Row], watermark: int | None, ended: bool = False) -> tuple[list[Any], list[Any]]:
        out, late, touched = [], [], set()
        for k, x, ts, v in rows:
            key = (k, "nan" if x != x else x + 0.0)
            if self.window is None:
                self.groups[key].append(v)
                touched.add(key)
                continue
            ends = [] if ts is None else [(start, start + self.window[0]) for start in self.starts(ts)]
            open_ = [one for one in ends if self.watermark is None or one[1] > self.watermark]
            if ts is None or (ends and not open_):
                late.append(norm((k, x, ts, v)))
            for bounds in open_:
                if self.window[1]:
                    self.groups[(*bounds, *key)].append(v)
                else:
                    self.session(key, bounds[0], v)
        self.watermark = watermark if watermark is not None else self.watermark
        for key, values in list(self.groups.items()):
            over = ended or (self.window is not None and self.watermark is not None and key[1] <= self.watermark)
            if over and not ended and self.window is not None and not self.window[1]:
                over = key[1] != self.watermark  # a row at its end would still join it
            if over if self.window is not None else (key in touched if self.emit == "update" else ended):
                out.append((*key, len(values), ",".join(map(str, sorted(values)))))
                if self.window is not None:
                    del self.groups[key]
        return out, late


a_row = st.tuples(
    st.none() | st.integers(0, 2),
    st.sampled_from([0.0, -0.0, float("nan"), 1.5]),
    st.none() | st.integers(-9, 60),
    st.integers(0, 9),
)
epochs_of_a_stream = st.lists(st.lists(a_row, max_size=8), min_size=1, max_size=6)
#: Windows by size and distance; sessions by their gap and 0.
KINDS: list[tuple[tuple[int, int] | None, str]] = [
    (None, "final"),
    (None, "update"),
    ((10, 10), "final"),
    ((20, 5), "final"),
    ((5, 15), "final"),
    ((6, 0), "final"),
]


def watermarks(epochs: list[list[Row]]) -> list[int | None]:
    reached: list[int | None] = []
    for rows in epochs:
        times = [ts for _, _, ts, _ in rows if ts is not None]
        before = reached[-1] if reached else None
        now = max(times) - 5 if times else None
        reached.append(before if now is None or (before is not None and before > now) else now)
    return reached


def window_of(kind: tuple[int, int] | None) -> Any:
    if kind is not None and not kind[1]:
        return pk.session(f"{kind[0]}ms")
    return None if kind is None else pk.sliding(f"{kind[0]}ms", every=f"{kind[1]}ms")


@settings(deadline=None, max_examples=examples(60))
@given(epochs_of_a_stream, st.sampled_from(KINDS), st.integers(1, 3), st.lists(st.integers(0, 5), max_size=3))
def test_equals_a_loop_while_bins_move(
    epochs: list[list[Row]], kind: tuple[tuple[int, int] | None, str], workers: int, moves: list[int]
) -> None:
    model, expected, behind = Model(*kind), [], []
    for rows, watermark in zip(epochs, watermarks(epochs), strict=True):
        out, late = model.epoch(rows, watermark)
        expected, behind = expected + out, behind + late
    expected += model.epoch([], None, ended=True)[0]
    plan, calls = flow_of(window_of(kind[0]), None if kind[0] else kind[1]).to_plan()
    got: dict[str, list[Any]] = {"rows": [], "beside": []}
    with _native.LocalRun(plan, calls, workers=workers, bits=2) as run:
        for number, rows in enumerate(epochs):
            run.push(table(rows), clock_ms=number)
            if number in moves and workers > 1:
                run.migrate([[(bin, number % workers)] for bin in range(4)])
        run.finish(clock_ms=99)
        while (item := run.take(30)) is not None:
            got[item[0]] += [norm(tuple(row.values())) for row in pa.record_batch(item[1]).to_pylist()]
    assert Counter(got["rows"]) == Counter(expected)
    assert Counter(row[-4:] for row in got["beside"]) == Counter(behind)


def test_many_sessions_of_a_key_that_come_in_any_order() -> None:
    generator = random.Random(7)
    starts = [100 * session + step for session in range(700) for step in (0, 4, 9)]
    generator.shuffle(starts)
    rows = [(1, 0.5, ts, 1) for ts in starts]
    plan, calls = flow_of(pk.session("5ms")).to_plan()
    model = Model((5, 0), "final")
    with _native.LocalRun(plan, calls, bits=2, whole=True) as run:
        for block in range(0, len(rows), 300):
            run.push(table(rows[block : block + 300]))
        run.finish()
        got = []
        while (item := run.take(30)) is not None:
            got += [norm(tuple(row.values())) for row in pa.record_batch(item[1]).to_pylist()]
    expected = model.epoch(rows, None)[0] + model.epoch([], None, ended=True)[0]
    assert Counter(got) == Counter(expected) and len(got) == 700


class Held:
    """One bin of a worker, and what its epochs have recorded."""

    def __init__(self, kind: tuple[tuple[int, int] | None, str]) -> None:
        flow = flow_of(window_of(kind[0]), None if kind[0] else kind[1])
        _, calls = flow.to_plan()
        self.call: Any = bind(calls[0])
        self.kind = kind
        self.bins = [AggregateBin()]
        self.records: list[list[tuple[bytes, bytes | None]]] = []

    def rows(self, rows: list[Row]) -> None:
        """As they come: with the bounds of their windows."""
        batch = table(rows)
        if self.kind[0] is not None:
            size, every = self.kind[0]
            pairs = [
                (start, at)
                for at, (_, _, ts, _) in enumerate(rows)
                for start in (range(ts - size + 1, ts + 1) if every else [ts])  # type: ignore[operator, list-item]
                if not every or start % every == 0  # type: ignore[operator]
            ]
            starts = pa.array([start for start, _ in pairs], pa.int64())
            batch = batch.take(pa.array([at for _, at in pairs], pa.int64()))
            batch = batch.add_column(0, "window_end", pc.add(starts, size)).add_column(0, "window_start", starts)
        if batch.num_rows:
            self.call.take(self.bins, [batch.num_rows], batch)

    def move(self) -> None:
        moved = AggregateBin()
        chunks, changes = list(self.bins[0].encode(False)), list(self.bins[0].changes())
        for chunk in chunks:
            moved.absorb(chunk)
        moved.mark()
        for entries in changes:
            moved.restore([(name, body) for _, name, body in entries])
        self.bins = [moved]

    def restart(self) -> None:
        self.bins = [AggregateBin()]
        for entries in self.records:
            self.bins[0].restore(entries)
        self.bins[0].require()

    def held(self) -> Any:
        return {
            key: {window: [n, list(values)] for window, (n, values) in windows.items()}
            for key, windows in self.bins[0].items()
        }


in_time = st.tuples(st.integers(0, 3), st.just(0.5), st.integers(0, 40), st.integers(0, 9))


@mock.patch("penstock._functions.aggregating._FEW", 0)  # the index is looked through as soon as most of it is no more
@settings(deadline=None, max_examples=examples(80))
@given(
    st.lists(st.lists(in_time, max_size=6), min_size=1, max_size=6),
    st.sampled_from(KINDS),
    st.lists(st.integers(0, 5), max_size=6),
)
def test_is_undone_moved_recorded_and_restored(
    epochs: list[list[Row]], kind: tuple[tuple[int, int] | None, str], events: list[int]
) -> None:
    model, held, before = Model(*kind), Held(kind), None
    for number, rows in enumerate(epochs):
        event = events[number] if number < len(events) else 0
        watermark = number * 5
        rows = [(k, x, (ts or 0) + watermark, v) for k, x, ts, v in rows]  # none is late
        held.bins[0].mark()
        kept = held.held()
        if event in (1, 2):
            held.rows(rows)
            if event == 2:
                held.call.end_epoch(held.bins, before, watermark * 1_000, 0)
            held.bins[0].rollback()
            assert held.held() == kept
        if rows and event == 3 and kind[0] != (5, 15):  # where a row may have no window
            for bad in (99, 98):  # in accumulate nothing has happened, in merge it is undone
                held.rows(rows)
                after = held.held()
                with pytest.raises(UserFunctionError, match=f"refuses {bad}"):
                    held.rows([(*rows[0][:3], bad)])
                if bad == 99:
                    assert held.held() == after
                else:
                    with pytest.raises(StateError, match="roll back"):
                        held.rows(rows)
                held.bins[0].rollback()
                assert held.held() == kept
        half = len(rows) // 2
        held.rows(rows[:half])
        if event == 4 and kind[1] == "final":  # keys that are touched travel apart
            held.move()
        held.rows(rows[half:])
        made = held.call.end_epoch(held.bins, before, watermark * 1_000, 0)
        before = watermark * 1_000
        out = [tuple(row.values()) for batch in made for row in batch.to_pylist()]
        assert Counter(out) == Counter(model.epoch(rows, watermark)[0])
        held.records.append([(name, body) for part in held.bins[0].changes() for _, name, body in part])
        if event == 5:
            held.restart()
    held.bins[0].mark()
    made = held.call.end_epoch(held.bins, before, END_US, 0)
    out = [tuple(row.values()) for batch in made for row in batch.to_pylist()]
    if kind[1] == "final":
        assert Counter(out) == Counter(model.epoch([], None, ended=True)[0])
        assert held.call.end_epoch(held.bins, END_US, END_US, 0) == []
    held.records.append([(name, body) for part in held.bins[0].changes() for _, name, body in part])
    kept = held.held()
    held.restart()
    assert held.held() == kept and (kind[0] is None or kept == {})


def test_keys_that_an_epoch_touched_move_with_their_bin() -> None:
    held = Held((None, "update"))
    held.rows([(1, 0.5, 0, 3)])
    moved = AggregateBin()
    for chunk in held.bins[0].encode():
        moved.absorb(chunk)
    assert [row["n"] for row in held.call.end_epoch([moved], None, None, 0)[0].to_pylist()] == [1]
    assert held.call.end_epoch([moved], None, None, 0) == []


def test_what_finish_gives_may_be_in_pieces() -> None:
    """As pyarrow makes it of more than 2 GiB of text."""

    class Pieces(Seen):
        def finish(self, states: list[Any]) -> Any:
            return pa.table({"n": pa.chunked_array([[n] for n, _ in states])})

    rows = pa.table({"k": [key % 5 for key in range(50)], "v": range(50)})
    flow = pk.Flow(rows.schema).key_by("k").aggregate(Pieces(), schema="n bigint", columns=["v"])
    assert sorted(flow.collect(rows).to_pylist(), key=str) == [{"k": key, "n": 10} for key in range(5)]


def test_a_window_that_closes_costs_no_look_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    told = AggregateCall._us

    def counted(call: AggregateCall, bound: int) -> int:
        looked.append(bound)
        return told(call, bound)

    held = Held(((10, 10), "final"))
    held.rows([(1, 0.5, 10 * window, 1) for window in range(500)])
    monkeypatch.setattr(AggregateCall, "_us", counted)
    for window in range(20):
        made = held.call.end_epoch(held.bins, 10_000 * window, 10_000 * (window + 1), 0)
        assert [row["window_start"] for batch in made for row in batch.to_pylist()] == [10 * window]
    # The end of the window that closes, and that of the next one.
    assert len(looked) <= 2 * 20
    [(_, windows)] = held.bins[0].items()
    assert len(windows) == 480


def test_sessions_that_grow_leave_nothing_for_their_gap() -> None:
    held = Held(((100_000, 0), "final"))
    for epoch in range(300):
        held.rows([(key, 0.5, epoch, 1) for key in range(4)])
        assert held.call.end_epoch(held.bins, None, epoch * 1_000, 0) == []
        assert len(held.bins[0]._ends or ()) <= 2 * 4 + 130
    [made] = held.call.end_epoch(held.bins, 0, 100_300_000, 0)
    assert [(row["k"], row["window_start"], row["window_end"], row["n"]) for row in made.to_pylist()] == [
        (key, 0, 100_299, 300) for key in range(4)
    ]


class Counted(pk.Aggregator):
    def create(self) -> Any:
        return 0

    def accumulate(self, states: list[Any], groups: pa.Int64Array, rows: pa.RecordBatch) -> Any:
        return [groups.to_pylist().count(group) for group in range(len(states))]

    def merge(self, state: Any, other: Any) -> Any:
        return state + other

    def finish(self, states: list[Any]) -> Any:
        return pa.table({"n": pa.array(states, pa.int64())})


KEYS: dict[str, Any] = {
    "float16": pa.array([0.0, -0.0, math.nan, math.nan, None], pa.float32()).cast(pa.float16()),
    "uuid": pa.array([b"a" * 16, b"a" * 16, b"b" * 16, b"b" * 16, None], pa.uuid()),
    "dictionary of floats": pa.DictionaryArray.from_arrays([0, 1, 2, 2, None], pa.array([0.0, -0.0, math.nan])),
}
for narrow in ("decimal32", "decimal64"):
    if hasattr(pa, narrow):
        ones, twos = [decimal.Decimal("1.5")] * 2, [decimal.Decimal(2)] * 2
        KEYS[narrow] = pa.array([*ones, *twos, None], getattr(pa, narrow)(5, 2))
if hasattr(pa, "json_"):
    # pyarrow 18, which has no JSON either, cannot tell how large a dictionary of views is.
    words = pa.array(["a", "b"], pa.string_view())
    KEYS["dictionary of views"] = pa.DictionaryArray.from_arrays([0, 0, 1, 1, None], words)
    KEYS["json"] = pa.array(['{"a":1}', '{"a":1}', "[]", "[]", None], pa.json_())


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("window", [None, pk.tumbling("1s"), pk.session("1s")])
def test_keys_of_all_types_that_the_plan_takes(name: str, window: Any) -> None:
    keys = KEYS[name]
    rows = pa.table({"k": keys, "ts": [5, 5, 7, 7, 9]})
    flow = pk.Flow(rows.schema, event_time="ts").key_by("k")
    flow = flow if window is None else flow.window(window)
    made = flow.aggregate(Counted(), schema="n bigint").collect(pa.concat_tables([rows, rows]), 2)
    kind = keys.type.value_type if pa.types.is_dictionary(keys.type) else keys.type
    assert made.schema.field("k").type == kind
    keys = keys.dictionary_encode() if pa.types.is_string_view(kind) else keys
    expected = [norm((keys[at].as_py(), n)) for at, n in ((0, 4), (2, 4), (4, 2))]
    assert Counter(norm((row["k"], row["n"])) for row in made.to_pylist()) == Counter(expected)


@pytest.mark.parametrize("window", [None, pk.tumbling("1s"), pk.session("1s")])
def test_keys_that_python_does_not_have_are_told_with_their_column(window: Any) -> None:
    rows = pa.table({"j": [1, 1], "k": pa.array([1, 1 << 62], pa.timestamp("us")), "ts": [1, 2]})
    flow = pk.Flow(rows.schema, event_time="ts").key_by("j", "k")
    flow = flow if window is None else flow.window(window)
    says = r"aggregate\[\d\] Counted: it cannot take column 'k' \(timestamp\[us\]\): .* range; cast the column before"
    with pytest.raises(UserFunctionError, match=rf"{says}.*test_aggregating.py:\d+\)"):
        flow.aggregate(Counted(), schema="n bigint").collect(rows)


@pytest.mark.parametrize("how", [{"workers": 1}, {"workers": 3}, {"processes": 2}], ids=str)
@pytest.mark.parametrize("window", [None, pk.sliding("20ms", every="10ms"), pk.session("3ms")], ids=str)
def test_all_rows_are_one_group_where_there_is_no_key(window: pk.Window | None, how: dict[str, Any]) -> None:
    dice = random.Random(3)
    rows = pa.table(table([(1, 0.5, dice.randrange(400), number % 90) for number in range(150)]))
    source = pk.Flow(SCHEMA, event_time="ts")

    def given(flow: pk.Flow, **options: Any) -> list[dict[str, Any]]:
        flow = flow if window is None else flow.window(window)
        made = flow.aggregate(Seen(), schema=MADE, columns=["v"])
        return sorted(made.collect(rows, batch_rows=20, **how, **options).to_pylist(), key=str)

    for options in ({}, {"streaming": True, "late": lambda batch: None} if window else {"streaming": True}):
        keyed = [{name: row[name] for name in row if name != "k"} for row in given(source.key_by("k"), **options)]
        assert given(source, **options) == sorted(keyed, key=str) and len(keyed) > (0 if window is None else 10)
    assert source.aggregate(Seen(), schema=MADE).collect(rows.slice(0, 0), **how).num_rows == 0


def test_hosts_decide_when_it_speaks() -> None:
    flow, rows = flow_of(), table([(1, 0.5, 0, 3), (1, 0.5, 1, 4)])
    assert [call["emit"] for call in flow.to_plan()[1] + flow.to_plan(streaming=True)[1]] == ["final", "update"]
    once = [{"k": 1, "x": 0.5, "n": 2, "values": "3,4"}]
    assert flow.collect(pa.table(rows), 2).to_pylist() == once
    each = flow.collect(iter([rows.slice(0, 1), rows.slice(1, 1)]), 1, streaming=True).to_pylist()
    assert each == [{"k": 1, "x": 0.5, "n": 1, "values": "3"}, *once]
    # A window of it is one for what follows.
    hot = flow_of(pk.tumbling("10ms")).top(1, by="n", per="window")
    assert hot.columns == ("window_start", "window_end", "k", "x", "n", "values")
    assert hot.collect(pa.table(rows)).to_pylist() == [{"window_start": 0, "window_end": 10, **once[0]}]
    with pytest.raises(PlanError, match="replaces earlier values"):
        flow_of(emit="update").key_by("k").agg(n=pk.count()).explain()


class Half:
    def create(self) -> Any:
        return None


class Wrong(Seen):
    def __init__(self, what: str) -> None:
        self.what = what

    def create(self) -> Any:
        if self.what == "create":
            raise RuntimeError("not made")
        return super().create()

    def accumulate(self, states: list[Any], groups: Any, rows: Any) -> Any:
        super().accumulate(states, groups, rows)
        return states[:-1] if self.what == "accumulate" else None

    def finish(self, states: list[Any]) -> Any:
        made = super().finish(states)
        if self.what == "rows":
            return made.slice(1)
        extra = pa.table({"k": [0] * len(states), **dict(zip(made.schema.names, made.columns, strict=True))})
        wrong = {"type": made.rename_columns(["n", "other"]), "extra": extra, "none": None}
        return wrong.get(self.what, made)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("create", r"RuntimeError: not made .*test_aggregating.py"),
        ("accumulate", "accumulate returned .*; it must be None or a list of 2 states"),
        ("rows", "finish returned 1 rows for 2 states"),
        ("none", "finish returned None, not a pyarrow RecordBatch or Table"),
        ("type", r"finish returned the columns \['n', 'other'\]; declared are \['n', 'values'\].*test_aggregating.py"),
        ("extra", r"finish returned the columns \['k', 'n', 'values'\]; declared are \['n', 'values'\]"),
    ],
)
def test_what_methods_do_wrong_is_told(what: str, says: str) -> None:
    flow = pk.Flow(SCHEMA).key_by("k").aggregate(Wrong(what), schema=MADE, columns=["v"])
    with pytest.raises(UserFunctionError, match=says):
        flow.collect(pa.table(table([(1, 0.5, 0, 3), (2, 0.5, 0, 3)])))


class Locked(Seen):
    """Its states cannot be copied."""

    def accumulate(self, states: list[Any], groups: pa.Int64Array, rows: pa.RecordBatch) -> list[Any]:
        return [[1, [], threading.Lock()] for _ in states]

    def merge(self, state: Any, other: Any) -> Any:
        return state


@pytest.mark.parametrize("at", ["rows", "end of a window"])
def test_a_state_that_cannot_be_copied_is_told_as_such(at: str) -> None:
    """It was a bare TypeError, without step and key."""
    keyed = pk.Flow(SCHEMA, event_time="ts").key_by("k").window(pk.tumbling("10ms"))
    _, calls = keyed.aggregate(Locked(), schema=MADE, columns=["v"]).to_plan(streaming=True)
    call: Any = bind(calls[0])
    bins = [call.new_state(), call.new_state()]
    block = table([(7, 0.0, 5, 1)])
    block = block.append_column("window_start", pa.array([0])).append_column("window_end", pa.array([10]))
    call.take(bins[:1], [1], block)
    for bin in bins:
        bin.mark()
    says = (
        r"^aggregate\[.*: the state of key 7 cannot be copied, as undoing an epoch needs: "
        "TypeError: cannot pickle '_thread.lock' object$"
    )
    with pytest.raises(StateError, match=says) as caught:
        if at == "rows":
            call.take(bins, [1, 0], block)
        else:
            call.end_epoch(bins, None, 10_000, 0)
    assert type(caught.value.__cause__) is TypeError
    for bin in bins:
        with pytest.raises(StateError, match="roll back"):
            bin.open()
        bin.rollback()
    assert list(bins[0].states) == [(7,)] and list(bins[0].states[7,]) == [(0, 10)]


def test_what_makes_no_sense_is_refused() -> None:
    keyed = pk.Flow(SCHEMA, event_time="ts").key_by("k")
    cases: list[tuple[type[Exception], str, Any]] = [
        (ConfigError, "it has no method 'accumulate'", lambda: keyed.aggregate(Half(), schema=MADE)),  # type: ignore[arg-type]
        (
            ConfigError,
            r"^aggregate\(Seen\) got a class; give an object of it: aggregate\(Seen\(\), \.\.\.\)$",
            lambda: keyed.aggregate(Seen, schema=MADE),  # type: ignore[arg-type]
        ),
        (
            PlanError,
            "leave emit out",
            lambda: keyed.window(pk.tumbling("1s")).aggregate(Seen(), schema=MADE, emit="update"),
        ),
        (ConfigError, "aggregate emit='often' is unknown", lambda: keyed.aggregate(Seen(), schema=MADE, emit="often")),
        (SchemaError, "column 'w' does not exist", lambda: keyed.aggregate(Seen(), schema=MADE, columns=["w"])),
        (SchemaError, "column 'k' is that of a key or a window", lambda: keyed.aggregate(Seen(), schema="k bigint")),
    ]
    for error, says, build in cases:
        with pytest.raises(error, match=says):
            build()
    with pytest.raises(SchemaError, match="hashable"):
        pk.Flow(pa.schema([("k", pa.list_(pa.int64()))])).key_by("k").aggregate(Seen(), schema=MADE).explain()
    counted = keyed.agg(n=pk.count()).key_by("k")
    with pytest.raises(PlanError, match="'ts' is not in its rows any more"):
        counted.window(pk.tumbling("1s"))
    windowed = flow_of(pk.tumbling("10ms"))
    assert "per block, tumbling 10 ms on ts" in windowed.explain()
    assert windowed.explain().count("the function's per key and window") == 1
