"""Flows on processes that join and leave while rows pass: the results are those of one process."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import penstock as pk
from engine_support import Gate, wait_for
from penstock._children import Child, Pipe
from penstock._crew import MOST_PROCESSES, Crew, _Member, _packed, spread
from penstock._loads import Loads
from penstock._parts import Parts
from penstock.errors import ConfigError, EngineError, UserFunctionError, WorkerLost

# Processes get the functions here, and need not import what this file does: that takes seconds.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

_Rows = list[tuple[Any, ...]]

_COLUMNS = "k bigint, v bigint, t timestamp"


def _keys(batches: int = 40, rows: int = 500) -> list[pa.RecordBatch]:
    def batch(number: int) -> pa.RecordBatch:
        numbers = range(number * rows, (number + 1) * rows)
        return pa.record_batch(
            {
                "k": pa.array([n * 7919 % 211 for n in numbers], pa.int64()),
                "v": pa.array(numbers, pa.int64()),
                "t": pa.array([n * 1_000_000 // 50 for n in numbers], pa.timestamp("us", "UTC")),
            }
        )

    return [batch(number) for number in range(batches)]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of all processes are waited for; users get those that there are after a second."""
    monkeypatch.setattr("penstock._crew._ANSWER", 60.0)


def _sorted(results: Any) -> _Rows:
    return sorted(tuple(row.values()) for batch in results for row in batch.to_pylist())


def _between(source: list[pa.RecordBatch], run: list[Any], changes: dict[int, int]) -> Iterator[pa.RecordBatch]:
    """The batches; before some of them a rescale is asked for, and the next ones pass while it is under way."""
    handle: Any = None
    for number, batch in enumerate(source):
        if number in changes:
            if handle is not None:
                assert handle.wait(60) == handle.workers
            handle = run[0].rescale(changes[number])
        yield batch
    assert handle.wait(60) == handle.workers


def _rescaled(flow: Any, source: list[pa.RecordBatch], changes: dict[int, int], **options: Any) -> _Rows:
    run: list[Any] = []
    with flow.run(_between(source, run, changes), processes=2, **options) as results:
        run.append(results)
        return _sorted(results)


def test_counts_are_exact_while_processes_come_and_go() -> None:
    flow = pk.Flow(_COLUMNS).key_by("k").agg(n=pk.count(), s=pk.sum("v"))
    source = _keys()
    assert _rescaled(flow, source, {10: 4, 25: 2}) == _sorted(flow.run(source))


def _running(total: int | None, k: int, v: int) -> tuple[int, tuple[int, int, int]]:
    # Not commutative: rows out of order would show.
    total = ((total or 0) * 31 + v) % 1_000_003
    return total, (k, v, total)


def _timed(state: int | None, k: int, v: int) -> tuple[int, tuple[int, str, int], tuple[int, int]]:
    total = (state or 0) + v
    return total, (k, "row", total), (v + 700, v)


def _on_timer(state: int | None, time: int, value: int, k: int) -> tuple[int, tuple[int, str, int]]:
    total = (state or 0) * 3 % 1_000_003 + value
    return total, (k, "timer", total)


def _some(k: int, v: int) -> Iterator[tuple[int, int]]:
    yield from ((k, v + number) for number in range(v % 4))


def _halves(batch: pa.RecordBatch) -> pa.RecordBatch:
    half = pc.divide(batch["v"], 2)
    return pa.record_batch({"k": batch["k"], "v": half, "again": pc.greater(half, 100)})


def _expanded() -> Any:
    return pk.Flow("k bigint, v bigint").flat_map(_some, rows=True)


_EXPANDS: dict[str, Callable[[], Any]] = {
    "flat maps": _expanded,
    "flat maps before keys": lambda: _expanded().key_by("k").agg(n=pk.count(), s=pk.sum("v")),
    "flat maps behind keys": lambda: (
        pk.Flow("k bigint, v bigint")
        .key_by("k")
        .stateful_map(_running, schema="k bigint, v bigint, total bigint")
        .flat_map(lambda k, v, total: [(k, total)] * (v % 3), "k bigint, v bigint", rows=True)
    ),
    "bounded parts": lambda: pk.Flow("k bigint, v bigint").bounded(
        lambda part: part.flat_map(_some, rows=True).flat_map(_some, rows=True), batches=2, batch_size=50
    ),
    "loops": lambda: (
        pk.Flow("k bigint, v bigint")
        .iterate(lambda part: part.map_batches(_halves, "k bigint, v bigint, again boolean"))
        .key_by("k")
        .agg(n=pk.count(), s=pk.sum("v"))
    ),
}

_FLOWS: dict[str, Callable[[], Any]] = {
    "updates": lambda: pk.Flow(_COLUMNS).key_by("k").agg(n=pk.count(), s=pk.sum("v")),
    "windows": lambda: (
        pk.Flow(_COLUMNS, event_time="t", lateness="1s")
        .key_by("k")
        .window(pk.tumbling("10s"))
        .agg(n=pk.count(), s=pk.sum("v"))
    ),
    "functions with state": lambda: (
        pk.Flow(_COLUMNS)
        .key_by("k")
        .stateful_map(_running, schema="k bigint, v bigint, total bigint", columns=["k", "v"])
    ),
    # By row numbers as milliseconds.
    "timers": lambda: (
        pk.Flow(_COLUMNS, event_time="v", lateness="100ms")
        .key_by("k")
        .stateful_map(_timed, schema="k bigint, what string, total bigint", columns=["k", "v"], on_timer=_on_timer)
    ),
    "without keys": lambda: pk.Flow(_COLUMNS).map_batches(lambda batch: batch.slice(0, batch.num_rows // 2)),
}


@pytest.mark.parametrize("name", _FLOWS)
def test_streams_are_exact(name: str) -> None:
    flow, source = _FLOWS[name](), _keys(24, 250)
    got = _rescaled(flow, source, {6: 3, 15: 1}, streaming=True)
    assert got == _sorted(flow.run(source, streaming=True))


@pytest.mark.parametrize("name", ["updates", "windows", "functions with state"])
def test_streams_are_exact_where_epochs_are_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flow, source = _FLOWS[name](), _keys(24, 250)
    plain = _sorted(flow.run(source, streaming=True))
    monkeypatch.setattr("penstock._local._BLOCK_ROWS", 40)
    assert _rescaled(flow, source, {6: 3, 15: 1}, streaming=True) == plain


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", _EXPANDS)
def test_what_expands_and_goes_around_is_exact(name: str, streaming: bool) -> None:
    flow, source = _EXPANDS[name](), [batch.select(["k", "v"]) for batch in _keys(16, 200)]
    got = _rescaled(flow, source, {4: 3, 10: 1}, streaming=streaming)
    assert got == _sorted(flow.run(source, streaming=streaming))
    assert len(got) > 200


def test_counts_are_exact_while_it_grows_and_shrinks_again_and_again() -> None:
    flow = _FLOWS["functions with state"]()
    source = _keys(40, 200)
    got = _rescaled(flow, source, {4: 1, 10: 3, 18: 1, 26: 2, 32: 3}, streaming=True, workers=2)
    assert got == _sorted(flow.run(source, streaming=True))


def _weighty(state: bytes | None, k: int, v: int) -> tuple[bytes, tuple[int, int]]:
    seen = v if state is None else int.from_bytes(state[:8], "little") * 31 % 1_000_003 + v
    return seen.to_bytes(8, "little") + bytes(100_000), (k, seen)


@pytest.mark.usefixtures("patient")
def test_state_beyond_what_may_be_under_way_moves() -> None:
    flow = pk.Flow("k bigint, v bigint").key_by("k").stateful_map(_weighty, schema="k bigint, seen bigint")
    source = [batch.select(["k", "v"]) for batch in _keys(12, 211)]
    with flow.start(processes=1, streaming=True) as session:
        handles: list[Any] = []

        def fed() -> Iterator[pa.RecordBatch]:
            yield from source[:4]
            for processes, part in ((2, source[4:8]), (1, source[8:])):
                handles.append(session.rescale(processes))
                yield from part
                handles[-1].wait(60)

        got = _sorted(session.run(fed()))
        moves = session.moves()
    assert got == _sorted(flow.run(source, streaming=True))
    # More than the 8 MiB that a worker has under way, one way and back.
    sent = pc.sum(moves.filter(pc.equal(moves["what"], "state"))["bytes"]).as_py()
    assert sent > 16 << 20
    assert [handle.report.bins for handle in handles] == [128, 128]


def _drawn(path: str) -> Callable[[pa.RecordBatch], Iterator[pa.RecordBatch]]:
    """A megabyte at a time; a file has how many were made and how many have been taken, and the most between both."""

    def draw(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 24) as counts:
            for at in range(batch["n"][0].as_py()):
                made, taken, most = struct.unpack("<QQQ", counts[:])
                counts[:8] = struct.pack("<Q", made + 1)
                counts[16:] = struct.pack("<Q", max(most, made + 1 - taken))
                yield pa.record_batch({"at": pa.array([at]), "data": pa.array([bytes([at % 251]) * (1 << 20)])})

    return draw


def test_a_surge_in_a_process_waits_for_who_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    path.write_bytes(bytes(24))
    flow = pk.Flow("n bigint").flat_map(_drawn(str(path)), "at bigint, data binary")
    total = 400
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 24) as counts:
        taken = 0
        for batch in flow.run(pa.table({"n": [total]}), processes=1):
            assert batch["at"].to_pylist() == list(range(taken, taken + batch.num_rows))
            taken += batch.num_rows
            counts[8:16] = struct.pack("<Q", taken)
        made, taken, most = struct.unpack("<QQQ", counts[:])
    assert (made, taken) == (total, total)
    # In the link, in the mailbox behind it once more, 8 MiB that wait to be taken, and on either side what is drawn
    # before there is seen to be no room: 80 to 129 in all, up to 159 where each process waits long for its turn.
    assert most < 64 + 64 + 8 + 2 * 32


def test_joins_are_exact() -> None:
    left, right = pk.Flow("k bigint, v bigint", name="left"), pk.Flow("k bigint, w bigint", name="right")
    flow = left.join(right, on="k")
    some = [batch.select(["k", "v"]) for batch in _keys(12, 100)]
    others = [pa.record_batch({"k": batch["k"], "w": batch["v"]}) for batch in some[:6]]
    run: list[Any] = []
    with flow.run({"left": _between(some, run, {3: 3, 8: 1}), "right": others}, processes=2) as results:
        run.append(results)
        got = _sorted(results)
    assert got == _sorted(flow.run({"left": some, "right": others}))
    assert len(got) > 600


def test_late_rows_come_to_who_runs_the_flow() -> None:
    flow = _FLOWS["windows"]()
    source = _keys(12)
    source.append(source[0])  # late by far
    late: dict[str, list[pa.RecordBatch]] = {"one": [], "two": []}
    plain = _sorted(flow.run(source, streaming=True, late=late["one"].append))
    assert _rescaled(flow, source, {4: 3}, streaming=True, late=late["two"].append) == plain
    assert _sorted(late["two"]) == _sorted(late["one"])
    assert sum(batch.num_rows for batch in late["one"]) == 500


@pytest.mark.usefixtures("patient")
def test_the_figures_are_those_of_all_processes() -> None:
    flow = pk.Flow(_COLUMNS).key_by("k").agg(n=pk.count(), s=pk.sum("v"))
    source = _keys(16)
    with flow.start(workers=2, processes=2, streaming=True) as session:
        assert session._crew is not None
        pids = session._crew.processes
        run: list[Any] = [session]
        for _ in session.run(_between(source, run, {4: 3, 10: 2})):
            pass
        # It has ended, and tells how it was then.
        told, loads, moves = session.stats(), session.loads(), session.moves()
    assert told["worker"].to_pylist() == [0, 1, 2, 3, 4]
    assert told["pid"][0].as_py() == os.getpid()
    assert sorted(told["pid"].to_pylist()[1:]) == sorted(2 * pids)
    assert told["bins"].to_pylist() == [0, 64, 64, 64, 64]
    assert sum(told["keys"].to_pylist()) == 211
    assert min(told["state_bytes"].to_pylist()[1:]) > 0
    assert told["rows"][0].as_py() == 0
    assert 0 < sum(told["rows"].to_pylist()) < 16 * 500, "the third process was dealt the others, and has left"
    assert sum(loads["rows"].to_pylist()) > 16 * 500 * 3 // 4, "with what those routed that have left"
    assert {1, 2, 3, 4, 5, 6} <= set(moves["worker"].to_pylist())


def test_loads_of_all_that_have_left_are_kept_as_one() -> None:
    """They were a list that each look went through: a run that rescales for days told ever more slowly."""
    crew = Crew("", [], 1, 1)
    try:
        for number in range(5):
            told = {"rows": [number, 1], "rest_ns": 10, "part_rows": {"6": number}}
            crew._leave(cast(Any, SimpleNamespace(gone=False, figures={"loads": Loads([told])})))
        [left], _ = crew.stats()
        whole = Parts(1, {(0, 1): 0, (1, 1): 0})
        assert left["workers"] == [] and left["loads"].rows(whole) == {(0, 1): 10, (1, 1): 5}
        assert sum(left["loads"].busy_ns(whole).values()) == 50
    finally:
        crew.close()


@pytest.mark.usefixtures("patient")
def test_a_run_tells_its_figures_too() -> None:
    flow = pk.Flow(_COLUMNS).key_by("k").agg(n=pk.count())
    with flow.run(_keys(2), processes=1) as results:
        assert results.stats()["worker"].to_pylist() == [0, 1]
        list(results)
        assert results.stats()["rows"].to_pylist() == [0, 1_000]


@pytest.mark.usefixtures("patient")
def test_scopes_of_all_processes_are_told() -> None:
    with _expanded().start(processes=2) as session:
        rows = sum(batch.num_rows for batch in session.run([b.select(["k", "v"]) for b in _keys(4, 100)]))
        scopes = session.scopes()
    assert [scope.worker for scope in scopes] == [0, 1, 2]
    assert sum(scope.admitted_rows for scope in scopes) == rows == 600


@pytest.mark.usefixtures("patient")
def test_a_rescale_tells_how_far_it_is_and_what_it_took(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    flow = pk.Flow(_COLUMNS).map_batches(gate.loading()).key_by("k").agg(n=pk.count())
    with flow.run(_keys(), processes=1) as results:
        assert results.stats().num_rows == 2, "the first process has loaded what the next one waits for"
        gate.close()
        handle = results.rescale(3)
        assert (handle.workers, handle.progress.workers, handle.error) == (3, 3, None)
        with pytest.raises(EngineError, match=re.escape("rescale(2): the run goes to 3 processes just now")):
            results.rescale(2)
        gate.open()
        assert handle.wait(60) == 3
        assert handle.done
        assert (handle.progress.members, handle.progress.waits) == (3, ())
        assert repr(handle) == "<Rescale to 3 processes: done, 3 serve>"
        told = handle.report
        assert (told.before, told.after) == (1, 3)
        assert told.bins == handle.progress.moved == 170
        assert min(told.start_s, told.join_s, told.move_s) > 0
        assert told.start_s + told.join_s + told.move_s + told.leave_s <= told.seconds
        assert told.longest_pause_s <= told.move_s
        assert results.rescale(3).wait() == 3, "there is nothing to do"
        handle.cancel()
        assert len(_sorted(results)) == 211


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.usefixtures("patient")
def test_a_rescale_that_is_cancelled_goes_back(processes: int, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    plain = pk.Flow(_COLUMNS)
    flow, expected = (
        one.key_by("k").agg(n=pk.count(), s=pk.sum("v")) for one in (plain.map_batches(gate.loading()), plain)
    )
    source = _keys(20)
    with flow.start(processes=2, streaming=True) as session:
        ended: list[int] = []

        def fed() -> Iterator[pa.RecordBatch]:
            yield from source[:5]
            gate.close()
            handle = session.rescale(processes)
            handle.cancel()
            gate.open()
            yield from source[5:]
            ended.append(handle.wait(60))

        got = _sorted(session.run(fed()))
        assert session._crew is not None
        # One that was told to leave before it was cancelled has left.
        assert ended in ([2], [min(processes, 2)])
        bins = session.stats()["bins"].to_pylist()
    assert bins in ([0, 128, 128], [0, 256])
    assert got == _sorted(expected.run(source, streaming=True))


class _CancelledLate:
    """A native run whose first migration is told to its crew only when its rescale was cancelled, which is too late."""

    def __init__(self, native: Any, handles: list[Any]) -> None:
        self._native, self._handles = native, handles
        self._cancelled = False
        self._told: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def wait_migration(self, handle: int, timeout: float) -> Any:
        if self._cancelled:
            return self._told.pop() if self._told else self._native.wait_migration(handle, timeout)
        told = self._native.wait_migration(handle, timeout)
        if told is not None:
            self._told = [told]
            self._cancelled = True
            self._handles[0].cancel()
        return None


def test_a_rescale_that_is_cancelled_when_all_bins_have_moved_moves_them_back() -> None:
    flow = pk.Flow(_COLUMNS).key_by("k").agg(n=pk.count(), s=pk.sum("v"))
    source = _keys(12)
    with flow.start(processes=1, streaming=True) as session:
        handles: list[Any] = []
        crew = session._crew
        assert crew is not None
        pids = crew.processes

        def fed() -> Iterator[pa.RecordBatch]:
            yield from source[:4]
            crew._native = _CancelledLate(crew._native, handles)  # type: ignore[assignment]
            handles.append(session.rescale(3))
            yield from source[4:8]
            assert handles[0].wait(60) == 1
            assert crew.processes == pids
            # There, and back.
            assert handles[0].report.bins == 2 * 170
            yield from source[8:]

        got = _sorted(session.run(fed()))
    assert got == _sorted(flow.run(source, streaming=True))


@pytest.mark.parametrize("count", [0, -1, "two", True, 1.5, MOST_PROCESSES + 1])
def test_a_number_of_processes_that_cannot_be_is_refused(count: Any) -> None:
    flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
    text = f"the number of processes is an int from 1 to {MOST_PROCESSES}"
    with pytest.raises(ConfigError, match=re.escape(f"processes={count!r}: {text}")):
        flow.run(pa.table({"k": [1]}), processes=count)
    with flow.run(pa.table({"k": [1]})) as results, pytest.raises(ConfigError, match=re.escape(f"rescale({count!r})")):
        results.rescale(count)


def test_what_cannot_run_on_processes_is_refused_by_its_name() -> None:
    table = pa.table({"k": [1]})
    flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
    with flow.run(table) as results, pytest.raises(ConfigError, match="begin it with processes="):
        results.rescale(2)
    lock = threading.Lock()
    locked = pk.Flow("k bigint").map_batches(lambda batch: batch if lock.locked() else batch.slice(0))
    with pytest.raises(ConfigError, match="cannot be sent to other processes"):
        list(locked.run(table, processes=1))
    results = flow.run(table, processes=1)
    assert _sorted(results) == [(1, 1)]
    with pytest.raises(EngineError, match="the run has ended"):
        results.rescale(2)


def _breaks(batch: pa.RecordBatch) -> pa.RecordBatch:
    if 1_000 in batch["v"].to_pylist():
        raise ValueError("no thousand here")
    return batch


def test_an_error_in_a_process_is_the_error_of_the_run() -> None:
    flow = pk.Flow(_COLUMNS).map_batches(_breaks).key_by("k").agg(n=pk.count())
    with pytest.raises(UserFunctionError, match="no thousand here"):
        list(flow.run(_keys(8), processes=2))


def _exits(batch: pa.RecordBatch) -> pa.RecordBatch:
    sys.exit("no")


def test_an_exit_in_a_process_is_told() -> None:
    flow = pk.Flow("k bigint").map_batches(_exits).key_by("k").agg(n=pk.count())
    with pytest.raises(EngineError, match="SystemExit: no"):
        list(flow.run(pa.table({"k": [1, 2, 3]}), processes=1))


def test_more_workers_than_a_run_can_have_are_refused_at_once() -> None:
    flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
    with pytest.raises(
        ConfigError, match="processes=4 of 1024 threads: a run has at most 4095 workers, these are 4096"
    ):
        flow.run(pa.table({"k": [1]}), workers=1024, processes=4)


def test_an_interrupt_while_a_session_closes_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    session = pk.Flow("k bigint").key_by("k").agg(n=pk.count()).start(processes=2)
    pids = set(session.stats().column("pid").to_pylist()) - {os.getpid()}
    monkeypatch.setattr(session._crew, "stats", interrupted)
    with pytest.raises(KeyboardInterrupt), session:
        pass
    deadline = time.monotonic() + 30
    while not _gone(list(pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_session_that_nobody_closes_leaves_no_process() -> None:
    """Its thread kept it: processes, workers and sockets stayed until the interpreter ended."""
    # What others left is not for the child to collect: it may want threads and locks that are not there.
    gc.collect()
    gc.freeze()
    try:
        session = pk.Flow("k bigint").key_by("k").agg(n=pk.count()).start(processes=1, streaming=True)
        assert session._crew is not None
        native, thread, pids = session._native, session._crew._thread, session._crew.processes
        crew = weakref.ref(session._crew)
        child = os.fork()
        if child == 0:
            del session
            os._exit(0 if gc.collect() >= 0 else 1)
    finally:
        gc.unfreeze()
    ended: list[int] = []

    def has_ended() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.extend([status] if pid else [])
        return bool(ended)

    try:
        wait_for(has_ended, what="the child's end")
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert ended == [0]
    assert session.stats().num_rows == 2, "what a forked child drops is its copy"
    del session
    gc.collect()
    thread.join(30)
    assert not thread.is_alive() and _gone(pids)
    with pytest.raises(EngineError, match="is closed"):
        native.stats()
    wait_for(lambda: gc.collect() >= 0 and crew() is None, what="nothing holds it")


def test_a_process_that_dies_ends_the_run_with_its_name_and_leaves_nobody() -> None:
    flow = pk.Flow(_COLUMNS).key_by("k").agg(n=pk.count())
    source = _keys(8)
    with flow.start(processes=2) as session:
        assert session._crew is not None
        pids = session._crew.processes

        def fed() -> Iterator[pa.RecordBatch]:
            yield from source[:4]
            os.kill(pids[0], signal.SIGKILL)
            yield from source[4:]

        with pytest.raises(WorkerLost, match="process 1 was killed by SIGKILL"):
            list(session.run(fed()))
    assert _gone(pids)


def _gone(pids: list[int]) -> bool:
    def is_gone(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    return all(map(is_gone, pids))


def test_a_process_that_dies_before_it_takes_part_costs_its_rescale_alone(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    plain = pk.Flow(_COLUMNS)
    flow, expected = (
        one.key_by("k").agg(n=pk.count(), s=pk.sum("v")) for one in (plain.map_batches(gate.loading()), plain)
    )
    source = _keys(20)
    with flow.start(processes=2) as session:
        crew = session._crew
        assert crew is not None
        pids = crew.processes

        def fed() -> Iterator[pa.RecordBatch]:
            yield from source[:5]
            gate.close()
            handle = session.rescale(4)
            # Its workers are far from joining: it cannot load the flow.
            wait_for(lambda: len(crew.processes) > 2 and gate.reached.exists(), what="a new process loads")
            os.kill(crew.processes[2], signal.SIGKILL)
            gate.open()
            yield from source[5:]
            with pytest.raises(WorkerLost, match="process 3 was killed by SIGKILL before its workers had joined"):
                handle.wait(60)
            assert crew.processes == pids
            assert session.rescale(1).wait(60) == 1

        got = _sorted(session.run(fed()))
    assert got == _sorted(expected.run(source))
    assert _gone(pids)


def _dies_once_it_has_left(mark: str) -> _DiesOnceItHasLeft:
    """In a child, which asks its workers for figures without waiting once they have left, and only then."""
    from penstock import _native

    class Dies:
        def __init__(self, *job: Any) -> None:
            self._crew = made(*job)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._crew, name)

        def stats(self, patience: float) -> str:
            if patience == 0.0 and not Path(mark).exists():
                Path(mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return str(self._crew.stats(patience))

    made, _native.FlowCrew = _native.FlowCrew, Dies  # type: ignore[misc,assignment]
    return _DiesOnceItHasLeft(mark)


class _DiesOnceItHasLeft:
    """A step that changes nothing; the first process with it that leaves is killed before it can tell that it did."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    def __reduce__(self) -> Any:
        return _dies_once_it_has_left, (self.mark,)


def test_a_process_that_dies_once_it_has_left_costs_nothing(tmp_path: Path) -> None:
    plain = pk.Flow(_COLUMNS)
    flow, expected = (
        one.key_by("k").agg(n=pk.count(), s=pk.sum("v"))
        for one in (plain.map_batches(_DiesOnceItHasLeft(str(tmp_path / "mark"))), plain)
    )
    source = _keys(30)
    with flow.start(processes=2) as session:
        crew = session._crew
        assert crew is not None
        pids = crew.processes

        def fed() -> Iterator[pa.RecordBatch]:
            yield from source[:10]
            assert session.rescale(1).wait(60) == 1
            assert crew.processes == pids[:1] and _gone(pids[1:]) and (tmp_path / "mark").exists()
            yield from source[10:20]
            assert session.rescale(3).wait(60) == 3
            yield from source[20:]

        assert _sorted(session.run(fed())) == _sorted(expected.run(source))


def test_a_process_that_dies_during_a_rescale_ends_the_run_with_its_name(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    flow = pk.Flow(_COLUMNS).map_batches(gate.loading()).key_by("k").agg(n=pk.count())
    source = _keys(20)
    with flow.start(processes=2, streaming=True) as session:
        crew = session._crew
        assert crew is not None
        pids: list[int] = []
        handles: list[Any] = []

        def fed() -> Iterator[pa.RecordBatch]:
            yield from source[:5]
            gate.close()
            handles.append(session.rescale(3))
            wait_for(lambda: len(crew.processes) > 2 and gate.reached.exists(), what="a new process loads")
            pids.extend(crew.processes)
            os.kill(pids[1], signal.SIGKILL)
            yield from itertools.cycle(source)

        try:
            with pytest.raises(WorkerLost, match=r"process 2 was killed by SIGKILL$"):
                for _ in session.run(fed()):
                    pass
            with pytest.raises(EngineError):
                handles[0].wait(60)
        finally:
            gate.open()
    assert _gone(pids)


class _Ends:
    """A process that tells its last just before its parent sees that it has ended."""

    pid = 1

    def __init__(self, theirs: socket.socket, last: tuple[str, Any]) -> None:
        self._theirs, self._last = theirs, last

    def poll(self) -> int:
        if self._theirs.fileno() >= 0:
            Pipe(self._theirs).send(self._last)
            self._theirs.close()
        return 1

    def wait(self, timeout: float | None = None) -> int:
        return 1


@pytest.fixture
def last_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[tuple[str, Any]], Crew]]:
    """The crew of a process that tells something and ends."""
    crew = Crew("", [], 1, 1)

    def made(last: tuple[str, Any]) -> Crew:
        def begin(child: Any, module: str, entry: str) -> None:
            child.socket, theirs = socket.socketpair()
            child.popen = _Ends(theirs, last)

        monkeypatch.setattr(Child, "__init__", begin)
        member = _Member(1, 1)
        member.workers = [1]
        crew._members.append(member)
        for _ in range(2):
            crew._look()
        member.socket.close()
        return crew

    yield made
    crew.close()


def test_what_a_process_told_before_it_ended_is_why_the_run_fails(last_of: Callable[..., Crew]) -> None:
    """It was lost where the process ended while others were looked at."""
    crew = last_of(("failed", _packed(ValueError("the price of row 17 is negative"))))
    assert type(crew._cause) is ValueError and str(crew._cause) == "the price of row 17 is negative"


def test_the_loads_of_a_process_that_has_left_and_ended_count_on(last_of: Callable[..., Crew]) -> None:
    told = '{"workers": [], "moves": [], "loads": [{"rows": [3, 1], "rest_ns": 10}]}'
    crew = last_of(("left", told))
    assert crew._cause is None and crew.processes == []
    assert crew._loads.rows(Parts(1, {(0, 1): 0, (1, 1): 0})) == {(0, 1): 3, (1, 1): 1}


def test_a_rescale_that_meets_the_end_of_the_run_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has ended all rescales, and not itself."""
    passed, goes = threading.Event(), threading.Event()
    end_all = Crew._end_all

    def ends(crew: Crew) -> None:
        end_all(crew)
        passed.set()
        assert goes.wait(60)

    monkeypatch.setattr(Crew, "_end_all", ends)
    crew = Crew("", [], 1, 1)
    crew._closing = True
    crew._thread.start()
    try:
        assert passed.wait(60)
        with pytest.raises(EngineError, match="the run has ended, so its processes do not change any more"):
            crew.rescale(2).wait(5)
    finally:
        goes.set()
        crew.close()


_INTERRUPTED = """
import os, signal
import pyarrow as pa
import penstock as pk

def fed():
    yield pa.table({"k": [1, 2]})
    os.kill(os.getpid(), signal.SIGINT)
    yield pa.table({"k": [1, 3]})

run = pk.Flow("k bigint").key_by("k").agg(n=pk.count()).run(fed(), processes=2)
rows, interrupts = [], 0
while True:
    try:
        rows += [row for batch in run for row in batch.to_pylist()]
        break
    except KeyboardInterrupt:
        interrupts += 1
pids = run._pump._session._crew.processes
print(interrupts, sorted((row["k"], row["n"]) for row in rows))
for pid in pids:
    try:
        os.kill(pid, 0)
        print("left", pid)
    except ProcessLookupError:
        pass
"""


def test_after_an_interrupt_the_run_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("1 [(1, 2), (2, 1), (3, 1)]\n", 0), done.stderr


def test_few_moves_make_equal_shares() -> None:
    owners = [0] * 16
    for workers, most in [([1, 2], 16), ([1, 2, 3], 5), ([2, 3], 6), ([3, 7, 8, 9], 12), ([9], 12)]:
        moves = spread(owners, workers)
        assert len(moves) <= most
        for number, worker in moves:
            assert owners[number] != worker
            owners[number] = worker
        shares = [owners.count(worker) for worker in workers]
        assert sum(shares) == 16
        assert max(shares) - min(shares) <= 1
