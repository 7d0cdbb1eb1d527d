"""Flat maps, bounded parts and loops of flows, on the local host and inside partitions."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as pk
from engine_support import wait_for
from examples_support import examples
from penstock import ordered
from penstock.errors import ConfigError, PlanError, SchemaError, UserFunctionError


def up_to(n: int) -> Iterator[tuple[int]]:
    return ((i,) for i in range(n))


def table(**columns: list[Any]) -> pa.Table:
    return pa.table(columns)


def column(rows: pa.Table, name: str = "i") -> list[Any]:
    values: list[Any] = rows.column(name).to_pylist()
    return values


def halves(batch: pa.RecordBatch) -> pa.RecordBatch:
    half = pc.divide(batch["n"], 2)
    return pa.record_batch({"n": half, "again": pc.greater(half, 0)})


# What comes out


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    values=st.lists(st.integers(0, 6), max_size=30),
    batches=st.none() | st.integers(1, 4),
    batch_size=st.none() | st.integers(1, 5),
    rows_of_a_batch=st.integers(1, 40),
    workers=st.integers(1, 2),
)
def test_bounds_change_nothing(
    values: list[int], batches: int | None, batch_size: int | None, rows_of_a_batch: int, workers: int
) -> None:
    def twice(part: pk.Flow) -> pk.Flow:
        plus = part.map_batches(lambda batch: pa.record_batch({"n": pc.add(batch["n"], 1)}))
        once = plus.flat_map(up_to, "i bigint", rows=True)
        return once.bounded(lambda inner: inner.flat_map(up_to, "i bigint", rows=True), batches=1)

    flow = pk.Flow("n bigint").bounded(twice, batches=batches, batch_size=batch_size)
    given = table(n=pa.array(values, pa.int64()))
    expected = [j for n in values for i in range(n + 1) for j in range(i)]
    got = column(flow.collect(given, workers, batch_rows=rows_of_a_batch))
    assert (got if workers == 1 else sorted(got)) == (expected if workers == 1 else sorted(expected))
    pieces = flow.map_in_arrow()(given.to_batches(max_chunksize=rows_of_a_batch))
    assert [value for piece in pieces for value in piece.column("i").to_pylist()] == expected


def test_a_batch_may_become_any_number_of_batches() -> None:
    def slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch | pa.Table]:
        yield batch.slice(0, 0)
        yield from (batch.slice(at, 1) for at in range(batch.num_rows))
        yield pa.table({"n": range(3000)})

    flow = pk.Flow("n bigint").flat_map(slices)
    assert column(flow.collect(table(n=[7, 8])), "n") == [7, 8, *range(3000)]
    assert column(pk.Flow("n bigint").flat_map(lambda batch: []).collect(table(n=[7])), "n") == []


def test_keyed_steps_stand_behind() -> None:
    flow = pk.Flow("n bigint").flat_map(up_to, "i bigint", rows=True)
    counted = flow.key_by("i").agg(n=pk.count(), emit="final")
    for workers in (1, 2):
        rows = counted.collect(table(n=[3, 2, 3]), workers).to_pylist()
        assert sorted((row["i"], row["n"]) for row in rows) == [(0, 3), (1, 3), (2, 2)]

    def number(state: int | None, i: int) -> tuple[int, tuple[int, int]]:
        seen = (state or 0) + 1
        return seen, (i, seen)

    order = flow.key_by("i").stateful_map(number, schema="i bigint, nth bigint")
    again = order.flat_map(lambda i, nth: [(i * 10 + nth,)] * 2, "i bigint", rows=True)
    got = column(again.collect(table(n=[2, 2]), 2))
    assert sorted(got) == [1, 1, 2, 2, 11, 11, 12, 12]


def test_ten_levels() -> None:
    def nested(part: pk.Flow, levels: int) -> pk.Flow:
        part = part.flat_map(lambda n: [(n,), (n + 1,)], rows=True)
        return part if levels == 1 else part.bounded(lambda inner: nested(inner, levels - 1), batches=1, batch_size=2)

    flow = pk.Flow("n bigint").bounded(lambda part: nested(part, 10), batches=1, batch_size=1)
    got = column(flow.collect(table(n=[0])), "n")
    assert sorted(got) == sorted(sum(bits) for bits in itertools.product((0, 1), repeat=10))


# Loops


def test_rows_go_around_until_they_leave() -> None:
    flow = pk.Flow("n bigint").iterate(lambda part: part.map_batches(halves, "n bigint, again boolean"))
    values = [1000, 1, 0, 17]
    for workers in (1, 2):
        assert column(flow.collect(table(n=values), workers), "n") == [0] * 4
    assert [row for batch in flow.map_in_arrow()(table(n=values).to_batches()) for row in batch["n"].to_pylist()] == [
        0
    ] * 4


@pytest.mark.parametrize("bounds", [{}, {"batches": 1, "batch_size": 1}, {"batches": 3, "batch_size": 2}])
def test_a_loop_that_branches(bounds: dict[str, Any]) -> None:
    def leaves(depth: int, label: str) -> Iterator[tuple[int, str, bool | None]]:
        """A tree of depth 4, one node at a time: what is finished leaves, the rest goes around."""
        if depth == 4:
            yield depth, label, None
            return
        yield depth, label, False
        for branch in "ab":
            yield depth + 1, label + branch, True

    def body(part: pk.Flow) -> pk.Flow:
        return part.flat_map(leaves, "depth bigint, label string, again boolean", rows=True)

    flow = pk.Flow("depth bigint, label string").bounded(lambda part: part.iterate(body), **bounds)
    expected = sorted("".join(label) for depth in range(5) for label in itertools.product("ab", repeat=depth))
    for workers in (1, 2):
        assert sorted(column(flow.collect(table(depth=[0], label=[""]), workers), "label")) == expected


def test_a_bounded_part_and_a_loop_in_a_loop() -> None:

    def with_left(batch: pa.RecordBatch) -> pa.RecordBatch:
        half = pc.divide(batch["n"], 2)
        return pa.record_batch({"n": half, "left": batch["left"], "again": pc.greater(half, 0)})

    def down(n: int, left: int) -> list[tuple[int, int, bool]]:
        return [(n + 9, left - 1, left > 1)]

    def outer(part: pk.Flow) -> pk.Flow:
        inner = part.iterate(lambda p: p.map_batches(with_left, "n bigint, left bigint, again boolean"))
        return inner.bounded(
            lambda p: p.flat_map(
                lambda n, left: [(n + 9, left - 1, left > 1)], "n bigint, left bigint, more boolean", rows=True
            ),
            batches=1,
            batch_size=1,
        )

    flow = pk.Flow("n bigint, left bigint").iterate(outer, again="more")
    got = flow.collect(table(n=[5, 6], left=[3, 7])).to_pylist()
    assert got == [{"n": 9, "left": 0}] * 2


# Memory


def wide(megabytes: int) -> Iterator[pa.RecordBatch]:
    """So many megabytes in blocks of one, each made when it is asked for."""
    for at in range(megabytes):
        yield pa.record_batch({"at": pa.array([at] * 64), "data": pa.array([bytes([at % 251]) * (1 << 14)] * 64)})


def surge() -> pk.Flow:
    return pk.Flow("n bigint").bounded(
        lambda part: part.flat_map(lambda batch: wide(batch["n"][0].as_py()), "at bigint, data binary"), batches=4
    )


def in_a_fresh_process(code: str) -> str:
    """What a program prints. In a process of its own: a resident set that others have grown does not show growth."""
    program = f"import sys; sys.path[:0] = {[str(Path(__file__).parent)]!r}\nfrom test_flow_bounded import *\n"
    done = subprocess.run([sys.executable, "-c", program + code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


RESIDENT = """
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 20

def grown(batches):
    next(batches); least = resident(); most = total = 0
    for batch in batches:
        total += batch.nbytes >> 20
        most = max(most, resident() - least)
    return most, total
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "batches",
    [
        "surge().map_in_arrow()(iter([pa.record_batch({'n': [500]})]))",
        "surge().run(table(n=[500]))",
        "surge().run(table(n=[500, 3]), workers=2)",
    ],
)
def test_a_surge_keeps_memory_flat(batches: str) -> None:
    most, total = map(int, in_a_fresh_process(RESIDENT + f"print(*grown({batches}))").split())
    assert total >= 480 and most < 200, f"{most} MiB for {total} MiB of rows"


PEAK = """
def sizes(batch):
    return pa.record_batch({"at": batch["at"], "size": pc.binary_length(batch["data"]).cast(pa.int64())})

def peak():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("VmHWM")).split()[1]) >> 10

flow = surge().map_batches(sizes, "at bigint, size bigint").key_by("at").agg(size=pk.sum("size"), emit="final")
flow.collect(table(n=[3]))
before = peak()
total = pc.sum(flow.collect(table(n=[500]))["size"]).as_py()
print(peak() - before, total >> 20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_rows_that_wait_for_a_keyed_step_hold_nothing_but_themselves() -> None:
    most, total = map(int, in_a_fresh_process(PEAK).split())
    assert total == 500 and most < 200, f"{most} MiB, of which the rows are 16 bytes for each of {total} MiB"


def test_nothing_is_drawn_that_nobody_takes() -> None:
    drawn = itertools.count()

    def endless(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        for at in drawn:
            yield pa.record_batch({"n": [at] * 5000})

    flow = pk.Flow("n bigint").flat_map(endless).map_batches(lambda batch: batch)
    pieces = flow.map_in_arrow()(iter([pa.record_batch({"n": [1]})]))
    for _ in range(5):
        next(pieces)
    assert next(drawn) < 40
    with pk.Flow("n bigint").flat_map(endless).start() as session:
        rows = session.run(table(n=[1]))
        assert next(rows).num_rows >= 5000
    for rows in flow.run(table(n=[1]), workers=2):
        assert rows.num_rows > 0
        break


# Statistics


def test_the_maximum_is_within_bounds_and_reaches_them() -> None:
    def outer(part: pk.Flow) -> pk.Flow:
        inner = part.flat_map(up_to, "i bigint", rows=True)
        return inner.bounded(lambda p: p.flat_map(up_to, "j bigint", rows=True), batches=2, batch_size=7)

    flow = pk.Flow("n bigint").bounded(outer, batches=3, batch_size=5)
    with flow.start() as session:
        seen = sum(batch.num_rows for batch in session.run(table(n=[30, 20])))
        told = session.scopes()
    assert seen == sum(range(30)) + sum(range(20))
    first, second = told
    assert (first.step, second.step) == ("step 0 (bounded)", "step 0.1 (bounded)")
    assert (first.maximum, first.batches, first.maximum_rows) == (3, 3, 15)
    assert (second.maximum, second.batches, second.maximum_rows) == (2, 2, 14)
    assert (first.admitted_rows, second.admitted_rows) == (50, seen)
    assert {(scope.phase, scope.unfinished, scope.holding) for scope in told} == {("fixed", 0, None)}


def test_a_run_into_a_sink_and_a_partition_tell_their_bounds(caplog: pytest.LogCaptureFixture) -> None:
    flow = pk.Flow("n bigint").bounded(
        lambda part: part.flat_map(up_to, "i bigint", rows=True), batches=2, batch_size=3
    )
    got: list[pa.RecordBatch] = []
    summary = flow.run_into(got.append, table(n=[5, 6]))
    assert summary.output_rows == 11 and [scope.maximum for scope in summary.scopes] == [2]
    with caplog.at_level(logging.INFO, "penstock"):
        assert sum(batch.num_rows for batch in flow.map_in_arrow()(table(n=[5, 6]).to_batches())) == 11
    assert "'admitted_rows': 11" in caplog.text and "'maximum': 2" in caplog.text


def test_bins_move_while_rows_expand() -> None:
    flow = pk.Flow("n bigint").flat_map(up_to, "i bigint", rows=True).key_by("i").agg(n=pk.count(), emit="final")
    with flow.start(workers=2) as session:

        def source() -> Iterator[pa.Table]:
            for at in range(12):
                yield table(n=[at * 20] * 3)
                session.migrate(to=[1 - at % 2] * 256).wait(60)

        got = {row["i"]: row["n"] for batch in session.run(source()) for row in batch.to_pylist()}
    assert got == {i: 3 * sum(at * 20 > i for at in range(12)) for i in range(220)}


def test_a_pipeline_takes_all_that_a_flow_makes_of_a_batch() -> None:
    flow = pk.Flow("n bigint").flat_map(up_to, "i bigint", rows=True)
    given = [pa.record_batch({"n": [20_000]}), pa.record_batch({"n": [2]})]
    made = list(pk.Pipeline([ordered.flow(flow)]).run(given, workers=1))
    assert sum(batch.num_rows for batch in made) == 20_002
    order = flow.key_by("i").stateful_map(lambda state, i: (1, (i,)), schema="i bigint")
    assert sum(batch.num_rows for batch in pk.Pipeline([ordered.flow(order)]).run(given, workers=1)) == 20_002


def test_bounds_that_are_not_given_are_found() -> None:
    flow = pk.Flow("n bigint").bounded(lambda part: part.flat_map(up_to, "i bigint", rows=True), memory="100g")
    with flow.start() as session:
        assert sum(batch.num_rows for batch in session.run(table(n=[200_000]))) == 200_000
        (scope,) = session.scopes()
    assert scope.phase in ("growing", "settled") and 1 <= scope.maximum <= 16
    small = pk.Flow("n bigint").bounded(
        lambda part: part.flat_map(up_to, "i bigint", rows=True).map_batches(slow), batch_size=64, memory="1m"
    )
    with small.start() as session:
        assert sum(batch.num_rows for batch in session.run(table(n=[10_000]))) == 10_000
        (scope,) = session.scopes()
    assert scope.shrinks > 0 and scope.batches == 2, "a process of one megabyte is short of memory"


def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
    time.sleep(0.001)
    return batch


def test_a_loop_that_never_ends_says_what_it_holds_and_can_be_left() -> None:
    def forever(part: pk.Flow) -> pk.Flow:
        endless = part.iterate(lambda p: p.flat_map(lambda n: [(n, True)], "n bigint, again boolean", rows=True))
        return endless

    flow = pk.Flow("n bigint").bounded(forever, batches=2, batch_size=3)
    for workers in (1, 2):
        with flow.start(workers) as session:
            rows = session.run(table(n=[1, 2, 3, 4, 5, 6, 7]))
            with pytest.raises(KeyboardInterrupt), interrupted():
                next(rows)
    with flow.start() as session:
        rows = session.run(table(n=[1, 2, 3, 4, 5, 6, 7]))

        def wait() -> None:
            with contextlib.suppress(pk.PenstockError):
                next(rows)

        thread = threading.Thread(target=wait)
        thread.start()
        deadline = time.monotonic() + 60
        while not any(scope.unfinished == 2 for scope in session.scopes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        scope = session.scopes()[0]
        session.close()
        thread.join(60)
    assert not thread.is_alive()
    assert scope.holding == "batch 0 of epoch 0, slice 1"
    assert (scope.unfinished, scope.unfinished_rows, scope.buffered) == (2, 6, 1)


@pytest.mark.parametrize("by_rows", [True, False])
def test_a_flat_map_that_gives_nothing_is_given_up_when_its_run_is_closed(by_rows: bool) -> None:
    calls: list[None] = []

    def slow() -> None:
        calls.append(None)
        time.sleep(0.001)

    def none(_: int) -> list[Any]:
        slow()
        return []

    def empty(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        for _ in range(batch.num_rows):
            slow()
            yield batch.slice(0, 0)

    session = pk.Flow("n bigint").flat_map(none if by_rows else empty, rows=by_rows).start()
    rows = session.run(table(n=list(range(5_000))))
    given: list[Any] = []

    def wait() -> None:
        with contextlib.suppress(pk.PenstockError):
            given.extend(rows)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for(lambda: len(calls) > 10)
    session.close()
    thread.join(60)
    assert not thread.is_alive() and not given
    assert len(calls) < 1_000


def test_what_a_slow_flat_map_gave_is_handed_out_while_it_goes_on() -> None:
    calls: list[int] = []

    def slow(n: int) -> list[tuple[int]]:
        calls.append(n)
        time.sleep(0.001)
        return [(n,)] if n % 100 == 0 else []

    with pk.Flow("n bigint").flat_map(slow, rows=True).start() as session:
        rows = session.run(table(n=list(range(2_000))))
        first = column(next(rows), "n")
        assert len(calls) < 2_000, "the first came before all calls were made"
        assert first + [n for batch in rows for n in column(batch, "n")] == list(range(0, 2_000, 100))
    assert calls == list(range(2_000))


def test_a_part_without_steps_hands_its_rows_on() -> None:
    flow = pk.Flow("n bigint").bounded(lambda part: part, batches=2, batch_size=3)
    assert column(flow.collect(table(n=list(range(20)))), "n") == list(range(20))
    with pytest.raises(PlanError, match=r"it returned another flow$"):
        flow.bounded(lambda part: flow)


def test_a_column_that_goes_around_unchanged_is_held_once() -> None:
    """Each round's column holds what it was made of: to let go of tens of thousands, link within link, overflowed."""

    def body(batch: pa.RecordBatch) -> pa.RecordBatch:
        rounds = [count + 1 for count in batch["rounds"].to_pylist()]
        return pa.record_batch({"n": batch["n"], "rounds": rounds, "again": [count < 50_000 for count in rounds]})

    columns = "n bigint, rounds bigint"
    flow = pk.Flow(columns).iterate(lambda p: p.map_batches(body, columns + ", again boolean"))
    [found] = list(flow.map_in_arrow()(iter([pa.record_batch({"n": [1, 2], "rounds": [0, 0]})])))
    assert found.to_pydict() == {"n": [1, 2], "rounds": [50_000, 50_000]}


def test_ctrl_c_leaves_a_partition() -> None:
    flow = pk.Flow("n bigint").iterate(lambda p: p.map_batches(stay, "n bigint, again boolean"))
    with pytest.raises(KeyboardInterrupt), interrupted():
        list(flow.map_in_arrow()(iter([pa.record_batch({"n": [1]})])))


def stay(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"n": batch["n"], "again": [True] * batch.num_rows})


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """Ctrl-C a moment after the package was called, whatever the runner of the tests made of SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    home, over = str(Path(pk.__file__).parent), threading.Event()

    def inside() -> bool:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and not frame.f_code.co_filename.startswith(home):
            frame = frame.f_back
        return frame is not None

    def strike() -> None:
        while not inside():
            if over.wait(0.01):
                return
        if not over.wait(0.5):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=strike)
    try:
        thread.start()
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)


# Failures


def broken(n: int) -> Iterator[tuple[int]]:
    for i in range(n):
        if n == 4 and i == 2:
            raise ValueError("no third one")
        yield (i,)


@pytest.mark.parametrize("bounds", [{}, {"batches": 1, "batch_size": 1}])
def test_an_iterator_that_raises_names_its_input(bounds: dict[str, Any]) -> None:
    flow = pk.Flow("n bigint").bounded(lambda part: part.flat_map(broken, "i bigint", rows=True), **bounds)
    given = table(n=[1, 4, 3])
    for run in (lambda: flow.collect(given), lambda: list(flow.map_in_arrow()(given.to_batches()))):
        with pytest.raises(UserFunctionError) as caught:
            run()
        error = caught.value
        assert (error.step, error.row) == ("bounded[0].flat_map[0] broken", {"n": 4})
        assert error.file == __file__ and error.line == broken.__code__.co_firstlineno + 3
        assert "ValueError: no third one" in str(error) and "input: {'n': 4}" in str(error)
        assert "rows that it had given before: 2" in str(error)
        assert isinstance(error.__cause__, ValueError)


def test_what_fails_is_left_out_on_request(caplog: pytest.LogCaptureFixture) -> None:
    flow = pk.Flow("n bigint").bounded(lambda part: part.flat_map(broken, "i bigint", rows=True), on_failure="skip")
    with caplog.at_level(logging.WARNING, "penstock"), flow.start() as session:
        got = [i for batch in session.run(table(n=[1, 4, 3])) for i in batch["i"].to_pylist()]
        (scope,) = session.scopes()
    assert got == [0, 0, 1, 0, 1, 2], "what it gave before stays"
    assert scope.failed == 1 and "{'n': 4}" in scope.failures[0] and "after 2 items" in scope.failures[0]
    assert "no third one" in caplog.text and "left out" in caplog.text
    many = pk.Flow("n bigint").bounded(lambda p: p.flat_map(lambda n: 1 // 0, rows=True), on_failure="skip")
    caplog.clear()
    with many.start() as session:
        assert list(session.run(table(n=list(range(500))))) == []
        assert session.scopes()[0].failed == 500
    assert len(caplog.records) == 10, "the first ones are enough"


def test_a_batch_that_fails_is_named() -> None:
    def half_way(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield batch
        raise KeyError("gone")

    flow = pk.Flow("n bigint, s string").flat_map(half_way)
    with pytest.raises(UserFunctionError, match="gone") as caught:
        flow.collect(table(n=[5, 6], s=["x", "y"]))
    assert "input: a batch of 2 rows, of which the first is {'n': 5, 's': 'x'}" in str(caught.value)
    assert "rows that it had given before: 2" in str(caught.value)
    skipped = flow.bounded(lambda part: part.flat_map(half_way), on_failure="skip")
    with pytest.raises(UserFunctionError):
        skipped.collect(table(n=[5, 6], s=["x", "y"]))
    only = pk.Flow("n bigint, s string").bounded(lambda part: part.flat_map(half_way), on_failure="skip")
    assert only.collect(table(n=[5, 6], s=["x", "y"])).num_rows == 2


@pytest.mark.parametrize(
    ("f", "rows", "message"),
    [
        (lambda n: [(n, n)], True, "a row of 2 values where its schema has 1 column"),
        (lambda n: [n], True, "rows are tuples"),
        (lambda n: [("text",)], True, "cannot hold"),
        (lambda n: n, True, "returned 1, not an iterable of rows"),
        (lambda n: (n,), True, "not an iterable of rows"),
        (lambda batch: batch, False, "not an iterable of batches: yield it"),
        (lambda batch: [5], False, "gave 5, not a pyarrow RecordBatch or Table"),
        (lambda batch: [pa.table({"other": [1]})], False, 'column "n" is missing'),
    ],
)
def test_what_does_not_fit_is_refused(f: Callable[..., Any], rows: bool, message: str) -> None:
    with pytest.raises(UserFunctionError, match=message) as caught:
        pk.Flow("n bigint").flat_map(f, rows=rows).collect(table(n=[1]))
    assert "flat_map[0] <lambda>" in str(caught.value)


@pytest.mark.parametrize("f", [lambda n: [(n,)], lambda n, s: [(n,)], lambda n: [(n.bit_length(),)]])
def test_a_function_of_rows_that_gets_batches_is_told(f: Callable[..., Any]) -> None:
    hint = r"\n  input: a batch of 2 rows, .*\}; the function gets whole batches: say rows=True for a call per row\n"
    with pytest.raises(UserFunctionError, match=hint):
        pk.Flow("n bigint").flat_map(f).collect(table(n=[1, 2]))


# Building


@pytest.mark.parametrize("name", ["batches", "batch_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, True, "4", 1 << 49, 10**30])
def test_numbers_that_bound_nothing_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"bounded {name}={re.escape(repr(value))}"):
        pk.Flow("n bigint").bounded(lambda part: part, **{name: value})


@pytest.mark.parametrize("memory", [0, -5, 1.5, True, "half", "0m", 1 << 70])
def test_budgets_that_are_none_are_refused(memory: Any) -> None:
    with pytest.raises(ConfigError, match=rf"bounded memory={re.escape(repr(memory))}"):
        pk.Flow("n bigint").bounded(lambda part: part, memory=memory)


def test_odd_bounds_are_refused() -> None:
    flow = pk.Flow("n bigint")
    with pytest.raises(ConfigError, match=f"batches={1 << 30} of batch_size={1 << 30} are more than can be counted"):
        flow.bounded(lambda part: part, batches=1 << 30, batch_size=1 << 30)
    with pytest.raises(ConfigError, match="memory='1g' steers numbers"):
        flow.bounded(lambda part: part, batches=1, batch_size=1, memory="1g")
    with pytest.raises(ConfigError, match="on_failure='continue' is unknown; use 'stop' or 'skip'"):
        flow.bounded(lambda part: part, on_failure="continue")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"bounded\(5\): give a function"):
        flow.bounded(5)  # type: ignore[arg-type]
    for made in (None, flow, 5):
        with pytest.raises(PlanError, match="must return the flow that it is given"):
            flow.bounded(lambda part, made=made: made)  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"flat_map\(5\)"):
        flow.flat_map(5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="flat_map rows='yes'"):
        flow.flat_map(up_to, rows="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["bounded", "iterate"])
def test_keyed_steps_inside_are_refused(op: str) -> None:
    steps: dict[str, Callable[[pk.Flow], Any]] = {
        "key_by": lambda part: part.key_by("n"),
        "window": lambda part: part.window(pk.tumbling("1s")),
        "top": lambda part: part.top(1, by="n"),
        "agg": lambda part: part.agg(n=pk.count()),
        "stateful_map": lambda part: part.stateful_map(up_to, schema="n bigint"),
        "apply_in_pandas_with_state": lambda part: part.apply_in_pandas_with_state(up_to, "n bigint", "n bigint"),
    }
    for name, step in steps.items():
        with pytest.raises(PlanError, match=rf"^{name} inside {op}: .* put {name} behind {op}"):
            getattr(pk.Flow("n bigint"), op)(step)
        with pytest.raises(PlanError, match=f"{name} inside bounded"):
            getattr(pk.Flow("n bigint"), op)(lambda part, step=step: part.bounded(step))
    keyed = pk.Flow("n bigint").key_by("n")
    for call in (lambda: getattr(keyed, op)(lambda part: part), lambda: keyed.flat_map(up_to)):
        with pytest.raises(PlanError, match="directly after key_by"):
            call()


def test_a_loop_must_give_its_columns_back() -> None:
    flow = pk.Flow("n bigint")
    with pytest.raises(SchemaError, match=r"must give n bigint, again boolean, .* it gives n bigint$"):
        flow.iterate(lambda part: part)
    with pytest.raises(SchemaError, match="it gives n int, again boolean"):
        flow.iterate(lambda part: part.map_batches(halves, "n int, again boolean"))
    with pytest.raises(SchemaError, match="again='n' takes the name of a column"):
        flow.iterate(lambda part: part, again="n")
    with pytest.raises(ConfigError, match="again=5"):
        flow.iterate(lambda part: part, again=5)  # type: ignore[arg-type]


def test_flows_with_parts_are_like_others() -> None:
    def build(size: int) -> pk.Flow:
        def part(inner: pk.Flow) -> pk.Flow:
            looped = inner.iterate(lambda p: p.map_batches(halves, "n bigint, again boolean"))
            return looped.flat_map(up_to, "i bigint", rows=True, name="count")

        return pk.Flow("n bigint").bounded(part, batches=2, batch_size=size, on_failure="skip")

    flow = build(9)
    assert flow == build(9) and hash(flow) == hash(build(9)) and flow != build(8)
    assert repr(flow) == (
        "Flow(n bigint)\n  .bounded(.iterate(.map_batches(halves) -> n bigint, again boolean, again=again)"
        " .flat_map(count) -> i bigint, batches=2, batch_size=9, on_failure=skip)"
    )
    assert ".flat_map(count)" in flow._repr_html_()
    text = flow.explain()
    assert "step 0 (bounded): unfinished batches: 2, rows of a batch: 9, inputs that fail are left out" in text
    assert "    step 0.0.0 (map_batches): call 0: n bigint, again boolean" in text
    assert "  step 0.1 (flat_map): call 1 per row, lazily: i bigint" in text
    plan, calls = flow.to_plan()
    (step,) = json.loads(plan)["steps"]
    assert (step["op"], step["batches"], step["batch_size"], step["on_failure"]) == ("bounded", 2, 9, "skip")
    assert [inner["op"] for inner in step["body"]] == ["iterate", "flat_map"] and len(calls) == 2
    for copy in (pickle.loads(cloudpickle.dumps(flow)), cloudpickle.loads(cloudpickle.dumps(flow))):
        assert column(copy.collect(table(n=[0, 3]))) == []
    function = pickle.loads(pickle.dumps(pk.Flow("n bigint").flat_map(up_to, "i bigint", rows=True).map_in_arrow()))
    assert [batch["i"].to_pylist() for batch in function(table(n=[2]).to_batches())] == [[0, 1]]
    assert not flow.keyed and not flow.needs_order and flow.output_ddl == "`i` bigint"
