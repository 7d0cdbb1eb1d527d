"""The local host: sources, late rows, early ends, errors, migrations."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
from engine_support import wait_for
from examples_support import examples
from interrupt_support import at_every_instruction
from penstock import _local as local
from penstock import _native, _pickles, ordered
from penstock._local import LateRows
from penstock._migration import Migration, MigrationReport
from penstock.errors import ConfigError, EngineError, ForkError, PlanError, SchemaError, UserFunctionError


def counting() -> pk.Flow:
    return pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="final")


def rows(batches: Any) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for batch in batches for row in batch.to_pylist())


def running(total: int | None, k: int, v: int) -> tuple[int, tuple[int, int]]:
    total = (total or 0) * 3 + v
    return total, (k, total)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    before = threads()
    yield
    deadline = time.monotonic() + 60
    while threads() > before:
        assert time.monotonic() < deadline, f"{threads() - before} threads are left"
        time.sleep(0.01)


def test_any_arrow_source(tmp_path: Path) -> None:
    table = pa.table({"k": [1, 2, 1], "other": ["a", "b", "c"]})
    wanted = [(1, 2), (2, 1)]
    flow = counting()

    class Stream:
        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            return table.__arrow_c_stream__(requested_schema)

    class Array:
        def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
            return table.combine_chunks().to_batches()[0].__arrow_c_array__(requested_schema)

    pq.write_table(table, tmp_path / "t.parquet")
    sources = [
        table,
        table.to_batches()[0],
        table.to_reader(),
        table.to_batches(max_chunksize=1),
        iter([table.slice(0, 1), table.slice(1).to_batches()[0]]),
        Stream(),
        Array(),
        pd.DataFrame({"k": [1, 2, 1]}),
        pq.ParquetFile(tmp_path / "t.parquet").iter_batches(),
        ds.dataset(tmp_path / "t.parquet"),
        pa.table({"k": pa.array([1, 2, 1], pa.int8())}),
    ]
    for source in sources:
        assert rows(flow.run(source)) == wanted, type(source)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_blocks_end_by_their_bytes_wherever_the_large_rows_stand(
    monkeypatch: pytest.MonkeyPatch, kind: pa.DataType
) -> None:
    monkeypatch.setattr(local, "_BLOCK_BYTES", 5_000)
    texts = ["x" * 1_000] * 30 + ["y"] * 2_000 + ["z" * 9_000]
    source = pa.table({"k": pa.array(range(len(texts)), pa.int32()), "text": pa.array(texts, kind)})
    blocks = list(local.batches(source, pa.schema([("k", pa.int64()), ("text", pa.string())]), 500))
    assert all(block.num_rows == 1 or (block.num_rows <= 500 and block.nbytes <= 5_000) for block in blocks)
    assert len(blocks) < 80, "rows that are small go together"
    found = pa.Table.from_batches(blocks)
    assert found["text"].to_pylist() == texts and found["k"].to_pylist() == list(range(len(texts)))
    coded = source.set_column(1, "text", source["text"].cast(pa.string()).dictionary_encode())
    assert pa.Table.from_batches(local.batches(coded, found.schema, 500))["text"].to_pylist() == texts
    with pytest.raises(SchemaError, match="text"):
        list(local.batches(source.slice(0, 0), pa.schema([("text", pa.int64())]), 500))


@pytest.mark.parametrize("processes", [None, 1])
def test_an_error_names_the_file_whatever_cloudpickle_leaves_out(
    monkeypatch: pytest.MonkeyPatch, processes: int | None
) -> None:
    """As cloudpickle does from 3.1.3 on."""
    kept = cloudpickle.Pickler.dispatch_table

    def without_file(code: CodeType) -> Any:
        make, arguments, *rest = kept[CodeType](code)
        return (make, tuple("<dynamic-code>" if one == code.co_filename else one for one in arguments), *rest)

    monkeypatch.setattr(cloudpickle.Pickler, "dispatch_table", ChainMap({CodeType: without_file}, kept))

    def raises(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise ZeroDivisionError("no")

    flow = pk.Flow("k bigint").map_batches(raises).key_by("k").agg(n=pk.count())
    with pytest.raises(UserFunctionError) as caught:
        list(flow.run(pa.table({"k": [1]}), processes=processes))
    assert (caught.value.file, caught.value.line) == (__file__, raises.__code__.co_firstlineno + 1)
    assert b"<dynamic-code>" in cloudpickle.dumps(raises) and b"<dynamic-code>" not in _pickles.dumps(raises)


class Longest(pk.Aggregator):
    """The longest text of a key."""

    def create(self) -> str:
        return ""

    def accumulate(self, states: list[str], groups: pa.Int64Array, rows: pa.RecordBatch) -> None:
        for group, text in zip(groups.to_pylist(), rows["text"].to_pylist(), strict=True):
            states[group] = max(states[group], text, key=len)

    def merge(self, state: str, other: str) -> str:
        return max(state, other, key=len)

    def finish(self, states: list[str]) -> pa.Table:
        return pa.table({"longest": states})


@pytest.mark.parametrize("window", [None, pk.tumbling("10ms"), pk.session("10ms")])
def test_steps_of_users_take_columns_of_views(window: Any) -> None:
    texts = ["a", "a longer one than a view holds", "b"]
    views = pa.schema([("k", pa.string_view()), ("text", pa.string_view()), ("ts", pa.int64())])
    table = pa.table({"k": ["x", "x", "y"], "text": texts, "ts": [1, 2, 3]}).cast(views)
    keyed = pk.Flow(views, event_time="ts").key_by("k")

    def count(key: tuple[str], frames: Any, state: Any) -> Any:
        yield pd.DataFrame({"k": key, "longest": [max(text for frame in frames for text in frame["text"])]})

    flows = [
        (keyed if window is None else keyed.window(window)).aggregate(
            Longest(), columns=["text"], schema="longest string"
        )
    ]
    if window is None:
        flows.append(keyed.apply_in_pandas_with_state(count, "k string, longest string", "n bigint", "append"))
    for flow in flows:
        found = {row["k"]: row["longest"] for batch in flow.run(table) for row in batch.to_pylist()}
        assert found == {"x": texts[1], "y": "b"}
    step = ordered.partitioned(lambda n, batch: (n, [batch]), key="k", initial=0, batches=True)
    parts = list(ordered.Pipeline([step]).run(table.to_batches()))
    assert [part["text"].to_pylist() for part in parts] == [texts[:2], texts[2:]]


def test_sources_that_do_not_fit() -> None:
    flow = counting()
    for source, says in [
        (3, "the source is a int"),
        ("file.parquet", r"the source is a str, not Arrow data; of a file .* pyarrow\.parquet\.read_table\(path\)"),
        (Path("file.parquet"), r"Path, not Arrow data; of a file .* pyarrow\.dataset"),
        ([{"k": 1}], r"the source gives a dict, not Arrow data; .*pyarrow\.Table\.from_pylist\(rows\)"),
        ([1, 2], "the source gives a int"),
        ([(1,)], r"the source gives a tuple, not Arrow data; .*from_pylist"),
        (pa.table({"x": [1]}), "input has no column 'k'; it has x"),
        (pa.table({"k": ["a"]}), "'k' is string, expected int64"),
        (pa.table({"x": pa.array([], pa.int64())}), "input has no column 'k'; it has x"),
        (pa.array([1]), "the source, a Int64Array, is no table in Arrow"),
        (pa.array([{"k": 1}, None]), "the source, a StructArray, is no table in Arrow"),
        (pd.DataFrame({"k": [1, "a"]}), "the source, a DataFrame, is no table in Arrow: .*column k"),
    ]:
        with pytest.raises(SchemaError, match=says):
            list(flow.run(source))


def test_mistakes_show_at_the_call() -> None:
    with pytest.raises(ConfigError, match="workers=0"):
        counting().run(pa.table({"k": [1]}), workers=0)
    with pytest.raises(ConfigError, match=r"from 1 to 1024; a range is for run\.autobalance\(processes="):
        counting().run(pa.table({"k": [1]}), workers=(1, 2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch_rows=0"):
        counting().run(pa.table({"k": [1]}), batch_rows=0)
    with pytest.raises(ConfigError, match="workers=1180591620717411303424 must be an int from 1 to 1024"):
        counting().run(pa.table({"k": [1]}), workers=2**70)
    with pytest.raises(ConfigError, match="batch_rows=1180591620717411303424"):
        counting().start(batch_rows=2**70)
    with pytest.raises(PlanError):
        pk.Flow("k bigint").key_by("k").run(pa.table({"k": [1]}))
    with pytest.raises(ConfigError, match="late=3"):
        counting().start(late=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_empty_input(workers: int) -> None:
    assert counting().collect(pa.table({"k": pa.array([], pa.int64())}), workers).num_rows == 0
    assert counting().collect([], workers).schema == counting().output_schema


def test_progress_knows_the_rows_of_sources_that_tell_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"k": [1, 2, 1]})
    pq.write_table(table, tmp_path / "k.parquet")
    totals: list[Any] = []
    make = local._progress

    def watched() -> Any:
        bar = make()
        add = bar.add_task
        monkeypatch.setattr(
            bar, "add_task", lambda what, total, **more: (totals.append(total), add(what, total=total, **more))[1]
        )
        return bar

    monkeypatch.setattr(local, "_progress", watched)
    known = [table, table.to_batches()[0], [table, table], (table.to_batches()[0],), ds.dataset(tmp_path / "k.parquet")]
    unknown = [table.to_reader(), [table, table.to_reader()], iter([table])]
    for source in [*known, *unknown]:
        assert rows(counting().run(source, progress=True))
    assert totals == [3, 3, 6, 3, 3, None, None, None]


@pytest.mark.parametrize("bits", [-1, 21, 40, True, 2.0, "8"])
def test_bits_that_cannot_be_are_refused_by_their_name(bits: Any) -> None:
    with pytest.raises(ConfigError, match=f"bits={bits!r} must be an int from 0 to 20"):
        local.LocalSession(counting(), 1, bits=bits)


def test_progress_shows_and_changes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    table = pa.table({"k": [1, 2, 1]})
    assert rows(counting().run(table, progress=True)) == rows(counting().run(table))
    assert capfd.readouterr().out == ""


EVENTS = pk.Flow("k bigint, ts bigint", event_time="ts", lateness="1s").key_by("k").window(pk.tumbling("1s"))


def test_late_rows_go_to_the_callback_or_a_warning() -> None:
    flow = EVENTS.agg(n=pk.count())
    source = [
        pa.record_batch({"k": [1, 1], "ts": [100, 900]}),
        pa.record_batch({"k": [1, 1], "ts": [5_000, 300]}),  # within lateness still: the watermark moves after
        pa.record_batch({"k": [2, 1, 3], "ts": [999, 4_500, 0]}),  # the watermark is 4,000: two are late
    ]
    wanted = [(0, 1_000, 1, 3), (4_000, 5_000, 1, 1), (5_000, 6_000, 1, 1)]
    late: list[pa.RecordBatch] = []
    for workers in (1, 3):
        late.clear()
        assert rows(flow.run(source, workers, late=late.append, streaming=True)) == wanted
        assert sorted(k for batch in late for k in batch.column("k").to_pylist()) == [2, 3]
    with pytest.warns(LateRows, match="2 of 7 rows came when their windows had closed"):
        assert rows(flow.run(source, streaming=True)) == wanted
    with warnings.catch_warnings():
        warnings.simplefilter("error", LateRows)
        summary = flow.run_into(lambda batch: None, source, workers=2, streaming=True)
    assert (summary.rows, summary.output_rows, summary.late_rows) == (7, 3, 2)
    assert summary.rows_per_second > 0
    # Where the input ends with the last batch no row is too late for it.
    with warnings.catch_warnings():
        warnings.simplefilter("error", LateRows)
        summary = flow.run_into(lambda batch: None, source, workers=2)
    assert (summary.rows, summary.output_rows, summary.late_rows) == (7, 5, 0)
    timeless = pa.record_batch({"k": [1, 2], "ts": pa.array([None, 5], pa.int64())})
    with pytest.warns(LateRows, match="1 of 2 rows have no event time"):
        assert rows(flow.run(timeless)) == [(0, 1_000, 2, 1)]


def test_more_rows_than_a_batch_give_one_row_per_key() -> None:
    table = pa.table({"k": [number % 3 for number in range(200_000)]})
    for workers in (1, 2):
        for emit in (None, "update", "final"):
            flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit=emit)
            assert rows([flow.collect(table, workers)]) == [(0, 66_667), (1, 66_667), (2, 66_666)]
    largest = pk.Flow("k bigint").key_by("k").agg(n=pk.count()).top(1, by="n")
    assert rows(largest.run(table, batch_rows=1_000)) == [(0, 66_667), (1, 66_667)]
    with pytest.raises(PlanError, match="emit='final' in the agg"):
        largest.run(table, streaming=True)
    with pytest.raises(ConfigError, match="streaming='yes'"):
        largest.run(table, streaming="yes")  # type: ignore[arg-type]


HOSTS: list[dict[str, int]] = [{}, {"workers": 3}, {"processes": 2}]


@pytest.mark.parametrize("how", HOSTS, ids=["one", "threads", "processes"])
def test_a_batch_of_a_stream_is_one_epoch_whatever_its_size(how: dict[str, int]) -> None:
    """So no row of it is late for another, and a key has one update."""
    n = 200_000
    batch = pa.record_batch({"k": [at % 3 for at in range(n)], "ts": list(range(n, 0, -1))})
    updates = pk.Flow(batch.schema).key_by("k").agg(n=pk.count())
    assert rows(updates.run([batch], streaming=True, **how)) == [(0, 66_667), (1, 66_667), (2, 66_666)]
    late: list[pa.RecordBatch] = []
    windows = EVENTS.agg(n=pk.count())
    # With the second batch two rows are too late for the first one.
    behind = pa.record_batch({"k": [0, 0, 0], "ts": [n, n - 3_000, 5]})
    got = pa.Table.from_batches(windows.run([batch, behind], streaming=True, late=late.append, **how))
    assert sum(got["n"].to_pylist()) == n + 1 and got.num_rows == len({(row[0], row[2]) for row in rows([got])})
    assert rows(late) == [(0, 5), (0, n - 3_000)]
    # It is cut by who asks for that, and of a table each chunk is a batch.
    with updates.start(streaming=True, batch_rows=70_000) as session:
        assert len(rows(session.run(batch))) == 3 * 3 and session.epoch == 3
    with updates.start(streaming=True, **how) as session:
        assert len(rows(session.run(pa.Table.from_batches([batch, batch])))) == 2 * 3 and session.epoch == 2
        assert session.rows == 2 * n


def test_results_of_a_batch_do_not_wait_for_a_larger_one_behind_it_nor_go_with_its_error() -> None:
    gate, ended, waited = threading.Event(), threading.Event(), list[bool]()

    def fails(batch: pa.RecordBatch) -> pa.RecordBatch:
        waited.append(gate.wait(60) if batch.num_rows > 1 else ended.wait(60))
        if batch.num_rows > 1:
            raise ValueError("a typo")
        return batch

    def source() -> Iterator[pa.RecordBatch]:
        # Of the second there are more pieces than may be under way.
        yield from (pa.record_batch({"k": range(size)}) for size in (1, 400_000))
        # The first is done when the end is waiting for room, or before: its results come either way.
        threading.Timer(0.3, ended.set).start()

    flow = pk.Flow("k bigint").map_batches(fails).key_by("k").agg(n=pk.count())
    results = iter(flow.run(source(), streaming=True))
    assert next(results).to_pylist() == [{"k": 0, "n": 1}]
    gate.set()
    with pytest.raises(UserFunctionError, match="a typo"):
        next(results)
    assert all(waited)


def test_a_batch_of_a_stream_is_one_epoch_however_wide_its_rows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_BLOCK_BYTES", 5_000)
    text = pa.record_batch({"k": [0, 1] * 20, "text": ["x" * 999] * 40})
    sizes: list[int] = []

    def seen(batch: pa.RecordBatch) -> pa.RecordBatch:
        sizes.append(batch.num_rows)
        return batch

    flow = pk.Flow("k bigint, text string").map_batches(seen).key_by("k").agg(n=pk.count())
    # As it comes, and where it grows only when it is made to fit.
    for batch in (text, text.set_column(1, "text", text["text"].dictionary_encode())):
        sizes.clear()
        with flow.start(2, streaming=True) as session:
            assert rows(session.run([batch, batch])) == [(0, 20), (0, 40), (1, 20), (1, 40)] and session.epoch == 2
        assert sum(sizes) == 80 and max(sizes) <= 5, "in pieces"


def test_pieces_of_an_epoch_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several sources, late rows, side outputs and moves for an epoch."""
    rng = random.Random(7)

    def drawn(number: int, base: int) -> pa.RecordBatch:
        times = [base + rng.randrange(-3_000, 1_000) for _ in range(number)]
        return pa.record_batch({"k": [rng.randrange(4) for _ in times], "ts": times})

    given = {name: [drawn(rng.randrange(1, 20), at * 1_000) for at in range(8)] for name in ("a", "b")}
    a = pk.Flow("k bigint, ts bigint", event_time="ts", lateness="1s", name="a")
    b = pk.Flow("k bigint, ts bigint", event_time="ts", lateness="1s", name="b")

    def noted(total: int | None, k: int, ts: int) -> tuple[int, list[Any]]:
        total = (total or 0) * 3 % 1_009 + ts
        return total, [(k, total), *([pk.side("odd", (ts,))] if ts % 2 else [])]

    keyed = a.union(b).key_by("k")
    windows = keyed.window(pk.tumbling("1s")).agg(n=pk.count())
    states = keyed.stateful_map(noted, schema="k bigint, total bigint", sides={"odd": "ts bigint"})

    def made(flow: pk.Flow, workers: int, pieces: bool, sides: bool) -> list[Any]:
        late: list[pa.RecordBatch] = []
        odd: list[pa.RecordBatch] = []
        # Where nothing is cut there is a piece for an epoch.
        monkeypatch.setattr(local, "_BLOCK_ROWS", 3 if pieces else 100)
        taken: dict[str, Any] = {"sides": {"odd": odd.append}} if sides else {"late": late.append}
        with flow.start(workers, streaming=True, **taken) as session:
            session.migrate(to=[workers - 1] * 256, at_epoch=9, strategy="all-at-once")
            got = rows(session.run(given))
            assert session.epoch == 16 and session.rows == sum(x.num_rows for x in (*given["a"], *given["b"]))
            assert session.late_rows == sum(batch.num_rows for batch in late)
            assert session.side_rows == ({"odd": sum(batch.num_rows for batch in odd)} if sides else {})
        assert session.stats()["epochs"].to_pylist() == [17] * workers, "each batch, and the end"
        assert session.owners()[0] == [workers - 1] * 256
        return [got, rows(late), rows(odd)]

    for flow, sides in ((windows, False), (states, True)):
        for workers in (1, 3):
            whole, cut = (made(flow, workers, pieces, sides) for pieces in (False, True))
            assert cut == whole and whole[0] and whole[2 if sides else 1]


def test_an_epoch_in_pieces_waits_for_room() -> None:
    """It counts as many as it has of what may be under way: large batches do not pile up."""
    gate, computed, seen = threading.Event(), [], []

    def held(batch: pa.RecordBatch) -> pa.RecordBatch:
        gate.wait(60)
        computed.append(batch.num_rows)
        return batch

    plan, calls = pk.Flow("k bigint").map_batches(held).to_plan(True)
    one = pa.record_batch({"k": [1, 2]})
    with _native.LocalRun(plan, calls, ahead=4) as run:
        assert run.push([one] * 5)

        def next_one() -> None:
            assert run.push([one])
            seen.append(sum(computed))

        pushing = threading.Thread(target=next_one)
        pushing.start()
        gate.set()
        pushing.join(60)
        assert seen[0] >= 10 and run.next_epoch == 2
        assert run.push([])
        with pytest.raises(SchemaError):
            run.push([one, pa.record_batch({"x": [1]})])
        assert run.next_epoch == 3
        run.finish()
        assert sum(pa.record_batch(batch).num_rows for _, batch in iter(run.take, None)) == 12


def test_an_epoch_in_pieces_outlives_an_interrupt_at_any_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_BLOCK_ROWS", 2)
    flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="update")
    blocks = [pa.record_batch({"k": [number, 7, number, 7, 7]}) for number in range(3)]

    def taken() -> Any:
        return flow.run(iter(blocks), streaming=True)

    expected = [rows([batch]) for batch in taken()]
    assert expected == [[(number, 2), (7, 3 * number + 3)] for number in range(3)]
    at_every_instruction(taken, expected, stride=7, show=lambda batch: rows([batch]))


@pytest.mark.parametrize("how", [{"workers": 2}, {"processes": 2}], ids=["threads", "processes"])
def test_rows_that_come_as_they_are_made_come_batch_by_batch(how: dict[str, Any]) -> None:
    """A worker that was done with its part of a batch went on to the next one, and told of it at once."""

    def step(state: Any, k: int, batch: int) -> tuple[Any, list[tuple[int]]]:
        if (k, batch) == (0, 0):
            time.sleep(0.2)  # work of one worker, while others have none
        return state, [(batch,)] * 3_000

    twice = pk.Flow("k bigint, batch bigint").flat_map(
        lambda k, batch: [(k, batch)] * 2, "k bigint, batch bigint", rows=True
    )
    flow = twice.key_by("k").stateful_map(step, schema="batch bigint")
    batches = [pa.record_batch({"k": list(range(16)), "batch": [number] * 16}) for number in range(6)]
    told = [result["batch"].to_pylist() for result in flow.run(iter(batches), streaming=True, **how)]
    assert [number for result in told for number in result] == [number for number in range(6) for _ in range(96_000)]


def test_a_batch_with_an_error_in_a_later_piece_is_not_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_BLOCK_BYTES", 100)
    good = pa.record_batch({"k": pa.array(range(100), pa.int64())})
    bad = pa.record_batch({"k": pa.array([*range(99), 2**63], pa.uint64())})
    with pk.Flow("k bigint").map_batches(lambda batch: batch).start(streaming=True) as session:
        found = []
        with pytest.raises(SchemaError):
            for batch in session.run([good, bad, good]):
                found += batch["k"].to_pylist()
        assert found == list(range(100)) and session.epoch == 1


TIMES = st.lists(st.tuples(st.integers(0, 3), st.one_of(st.none(), st.integers(-90, 90))), max_size=60)


@settings(max_examples=examples(60), deadline=None)
@given(
    events=TIMES,
    size=st.integers(1, 40),
    every=st.integers(1, 40),
    workers=st.integers(1, 3),
    batch_rows=st.integers(1, 30),
)
def test_windows_of_any_size_and_step_against_plain_python(
    events: list[tuple[int, int | None]], size: int, every: int, workers: int, batch_rows: int
) -> None:
    """In any order of rows and however they are cut; rows between windows are in none."""
    wanted: dict[tuple[int, int, int], int] = {}
    for k, ts in events:
        if ts is None:
            continue
        start = ts // every * every
        while start + size > ts:
            wanted[start, start + size, k] = wanted.get((start, start + size, k), 0) + 1
            start -= every
    table = pa.table(
        {name: pa.array([event[at] for event in events], pa.int64()) for at, name in enumerate(("k", "ts"))}
    )
    windows = (
        pk.Flow("k bigint, ts bigint", event_time="ts").key_by("k").window(pk.sliding(f"{size}ms", every=f"{every}ms"))
    )
    late: list[pa.RecordBatch] = []
    got = rows(windows.agg(n=pk.count()).run(table, workers, batch_rows=batch_rows, late=late.append))
    assert got == sorted((*key, n) for key, n in wanted.items())
    assert sum(batch.num_rows for batch in late) == sum(ts is None for _, ts in events)


def test_sinks(tmp_path: Path) -> None:
    flow = counting()
    with pq.ParquetWriter(tmp_path / "out.parquet", flow.output_schema) as writer:
        flow.run_into(writer, pa.table({"k": [1, 1, 2]}), workers=2)
    assert sorted(pq.read_table(tmp_path / "out.parquet").column("n").to_pylist()) == [1, 2]
    with pytest.raises(ConfigError, match="neither a function"):
        flow.run_into(3, pa.table({"k": [1]}))

    def full(batch: pa.RecordBatch) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        flow.run_into(full, pa.table({"k": [1]}))


@pytest.mark.usefixtures("no_threads_left")
def test_leaving_early_stops_the_workers() -> None:
    read = 0

    def endless() -> Iterator[pa.RecordBatch]:
        nonlocal read
        while True:
            read += 1
            yield pa.record_batch({"k": [read]})

    flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="update")
    for number, _ in enumerate(flow.run(endless(), workers=3, streaming=True)):
        if number == 5:
            break
    assert read < 100, "the source was read far ahead of what was taken"


@pytest.mark.usefixtures("no_threads_left")
def test_an_error_of_the_source_ends_the_run() -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"k": [1]})
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        list(counting().run(broken(), workers=2))


@pytest.mark.usefixtures("no_threads_left")
@pytest.mark.parametrize(
    "options",
    [
        {"streaming": True, "workers": 2},
        {"streaming": True},
        {"workers": 2},
        {"streaming": True, "processes": 1},
    ],
    ids=str,
)
def test_what_was_read_before_an_error_of_the_source_comes_out(options: dict[str, Any]) -> None:
    flow = pk.Flow("k bigint, ts bigint", event_time="ts").map_batches(lambda batch: batch)
    sides = flow.map_batches(lambda batch: (batch, pk.side("seen", batch)), sides={"seen": "k bigint, ts bigint"})

    def broken() -> Iterator[pa.RecordBatch]:
        for n in range(9):
            yield pa.record_batch({"k": [n], "ts": [n]})
        raise RuntimeError("the source broke")

    for _ in range(1 if "processes" in options else 40):
        beside: list[pa.RecordBatch] = []
        results = sides.run(broken(), sides={"seen": beside.append}, **options)
        assert [k for batch in itertools.islice(results, 9) for k in batch["k"].to_pylist()] == list(range(9))
        with pytest.raises(RuntimeError, match="the source broke"):
            next(results)
        assert [k for batch in beside for k in batch["k"].to_pylist()] == list(range(9))
        assert next(results, None) is None


def test_an_error_of_the_source_closes_no_window() -> None:
    """And calls no function for the rows that wait in it: the input has not ended."""
    flow = EVENTS.agg(n=pk.count())

    def broken() -> Iterator[pa.RecordBatch]:
        for ts in (100, 2_500, 5_000):
            yield pa.record_batch({"k": [1], "ts": [ts]})
        raise RuntimeError("the source broke")

    for streaming, wanted in ((True, [(0, 1_000, 1, 1), (2_000, 3_000, 1, 1)]), (False, [])):
        results = flow.run(broken(), streaming=streaming)
        assert rows(itertools.islice(results, len(wanted))) == wanted
        with pytest.raises(RuntimeError, match="the source broke"):
            next(results)


def test_sources_take_turns_with_their_errors() -> None:
    flow = pk.Flow("k bigint", name="a").union(pk.Flow("k bigint", name="b")).map_batches(lambda batch: batch)
    given = {
        "a": [pa.table({"k": [0]}), pa.table({"k": [2]}), pa.table({"wrong": [4]})],
        "b": [pa.table({"k": [n]}) for n in (1, 3, 5, 7, 9)],
    }
    for _ in range(40):
        found: list[int] = []
        with pytest.raises(SchemaError, match="has no column 'k'"):
            for batch in flow.run(given, streaming=True):
                found += batch["k"].to_pylist()
        assert found == [0, 1, 2, 3]


@pytest.mark.usefixtures("no_threads_left")
@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_user_function_names_it(workers: int) -> None:
    def fails(state: Any, k: int) -> tuple[Any, Any]:
        if k == 13:
            raise KeyError("unlucky")
        return state, None

    flow = pk.Flow("k bigint").key_by("k").stateful_map(fails, schema="k bigint")
    with pytest.raises(UserFunctionError, match="unlucky") as caught:
        list(flow.run(pa.table({"k": list(range(20))}), workers, batch_rows=3))
    error = caught.value
    assert "fails" in error.step and error.file == __file__
    assert error.line == fails.__code__.co_firstlineno + 2
    assert isinstance(error.__cause__, KeyError)
    assert error.row is not None and error.row["k"] == 13
    shown = "".join(traceback.format_exception(error))
    assert "in loop" in shown and "loop.py" not in shown and "__all__" not in shown, "lines of another file"

    def maps(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise ValueError("not this one")

    with pytest.raises(UserFunctionError, match="not this one"):
        list(pk.Flow("k bigint").map_batches(maps).run(pa.table({"k": [1]}), workers))
    with pytest.raises(UserFunctionError, match="map_batches"):
        list(pk.Flow("k bigint").map_batches(lambda batch: 3).run(pa.table({"k": [1]}), workers))


OPS = st.lists(st.tuples(st.integers(0, 6), st.integers(-5, 5)), max_size=80)


@settings(max_examples=examples(30), deadline=None)
@given(ops=OPS, workers=st.integers(1, 4), batch_rows=st.integers(1, 30))
def test_state_per_key_sees_rows_in_order(ops: list[tuple[int, int]], workers: int, batch_rows: int) -> None:
    state: dict[int, int] = {}
    wanted = []
    for k, v in ops:
        state[k] = state.get(k, 0) * 3 + v
        wanted.append((k, state[k]))
    flow = pk.Flow("k bigint, v bigint").key_by("k").stateful_map(running, schema="k bigint, total bigint")
    table = pa.table(
        {"k": pa.array([op[0] for op in ops], pa.int64()), "v": pa.array([op[1] for op in ops], pa.int64())}
    )
    got = [
        tuple(row.values()) for batch in flow.run(table, workers, batch_rows=batch_rows) for row in batch.to_pylist()
    ]
    for key in range(7):
        assert [row for row in got if row[0] == key] == [row for row in wanted if row[0] == key]


@settings(max_examples=examples(20), deadline=None)
@given(ops=OPS, workers=st.integers(1, 3))
def test_updates_end_in_the_final_values(ops: list[tuple[int, int]], workers: int) -> None:
    flow = pk.Flow("k bigint, v bigint").key_by("k")
    aggs = {"n": pk.count(), "s": pk.sum("v"), "lo": pk.min("v"), "hi": pk.max("v"), "avg": pk.mean("v")}
    table = pa.table(
        {"k": pa.array([op[0] for op in ops], pa.int64()), "v": pa.array([op[1] for op in ops], pa.int64())}
    )
    last = {}
    for batch in flow.agg(**aggs).run(table, workers, batch_rows=7, streaming=True):
        for row in batch.to_pylist():
            last[row["k"]] = row
    final = {row["k"]: row for row in flow.agg(**aggs).collect(table, workers, batch_rows=9).to_pylist()}
    wanted: dict[int, list[int]] = {}
    for k, v in ops:
        wanted.setdefault(k, []).append(v)
    assert last == final
    assert final == {
        k: {"k": k, "n": len(vs), "s": sum(vs), "lo": min(vs), "hi": max(vs), "avg": sum(vs) / len(vs)}
        for k, vs in wanted.items()
    }


@pytest.mark.parametrize(("strategy", "steps"), [("all-at-once", 1), ("batched", 8), ("fluid", 128)])
def test_migrating_state_by_hand(strategy: str, steps: int) -> None:
    flow = pk.Flow("k bigint, v bigint").key_by("k").stateful_map(running, schema="k bigint, total bigint")
    source = [pa.record_batch({"k": list(range(50)), "v": [step] * 50}) for step in range(12)]
    wanted = rows(flow.run(source))
    reports: list[MigrationReport] = []
    with flow.start(workers=2) as session:

        def feed() -> Iterator[pa.RecordBatch]:
            for number, batch in enumerate(source):
                if number == 4:
                    reports.append(session.migrate(to=[1] * 256, strategy=strategy).wait("1m"))
                    assert [set(owners) for owners in session.owners()] == [{1}]
                if number == 8:
                    reports.append(session.migrate(to=[0] * 256, strategy=strategy).wait(timeout=60))
                yield batch

        assert rows(session.run(feed())) == wanted
    assert [report.bins for report in reports] == [128, 256]
    assert len(reports[0].steps) == steps


def test_migrations_that_make_no_sense() -> None:
    with counting().start(workers=2) as session:
        for wrong, says in [
            ({"to": [2] * 256}, "no worker 2"),
            ({"to": [0]}, "there are 256 bins"),
            ({"moves": {256: 0}}, "no bin 256"),
            ({"moves": {0: 1}, "to": [0] * 256}, "not both"),
            ({"strategy": "hasty"}, "strategy 'hasty' is none of"),
            ({"batch_size": 0}, "batch_size=0"),
            ({"max_pause": 0}, "0"),
            ({"max_pause": 2**70}, "max_pause=1180591620717411303424 must be at least 0.001 s and at most"),
            ({"max_pause": "1s", "strategy": "all-at-once"}, "is one step"),
        ]:
            with pytest.raises(ConfigError, match=says):
                session.migrate(**wrong)  # type: ignore[arg-type]
    with pk.Flow("k bigint").start() as stateless, pytest.raises(ConfigError, match="no state"):
        stateless.migrate(moves={0: 0})


def test_a_migration_tells_what_it_did() -> None:
    with counting().start(workers=2) as session:
        before = session.owners()
        there = session.migrate(moves=dict.fromkeys(range(8), 1), batch_size=2)
        back = session.migrate(to=before[0], strategy="fluid")
        assert isinstance(there, Migration) and isinstance(back, Migration)
        done, undone = there.wait("1 minute"), back.wait(progress=True)
        assert there.done and back.done and there.report == done and there.error is None
        assert (done.bins, len(done.steps), done.queries) == (4, 2, ()) and done.seconds >= 0
        assert (undone.strategy, undone.bins, len(undone.steps)) == ("fluid", 4, 4)
        assert undone.ended >= done.ended >= done.started > 0
        assert session.owners() == before
        assert session.rebalance().wait(60).bins == 0, "it is even"
        moves = session.moves()
        paced = session.migrate(to=[1 - owner for owner in before[0]], strategy="matched", max_pause="10s").wait(60)
        assert paced.bins == 256 and [step.bins for step in paced.steps][:3] == [2, 4, 8]
        assert sum(step.bins for step in paced.steps) == 256 and paced.longest_pause_s > 0
    assert moves.schema.names == ["op", "worker", "bin", "what", "bytes", "at", "routed_rows"]
    assert set(moves.column("bin").to_pylist()) == {0, 2, 4, 6}
    assert moves.schema.field("at").type == pa.timestamp("ns", "UTC")


def test_a_migration_is_prepared_for_an_epoch() -> None:
    flow = pk.Flow("k bigint, v bigint").key_by("k").stateful_map(running, schema="k bigint, total bigint")
    source = [pa.record_batch({"k": list(range(50)), "v": [step] * 50}) for step in range(12)]
    wanted = rows(flow.run(source))
    with flow.start(workers=2, streaming=True) as session:
        before = session.owners()[0]
        half = {bin_: 1 - before[bin_] for bin_ in range(128)}
        others = {bin_: 1 - before[bin_] for bin_ in range(128, 256)}
        prepared = [session.migrate(moves=half, strategy="all-at-once", at_epoch=epoch) for epoch in (5, 8)]
        beside = session.migrate(moves=others, strategy="matched", batch_size=4, at_epoch=5)
        never = session.migrate(to=[0] * 256, at_epoch=99)

        def feed() -> Iterator[pa.RecordBatch]:
            for number, batch in enumerate(source):
                yield batch
                if number == 6:
                    assert session.epoch >= 6
                    with pytest.raises(ConfigError, match="epoch 5 has passed"):
                        session.migrate(moves={0: 0}, at_epoch=5)
                    beside.wait(60)
                    back = session.migrate(moves={bin_: before[bin_] for bin_ in others}).wait(60)
                    assert back.bins == 128, "it may be anywhere, as far as is known"
            told = [migration.wait(60) for migration in (*prepared, beside)]
            assert [(report.bins, [step.epoch for step in report.steps[:1]]) for report in told] == [
                (128, [5]),
                (0, []),
                (128, [5]),
            ], "the second finds them there"
            assert len(told[2].steps) == 16
            never.cancel()
            assert never.wait(60).bins == 0
            after = [half.get(bin_, owner) for bin_, owner in enumerate(before)]
            assert session.owners() == [after]
            assert session.migrate(to=before).wait(60).bins == 128, "what has come about is known again"
            for wrong in (-1, True, 2.0, "3"):
                with pytest.raises(ConfigError, match="must be the number of an epoch to come"):
                    session.migrate(at_epoch=wrong)  # type: ignore[arg-type]

        assert rows(session.run(feed())) == wanted
    with counting().start(workers=2) as session, pytest.raises(ConfigError, match="the whole input is one epoch"):
        session.migrate(at_epoch=3)


def test_a_gap_lets_what_waited_go_first() -> None:
    sessions: list[Any] = []

    def held(total: int | None, k: int, v: int) -> tuple[int, tuple[int, int]]:
        if v == 1:
            wait_for(lambda: sessions[0].epoch >= 4)
        return running(total, k, v)

    source = [pa.record_batch({"k": list(range(50)), "v": [step] * 50}) for step in range(12)]
    flow = pk.Flow("k bigint, v bigint").key_by("k")
    wanted = rows(flow.stateful_map(running, schema="k bigint, total bigint").run(source))
    with flow.stateful_map(held, schema="k bigint, total bigint").start(workers=2, streaming=True) as session:
        sessions.append(session)
        assert session.rebalance(gap="drain").wait(60).bins == 0, "it is even"
        with pytest.raises(ConfigError, match="gap='soon' is neither 'drain' nor None"):
            session.migrate(gap="soon")
        to = [1 - owner for owner in session.owners()[0]]
        options: Any = {"strategy": "batched", "batch_size": 64}
        moved = session.migrate(to=to, at_epoch=2, gap="drain", **options)

        def feed() -> Iterator[pa.RecordBatch]:
            yield from source
            report = moved.wait(60)
            epochs = [step.epoch for step in report.steps]
            assert (epochs[0], len(epochs), report.bins) == (2, 4, 256)
            # Two more had been fed when the second batch was still held, so when the first step was complete.
            assert epochs[1] >= 4
            assert session.owners() == [to]

        assert rows(session.run(feed())) == wanted


def test_a_session_that_has_just_begun_tells_where_its_bins_are() -> None:
    for _ in range(50):
        with counting().start(workers=2) as session:
            # No worker has had the time to tell anything.
            assert session.owners() == [[number % 2 for number in range(256)]]
            assert (session.bins().num_rows, session.loads().num_rows) == (256, 256)


def test_loads_are_measured_and_evened_out() -> None:
    keys = [key for key in range(2_000) for _ in range(50)]
    with counting().start(workers=2) as session:
        session.migrate(to=[0] * 224 + [1] * 32).wait(60)
        counted = list(session.run(pa.table({"k": keys}).to_batches(max_chunksize=10_000)))
        loads = session.loads()
    assert loads.schema.names == ["bin", "bits", "worker", "rows", "busy_s"] and loads.num_rows == 256
    # One row in eight, for eight: 100,000 within a few of each block.
    assert sum(loads.column("rows").to_pylist()) == pytest.approx(100_000, rel=0.01)
    assert sum(sum(batch.column("n").to_pylist()) for batch in counted) == 100_000
    with counting().start(workers=2) as session:
        moved: list[int] = []

        def paced() -> Iterator[pa.Table]:
            session.migrate(to=[0] * 224 + [1] * 32).wait(60)
            yield pa.table({"k": keys})
            wait_for(lambda: sum(session.loads().column("rows").to_pylist()) > 99_000, what="all rows are routed")
            moved.append(session.rebalance(by="rows", tolerance=1.1).wait(60).bins)
            loads = session.loads().to_pylist()
            of_0 = sum(row["rows"] for row in loads if row["worker"] == 0)
            moved.append(200 * of_0 // sum(row["rows"] for row in loads))

        counted = list(session.run(paced()))
    assert sum(sum(batch.column("n").to_pylist()) for batch in counted) == 100_000
    assert 45 <= moved[0] <= 100 and 90 <= moved[1] <= 110, moved
    with counting().start(workers=2) as session:
        for wrong, says in [({"by": "keys"}, "by='keys'"), ({"by": "rows", "tolerance": 0.9}, "tolerance=0.9")]:
            with pytest.raises(ConfigError, match=says):
                session.rebalance(**wrong)  # type: ignore[arg-type]


def test_a_migration_that_was_cancelled_leaves_the_bins_where_they_are() -> None:
    with counting().start(workers=2) as session:
        before, cuts = session.owners()[0], []
        # On a busy machine all may have moved before it is cancelled.
        while len(cuts) < 50 and min(cuts, default=128) == 128:
            cut = session.migrate(to=[1] * 256, strategy="fluid")
            cut.cancel()
            even = session.migrate(to=before)  # planned from where the bins are then
            cuts.append(cut.wait(60).bins)
            assert even.wait(60).bins == cuts[-1]
            assert session.owners() == [before]
            cut.cancel()
    assert cuts[-1] < 128, cuts


def test_what_waits_behind_a_migration_that_is_cancelled_ends_where_it_was_to() -> None:
    with counting().start(workers=2) as session:
        session.migrate(to=[0] * 256).wait(60)
        cut = session.migrate(to=[1] * 256, strategy="fluid")
        behind = session.migrate(to=[1] * 128 + [0] * 128)
        cut.cancel()
        behind.wait(60)
        assert session.owners() == [[1] * 128 + [0] * 128]


def test_parts_behind_a_migration_that_is_cancelled_end_where_they_were_to() -> None:
    with counting().start(workers=2) as session:
        session.migrate(to=[0] * 256).wait(60)
        early = session.migrate(to=[1] * 256, strategy="fluid")
        session.split(0, by=2)
        cut = session.migrate(to=[1] * 256, strategy="fluid")
        behind = session.migrate(to=[1] * 256, strategy="all-at-once")
        early.cancel()
        cut.cancel()
        behind.wait(60)
        assert set(session.bins().column("worker").to_pylist()) == {1}
        cut = session.migrate(moves={(0, 10): 0, (1, 10): 0, (2, 10): 0}, strategy="fluid")
        merged = session.merge(0)
        cut.cancel()
        merged.wait(60)
        assert session.bins().num_rows == 256
        session.split(3).wait(60)
    workers = [row["worker"] for row in session.loads().to_pylist()]
    assert len(workers) == 257 and set(workers) <= {0, 1}, "those of the end"


def test_a_source_that_is_refused_costs_no_session() -> None:
    with counting().start() as session:
        with pytest.raises(ConfigError):
            session.run({"other": pa.table({"k": [1]}), "input": pa.table({"k": [1]})})
        assert len(list(session.run(pa.table({"k": [1]})))) == 1


def test_a_frame_is_at_hand_and_a_reader_is_not() -> None:
    class Frame:
        def __arrow_c_stream__(self, schema: Any = None) -> Any:
            raise AssertionError("nobody reads it")

        def __len__(self) -> int:
            return 1

    table = pa.table({"k": [1]})
    assert local._is_at_hand(Frame()) and local._is_at_hand([table, Frame()])
    assert not local._is_at_hand(table.to_reader())


def test_a_run_that_is_collected_in_its_own_worker_ends() -> None:
    """In a process of its own: what hangs would hang for good."""
    program = """
import gc, threading, time
import pyarrow as pa
import penstock as pk

def work(batch):
    time.sleep(0.02)
    gc.collect()
    return batch

flow = pk.Flow("k bigint").map_batches(work).key_by("k").agg(n=pk.count())
before = threading.active_count()
table = pa.table({"k": range(1000)})
holder = [flow.run(table, workers=2, streaming=True, batch_rows=10)]
holder.append(holder)
next(holder[0])
del holder
deadline = time.monotonic() + 60
while threading.active_count() > before and time.monotonic() < deadline:
    time.sleep(0.05)
gc.collect()
print(threading.active_count() <= before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=110)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_failed_is_gone_when_it_is_closed(workers: int) -> None:
    """The exception has the frames that it went through, and those the run, which must not keep it."""

    class Held:
        pass

    def failed(held: Held) -> None:
        def work(batch: pa.RecordBatch) -> pa.RecordBatch:
            raise ValueError(f"not with {held}")

        with pytest.raises(UserFunctionError, match="not with"):
            pk.Flow("k bigint").map_batches(work).collect(pa.table({"k": [1]}))
        with pk.Flow("k bigint").map_batches(work).start(workers) as session:
            with pytest.raises(UserFunctionError, match="not with"):
                list(session.run(pa.table({"k": [1, 2]})))
            session.close()
            assert session._native.failed

    alive: weakref.WeakSet[Held] = weakref.WeakSet()
    for _ in range(3):
        held = Held()
        alive.add(held)
        failed(held)
        del held

    def gone() -> bool:
        gc.collect()
        return not alive

    wait_for(gone, timeout=10, what="their end")


def test_an_error_of_a_flow_within_a_function_keeps_its_cause() -> None:
    """It is that of the outer flow as well, and was its own cause: who walked along the causes never came to an end."""

    def inner(batch: pa.RecordBatch) -> pa.RecordBatch:
        return {}["none"]

    def fail(*_: Any) -> Any:
        pk.Flow("k bigint").map_batches(inner).collect(pa.table({"k": [1]}))

    class Failing(pk.Aggregator):
        def create(self) -> Any:
            return 0

        def accumulate(self, states: Any, groups: Any, rows: Any) -> Any:
            return fail()

        def merge(self, state: Any, other: Any) -> Any:
            return state

        def finish(self, states: Any) -> Any:
            return fail()

    flow = pk.Flow("k bigint")
    keyed = flow.key_by("k")
    for failing in (
        flow.map_batches(fail),
        flow.flat_map(fail, rows=True),
        flow.flat_map(fail),
        keyed.stateful_map(fail, schema="k bigint"),
        keyed.stateful_map(fail, schema="k bigint", at_end=fail),
        keyed.stateful_map(lambda state, k: (k, None), schema="k bigint", at_end=fail),
        keyed.apply_in_pandas_with_state(fail, "k bigint", "n bigint"),
        keyed.aggregate(Failing(), schema="n bigint"),
    ):
        with pytest.raises(UserFunctionError, match="KeyError: 'none'") as failed:
            failing.collect(pa.table({"k": [1]}))
        assert isinstance(failed.value.__cause__, KeyError) and failed.value.__cause__.__cause__ is None


def test_figures_are_a_table() -> None:
    with counting().start(workers=2) as session:
        list(session.run(pa.table({"k": [1, 2, 3]})))
        stats = session.stats()
        assert sum(stats.column("rows").to_pylist()) == 3
        assert stats.column("worker").to_pylist() == [0, 1] and stats.column("bins").to_pylist() == [128, 128]
    assert session.stats() == stats, "as of its end"
    with pk.Flow("k bigint").start() as other:
        assert other.stats().schema == stats.schema and other.owners() == [] and other.moves().num_rows == 0


def test_a_session_runs_once() -> None:
    with counting().start() as session:
        list(session.run(pa.table({"k": [1]})))
        with pytest.raises(EngineError, match="already run"):
            session.run(pa.table({"k": [1]}))
        session.close()
    with counting().start() as closed:
        closed.close()
        with pytest.raises(EngineError, match=ENDED):
            closed.run(pa.table({"k": [1]}))


ENDED = r"^this session has ended; start another with flow\.start\(\)$"


@pytest.mark.parametrize("streaming", [True, False])
def test_a_session_that_has_ended_says_so_and_tells_what_it_was(streaming: bool) -> None:
    source = [pa.table({"k": [n, n]}) for n in range(3)]
    with counting().start(2, streaming=streaming) as session:
        assert session.epoch == 0
        for batch in source:
            session._native.push(batch.to_batches()[0])
        assert session.epoch == 3
        bins = session.bins()
        waiting = session.migrate(to=[1] * 256, at_epoch=9) if streaming else None
    for call in (
        lambda: session.migrate(to=[1] * 256),
        lambda: session.split(0),
        lambda: session.merge(0),
        session.rebalance,
        session.autobalance,
        lambda: session.run(source),
    ):
        with pytest.raises(EngineError, match=ENDED):
            call()
    assert session.bins().drop(["state_bytes"]) == bins.drop(["state_bytes"]) and session.epoch == 3
    assert session.stats().num_rows == 2 and session.loads().num_rows == 256
    if waiting is not None:
        with pytest.raises(EngineError, match=r"^the session ended before this migration did"):
            waiting.wait()


@pytest.mark.parametrize("streaming", [True, False])
def test_the_epoch_of_a_session_is_the_number_of_batches_that_were_fed(streaming: bool) -> None:
    seen: list[int] = []

    def source(fails: bool) -> Iterator[pa.RecordBatch]:
        for n in range(3):
            yield pa.record_batch({"k": [n]})
        if fails:
            raise OSError("the disk is gone")

    with counting().start(streaming=streaming) as session:
        for _ in session.run(source(False)):
            seen.append(session.epoch)
        assert session.epoch == 3 and set(seen) <= {1, 2, 3}
    assert session.epoch == 3
    with counting().start(streaming=streaming) as session, pytest.raises(OSError, match="the disk"):
        list(session.run(source(True)))
    assert session.epoch == 3


def test_a_run_that_has_ended_says_so() -> None:
    run = counting().run(pa.table({"k": [1]}))
    assert rows(run) == [(1, 1)]
    for call in (run.autobalance, lambda: run.rescale(2)):
        with pytest.raises(EngineError, match=r"^the run has ended; start another with flow\.run\(\)$"):
            call()
    with counting().start(streaming=True) as session:

        def source() -> Iterator[pa.RecordBatch]:
            yield pa.record_batch({"k": [1]})
            session.close()
            yield pa.record_batch({"k": [2]})

        with pytest.raises(EngineError, match=r"^this session was closed while it ran; start another"):
            list(session.run(source()))


def test_what_runs_is_not_pickled() -> None:
    with counting().run(pa.table({"k": [1]})) as run, pytest.raises(TypeError, match="ship the flow"):
        pickle.dumps(run)


def test_two_runs_beside_each_other() -> None:
    table = pa.table({"k": list(range(1_000)) * 3})
    results: list[Any] = []
    pair = [threading.Thread(target=lambda: results.append(rows(counting().run(table, 2)))) for _ in range(2)]
    for thread in pair:
        thread.start()
    for thread in pair:
        thread.join()
    assert results == [[(k, 3) for k in range(1_000)]] * 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_a_forked_child_is_told(tmp_path: Path) -> None:
    with counting().start(workers=2) as session:
        child = os.fork()
        if child == 0:
            try:
                session.stats()
            except ForkError:
                os._exit(7)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert rows(session.run(pa.table({"k": [4]}))) == [(4, 1)]


def test_an_interrupt_that_leaves_a_run_ends_it_at_once() -> None:
    code = """
import pyarrow as pa, penstock as pk
def source():
    n = 0
    while True:
        n += 1
        if n == 50:
            print("running", flush=True)
        yield pa.record_batch({"k": [n % 7] * 1000})
flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="final")
try:
    for batch in flow.run(source(), workers=2):
        pass
except KeyboardInterrupt:
    pass  # until here the run could go on
import os
print("threads", len(os.listdir("/proc/self/task")))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "running\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=60) == 0  # what it reads has no end
        assert int(child.stdout.read().split()[1]) < 6


_LEFT = """
import time
import penstock as pk, pyarrow as pa

rows = pa.table({"k": range(2_000)})
counts = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="update")
def slow(state, k):
    time.sleep(0.001)
    return 1, (k,)
mapped = pk.Flow("k bigint").key_by("k").stateful_map(slow, schema="k bigint")
steps = [pk.ordered.partitioned(lambda state, x: (state, [x]), key=lambda x: x)]
"""


@pytest.mark.parametrize(
    "left",
    [
        "run = counts.run(rows)",
        "session = counts.start(workers=2); run = session.run(rows)",
        "session = counts.start(processes=1)",
        "run = counts.run(rows, streaming=True, batch_rows=10, workers=2); next(run)",
        "run = mapped.run([rows] * 3, streaming=True, batch_rows=100, workers=2); next(run)",
        "run = mapped.run(rows, streaming=True, batch_rows=100, processes=2); next(run)",
        "run = pk.Pipeline(steps).run([1, 2])",
    ],
)
def test_a_program_ends_whatever_runs_it_leaves(left: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{_LEFT}\n{left}\nraise SystemExit(7)"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (7, "")


def busy_of(flow: pk.Flow, source: Any, rows: int) -> dict[int, float]:
    """Seconds that each of 256 bins kept two workers busy."""
    with flow.start(workers=2) as session:
        list(session.run(source))
        told = session.loads()
    assert sum(told.column("rows").to_pylist()) == pytest.approx(rows, rel=0.05)
    return dict(zip(told.column("bin").to_pylist(), told.column("busy_s").to_pylist(), strict=True))


def bin_of(key: int) -> int:
    hashed = _native.hash_columns(pa.record_batch({"k": pa.array([key], pa.int64())}), ["k"])
    number: int = pa.record_batch(hashed).column(0).to_pylist()[0] >> 56
    return number


def test_what_functions_take_is_that_of_the_bins_of_their_keys() -> None:
    def slow(total: int | None, k: int) -> tuple[int, None]:
        time.sleep(0.01 if k == 3 else 0.0)
        return (total or 0) + 1, None

    def frames(key: tuple[int], parts: Iterator[Any], state: Any) -> Iterator[Any]:
        time.sleep(0.1 if key[0] == 3 else 0.0)
        yield from ()

    def expired(state: Any, at: int, value: int, k: int) -> Any:
        time.sleep(0.1 if k == 3 else 0.0)
        return state, None

    def timed(state: Any, k: int) -> Any:
        return 1, None, (0, 1)

    keys = pa.table({"k": [key for key in range(40) for _ in range(10)]})
    plain = pk.Flow("k bigint").key_by("k")
    stamped = pk.Flow("k bigint, ts bigint", event_time="ts").key_by("k")
    group = plain.apply_in_pandas_with_state(frames, "k bigint", "n bigint")
    timer = stamped.stateful_map(timed, schema="k bigint", columns=["k"], on_timer=expired)
    for flow, source in (
        (plain.stateful_map(slow, schema="k bigint"), keys),
        (group, keys),
        (timer, keys.append_column("ts", [[1] * 400])),
    ):
        busy = busy_of(flow, source, 400)
        assert busy[bin_of(3)] >= 0.1, flow
        others = sum(seconds for number, seconds in busy.items() if number != bin_of(3))
        assert others > 0.0, "the rest is shared by rows"


def test_a_row_of_a_join_that_meets_many_counts_as_them() -> None:
    left, right = pk.Flow("k bigint, a bigint", name="l"), pk.Flow("k bigint, b bigint", name="r")
    flow = left.join(right, on="k")
    keys = [key for key in range(200) for _ in range(10)]
    hot = [3] * 400
    source = {
        "l": pa.table({"k": keys + hot, "a": [1] * (len(keys) + len(hot))}),
        "r": pa.table({"k": keys, "b": [1] * len(keys)}),
    }
    busy = busy_of(flow, source, 2 * len(keys) + len(hot))
    # 4,400 rows, 20,000 pairs of equal keys, and 4,000 more.
    assert busy[bin_of(3)] / sum(busy.values()) == pytest.approx((420 + 4_100) / 28_400, rel=0.3)
