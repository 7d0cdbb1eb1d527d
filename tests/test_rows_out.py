"""Rows that functions put out: as they were then, told with what they came from, and with times that mean one thing."""

from __future__ import annotations

import asyncio
import collections
import datetime
import decimal
import pickle
import random
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as pk
from penstock import ordered
from penstock._functions.owned import owner
from penstock._wholes import look_into
from penstock.errors import ConfigError, UserFunctionError

UTC = datetime.UTC
#: A type, and what makes a value of it.
Kind = tuple[pa.DataType, st.SearchStrategy[Any]]

INTS = st.integers(0, 9)
BYTES = st.binary(max_size=3)


def leaves() -> st.SearchStrategy[Kind]:
    return st.sampled_from(
        [
            (pa.int64(), INTS),
            (pa.string(), st.text("ab", max_size=3)),
            (pa.binary(), st.one_of(BYTES, BYTES.map(bytearray))),
            (pa.binary_view(), BYTES.map(bytearray)),
        ]
    )


def nested(inner: st.SearchStrategy[Kind]) -> st.SearchStrategy[Kind]:
    structs = st.tuples(st.lists(inner, min_size=1, max_size=3), st.sampled_from(["dict", "tuple", "pairs"]))
    return st.one_of(inner.map(listed), structs.map(struct), st.tuples(inner, st.booleans()).map(mapped))


def listed(inner: Kind) -> Kind:
    kind, values = inner
    lists = st.lists(st.one_of(st.none(), values), max_size=3)
    made = [
        lists,
        lists.map(tuple),
        lists.map(collections.deque),
        lists.map(lambda found: dict(enumerate(found)).values()),
    ]
    if kind == pa.int64():
        made += [st.lists(INTS).map(np.array), st.lists(INTS).map(lambda found: np.array(found, object)), st.sets(INTS)]
    return pa.list_(kind), st.one_of(made)


def struct(given: tuple[list[Kind], str]) -> Kind:
    """pyarrow takes one form of structs in a column."""
    inner, form = given
    kinds = pa.struct({f"f{place}": kind for place, (kind, _) in enumerate(inner)})
    named = {f"f{place}": values for place, (_, values) in enumerate(inner)}
    dicts = st.fixed_dictionaries({}, optional=named)
    if form == "dict":
        return kinds, st.one_of(dicts, dicts.map(collections.OrderedDict))
    if form == "tuple":
        return kinds, st.tuples(*named.values())
    return kinds, st.tuples(*(st.tuples(st.just(name), values) for name, values in named.items())).map(list)


def mapped(given: tuple[Kind, bool]) -> Kind:
    (kind, values), as_pairs = given
    dicts = st.dictionaries(st.text("ab", max_size=2), st.one_of(st.none(), values), max_size=3)
    if as_pairs:
        return pa.map_(pa.string(), kind), dicts.map(lambda found: [*found.items()])
    return pa.map_(pa.string(), kind), st.one_of(dicts, dicts.map(lambda found: collections.defaultdict(list, found)))


def change(value: Any) -> None:
    """Change all of a value that can be changed."""
    if isinstance(value, dict):
        for inner in value.values():
            change(inner)
        value.clear()
    elif isinstance(value, (list, tuple, collections.deque)):
        for inner in value:
            change(inner)
        if not isinstance(value, tuple):
            value.clear()
    elif isinstance(value, bytearray):
        value[:] = b"changed"
    elif isinstance(value, set):
        value.add(1_000)
    elif isinstance(value, np.ndarray):
        value.fill(1_000)


@given(st.data())
def test_a_value_of_its_own_becomes_what_the_value_was(data: st.DataObject) -> None:
    kind, strategy = data.draw(st.recursive(leaves(), nested, max_leaves=6))
    values = data.draw(st.lists(strategy, min_size=1, max_size=3))
    own = owner(kind)
    wanted = pa.array([*values, None], kind)
    mine = values if own is None else [*map(own, values)]
    for value in values:
        change(value)
    assert pa.array([*mine, None], kind).equals(wanted)
    assert own is None or own(None) is None


def test_what_fits_no_column_stays_for_the_error_about_it() -> None:
    for kind, value in (
        (pa.list_(pa.int64()), "ab"),
        (pa.list_(pa.int64()), {1: 2}),
        (pa.list_(pa.int64()), collections.UserList([0.5])),
        (pa.list_(pa.int64()), 5),
        (pa.struct({"a": pa.list_(pa.int64())}), 5),
        (pa.struct({"a": pa.list_(pa.int64())}), ([1], 2)),
        (pa.map_(pa.string(), pa.int64()), [("a",)]),
        (pa.map_(pa.string(), pa.int64()), 5),
    ):
        own = owner(kind)
        assert own is not None
        assert own(value) is value


# The same rows however blocks are cut


def seen(state: Any, k: int, at: int) -> tuple[Any, list[int]]:
    state = [] if state is None else state
    state.append(at)
    return state, state


STEPS: dict[str, dict[str, Any]] = {
    "on_timer": {
        "step": lambda state, k, at: (*seen(state, k, at)[:1], None, [(at + 1, state), (at + 2, None)]),
        "on_timer": lambda state, time, value, k: (state.append(-time) or state, [(k, state), (k, [time])]),
    },
    "ttl in event time": {"step": lambda state, k, at: (state := seen(state, k, at)[0], (k, state)), "ttl": "2ms"},
    "ttl in processing time": {
        "step": lambda state, k, at: (state := seen(state, k, at)[0], (k, state)),
        "ttl": "1h",
        "ttl_time": "processing",
    },
    "at_end": {
        "step": lambda state, k, at: (state := seen(state, k, at)[0], (k, state)),
        "at_end": lambda state, k: [(k, state), *((k, state) for _ in range(state.append(7) or 1))],
    },
    "rows of sides alone": {
        "step": lambda state, k, at: (state := seen(state, k, at)[0], pk.side("all", (k, state))),
        "sides": {"all": "k bigint, seen array<bigint>"},
    },
    "lists for sides": {
        "step": lambda state, k, at: (state := [*(state or []), (k, [at])], pk.side("all", state)),
        "sides": {"all": "k bigint, seen array<bigint>"},
    },
}


@pytest.mark.parametrize("what", STEPS)
def test_rows_are_the_same_however_blocks_are_cut(what: str) -> None:
    options = dict(STEPS[what])
    flow = pk.Flow("k bigint, at bigint", event_time="at").key_by("k")
    made = flow.stateful_map(options.pop("step"), schema="k bigint, seen array<bigint>", **options)
    rows = pa.table({"k": [1, 2, 1, 1, 2, 1], "at": [0, 1, 1, 2, 5, 9]})
    found = []
    for size in (1, 2, 1 << 16):
        beside: list[Any] = []
        sides = {"all": lambda batch, beside=beside: beside.extend(batch.to_pylist())} if "sides" in options else None
        out = made.collect(rows, batch_rows=size, sides=sides).to_pylist()
        found.append((sorted(map(repr, out)), sorted(map(repr, beside))))
    assert found[0] == found[1] == found[2]
    assert any(found[0])


def test_a_list_for_a_side_may_be_used_again() -> None:
    """It is not nested, but rows were taken from it at the end of the block."""

    def lines(k: int, held: list[Any] = []) -> Any:  # noqa: B006
        held.append((k,))
        yield pk.side("all", held)
        held.clear()
        yield (k,)

    beside: list[Any] = []
    flow = pk.Flow("k bigint").flat_map(lines, "k bigint", rows=True, sides={"all": "n bigint"})
    table = flow.collect(pa.table({"k": [1, 2]}), sides={"all": lambda batch: beside.extend(batch.to_pylist())})
    assert table.to_pylist() == [{"k": 1}, {"k": 2}]
    assert beside == [{"n": 1}, {"n": 2}]


def items(state: Any, item: int) -> tuple[Any, Any]:
    state = [] if state is None else state
    state.append(item)
    row = [item % 2, state]
    return state, [(item % 2, state), {"k": item % 2, "seen": state}, row]


@pytest.mark.parametrize(
    "steps",
    [
        [ordered.partitioned(items, key=lambda n: n % 2, schema="k bigint, seen array<bigint>")],
        [ordered.partitioned(items, key=lambda n: n % 2), ordered.batches("k bigint, seen array<bigint>")],
        [ordered.stateful(items), ordered.batches("k bigint, seen array<bigint>")],
    ],
    ids=["partitioned", "partitioned and batches", "stateful and batches"],
)
def test_rows_of_ordered_are_as_they_were_then(steps: list[Any]) -> None:
    """A chunk showed what the state had become at its end."""
    one_by_one = ordered.Pipeline(steps).run(range(7), chunk=1, mode="inline")
    at_once = ordered.Pipeline(steps).run(range(7), chunk=7, mode="inline")
    first, second = ([row for batch in run for row in batch.to_pylist()] for run in (one_by_one, at_once))
    assert first == second
    assert [0] in (row["seen"] for row in first)


def test_buffers_and_rows_of_ordered_may_be_used_again() -> None:
    def step(state: Any, item: int) -> tuple[Any, Any]:
        state = [0, bytearray(b"")] if state is None else state
        state[0] = item
        state[1] += b"x"
        return state, [state, dict(zip(("k", "b"), state, strict=True)), tuple(state)]

    kept = ordered.partitioned(step, key=lambda n: 0, schema="k bigint, b binary", finish=lambda key, state: [state])
    rows = [row for batch in ordered.Pipeline([kept]).run(range(3)) for row in batch.to_pylist()]
    wanted = [{"k": k, "b": b"x" * (k + 1)} for k in range(3) for _ in range(3)]
    assert rows == [*wanted, wanted[-1]]


# What a row came from


def pattern(seed: int) -> list[int]:
    """How many rows each of some calls puts out; -1 is one in a list."""
    draw = random.Random(seed)
    return [draw.choice([1, 1, 1, 0, -1, 2, 3]) for _ in range(40)]


def put_out(rows: int, bad: bool, sides: bool) -> Any:
    good = (1,)
    made: list[Any] = [good] * abs(rows)
    if bad:
        made[-1] = pk.side("s", ("no",)) if sides else ("no",)
    if sides and rows > 1:
        made.insert(0, pk.side("s", [good, good]))
    return None if not rows else made[0] if rows == 1 and len(made) == 1 else made


@pytest.mark.parametrize("sides", [False, True])
@pytest.mark.parametrize("kind", ["stateful", "timed", "flat"])
def test_the_row_that_is_told_is_the_one_that_it_came_from(kind: str, sides: bool) -> None:
    declared = {"s": "n bigint"} if sides else None
    for seed in range(6):
        calls = pattern(seed)
        for bad in [at for at, rows in enumerate(calls) if rows][::5]:
            made = [put_out(rows, at == bad, sides) for at, rows in enumerate(calls)]
            flow = pk.Flow("at bigint")
            if kind == "flat":
                give = [[] if out is None else [out] if isinstance(out, tuple) else out for out in made]
                give = [[out] if isinstance(out, pk._sides.Side) else out for out in give]
                step = flow.flat_map(lambda at, give=give: give[at], "n bigint", rows=True, sides=declared)
            else:
                more: dict[str, Any] = {"at_end": lambda state, at: None} if kind == "timed" else {}
                step = flow.key_by("at").stateful_map(
                    lambda state, at, made=made: (at, made[at]), schema="n bigint", sides=declared, **more
                )
            with pytest.raises(UserFunctionError) as failed:
                step.collect(pa.table({"at": range(len(calls))}), sides={"s": lambda batch: None} if sides else None)
            assert failed.value.row == {"at": bad}
            told = f"input: {{'at': {bad}}}" if kind == "flat" else f"row: at={bad}"
            assert str(failed.value).splitlines()[1].strip() == told


@pytest.mark.parametrize("where", ["on_timer", "at_end"])
def test_a_timer_and_the_end_tell_key_and_function(where: str) -> None:
    def step(state: Any, k: int, at: int) -> Any:
        return (True, (k, 0), (at + 1, None)) if where == "on_timer" else (True, (k, 0))

    def wrong(state: Any, *rest: Any) -> Any:
        out = ("no", 0) if rest[-1] == 5 else [(0, 0), (0, 1)]
        return (state, out) if where == "on_timer" else out

    flow = pk.Flow("k bigint, at bigint", event_time="at").key_by("k")
    made = flow.stateful_map(step, schema="k bigint, n bigint", **{where: wrong})
    with pytest.raises(UserFunctionError, match=r"\n  row: k=5$") as failed:
        made.collect(pa.table({"k": range(8), "at": range(8)}))
    assert failed.value.key == 5
    assert failed.value.row is None
    assert failed.value.line == wrong.__code__.co_firstlineno


def test_a_side_that_is_not_declared_is_told_with_the_row() -> None:
    def step(state: Any, k: int) -> Any:
        return None, [(k,), pk.side("b" if k == 3 else "a", (k,))]

    flow = pk.Flow("k bigint").key_by("k").stateful_map(step, schema="k bigint", sides={"a": "k bigint"})
    with pytest.raises(UserFunctionError, match=r"does not declare.*\n  row: k=3$"):
        flow.collect(pa.table({"k": range(5)}), sides={"a": lambda batch: None})


# Times


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (
            pa.timestamp("us", "UTC"),
            datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
        ),
        (pa.timestamp("us", "UTC"), pd.Timestamp("2026-01-01", tz="Europe/Berlin")),
        (pa.timestamp("us"), datetime.datetime(2026, 1, 1)),
        (pa.timestamp("us"), pd.Timestamp("2026-01-01")),
        (pa.timestamp("us"), np.datetime64("2026-01-01", "us")),
        (pa.date32(), datetime.date(2026, 1, 1)),
        (pa.time64("us"), datetime.time(1, 2)),
        (pa.duration("us"), datetime.timedelta(1)),
        (pa.duration("us"), pd.Timedelta("1s")),
        (pa.duration("us"), np.timedelta64(1, "us")),
        (pa.list_(pa.timestamp("us", "UTC")), [None, pd.Timestamp("2026-01-01", tz="UTC")]),
    ],
)
def test_times_that_mean_one_thing_are_taken(kind: pa.DataType, value: Any) -> None:
    flow = pk.Flow("k bigint").flat_map(lambda k: [(value,), (None,)], pa.schema({"t": kind}), rows=True)
    table = flow.collect(pa.table({"k": [1]}))
    assert table.column("t").combine_chunks().equals(pa.array([value, None], kind))
    packed = list(ordered.Pipeline([ordered.batches(pa.schema({"t": kind}))]).run([(value,)]))
    assert packed[0].column("t").equals(pa.array([value], kind))


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (
            pa.timestamp("us", "UTC"),
            datetime.datetime(2026, 1, 1),
            "has no zone: give one, such as datetime.*timestamp_ntz",
        ),
        (pa.timestamp("us", "UTC"), pd.Timestamp("2026-01-01"), "has no zone"),
        (pa.timestamp("us"), datetime.datetime(2026, 1, 1, tzinfo=UTC), "has a zone, which a timestamp_ntz has not"),
        (pa.timestamp("us"), pd.Timestamp("2026-01-01", tz="UTC"), "has a zone"),
        (pa.timestamp("us", "UTC"), 1_700_000_000, "has a number for a timestamp: give a datetime"),
        (pa.timestamp("us"), 1.0, "has a number for a timestamp"),
        (pa.date32(), 20_000, "has a number for a date: give a datetime.date"),
        (pa.date32(), np.int64(1), "has a number for a date"),
        (pa.date32(), pd.NaT, "has NaT, which is none: give None"),
        (pa.date32(), datetime.datetime(2026, 1, 1, 5), r"has a time of day, .*\.date\(\), or declare .* timestamp"),
        (pa.date32(), pd.Timestamp("2026-01-01 00:00:00.000001"), "has a time of day"),
        (pa.time64("us"), 5, "has a number for a time: give a datetime.time"),
        (pa.time64("us"), datetime.time(1, tzinfo=UTC), "has a zone, which a time of day has not"),
        (pa.duration("us"), 5, "has a number for an interval: give a datetime.timedelta"),
        (pa.struct({"a": pa.list_(pa.timestamp("us", "UTC"))}), {"a": [datetime.datetime(2026, 1, 1)]}, "has no zone"),
        (pa.map_(pa.string(), pa.date32()), {"a": 5}, "has a number for a date"),
    ],
)
def test_times_that_could_mean_another_are_refused(kind: pa.DataType, value: Any, says: str) -> None:
    schema = pa.schema({"t": kind})
    flow = pk.Flow("k bigint").key_by("k").stateful_map(lambda state, k: (None, [(None,), (value,)]), schema=schema)
    with pytest.raises(UserFunctionError, match=says) as failed:
        flow.collect(pa.table({"k": [1]}))
    assert str(failed.value).endswith("\n  row: k=1")
    with pytest.raises(UserFunctionError, match=says):
        list(ordered.Pipeline([ordered.batches(schema)]).run([(None,), (value,)]))


# Arrays of numpy's, and entries of maps

DAY = datetime.datetime(2020, 1, 1)
ONE = pa.table({"k": [1]})


def column_of(value: Any, schema: Any) -> Any:
    """What becomes of a value of a column, of a function that is called with a row."""
    flow = pk.Flow("k bigint").key_by("k").stateful_map(lambda state, k: (None, (value,)), schema=schema)
    return flow.collect(ONE)[0].to_pylist()[0]


@pytest.mark.parametrize(
    ("array", "kind", "made"),
    [
        *(
            (np.array(["2020-01-01", "NaT"], f"M8[{unit}]"), pa.timestamp("us"), [DAY, None])
            for unit in ["D", "s", "ms", "us", "ns"]
        ),
        (np.array(["2020-01-01"], "M8[ns]"), pa.timestamp("us", "UTC"), [DAY.replace(tzinfo=UTC)]),
        (np.array(["2020-01-01"], "M8[ns]"), pa.date32(), [DAY.date()]),
        (np.array([3], "m8[s]"), pa.duration("us"), [datetime.timedelta(seconds=3)]),
        (np.array([2**64 - 1], "u8"), pa.float64(), [float(2**64 - 1)]),
        (np.ma.masked_array([1, 2], [True, False]), pa.int64(), [None, 2]),
    ],
)
def test_arrays_within_lists_are_what_they_say(array: Any, kind: pa.DataType, made: list[Any]) -> None:
    """pyarrow takes the bare numbers of an array of times, whatever their unit."""
    for of in (pa.list_(kind), pa.large_list(kind), pa.list_(kind, len(made)), pa.list_view(kind)):
        assert column_of(array, pa.schema({"x": of})) == made
    assert column_of({"a": array}, pa.schema({"x": pa.struct({"a": pa.list_(kind)})})) == {"a": made}
    frames = (
        pk.Flow("k bigint")
        .key_by("k")
        .apply_in_pandas_with_state(
            lambda key, frames, state: [pd.DataFrame({"x": [array], "y": [{"a": array}]})],
            pa.schema({"x": pa.list_(kind), "y": pa.struct({"a": pa.list_(kind)})}),
            "n bigint",
        )
    )
    if pa.types.is_temporal(kind):
        assert frames.collect(ONE).to_pylist() == [{"x": made, "y": {"a": made}}]
    assert of_frame(array, pa.list_(kind)) == made


@pytest.mark.parametrize(
    ("value", "schema", "says"),
    [
        (np.array(["2020-01-01"], "M8[ns]"), "x array<bigint>", "an array of numpy's times"),
        (np.array(["2020-01-01T00:00:00.000000001"], "M8[ns]"), "x array<timestamp_ntz>", "an array of numpy's times"),
        ([np.uint64(2**64 - 1)], "x array<double>", "an unsigned number of numpy's that a float does not have"),
        ([1.5, 1e39], "x array<float>", "a number beyond what its type of floats has, which would become infinite"),
        ({"a": [-1e39]}, "x struct<a: array<float>>", "a number beyond what its type of floats has"),
        ("ab", "x array<string>", "text for a list, whose characters would be taken"),
        (["a", "bc"], "x array<array<string>>", "text for a list"),
        ([datetime.datetime(2026, 1, 1, 5)], "x array<date>", "a time of day, which a date has not"),
        ([("a", 1), None], "x map<string,bigint>", "a map with None in place of an entry"),
        ([[None]], "x array<map<string,bigint>>", "a map with None in place of an entry"),
        ({"a": [None]}, "x struct<a: map<string,bigint>>", "a map with None in place of an entry"),
    ],
)
def test_what_would_be_something_else_or_end_the_process_is_refused(value: Any, schema: str, says: str) -> None:
    with pytest.raises(UserFunctionError, match=rf"column \"x\" .*which has {says}"):
        column_of(value, schema)
    with pytest.raises(UserFunctionError, match=f"it has {says}"):
        list(ordered.Pipeline([ordered.batches(schema)]).run([(value,)]))


class Own(np.ndarray):
    """An array of one's own."""


@pytest.mark.parametrize("unit", ["D", "s", "us", "ns"])
def test_arrays_that_are_masked_or_of_a_class_of_their_own_are_as_others(unit: str) -> None:
    days = np.array(["2020-01-01", "2020-01-02"], f"M8[{unit}]")
    masked = np.ma.masked_array(days, [True, False])
    schema = pa.schema({"x": pa.list_(pa.timestamp("us"))})
    assert column_of(days.view(Own), schema) == [DAY, DAY + datetime.timedelta(1)]
    assert column_of(masked, schema) == [None, DAY + datetime.timedelta(1)]
    for array in (days.view(Own), masked, np.ma.masked_array([1, 2], [True, False])):
        with pytest.raises(UserFunctionError, match=r"it has an? (array of numpy's times|masked array)"):
            list(ordered.Pipeline([ordered.batches(schema)]).run([(array,)]))
    # Of others in the block nothing is said.
    objects, series = np.array([DAY], object), pd.Series([DAY])
    rows = ordered.Pipeline([ordered.batches(schema)]).run([(objects,), (series,)] * 10)
    assert sum(batch.num_rows for batch in rows) == 20


def of_frame(value: Any, kind: pa.DataType) -> Any:
    """What becomes of a value of a column of a frame that a function gives."""

    def func(key: Any, frames: Any, state: Any) -> Any:
        yield pd.DataFrame({"x": pd.Series([value], dtype=object)})

    flow = pk.Flow("k bigint").key_by("k").apply_in_pandas_with_state(func, pa.schema({"x": kind}), "n bigint")
    return flow.collect(ONE)["x"].to_pylist()[0]


MAPS = pa.map_(pa.string(), pa.date32())
DATES = pa.list_(pa.date32())


@pytest.mark.parametrize(
    ("value", "kind", "made"),
    [
        *((absent, DATES, None) for absent in (None, float("nan"), pd.NA, pd.NaT)),
        *(({"a": absent}, pa.struct({"a": DATES}), {"a": None}) for absent in (None, float("nan"), pd.NA, pd.NaT)),
        ([[DAY.date()], float("nan")], pa.list_(DATES), [[DAY.date()], None]),
        ([("a", DAY.date()), ("a", None)], MAPS, [("a", DAY.date()), ("a", None)]),
        ([{"key": "a", "value": DAY.date()}], MAPS, [("a", DAY.date())]),
        ({"a": DAY.date()}, MAPS, [("a", DAY.date())]),
        ([{"key": "a", "value": {"b": 1}}], pa.map_(pa.string(), pa.struct({"b": pa.int64()})), [("a", {"b": 1})]),
        ([("a", 1)], pa.map_(pa.string(), pa.int64()), [("a", 1)]),
    ],
)
def test_what_frames_hold_within_is_taken(value: Any, kind: pa.DataType, made: Any) -> None:
    assert of_frame(value, kind) == made


def test_an_array_of_times_is_no_list_of_numbers_in_frames() -> None:
    with pytest.raises(
        UserFunctionError, match="cannot hold what the function yielded: it has an array of numpy's times"
    ):
        of_frame(np.array(["2020-01-01"], "M8[ns]"), pa.list_(pa.int64()))


def test_an_array_of_times_is_text_in_frames_as_in_spark() -> None:
    assert of_frame(np.array(["2020-01-01"], "M8[s]"), pa.list_(pa.string())) == ["2020-01-01 00:00:00"]


def test_floats_of_numpy_are_looked_at_without_a_warning() -> None:
    look = look_into(pa.float32())
    assert look is not None
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for kept in (np.float32(1), np.float16(2), np.int32(-(2**31)), np.float64(3.4e38), float("nan"), None, "text"):
            assert look([kept]) is None
        assert look(list(np.array([1, np.inf], "f4"))) is None
        for beyond in (np.float64(1e39), 1e39, 10**39, np.longdouble("1e400")):
            assert "beyond" in (look([1.0, beyond]) or "")
        assert "unsigned" in (look([np.ulonglong(2**64 - 1)]) or "")
        assert look([np.longdouble(1), np.longdouble("inf")]) is None


def test_halves_have_numbers_up_to_their_end() -> None:
    schema = pa.schema({"x": pa.list_(pa.float16())})
    assert column_of([65_519.0, float("-inf")], schema) == [65_504.0, float("-inf")]
    for beyond in (65_520.0, -70_000, 1e6):
        with pytest.raises(UserFunctionError, match="beyond what its type of floats has"):
            column_of([1.0, beyond], schema)


@pytest.mark.parametrize("entry", [None, float("nan"), pd.NA, pd.NaT])
def test_a_map_of_a_frame_has_entries(entry: Any) -> None:
    """pyarrow ends the process at one that is none."""
    with pytest.raises(UserFunctionError, match="in place of an entry, which is"):
        of_frame([("a", 1), entry], pa.map_(pa.string(), pa.int64()))


def test_entries_of_maps_may_be_dicts() -> None:
    maps = pa.map_(pa.string(), pa.map_(pa.string(), pa.int64()))
    assert column_of([{"key": "a", "value": [("b", 1)]}], pa.schema({"x": maps})) == [("a", [("b", 1)])]
    with pytest.raises(UserFunctionError, match="None in place of an entry"):
        column_of([{"key": "a", "value": [None]}], pa.schema({"x": maps}))


def test_types_of_users_need_no_hash() -> None:
    class Celsius(pa.ExtensionType):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(pa.int64(), "penstock.test.no_hash")

        def __arrow_ext_serialize__(self) -> bytes:
            return b""

        @classmethod
        def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> Celsius:
            return cls()

    pa.register_extension_type(Celsius())
    try:
        schema = pa.schema({"k": pa.int64(), "c": Celsius()})
        flow = pk.Flow("k bigint").key_by("k").stateful_map(lambda _, k: (None, (k, 5)), schema=schema)
        made = flow.collect(ONE)
        assert made.schema.types == schema.types and made.to_pylist() == [{"k": 1, "c": 5}]
        with pytest.raises(UserFunctionError, match=r'column "x" .* cannot hold what the step put out: 0\.5'):
            column_of(0.5, pa.schema({"x": Celsius()}))
    finally:
        pa.unregister_extension_type("penstock.test.no_hash")


def test_batches_that_break_their_own_schema_are_told_with_the_step() -> None:
    schema = pa.schema([pa.field("k", pa.int64(), False)])
    broken = pa.RecordBatch.from_arrays([pa.nulls(1, pa.int64())], schema=schema)
    for flow in (
        pk.Flow("k bigint").map_batches(lambda batch: broken, schema),
        pk.Flow("k bigint").flat_map(lambda batch: [broken], schema),
        pk.Flow("k bigint").flat_map(lambda batch: [broken.to_struct_array()], schema),
    ):
        with pytest.raises(UserFunctionError, match=r"nulls in column 'k', which its own schema calls NOT NULL"):
            flow.collect(ONE)


def test_list_views_of_groups_are_seen_and_come_back() -> None:
    """pandas shows nulls for a slice of them, which each group is where an integer is null."""
    views = pa.list_view(pa.int64())
    schema = pa.schema({"v": pa.int64(), "k": views})
    rows = pa.Table.from_arrays([pa.array([None, 2, 2]), pa.array([[1], [2, 3], [4]], views)], schema=schema)
    flow = pk.Flow(schema).key_by("v").apply_in_pandas_with_state(lambda key, frames, state: frames, schema, "n bigint")
    assert sorted(flow.collect(rows)["k"].to_pylist()) == [[1], [2, 3], [4]]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.field("element", pa.float32(), False), 2), pa.map_(pa.string(), pa.int64(), keys_sorted=True)]
)
def test_functions_travel_with_the_whole_types_of_their_columns(kind: pa.DataType) -> None:
    value = [1.0, 2.0] if pa.types.is_fixed_size_list(kind) else [("a", 1)]
    rows = pa.table([pa.array([value], kind)], schema=pa.schema([pa.field("x", kind)]))
    flow = pk.Flow(rows.schema).map_batches(lambda batch: batch)
    expected = [{"x": value}]
    assert flow.collect(rows).to_pylist() == flow.collect(rows, processes=1).to_pylist() == expected
    assert cloudpickle.loads(cloudpickle.dumps(flow)).collect(rows).to_pylist() == expected
    function = pickle.loads(cloudpickle.dumps(flow.map_in_arrow()))
    assert [row for batch in function(iter(rows.to_batches())) for row in batch.to_pylist()] == expected


# Functions that nobody awaits, and what is returned


async def later(*values: Any) -> Any:
    return None


async def rows_later(*values: Any) -> Any:
    yield None


class Total(pk.Aggregator):
    def create(self) -> Any:
        return 0

    def accumulate(self, states: Any, groups: Any, rows: Any) -> Any:
        return None

    def merge(self, state: Any, other: Any) -> Any:
        return state

    async def finish(self, states: Any) -> Any:  # type: ignore[override]
        return states


KEYED = pk.Flow("k bigint, at bigint", event_time="at").key_by("k")


@pytest.mark.parametrize("func", [later, rows_later])
@pytest.mark.parametrize(
    "build",
    [
        lambda f: KEYED.stateful_map(f, schema="k bigint"),
        lambda f: KEYED.stateful_map(lambda state, *v: (None, None), schema="k bigint", on_timer=f),
        lambda f: KEYED.stateful_map(lambda state, *v: (None, None), schema="k bigint", at_end=f),
        lambda f: KEYED.apply_in_pandas_with_state(f, "k bigint", "n bigint"),
        lambda f: pk.Flow("k bigint").flat_map(f),
        lambda f: pk.Flow("k bigint").flat_map(f, rows=True),
        lambda f: pk.Flow("k bigint").map_batches(f),
    ],
)
def test_coroutine_functions_are_refused(build: Callable[[Any], Any], func: Any) -> None:
    kind = r"a coroutine function, and nobody awaits .*asyncio\.run\(later\("
    if func is rows_later:
        kind = "an async generator function, and nobody "
        kind += "(awaits its items; give a plain generator|runs what it returns; give a function without yield)"
    with pytest.raises(ConfigError, match=f"{func.__name__} is {kind}"):
        build(func)


def test_takers_of_rows_that_nobody_runs_are_refused() -> None:
    def taken(batch: pa.RecordBatch) -> Any:
        yield batch

    flow = pk.Flow("k bigint")
    with pytest.raises(ConfigError, match=r"^sink: .*taken is a generator function, and nobody runs what it returns"):
        flow.run_into(taken, ONE)
    with pytest.raises(ConfigError, match=r"^sink returned a generator \(.*taken\), which nobody runs"):
        flow.run_into(lambda batch: taken(batch), ONE)


def pairs(state: Any, *values: Any) -> Any:
    yield state
    yield (1,)


def test_steps_that_nobody_runs_are_refused() -> None:
    """Two that it yields would be a state and a row."""
    said = r": pairs is a generator function, and nobody runs what it returns; give a function without yield$"
    with pytest.raises(ConfigError, match="^stateful_map" + said):
        KEYED.stateful_map(pairs, schema="k bigint")
    for option in ("at_end", "on_timer"):
        with pytest.raises(ConfigError, match=f"^stateful_map {option}" + said):
            timed = pk.Flow("k bigint, at bigint", event_time="at").key_by("k")
            timed.stateful_map(lambda *values: (None, None), schema="k bigint", **{option: pairs})
    given: dict[str, Any]
    for given in ({}, {"ttl": "1s"}, {"at_end": lambda *values: pairs(*values)}):
        flow = KEYED.stateful_map(lambda *values: pairs(*values), schema="k bigint", **given)
        with pytest.raises(UserFunctionError, match=r"the function returned a generator \(pairs\), which nobody runs"):
            flow.collect(pa.table({"k": [1, 1], "at": [1, 1]}))


def test_coroutine_functions_of_aggregators_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"aggregate finish: Total\.finish is a coroutine function"):
        KEYED.aggregate(Total(), schema="n bigint")


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda f: KEYED.stateful_map(f, schema="k bigint"), "the function returned a coroutine.*run it inside"),
        (
            lambda f: KEYED.stateful_map(f, schema="k bigint", ttl="1s"),
            "the function returned a coroutine.*run it inside",
        ),
        (lambda f: pk.Flow("k bigint, at bigint").flat_map(f, rows=True), "the function returned a coroutine.*run it"),
        (lambda f: pk.Flow("k bigint, at bigint").flat_map(f), "the function returned a coroutine.*run it inside"),
        (lambda f: pk.Flow("k bigint, at bigint").map_batches(f), "the function returned a coroutine.*run it inside"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_coroutines_of_other_functions_are_told(build: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(UserFunctionError, match=says):
        build(lambda *values: later(*values)).collect(pa.table({"k": [1], "at": [1]}))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda f: KEYED.stateful_map(f, schema="k bigint"), r"returned None; it must return \(state, out\): None as"),
        (lambda f: KEYED.stateful_map(f, schema="k bigint", ttl="1s"), r"returned None; it must return \(state, out\)"),
        (lambda f: pk.Flow("k bigint, at bigint").flat_map(f, rows=True), "returned None.*return an empty list"),
        (lambda f: pk.Flow("k bigint, at bigint").flat_map(f), "returned None.*return an empty list"),
        (lambda f: pk.Flow("k bigint, at bigint").map_batches(f), r"returned None.*batch\.slice\(0, 0\)"),
    ],
)
def test_who_returns_nothing_is_told_what_to_return(build: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(UserFunctionError, match=says):
        build(lambda *values: None).collect(pa.table({"k": [1], "at": [1]}))


@pytest.mark.parametrize("made", [7, "ab", b"", 0.5, object()])
def test_what_is_no_pair_is_told(made: Any) -> None:
    with pytest.raises(UserFunctionError, match=r"returns? .*\(state, out\)"):
        KEYED.stateful_map(lambda *values: made, schema="k bigint").collect(pa.table({"k": [1], "at": [1]}))


def test_a_function_that_runs_it_is_taken() -> None:
    async def step(state: Any, k: int) -> Any:
        return None, (k,)

    flow = pk.Flow("k bigint").key_by("k").stateful_map(lambda *values: asyncio.run(step(*values)), schema="k bigint")
    assert flow.collect(pa.table({"k": [1]})).to_pylist() == [{"k": 1}]


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda flow: flow.map_batches(lambda b: b.select(["v"])), r"\.map_batches\(f, schema='v double'\)"),
        (lambda flow: flow.flat_map(lambda b: [b.select(["v"])]), r"\.flat_map\(f, schema='v double'\)"),
        (
            lambda flow: flow.map_batches(lambda b: b, schema="k int, v double"),
            r"\.map_batches\(f, schema='k bigint, v double'\)",
        ),
        (
            lambda flow: flow.map_batches(lambda b: pa.table({f"c{n}": [n] for n in range(99)})),
            r"\.map_batches\(f, schema='...'\)",
        ),
    ],
)
def test_other_columns_are_told_with_what_declares_them(build: Callable[[pk.Flow], pk.Flow], says: str) -> None:
    with pytest.raises(UserFunctionError, match=f"; declare what it gives: {says}"):
        build(pk.Flow("k bigint, v double")).collect(pa.table({"k": [1], "v": [0.5]}))


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["x"], pa.large_string()),
        pa.array([b"x"], pa.large_binary()),
        pa.array([1], pa.timestamp("ns")),
        pa.array([1], pa.timestamp("ms", "Europe/Berlin")),
        pa.array(["x"]).dictionary_encode(),
        pa.array([1], pa.uint64()),
        pa.array([1.5], pa.float16()),
        pa.array([1], pa.duration("ms")),
        pa.array([1], pa.date64()),
        pa.array([1], pa.decimal256(50, 2)),
        pa.array([True]),
        pa.array([[1]]),
    ],
    ids=lambda values: str(values.type),
)
def test_what_is_advised_about_other_columns_works(values: pa.Array) -> None:
    def give(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"k": batch["k"], "v": values, "a-b": values, "a`b": values})

    flow = pk.Flow("k bigint")
    with pytest.raises(UserFunctionError, match="; declare what it gives: ") as failed:
        flow.map_batches(give).collect(pa.table({"k": [1]}))
    found = re.search(r"map_batches\(f, schema=(.*)\) \(", str(failed.value))
    assert found is not None
    made = flow.map_batches(give, schema=eval(found[1])).collect(pa.table({"k": [1]}))
    assert made.schema.types == [pa.int64(), *[values.type] * 3] and made.column_names == ["k", "v", "a-b", "a`b"]


def test_types_that_are_long_to_write_are_left_to_the_user() -> None:
    def give(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"v": pa.array([[1]], pa.large_list(pa.uint8()))})

    with pytest.raises(UserFunctionError, match=r"map_batches\(f, schema='...'\)"):
        pk.Flow("k bigint").map_batches(give).collect(pa.table({"k": [1]}))


def test_the_index_of_a_frame_is_told_as_such() -> None:
    def below(batch: pa.RecordBatch) -> pa.RecordBatch:
        frame = batch.to_pandas()
        return pa.RecordBatch.from_pandas(frame[frame["k"] > 1])

    flow = pk.Flow("k bigint").map_batches(below)
    with pytest.raises(UserFunctionError, match=r"is the index of a pandas DataFrame: give frame\.reset_index\(drop"):
        flow.collect(pa.table({"k": [1, 2]}))


@pytest.mark.parametrize(
    ("kind", "fits", "says"),
    [
        (
            pa.float32(),
            [1.5, float("inf"), float("nan"), 3.4e38],
            {1e39: "1e.39 is beyond what a float holds", np.longdouble("1e400"): "beyond what a double"},
        ),
        (
            pa.float64(),
            [1.5, float("inf"), -7, 2**53, np.uint64(7), np.int64(-7), np.float32(0.5), np.float64(0.5), None],
            {
                2**53 + 1: "a double does not have it exactly",
                -(2**63) + 1: "a double does not have it exactly",
                np.uint64(2**64 - 1): "a double does not have it exactly",
                np.longdouble("1e400"): "beyond what a double holds",
                decimal.Decimal("1e400"): "beyond what a double holds",
                True: "not a number",
            },
        ),
        (
            pa.timestamp("ms"),
            [datetime.datetime(2026, 1, 1, 0, 0, 0, 1_000), None],
            {datetime.datetime(2026, 1, 1, 0, 0, 0, 1_500): "parts of the unit of its type, ms"},
        ),
        (
            pa.timestamp("s"),
            [datetime.datetime(2026, 1, 1, 0, 0, 7)],
            {datetime.datetime(2026, 1, 1, 0, 0, 0, 1): "parts of the unit of its type, s"},
        ),
        (pa.time32("s"), [datetime.time(1, 2, 3)], {datetime.time(1, 2, 3, 4): "parts of the unit of its type, s"}),
        (
            pa.duration("ms"),
            [datetime.timedelta(milliseconds=-7), np.timedelta64(7, "ms")],
            {
                datetime.timedelta(microseconds=7): "parts of the unit of its type, ms",
                pd.Timedelta(7, "ns"): "parts of the unit of its type, ms",
            },
        ),
        (
            pa.timestamp("us"),
            [pd.Timestamp("2026-01-01 00:00:00.000001"), datetime.datetime(2026, 1, 1), None],
            {pd.Timestamp("2026-01-01 00:00:00.000000001"): "parts of the unit of its type, us"},
        ),
        (
            pa.timestamp("us", "UTC"),
            [pd.Timestamp("2026-01-01", tz="UTC")],
            {pd.Timestamp("2026-01-01 00:00:00.000000001", tz="UTC"): "parts of the unit of its type, us"},
        ),
        (
            pa.duration("us"),
            [pd.Timedelta(7, "us"), datetime.timedelta(1)],
            {pd.Timedelta(7, "ns"): "parts of the unit of its type, us"},
        ),
        (
            pa.date32(),
            [pd.Timestamp("2026-01-01"), datetime.date(2026, 1, 1)],
            {pd.Timestamp("2026-01-01 00:00:00.000000001"): "a time of day, which a date has not"},
        ),
        (
            pa.timestamp("ns"),
            [pd.Timestamp("2026-01-01 00:00:00.000000001")],
            {},
        ),
        (
            pa.list_(pa.timestamp("us")),
            [[pd.Timestamp("2026-01-01")]],
            {(pd.Timestamp("2026-01-01 00:00:00.000000001"),): "parts of the unit of its type, us"},
        ),
    ],
)
def test_numbers_and_times_that_a_column_cannot_hold_are_refused(
    kind: pa.DataType, fits: list[Any], says: dict[Any, str]
) -> None:
    def out(values: list[Any]) -> list[Any]:
        def step(state: None, k: int) -> tuple[None, tuple[Any]]:
            return None, (values[k],)

        flow = pk.Flow("k bigint").key_by("k").stateful_map(step, schema=pa.schema([("x", kind)]))
        rows = flow.collect(pa.table({"k": range(len(values))}), workers=1)
        return sorted(map(str, rows.column("x").to_pylist()))

    assert out(fits) == sorted(map(str, pa.array(fits, kind).to_pylist()))
    for wrong, reason in says.items():
        with pytest.raises(UserFunctionError, match=reason):
            out([*fits, wrong])


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.list_(pa.int64()), [np.array(0.7)]),
        (pa.struct({"q": pa.int64()}), {"q": np.array(0.7)}),
        (pa.map_(pa.int64(), pa.int64()), {1: np.array(0.7)}),
        (pa.list_(pa.int64()), [np.array(True)]),
        (pa.list_(pa.date32()), [np.array(5.7)]),
        (pa.list_(pa.timestamp("us")), [np.array(5.7)]),
    ],
)
def test_an_array_without_dimensions_is_no_number(kind: pa.DataType, value: Any) -> None:
    look = look_into(kind)
    assert look is not None and look([value]) is not None
    given = [np.array([1, 2])] if pa.types.is_list(kind) and kind.value_type == pa.int64() else None
    assert given is None or look(given) is None


def refused(schema: str, *values: Any) -> str:
    """What is said of rows of one column, and of two."""
    said = ""
    for more in ((), (7,)):
        flow = pk.Flow("k bigint").flat_map(
            partial(lambda rows, row: rows, [(value, *more) for value in values]),
            schema=", ".join([f"x {schema}", "k bigint"][: 1 + len(more)]),
            rows=True,
        )
        with pytest.raises(UserFunctionError) as caught:
            flow.collect(pa.table({"k": [7]}))
        said += str(caught.value)
    return said


@pytest.mark.parametrize(
    ("schema", "value", "says"),
    [
        ("struct<price:bigint>", {"pricee": 5}, "which has a struct with the field 'pricee', which its type has not"),
        ("struct<price:bigint>", [("price", 5), ("y", 6)], "which has a struct with the field 'y'"),
        ("array<struct<a:string>>", [{"a": "b"}, {"c": "d"}], "which has a struct with the field 'c'"),
        ("timestamp", "2024-01-01", "'2024-01-01', which has text for a timestamp: give a datetime"),
        ("date", "2024-01-01", "'2024-01-01', which has text for a date: give a datetime.date"),
        ("timestamp", datetime.date(2024, 1, 1), "which has a date for a timestamp: give a datetime"),
        ("timestamp_ntz", pd.NaT, "NaT, which has"),
        ("decimal(5,2)", 1.5, "put out: 1.5 (int or Decimal"),
        ("array<bigint>", "ab", "put out: 'ab', which has text for a list"),
    ],
)
def test_what_a_type_does_not_take_is_named(schema: str, value: Any, says: str) -> None:
    for values in ((value,), (None, value, None)):
        said = refused(schema, *values)
        assert said.count(says) == 2, said


def test_fields_of_a_struct_that_are_left_out_are_null() -> None:
    flow = pk.Flow("k bigint").flat_map(
        lambda row: [({"a": 1},), ({},), ({"b": "x", "a": None},), (None,)],
        schema="s struct<a:bigint,b:string>",
        rows=True,
    )
    kept = flow.collect(pa.table({"k": [7]}))["s"].to_pylist()
    assert kept == [{"a": 1, "b": None}, {"a": None, "b": None}, {"a": None, "b": "x"}, None]
    look = look_into(pa.struct({"a": pa.int64()}))
    assert look is not None and look([{b"a": 2}, [(b"a", 3)]]) is None, "pyarrow takes names as bytes"
    assert look([{b"a": 0.5}]) is not None and look([{b"b": 2}]) is not None
