"""`_native.LocalRun` and `_native.InlineRun`: results, errors with locations, bounds, migrations, signals, fork."""

from __future__ import annotations

import collections
import datetime
import decimal
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from forked import in_child

import penstock as pk
from penstock import _native, errors


def counting() -> pk.Flow:
    return pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="final")


def windows() -> pk.Flow:
    flow = pk.Flow("k bigint, ts timestamp", event_time="ts", lateness="1s")
    return flow.key_by("k").window(pk.tumbling("10s")).agg(n=pk.count())


def running(total: Any, k: int, v: Any) -> Any:
    if v == 13:
        total = [*total, "half"] if total else total
        raise ZeroDivisionError(f"cannot take {v}")
    if v == -1:
        return None, None
    total = (total or 0) + v
    return total, [(k, total), (k, -total)] if v == 7 else (k, total)


def stateful() -> pk.Flow:
    return pk.Flow("k bigint, v bigint").key_by("k").stateful_map(running, schema="k bigint, total bigint")


def start(flow: pk.Flow, **options: Any) -> Any:
    plan, calls = flow.to_plan()
    return _native.LocalRun(plan, calls, **options)


def inline(flow: pk.Flow, piece: int | None = None) -> Any:
    plan, calls = flow.to_plan()
    return _native.InlineRun(plan, calls, piece)


def taken(run: Any, kind: str = "rows") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while (item := run.take()) is not None:
        if item[0] == kind:
            rows += pa.record_batch(item[1]).to_pylist()
    return rows


def ks(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"k": pa.array(values, pa.int64())})


def kvs(*rows: tuple[int, int]) -> pa.RecordBatch:
    return pa.record_batch(
        {"k": pa.array([k for k, _ in rows], pa.int64()), "v": pa.array([v for _, v in rows], pa.int64())}
    )


def at(*rows: tuple[int, float]) -> pa.RecordBatch:
    times = pa.array([int(t * 1e6) for _, t in rows], pa.timestamp("us", "UTC"))
    return pa.record_batch({"k": pa.array([k for k, _ in rows], pa.int64()), "ts": times})


def in_time(flow: pk.Flow, batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.cast(flow.input_schema)


# Results


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_counts(workers: int) -> None:
    values = [i * i % 97 for i in range(20_000)]
    with start(counting(), workers=workers) as run:
        for at_ in range(0, len(values), 3000):
            run.push(ks(*values[at_ : at_ + 3000]))
        run.finish()
        rows = taken(run)
        assert run.done
    assert {row["k"]: row["n"] for row in rows} == collections.Counter(values) and len(rows) == len(set(values))
    run = inline(counting())
    made = [handle for at_ in range(0, len(values), 3000) for handle in run.push(ks(*values[at_ : at_ + 3000]))]
    made += run.finish()
    assert {r["k"]: r["n"] for h in made for r in pa.record_batch(h).to_pylist()} == collections.Counter(values)


@pytest.mark.parametrize("workers", [1, 2])
def test_late_rows_go_aside_whatever_the_workers_do(workers: int) -> None:
    flow = windows()
    with start(flow, workers=workers) as run:
        for batch in (at((1, 3.0), (2, 4.0)), at((1, 25.0)), at((1, 5.0), (1, 24.5)), at((3, 9.0))):
            run.push(in_time(flow, batch))
        run.finish()
        items = []
        while (item := run.take()) is not None:
            items.append((item[0], pa.record_batch(item[1])))
    late = sum(batch.num_rows for kind, batch in items if kind == "beside")
    counts = sorted(
        (r["window_start"].second, r["k"], r["n"]) for kind, b in items if kind == "rows" for r in b.to_pylist()
    )
    assert late == 2
    assert counts == [(0, 1, 1), (0, 2, 1), (20, 1, 2)]


@pytest.mark.parametrize("workers", [1, 2])
def test_all_that_is_pushed_is_one_epoch_on_request(workers: int) -> None:
    flow = windows()
    with start(flow, workers=workers, whole=True) as run:
        for batch in (at((1, 3.0), (2, 4.0)), at((1, 95.0)), at((1, 5.0), (1, 24.5)), at((3, 9.0))):
            run.push(in_time(flow, batch))
            assert run.take(0.05) is None, "nothing closes before the input ends"
        run.finish()
        items = [(item[0], pa.record_batch(item[1])) for item in iter(run.take, None)]
    assert {kind for kind, _ in items} == {"rows"}
    found = sorted((r["window_start"].timestamp(), r["k"], r["n"]) for _, b in items for r in b.to_pylist())
    assert found == [(0, 1, 2), (0, 2, 1), (0, 3, 1), (20, 1, 1), (90, 1, 1)]
    with pytest.raises(errors.ConfigError, match="leave journal out"):
        start(flow, whole=True, journal=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_state_in_python_sees_rows_of_a_key_in_order(workers: int) -> None:
    rows = [(i % 5, i * 7 % 11) for i in range(3000)]
    expected: dict[int, list[int]] = collections.defaultdict(list)
    totals: dict[int, int] = {}
    for k, v in rows:
        totals[k] = totals.get(k, 0) + v
        expected[k] += [totals[k], -totals[k]] if v == 7 else [totals[k]]
    with start(stateful(), workers=workers) as run:
        for at_ in range(0, len(rows), 700):
            run.push(kvs(*rows[at_ : at_ + 700]))
        run.finish()
        found: dict[int, list[int]] = collections.defaultdict(list)
        for row in taken(run):
            found[row["k"]].append(row["total"])
    assert found == expected


def test_values_of_every_type_reach_a_step_and_come_back() -> None:
    columns = {
        "i": pa.array([1, None, 3], pa.int16()),
        "f": pa.array([0.5, float("nan"), None], pa.float32()),
        "b": pa.array([True, None, False]),
        "s": pa.array(["a", None, "é"], pa.large_string()),
        "y": pa.array([b"x", None, b""]),
        "t": pa.array([0, None, 10**6], pa.timestamp("us", "UTC")),
        "d": pa.array([0, None, 1], pa.date32()),
        "l": pa.array([[1, 2], None, []], pa.list_(pa.int64())),
        "m": pa.array([{"x": 1}, None, {"x": None}], pa.struct({"x": pa.int64()})),
        "c": pa.array(["1.50", None, "2.00"]).cast(pa.decimal128(10, 2)),
    }
    batch = pa.record_batch({"k": pa.array([1, 1, 1], pa.int64()), **columns})
    seen: list[tuple[Any, ...]] = []

    def echo(state: Any, *values: Any) -> Any:
        seen.append(values)
        return None, values

    names = list(columns)
    shape = pa.schema([batch.schema.field(name) for name in names])
    flow = pk.Flow(batch.schema).key_by("k").stateful_map(echo, schema=shape, columns=names)
    run = inline(flow)
    made = run.push(batch) + run.finish()
    back = pa.Table.from_batches([pa.record_batch(handle) for handle in made]).combine_chunks()
    for name in names:
        assert back[name].combine_chunks().equals(batch[name]) or name == "f", name
    assert str(back["f"].to_pylist()) == "[0.5, nan, None]"
    assert seen[0][0] == 1 and seen[1][0] is None and seen[0][4] == b"x" and seen[2][7] == []


def test_nan_is_one_key() -> None:
    def count(state: Any, k: float) -> Any:
        return (state or 0) + 1, (k, (state or 0) + 1)

    flow = pk.Flow("k double").key_by("k").stateful_map(count, schema="k double, n bigint")
    run = inline(flow)
    made = run.push(pa.record_batch({"k": pa.array([float("nan")] * 3)}))
    assert [row["n"] for handle in made for row in pa.record_batch(handle).to_pylist()] == [1, 2, 3]


def test_zero_is_one_key_and_one_rank() -> None:
    def count(state: Any, k: float) -> Any:
        return (state or 0) + 1, ((state or 0) + 1,)

    halves = pa.array([0.0, -0.0, 0.0, -0.0], pa.float32())
    batch = pa.record_batch({"k": pa.array([0.0, -0.0, 0.0, -0.0]), "f": halves, "tags": [[0.0], [-0.0]] * 2})
    for keys in (["k"], ["f"], ["tags"], ["k", "tags"]):
        made = pk.Flow(batch.schema).key_by(*keys).agg(n=pk.count()).collect(batch)
        assert made["n"].to_pylist() == [4] and str(made[keys[0]].to_pylist()) in ("[0.0]", "[[0.0]]")
    flow = pk.Flow("k double").key_by("k").stateful_map(count, schema="n bigint")
    assert flow.collect(batch, 2)["n"].to_pylist() == [1, 2, 3, 4]
    assert pk.Flow("k double").top(1, by="k").collect(batch).num_rows == 4
    assert pk.Flow("k double, f float").top(1, by="f", per="k").collect(batch).num_rows == 4


def test_keys_that_python_cannot_hash_are_refused_before_a_row_is_read() -> None:
    for kind in ("array<bigint>", "struct<a:bigint>", "map<string,bigint>"):
        flow = pk.Flow(f"k {kind}").key_by("k").stateful_map(lambda state, k: (None, None), schema="k bigint")
        with pytest.raises(errors.SchemaError, match=r"stateful_map.*'k'.*hashable in Python"):
            flow.output_schema  # noqa: B018 -- compiles the flow
    assert pk.Flow("k array<bigint>").key_by("k").agg(n=pk.count()).columns == ("k", "n")


def test_a_step_that_puts_none_where_null_is_not_allowed() -> None:
    flow = pk.Flow("k bigint").key_by("k").stateful_map(lambda state, k: (None, (None,)), schema="a bigint NOT NULL")
    with pytest.raises(errors.UserFunctionError, match=r'column "a" \(bigint\) cannot .* None, and it is NOT NULL'):
        flow.collect(ks(1))


@pytest.mark.long  # two gigabytes
@pytest.mark.parametrize(("kind", "made"), [("string", "x"), ("binary", b"x")])
def test_a_batch_of_more_text_than_a_column_takes_is_the_users(kind: str, made: Any) -> None:
    large = made * (1 << 30)
    flow = pk.Flow("k bigint").key_by("k").stateful_map(lambda state, k: (None, (large,)), schema=f"a {kind}")
    with pytest.raises(errors.UserFunctionError, match=r"cannot hold .* more than 2147483647 bytes in one batch"):
        flow.collect(ks(1, 2))


def test_an_exception_without_a_text_is_still_the_users() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

        __repr__ = __str__

    def broken(state: Any, k: int) -> Any:
        raise Mute

    with pytest.raises(errors.UserFunctionError, match=r"Mute: \(its text cannot be shown\)") as caught:
        pk.Flow("k bigint").key_by("k").stateful_map(broken, schema="a bigint").collect(ks(1))
    assert isinstance(caught.value.__cause__, Mute)


def test_pieces_give_what_the_whole_gives() -> None:
    flow = counting()
    plan, calls = flow.to_plan()
    pieces = _native.plan_check(plan)["pieces"]
    assert [piece["end"] for piece in pieces] == [(0, 0), None]
    first, second = inline(flow, 0), inline(flow, 1)
    routed = first.push(ks(*range(10), *range(5))) + first.finish()
    for handle in routed:
        batch = pa.record_batch(handle)
        assert batch.schema.equals(pa.schema(pieces[0]["output"]))
        hashes = pa.record_batch(_native.exchange_hashes(plan, 0, batch))["hash"]
        plain = pa.record_batch(_native.hash_columns(batch, ["k"]))["hash"]
        assert hashes.type == pa.int64() and hashes.view(pa.uint64()).equals(plain)
    made = [h for handle in routed for h in second.push(handle)] + second.finish()
    assert sorted(r["n"] for h in made for r in pa.record_batch(h).to_pylist()) == [1] * 5 + [2] * 5
    with pytest.raises(ValueError, match="no exchange behind piece 1"):
        _native.exchange_hashes(plan, 1, pa.record_batch(made[0]))
    with pytest.raises(ValueError, match="no piece 2"):
        _native.exchange_hashes(plan, 2, ks(1))
    with pytest.raises(ValueError, match="no input 1"):
        second.push(ks(1), 1)
    with pytest.raises(ValueError, match="no piece 2"):
        _native.InlineRun(plan, calls, 2)


def test_max_event_time() -> None:
    flow = windows()
    plan, _ = flow.to_plan()
    assert _native.max_event_time(plan, in_time(flow, at((1, 2.5), (1, 1.0)))) == 2_500_000
    assert _native.max_event_time(plan, in_time(flow, at())) is None
    assert _native.max_event_time(counting().to_plan()[0], ks(1)) is None
    with pytest.raises(ValueError, match="no source 1"):
        _native.max_event_time(plan, ks(1), 1)


# Errors


def line_of(text: str) -> int:
    return next(
        i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line and "line_of" not in line
    )


@pytest.mark.parametrize("host", ["local", "inline"])
def test_an_error_in_a_step_names_step_line_and_row(host: str) -> None:
    batch = kvs((1, 2), (4, 13), (1, 5))
    with pytest.raises(errors.UserFunctionError) as caught:
        if host == "local":
            with start(stateful(), workers=2) as run:
                run.push(batch)
                run.finish()
                taken(run)
        else:
            inline(stateful()).push(batch)
    error = caught.value
    assert isinstance(error.__cause__, ZeroDivisionError) and "cannot take 13" in str(error)
    assert error.file == __file__ and error.line == line_of("raise ZeroDivisionError")
    assert "running" in error.step and error.row == {"k": 4, "v": 13} and error.key == 4
    error.add_note("in passing")
    copy = pickle.loads(pickle.dumps(error))
    assert copy.__notes__ == ["in passing"]
    assert (copy.step, copy.row, copy.line) == (error.step, error.row, error.line)
    assert isinstance(copy.__cause__, ZeroDivisionError) and str(copy) == str(error)


def test_an_error_in_a_map_names_its_line() -> None:
    def deep(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.drop_columns(["nothing"])  # the user's line

    with pytest.raises(errors.UserFunctionError) as caught:
        inline(pk.Flow("k bigint").map_batches(deep)).push(ks(1))
    assert caught.value.line == line_of("# the user's line") and isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda b: 5, "not a pyarrow RecordBatch"),
        (lambda b: pa.record_batch({"x": [1]}), "'k'|\"k\""),
        (lambda b: pa.record_batch({"k": ["text"]}), "type"),
        (lambda b: pa.record_batch({"k": pa.array([1]), "more": pa.array([2])}), "more"),
    ],
)
def test_a_map_that_returns_something_else_is_refused(made: Any, says: str) -> None:
    with pytest.raises(errors.UserFunctionError, match=says) as caught:
        inline(pk.Flow("k bigint").map_batches(made, schema="k bigint")).push(ks(1))
    assert caught.value.file == __file__


def test_a_map_may_return_a_table_and_reorder_columns() -> None:
    def both(batch: pa.RecordBatch) -> pa.Table:
        twice = pa.table({"b": pa.array(["x"] * batch.num_rows), "a": batch["k"]})
        return pa.concat_tables([twice, twice])

    run = inline(pk.Flow("k bigint").map_batches(both, schema="a bigint, b string"))
    rows = [row for handle in run.push(ks(1, 2)) for row in pa.record_batch(handle).to_pylist()]
    assert [row["a"] for row in rows] == [1, 2, 1, 2] and rows[0]["b"] == "x"


@pytest.mark.parametrize(
    ("out", "says"),
    [((1,), "2 columns"), ((1, "text"), "total"), ([(1, 2), 3], "tuples"), ("text", "tuple"), ((1, 2**70), "total")],
)
def test_a_step_that_puts_out_something_else_is_refused(out: Any, says: str) -> None:
    def step(state: Any, k: int) -> Any:
        return 1, out

    flow = pk.Flow("k bigint").key_by("k").stateful_map(step, schema="k bigint, total bigint")
    with pytest.raises(errors.UserFunctionError, match=says) as caught:
        inline(flow).push(ks(1))
    assert caught.value.file == __file__ and "step" in caught.value.step


def test_a_step_with_a_wrong_signature_is_explained() -> None:
    flow = pk.Flow("k bigint").key_by("k").stateful_map(lambda state: (1, None), schema="n bigint")
    with pytest.raises(errors.UserFunctionError, match="step\\(state, \\*values\\)"):
        inline(flow).push(ks(1))


def test_input_that_does_not_fit_is_refused_and_the_run_goes_on() -> None:
    with start(counting()) as run:
        for wrong in (pa.record_batch({"x": [1]}), pa.record_batch({"k": ["a"]}), pa.record_batch({"k": [1.5]})):
            with pytest.raises(errors.SchemaError, match="does not fit the flow"):
                run.push(wrong)
        with pytest.raises(TypeError):
            run.push(5)
        run.push(ks(1))
        run.finish()
        assert taken(run) == [{"k": 1, "n": 1}]
        with pytest.raises(errors.EngineError, match="ended"):
            run.push(ks(1))


def test_null_keys_may_be_rejected() -> None:
    flow = pk.Flow("k bigint").key_by("k", nulls="reject").agg(n=pk.count())
    with pytest.raises(errors.KeyNullError) as caught:
        inline(flow).push(pa.record_batch({"k": pa.array([1, None], pa.int64())}))
    assert (caught.value.column, caught.value.row) == ("k", 1)


def test_bad_plans_and_options_are_refused() -> None:
    for text in ("", "{}", "[1]", '{"version": 99}'):
        with pytest.raises((errors.PlanError, errors.SchemaError)):
            _native.plan_check(text)
    plan, calls = counting().to_plan()
    for options in ({"workers": 0}, {"workers": 1025}, {"bits": 21}, {"ahead": 0}):
        with pytest.raises(errors.ConfigError):
            _native.LocalRun(plan, calls, **options)
    plan, _ = stateful().to_plan()
    with pytest.raises(errors.UserFunctionError, match="call 0"):
        _native.InlineRun(plan, []).push(kvs((1, 1)))


def test_a_failed_or_closed_run_says_so() -> None:
    run = inline(stateful())
    with pytest.raises(errors.UserFunctionError):
        run.push(kvs((1, 13)))
    with pytest.raises(errors.EngineError, match="failed before"):
        run.push(kvs((1, 1)))
    local = start(counting())
    local.close()
    local.close()
    for call in (lambda: local.push(ks(1)), local.finish, local.take, local.stats, lambda: local.migrate([])):
        with pytest.raises(errors.EngineError, match="closed"):
            call()


# Bounds, migrations, threads


def test_push_waits_for_the_workers() -> None:
    gate = threading.Event()

    def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
        gate.wait(60)
        return batch

    with start(pk.Flow("k bigint").map_batches(slow), ahead=2) as run:
        run.push(ks(1))
        run.push(ks(2))
        pushed = threading.Event()
        third = threading.Thread(target=lambda: (run.push(ks(3)), pushed.set()))
        third.start()
        assert not pushed.wait(0.3), "a third epoch was released while two were under way"
        assert run.take(0.0) is None and not run.done
        gate.set()
        assert pushed.wait(60)
        third.join()
        run.finish()
        assert [row["k"] for row in taken(run)] == [1, 2, 3]


@pytest.mark.parametrize("flow", [counting, stateful], ids=["native", "python"])
def test_a_migration_changes_no_result(flow: Any) -> None:
    data = [(i % 101, i % 7 + 20) for i in range(6000)]
    batches = [kvs(*data[at_ : at_ + 1000]) for at_ in range(0, len(data), 1000)]
    if flow is counting:
        batches = [batch.select(["k"]) for batch in batches]

    def results(steps: list[list[tuple[int, int]]]) -> list[Any]:
        with start(flow(), workers=2, bits=4) as run:
            handle = None
            for number, batch in enumerate(batches):
                run.push(batch)
                if number == 2 and steps:
                    handle = run.migrate(steps)
            if handle is not None:
                report = run.wait_migration(handle, 60)
                assert report["moved"] == sum(map(len, steps)) and len(report["steps"]) == len(steps)
                (owners,) = json.loads(run.stats())["owners"]
                assert set(owners) == {1}
            run.finish()
            return sorted(tuple(row.values()) for row in taken(run))

    assert results([[(bin_, 1)] for bin_ in range(0, 16, 2)]) == results([])


def test_bad_migrations_are_refused() -> None:
    with start(counting(), workers=2, bits=4) as run:
        for steps in ([[(16, 0)]], [[(0, 2)]]):
            with pytest.raises(errors.ConfigError, match="16 bins and 2 workers"):
                run.migrate(steps)
        with pytest.raises(ValueError, match="no migration 9"):
            run.wait_migration(9)
        for timeout in (-1.0, float("nan")):
            with pytest.raises(ValueError, match="timeout"):
                run.take(timeout)


def test_an_inline_run_stays_in_its_thread() -> None:
    holder = [inline(counting())]
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            holder[0].push(ks(1))
        except errors.EngineError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "thread" in str(caught[0])
    holder[0].push(ks(1))
    # Dropped in another thread: freed later, not here.
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    assert inline(counting()).push(ks(1)) == []


def test_a_step_may_run_a_flow_of_its_own() -> None:
    def nested(batch: pa.RecordBatch) -> pa.RecordBatch:
        inner = inline(counting())
        inner.push(batch)
        (made,) = inner.finish()
        return pa.record_batch({"k": pa.record_batch(made)["n"]})

    run = inline(pk.Flow("k bigint").map_batches(nested))
    (made,) = run.push(ks(1, 1, 1))
    assert pa.record_batch(made)["k"].to_pylist() == [3]


def test_stats_count_rows_and_keys() -> None:
    with start(counting(), workers=2) as run:
        run.push(ks(*range(100), *range(50)))
        run.finish()
        taken(run)
        stats = json.loads(run.stats())
    assert sum(worker["rows"] for worker in stats["workers"]) == 150
    assert len(stats["workers"]) == 2 and stats["slices"]


# Processes


@pytest.mark.parametrize("workers", [0, 2], ids=["inline", "local"])
def test_runs_in_a_forked_child(workers: int) -> None:
    run = start(counting(), workers=workers) if workers else inline(counting())
    run.push(ks(1))
    holder = [run]

    def work() -> None:
        nonlocal run
        for call in ("push", "finish"):
            with pytest.raises(errors.ForkError):
                getattr(holder[0], call)(*([ks(1)] if call == "push" else []))
        run = holder.clear()  # must neither wait for the parent's threads nor end them
        with start(counting(), workers=2) as mine:
            mine.push(ks(5))
            mine.finish()
            assert taken(mine) == [{"k": 5, "n": 1}]

    in_child(work)
    made = [] if workers else run.finish()
    if workers:
        run.finish()
        assert taken(run) == [{"k": 1, "n": 1}]
        run.close()
    else:
        assert pa.record_batch(made[0]).to_pylist() == [{"k": 1, "n": 1}]


@pytest.mark.parametrize("make", [lambda: start(counting()), lambda: inline(counting())], ids=["local", "inline"])
def test_runs_refuse_pickling(make: Any) -> None:
    with pytest.raises(TypeError, match="is a handle and cannot be pickled"):
        pickle.dumps(make())


def test_ctrl_c_ends_a_wait() -> None:
    script = """
import os, signal, sys, threading, time
import penstock as pk
from penstock import _native
run = _native.LocalRun(*pk.Flow("k bigint").key_by("k").agg(n=pk.count()).to_plan())
def wait():
    run.take()  # nothing ever comes
def waits():
    main = threading.main_thread()
    with open(f"/proc/self/task/{main.native_id}/stat") as stat:
        state = stat.read().rpartition(")")[2].split()[0]
    return state == "S" and sys._current_frames()[main.ident].f_code is wait.__code__
def interrupt():
    while not waits():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
try:
    threading.Thread(target=interrupt).start()
    wait()
except KeyboardInterrupt:
    print("interrupted")
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout == "interrupted\n"


def test_a_process_may_end_with_workers_running() -> None:
    script = """
import penstock as pk
from penstock import _native
def step(state, k):
    return (state or 0) + k, (k,)
run = _native.LocalRun(*pk.Flow("k bigint").key_by("k").stateful_map(step, schema="k bigint").to_plan(), workers=2)
import pyarrow as pa
for _ in range(20):
    run.push(pa.record_batch({"k": pa.array(range(1000))}))
"""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ("a array<bigint>", [1, None], [2, 0.5]),
        ("a struct<x: bigint>", {"x": 1}, {"x": 0.5}),
        ("a map<string, int>", {"k": 1}, {"k": decimal.Decimal("1.5")}),
        ("a date", datetime.date(2026, 1, 1), 1.5),
        ("a timestamp", datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), 1.5),
    ],
)
def test_a_fraction_is_cut_nowhere_and_the_row_is_told(schema: str, good: Any, bad: Any) -> None:
    flow = pk.Flow("k bigint").flat_map(lambda k: [(k, bad if k else good)], f"k bigint, {schema}", rows=True)
    assert flow.collect(ks(0)).num_rows == 1
    with pytest.raises(errors.UserFunctionError, match=r"(may have a fraction|has a number for a).*, in the row \(1, "):
        flow.collect(ks(0, 0, 1))


def trail(state: Any, k: int) -> tuple[Any, Any]:
    state = [] if state is None else state
    state.append(k)
    return state, (k, state)


def tally(state: Any, k: int) -> tuple[Any, Any]:
    state = {"n": 0, "seen": []} if state is None else state
    state["n"] += 1
    state["seen"].append(k)
    return state, [(k, state), (k, {"n": state["n"], "seen": state["seen"]})]


def table(state: Any, k: int) -> tuple[Any, Any]:
    state = {} if state is None else state
    state.setdefault(str(k), []).append(k)
    return state, (k, state)


def buffer(state: Any, k: int) -> tuple[Any, Any]:
    state = bytearray() if state is None else state
    state += b"x"
    return state, (k, [state])


def kept(k: int, held: list[Any] = []) -> Any:  # noqa: B006
    for _ in range(2):
        held.append(k)
        del held[:-3]
        yield (k, held)


CHANGING: dict[str, Callable[[pk.Flow], pk.Flow]] = {
    "array": lambda flow: flow.key_by("k").stateful_map(trail, schema="k bigint, seen array<bigint>"),
    "struct": lambda flow: flow.key_by("k").stateful_map(
        tally, schema="k bigint, s struct<n: bigint, seen: array<bigint>>"
    ),
    "map": lambda flow: flow.key_by("k").stateful_map(table, schema="k bigint, m map<string, array<bigint>>"),
    "bytes": lambda flow: flow.key_by("k").stateful_map(buffer, schema="k bigint, b array<binary>"),
    "ttl": lambda flow: flow.key_by("k").stateful_map(
        trail, schema="k bigint, seen array<bigint>", ttl="1 hour", ttl_time="processing"
    ),
    "at_end": lambda flow: flow.key_by("k").stateful_map(
        trail, schema="k bigint, seen array<bigint>", at_end=lambda state, k: [(k, state), (k, [*state, 0])]
    ),
    "sides": lambda flow: flow.key_by("k").stateful_map(
        lambda state, k: (trail(state, k)[0], [pk.side("all", (k, state or [])), (k, state)]),
        schema="k bigint, seen array<bigint>",
        sides={"all": "k bigint, seen array<bigint>"},
    ),
    "flat_map": lambda flow: flow.flat_map(kept, "k bigint, seen array<bigint>", rows=True),
}


@pytest.mark.parametrize("what", CHANGING)
def test_what_a_step_puts_out_is_as_it_was_then(what: str) -> None:
    """A list that was put out and changed later showed its later values, up to the next block."""
    flow = CHANGING[what](pk.Flow("k bigint"))
    found = []
    for rows in (1, 1 << 16):
        beside: list[Any] = []
        sides = {"all": lambda batch, beside=beside: beside.extend(batch.to_pylist())} if what == "sides" else None
        kept.__defaults__[0].clear()  # type: ignore[index]
        table = flow.collect(ks(1, 2, 1, 1, 2), batch_rows=rows, sides=sides)
        found.append((sorted(map(repr, table.to_pylist())), sorted(map(repr, beside))))
    assert found[0] == found[1]
    assert any(found[0])


@pytest.mark.parametrize(
    ("schema", "bad", "says"),
    [
        ("a timestamp", datetime.datetime(2026, 1, 1), "no zone"),
        ("a array<timestamp>", [datetime.datetime(2026, 1, 1)], "no zone"),
        ("a timestamp_ntz", datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), "zone"),
        ("a timestamp", 1_700_000_000, "a number for a timestamp"),
        ("a date", 1, "a number for a date"),
        ("a struct<d: date>", {"d": 1}, "a number for a date"),
    ],
)
def test_a_time_that_could_mean_another_one_is_refused(schema: str, bad: Any, says: str) -> None:
    """It was taken as UTC, or as microseconds or days since 1970."""
    flow = pk.Flow("k bigint").flat_map(lambda k: [(bad,)], schema, rows=True)
    with pytest.raises(errors.UserFunctionError, match=says) as caught:
        flow.collect(ks(0))
    assert "{'k': 0}" in str(caught.value)


def test_what_does_not_fit_is_told_with_the_row_that_it_came_from() -> None:
    def step(state: Any, k: int) -> tuple[Any, Any]:
        return None, [(k,)] * (k % 3) if k != 70 else ("no",)

    flow = pk.Flow("k bigint").key_by("k").stateful_map(step, schema="n bigint")
    with pytest.raises(errors.UserFunctionError, match=r"cannot hold what the step put out: 'no'") as caught:
        flow.collect(ks(*range(100)))
    assert "row: k=70" in str(caught.value)
    wide = pk.Flow("k bigint").flat_map(lambda k: [(k, k)] if k == 7 else [(k,)], "n bigint", rows=True)
    with pytest.raises(errors.UserFunctionError, match="a row of 2 values where its schema has 1 columns") as caught:
        wide.collect(ks(*range(10)))
    assert "input: {'k': 7}" in str(caught.value)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_other_columns_and_nothing_returned_say_what_to_write() -> None:
    renamed = pk.Flow("k bigint").map_batches(lambda batch: batch.rename_columns(["n"]))
    with pytest.raises(errors.UserFunctionError, match=r"schema=.n bigint.") as caught:
        renamed.collect(ks(1))
    assert "column" in str(caught.value)

    async def later(state: Any, k: int) -> Any:
        return state, (k,)

    for step, says in ((lambda state, k: None, "must return \\(state, out\\)"), (later, "coroutine")):
        with pytest.raises((errors.UserFunctionError, errors.ConfigError), match=says):
            pk.Flow("k bigint").key_by("k").stateful_map(step, schema="k bigint").collect(ks(1))


@pytest.mark.parametrize("truth", [True, np.True_])
@pytest.mark.parametrize(
    ("schema", "good", "inside"),
    [
        ("a bigint", 1, lambda bad: bad),
        ("a tinyint", np.int8(1), lambda bad: bad),
        ("a double", 1, lambda bad: bad),
        ("a float", np.float32(0.5), lambda bad: bad),
        ("a array<double>", [0.5, 1], lambda bad: [0.5, bad]),
        ("a struct<x: bigint>", {"x": 1}, lambda bad: {"x": bad}),
    ],
)
def test_true_is_no_number_in_rows_of_steps(schema: str, good: Any, inside: Callable[[Any], Any], truth: Any) -> None:
    """It became 1, which columns of the input never do, nor 1 True."""
    bad = inside(truth)
    flow = pk.Flow("k bigint").flat_map(lambda k: [(k, bad if k else good)], f"k bigint, {schema}", rows=True)
    assert flow.collect(ks(0)).num_rows == 1
    with pytest.raises(errors.UserFunctionError, match=r'column "a" .* in the row \(1, .*True'):
        flow.collect(ks(0, 0, 1))


def test_the_row_that_a_step_put_out_is_told() -> None:
    flow = pk.Flow("k bigint").flat_map(lambda k: [(k, "no" if k == 70 else k)], "k bigint, n bigint", rows=True)
    with pytest.raises(errors.UserFunctionError, match=r'column "n" \(bigint\) .* in the row \(70, .no.\)'):
        flow.collect(ks(*range(100)))


def test_rows_of_a_side_output_that_is_not_declared_say_what_declares_it() -> None:
    flow = pk.Flow("k bigint").flat_map(lambda k: [pk.side("bad", (k,))], "k bigint", rows=True)
    with pytest.raises(errors.UserFunctionError, match=r"no side outputs: add sides=\{'bad': "):
        flow.collect(ks(1))
