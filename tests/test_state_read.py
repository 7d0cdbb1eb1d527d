"""What a checkpoint holds, as tables: files of this version stay readable, and what is wrong with others is named."""

from __future__ import annotations

import ast
import collections
import csv
import datetime
import decimal
import io
import json
import pickle
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import types
import uuid
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import penstock as pk
from examples_support import examples
from penstock import _native, _storage, _values, errors, state
from penstock._functions.state import BinState
from penstock._storage import Entry, open_storage
from penstock.cli import main
from penstock.cli.state import _table
from penstock.spark._engine.program import _operator
from penstock.spark._engine.query import Query

KEPT = Path(__file__).with_name("data") / "checkpoint-v1"
#: Of an engine: tests/spark/test_engine_state.py.
ENGINE = KEPT.with_name("checkpoint-v1-engine")
STEPS = KEPT.with_name("checkpoint-v1-steps")
AGG, WINDOWS, TOP, FUNCTION = "agg", "agg-2", "top", "stateful_map"


def numbers(batch: int) -> range:
    """The rows of all batches up to one, see rust/cluster/examples/checkpoint.rs."""
    return range((batch + 1) * 10)


def name(n: int) -> str | None:
    return f"k{n % 7}" if n % 5 else None


def at(ms: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(ms / 1000, datetime.timezone.utc)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkpoint that may be damaged."""
    return Path(shutil.copytree(KEPT, tmp_path / "copy"))


def only(folder: Path, pattern: str) -> Path:
    [found] = folder.glob(pattern)
    return found


# What was written by version 1


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_an_aggregate_of_version_1_has_a_row_per_key(batch: int) -> None:
    groups = collections.defaultdict(list)
    for n in numbers(batch):
        groups[name(n)].append(100 + n)
    expected = {
        key: {"name": key, "n": len(all_), "total": sum(all_), "mean": sum(all_) / len(all_), "last": key}
        for key, all_ in groups.items()
    }
    found = state.read(KEPT, AGG, batch)
    assert {row["name"]: row for row in found.to_pylist()} == expected and found.num_rows == len(expected)
    assert found.schema.types == [pa.string(), pa.int64(), pa.int64(), pa.float64(), pa.string()]


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_a_windowed_aggregate_of_version_1_has_a_row_per_key_and_open_window(batch: int) -> None:
    watermark = (batch * 10 + 4) * 1000
    windows = collections.defaultdict(list)
    for n in numbers(batch):
        last = n * 1000 // 5000 * 5000
        for start in (last - 5000, last):
            if start + 10_000 > watermark:
                windows[start, n % 3].append(100 + n)
    expected = [
        {"window_start": at(start), "window_end": at(start + 10_000), "auction": key, "n": len(all_), "low": min(all_)}
        for (start, key), all_ in windows.items()
    ]
    found = state.read(KEPT, WINDOWS, batch).to_pylist()
    order = ["window_start", "auction"]
    assert sorted(found, key=lambda row: [row[k] for k in order]) == sorted(
        expected, key=lambda row: [row[k] for k in order]
    )


def test_a_top_of_version_1_has_its_rows() -> None:
    found = state.read(KEPT, TOP, 2)
    assert found.column_names == ["window_start", "window_end", "name", "auction", "price", "at"]
    assert sorted(found["price"].to_pylist()) == [128, 129], "the windows before have fired"
    assert sorted(state.read(KEPT, TOP, 0)["price"].to_pylist()) == [108, 109]


def test_values_of_a_function_of_version_1_are_read_without_running_code() -> None:
    rows = {row["auction"]: row for row in state.read(KEPT, FUNCTION).to_pylist()}
    assert sorted(rows) == [1, 2, 3], "key 0 is gone"
    assert rows[1] == {"auction": 1, "value": "(1, 2)", "bytes": 9, "readable": True, "problem": None}
    assert rows[3]["value"] is None and not rows[3]["readable"] and rows[3]["bytes"] > 20
    assert "made by no_where.Class, which runs code: unpickle=True" in rows[3]["problem"]
    trusted = {row["auction"]: row for row in state.read(KEPT, FUNCTION, unpickle=True).to_pylist()}
    assert trusted[2] == rows[2] and "No module named 'no_where'" in trusted[3]["problem"]
    assert len(state.read(KEPT, FUNCTION, 0)) == 4


def test_what_an_engine_of_version_1_has_written_stays_readable() -> None:
    """Rows (n % 7, n), 600 a batch: their sums by a function, then numbers and greatest sums."""
    assert state.manifests(ENGINE)["batch"].to_pylist() == [0, 1, 2]
    for batch in range(3):
        groups = {k: range(k, (batch + 1) * 600, 7) for k in range(7)}
        counts = state.read(ENGINE, "agg", batch).to_pylist()
        assert {row["k"]: (row["n"], row["most"]) for row in counts} == {k: (len(g), sum(g)) for k, g in groups.items()}
        values = state.read(ENGINE, "stateful_map", batch).to_pylist()
        assert {row["k"]: row["value"] for row in values} == {k: str(sum(g)) for k, g in groups.items()}
        assert all(row["readable"] for row in values)


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_other_steps_of_an_engine_of_version_1_stay_readable(batch: int) -> None:
    """Rows (n % 7, n), 60 a batch, n is the time in ms, two of four bins are split after the first; the end follows."""
    rows, ended = range((batch + 1) * 60), batch == 2
    own = {k: [n for n in rows if n % 7 == k] for k in range(7)}
    watermark = rows[-1]

    def read(step: str) -> list[dict[str, Any]]:
        found = state.read(STEPS, step, batch)
        assert "readable" not in found.column_names or found["readable"].to_pylist() == [True] * found.num_rows
        return found.to_pylist()

    def by_key(step: str, of: str = "value") -> dict[int, Any]:
        return {row["k"]: ast.literal_eval(row[of]) if of == "value" else row[of] for row in read(step)}

    counts = {k: len(group) for k, group in own.items()}
    assert {row["k"]: row["value"]["n"] for row in read("groups")} == counts
    assert sorted(row["k"] for row in read("first")) == list(range(7))
    sketches = {row["k"]: (row["n"], row["middle"]) for row in read("sketches")}
    assert sketches.keys() == own.keys()
    for k, (n, middle) in sketches.items():
        assert n == pytest.approx(counts[k], rel=0.6) and middle == pytest.approx(watermark / 2, rel=0.3), k
    timers = by_key("timers")
    assert {k: n for k, (n, _, _) in timers.items()} == counts
    due = {k: {(n + 70, n) for n in group if n + 70 >= watermark and not ended} for k, group in own.items()}
    assert {k: {(time // 1000, n) for time, _, n in waiting} for k, (_, _, waiting) in timers.items()} == due
    if ended:
        assert read("sums") == read("sessions") == read("near") == []
        return
    start = watermark // 50 * 50
    assert by_key("sums") == {k: {(start, start + 50): sum(n for n in group if n >= start)} for k, group in own.items()}
    sessions = {row["k"]: (row["window_start"], row["n"]) for row in read("sessions")}
    late = {k: [n for n in group if n >= 60 * batch + 20] for k, group in own.items()}
    assert sessions == {k: (group[0], len(group)) for k, group in late.items()}
    sides = {side: {row[side]["v"] for row in read("near") if row["side"] == side} for side in ("left", "right")}
    assert sides == {"left": {*range(watermark - 7, watermark + 1)}, "right": {watermark}}, "who may still meet"


def test_manifests_and_operators_of_other_steps_of_version_1() -> None:
    found = state.manifests(STEPS)
    assert found["batch"].to_pylist() == [0, 1, 2, 2] and found["problem"].null_count == 4
    assert found["finished"].to_pylist() == [False, False, False, True]
    assert found["serves"].to_pylist() == [True, True, False, True]
    told = state.operators(STEPS)
    kinds = ["stateful_map", "group_state", "agg", "aggregate", "distinct", "join", "agg"]
    assert told["kind"].to_pylist() == kinds and min(told["bytes"].to_pylist()) > 0
    assert state.read(STEPS, "join", limit=3).equals(state.read(STEPS, told["name"][5].as_py(), limit=3))
    with pytest.raises(errors.ConfigError, match="no operator 'stateful'"):
        state.read(STEPS, "stateful")


def test_manifests_and_operators_of_version_1() -> None:
    found = state.manifests(KEPT)
    assert found["batch"].to_pylist() == [0, 1, 2] and found["serves"].to_pylist() == [True] * 3
    assert found["files"].to_pylist() == [2, 4, 3] and found["problem"].null_count == 3
    assert found["watermark"].to_pylist() == [at(4_000), at(14_000), at(24_000)]
    assert found["clock"].to_pylist()[0] == at(1_700_000_000_000)
    sizes = [sum(len(file.read_bytes()) for file in KEPT.glob(f"data-*-{b:020}-?")) for b in range(2)]
    assert found["bytes"].to_pylist()[:2] == [sizes[0], sum(sizes)]
    told = state.operators(KEPT)
    assert told["name"].to_pylist() == [AGG, WINDOWS, TOP, FUNCTION]
    assert told["types"].to_pylist()[0] == "Utf8 -> count, sum(Int64), mean(Int64), max(Utf8) with updates"
    assert min(told["bytes"].to_pylist()) > 0 and min(told["segments"].to_pylist()) > 0


def test_what_is_written_now_is_of_version_1() -> None:
    """The kept manifests name operators as this release does: another one would be refused by them."""
    flow = pk.Flow("name string, auction bigint, price bigint, at timestamp", event_time="at")
    keyed = flow.key_by("name").agg(
        n=pk.count(), total=pk.sum("price"), mean=pk.mean("price"), last=pk.max("name"), emit="update"
    )
    facts = _native.plan_check(keyed.to_plan(streaming=True)[0])["operators"]
    assert [(one["name"], one["types"], one["version"]) for one in facts] == [
        (AGG, state.operators(KEPT)["types"].to_pylist()[0], 1)
    ]


def _facts(flow: pk.Flow) -> Any:
    """What a manifest would say of the keyed steps of a flow."""
    plan, calls = flow.to_plan(streaming=True)
    return [_operator(one, calls) for one in _native.plan_check(plan)["operators"]]


def test_windows_say_in_which_state_they_are() -> None:
    """Of rows that are kept, and of partial results of a function: a flow with others begins anew."""

    class Last(pk.Aggregator):
        def create(self) -> int:
            return 0

        def accumulate(self, states: list[Any], groups: pa.Int64Array, rows: pa.RecordBatch) -> list[Any]:
            return states

        def merge(self, state: Any, other: Any) -> Any:
            return other

        def finish(self, states: list[Any]) -> Any:
            return {"n": states}

    schema = "k bigint, p bigint, a timestamp, b timestamp"

    def top(window: pk.Window, time: str = "a") -> Any:
        return _facts(pk.Flow(schema, event_time=time).window(window).top(1, by="p", per="window"))

    ten = top(pk.tumbling("10s"))
    assert ten == top(pk.tumbling("10s")) and "; windows of 10 s every 10 s by column" in ten[0]["types"]
    others = [pk.tumbling("20s"), pk.sliding("10s", every="5s"), pk.tumbling("10s", offset="1s")]
    assert all(ten != top(window) for window in others) and ten != top(pk.tumbling("10s"), "b")

    def last(time: str) -> Any:
        flow = pk.Flow(f"k bigint, t {time}", event_time="t").key_by("k").window(pk.tumbling("10s"))
        return _facts(flow.aggregate(Last(), schema="n bigint"))

    assert last("timestamp") == last("timestamp_ntz") != last("bigint")


def test_our_folder_in_sparks_location_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(KEPT, tmp_path / "_penstock")
    (tmp_path / "offsets").mkdir()
    expected = state.read(KEPT, AGG)
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path, tmp_path / "_penstock", f"file://{tmp_path}", f"{tmp_path}/", "_penstock", "."):
        assert state.read(place, AGG).equals(expected)


@pytest.fixture
def both(copy: Path) -> Path:
    """A folder with the states of two queries: it is ``checkpoint=`` of one and Spark's location of the other."""
    shutil.copytree(ENGINE, copy / "_penstock")
    return copy


def test_a_folder_with_the_state_of_two_queries_is_refused(
    both: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(both)
    for place in (both, f"{both}/", f"file://{both}", "."):
        for ask in (state.read, state.operators, state.manifests):
            with pytest.raises(errors.ConfigError, match="two queries have state here") as caught:
                ask(place)
            assert f"{both}/_penstock for" in str(caught.value) and f"{both}/. for" in str(caught.value)
    code, _, err = run(capsys, both)
    assert code == 2 and "two queries have state here" in err
    for outer in (f"{both}/.", f"file://{both}/."):
        assert state.operators(outer).equals(state.operators(KEPT))
        assert state.read(outer, AGG, 1).equals(state.read(KEPT, AGG, 1))
    for inner in (both / "_penstock", f"file://{both}/_penstock", "_penstock"):
        assert state.operators(inner).equals(state.operators(ENGINE))
    for file in both.glob("manifest-*"):
        file.unlink()
    assert state.operators(both).equals(state.operators(ENGINE))
    with pytest.raises(errors.ConfigError, match="an engine has claimed this checkpoint"):
        state.operators(f"{both}/.")
    only(both, "claim-*").unlink()
    with pytest.raises(errors.ConfigError, match="no state of penstock in this folder: name"):
        state.operators(f"{both}/.")


def test_an_engine_shows_the_state_of_its_own_query(both: Path) -> None:
    """It knows the folder; the state of another query in it is not its own."""

    def shown(folder: Path) -> pa.Table:
        query: Any = types.SimpleNamespace(
            storage=open_storage(str(folder)), _stream=types.SimpleNamespace(committed=lambda: 2), name="q", id="7"
        )
        return Query.state(query, AGG)

    assert shown(both).equals(state.read(KEPT, AGG, 2))
    assert shown(both / "_penstock").equals(state.read(ENGINE, AGG, 2))
    for file in both.glob("manifest-*"):
        file.unlink()
    with pytest.raises(errors.ConfigError, match="has not committed a batch yet"):
        shown(both)


def test_a_batch_may_be_a_number_of_numpys() -> None:
    one = np.int64(1)
    assert state.read(KEPT, AGG, one).equals(state.read(KEPT, AGG, 1))
    assert state.operators(KEPT, one).equals(state.operators(KEPT, 1))
    assert len(state.read(KEPT, AGG, limit=one)) == 1
    bad: Any
    for bad in (True, 1.0, "1"):
        for ask in (lambda: state.read(KEPT, AGG, bad), lambda: state.operators(KEPT, bad)):  # noqa: B023
            with pytest.raises(errors.ConfigError) as caught:
                ask()
            assert str(caught.value).startswith(f"batch={bad!r}: the number of a batch is an int"), caught.value
    with pytest.raises(errors.ConfigError, match="no state of batch -1, only of 0, 1, 2"):
        state.read(KEPT, AGG, np.int64(-1))


def test_a_limit_reads_so_many_rows() -> None:
    assert [len(state.read(KEPT, AGG, limit=limit)) for limit in (1, 3, 100)] == [1, 3, 8]
    for bad in (0, -1, True, "2"):
        with pytest.raises(errors.ConfigError, match="give a number of rows"):
            state.read(KEPT, AGG, limit=bad)  # type: ignore[arg-type]


# What is wrong is named


def test_no_checkpoint_batch_or_operator(tmp_path: Path, copy: Path) -> None:
    for place in (tmp_path / "none", tmp_path, only(KEPT, "claim-*")):
        with pytest.raises(errors.ConfigError, match="there is no state of penstock"):
            state.read(place)
    with pytest.raises(errors.ConfigError, match="of batch 7, only of 0, 1, 2"):
        state.read(KEPT, AGG, 7)
    with pytest.raises(errors.ConfigError, match=r"no operator 'sum', only 'agg', 'agg-2'"):
        state.read(KEPT, "sum")
    with pytest.raises(errors.ConfigError, match="several operators have state, say which one"):
        state.read(KEPT)
    for manifest in copy.glob("manifest-*"):
        manifest.unlink()
    with pytest.raises(errors.ConfigError, match="an engine has claimed this checkpoint"):
        state.manifests(copy)
    with pytest.raises(errors.ConfigError, match="give the path"):
        state.read("")
    with pytest.raises(errors.ConfigError, match="checkpoint is a NoneType: give the path or URL"):
        state.read(None)  # type: ignore[arg-type]


def test_a_damaged_manifest_hides_its_batch_only(copy: Path) -> None:
    newest = only(copy, f"manifest-{2:020}-*")
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-40])
    with pytest.raises(errors.StorageError, match=rf"{newest.name} has .* batches that can be read: 0, 1"):
        state.read(copy, AGG)
    told = state.manifests(copy)
    assert told["serves"].to_pylist() == [True, True, False] and "bytes" in told["problem"].to_pylist()[2]
    assert state.read(copy, AGG, 1).equals(state.read(KEPT, AGG, 1))
    newest.write_bytes(whole[:8] + struct.pack("<H", 9) + whole[10:])
    with pytest.raises(errors.StorageError, match="version 9; this release reads up to 1"):
        state.read(copy, AGG)


def test_of_several_damaged_manifests_the_one_that_hides_the_batch_is_named(copy: Path) -> None:
    newest = only(copy, f"manifest-{2:020}-*")
    batch, generation, nonce = newest.name.removeprefix("manifest-").split("-")

    def attempt(by: int) -> Path:
        return newest.with_name(f"manifest-{batch}-{int(generation) + by:020}-{nonce}")

    attempt(-1).write_bytes(b"torn")
    assert state.read(copy, AGG).equals(state.read(KEPT, AGG)), "an attempt before it came to nothing"
    newest.write_bytes(newest.read_bytes()[:-3])
    for damaged in (newest, attempt(1)):
        if not damaged.exists():
            damaged.write_bytes(b"torn")
        with pytest.raises(errors.StorageError, match=rf"file {damaged.name} .*: put back the file; .* read: 0, 1"):
            state.read(copy, AGG)
        told = json.loads(_native.checkpoint_manifests([(file.name, file.read_bytes()) for file in copy.iterdir()]))
        assert told["hidden"] == {"2": damaged.name} and sorted(told["serving"]) == ["0", "1"]
    assert state.manifests(copy)["serves"].to_pylist() == [True, True, False, False, False]


def test_a_missing_torn_or_changed_data_file_is_named(copy: Path) -> None:
    file = only(copy, f"data-*-{2:020}-0")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(errors.StorageError, match=f"{file.name} has .* bytes where its manifest says"):
        state.read(copy, AGG)
    file.write_bytes(whole[:30] + bytes([whole[30] ^ 1]) + whole[31:])
    with pytest.raises(errors.StorageError, match=f"{file.name} has checksum"):
        state.read(copy, AGG)
    file.write_bytes(whole[:8] + struct.pack("<H", 2) + whole[10:])
    with pytest.raises(errors.StorageError, match=f"{file.name} has version 2; .* use the release that wrote it"):
        state.operators(copy)
    file.unlink()
    with pytest.raises(errors.StorageError, match=f"{file.name} of batch 2 is missing"):
        state.read(copy, AGG)
    assert state.read(copy, AGG, 1).equals(state.read(KEPT, AGG, 1)), "another batch has no part of it"


def test_a_store_that_fails_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock import _storage

    read = _storage._Folder.read

    def failing(self: Any, name: str, offset: int = 0, length: int | None = None) -> bytes:
        if name.startswith("data-"):
            raise OSError("the cable is out")
        return read(self, name, offset, length)

    monkeypatch.setattr(_storage._Folder, "read", failing)
    with pytest.raises(errors.StorageError, match=r"file data-.* cannot be read: the cable is out") as caught:
        state.read(KEPT, AGG)
    assert isinstance(caught.value.__cause__, OSError)


def write(manifest: Path, told: dict[str, Any]) -> None:
    body = json.dumps(told).encode()
    framed = b"penstock" + struct.pack("<H", 1) + body + struct.pack("<Q", len(body))
    manifest.write_bytes(framed + struct.pack("<I", zlib.crc32(framed)))


def test_the_watermark_of_a_manifest_is_that_of_the_flow(copy: Path) -> None:
    """Older releases leave it out; else a source that has not come, or is idle, has none or another one."""
    manifest = only(copy, f"manifest-{0:020}-*")
    told = json.loads(manifest.read_bytes()[10:-12])
    for more, watermark in (
        ({"watermarks": [7_000_000, None]}, at(7_000)),
        ({"watermarks": [7_000_000, None], "watermark": None}, None),
        ({"watermarks": [7_000_000, 1_000_000], "watermark": 7_000_000}, at(7_000)),
        ({"watermarks": [None], "watermark": None}, None),
    ):
        write(manifest, told | more)
        assert state.manifests(copy)["watermark"][0].as_py() == watermark


def test_a_manifest_under_another_name_is_told(copy: Path) -> None:
    newest = only(copy, f"manifest-{2:020}-*")
    own = newest.name
    # Another nonce, and another batch.
    for name in (f"{own[:-4]}beef", own.replace(f"{2:020}", f"{7:020}", 1)):
        renamed = newest.rename(copy / name)
        for read in (state.operators, state.read):
            with pytest.raises(errors.StorageError, match=rf"file {name} has the content of {own}.* read: 0, 1$"):
                read(copy)
        told = state.manifests(copy).to_pylist()[-1]
        assert (told["name"], told["serves"]) == (name, False) and own in told["problem"]
        assert state.read(copy, AGG, 1).equals(state.read(KEPT, AGG, 1))
        newest = renamed.rename(copy / own)
    shutil.copy(newest, copy / name)
    assert state.read(copy, AGG, 2).equals(state.read(KEPT, AGG, 2)), "the copy is of batch 7, and hides none"


def test_what_is_named_like_a_manifest_only_is_none(copy: Path) -> None:
    newest = only(copy, f"manifest-{2:020}-*")
    for name in (
        f"manifest-{'9' * 20}-{1:020}-{0:016x}",
        f"manifest-{1 << 63:020}-{1:020}-{0:016x}",
        f"manifest-{9:020}-{'9' * 20}-{0:016x}",
        f"{newest.name.replace(f'{2:020}', f'{9:020}', 1)}.bak",
    ):
        shutil.copy(newest, copy / name)
        assert state.manifests(copy).equals(state.manifests(KEPT))
        assert state.operators(copy).equals(state.operators(KEPT))
    with pytest.raises(errors.ConfigError, match="of batch 9, only of 0, 1, 2"):
        state.read(copy, AGG, 9)


def test_a_manifest_that_was_never_written_is_not_the_newest(copy: Path) -> None:
    """Its driver died, on a store that shows files from when they are opened."""
    newest = only(copy, f"manifest-{2:020}-*")
    empty = copy / newest.name.replace(f"{2:020}", f"{3:020}", 1)
    empty.write_bytes(b"")
    assert state.read(copy, AGG).equals(state.read(KEPT, AGG))
    with pytest.raises(errors.StorageError, match=rf"file {empty.name} has 0 bytes .* read: 0, 1, 2"):
        state.read(copy, AGG, 3)
    empty.unlink()
    end = copy / newest.name.replace(f"{2:020}", f"{2:020}-finished", 1)
    end.write_bytes(b"")
    assert state.read(copy, AGG).equals(state.read(KEPT, AGG)), "finish() broke off"
    told = state.manifests(copy).to_pylist()[-2:]
    assert [(one["finished"], one["serves"]) for one in told] == [(False, True), (True, False)]
    for file in copy.glob("manifest-*"):
        file.write_bytes(b"")
    with pytest.raises(errors.StorageError, match="batches that can be read: none"):
        state.read(copy, AGG)


def test_a_manifest_that_goes_while_it_is_read_is_told(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = only(copy, f"manifest-{2:020}-*").name
    listed = _storage._Folder.list
    monkeypatch.setattr(
        _storage._Folder,
        "list",
        lambda self: [*listed(self), Entry(newest.replace(f"{2:020}", f"{3:020}", 1), 9)],
    )
    with pytest.raises(errors.StorageError, match=rf"file manifest-{3:020}.* was deleted while it was read: try again"):
        state.read(f"{copy}/.", AGG)
    assert state.read(f"{copy}/.", AGG, 2).equals(state.read(f"{KEPT}/.", AGG, 2))


def test_of_many_manifests_that_of_the_batch_is_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _storage._Folder.read
    seen: list[str] = []

    def read(self: Any, name: str, offset: int = 0, length: int | None = None) -> bytes:
        seen.extend([name] if name.startswith("manifest-") else [])
        return whole(self, name, offset, length)

    monkeypatch.setattr(_storage._Folder, "read", read)
    for batch in (None, 0, 1):
        seen.clear()
        assert state.read(copy, AGG, batch).num_rows and state.operators(copy, batch).num_rows
        assert seen == [only(copy, f"manifest-{2 if batch is None else batch:020}-*").name] * 2
    seen.clear()
    assert state.manifests(copy).num_rows == len(seen) == 3


def fields(told: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in JSON."""
    if path:
        yield path
    if isinstance(told, (dict, list)):
        for name, one in told.items() if isinstance(told, dict) else enumerate(told):
            yield from fields(one, (*path, name))


#: What somebody may write by hand.
WRITTEN: list[Any] = [None, -1, 0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1.5, True]
WRITTEN += ["", "x", "\u00e9", "{}", "[]", [], {}, [[]], "\x00"]


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_a_field_that_was_changed_by_hand_is_an_error_of_ours(data: st.DataObject) -> None:
    """With checksums that are right: what is read is a table, or what is wrong is told."""
    source = data.draw(st.sampled_from([KEPT, ENGINE, STEPS / "_penstock"]))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(shutil.copytree(source, Path(folder) / "copy"))
        manifest = data.draw(st.sampled_from(sorted(place.glob("manifest-*"))))
        told = json.loads(manifest.read_bytes()[10:-12])
        names = [one["name"] for one in told["plan"]["operators"]]
        operator = data.draw(st.sampled_from([None, *range(len(names))]))
        changed = told if operator is None else json.loads(told["plan"]["operators"][operator]["columns"])
        *above, last = data.draw(st.sampled_from(list(fields(changed))))
        parent = changed
        for step in above:
            parent = parent[step]
        parent[last] = data.draw(st.sampled_from(WRITTEN))
        if operator is not None:
            told["plan"]["operators"][operator]["columns"] = json.dumps(changed)
        write(manifest, told)
        batch = int(manifest.name.split("-")[1])
        for read in (
            partial(state.manifests, place),
            partial(state.operators, place, batch),
            *(partial(state.read, place, name, batch) for name in names),
        ):
            with suppress(errors.PenstockError):
                assert read().num_rows >= 0


@pytest.mark.parametrize("schema", ["x", 1, {}, "\u00e9", "[]"])
def test_a_schema_that_is_none_is_told_with_its_operator(copy: Path, schema: Any) -> None:
    newest = only(copy, f"manifest-{2:020}-*")
    told = json.loads(newest.read_bytes()[10:-12])
    [operator] = (one for one in told["plan"]["operators"] if one["name"] == FUNCTION)
    operator["columns"] = json.dumps(json.loads(operator["columns"]) | {"state": schema})
    write(newest, told)
    with pytest.raises(errors.StateError):
        state.read(copy, FUNCTION)


def test_a_length_that_no_file_has_is_told(copy: Path) -> None:
    newest = only(copy, f"manifest-{2:020}-*")
    told = json.loads(newest.read_bytes()[10:-12])
    for file in told["files"]:
        file["length"] = (1 << 63) - 1
    write(newest, told)
    assert state.manifests(copy)["bytes"][2].as_py() == (1 << 63) - 1
    told["files"][0]["length"] += 1
    write(newest, told)
    assert f"nothing counts to {1 << 63}" in state.manifests(copy)["problem"][2].as_py()


def test_a_newer_kind_of_operator_is_refused(copy: Path) -> None:
    newest = only(copy, f"manifest-{2:020}-*")
    told = json.loads(newest.read_bytes()[10:-12])
    told["plan"]["operators"][0]["columns"] = '{"keys":"","holds":"sketch"}'
    told["plan"]["operators"][2]["columns"] = ""
    write(newest, told)
    with pytest.raises(errors.StateError, match="not known to this release"):
        state.read(copy, AGG)
    with pytest.raises(errors.StateError, match="does not say what columns"):
        state.read(copy, TOP)
    assert state.read(copy, WINDOWS).equals(state.read(KEPT, WINDOWS))


# Values of functions


_ran: list[str] = []


def _run(word: str) -> None:
    _ran.append(word)


class _Ran:
    """Its pickle runs code."""

    def __reduce__(self) -> Any:
        return _run, ("ran",)


def shown(keys: pa.Schema, entries: list[tuple[bytes, bytes]], *, unpickle: bool = False, schema: Any = None) -> Any:
    from penstock._flow.text import encode

    values = _values.Values(keys, None if schema is None else encode(schema), unpickle)
    block = pa.record_batch({"key": pa.array([k for k, _ in entries], pa.binary()), "value": [v for _, v in entries]})
    return values.table(block).to_pylist()


def changes(states: dict[Any, Any]) -> list[tuple[bytes, bytes]]:
    kept = BinState()
    kept.states.update(states)
    return [(key, value) for part in kept.changes() for _, key, value in part if value is not None]


class _Leaves:
    """Ends who makes it."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


def test_what_cannot_be_read_is_named_and_all_else_is_there() -> None:
    keys = pa.schema([("k", pa.int64())])
    lone = b"\x80\x04\x8c\x02no\x8c\x05C" + "\udcff".encode("utf-8", "surrogatepass") + b"x\x93."
    entries = [(pickle.dumps(1), lone), (pickle.dumps(2), pickle.dumps(_Leaves())), (pickle.dumps(3), pickle.dumps(7))]
    for unpickle in (False, True):
        rows = shown(keys, [*entries, (pickle.dumps(4), pickle.dumps(Path("a\udcff")))], unpickle=unpickle)
        assert [row["readable"] for row in rows] == [False, False, True, unpickle], rows
        assert [row["k"] for row in rows] == [1, 2, 3, 4]
    assert rows[3]["value"] == "PosixPath('a\\udcff')" and "SystemExit: 3" in rows[1]["problem"]


def test_builtin_values_are_shown_and_no_code_is_run() -> None:
    plain = {
        1: [1, {"a": (2.5, None)}],
        2: collections.deque([1], maxlen=3),
        3: datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
        4: {1, 2},
        5: datetime.datetime(2024, 1, 2, tzinfo=ZoneInfo("UTC")),
    }
    keys = pa.schema([("k", pa.int64())])
    rows = shown(keys, changes(plain))
    assert [row["value"] for row in rows] == [repr(value) for value in plain.values()]
    _ran.clear()
    entries = [(pickle.dumps(1), pickle.dumps(_Ran())), (pickle.dumps(_Ran()), pickle.dumps(7))]
    rows = shown(keys, entries)
    assert _ran == [] and [row["readable"] for row in rows] == [False, False]
    assert rows[1]["k"] is None and rows[1]["value"] == "7" and "the key of bytes b'" in rows[1]["problem"]
    shown(keys, entries[:1], unpickle=True)
    assert _ran == ["ran"]
    # `getattr` is how time zones are pickled, and makes nothing else.
    [row] = shown(keys, [(pickle.dumps(1), pickle.dumps(ZoneInfo.clear_cache))])
    assert not row["readable"] and "builtins.getattr, which runs code" in row["problem"], row


PLAIN: list[Any] = [
    collections.Counter("aab"),
    collections.Counter({"a": 1, "b": 2.5}),
    collections.OrderedDict([("a", 1), ("b", (2,))]),
    collections.deque([1, [2]], maxlen=3),
    collections.deque(),
    frozenset({1}),
    {frozenset({(1, 2)}): set()},
    complex(1, -2),
    decimal.Decimal("1.50"),
    datetime.date(2024, 2, 29),
    datetime.time(1, 2, tzinfo=datetime.timezone.utc),
    datetime.timedelta(days=1, microseconds=3),
    datetime.datetime(2024, 7, 2, tzinfo=ZoneInfo("Europe/Berlin")),
    datetime.timezone(datetime.timedelta(hours=-5), "EST"),
    uuid.UUID(int=7),
    uuid.UUID(int=7, is_safe=uuid.SafeUUID.safe),
    uuid.SafeUUID.unsafe,
    [(), (1,), [], {}, set(), {"a": {"b": None}}, b"\x00'", "'\n"],
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_are_shown_as_python_shows_them(value: Any) -> None:
    again = [value, (value, {1: value})]
    for protocol in (4, 5):
        bodies = [pickle.dumps(one, protocol) for one in (value, again)]
        rows = shown(pa.schema([("k", pa.int64())]), [(pickle.dumps(1), body) for body in bodies])
        assert [row["value"] for row in rows] == [repr(value), repr(again)], rows
        assert [row["readable"] for row in rows] == [True, True]


def named(module: str, name: str) -> bytes:
    """A pickle's beginning that gets what a module has by a name."""
    return b"\x80\x02c" + f"{module}\n{name}\n".encode()


def built(made: bytes) -> bytes:
    """A pickle that sets ``__init__`` of what the one given makes, in both ways that there are."""
    return made + b"N}X\x08\x00\x00\x00__init__cbuiltins\nset\ns\x86b."


ZONE = named("builtins", "getattr") + b"czoneinfo\nZoneInfo\nX\x09\x00\x00\x00_unpickle\x86R"
SHARED = {
    **{f"{module}.{name}": named(module, name) for module, names in sorted(_values._PLAIN.items()) for name in names},
    "a member of an enum": named("uuid", "SafeUUID") + b"K\x00\x85R",
    "a method": ZONE,
    "a zone": ZONE + b"X\x03\x00\x00\x00UTCK\x01\x86R",
    "UTC": named("datetime", "timezone") + b"cdatetime\ntimedelta\n)R\x85R",
}


def test_a_pickle_changes_nothing_of_this_process() -> None:
    """In a process of its own first, which those may change that are not refused."""
    program = """if True:
        import collections, datetime, sys, uuid
        from zoneinfo import ZoneInfo
        from penstock import state
        classes = [collections.Counter, collections.OrderedDict, collections.deque, uuid.UUID, uuid.SafeUUID, ZoneInfo]
        functions = [one for name, one in vars(state).items() if callable(one) and name != "_stand_in"]
        shared = [one for one in (*classes, *uuid.SafeUUID, *functions) if hasattr(one, "__dict__")]
        before = [dict(vars(one)) for one in shared]
        for pickled in sys.argv[1:]:
            try:
                _values._load_plain(bytes.fromhex(pickled))
            except Exception:
                pass
        changed = [one for one, was in zip(shared, before) if dict(vars(one)) != was]
        assert not changed, changed
        assert collections.Counter("aab") == {"a": 2, "b": 1} and uuid.SafeUUID(0) is uuid.SafeUUID.safe
    """
    pickles = [built(made).hex() for made in SHARED.values()]
    found = subprocess.run([sys.executable, "-c", program, *pickles], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    for what, made in SHARED.items():
        [row] = shown(pa.schema([("k", pa.int64())]), [(pickle.dumps(1), built(made))])
        assert not row["readable"] and row["value"] is None, (what, row)
        # Those two have no attributes that could be set.
        told = "AttributeError" if what in ("a zone", "UTC") else "sets attributes of"
        assert told in row["problem"], (what, row)
        assert told == "AttributeError" or "unpickle=True if you trust who wrote it" in row["problem"]
    assert shown(pa.schema([("k", pa.int64())]), changes({1: collections.Counter("aab")}))[0]["readable"]


def test_what_others_have_loaded_by_number_is_not_taken() -> None:
    import copyreg

    copyreg.add_extension(__name__, "_run", 240)
    try:
        body = pickle.dumps(_Ran(), 2)
        assert b"\x82\xf0" in body
        pickle.loads(body)
        _ran.clear()
        [row] = shown(pa.schema([("k", pa.int64())]), [(pickle.dumps(1), body)])
        assert _ran == [] and "which runs code" in row["problem"], row
    finally:
        copyreg.remove_extension(__name__, "_run", 240)


def doubled(levels: int) -> Any:
    """A value whose text doubles with each level."""
    value: Any = ()
    for _ in range(levels):
        value = (value, value)
    return value


def test_the_text_of_a_value_is_bounded() -> None:
    keys = pa.schema([("k", pa.int64())])
    tangle: list[Any] = [[] for _ in range(12)]
    for one in tangle:
        one.extend(tangle)  # its text has a part for each path through it
    word = "a word that many rows have" * 100
    for value in (doubled(24), doubled(200), [word] * 5_000, {"a": [doubled(60)], "b": 1}, tangle):
        for unpickle in (False, True):
            body = pickle.dumps(value, 5)
            [row] = shown(keys, [(pickle.dumps(1), body)], unpickle=unpickle)
            most = 4_096 + 64 * len(body)
            assert len(row["value"]) == most + 3 and row["value"].endswith("...")
            assert not row["readable"] and row["bytes"] == len(body)
            assert f"its text, more than {most:,} characters from {len(body):,} bytes, is cut" in row["problem"]
    [row] = shown(keys, [(pickle.dumps(1), pickle.dumps(doubled(10), 5))])
    assert row["value"] == repr(doubled(10)) and row["readable"]


def test_a_value_may_be_nested_to_any_depth() -> None:
    keys = pa.schema([("k", pa.int64())])
    depth = 50_000
    for begin, item, end in ((b"", b"\x85", ",)"), (b"]" * depth, b"a", "]")):
        body = b"\x80\x05" + begin + (b")" if not begin else b"]") + item * depth + b"."
        for unpickle in (False, True):
            [row] = shown(keys, [(pickle.dumps(1), body)], unpickle=unpickle)
            assert row["readable"] and row["problem"] is None, row["problem"]
            assert len(row["value"]) == depth * (1 + len(end)) + 2 and row["value"].endswith(end * depth)
    tail: list[Any] = [1]
    tail.append({"self": tail})
    [row] = shown(keys, [(pickle.dumps(1), pickle.dumps(tail, 5))])
    assert row["value"] == repr(tail) == "[1, {'self': [...]}]" and row["readable"]


def test_keys_and_states_of_groups_that_become_far_more_are_refused() -> None:
    """Errors about them have their text, and columns have their parts as often."""
    kind: pa.DataType = pa.list_(pa.int64())
    value: Any = [1] * 4
    for _ in range(24):
        value, kind = [value, value], pa.list_(kind)
    schema = pa.schema([("n", pa.int64())])
    good = pickle.dumps(1, 5)
    for key in ((doubled(40),), value):
        [row] = shown(pa.schema([("k", pa.int64())]), [(pickle.dumps(key, 5), good)])
        assert row["k"] is None and not row["readable"] and "characters as text from" in row["problem"], row
    for fields, of in (((doubled(40),), schema), ((value,), pa.schema([("n", kind)]))):
        [row] = shown(pa.schema([("k", pa.int64())]), [(good, pickle.dumps((fields, None), 5))], schema=of)
        assert row["value"] is None and not row["readable"] and "characters as text from" in row["problem"], row
    [row] = shown(pa.schema([("k", pa.int64())]), [(good, pickle.dumps(((1,), "later"), 5))], schema=schema)
    assert row["value"] is None and row["timeout_ms"] is None and "later" in row["problem"], row
    [row] = shown(pa.schema([("k", pa.int64())]), [(pickle.dumps("x" * 100_000, 5), good)])
    assert len(row["problem"]) < 2_000


def test_rows_of_a_block_are_made_in_pieces() -> None:
    """A column of a block would not hold the text of them all."""
    bodies = [pickle.dumps(one, 5) for one in [doubled(24)] * 100_000] + [pickle.dumps("x" * 2_000_000, 5), b"N."]
    block = pa.record_batch({"key": pa.array([pickle.dumps(1)] * len(bodies), pa.binary()), "value": bodies})
    pieces = list(state._pieces(block))
    assert pa.Table.from_batches(pieces).equals(pa.Table.from_batches([block]))
    for piece in pieces:
        sizes = [len(body.as_py()) for body in piece["value"]]
        assert sum(4_096 + 64 * size for size in sizes[:-1]) < 1 << 26
    assert len(pieces) > 10 and list(state._pieces(block.slice(0, 0))) == []


atoms = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary())
frozen = st.recursive(atoms, lambda of: st.one_of(st.tuples(of, of), st.tuples(of), st.frozensets(of)), max_leaves=5)
values = st.recursive(
    st.one_of(frozen, st.sets(frozen)),
    lambda of: st.one_of(
        st.lists(of),
        st.dictionaries(frozen, of),
        st.builds(collections.deque, st.lists(of), st.none() | st.integers(0, 9)),
        st.builds(collections.OrderedDict, st.dictionaries(frozen, of)),
        st.builds(collections.Counter, st.dictionaries(frozen, st.integers())),
    ),
    max_leaves=20,
)


@given(values, st.integers(0, 200))
def test_text_is_what_repr_says(value: Any, most: int) -> None:
    text = repr(value)
    assert _values._text(value, len(text)) == (text, True)
    assert _values._text(value, most) == (text[:most], len(text) <= most)


def test_numbers_of_thousands_of_digits_are_shown_in_hexadecimal() -> None:
    """Python refuses to write them in decimal, and the whole value could not be read."""
    keys, number = pa.schema([("k", pa.int64())]), 10**5_000
    for value, text in (
        (number, hex(number)),
        (-number, hex(-number)),
        ([1, number], f"[1, {hex(number)}]"),
        ({number: "a", "b": (number,)}, f"{{{hex(number)}: 'a', 'b': ({hex(number)},)}}"),
        (10**4_000, str(10**4_000)),
    ):
        [row] = shown(keys, [(pickle.dumps(1), pickle.dumps(value, 5))])
        assert row["value"] == text and row["readable"] and row["problem"] is None, row["problem"]
        assert _values._text(value, 100) == (text[:100], False)
    [row] = shown(keys, [(pickle.dumps(number), pickle.dumps(1))])
    assert row["k"] is None and row["value"] == "1" and row["problem"].startswith("the key of bytes "), row


def test_keys_with_timestamps_of_rows_are_shown() -> None:
    at = pa.array([1_704_153_600_000_000], pa.timestamp("us", "UTC"))
    [row] = shown(pa.schema([("at", at.type), ("k", pa.int64())]), changes({(at[0].as_py(), 7): 1}))
    assert row["readable"] and (row["at"], row["k"]) == (at[0].as_py(), 7), row


def test_keys_of_several_columns_and_names_that_are_taken() -> None:
    keys = pa.schema([("value", pa.string()), ("day", pa.date32())])
    day = datetime.date(2024, 2, 29)
    [row, broken] = shown(keys, [*changes({("a", day): 1}), (pickle.dumps(("a",)), pickle.dumps(2))])
    assert row == {"value": "a", "day": day, "value_": "1", "bytes": 5, "readable": True, "problem": None}
    assert not broken["readable"] and "it has 1 columns" in broken["problem"] and broken["value_"] == "2"


def test_states_of_groups_are_typed() -> None:
    keys = pa.schema([("k", pa.int64())])
    schema = pa.schema([("n", pa.int32()), ("seen", pa.list_(pa.string()))])
    rows = shown(keys, changes({(1,): ((3, ["a"]), 5000), (2,): (None, 7)}), schema=schema)
    assert [(row["k"], row["value"], row["timeout_ms"]) for row in rows] == [
        (1, {"n": 3, "seen": ["a"]}, 5000),
        (2, None, 7),
    ]
    [wrong] = shown(keys, changes({(1,): (("x", []), None)}), schema=schema)
    assert not wrong["readable"] and wrong["value"] is None


# The command


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = main(["state", *map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_the_command_shows_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = run(capsys, KEPT)
    assert (code, err) == (0, "")
    for word in ("Manifests", "Operators", AGG, WINDOWS, FUNCTION, "window_start", "2023-11-14 22:13:22+00:00"):
        assert word in out
    code, out, _ = run(capsys, KEPT, "--operator", AGG, "--limit", 2)
    assert code == 0 and f"{AGG}, the first 2" in out and "window_start" not in out


@pytest.mark.parametrize("folder", [KEPT, ENGINE])
@pytest.mark.parametrize("columns", [40, 60, 80, 100])
def test_the_command_cuts_no_word(
    folder: Path, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run(capsys, folder, "--limit", 2)
    lines = out.splitlines()
    assert code == 0 and max(map(len, lines)) <= columns
    manifests = state.manifests(folder)
    clocks = [f"{one.as_py():%H:%M:%S}" for one in manifests["clock"]]
    words = {"batch", "serves", "claim", "clock", "late", "files", "bytes", "version", "segments", *clocks}
    assert words <= set(re.split(r"[^\w:-]+", re.sub(r"\.\d+", "", out))), "whole words"
    assert "generation" not in out and "finished" not in out, "nothing of what no manifest has"
    if columns >= 80:
        shown = lines[: lines.index(next(line for line in lines if line.startswith("Operators")))]
        assert len(shown) <= 10, "a line for each manifest"


def test_a_title_is_one_line_over_a_narrow_table() -> None:
    out = io.StringIO()
    _table(Console(width=120, file=out), "first, the first 20", pa.table({"k": [3, 4]}))
    assert out.getvalue().splitlines()[0] == "first, the first 20"


def test_the_command_writes_rows(capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    expected = state.read(KEPT, WINDOWS)
    assert main(["state", str(KEPT), "--operator", WINDOWS, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capfdbinary.readouterr().out.decode())))
    assert [int(row["low"]) for row in rows] == expected["low"].to_pylist()
    assert main(["state", str(KEPT), "--operator", AGG, "--format", "json", "--batch", "1"]) == 0
    lines = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert lines == state.read(KEPT, AGG, 1).to_pylist()
    file = tmp_path / "rows.parquet"
    assert main(["state", str(KEPT), "--operator", WINDOWS, "--format", "parquet", "--output", str(file)]) == 0
    assert pq.read_table(file).equals(expected)


def test_the_command_goes_on_without_standard_output() -> None:
    for more in ([], ["--operator", AGG, "--format", "json"], ["--operator", AGG, "--format", "csv"]):
        command = shlex.join([sys.executable, "-m", "penstock.cli", "state", str(KEPT), *more])
        done = subprocess.run(["sh", "-c", f"{command} >&-"], stderr=subprocess.PIPE, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_store_that_cannot_be_reached_is_no_wrong_usage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyarrow import fs

    def unreachable(url: str) -> Any:
        raise OSError("network connection: curlCode: 6, could not resolve host")

    monkeypatch.setattr(fs, "FileSystem", types.SimpleNamespace(from_uri=unreachable))
    code, out, err = run(capsys, "s3://bucket/checkpoint")
    assert (code, out) == (1, "") and "cannot be opened: network connection" in err
    assert run(capsys, "ftp://bucket/checkpoint")[0] == 2


def test_the_command_writes_values_of_any_type(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {
        "bytes": pa.array([b"\xff\x00,"]),
        "fixed": pa.array([b"ab"], pa.binary(2)),
        "view": pa.array(["a"], pa.string_view()),
        "nan": pa.array([float("nan")]),
        "floats": pa.array([[float("inf"), -float("inf"), 1.5]]),
        "end": pa.array([END], pa.timestamp("us", "UTC")),
    }
    monkeypatch.setattr(state, "read", lambda *_, **__: pa.table(columns))
    assert main(["state", str(KEPT), "--operator", AGG, "--format", "json"]) == 0
    (line,) = capfdbinary.readouterr().out.splitlines()

    def none(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    assert json.loads(line, parse_constant=none) == {
        "bytes": "ff002c",
        "fixed": "6162",
        "view": "a",
        "nan": "NaN",
        "floats": ["Infinity", "-Infinity", 1.5],
        "end": END,
    }
    assert main(["state", str(KEPT), "--operator", AGG, "--format", "csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capfdbinary.readouterr().out.decode()))
    assert (row["bytes"], row["fixed"], row["view"]) == ("ff002c", "6162", "a")
    assert json.loads(row["floats"]) == ["Infinity", "-Infinity", 1.5]
    assert main(["state", str(KEPT), "--operator", AGG]) == 0
    assert b"253402300800000000" in capfdbinary.readouterr().out


#: Microseconds behind the last year of Python.
END = 253_402_300_800_000_000


def test_the_command_writes_times_that_python_has_none_for_as_numbers(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also within others: the command failed. The other times of their column are as always."""
    time, zoned = pa.timestamp("us"), pa.timestamp("us", "UTC")
    columns = {
        "list": pa.array([[END, 0, None], None], pa.list_(zoned)),
        "fixed": pa.array([[END], [0]], pa.list_(time, 1)),
        "struct": pa.array([{"a": END, "b": [-END]}, {"a": 0, "b": None}], pa.struct({"a": time, "b": pa.list_(time)})),
        "map": pa.array([[("k", END)], [("k", 0)]], pa.map_(pa.string(), time)),
        "time": pa.array([END, 0], time),
        "zoned": pa.array([1, 2**63 - 1], zoned),
        "day": pa.array([None, 2**31 - 1], pa.int32()).view(pa.date32()),
        "good": pa.array([0, None], zoned),
    }
    monkeypatch.setattr(state, "read", lambda *_, **__: pa.table(columns))
    assert main(["state", str(KEPT), "--operator", AGG, "--format", "json"]) == 0
    first, second = map(json.loads, capfdbinary.readouterr().out.splitlines())
    day, clock = "1970-01-01T00:00:00", "1970-01-01T00:00:00+00:00"
    assert first == {
        "list": [END, clock, None],
        "fixed": [END],
        "struct": {"a": END, "b": [-END]},
        "map": [["k", END]],
        "time": END,
        "zoned": "1970-01-01T00:00:00.000001+00:00",
        "day": None,
        "good": clock,
    }
    assert second == {
        "list": None,
        "fixed": [day],
        "struct": {"a": day, "b": None},
        "map": [["k", day]],
        "time": day,
        "zoned": 2**63 - 1,
        "day": 2**31 - 1,
        "good": None,
    }
    assert main(["state", str(KEPT), "--operator", AGG, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capfdbinary.readouterr().out.decode())))
    for row, told in zip(rows, (first, second), strict=True):
        nested = {name: json.loads(row[name] or "null") for name in ("list", "fixed", "struct", "map")}
        assert nested == {name: told[name] for name in nested}
    flat = [[row[name] for name in ("time", "zoned", "day", "good")] for row in rows]
    assert flat == [
        [str(END), "1970-01-01 00:00:00.000001Z", "", "1970-01-01 00:00:00.000000Z"],
        ["1970-01-01 00:00:00.000000", str(2**63 - 1), str(2**31 - 1), ""],
    ]
    assert main(["state", str(KEPT), "--operator", AGG]) == 0
    shown = capfdbinary.readouterr().out.decode()
    assert shown.count(str(END)) == 6 and str(2**63 - 1) in shown and str(2**31 - 1) in shown


def test_the_command_wraps_nothing_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    code, out, _ = run(capsys, KEPT, "--operator", AGG)
    assert code == 0 and "watermark" in out and "2023-11-14 22:13:22+00:00" in out


def test_the_command_shows_of_a_damaged_checkpoint_what_can_be_read(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in [file for file in copy.iterdir() if not file.name.startswith(("manifest-", "claim-"))]:
        file.unlink()
    code, out, err = run(capsys, copy)
    assert code == 1 and "Manifests" in out and "Operators" not in out and "is missing" in err


@pytest.mark.parametrize(
    ("arguments", "named", "code"),
    [
        (["--limit", "0"], "--limit 0", 2),
        (["--batch", "x"], "--batch x", 2),
        (["--batch", "9"], "only of 0, 1, 2", 2),
        (["--format", "parquet"], "--output FILE", 2),
        (["--output", "x.csv"], "--format csv", 2),
        (["--format", "csv"], "say which", 2),
        (["--operator", "none"], "no operator 'none'", 2),
    ],
)
def test_the_command_refuses(arguments: list[str], named: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    got, out, err = run(capsys, KEPT, *arguments)
    assert got == code and named in err and err.count("\n") == 1 and not out
