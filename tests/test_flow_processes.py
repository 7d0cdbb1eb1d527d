"""Flows on processes that join and leave while rows pass: the results are those of one process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from penstock._crew import MOST_PROCESSES, spread
from penstock.errors import ConfigError, EngineError, UserFunctionError, WorkerLost

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


def _sorted(results: Any) -> _Rows:
    return sorted(tuple(row.values()) for batch in results for row in batch.to_pylist())


def _between(source: list[pa.RecordBatch], run: list[Any], changes: dict[int, int]) -> Iterator[pa.RecordBatch]:
    """The batches; before some of them a rescale is asked for, and the next ones pass while it is under way."""
    handles: list[Any] = []
    for number, batch in enumerate(source):
        if number in changes:
            handles.append(run[0].rescale(changes[number]))
        yield batch
    for handle in handles:
        handle.wait(60)


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
    "without keys": lambda: pk.Flow(_COLUMNS).map_batches(lambda batch: batch.slice(0, batch.num_rows // 2)),
}


@pytest.mark.parametrize("name", _FLOWS)
def test_streams_are_exact(name: str) -> None:
    flow, source = _FLOWS[name](), _keys(24)
    got = _rescaled(flow, source, {6: 3, 15: 1}, streaming=True)
    assert got == _sorted(flow.run(source, streaming=True))


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
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


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
