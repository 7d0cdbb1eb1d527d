"""Joins of every kind, with intervals and in windows: what is written and refused, and what comes out beside a twin."""

from __future__ import annotations

import json
import threading
import warnings
from collections import Counter
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
from examples_support import examples
from penstock._local import LateRows
from penstock.errors import ConfigError, PlanError, SchemaError

HOWS = ("inner", "left", "right", "full", "semi", "anti")


def left(**options: Any) -> pk.Flow:
    return pk.Flow("k bigint, t bigint, v bigint", **{"name": "left", "event_time": "t", **options})


def right(**options: Any) -> pk.Flow:
    return pk.Flow("k bigint, u bigint, w bigint", **{"name": "right", "event_time": "u", **options})


def rows(table: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))


def table(names: str, of: list[Any]) -> pa.Table:
    return pa.table({name: pa.array([row[at] for row in of], pa.int64()) for at, name in enumerate(names)})


def step_of(flow: pk.Flow) -> dict[str, Any]:
    return dict(json.loads(flow.to_plan()[0])["steps"][-1])


def operators(flow: pk.Flow) -> list[str]:
    return [step["name"] for step in flow._check()["operators"]]


def test_joins_are_written() -> None:
    plain = {"op": "join", "left": ["k"], "right": ["k"], "inputs": [0, 1]}
    assert step_of(left().join(right(), on="k")) == plain | {"inputs": [0, 1]}
    assert step_of(left().join(right(), on="k", how="full", name="both")) == plain | {"how": "full", "operator": "both"}
    for within, us in [
        ("10s", [-10_000_000, 10_000_000]),
        (("-5s", "10s"), [-5_000_000, 10_000_000]),
        (("1ms", timedelta(seconds=1)), [1_000, 1_000_000]),
        ((timedelta(seconds=-2), "-1s"), [-2_000_000, -1_000_000]),
        (np.timedelta64(3, "s"), [-3_000_000, 3_000_000]),
        ((np.timedelta64(-2, "s"), np.timedelta64(5, "ms")), [-2_000_000, 5_000]),
        ("0s", [0, 0]),
    ]:
        flow = left().join(right(), on="k", within=within)
        assert step_of(flow) == plain | {"within": us}
    assert "on=['k'], how='left', within=('-1s', '0s'))" in repr(
        left().join(right(), on="k", how="left", within=("-1s", "0s"))
    )
    flow = left().join(right(), on="k", until="v", validate="1:m")
    assert step_of(flow) == plain | {"until": "v", "validate": "1:m"} and "until='v', validate='1:m')" in repr(flow)
    flow = left().window_join(right(), on="k", window=pk.tumbling("10ms"), how="left")
    assert flow.columns == ("window_start", "window_end", "k", "t", "v", "u", "w") and flow.event_time is None
    assert step_of(flow) == plain | {"how": "left", "windowed": True, "inputs": [2, 3]}
    assert ".window_join(" in repr(flow) and "window_join" in flow._repr_html_()
    assert left().join(right(), on="k", how="semi").columns == ("k", "t", "v")
    assert left().join(right(), on="k", how="anti").output_schema == left().input_schema


def test_columns_of_one_name_get_a_suffix() -> None:
    both = pk.Flow("k bigint, t bigint, v bigint", name="right", event_time="t")
    flow = left().join(both, on="k", how="full", within="5ms", suffix="_right")
    assert flow.columns == ("k", "t", "v", "t_right", "v_right")
    assert step_of(flow)["suffix"] == "_right" and "suffix='_right'" in repr(flow)
    given = {"left": table("ktv", [(1, 10, 0), (2, 10, 1)]), "right": table("ktv", [(1, 12, 7), (3, 10, 8)])}
    expected = Counter({(1, 10, 0, 12, 7): 1, (2, 10, 1, None, None): 1, (3, None, None, 10, 8): 1})
    for streaming in (False, True):
        assert rows(flow.collect(given, 2, streaming=streaming)) == expected
    windowed = left().window_join(both, on="k", window=pk.tumbling("10ms"), suffix="_2")
    assert windowed.columns == ("window_start", "window_end", "k", "t", "v", "t_2", "v_2")
    assert rows(windowed.collect(given)) == Counter({(10, 20, 1, 10, 0, 12, 7): 1})
    # A key of the other side has the name of what is no key here.
    crossed = left().join(both, left_on="k", right_on="v", suffix="_r")
    assert crossed.columns == ("k", "t", "v", "k_r", "t_r", "v_r")
    # A source meets itself, and rows that are filtered take no columns.
    one = left()
    assert one.join(one, on="k", how="semi", suffix="_r").columns == ("k", "t", "v")
    assert one.join(one, on="k", suffix="_r").columns == ("k", "t", "v", "t_r", "v_r")
    with pytest.raises(PlanError, match=r"both sides have a column 't' .*; write suffix=._right., .* as 't_right'"):
        left().join(both, on="k")
    for wrong in ("", 3):
        with pytest.raises(ConfigError, match=r"join suffix=.*: give a text that is not empty"):
            left().join(both, on="k", suffix=wrong)  # type: ignore[arg-type]
    taken = pk.Flow("k bigint, t bigint, t_r bigint", name="taken")
    with pytest.raises(PlanError, match="column 't' of the other flow would be 't_r'"):
        left().join(taken, on="k", suffix="_r")
    with pytest.raises(PlanError, match="column 't' of the other flow would be 't_r'"):
        taken.join(both, on="k", suffix="_r")


def test_joins_are_explained() -> None:
    for flow, words in [
        (left().join(right(), on="k"), ["pairs with k = k", "the rows of both sides, for ever"]),
        (left().join(right(), on="k", how="anti"), ["left rows that meet none at the end of input with k = k"]),
        (
            left().join(right(), on="k", how="full", within=("-5s", "10s"), name="near"),
            ["pairs, and rows of both sides that meet none, with k = k, u - t from -5 s to 10 s", "state of near: "],
        ),
        (
            left().join(right(), on="k", until="v", validate="1:m"),
            ["pairs with k = k, at most one left row for a right row, u from t to before v", "state: left rows until"],
        ),
        (left().join(right(), on="k", validate="1:m"), ["left rows, and right rows that have met none, for ever"]),
        (
            left().window_join(right(), on="k", window=pk.sliding("10s", every="5s"), how="semi"),
            ["left rows that meet any with k = k, sliding 10 s every 5 s", "until their window closes"],
        ),
    ]:
        for text in words:
            assert text in flow.explain(), flow.explain()


def test_joins_have_names() -> None:
    third = pk.Flow("k bigint, x bigint", name="third")
    assert operators(left().join(right(), on="k").join(third, on="k")) == ["join", "join-2"]
    assert operators(left().join(right(), on="k", name="first").join(third, on="k")) == ["first", "join"]
    one = left().key_by("k").agg(v=pk.count(), emit="final", name="join")
    assert operators(one.join(third, on="k", name="then")) == ["join", "then"]
    with pytest.raises(PlanError, match=r"join: its state would be called 'join', as that of step 1 \(agg\) is"):
        one.join(third, on="k")
    with pytest.raises(PlanError, match="the name 'x' is that of step"):
        left().key_by("k").agg(v=pk.count(), emit="final", name="x").join(
            third.key_by("k").agg(n=pk.count(), emit="final", name="x"), on="k"
        )
    with pytest.raises(ConfigError, match="join name='a/b': a name is 1 to 100"):
        left().join(right(), on="k", name="a/b")


def test_rows_meet_until_a_time_of_their_own() -> None:
    given = {
        "left": table("ktv", [(1, 10, 20), (1, 20, 30), (2, 10, 10), (3, 0, 99)]),
        "right": table("kuw", [(1, 9, 0), (1, 10, 1), (1, 19, 2), (1, 20, 3), (1, 30, 4), (2, 10, 5)]),
    }
    pairs = Counter({(1, 10, 20, 10, 1): 1, (1, 10, 20, 19, 2): 1, (1, 20, 30, 20, 3): 1})
    lone = Counter({(2, 10, 10, None, None): 1, (3, 0, 99, None, None): 1})
    for how, expected in (("inner", pairs), ("left", pairs + lone)):
        for validate in (None, "1:m"):
            joined = left().join(right(), on="k", how=how, until="v", validate=validate)
            assert rows(joined.collect(given, 2)) == expected, (how, validate)
    other = pk.Flow("k bigint, t bigint", name="left", event_time="t").join(right(), on="k", validate="1:m")
    with pytest.raises(SchemaError, match=r"validate='1:m' says .* two with the key k = 1 .*leave validate out"):
        other.collect({"left": given["left"].select(["k", "t"]), "right": given["right"]})


def test_joins_that_make_no_sense_are_refused() -> None:
    cases: list[tuple[type[Exception], str, Any]] = [
        (
            ConfigError,
            "join how='outer' is unknown; use 'inner' or 'left'",
            lambda: left().join(right(), on="k", how="outer"),
        ),
        (ConfigError, "ends before it begins", lambda: left().join(right(), on="k", within=("5s", "-5s"))),
        (ConfigError, "join within=3: give a duration", lambda: left().join(right(), on="k", within=3)),  # type: ignore[arg-type]
        (ConfigError, "give a duration", lambda: left().join(right(), on="k", within=("1s",))),  # type: ignore[arg-type]
        (ConfigError, "join within, upper end, 7 has no unit", lambda: left().join(right(), on="k", within=("1s", 7))),  # type: ignore[arg-type]
        (
            ConfigError,
            "join within '-5s' is negative|has no unit|not",
            lambda: left().join(right(), on="k", within="-5s"),
        ),
        (SchemaError, "until: column 'w' does not exist", lambda: left().join(right(), on="k", until="w")),
        (ConfigError, "until=3: name a column", lambda: left().join(right(), on="k", until=3)),  # type: ignore[arg-type]
        (
            SchemaError,
            "until needs a timestamp, or int64 in milliseconds",
            lambda: pk.Flow("k bigint, t bigint, v string", event_time="t").join(right(), on="k", until="v"),
        ),
        (PlanError, "event-time column", lambda: left(event_time=None).join(right(), on="k", until="v")),
        (PlanError, "leave within", lambda: left().join(right(), on="k", until="v", within="1s")),
        (ConfigError, "validate='m:m' is unknown", lambda: left().join(right(), on="k", validate="m:m")),
        (PlanError, "has no such check", lambda: left().join(right(), on="k", validate="1:m", within="1s")),
        (PlanError, "leave validate out", lambda: left().join(right(), on="k", validate="1:m", how="semi")),
        (PlanError, "event-time column", lambda: left().join(right(event_time=None), on="k", within="1s")),
        (PlanError, "event-time column", lambda: left(event_time=None).join(right(), on="k", within="1s")),
        (
            PlanError,
            "needs event time on both sides",
            lambda: left().window_join(right(event_time=None), on="k", window=pk.tumbling("1s")),
        ),
        (ConfigError, "make it with penstock.tumbling", lambda: left().window_join(right(), on="k", window="1s")),  # type: ignore[arg-type]
        (PlanError, "window", lambda: left().window(pk.tumbling("1s")).join(right(), on="k")),
        (
            SchemaError,
            "'window_start' has type bigint, 'window_start' has timestamp",
            lambda: left().window_join(
                pk.Flow("k bigint, u timestamp", event_time="u", name="r"), on="k", window=pk.tumbling("1s")
            ),
        ),
    ]
    for kind, says, build in cases:
        with pytest.raises(kind, match=says):
            build()


def test_a_join_gives_no_event_time() -> None:
    joined = left().join(right(), on="k", within="1s", how="semi")
    assert joined.event_time is None
    with pytest.raises(PlanError, match="event time"):
        joined.window(pk.tumbling("1s"))


def test_windows_of_a_join_are_windows() -> None:
    """What ranks the rows of a window takes those of a window join."""
    flow = left().window_join(right(), on="k", window=pk.tumbling("10ms")).top(1, by="w", per="window")
    given = {"left": table("ktv", [(1, 3, 0), (2, 12, 0)]), "right": table("kuw", [(1, 4, 7), (1, 9, 8), (2, 19, 5)])}
    for streaming in (False, True):
        got = flow.collect(given, 2, streaming=streaming)
        assert rows(got) == Counter({(0, 10, 1, 3, 0, 9, 8): 1, (10, 20, 2, 12, 0, 19, 5): 1})


def test_what_cannot_meet_any_more_is_dropped_and_told() -> None:
    """Rows leave when the watermark says so, not at the end; rows behind it are late."""
    flow = left().join(right(), on="k", how="left", within=("0ms", "10ms"))
    late: list[pa.RecordBatch] = []
    order: list[tuple[Any, ...]] = []
    told = threading.Event()

    def lefts() -> Any:
        for time in range(0, 200, 20):
            yield table("ktv", [(1, time, time)])
        assert told.wait(30), "no row without a match came while the input was open"
        yield table("ktv", [(1, 3, -1)])

    def rights() -> Any:
        for time in range(0, 200, 20):
            yield table("kuw", [(1, time + (5 if time % 40 == 0 else 15), time)])
        yield table("kuw", [(1, 400, 0)])

    for batch in flow.run({"left": lefts(), "right": rights()}, 2, streaming=True, late=late.append):
        order.extend(zip(*(column.to_pylist() for column in batch.columns), strict=True))
        if None in order[-1]:
            told.set()
    assert Counter(order) == Counter(
        (1, time, time, time + 5, time) if time % 40 == 0 else (1, time, time, None, None) for time in range(0, 200, 20)
    )
    assert [batch.to_pydict() for batch in late] == [{"k": [1], "t": [3], "v": [-1]}]


def test_late_rows_of_sources_that_nobody_takes_are_told() -> None:
    flow = left().window_join(right(), on="k", window=pk.tumbling("10ms"))
    given = {
        "left": [table("ktv", [(1, time, 0)]) for time in (1, 1_000, 2, 3, 3_000)],
        "right": [table("kuw", [(1, time, 0)]) for time in (1, 1_000, 2, 3_000)],
    }
    taken: list[pa.RecordBatch] = []
    for late, says in [
        (None, "3 of 9 rows came .* take them with late=$"),
        ({}, r"3 of 9 rows came .* take them with late=\{'left': ..., 'right': ...\}$"),
        ({"right": taken.append}, r"2 of 9 rows came .* take them with late=\{'left': ...\}$"),
        ({"left": taken.append}, r"1 of 9 rows came .* take them with late=\{'right': ...\}$"),
    ]:
        with pytest.warns(LateRows, match=says):
            list(flow.run(given, streaming=True, late=late))
    assert sorted(t for batch in taken for t in batch[batch.schema.names[-2]].to_pylist()) == [2, 2, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error", LateRows)
        list(flow.run(given, streaming=True, late=taken.append))
        list(flow.run(given, streaming=True, late={"left": taken.append, "right": taken.append}))
        # Its summary has the number.
        for late in (None, {}, {"left": taken.append}):
            assert flow.run_into(lambda batch: None, given, streaming=True, late=late).late_rows == 3


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (pa.table({"k": ["x"], "u": [1], "w": [1]}), "source 'right' column 'k' is string, expected int64"),
        (pa.table({"k": [1]}), "source 'right' has no column 'u'; it has k"),
        (pa.chunked_array([[1]]), "source 'right', a ChunkedArray, is no table in Arrow"),
        ([{"k": 1}], "source 'right' gives a dict, not Arrow data"),
        (5, "source 'right' is a int, not Arrow data"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"streaming": True}, {"processes": 1}], ids=str)
def test_data_that_does_not_fit_is_told_with_its_source(bad: Any, says: str, options: dict[str, Any]) -> None:
    flow = left().join(right(), on="k", within="1ms")
    with pytest.raises(SchemaError, match=f"^{says}"):
        flow.collect({"left": table("ktv", [(1, 5, 0)]), "right": bad}, **options)


@pytest.mark.filterwarnings("ignore::penstock._pump.LateRows")
def test_late_rows_are_told_by_source() -> None:
    flow = left().join(right(), on="k", within="1ms")
    given = {
        "left": [table("ktv", [(1, 5, 0)]), table("ktv", [(1, 90, 1)]), table("ktv", [(2, 3, 2)])],
        "right": [table("kuw", [(1, 99, 0)]), table("kuw", [(3, 4, 7)])],
    }

    def told(late: Any, flow: pk.Flow = flow) -> None:
        with flow.start(2, late=late, streaming=True) as session:
            for _ in session.run({name: iter(tables) for name, tables in given.items()}):
                pass

    lefts: list[pa.RecordBatch] = []
    rights: list[pa.RecordBatch] = []
    every: list[pa.RecordBatch] = []
    told({"left": lefts.append, "right": rights.append})
    # Which of the two ends first decides what the watermark waits for, and so what is late: never in another's place.
    assert all(batch.schema.names == ["k", "t", "v"] for batch in lefts)
    assert all(batch.schema.names == ["k", "u", "w"] for batch in rights)
    told(every.append)
    assert {tuple(batch.schema.names) for batch in every} <= {("k", "t", "v"), ("k", "u", "w")}
    told({"left": lefts.append})
    told({})
    # At the end of input only rows without a time are late.
    for how, late in (("inner", ({"k": [1], "t": [None], "v": [5]}, {"k": [2], "u": [None], "w": [6]})),):
        ones, twos = table("ktv", [(1, None, 5), (1, 7, 1)]), table("kuw", [(2, None, 6)])
        lefts, rights = [], []
        joined = left().join(right(), on="k", within="1ms", how=how)
        summary = joined.run_into(
            lambda batch: None, {"left": ones, "right": twos}, late={"left": lefts.append, "right": rights.append}
        )
        assert ([batch.to_pydict() for batch in lefts], [batch.to_pydict() for batch in rights]) == (
            [late[0]],
            [late[1]],
        )
        assert summary.late_rows == 2
    with pytest.raises(
        ConfigError, match=r"late=\{'up': ...\}: this flow has no such late rows; there are 'left', 'right'"
    ):
        told({"up": print})
    with pytest.raises(ConfigError, match="it must be a function of a batch"):
        told({"left": 3})
    with pytest.raises(ConfigError, match="there are none: no step of it has late rows"):
        told({"left": print}, left().join(right(), on="k"))


def test_late_rows_of_one_source_at_several_steps() -> None:
    """Alike they are one kind, else each step has its own."""
    source = left()
    fives = source.key_by("k").window(pk.tumbling("5ms")).agg(n=pk.count(), name="fives")
    mapped = source.map_batches(lambda batch: batch.select(["k", "t"]), "k bigint, t bigint")
    for other, kinds in (
        (source, {"left": 2}),
        (mapped, {"fives": 1, "tens": 1}),
    ):
        tens = other.key_by("k").window(pk.tumbling("10ms")).agg(n=pk.count(), name="tens")
        late: dict[str, list[pa.RecordBatch]] = {name: [] for name in kinds}
        flow = fives.union(tens)
        rows = table("ktv", [(1, None, 5), (1, 7, 1)])
        flow.run_into(lambda batch: None, rows, late={name: found.append for name, found in late.items()})
        assert {name: sum(batch.num_rows for batch in found) for name, found in late.items()} == kinds
        assert all(batch["t"].null_count == 1 for found in late.values() for batch in found)


def met(how: str, ones: list[Any], twos: list[Any], near: Any) -> Counter[tuple[Any, ...]]:
    """What comes out of bounded input."""
    pairs = [(one, two) for one in ones for two in twos if one[0] is not None and one[0] == two[0] and near(one, two)]
    if how in ("semi", "anti"):
        return Counter(one for one in ones if any(one is pair[0] for pair in pairs) == (how == "semi"))
    out = [(*one, *two[1:]) for one, two in pairs]
    if how in ("left", "full"):
        out += [(*one, None, None) for one in ones if not any(one is pair[0] for pair in pairs)]
    if how in ("right", "full"):
        out += [(two[0], None, None, *two[1:]) for two in twos if not any(two is pair[1] for pair in pairs)]
    return Counter(out)


_ROWS = st.lists(
    st.tuples(st.none() | st.integers(0, 3), st.integers(-20, 60), st.integers(0, 5)).map(lambda row: tuple(row)),
    max_size=12,
)


@settings(max_examples=examples(60), deadline=None)
@given(
    how=st.sampled_from(HOWS),
    ones=_ROWS,
    twos=_ROWS,
    within=st.none() | st.tuples(st.integers(-15, 15), st.integers(0, 15)),
    workers=st.sampled_from([1, 2, 4]),
)
def test_bounded_input_gives_what_a_loop_gives(
    how: str, ones: list[Any], twos: list[Any], within: tuple[int, int] | None, workers: int
) -> None:
    lower, upper = (0, 0) if within is None else (within[0], within[0] + within[1])

    def near(one: Any, two: Any) -> bool:
        return within is None or lower <= two[1] - one[1] <= upper

    ends = None if within is None else (timedelta(milliseconds=lower), timedelta(milliseconds=upper))
    flow = left().join(right(), on="k", how=how, within=ends)
    # Rows that look alike are not the same.
    ones, twos = [(*row,) for row in map(list, ones)], [(*row,) for row in map(list, twos)]
    got = flow.collect({"left": table("ktv", ones), "right": table("kuw", twos)}, workers)
    assert rows(got) == met(how, ones, twos, near)
