"""Ordered runs beside their serial twins: values, order, errors at their places, and bad arguments."""

from __future__ import annotations

import decimal
import doctest
import functools
import importlib
import itertools
import operator
import os
import pkgutil
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
import penstock.ordered
from examples_support import examples
from penstock import errors, ordered

sys.path.insert(0, str(Path(__file__).parent / "surface"))
from forked import in_child

MODULES = ["penstock.ordered"] + [f"penstock.ordered.{m.name}" for m in pkgutil.iter_modules(penstock.ordered.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


class Boom(Exception):
    pass


def outcomes(results: Iterable[Any]) -> list[Any]:
    """All results; an exception as its type and text."""
    found: list[Any] = []
    it = iter(results)
    while True:
        try:
            found.append(next(it))
        except StopIteration:
            return found
        except Exception as error:
            found.append((type(error), str(error)))


def risky(x: int) -> int:
    if x % 7 == 3:
        raise Boom(x)
    return x * 2


def expand(x: int) -> list[int]:
    if x % 11 == 5:
        raise Boom("expand", x)
    return [x] * (x % 3)


def odd(x: int) -> bool:
    if x % 13 == 7:
        raise Boom("odd", x)
    return x % 4 != 1


def running(total: int, x: int) -> tuple[int | None, list[tuple[int, int]] | None]:
    if x % 17 == 9:
        raise Boom("running", x)
    total += x
    if x % 19 == 4:
        return None, None
    return total, [(x % 5, total)]


def last(key: int, total: int) -> list[tuple[str, int, int]]:
    return [("end", key, total)]


def count(n: int, x: Any) -> tuple[int, list[Any]]:
    if n % 23 == 22:
        raise Boom("count", n)
    return n + 1, [(n, x)]


def total(n: int) -> list[tuple[str, int]]:
    return [("all", n)]


# The serial twin of every step, on a list of outcomes.


def naive(kind: str, values: list[Any]) -> list[Any]:
    out: list[Any] = []
    states: dict[int, int] = {}
    n = 0
    for value in values:
        if isinstance(value, BaseException):
            out.append(value)
            continue
        try:
            if kind == "map":
                out.append(risky(value))
            elif kind == "flat_map":
                out.extend(expand(value))
            elif kind == "filter":
                if odd(value):
                    out.append(value)
            elif kind == "partitioned":
                key = value % 5
                state, made = running(states.get(key, 0), value)
                if state is None:
                    states.pop(key, None)
                else:
                    states[key] = state
                out.extend(total for _, total in made or ())
            elif kind == "stateful":
                n, made_all = count(n, value)
                out.extend(place + x for place, x in made_all)
        except Boom as error:
            out.append(error)
    if kind == "partitioned":
        out.extend(states.values())
    if kind == "stateful":
        out.append(n)
    return out


def number_of(pair: tuple[int, int]) -> int:
    return pair[1]


def second(state: int, x: int) -> tuple[int | None, list[int] | None]:
    held, out = running(state, x)
    return held, None if out is None else [number_of(pair) for pair in out]


def summed(n: int, x: int) -> tuple[int, list[int]]:
    n, out = count(n, x)
    return n, [a + b for a, b in out]


STEPS: dict[str, Callable[[], ordered.Step]] = {
    "map": lambda: ordered.map(risky),
    "flat_map": lambda: ordered.flat_map(expand),
    "filter": lambda: ordered.filter(odd),
    "partitioned": lambda: ordered.partitioned(
        second, key=lambda x: x % 5, initial=0, finish=lambda key, state: [state], partitions=3
    ),
    "stateful": lambda: ordered.stateful(summed, initial=0, finish=lambda n: [n]),
}


def serial(kinds: list[str], xs: list[int]) -> list[Any]:
    values: list[Any] = list(xs)
    for kind in kinds:
        values = naive(kind, values)
    return [(type(v), str(v)) if isinstance(v, BaseException) else v for v in values]


@settings(max_examples=examples(60))
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    st.lists(st.integers(0, 1000), max_size=120),
    st.sampled_from([None, 1, 3, 50]),
    st.sampled_from([None, 1, 10]),
)
def test_inline_equals_the_serial_twin(
    kinds: list[str], xs: list[int], chunk: int | None, in_flight: int | None
) -> None:
    pipeline = ordered.Pipeline([STEPS[kind]() for kind in kinds])
    results = pipeline.run(iter(xs), mode="inline", chunk=chunk, in_flight=in_flight)
    assert outcomes(results) == serial(kinds, xs)
    assert results.stats().items_in == len(xs)


def test_the_builtin_is_the_twin_of_ordered_map() -> None:
    assert list(pk.ordered_map(str, range(5000))) == list(map(str, range(5000)))
    assert list(pk.ordered_map(str, [])) == []
    results = pk.ordered_map(risky, range(12), mode="inline")
    assert [next(results) for _ in range(3)] == [0, 2, 4]
    with pytest.raises(Boom) as caught:
        next(results)
    assert caught.value.args == (3,) and "item 3 of the input, in map risky" in caught.value.__notes__
    assert next(results) == 8


def test_the_input_is_consumed_lazily_and_within_the_bound() -> None:
    read: list[int] = []

    def source() -> Iterator[int]:
        for x in itertools.count():
            read.append(x)
            yield x

    results = pk.ordered_map(abs, source(), in_flight=5, mode="inline")
    assert read == []
    for taken in range(40):
        assert next(results) == taken
        assert len(read) - (taken + 1) <= 5
    results.close()
    seen = len(read)
    assert list(results) == [] and len(read) == seen


def test_an_exception_of_the_input_comes_after_all_results_before_it() -> None:
    def source() -> Iterator[int]:
        yield from range(10)
        raise Boom("input")

    results = pk.ordered_map(abs, source(), chunk=4)
    taken = [next(results) for _ in range(10)]
    assert taken == list(range(10))
    with pytest.raises(Boom, match="input"):
        next(results)
    assert list(results) == []


def test_a_function_that_ends_an_iterator_by_accident_is_an_error_at_its_place() -> None:
    results = outcomes(pk.ordered_map(lambda x: next(iter([])) if x == 2 else x, range(4), mode="inline"))
    assert results[:2] == [0, 1] and results[2][0] is errors.UserFunctionError and results[3] == 3


def _ends(state: int, item: int) -> Any:
    if item == 2:
        next(iter([]))
    return state + 1, [item]


def _ends_key(item: int) -> int:
    return next(iter([])) if item == 2 else 0


def _ends_flat(item: int) -> list[int]:
    return [next(iter([])) if item == 2 else item]


def _ends_batch(items: list[int]) -> list[int]:
    return [next(iter([]))] if 2 in items else items


def _ends_finish(key: int, state: int) -> Any:
    return next(iter([]))


@pytest.mark.parametrize("mode", ["inline", "threads", "processes"])
@pytest.mark.parametrize(
    "step",
    [
        ordered.flat_map(_ends_flat),
        ordered.map_batches(_ends_batch),
        ordered.stateful(_ends, initial=0),
        ordered.partitioned(_ends, key=_ends_key, initial=0),
    ],
    ids=["flat_map", "map_batches", "stateful", "key"],
)
def test_an_iterator_that_ends_in_any_step_ends_no_run(mode: str, step: ordered.Step) -> None:
    found = outcomes(pk.Pipeline([step]).run(range(4), mode=mode, workers=2, chunk=1))
    assert found[:2] == [0, 1] and found[2][0] is errors.UserFunctionError and found[3] == 3
    assert "raised StopIteration" in found[2][1]


class _Ends:
    """A truth value that asks an iterator at its end."""

    def __bool__(self) -> bool:
        return next(iter([]))


@pytest.mark.parametrize("chunk", [1, 10])
def test_a_truth_value_that_ends_drops_no_items(chunk: int) -> None:
    step = ordered.filter(lambda item: _Ends() if item == 3 else item % 2)
    found = outcomes(pk.Pipeline([step]).run(range(10), mode="inline", chunk=chunk))
    assert [one for one in found if not isinstance(one, tuple)] == [1, 5, 7, 9]
    assert [one[0] for one in found if isinstance(one, tuple)] == [errors.UserFunctionError]


def test_an_iterator_that_ends_at_the_end_is_an_error() -> None:
    step = ordered.partitioned(_count_up, key=_none, initial=0, finish=_ends_finish)
    found = outcomes(pk.Pipeline([step]).run(range(2), mode="inline"))
    assert [one[0] for one in found if isinstance(one, tuple)] == [errors.UserFunctionError]


def _count_up(state: int, item: Any) -> Any:
    return state + 1, None


def _none(item: Any) -> int:
    return 0


def _itself(item: Any) -> Any:
    return item


def _told(key: Any, state: int) -> Any:
    return [(key, state)]


@pytest.mark.parametrize("mode", ["inline", "threads", "processes"])
def test_a_nan_is_the_same_key_in_every_mode(mode: str) -> None:
    step = ordered.partitioned(_count_up, key=_itself, initial=0, finish=_told)
    nan = float("nan")
    for items in ([nan] * 5 + [1.0], [(nan, 1)] * 3, [float("nan") for _ in range(3)]):
        expected = sorted(map(repr, pk.Pipeline([step]).run(items, mode="inline")))
        found = sorted(map(repr, pk.Pipeline([step]).run(items, mode=mode, workers=2, chunk=2)))
        assert found == expected


def _appends(state: list[int], item: int) -> Any:
    state.append(item)
    if item < 0:
        raise Boom("no")
    return state, [len(state)]


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("mode", ["inline", "threads", "processes"])
def test_what_a_step_changed_in_place_stays_in_every_mode(mode: str, chunk: int) -> None:
    step = ordered.partitioned(_appends, key=_none, initial=list)
    found = outcomes(pk.Pipeline([step]).run([1, -1, 2], mode=mode, workers=2, chunk=chunk))
    assert [found[0], found[2]] == [1, 3] and found[1][0] is Boom


def test_an_input_longer_than_any_length_is_taken() -> None:
    results = pk.ordered_map(abs, range(1 << 70))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    results.close()


WRONG: list[tuple[ordered.Step, Any, str]] = [
    (ordered.map_batches(lambda xs: xs[:-1]), 3, "must return"),
    (ordered.map_batches(lambda xs: 5), 3, "must return a sequence"),
    (ordered.flat_map(lambda x: 5), 3, "must return an iterable or None"),
    (ordered.stateful(lambda s, x: x), 3, r"must return \(state, outputs\)"),
    (ordered.partitioned(lambda s, x: (s, 5), key=abs), 3, "an iterable or None"),
    (ordered.map_batches(lambda b: 5), pa.record_batch({"a": [1]}), "RecordBatch, a Table"),
    (ordered.map_batches(lambda b: b.slice(0, 1), same_length=True), pa.record_batch({"a": [1, 2]}), "as many rows"),
    (ordered.rows(), 3, "needs items that are record batches"),
    (ordered.partitioned(lambda s, x: (s, []), key="a"), {"a": 1}, r"got dict: key='a' names a column; .*key=lambda"),
    (ordered.batches("a bigint, b bigint"), (1,), r"has 1 values, expected 2 \(a, b\)"),
    (ordered.batches("a bigint"), 7, "is 7, expected a tuple or a dict"),
    (ordered.batches("a bigint, b bigint"), {"a": 1}, "has the columns a; expected a, b"),
    (ordered.batches("a bigint"), {"a": 1, "c": 2}, "has the columns a, c; expected a"),
    (ordered.batches("a bigint, b bigint"), {"a": 1, "c": 2}, "has the columns a, c; expected a, b"),
    (ordered.batches("a bigint NOT NULL"), (None,), "has a null in column 'a', which is NOT NULL"),
    (ordered.batches("a struct<n: bigint NOT NULL>"), ({"n": None},), "has a null inside: column 'a' has a null in"),
    (ordered.batches("a bigint"), (1.5,), "has 1.5 in column 'a', expected int64"),
    (ordered.batches(pa.schema({"a": pa.uint8()})), (-0.5,), "has -0.5 in column 'a', expected uint8"),
    (ordered.batches("a bigint"), (decimal.Decimal("1.5"),), r"has Decimal\('1.5'\) in column 'a', expected int64"),
    (ordered.batches("a int"), (np.float32(1.5),), "in column 'a', expected int32"),
    (ordered.batches("a bigint"), (np.True_,), r"has np.True_ in column 'a', expected int64"),
    (ordered.batches("a double"), (True,), "has True in column 'a', expected double"),
    (ordered.batches("a date"), (1.5,), "has 1.5 in column 'a', expected date32"),
    (ordered.batches("a timestamp"), (1.5,), "has 1.5 in column 'a', expected timestamp"),
    (ordered.batches("a array<bigint>"), ([1, 1.5],), r"has \[1, 1.5\] in column 'a', expected list<"),
    (ordered.batches("a map<string, bigint>"), ({"x": 1.5},), "in column 'a', expected map<"),
    (ordered.batches("a struct<n: array<int>>"), ({"n": [0.5]},), "in column 'a', expected struct<"),
]


@pytest.mark.parametrize(("step", "item", "text"), WRONG, ids=lambda value: str(value)[:30])
def test_wrong_results_are_named(step: ordered.Step, item: Any, text: str) -> None:
    with pytest.raises(errors.UserFunctionError, match=text):
        list(ordered.Pipeline([step]).run([item], mode="inline"))


def test_what_came_out_before_an_exception_stays() -> None:
    def partly(x: int) -> Iterator[int]:
        yield x
        raise Boom(x)

    results = outcomes(ordered.Pipeline([ordered.flat_map(partly), ordered.map(str)]).run([1, 2]))
    assert results == ["1", (Boom, "1"), "2", (Boom, "2")]


def test_a_step_that_raises_leaves_its_state() -> None:
    def step(state: int, x: int) -> tuple[int, list[int]]:
        if x < 0:
            raise Boom(x)
        return state + x, [state + x]

    keyed = ordered.partitioned(step, key=lambda x: abs(x) % 2, initial=0)
    assert outcomes(ordered.Pipeline([keyed]).run([1, 2, -1, 3, -2, 4])) == [1, 2, (Boom, "-1"), 4, (Boom, "-2"), 6]


def test_keys_that_cannot_be_had_are_errors_at_their_places() -> None:
    keyed = ordered.partitioned(lambda s, x: (s, [x]), key=lambda x: [x] if x == 2 else 10 // x, initial=list)
    found = outcomes(ordered.Pipeline([keyed]).run([1, 2, 0, 3]))
    assert found[0] == 1 and found[1][0] is TypeError and found[2][0] is ZeroDivisionError and found[3] == 3


def batches_of(rows: list[tuple[str, int]], size: int) -> list[pa.RecordBatch]:
    return [
        pa.record_batch({"k": [k for k, _ in rows[i : i + size]], "v": [v for _, v in rows[i : i + size]]})
        for i in range(0, len(rows), size)
    ]


def sums(state: int, row: tuple[str, int]) -> tuple[int, list[tuple[str, int]]]:
    return state + row[1], [(row[0], state + row[1])]


def test_partitioned_over_columns_keeps_row_order_and_batches() -> None:
    rng = random.Random(5)
    rows = [(rng.choice("abcd"), rng.randrange(100)) for _ in range(100)]
    held: dict[str, int] = {}
    expected = []
    for k, v in rows:
        held[k] = held.get(k, 0) + v
        expected.append({"k": k, "sum": held[k]})
    step = ordered.partitioned(
        sums, key="k", initial=0, schema="k string, sum bigint", finish=lambda key, state: [(key.upper(), state)]
    )
    out = list(ordered.Pipeline([step]).run(batches_of(rows, 8), mode="inline", chunk=5))
    assert [b.num_rows for b in out] == [8] * 12 + [4, 4]
    assert [row for b in out[:-1] for row in b.to_pylist()] == expected
    assert out[-1].to_pylist() == [{"k": k.upper(), "sum": v} for k, v in held.items()]


def test_partitioned_per_batch_and_key() -> None:
    def step(state: int, batch: pa.RecordBatch) -> tuple[int, list[Any]]:
        return state + batch.num_rows, [(batch.column("k")[0].as_py(), state + batch.num_rows)]

    batches = batches_of([("b", 1), ("a", 2), ("b", 3), ("a", 4), ("c", 5), ("a", 6)], 3)
    pipeline = ordered.Pipeline([ordered.partitioned(step, key=["k"], initial=0, batches=True)])
    assert list(pipeline.run(batches)) == [("b", 2), ("a", 1), ("a", 3), ("c", 1)]


def test_rows_and_batches_are_inverse() -> None:
    batches = batches_of([("b", 1), ("a", 2), ("b", 3)], 2)
    pipeline = ordered.Pipeline(
        [ordered.rows(), ordered.filter(lambda r: r[1] != 2), ordered.batches(batches[0].schema)]
    )
    assert pa.Table.from_batches(pipeline.run(batches)).to_pylist() == [{"k": "b", "v": 1}, {"k": "b", "v": 3}]


def values_of(results: Iterable[Any]) -> list[Any]:
    """The rows of all batches; an exception as its type, its text and its notes."""
    found: list[Any] = []
    it = iter(results)
    while True:
        try:
            found += [tuple(row.values()) for row in next(it).to_pylist()]
        except StopIteration:
            return found
        except Exception as error:
            found.append((type(error), str(error), list(error.__notes__)))


@pytest.mark.parametrize("chunk", [1, 20])
def test_rows_of_every_kind_may_stand_beside_each_other(chunk: int) -> None:
    rows = [{"n": n, "t": str(n)} if n % 3 else (n, str(n)) if n % 2 else [n, str(n)] for n in range(20)]
    pipeline = ordered.Pipeline([ordered.batches("n bigint, t string")])
    for order in (rows, rows[::-1]):
        wanted = [tuple(row.values()) if isinstance(row, dict) else tuple(row) for row in order]
        assert values_of(pipeline.run(order, mode="inline", chunk=chunk)) == wanted

    def step(state: Any, item: int) -> Any:
        return state, [{"n": item, "t": "dict"}, (item, "tuple")]

    keyed = ordered.partitioned(step, key=lambda n: n % 2, initial=0, schema="n bigint, t string")
    found = values_of(ordered.Pipeline([keyed]).run(range(20), mode="inline", chunk=chunk))
    assert found == [(n, kind) for n in range(20) for kind in ("dict", "tuple")]


@pytest.mark.parametrize("mode", ["inline", "threads", "auto"])
@pytest.mark.parametrize("chunk", [1, 2, 7, 100, None])
def test_a_row_that_does_not_fit_costs_no_other_row(mode: str, chunk: int | None) -> None:
    rows: list[Any] = [(n,) for n in range(1_000)]
    bad = {0: ("bad",), 500: (1, 2), 501: (0.5,), 700: None, 999: {"m": 1}}
    for place, row in bad.items():
        rows[place] = row
    pipeline = ordered.Pipeline([ordered.batches("n bigint")])
    found = values_of(pipeline.run(rows, mode=mode, chunk=chunk, workers=1 if mode == "inline" else 2))
    assert [value for value in found if value[0] is not errors.UserFunctionError] == [
        row for place, row in enumerate(rows) if place not in bad
    ]
    for place in bad:
        kind, text, notes = found[place]
        assert kind is errors.UserFunctionError and text.startswith("batches needs rows that fit its schema; one ")
        assert notes == [f"item {place} of the input, in batches"]


def test_a_row_of_an_item_or_of_the_end_that_does_not_fit_costs_no_other_row() -> None:
    def step(state: int, item: int) -> Any:
        return state + 1, [(item, 1), (item, "bad" if item == 3 else 2), (item, 3)]

    def finish(key: int, state: int) -> Any:
        return [(key, "bad" if key == 1 else state)]

    keyed = ordered.partitioned(step, key=lambda n: n % 3, initial=0, finish=finish, schema="n bigint, v bigint")
    found = values_of(ordered.Pipeline([keyed]).run(range(6), mode="inline"))
    wanted: list[Any] = [(n, v) for n in range(6) for v in (1, 2, 3)] + [(0, 2), (1, 2), (2, 2)]
    for place, where in ((10, "item 3 of the input"), (19, "at the end of the input")):
        kind, text, notes = found[place]
        assert kind is errors.UserFunctionError and "has 'bad' in column 'v', expected int64" in text
        assert notes == [f"{where}, in {keyed.name}"]
        del wanted[place]
        wanted.insert(place, found[place])
    assert found == wanted


def count_rows(state: int, rows: Any) -> Any:
    return state + (rows.num_rows if isinstance(rows, pa.RecordBatch) else 1), None


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("key", ["k", ["k"], ["name", "k"]])
@pytest.mark.parametrize("mode", ["inline", "threads", "processes"])
def test_a_nan_of_a_column_is_one_key(mode: str, key: Any, batches: bool) -> None:
    nan = float("nan")
    batch = pa.record_batch({"k": [nan, nan, 1.0, None, nan, -0.0, 0.0], "name": ["x"] * 7})
    coded = pa.record_batch({"k": batch["k"].dictionary_encode(), "name": batch["name"]})
    step = ordered.partitioned(count_rows, key=key, initial=0, batches=batches, finish=_told)
    found = list(ordered.Pipeline([step]).run([batch, batch, coded], mode=mode, workers=2, chunk=1))
    keys = [number if isinstance(number, (float, type(None))) else number[-1] for number, _ in found]
    assert list(map(repr, keys)) == ["nan", "1.0", "None", "-0.0"] and [count for _, count in found] == [9, 3, 3, 6]


@pytest.mark.parametrize("mode", ["inline", "threads"])
@pytest.mark.parametrize("chunk", [1, 3])
def test_a_keyed_flow_that_has_failed_says_so_for_all_that_follows(mode: str, chunk: int) -> None:
    def picky(batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch["v"][0].as_py() == 2:
            raise Boom("two")
        return batch

    flow = pk.Flow("k string, v bigint").map_batches(picky, schema="k string, v bigint").key_by("k").agg(n=pk.count())
    batches: list[Any] = batches_of([("a", v) for v in range(5)], 1)
    line = ordered.Pipeline([ordered.flow(flow, name="counts")])
    # What is no batch, or not of its schema, does not reach the flow.
    items = [7, pa.record_batch({"w": [1]}), *batches]
    found: list[Any] = []
    with line.run(items, mode=mode, workers=2, chunk=chunk) as results:
        while True:
            try:
                found.append(next(results))
            except StopIteration:
                break
            except Exception as error:
                found.append(error)
    assert [type(one) for one in found[:2]] == [errors.UserFunctionError, errors.SchemaError]
    lost = [one for one in found if isinstance(one, errors.OrderedError)]
    assert len(lost) == 3 and isinstance(first := lost[0].__cause__, errors.UserFunctionError) and first in found
    places = ("item 5 of the input", "item 6 of the input", "at the end of the input")
    for error, where in zip(lost, places, strict=True):
        assert error.__cause__ is first and error.__notes__ == [f"{where}, in flow counts"]
        text = str(error)
        assert text.startswith("flow counts: its state was lost when item 4 of the input failed (UserFunctionError: ")
        assert text.endswith("run the pipeline again") and "Boom: two" in text


def test_flows_are_steps() -> None:
    batches = batches_of([(k, v) for v, k in enumerate("abcabcaab")], 2)
    counts = pk.Flow("k string, v bigint").key_by("k").agg(n=pk.count(), emit="final")
    double = pk.Flow("k string, v bigint").map_batches(
        lambda b: pa.record_batch({"k": b.column("k"), "v": pa.array([2 * v for v in b.column("v").to_pylist()])}),
        schema="k string, v bigint",
    )
    pipeline = ordered.Pipeline([ordered.flow(double), ordered.flow(counts)])
    found = [row for b in pipeline.run(batches) for row in b.to_pylist()]
    assert sorted((row["k"], row["n"]) for row in found) == [("a", 4), ("b", 3), ("c", 2)]
    doubled = [row["v"] for b in ordered.Pipeline([ordered.flow(double)]).run(batches) for row in b.to_pylist()]
    assert doubled == [2 * v for v in range(9)]


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: pk.ordered_map(3, []), "must be a function"),
    (lambda: pk.ordered_map(abs, [], workers=0), "workers must be"),
    (lambda: pk.ordered_map(abs, [], workers=True), "workers must be"),
    (lambda: pk.ordered_map(abs, [], workers=int), "workers must be a number of workers from 1 to 1024, got <class"),
    (lambda: pk.ordered_map(abs, [], in_flight=0), "in_flight must be"),
    (lambda: pk.ordered_map(abs, [], chunk=1.5), "chunk must be"),
    (lambda: pk.ordered_map(abs, [], in_flight_bytes="much"), "in_flight_bytes='much' must be a number of bytes"),
    (lambda: pk.ordered_map(abs, [], in_flight_bytes=0), "in_flight_bytes must be"),
    (lambda: pk.ordered_map(abs, [], mode="fork"), "mode must be one of"),
    (lambda: pk.ordered_map(abs, [], timeout=0), "timeout=0 must be"),
    (lambda: pk.ordered_map(abs, [], timeout=2**70), "and at most 2e[+]06 s"),
    (lambda: pk.ordered_map(abs, [], timeout=1, mode="inline"), "timeout= needs"),
    (lambda: ordered.Pipeline([]), "at least one step"),
    (lambda: ordered.Pipeline(None), r"Pipeline\(None\): give a list of steps"),  # type: ignore[arg-type]
    (lambda: ordered.Pipeline([abs]), "step 0 of the pipeline"),
    (lambda: ordered.Pipeline([ordered.map(abs)], queue="shared"), "breaks the order within a key"),
    (lambda: ordered.Pipeline([ordered.map(abs)], scheduler="fifo"), "scheduler must be one of"),
    (lambda: ordered.map(None), "must be a function"),
    (lambda: ordered.partitioned(abs, key=3), "key must be"),
    (lambda: ordered.partitioned(abs, key=abs, batches=True), "need keys that are columns"),
    (lambda: ordered.partitioned(abs, key=abs, partitions=0), "partitions must be"),
    (lambda: ordered.partitioned(abs, key=abs, finish=3), "finish must be a function"),
    (lambda: ordered.partitioned(abs, key="k", columns=[]), r"columns must be a list of names, one at least, got \[\]"),
    (lambda: ordered.partitioned(abs, key="k", columns=5), "columns must be a list of names, one at least, got 5"),  # type: ignore[arg-type]
    (lambda: ordered.partitioned(abs, key="k", columns="k"), "columns must be a list of names"),
    (lambda: ordered.partitioned(abs, key="k", columns=[1]), r"columns must be .* got \[1\]"),  # type: ignore[list-item]
    (lambda: ordered.flow(abs), "needs a penstock.Flow"),
]


@pytest.mark.parametrize(("make", "text"), BAD, ids=[text for _, text in BAD])
def test_bad_arguments_are_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(errors.ConfigError, match=text):
        make()


def test_an_input_that_is_none_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="not iterable"):
        pk.ordered_map(abs, 3)  # type: ignore[arg-type]


def test_a_pipeline_is_a_value() -> None:
    pipeline = ordered.Pipeline([ordered.map(lambda x: x + 1), STEPS["partitioned"]()], scheduler="lip")
    copy = cloudpickle.loads(cloudpickle.dumps(pipeline))
    assert copy.scheduler == "lip" and repr(copy) == repr(pipeline)
    assert outcomes(copy.run(range(30))) == outcomes(pipeline.run(range(30))) == outcomes(pipeline.run(range(30)))
    with pytest.raises(TypeError, match="cannot be pickled"):
        cloudpickle.dumps(pipeline.run([]))


def test_an_iterator_used_by_its_own_function_says_so() -> None:
    results: ordered.OrderedIterator

    def f(x: int) -> Any:
        return next(results) if x == 0 else x

    results = pk.ordered_map(f, range(3), mode="inline", chunk=1)
    with pytest.raises(errors.OrderedError, match="is being used"):
        next(results)
    assert list(results) == [1, 2]


async def fetched(x: int) -> int:
    return x


async def fetches(x: int) -> Any:
    yield x


class Fetching:
    async def __call__(self, x: int) -> int:
        return x


@pytest.mark.parametrize("f", [fetched, fetches, Fetching(), functools.partial(fetched, 1), Fetching().__call__])
def test_coroutine_functions_are_refused_where_they_are_given(f: Any) -> None:
    given: list[Callable[[], Any]] = [
        lambda: pk.ordered_map(f, [1]),
        lambda: ordered.map(f),
        lambda: ordered.filter(f),
        lambda: ordered.flat_map(f),
        lambda: ordered.map_batches(f),
        lambda: ordered.stateful(f),
        lambda: ordered.stateful(sums, finish=f),
        lambda: ordered.stateful(sums, initial=f),
        lambda: ordered.partitioned(f, key=abs),
        lambda: ordered.partitioned(sums, key=f),
    ]
    for give in given:
        with pytest.raises(
            errors.ConfigError, match=r"(fetched|fetches|Fetching\S*) is an? (coroutine|async generator) function"
        ):
            give()


@pytest.mark.parametrize("mode", ["inline", "threads"])
@pytest.mark.usefixtures("all_awaited")
def test_a_coroutine_that_is_returned_all_the_same_is_an_error_at_its_place(mode: str) -> None:
    def some(x: int) -> Any:
        return fetched(x) if x == 2 else x

    for step in (ordered.map(some), ordered.filter(some)):
        with pk.Pipeline([step]).run([1, 2, 3], mode=mode, workers=2) as results:
            assert next(results) == 1
            with pytest.raises(errors.UserFunctionError, match=r"returned a coroutine \(fetched\)") as raised:
                next(results)
            assert raised.value.item == 2 - 1
            assert next(results) == 3


def of_coroutines(x: int) -> Any:
    return [x, fetched(x)] if x == 20 else [x]


OF_COROUTINES: list[tuple[Callable[[], ordered.Step], list[Any]]] = [
    (lambda: ordered.flat_map(of_coroutines), [10, 20, 1, 30]),
    (lambda: ordered.flat_map(lambda x: fetched(x) if x == 20 else [x]), [10, None, 30]),
    (lambda: ordered.map_batches(lambda xs: [fetched(x) if x == 20 else x for x in xs]), [10, 1, 30]),
    (lambda: ordered.map_batches(lambda xs: fetched(0) if xs == [20] else xs), [10, 1, 30]),
    (lambda: ordered.stateful(lambda s, x: (s, of_coroutines(x))), [10, 20, 1, 30]),
    (lambda: ordered.stateful(lambda s, x: fetched(x) if x == 20 else (s, [x])), [10, 1, 30]),
    (lambda: ordered.stateful(lambda s, x: (s, fetched(x) if x == 20 else [x])), [10, 1, 30]),
    (lambda: ordered.stateful(lambda s, x: (s, [x]), finish=lambda s: [fetched(0)]), [10, 20, 30, None]),
    (lambda: ordered.stateful(lambda s, x: (s, [x]), initial=lambda: fetched(0)), [None] * 3),
    (lambda: ordered.partitioned(lambda s, x: (s, of_coroutines(x)), key=lambda x: x % 3), [10, 20, 1, 30]),
    (lambda: ordered.partitioned(lambda s, x: (s, [x]), key=lambda x: fetched(x) if x == 20 else x), [10, 1, 30]),
]


@pytest.mark.parametrize(
    ("mode", "step", "expected"),
    [
        *(("inline", *case) for case in OF_COROUTINES),
        *(("threads", *case) for case in OF_COROUTINES),
        *(("processes", *OF_COROUTINES[place]) for place in (0, 4, -1)),
    ],
)
@pytest.mark.usefixtures("all_awaited")
def test_a_coroutine_among_outputs_is_an_error_at_its_place(
    mode: str, step: Callable[[], ordered.Step], expected: list[Any]
) -> None:
    with pk.Pipeline([step()]).run([10, 20, 30], mode=mode, workers=2, chunk=1) as results:
        got: list[Any] = []
        while True:
            try:
                got += results
                break
            except errors.UserFunctionError as error:
                assert re.search(r"returned a coroutine \(\S*fetched\), which nobody awaits", str(error))
                got.append(error.item)
    assert got == expected


def test_a_fork_of_an_inline_run_whose_flow_has_a_thread_is_refused_there() -> None:
    batches = batches_of([(k, v) for v, k in enumerate("abcabc")], 2)
    counts = pk.Flow("k string, v bigint").key_by("k").agg(n=pk.count(), emit="final")
    run = ordered.Pipeline([ordered.flow(counts)]).run(["none", *batches], mode="inline", chunk=1)
    with pytest.raises(errors.UserFunctionError, match="needs items that are record batches"):
        next(run)

    def child() -> None:
        with pytest.raises(errors.ForkError, match="forked child"):
            next(run)
        run.close()

    in_child(child)
    assert [row["n"] for batch in run for row in batch.to_pylist()] == [2, 2, 2]


def test_a_fork_of_an_inline_run_without_threads_goes_on_there() -> None:
    run = pk.ordered_map(abs, range(4), mode="inline", chunk=1)
    assert next(run) == 0
    in_child(lambda: outcomes(run) == [1, 2, 3] or os._exit(1))
    assert list(run) == [1, 2, 3]


@pytest.mark.parametrize("mode", ["inline", "threads"])
def test_no_result_comes_after_a_function_has_closed_its_run(mode: str) -> None:
    runs: list[ordered.OrderedIterator[int]] = []

    def f(x: int) -> int:
        if x == 21:
            runs[0].close()
        return x

    runs.append(pk.ordered_map(f, range(64), mode=mode, chunk=16, workers=1))
    found = outcomes(runs[0])
    assert found == list(range(len(found))) and len(found) <= 16, found
    assert outcomes(runs[0]) == []


@pytest.mark.parametrize("mode", ["threads", "processes"])
@pytest.mark.parametrize("workers", [1, 2])
def test_no_more_functions_at_a_time_than_workers_with_those_of_keys(mode: str, workers: int) -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def busy() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.002)
        with lock:
            inside -= 1

    class Key:
        """Makes keys here, whatever the mode, and pickles without the lock."""

        def __call__(self, x: int) -> int:
            busy()
            return x % 3

        def __reduce__(self) -> Any:
            return (getattr, (operator, "pos"))

    if mode == "processes":
        step: Any = add
    else:

        def step(total: int, x: int) -> tuple[int, list[int]]:
            busy()
            return add(total, x)

    run = ordered.Pipeline([ordered.partitioned(step, key=Key(), initial=0)])
    found = outcomes(run.run(range(60), mode=mode, workers=workers, chunk=1))
    assert found == [sum(range(x % 3, x + 1, 3)) for x in range(60)]
    assert most <= workers


def add(total: int, x: int) -> tuple[int, list[int]]:
    return total + x, [total + x]


def spin(x: Any) -> Any:
    if x == 3:
        while os.getpid() == HERE:
            pass
    return x


HERE = os.getpid()


def spin_at_end(key: int, total: int) -> list[int]:
    return [spin(total)]


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_a_function_of_keys_that_takes_too_long_ends_the_run(mode: str) -> None:
    pipeline = ordered.Pipeline([ordered.partitioned(add, key=spin, initial=0)])
    found, late = until_late(pipeline.run(range(6), mode=mode, workers=2, timeout=6))
    # Where processes are still starting, the items before it have no results yet.
    assert found == [0, 1, 2][: 3 if mode == "threads" else len(found)]
    assert (late.item, late.last) == (3, 3) and late.step == "the key of partitioned add"
    assert "for item 3 of the input" in str(late) and "in this process in every mode" in str(late)


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_the_end_of_a_key_that_takes_too_long_ends_the_run(mode: str) -> None:
    pipeline = ordered.Pipeline([ordered.partitioned(add, key=lambda x: 0, initial=0, finish=spin_at_end)])
    found, late = until_late(pipeline.run(iter([1, 2]), mode=mode, workers=2, timeout=4))
    assert found == [1, 3][: len(found)] and late.step.endswith("partitioned add")
    assert "the end of the input" in str(late) and late.last is None and "-1" not in str(late)


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_what_is_behind_the_end_of_keys_and_takes_too_long_is_named(mode: str) -> None:
    keyed = ordered.partitioned(add, key=lambda x: 0, initial=0, finish=lambda key, total: [3])
    flow = pk.Flow("k bigint").map_batches(lambda b: spin(b.num_rows) and b)
    counts = ordered.flow(flow.key_by("k").agg(n=pk.count(), emit="final"))
    batch = ordered.map(lambda n: pa.record_batch({"k": [0] * n}))
    run = ordered.Pipeline([keyed, batch, counts]).run([1], mode=mode, workers=2, timeout=4, chunk=8)
    found, late = until_late(run)
    assert (
        found == [] and "for items from 0 to the end of the input" in str(late) and (late.item, late.last) == (0, None)
    )


def until_late(run: Any) -> tuple[list[Any], errors.ItemTimeout]:
    """What comes before an ItemTimeout, behind which nothing comes."""
    found: list[Any] = []
    with pytest.raises(errors.ItemTimeout) as late:
        for result in run:
            found.append(result)
    assert list(run) == []
    return found, late.value


@pytest.mark.parametrize("kind", ["map", "key", "step", "finish"])
def test_an_interrupt_that_a_function_in_a_thread_raises_is_an_error_at_its_place(kind: str) -> None:
    def bad(x: int) -> int:
        if x == 3:
            raise KeyboardInterrupt("its own")
        return x

    steps = {
        "map": ordered.map(bad),
        "key": ordered.partitioned(lambda s, x: (0, [x]), key=bad),
        "step": ordered.stateful(lambda s, x: (0, [bad(x)])),
        "finish": ordered.stateful(lambda s, x: (0, [x]), finish=lambda s: [bad(3)]),
    }
    run = ordered.Pipeline([steps[kind]]).run(range(6), mode="threads", workers=2, chunk=1)
    found: list[Any] = []
    for _ in range(7):
        try:
            found.append(next(run, "end"))
        except KeyboardInterrupt as error:
            found.append(str(error))
    wanted: list[Any] = [0, 1, 2, 3, 4, 5, "end"]
    wanted[6 if kind == "finish" else 3] = "its own"
    assert found == wanted


def rows_of(results: Iterable[pa.RecordBatch]) -> list[Any]:
    return [found.column(0).to_pylist() if isinstance(found, pa.RecordBatch) else found for found in outcomes(results)]


def test_rows_leave_a_spark_task_before_the_error_behind_them() -> None:
    batch = pa.record_batch({"id": list(range(10))})

    def boom(row: dict[str, int]) -> tuple[Any, ...]:
        if row["id"] == 5:
            raise Boom("five")
        return (row["id"],)

    def late(row: dict[str, int]) -> tuple[Any, ...]:
        return ("five" if row["id"] == 5 else row["id"], "six" if row["id"] == 6 else 0)

    def short(row: dict[str, int]) -> tuple[Any, ...]:
        return (row["id"],) * (1 + (row["id"] == 5))

    ran = pk.spark.ordered(boom, "id bigint", rows=True, workers=1, mode="inline")
    first, (kind, text) = rows_of(ran([batch]))
    assert first == [0, 1, 2, 3, 4] and kind is errors.UserFunctionError and "row 5" in text and "five" in text
    ran = pk.spark.ordered(short, "id bigint", rows=True, workers=1, mode="inline")
    first, (kind, text) = rows_of(ran([batch]))
    assert first == [0, 1, 2, 3, 4] and kind is errors.SchemaError and "result 5 has 2 values" in text
    ran = pk.spark.ordered(late, "id bigint, n bigint", rows=True, workers=1, mode="inline")
    first, (kind, text) = rows_of(ran([batch]))
    assert first == [0, 1, 2, 3, 4] and kind is errors.SchemaError and "result 5 has 'five' in column 'id'" in text

    def failing() -> Iterator[pa.RecordBatch]:
        yield batch
        raise Boom("input")

    ran = pk.spark.ordered(lambda row: (row["id"],), "id bigint", rows=True, workers=1, mode="inline")
    assert rows_of(ran(failing())) == [list(range(10)), (Boom, "input")]
